"""`explain(model, options=...)(*args)`: what `torch.compile(model, backend="sta")` would do, without compiling it.

    print(sta_compile.explain(transformer, timesteps=pipe.scheduler.timesteps)(hidden_states=..., timestep=...))

Runs Dynamo and this package's stages, not inductor; a model on the meta device needs neither weights nor a GPU. Nothing
else in the process changes: compiled models stay compiled, `reports()` stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .errors import StaError
from .report import NoiseReport, RefusedSite, ReplacedSite, Report
from .settings import Settings, given_options

if TYPE_CHECKING:
    from rich.console import RenderableType

REGIONAL = (
    "Parts of this model are compiled one by one, and such a part shows no grid. This is what compiling the whole "
    "model would do; for the parts pass options={'grid': (frames, rows, cols)} or use sta_compile.token_grid."
)


@dataclass(frozen=True)
class Schedule:
    """Which steps of a sampling run are dense, and what that leaves of the speed-up.

    With d of all steps dense, and a share `kept` of the pairs computed in the others, attention computes
    d + (1 - d) * kept of its pairs over the run, so by Amdahl's law it speeds up by at most the inverse of that.
    """

    timesteps: tuple[float, ...]
    dense: tuple[bool, ...]  # for each timestep
    kept: float  # share of attention pairs computed in a sparse step
    convention: str

    @property
    def dense_steps(self) -> list[int]:
        """Indices of the dense steps."""
        return [index for index, dense in enumerate(self.dense) if dense]

    @property
    def speedup(self) -> float:
        """The most that attention can gain over the whole run, counted in (query, key) pairs."""
        share = sum(self.dense) / len(self.dense) if self.dense else 1.0
        return 1.0 / (share + (1.0 - share) * self.kept)

    def __str__(self) -> str:
        count, total = sum(self.dense), len(self.dense)
        share = count / total if total else 1.0
        return (
            f"dense steps: {count} of {total} ({_listed(self.dense_steps)})\n"
            f"attention over the run: at most {self.speedup:.2f}x "
            f"= 1 / (d + (1 - d) * kept), d = {share:.2f}, kept = {self.kept:.3f}"
        )


@dataclass(frozen=True)
class Explanation:
    """The reports of a model's graphs; as a whole it reads like one report. target: the GPU that is not here, if any."""

    reports: tuple[Report, ...]
    schedule: Schedule | None = None
    note: str = ""
    target: str = ""

    @property
    def name(self) -> str:
        return self.reports[0].name if self.reports else "the model"

    @property
    def replaced(self) -> list[ReplacedSite]:
        return [site for report in self.reports for site in report.replaced]

    @property
    def refused(self) -> list[RefusedSite]:
        return [site for report in self.reports for site in report.refused]

    @property
    def conversions(self) -> int:
        return sum(report.conversions for report in self.reports)

    @property
    def noise(self) -> NoiseReport:
        """Of the first graph with a replaced attention."""
        sparse = [report for report in self.reports if report.replaced] or list(self.reports)
        return sparse[0].noise if sparse else NoiseReport()

    @property
    def seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for report in self.reports:
            for stage, seconds in report.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    @property
    def settings(self) -> dict[str, Any]:
        return self.reports[0].settings if self.reports else {}

    @property
    def dense_steps(self) -> list[int]:
        """Indices of the dense steps among `timesteps=`."""
        return [] if self.schedule is None else self.schedule.dense_steps

    def merged(self) -> Report:
        """All graphs as one report."""
        first = self.reports[0] if self.reports else Report("the model")
        return Report(
            name=self.name,
            replaced=self.replaced,
            refused=self.refused,
            conversions=self.conversions,
            noise=self.noise,
            seconds=self.seconds,
            settings=self.settings,
            reason=first.reason,
            hint=first.hint,
        )

    def knowing_noise(self, model: object, first_timestep: float | None) -> Explanation:
        """The same with what is known of the noise level elsewhere: from a compile of the model, or the first timestep.

        Meta and fake tensors have no values, from which a compile would read it.
        """
        from .ir.noise_level import Convention
        from .noise_plan import conventions
        from .planning.noise import infer_convention

        known = conventions.recall(model, str(self.settings.get("timestep", "auto")))
        if not isinstance(known, Convention) and first_timestep is not None:
            known = infer_convention(None, first_timestep)
        if not isinstance(known, Convention):
            return self
        reports = tuple(
            replace(report, noise=NoiseReport(report.noise.input, known.name, known.evidence))
            if report.noise.input is not None and report.noise.unknown
            else report
            for report in self.reports
        )
        return replace(self, reports=reports)

    def summary(self) -> str:
        return self.merged().summary()

    def to_dict(self) -> dict[str, Any]:
        values = self.merged().to_dict() | {
            "graphs": len(self.reports),
            "note": self.note,
            "target": self.target,
        }
        if self.schedule is not None:
            values["schedule"] = {
                "timesteps": list(self.schedule.timesteps),
                "dense_steps": self.dense_steps,
                "kept": self.schedule.kept,
                "speedup": self.schedule.speedup,
            }
        return values

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def __getitem__(self, index: int) -> Report:
        return self.reports[index]

    def __str__(self) -> str:
        from .report_text import as_text

        return as_text(self)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = []
        if len(self.reports) > 1:
            parts.append(
                Text(
                    f"{len(self.reports)} graphs: the model has graph breaks; here they are as one"
                )
            )
        parts.append(self.merged().__rich__())
        if self.target:
            parts.append(Text(f"kernels: those that {self.target} would run (STA_TARGET)"))
        if self.note:
            parts.append(Text(self.note))
        if self.schedule is not None:
            parts.append(Text(str(self.schedule)))
        return Group(*parts)


def explain(
    model: Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    timesteps: Iterable[Any] | None = None,
    fullgraph: bool = False,
    device: str | None = None,
    **more: Any,
) -> Callable[..., Explanation]:
    """Returns a function to be called like the model; meta and fake tensors will do.

    options: as for `torch.compile(model, backend="sta", options=...)`. more: options, as for `sta_compile.compile`.
    timesteps: a scheduler's `timesteps`, to list which of them are dense.
    fullgraph: as for `torch.compile`; without it a model may have several graphs.
    device: as if the inputs were there; "meta" stands for the GPU that the option `target` names. None: where they are.
    Raises StaError for what is no model, and for a mistake in the options or the timesteps.
    """
    settings, _ = Settings.resolve({**given_options(options), **more})
    if not callable(model) or isinstance(model, type) or hasattr(model, "components"):
        what = f"a {type(model).__name__}" if not isinstance(model, type) else "a class"
        raise StaError(
            f"explain takes a model or a function, not {what}; pass a model, of a pipeline pipe.transformer, and call the "
            "result with the model's inputs"
        )
    steps = None if timesteps is None else _numbers(timesteps)

    def run(*args: Any, **kwargs: Any) -> Explanation:
        import torch

        from . import config
        from ._trace import trace, unwrap
        from .backend import device_of, rewrite_for_device
        from .warm_kernels import first_kernels, why_native

        reports: list[Report] = []
        targets: list[str] = []

        def visit(gm: Any, example_inputs: Sequence[Any]) -> None:
            there = device_of(example_inputs) if device is None else torch.device(device)
            gm, report = rewrite_for_device(
                gm, example_inputs, settings, remember=False, device=there
            )
            if report.replaced:
                report.name_kernels(first_kernels(gm, there))
                report.say_native(why_native(gm, there))
            if there.type == "meta" and config.target != "auto":
                targets.append(config.target)
            if isinstance(inner, torch.nn.Module):
                report.name = type(inner).__name__
            reports.append(report)

        inner = unwrap(model)
        trace(inner, args, kwargs, visit, fullgraph=fullgraph)
        note = REGIONAL if inner is model and _regional(inner) else ""
        found = Explanation(tuple(reports), note=note, target="".join(targets[:1]))
        found = found.knowing_noise(inner, steps[0] if steps else None)
        if steps is None or not found.replaced:
            return found
        return replace(found, schedule=_schedule(found, settings, steps))

    return run


def _numbers(timesteps: Any) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in timesteps)
    except (TypeError, ValueError) as error:
        raise StaError(
            f"timesteps={timesteps!r} are no numbers; pass a scheduler's timesteps, after its set_timesteps"
        ) from error


def _regional(model: object) -> bool:
    """Are parts of this model compiled in place, and not the model?"""
    import torch

    if not isinstance(model, torch.nn.Module) or model._compiled_call_impl is not None:
        return False
    return any(part._compiled_call_impl is not None for part in model.modules())


def _schedule(found: Explanation, settings: Settings, steps: tuple[float, ...]) -> Schedule:
    from .ir.noise_level import UnknownConvention
    from .planning.noise import parse_noise
    from .planning.noise_schedule import dense_steps

    stated = settings.noise if callable(settings.noise) else found.noise.convention
    convention = None if stated is None else parse_noise(stated)
    dense = dense_steps(
        convention or UnknownConvention(found.noise.evidence, ""),
        steps,
        settings.dense_above,
        settings.dense_below,
    )
    shares = [site.kept for site in found.replaced if site.kept is not None]
    kept = sum(shares) / len(shares) if shares else 1.0
    return Schedule(steps, tuple(dense), kept, convention.name if convention else "unknown")


def _listed(indices: list[int]) -> str:
    """[0, 1, 2, 7] -> "0-2, 7"; an empty list is "none"."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs) or "none"
