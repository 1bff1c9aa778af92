"""The operators `sta::attention`, `sta::tile`, `sta::untile`: importing this registers them."""

from __future__ import annotations

import torch

from . import attention as attention
from . import tile as tile

# For selective activation checkpointing, which lists expensive operators by name and would
# otherwise recompute the attention that replaced a listed scaled_dot_product_attention.
checkpoint_ops = [torch.ops.sta.attention.default]
