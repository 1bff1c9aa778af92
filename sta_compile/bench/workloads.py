"""What is measured: token grids of real models and of the paper, with the tilings that the planner gives them.

Tilings and windows are (frames, rows, cols). "W1" is the paper's table: 30x48x80 tokens in 6x8x8 tiles. "W1 mixed" has the
five windows of its published schedule for HunyuanVideo, in their shares of the heads (arXiv 2502.04507).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch

from ..errors import StaError
from ..ir.attention_spec import AttentionSpec, Triple
from ..ir.geometry import Geometry
from ..ir.tiling import Tiling
from ..ir.window import Window
from ..ops.arguments import geometry_of
from .patterns import Everything, Heads, Pattern, Samples, Tiles

DENSE = ("cudnn", "flash", "flash-attn-4")
SAME_WINDOW = ("flex STA", "flash-attn-4 STA", "fastvideo STA")
OTHER_WINDOWS = ("flex NATTEN", "flex Swin", "natten")


@dataclass(frozen=True)
class Workload:
    """One sequence: video tokens, then `text` tokens of which `valid` are keys. tiles: per axis. window: in tiles.

    head_windows: (window, heads that have it), beside which `window` has no meaning.
    """

    name: str
    grid: Triple
    tiles: Triple
    window: Triple | str
    heads: int
    head_dim: int = 128
    text: int = 0
    valid: int = 0
    dense: tuple[
        bool, ...
    ] = ()  # flags of the samples, beside a window; () is one sample without a flag
    token_major: bool = True
    backward: bool = False
    deterministic: bool = False  # under torch.use_deterministic_algorithms
    head_windows: tuple[tuple[Triple, int], ...] = ()
    precision: str = "native"  # of ours; beside another one the native kernel takes turns too
    peers: tuple[str, ...] = DENSE

    @property
    def video(self) -> int:
        return prod(self.grid)

    @property
    def segments(self) -> list[int]:
        return [self.video, self.text] if self.text else [self.video]

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.grid, self.tiles)

    @property
    def batch(self) -> int:
        return len(self.dense) or 1

    @property
    def unlike_heads(self) -> list[int]:
        """The first and the last head, and the first one of each window."""
        firsts = accumulate((count for _, count in self.head_windows), initial=0)
        return sorted({*firsts, self.heads} - {self.heads} | {self.heads - 1})

    @property
    def tile_window(self) -> Window:
        """As given; of all tiles if it is full."""
        return Window(self.tiles if isinstance(self.window, str) else self.window)

    @property
    def pattern(self) -> Pattern:
        def tiles(window: Window) -> Pattern:
            return Tiles(self.tiling, window, self.text, self.valid)

        sparse = self.everything if self.window == "full" else tiles(self.tile_window)
        if self.head_windows:
            counted = [(tiles(Window(window)), count) for window, count in self.head_windows]
            sparse = Heads(tuple(each for each, count in counted for _ in range(count)))
        each = tuple(self.everything if dense else sparse for dense in self.dense)
        return Samples(each) if len(each) > 1 else (*each, sparse)[0]

    @property
    def everything(self) -> Everything:
        return Everything(self.video + self.text, self.video + self.valid)

    def spec(self, kernel: str) -> str:
        roles = ("video", "context") if self.text else ("video",)
        window: str | Triple | tuple[Triple, ...] = self.tile_window.tiles
        if self.window == "full":
            window = "full"
        elif self.head_windows:
            window = tuple(each for each, count in self.head_windows for _ in range(count))
        return AttentionSpec(
            roles,
            tiles=self.tiles,
            window=window,  # type: ignore[arg-type]
            kernel=kernel,
            precision=self.precision,
        ).text()

    def geometry(self) -> Geometry:
        return geometry_of(self.segments, self.grid, self.spec("auto"))

    def flops(self, pairs: int) -> float:
        """Two products of each pair and head; the backward has five."""
        return (10.0 if self.backward else 4.0) * pairs * self.head_dim * self.heads


W1 = Workload(
    "W1 333",
    (30, 48, 80),
    (5, 6, 10),
    (3, 3, 3),
    24,
    peers=(*DENSE, *SAME_WINDOW, *OTHER_WINDOWS),
)
MIXED = (((5, 3, 3), 10), ((1, 6, 10), 8), ((3, 3, 5), 3), ((5, 1, 10), 2), ((5, 6, 1), 1))
WAN = Workload("wan 21x45x80", (21, 45, 80), (4, 5, 11), (3, 3, 3), 40, peers=(*DENSE, "flex STA"))
FORWARD = (
    W1,
    replace(W1, name="W1 333 head-major", token_major=False, peers=()),
    replace(W1, name="W1 555", window=(5, 5, 5), peers=(*DENSE, *SAME_WINDOW)),
    replace(W1, name="W1 333 text 256", text=256, valid=156, peers=DENSE),
    replace(W1, name="W1 full", window="full", peers=DENSE),
    replace(W1, name="W1 mixed", head_windows=MIXED, peers=()),
    replace(W1, name="W1 dense flag", dense=(True,), peers=()),
    replace(W1, name="W1 one dense, one sparse", dense=(True, False), peers=()),
    WAN,
    Workload("hunyuan 33x45x80", (33, 45, 80), (6, 5, 11), (3, 3, 3), 24, text=256, valid=77),
    Workload("31x44x80", (31, 44, 80), (5, 6, 9), (3, 3, 3), 24),
    Workload("mochi 28x30x53", (28, 30, 53), (6, 4, 6), (3, 3, 3), 24, text=256, valid=200),
    Workload("13x30x45 d64", (13, 30, 45), (3, 4, 5), (3, 3, 3), 48, head_dim=64),
    Workload(
        "cogvideox 11x48x85",
        (11, 48, 85),
        (1, 6, 18),
        (1, 3, 5),
        48,
        head_dim=64,
        text=226,
        valid=226,
    ),
    replace(W1, name="W1 333 d64", head_dim=64, peers=()),
    replace(W1, name="W1 333 fp8", precision="fp8", peers=("cudnn",)),
    replace(W1, name="W1 full fp8", window="full", precision="fp8", peers=("cudnn",)),
    replace(WAN, name="wan 21x45x80 fp8", precision="fp8", peers=("cudnn",)),
)
# Only where their precision is asked for by name, as most GPUs don't have it.
RARE = (
    replace(W1, name="W1 333 nvfp4", precision="nvfp4", peers=("cudnn",)),
    replace(W1, name="W1 full nvfp4", window="full", precision="nvfp4", peers=("cudnn",)),
)
BACKWARD = tuple(
    replace(w, name=f"{w.name} backward", backward=True, peers=peers)
    for w, peers in (
        (W1, (*DENSE, "flex STA", "flash-attn-4 STA")),
        (replace(W1, name="W1 333 deterministic", deterministic=True), ()),
        (replace(W1, name="W1 555", window=(5, 5, 5)), (*DENSE, "flash-attn-4 STA")),
        (replace(W1, name="W1 mixed", head_windows=MIXED), ()),
        (WAN, DENSE),
    )
)
# For the time that the host needs: the GPU is done at once, and runs are long enough for the kernels of large videos.
HOST = Workload("host", (4, 8, 16), (2, 1, 2), (1, 1, 1), 2)
_TINY = Workload("small 333", (5, 6, 8), (3, 3, 4), (1, 3, 3), 2, head_dim=32, peers=W1.peers)
SMALL = (
    _TINY,
    replace(_TINY, name="small text", text=24, valid=17, peers=DENSE),
    replace(_TINY, name="small full", window="full", peers=DENSE),
    replace(_TINY, name="small mixed", head_windows=(((1, 3, 3), 1), ((3, 1, 1), 1)), peers=()),
    replace(_TINY, name="small one dense", dense=(True, False), token_major=False, peers=()),
    replace(_TINY, name="small fp8", precision="fp8", peers=()),
    replace(_TINY, name="small nvfp4", precision="nvfp4", peers=()),
    replace(_TINY, name="small 333 backward", backward=True, peers=(*DENSE, "flex STA")),
)


def workloads(small: bool, only: str, directions: str) -> tuple[Workload, ...]:
    """only: a part of the name. directions: "forward", "backward" or "both". StaError if none has it."""
    rare = tuple(w for w in RARE if w.precision in only)
    every = [
        w
        for w in (SMALL if small else (*FORWARD, *rare, *BACKWARD))
        if directions in ("both", "backward" if w.backward else "forward")
    ]
    chosen = tuple(w for w in every if only in w.name)
    if not chosen:
        names = ", ".join(w.name for w in every)
        raise StaError(f"no workload's name has {only!r} in it; pass a part of one of {names}")
    return chosen


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
