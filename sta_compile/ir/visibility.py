"""Which keys does each query of one attention call see?

A video query sees the keys of its window, or the whole video in a dense sample. Keys of other
segments are seen by all queries or by none: the first ones of their segment, and of these the ones
that a mask leaves. With 7 text tokens, a valid length of 5 and a mask that hides token 1, queries
see the text tokens 0, 2, 3 and 4.

A mask may hide keys of the video as well, from all queries. A sample in which it does is dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .geometry import Geometry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visibility:
    """key_lengths: int32 or int64 [batch, segments beside the video]: valid keys of each segment.

    key_mask: bool [batch, tokens beside the video], False hides a key. dense: bool [batch].
    video_mask: bool [batch, tokens of the video], in tile order. None hides nothing, and no sample
    is dense.
    """

    geometry: Geometry
    key_lengths: Tensor | None = None
    key_mask: Tensor | None = None
    dense: Tensor | None = None
    video_mask: Tensor | None = None

    @property
    def whole(self) -> Tensor | None:
        """Samples that see the whole video, or what a mask leaves of it: bool [batch]; None: no sample."""
        if self.video_mask is None:
            return self.dense
        hidden = ~self.video_mask.all(1)
        return hidden if self.dense is None else hidden | self.dense

    def full(self) -> Visibility:
        """Of dense samples: every query sees all valid keys."""
        return replace(self, geometry=self.geometry.full(), dense=None)

    def sparse(self) -> Visibility:
        """Of the other samples, from which no key of the video is hidden."""
        return replace(self, dense=None, video_mask=None)

    def of(self, samples: Tensor) -> Visibility:
        """What the samples with these indices see, as if none were dense."""
        lengths, mask, video = (
            None if x is None else x[samples]
            for x in (self.key_lengths, self.key_mask, self.video_mask)
        )
        return Visibility(self.geometry, lengths, mask, video_mask=video)
