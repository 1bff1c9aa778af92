"""Every option: its name, type, default, meaning and reader. Documentation, environment and config come from here.

The fields of `Settings` are the table. A value is looked for in this order: `options={...}` of `torch.compile`,
`sta_compile.config`, the environment (`STA_WINDOW=18,24,24`), the default. Example:

    settings, patches = Settings.resolve({"window": (18, 24, 24), "triton.cudagraphs": True})
    settings.window == (18, 24, 24)      patches == {"triton.cudagraphs": True}     (for inductor)
"""

from __future__ import annotations

import difflib
import hashlib
import marshal
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from . import option_values as read
from .errors import InvalidOptionError, UnknownOptionError
from .ir.attention_spec import PRECISIONS, Triple, WindowRequest
from .ir.target import SHARED_MEMORY
from .ir.trade import MOST_SPEEDUP, Trade

ENV_PREFIX = "STA_"


def _option(default: Any, reader: read.Reader, takes: str, doc: str) -> Any:
    """A row of the table."""
    return field(default=default, metadata={"reader": reader, "takes": takes, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """One compile's options, valid and in canonical form. Triples are (frames, rows, cols)."""

    window: WindowRequest = _option(
        "auto",
        read.window,
        '(frames, rows, cols) in tokens, "auto" or "full", or a list of triples and "full", one for each head',
        "How much of the video each query attends to, centred on its tile, after patchify. "
        '"auto" keeps at most 42 % of the pairs (58 % sparsity, the paper\'s training-free setting); '
        '"full" is exact. In a list, a window as large as the grid is exact too; heads share the tiles of the smaller '
        "window that most have.",
    )
    tile: Triple | None = _option(
        None,
        read.optional_triple,
        "(frames, rows, cols) in tokens, or None",
        "Nominal size of a tile. None: chosen from the grid and the window, the same on every GPU.",
    )
    grid: Triple | None = _option(
        None,
        read.optional_triple,
        "(frames, rows, cols) in tokens, or None",
        "The token grid, for graphs that don't show it (regional compile, packed inputs). "
        "None: inferred from the graph.",
    )
    always_keep: tuple[int, ...] | None = _option(
        None,
        read.optional_frames,
        '{"frames": [0]}: first frames 0, 1, ... and last frames ..., -1, or None',
        "Latent frames that every query sees and that see everything, such as the given first frame of "
        "image-to-video; the window is over the others.",
    )
    dense_above: float | None = _option(
        0.95,
        read.optional_level,
        "a noise level in 0..1, or None; sta_compile.dense_above(scheduler, steps=12) gives that of a number of steps",
        "Steps above this noise level use full attention. None: no dense steps.",
    )
    dense_below: float = _option(
        0.0,
        read.level,
        "noise level in 0..1",
        "Steps below this noise level use full attention.",
    )
    timestep: str = _option(
        "auto",
        read.name,
        'input name or "auto"',
        "The input of the model's forward that holds the timestep.",
    )
    noise: str | Callable[[Any], Any] = _option(
        "auto",
        read.noise,
        '"auto", "A..B", "reversed", "log_sigma" or a function',
        'What the timestep says about noise. "A..B": A at noise level 0 and B at level 1, so '
        '"0..1000", "0..1" or, rising as noise falls, "1000..0"; "reversed": 1000..0, or 1..0 where the '
        'graph multiplies the timestep by 1000; "log_sigma": 0.25 * log(sigma); a function of the timestep tensor '
        "returns the level.",
    )
    min_tokens: int = _option(
        8192,
        read.count,
        "a whole number, 0 or more",
        "Shorter video sequences keep exact attention.",
    )
    kernel: str = _option(
        "auto",
        read.one_of("auto", "cutlass", "triton", "reference"),
        '"auto", "cutlass", "triton" or "reference"',
        'What runs the attention. "cutlass" is CUDA C++ for Hopper; "reference" is plain PyTorch on any device; "auto" '
        "takes the choice of a table that comes with the package.",
    )
    precision: str = _option(
        "native",
        read.one_of(*PRECISIONS),
        '"native", "fp8", "nvfp4" or "tiered"',
        'What attention multiplies in. "native" is the dtype of the model; "fp8" is e4m3 on Hopper, with an error of some '
        'percent; "nvfp4" has its scores in NVFP4 on Blackwell, with three times that error; "tiered" chooses on Hopper for '
        "each block of keys between its own dtype, e4m3 and the block's means, by `price`. "
        "For inference: where gradients are recorded, and on other GPUs, it is native.",
    )
    price: float = _option(
        0.01,
        read.price,
        "a number, 0 or more",
        'With precision="tiered": the relative squared error that each dense attention\'s worth of time must take off. Less '
        "is slower and closer to the model; 0 reads every key as it is. Blocks outside of the window are read as their "
        "means.",
    )
    speedup: float | None = _option(
        None,
        read.optional_number(0.999, MOST_SPEEDUP),
        f"a number from 1 to {MOST_SPEEDUP:g}, or None",
        'With precision="tiered", instead of `price`: how many times as fast keys of the video are read as all of them in '
        "the model's dtype. Each call finds its price, from what is predicted for some of its queries.",
    )
    max_error: float | None = _option(
        None,
        read.optional_number(0.0, 1e9),
        "a positive number, or None",
        'With precision="tiered", instead of `price`: the relative error of attention, root mean square, as it is '
        "predicted. Whole outputs err by up to some times as much.",
    )
    layout: str = _option(
        "graph",
        read.one_of("graph", "site"),
        '"graph" or "site"',
        '"graph" keeps tokens in tile order through the whole graph; "site" reorders around each '
        "attention.",
    )
    strict: bool = _option(
        False,
        read.flag,
        "True or False",
        "Raise if an attention over a known token grid can't be replaced.",
    )

    def __post_init__(self) -> None:
        for row in fields(self):
            object.__setattr__(self, row.name, read_option(row.name, getattr(self, row.name)))
        above = self.dense_above
        if above is not None and self.dense_below > above:
            raise InvalidOptionError(
                f"dense_below={self.dense_below} is over dense_above={above}, so every step would "
                'be dense; lower dense_below, or pass window="full" for exact attention'
            )
        asked = {"price": self.price != OPTIONS["price"].default}
        asked |= {name: getattr(self, name) is not None for name in ("speedup", "max_error")}
        if sum(asked.values()) > 1:
            raise InvalidOptionError(
                f"{' and '.join(name for name in asked if asked[name])} can't all be kept; pass one of them"
            )

    @property
    def trade(self) -> Trade:
        """For precision="tiered"."""
        return Trade(self.price, self.speedup, self.max_error)

    @staticmethod
    def resolve(options: Mapping[str, Any] | None = None) -> tuple[Settings, dict[str, Any]]:
        """(settings, options for inductor) from `options`, then config, then environment, then defaults."""
        from . import config

        ours, patches = split_options(given_options(options))
        given = {key: read_option(key, value, "options") for key, value in ours.items()}
        values = config.overrides()
        for name in OPTIONS:
            text = os.environ.get(env_name(name))
            if text is not None and name not in values and name not in given:
                values[name] = read_option(name, text, "environment")
        return Settings(**(values | given)), patches

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values; a function is its name."""
        values = {row.name: getattr(self, row.name) for row in fields(self)}
        return {
            name: _function_name(value)
            if callable(value)
            else list(value)
            if isinstance(value, tuple)
            else value
            for name, value in values.items()
        }

    def fingerprint(self) -> str:
        """Text that differs whenever two settings compile differently; part of inductor's cache key."""
        parts = self.to_dict()
        if callable(self.noise):
            parts["noise"] = f"{parts['noise']}:{_function_hash(self.noise)}"
        return " ".join(f"{name}={value}" for name, value in parts.items())


def _architecture(value: Any) -> str:
    """ "auto", or an architecture that exists."""
    name = read.architecture(value)
    number = 0 if name == "auto" else int(name.removeprefix("sm_"))
    if number >= min(SHARED_MEMORY) and number not in SHARED_MEMORY:
        raise ValueError
    return name


@dataclass(frozen=True)
class ProcessSettings:
    """What kernels are built with and where they are kept: for the whole process, so not in `options={...}`."""

    cache_dir: str | None = _option(
        None,
        read.optional_path,
        "a folder, or None",
        "Where compiled CUDA C++ kernels are kept. None: in torch's own cache (TORCHINDUCTOR_CACHE_DIR).",
    )
    compiler: str = _option(
        "auto",
        read.one_of("auto", "nvrtc", "nvcc"),
        '"auto", "nvrtc" or "nvcc"',
        'What compiles CUDA C++ kernels. "auto": NVRTC, and nvcc where that is missing.',
    )
    target: str = _option(
        "auto",
        _architecture,
        f'"auto" or an architecture: {", ".join(f"sm_{number}" for number in SHARED_MEMORY)}',
        "The GPU, if it is not here, that doctor, explain and builds ahead are for. Tensors that are on a GPU run on that.",
    )


OPTIONS = {row.name: row for row in fields(Settings)}  # in the order of documentation
PROCESS_OPTIONS = {row.name: row for row in fields(ProcessSettings)}


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def read_option(name: str, value: Any, source: str = "") -> Any:
    """The canonical form of an option's value, or InvalidOptionError that says what the option takes."""
    row = OPTIONS[name] if name in OPTIONS else PROCESS_OPTIONS[name]
    try:
        return row.metadata["reader"](value)
    except (TypeError, ValueError, OverflowError) as error:
        wrote = f"{env_name(name)}={value}" if source == "environment" else f"{name}={value!r}"
        origin = f" (from {source})" if source in ("options", "sta_compile.config") else ""
        raise InvalidOptionError(
            f"{wrote}{origin} is not a value of the option {name}; pass {row.metadata['takes']}"
            + (", for example 18,24,24" if source == "environment" and name == "window" else "")
        ) from error


def given_options(options: Any) -> Mapping[str, Any]:
    """What a user passed as `options`, if it may be that; None is no options."""
    if options is not None and not isinstance(options, Mapping):
        raise InvalidOptionError(
            f"options={options!r} is no dict; pass options={{'window': (18, 24, 24)}}"
        )
    return options or {}


def options_of_mode(mode: Any) -> dict[str, Any]:
    """A mode of torch.compile as inductor's options."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    try:
        return dict(list_mode_options(mode))
    except (RuntimeError, TypeError) as error:
        raise InvalidOptionError(f"there is no mode {mode!r}; {error}") from error


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, inductor's). A name that neither knows raises UnknownOptionError with the nearest one."""
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    rest = {name: value for name, value in options.items() if name not in OPTIONS}
    for name in rest.keys() & PROCESS_OPTIONS.keys():
        raise InvalidOptionError(
            f"the option {name} is for the whole process and not for one model; set "
            f"sta_compile.config.{name} or {env_name(name)}"
        )
    if not rest:
        return ours, {}
    from torch._inductor import config as inductor_config

    known: dict[str, Any] = inductor_config.get_config_copy()
    patches = {}
    for name, value in rest.items():
        spelled = str(name).replace("-", "_")  # as torch.compile does for inductor
        if spelled not in known:
            raise unknown_option(str(name), [*OPTIONS, *known])
        patches[spelled] = value
    return ours, patches


def unknown_option(name: str, known: list[str]) -> UnknownOptionError:
    """The error for an option that does not exist."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return UnknownOptionError(
        f"there is no option {name!r}; {meant}`python -m sta_compile options` lists them"
    )


def _function_name(function: Callable[..., Any]) -> str:
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def _function_hash(function: Callable[..., Any]) -> str:
    """A hash of what a function does; one that can't be read is never equal to another's."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"object {id(function)} of process {os.getpid()}"
    cells = [repr(cell.cell_contents) for cell in getattr(function, "__closure__", None) or ()]
    state = (repr(getattr(function, "__defaults__", None)), repr(cells))
    return hashlib.sha256(marshal.dumps(code) + "".join(state).encode()).hexdigest()[:16]
