"""What can't the operator take, whatever the grid? Checked of a site that is attention over video tokens beyond doubt."""

from __future__ import annotations

from .attention_names import SET_NATIVE
from .attention_site import AttentionSite, Problem, sizes_of
from .axes import same_size
from .graph_view import fake_value

FROM_OTHER_GRAPHS = Problem(
    "its queries, keys and values are made in other graphs",
    "if they are video, avoid the graph breaks right before it; hooks on single layers are such breaks: "
    "sta_compile.compile(model), called after they are set, moves offloaded layers by block",
)
# The hint where a whole model is compiled.
BREAKS_INSIDE = (
    "if they are video, move what breaks the graph out of the attention: give it a Python number for what it reads from a "
    "tensor, or compute that before the blocks"
)
ONE_BODY = Problem(
    "its block is called with the video and with other tokens",
    "give each stream of tokens a block of its own, or compile without nested regions: "
    "sta_compile.compile(model, regions=False)",
)
MADE_OF_VIDEO = Problem(
    "its tokens are made of the video's, but the graph shows no order of frames, rows and columns in them",
    "if they are merged, dropped or resized there is nothing to do; if tokens are put beside the video, put them before or "
    "after it as a whole, not between its frames",
)
SEVERAL_VIDEOS = Problem(
    "its tokens are several videos of one size, and this graph does not show which of them the model returns",
    "move what breaks the graph out of the loop over the blocks (TORCH_LOGS=graph_breaks names it)",
)
PICKED_BY_DATA = Problem("the tokens of its packed sequences are picked by data", SET_NATIVE)


def unsupported(site: AttentionSite) -> Problem | None:
    """Why a site has no replacement; None if it may have one."""
    head_dim = site.head_dim
    if site.problem is not None:
        return site.problem
    if site.causal:
        return Problem("causal attention over video tokens", "nothing to do")
    if site.dropout > 0:
        return Problem(f"attention dropout {site.dropout}", "call model.eval(), or set it to 0")
    if not isinstance(head_dim, int) or head_dim % 8 or not 8 <= head_dim <= 256:
        return Problem(
            f"head dim {head_dim}: kernels take multiples of 8 up to 256", "nothing to do"
        )
    if site.heads_in_batch and site.mask is not None:
        return Problem(
            "its heads are merged into the batch, and it has a mask",
            "call attention on [batch, heads, tokens, head_dim]",
        )
    if not _operands_agree(site):
        return Problem(
            "queries, keys and values differ in more than their number of heads",
            "expand keys and values to the queries' batch, and give both the queries' head dim",
        )
    if not fake_value(site.q).dtype.is_floating_point:
        return Problem("q is not a floating point tensor", "nothing to do")
    return None


def _operands_agree(site: AttentionSite) -> bool:
    """Attention broadcasts any axis of k and v; the operator takes a number of key heads that divides the queries'."""
    q, k, v = (sizes_of(node, order, site.samples) for node, order in site.operands)
    if any((order.heads is None) != (site.q_order.heads is None) for _, order in site.operands):
        return False
    if not all(map(same_size, k, v)):
        return False
    if not same_size(q[3], k[3]) or not same_size(q[0], k[0]):
        return False
    if same_size(q[1], k[1]):
        return True
    return isinstance(q[1], int) and isinstance(k[1], int) and k[1] > 0 and q[1] % k[1] == 0
