"""The command line: `python -m sta_compile explain | doctor | bench | options | coverage`.

python -m sta_compile explain WanTransformer3DModel --size 81x720x1280 --option window=18,24,24
python -m sta_compile doctor        versions, devices, which kernels can run and why others can't
python -m sta_compile bench         times of the attention kernels and of their peers, on a GPU
python -m sta_compile options       every option with its default and meaning
python -m sta_compile coverage      what is replaced in every diffusers transformer (minutes)
"""

from __future__ import annotations

import argparse
import ast
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .errors import StaError, needs
from .option_values import triple

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(given)
    args.command = shlex.join(["python", "-m", "sta_compile", *given])
    try:
        code: int = args.run(args)
    except StaError as error:
        print(f"sta_compile: {error}", file=sys.stderr)
        return 2
    return code


def _read(option: str, text: str, reader: Callable[[str], T], takes: str) -> T:
    try:
        return reader(text)
    except (ValueError, TypeError) as error:
        raise StaError(f"{option} {text} is not {takes}; pass that") from error


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sta_compile",
        description="Sliding Tile Attention for video diffusion transformers.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    explain = commands.add_parser(
        "explain", help="what would be replaced in a diffusers class, without weights or a GPU"
    )
    explain.add_argument("model", help="a diffusers class, for example WanTransformer3DModel")
    explain.add_argument(
        "--size",
        default="81x720x1280",
        help="video in pixels, FRAMESxHEIGHTxWIDTH; of an image the frames don't matter",
    )
    explain.add_argument("--batch", default="1")
    explain.add_argument(
        "--mode", default="", help="of a class that docs/coverage.md has in several, a part of one"
    )
    explain.add_argument(
        "--config",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="changes to the class's default config, for example num_layers=2",
    )
    explain.add_argument(
        "--option",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="options of sta_compile, for example window=18,24,24",
    )
    explain.add_argument(
        "--timesteps",
        metavar="T,T,...",
        help="timesteps of a sampling run, to list which of them are dense",
    )
    explain.add_argument("--json", action="store_true", help="print JSON instead of a table")
    explain.set_defaults(run=_explain)

    doctor = commands.add_parser("doctor", help="what is installed and which kernels can run")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench", help="check and time the attention kernels beside others, on a GPU"
    )
    bench.add_argument("--small", action="store_true", help="sizes that a CPU can do")
    bench.add_argument("--only", default="", metavar="NAME", help="a part of the workload's name")
    bench.add_argument("--direction", default="both", choices=("forward", "backward", "both"))
    bench.add_argument("--kernel", default="auto", help="as the option kernel")
    bench.add_argument(
        "--peers", metavar="NAME,...", help="these peers alone; an empty text for none"
    )
    bench.add_argument(
        "--seconds", type=float, default=4.0, help="of each workload's rounds (default 4)"
    )
    bench.add_argument(
        "--kernels", action="store_true", help="time every kernel that may run, too, on few heads"
    )
    bench.add_argument("--json", metavar="FILE", help="where to write what was measured")
    bench.add_argument(
        "--chart", metavar="FILE", help="where to draw it, as PNG (needs matplotlib)"
    )
    bench.set_defaults(run=_bench)

    options = commands.add_parser("options", help="every option, its default and its meaning")
    options.add_argument("--markdown", action="store_true", help="as docs/options.md")
    options.set_defaults(run=_options)

    coverage = commands.add_parser(
        "coverage", help="what is replaced in every diffusers transformer, small and random"
    )
    coverage.add_argument("--only", default="", metavar="NAME", help="a part of the class's name")
    coverage.add_argument("--json", metavar="FILE", help="where to write the table as JSON")
    coverage.add_argument("--markdown", metavar="FILE", help="where to write it as Markdown")
    coverage.set_defaults(run=_coverage)
    return parser


def _explain(args: argparse.Namespace) -> int:
    needs("diffusers")
    from .known_classes import explain_class

    size = _read(
        "--size", args.size, triple, "a video in pixels: FRAMESxHEIGHTxWIDTH, such as 81x720x1280"
    )
    steps = None
    if args.timesteps is not None:
        steps = _read(
            "--timesteps", args.timesteps, _numbers, "numbers between commas, such as 999,900,700"
        )
    batch = _read("--batch", args.batch, _positive, "a whole number from 1 on")
    found = explain_class(
        args.model,
        size,
        batch=batch,
        mode=args.mode,
        config={key: _literal(text) for key, text in map(_pair, args.config)},
        options=dict(map(_pair, args.option)),
        timesteps=steps,
    )
    _show(found.to_dict() if args.json else found, args.json)
    return 0 if found.replaced else 1


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    findings = examine()
    _show(findings.to_dict() if args.json else findings, args.json)
    return 0


def _bench(args: argparse.Namespace) -> int:
    needs(*["matplotlib"] if args.chart else [])
    from .bench.measure import Options
    from .bench.peers import PEERS
    from .bench.run import device_of, run, write
    from .bench.workloads import workloads
    from .settings import read_option

    device = device_of(args.small)
    peers = None if args.peers is None else tuple(filter(None, args.peers.split(",")))
    known = [peer.name for peer in PEERS]
    unknown = [name for name in peers or () if name not in known]
    if unknown:
        raise StaError(f"there is no peer {unknown[0]!r}; pass some of {', '.join(known)}")
    kernel = read_option("kernel", args.kernel)
    options = Options(device, kernel, peers, args.seconds, kernels=args.kernels)
    chosen = workloads(args.small, args.only, args.direction)
    head, rows, host = run(chosen, options, args.command)
    write(head, rows, host, args.json, args.chart)
    return 1 if any(row.failed for row in rows) else 0


def _options(args: argparse.Namespace) -> int:
    from .option_docs import as_markdown, as_table

    if args.markdown:
        print(as_markdown(), end="")
    else:
        _show(as_table(), False)
    return 0


def _coverage(args: argparse.Namespace) -> int:
    needs("diffusers")
    from .coverage.run import run, write

    for path in (args.json, args.markdown):
        if path is not None and not Path(path).parent.is_dir():
            raise StaError(
                f"{path} can't be written: there is no folder {Path(path).parent}; make it"
            )
    results = run(args.only)
    write(results, args.json, args.markdown)
    return 0 if all(result.complete for result in results) else 1


def _show(value: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(value, indent=2))
        return
    from rich.console import Console

    # A pipe has no width of its own; 80 columns would break every row of a table.
    Console(width=None if sys.stdout.isatty() else 120).print(value)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise StaError(f"{text!r} is not KEY=VALUE; write it as in num_layers=2")
    return key, value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


if __name__ == "__main__":
    sys.exit(main())
