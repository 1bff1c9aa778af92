"""Is a result right? Compared with the definition in float32, on a sample of rows, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import StaError
from .inputs import Contestant, Inputs
from .patterns import Sees

ROWS = 48
ROWS_OF_A_CHUNK = 512
LIMITS = {torch.bfloat16: (4e-3, 1e-2), torch.float32: (1e-5, 1e-5)}  # forward, backward
LIMITS_OF_PRECISION = {"fp8": 5.5e-2, "nvfp4": 0.17}
# The largest error of lse counts by so much: it is that of one row, and rounded scores are off by a part of themselves.
WEIGHT_OF_LSE = {"native": 1.0, "fp8": 0.2, "nvfp4": 0.2}


Place = tuple[int, int]  # (sample, head)


class WrongResult(StaError):
    """A contestant that does not compute what it is timed for."""


def check(inputs: Inputs, contestant: Contestant) -> float:
    """The largest relative error; raises WrongResult if that is over the limit or a result is not a number.

    Memory that the results may lie in is full of NaN before.
    """
    like = (inputs.q, inputs.k, inputs.v) if inputs.workload.backward else (inputs.q,)
    poison = [torch.full_like(x, torch.nan) for x in like for _ in range(2)]
    del poison
    found = contestant.result()
    w = inputs.workload
    if any(x.isnan().any() for x in found):
        raise WrongResult(f"{contestant.name} on {w.name}: NaN; nothing of it is timed")
    sees = contestant.pattern.sees(inputs.q.device)
    expected = _gradients if w.backward else _outputs
    places = [(sample, head) for sample in range(w.batch) for head in w.unlike_heads]
    worst = max(expected(inputs, place, sees, found) for place in places)
    native = LIMITS[inputs.q.dtype][w.backward]
    limit = LIMITS_OF_PRECISION.get(w.precision, native)
    if not worst <= limit:
        raise WrongResult(
            f"{contestant.name} on {w.name}: relative error {worst:.1e} is over {limit:.0e}; nothing of it is timed"
        )
    return worst


def sample(tokens: int, device: torch.device) -> Tensor:
    """Rows: both ends, and some between."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1])
    return torch.cat([ends, torch.randint(0, tokens, (ROWS,), generator=generator)]).to(device)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def _head(inputs: Inputs, place: Place) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout of a sample's head in float32; what pads the text is zeros, since 0 * NaN is NaN."""
    q, k, v, dout = (x[place].float() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    w = inputs.workload
    padding = (torch.arange(len(k), device=k.device) >= w.video + w.valid)[:, None]
    return q, k.masked_fill(padding, 0), v.masked_fill(padding, 0), dout


def _scores(inputs: Inputs, place: Place, q: Tensor, k: Tensor, rows: Tensor, sees: Sees) -> Tensor:
    """Of some rows with every key, -inf where the row does not see it."""
    keys = torch.arange(len(k), device=k.device)
    seen = sees(*place, rows[:, None], keys[None, :])
    return (q[rows] @ k.mT * inputs.scale).masked_fill_(~seen, -torch.inf)


def _outputs(inputs: Inputs, place: Place, sees: Sees, found: Sequence[Tensor]) -> float:
    """Of out relative to its norm, of lse as it is."""
    q, k, v, _ = _head(inputs, place)
    rows = sample(len(q), q.device)
    scores = _scores(inputs, place, q, k, rows, sees)
    out, *lse = (x[place][rows] for x in found)
    weight = WEIGHT_OF_LSE[inputs.workload.precision]
    apart = [weight * float((x - scores.logsumexp(-1)).abs().max()) for x in lse]
    return max([_error(out, scores.softmax(-1) @ v), *apart])


def _gradients(inputs: Inputs, place: Place, sees: Sees, found: Sequence[Tensor]) -> float:
    """dq of sampled queries, and dk and dv of sampled keys, which sum over all queries."""
    q, k, v, dout = _head(inputs, place)
    rows = sample(inputs.workload.video, q.device)
    dq = q.new_zeros(len(rows), q.shape[1])
    dk, dv = torch.zeros_like(dq), torch.zeros_like(dq)
    for chunk in (rows, *torch.arange(len(q), device=q.device).split(ROWS_OF_A_CHUNK)):
        weights = _scores(inputs, place, q, k, chunk, sees).softmax(-1)
        dweights = dout[chunk] @ v.mT
        delta = (weights * dweights).sum(-1, keepdim=True)
        if chunk is rows:
            dq = (weights * (dweights - delta)) @ k * inputs.scale
            continue
        columns = weights[:, rows]
        dv += columns.mT @ dout[chunk]
        dk += (columns * (dweights[:, rows] - delta)).mT @ q[chunk] * inputs.scale
    pairs = zip(found, (dq, dk, dv), strict=True)
    return max(_error(got[place][rows], expected) for got, expected in pairs)
