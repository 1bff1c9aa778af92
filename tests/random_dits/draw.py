"""Random video transformers for hypothesis, plainest first, so that a failing one shrinks to what makes it fail."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.random_dits import dit as choices
from tests.random_dits.bodies import BODIES, PLACES
from tests.random_dits.dit import Dit

GRIDS = ((2, 6, 6), (3, 4, 6), (1, 6, 8), (4, 3, 7), (2, 8, 5), (6, 2, 6), (3, 5, 7))


@st.composite
def dits(draw: st.DrawFn, patchify: str) -> Dit:
    def one(options: tuple[str, ...]) -> str:
        return draw(st.sampled_from(options))

    unpatchify = one(choices.UNPATCHIFY)
    spread = [(1, 1, 1), (1, 2, 2)] + [(2, 2, 2)] * (patchify in ("conv3d", "linear"))
    lengths = st.sampled_from(((0, 0), (0, 5), (7, 0), (2, 3)))
    bodies = st.tuples(st.sampled_from(PLACES), st.sampled_from(tuple(BODIES)))
    dit = Dit(
        grid=draw(st.sampled_from(GRIDS)),
        batch=draw(st.sampled_from((2, 1))),
        layers=draw(st.sampled_from((1, 2))),
        patch=draw(st.sampled_from(spread)),
        patchify=patchify,
        unpatchify="packed" if patchify == "packed outside" else unpatchify,
        text=draw(lengths),
        joined=draw(st.booleans()),
        cross=draw(st.sampled_from((0, 5))),
        held=one(choices.HELD),
        norm=one(choices.NORM),
        rope=one(choices.ROPE),
        tables=one(choices.TABLES),
        rope_of_text=one(choices.ROPE_OF_TEXT),
        positions=one(choices.POSITIONS),
        modulation=one(choices.MODULATION),
        attention=one(choices.ATTENTION),
        projection=one(choices.PROJECTION),
        normed_heads=draw(st.booleans()),
        feed_forward=one(choices.FEED_FORWARD),
        beside=one(choices.BESIDE),
        region=one(choices.REGION),
        bodies=tuple(draw(st.lists(bodies, max_size=2))),
        tile=draw(st.sampled_from(((1, 2, 2), (2, 1, 3), (1, 3, 1)))),
    )
    if dit.cross:  # as many as the video, sometimes
        dit = replace(dit, cross=draw(st.sampled_from((5, dit.tokens))))
    return dit
