"""The `sta` operator library: one handle that every registration goes through.

Schemas are defined here by hand, so that lengths can be symbolic (`SymInt[]`). Inputs keep the
strides that the fake kernels saw: kernels read any strides, so inductor has no reason to copy.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("sta", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(schema: str) -> None:
    LIBRARY.define(schema, tags=TAGS)
