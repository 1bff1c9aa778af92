"""What a replaced attention computes: the `spec` argument of `sta::attention`, as a value and as text.

The text form is stored inside compiled artifacts and read back in processes that hold no other state, so it is
self-describing and versioned, and it names no length, batch size or GPU:

    "v1 roles=video,context tiles=5,6,10 window=3,3,3 kernel=auto"      a grid known when the model was compiled
    "v1 roles=video request=18,24,24 tile=auto min=8192 kernel=auto"    a grid known only at run time
    "v1 roles=context,video tiles=4,5,11 window=full kernel=auto"       dense attention
    "v1 roles=video tiles=5,6,10 window=3,3,3/5,6,1 kernel=auto"        two heads, each with a window of its own
    "v1 roles=video tiles=5,6,10 window=3,3,3 kernel=auto precision=fp8"
    "v1 roles=video tiles=5,6,10 window=full kernel=auto precision=tiered price=0.001"
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ..errors import StaError
from .trade import EXACT, Trade

if TYPE_CHECKING:
    from typing_extensions import TypeIs

VERSION = "v1"
PRECISIONS = ("native", "fp8", "nvfp4", "tiered")
Triple = tuple[int, int, int]
HeadTriples = tuple[Triple, ...]  # one for each query head
WindowRequest = Triple | Literal["auto", "full"] | HeadTriples


@dataclass(frozen=True)
class AttentionSpec:
    """Everything that selects what is computed, apart from lengths, grid and scale.

    roles: one per segment, in the order of the keys: "video" (exactly one), "context", or "keys" for tokens that are
        keys only; queries are those of the other segments, in the same order.
    tiles: tiles per axis (T, H, W), or None when they follow from `request` and the grid at run time.
    window: window in tiles (T, H, W), one for each head, or "full"; None together with `tiles`.
    request: window in tokens, one for each head, "auto" or "full", for grids known only at run time.
    tile: tile extents in tokens for `request`, or None for the planner's choice.
    min_tokens: with `request`, grids of fewer tokens get the full window.
    kernel: "auto", "cutlass", "triton" or "reference".
    choice: what mode="max-autotune" measured to be the fastest of these (KernelSpec.choice), or "".
    precision: of the products, "native", "fp8", "nvfp4" or "tiered".
    trade: with "tiered", how much error is traded for time.
    """

    roles: tuple[str, ...]
    tiles: Triple | None = None
    window: Triple | Literal["full"] | HeadTriples | None = None
    request: WindowRequest | None = None
    tile: Triple | None = None
    min_tokens: int = 0
    kernel: str = "auto"
    choice: str = ""
    precision: str = "native"
    trade: Trade = EXACT

    def __post_init__(self) -> None:
        if self.roles.count("video") != 1 or set(self.roles) - {"video", "context", "keys"}:
            raise StaError(
                f"segment roles {self.roles} must be 'video' once and 'context' or 'keys' otherwise; "
                "pass one role per segment"
            )
        if (self.tiles is None) != (self.window is None) or (self.tiles is None) == (
            self.request is None
        ):
            raise StaError(
                "an AttentionSpec has either tiles and window, or request; pass one of the two"
            )
        if self.precision not in PRECISIONS:
            raise StaError(
                f"precision {self.precision!r} is not known; pass one of {', '.join(PRECISIONS)}"
            )

    @property
    def video(self) -> int:
        """Index of the video segment in `roles`."""
        return self.roles.index("video")

    @property
    def contexts(self) -> int:
        """Number of segments beside the video."""
        return len(self.roles) - 1

    def text(self) -> str:
        parts = [VERSION, f"roles={','.join(self.roles)}"]
        if self.tiles is not None:
            parts += [f"tiles={_join(self.tiles)}", f"window={_join(self.window)}"]
        else:
            parts += [f"request={_join(self.request)}", f"tile={_join(self.tile or 'auto')}"]
            parts += [f"min={self.min_tokens}"]
        parts += [f"kernel={self.kernel}"]
        parts += [f"choice={self.choice}"] if self.choice else []
        parts += [f"precision={self.precision}"] if self.precision != "native" else []
        parts += [str(self.trade)] if self.precision == "tiered" else []
        return " ".join(parts)

    @staticmethod
    def parse(text: str) -> AttentionSpec:
        """Inverse of `text()`. Raises StaError for text that this version did not write."""
        return _parse(text)


def is_per_head(value: object) -> TypeIs[HeadTriples]:
    """Is a window, or the request for one, a list with one for each head?"""
    return isinstance(value, tuple) and isinstance(value[0], tuple)


def _join(value: Triple | HeadTriples | str | None) -> str:
    if isinstance(value, str):
        return value
    if is_per_head(value):
        return "/".join(map(_join, value))
    return ",".join(map(str, value or ()))


def _triple(text: str) -> Triple:
    a, b, c = (int(part) for part in text.split(","))
    return (a, b, c)


def _triples(text: str) -> Triple | HeadTriples:
    found = tuple(map(_triple, text.split("/")))
    return found if len(found) > 1 else found[0]


@lru_cache(maxsize=1024)
def _parse(text: str) -> AttentionSpec:
    version, *fields = text.split(" ")
    if version != VERSION:
        raise StaError(
            f"attention spec {text!r} is not of version {VERSION}; recompile the model with the "
            "installed sta_compile"
        )
    try:
        values = dict(field.split("=", 1) for field in fields)
        window: Triple | Literal["full"] | HeadTriples | None = None
        request: WindowRequest | None = None
        if "tiles" in values:
            window = "full" if values["window"] == "full" else _triples(values["window"])
        elif values["request"] == "auto":
            request = "auto"
        elif values["request"] == "full":
            request = "full"
        else:
            request = _triples(values["request"])
        tile = values.get("tile", "auto")
        return AttentionSpec(
            roles=tuple(values["roles"].split(",")),
            tiles=_triple(values["tiles"]) if "tiles" in values else None,
            window=window,
            request=request,
            tile=None if tile == "auto" else _triple(tile),
            min_tokens=int(values.get("min", 0)),
            kernel=values["kernel"],
            choice=values.get("choice", ""),
            precision=values.get("precision", "native"),
            trade=Trade.parse(values),
        )
    except (KeyError, ValueError) as error:
        raise StaError(
            f"attention spec {text!r} can't be read ({error}); recompile the model with the "
            "installed sta_compile"
        ) from error
