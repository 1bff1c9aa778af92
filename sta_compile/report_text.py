"""How a report reads: the one line that is said aloud, and the table that a person prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any, TypeVar

from .ir.attention_spec import Triple
from .ir.trade import Trade
from .report import RefusedSite, ReplacedSite, Report, numbered

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Site = TypeVar("Site", ReplacedSite, RefusedSite)
WIDTH = 110
NOISE_UNKNOWN = (
    "the noise level is unknown, so every step stays dense: pass "
    'options={"noise": "0..1000"} (or what the timestep runs over), or dense_above=None'
)


def shape(value: Triple | None) -> str:
    """(21, 45, 80) -> "21x45x80"; None is a shape known only at run time."""
    return "any" if value is None else "x".join(map(str, value))


def percent(share: float) -> str:
    """0.0896 -> "9 %"; a share under 1 % keeps one digit."""
    return f"{share * 100:.0f} %" if share >= 0.01 or share == 0 else f"{share * 100:.1f} %"


def summarize(report: Report, part: bool = False) -> str:
    return "; ".join(filter(None, (_what_was_done(report, part), report.unfit_grid)))


def _what_was_done(report: Report, part: bool) -> str:
    if not report.replaced:
        where = f"a part of {report.name}" if part else report.name
        return f"sta: nothing was replaced in {where}: {_why_nothing(report)}"
    sites, total = report.replaced, report.self_attentions
    grids = list(dict.fromkeys(shape(site.grid) for site in sites))
    over = " and ".join(grids[:2]) + (f" and {len(grids) - 2} more" if len(grids) > 2 else "")
    over = "token grids known at run time" if grids == ["any"] else f"{over} tokens"
    regions = f" ({len(sites)} compiled)" if report.replacements > len(sites) else ""
    head = f"sta: {report.replacements} of {total} self-attentions{regions} over {over}"
    if all(site.exact for site in sites):
        why = next((site.why_exact for site in sites if site.why_exact), "")
        parts = [f"{head} keep every pair: exact" + (f" ({why})" if why else "")]
    elif any(site.precision == "tiered" for site in sites):
        inside = f"{_kept(sites)} in tiers at {_trade(report.settings)}"
        parts = [f"{head} read {inside}", _dense(report), 'precision="native" has no tiers']
    else:
        parts = [f"{head} keep {_kept(sites)}", _dense(report), 'window="full" is exact']
    refused = [site for site in report.refused if site.self_attention]
    if refused:
        left = sum(site.calls for site in refused)
        parts.append(f"{left} left as they were ({_most_common(refused).reason})")
    return "; ".join(part for part in parts if part)


def _kept(sites: Iterable[ReplacedSite]) -> str:
    shares = [site.kept for site in sites if site.kept is not None]
    if not shares:
        return "the share of pairs that the grid gives"
    low, high = percent(min(shares)), percent(max(shares))
    return f"{low} of pairs" if low == high else f"{low} to {high} of pairs"


def _trade(settings: Mapping[str, Any]) -> str:
    trade = Trade(*(settings[name] for name in ("price", "speedup", "max_error")))
    name, value = str(trade).split("=")
    return f"{name} {float(value):g}"


def _dense(report: Report) -> str:
    noise, above = report.noise, report.settings.get("dense_above")
    if noise.unknown:
        return "but " + (noise.evidence or NOISE_UNKNOWN)
    below = report.settings.get("dense_below") or 0.0
    limits = [f"above noise {above:g}"] if above is not None else []
    limits += [f"below {below:g}"] if below else []
    return f"dense {' and '.join(limits)}" if limits else "no dense steps"


def _most_common(refused: list[RefusedSite]) -> RefusedSite:
    reason = Counter(site.reason for site in refused).most_common(1)[0][0]
    return next(site for site in refused if site.reason == reason)


def _why_nothing(report: Report) -> str:
    candidates = [site for site in report.refused if site.self_attention] or report.refused
    if report.reason:
        return _sentence(report.reason, report.hint)
    if candidates:
        site = _most_common(candidates)
        count = sum(other.reason == site.reason for other in candidates)
        return f"{_sentence(site.reason, site.hint)} ({count} of {len(candidates)} attentions)"
    return _sentence(
        "no attention was found in the graph",
        'it runs as inductor compiles it; backend="inductor" does the same',
    )


def _sentence(reason: str, hint: str) -> str:
    return f"{reason}; {hint}" if hint else reason


def as_text(report: Any, width: int = WIDTH) -> str:
    """A renderable as plain text, without colours."""
    from rich.console import Console

    out = StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(report)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_table(report: Report) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [Text(report.summary())]
    if report.replaced:
        parts += [Text(), _replaced_table(report.replaced)]
    if report.refused:
        parts += [Text(), _refused_table(report.refused)]
    facts = _facts(report)
    parts += [Text(), Text(facts, style="dim")] if facts else []
    return Panel(Group(*parts), title=f"sta: {report.name}", title_align="left", expand=False)


def _groups(sites: list[Site]) -> list[tuple[str, Site, int]]:
    """(name, one of them, how many) for sites that differ only in a number of their name."""
    alike: dict[Any, list[Site]] = {}
    for site in sites:
        facts = {key: value for key, value in vars(site).items() if key != "name"}
        alike.setdefault(tuple(facts.items()), []).append(site)
    return [
        (name, members[0], len(indices))
        for members in alike.values()
        for name, indices in numbered([site.name for site in members])
    ]


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Any = "right" if column in ("n", "kept") else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column == "site")
    return table


def _replaced_table(sites: list[ReplacedSite]) -> Table:
    table = _table("replaced", "site", "n", "sequence", "tiles of", "window", "kept", "kernel")
    for name, site, count in _groups(sites):
        table.add_row(
            name,
            str(count * site.calls),
            " + ".join(
                shape(site.grid) if role == "video" else str(role if size is None else size)
                for role, size in site.segments
            ),
            "at run time" if site.tiles is None else f"{shape(site.tiles)} of {shape(site.tile)}",
            _window(site),
            "" if site.kept is None else percent(site.kept),
            site.kernel if site.precision == "native" else f"{site.kernel} {site.precision}",
        )
    return table


def _window(site: ReplacedSite) -> str:
    if site.window is None:
        return "at run time"
    text = f"{shape(site.window)} tiles"
    return text if site.windows == 1 else f"{site.windows} by head, up to {text}"


def _refused_table(sites: list[RefusedSite]) -> Table:
    table = _table("left as they were", "site", "n", "reason", "what to do")
    for name, site, count in _groups(sites):
        table.add_row(name, str(count * site.calls), site.reason, site.hint)
    return table


def _facts(report: Report) -> str:
    noise = report.noise
    level = "not needed" if not noise.needed else noise.convention or "unknown"
    lines = []
    if report.replaced:
        grids = dict.fromkeys(
            (site.grid, site.evidence, site.order, site.why_exact, site.why_native)
            for site in report.replaced
        )
        lines += [
            "; ".join(filter(None, (f"grid {shape(grid)}: {evidence}", *others)))
            for grid, evidence, *others in grids
            if evidence
        ]
        lines.append(
            f"noise level: {level}"
            + (f" from input {noise.input}" if noise.input else "")
            + (f" ({noise.evidence})" if noise.evidence else "")
        )
        lines.append(f"order conversions: {report.conversions}")
        lines += [
            f"{name}: one compiled region, called {site.calls} times"
            for name, site, _ in _groups(report.replaced)
            if site.calls > 1
        ]
    lines += report.measured
    if report.seconds:
        stages = ", ".join(f"{stage} {value:.2f}" for stage, value in report.seconds.items())
        lines.append(f"seconds: {sum(report.seconds.values()):.2f} ({stages})")
    return "\n".join(lines)
