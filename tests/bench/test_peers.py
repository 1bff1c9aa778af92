"""Peers that are not installed here: their glue, on stand-ins that compute what their documentation says."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from sta_compile.bench.check import check
from sta_compile.bench.inputs import Inputs
from sta_compile.bench.patterns import Neighbourhood, Tiles
from sta_compile.bench.peers import PEERS
from sta_compile.bench.workloads import SMALL, W1, Workload

CPU = torch.device("cpu")
BY_NAME = {peer.name: peer for peer in PEERS}
TINY = SMALL[0]
BLOCKY = Workload("blocky", (8, 8, 16), (2, 2, 2), (1, 1, 1), 2, head_dim=32)  # tiles of 128


def install(monkeypatch, **modules):
    for name, attributes in modules.items():
        path = name.replace("__", ".")
        module = ModuleType(path)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, path, module)


def attend(q, k, v, mask, scale):
    """[batch, heads, tokens, head_dim]"""
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def seen(pattern, tokens):
    return pattern.sees(CPU)(None, None, torch.arange(tokens)[:, None], torch.arange(tokens)[None])


@pytest.mark.parametrize("backward", [False, True])
def test_natten(monkeypatch, backward):
    def na3d(q, k, v, *, kernel_size, scale):
        grid = tuple(q.shape[1:4])
        mask = seen(Neighbourhood(grid, kernel_size), q[0, ..., 0, 0].numel())
        flat = (x.flatten(1, 3).transpose(1, 2) for x in (q, k, v))
        return attend(*flat, mask, scale).transpose(1, 2).unflatten(1, grid)

    install(monkeypatch, natten={"na3d": na3d})
    inputs = Inputs.make(replace(TINY, backward=backward), CPU)
    assert check(inputs, BY_NAME["natten"].prepare(inputs)) < 1e-5


def test_fastvideo(monkeypatch):
    w = replace(TINY, heads=3)

    def sliding_tile_attention(q, k, v, window_size, text_length, has_text, seq_shape):
        assert (text_length, has_text, seq_shape) == (0, False, "5x6x8")
        assert len(window_size) == q.shape[1]
        return attend(q, k, v, seen(w.pattern, w.video), q.shape[3] ** -0.5)

    install(monkeypatch, fastvideo_kernel={"sliding_tile_attention": sliding_tile_attention})
    inputs = Inputs.make(w, CPU)
    assert check(inputs, BY_NAME["fastvideo STA"].prepare(inputs)) < 1e-5


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["flash-attn-4", "flash-attn-4 STA"])
def test_flash_attention_4(monkeypatch, name, backward):
    class Blocks:
        def __init__(self, count, index, full_count, full_index, *, block_size):
            assert not count.any()
            assert block_size == (128, 128)
            self.rows = [
                sorted(row[:n].tolist())
                for row, n in zip(full_index[0, 0], full_count[0, 0], strict=True)
            ]

    def flash_attn_func(q, k, v, *, softmax_scale, **blocks):
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if blocks:
            mask[:] = False
            for row, columns in enumerate(blocks["block_sparse_tensors"].rows):
                for column in columns:
                    mask[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] = True
        assert ("block_sparse_tensors_bwd" in blocks) == (backward and bool(blocks))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return attend(*heads, mask, softmax_scale).transpose(1, 2), None

    install(
        monkeypatch,
        flash_attn={},
        flash_attn__cute={},
        flash_attn__cute__interface={"flash_attn_func": flash_attn_func},
        flash_attn__cute__block_sparsity={"BlockSparseTensorsTorch": Blocks},
    )
    inputs = Inputs.make(replace(BLOCKY, backward=backward), CPU)
    assert check(inputs, BY_NAME[name].prepare(inputs)) < 1e-5


@pytest.mark.parametrize("name", ["flex STA", "flex NATTEN", "flex Swin"])
@pytest.mark.parametrize("grid", [(6, 8, 16), (5, 6, 11)])
def test_blocks_of_flex_attention(name, grid):
    """The lists are those of create_block_mask, and the results those of the definition."""
    from torch.nn.attention.flex_attention import create_block_mask

    from sta_compile.bench.peers.flex import block_mask

    inputs = Inputs.make(replace(TINY, grid=grid, tiles=(3, 2, 4)), CPU)
    peer = BY_NAME[name]
    assert check(inputs, peer.prepare(inputs)) < 1e-5
    q, k, _ = inputs.head_major
    pattern = peer._pattern(inputs)
    found = block_mask(pattern, q, k)
    usual = create_block_mask(pattern.sees(CPU), None, None, q.shape[2], k.shape[2], "cpu", 128)
    assert torch.equal(found.to_dense(), usual.to_dense())
    assert torch.equal(found.full_kv_num_blocks, usual.full_kv_num_blocks)
    assert torch.equal(found.full_q_num_blocks, usual.full_q_num_blocks)


def test_each_says_why_it_can_not_run():
    inputs = Inputs.make(TINY, CPU)
    reasons = {name: peer.refuse(inputs) for name, peer in BY_NAME.items()}
    assert reasons["cudnn"] == reasons["natten"] == "it needs an NVIDIA GPU"
    assert reasons["flash"] == reasons["flex STA"] == ""
    assert "6x8x8" in BY_NAME["fastvideo STA"].refuse(Inputs.make(replace(TINY, head_dim=128), CPU))
    with_text = Inputs.make(SMALL[1], CPU)
    assert "text" in BY_NAME["natten"].refuse(with_text)
    assert "video tokens alone" in BY_NAME["flex Swin"].refuse(with_text)


def test_windows_have_the_same_extents():
    from sta_compile.bench.peers.peer import swin, window_in_tokens

    class Paper:
        workload = W1

    assert window_in_tokens(Paper) == (18, 24, 24)
    assert swin(Paper) == Tiles(swin(Paper).tiling, swin(Paper).window)
    assert swin(Paper).tiling.tiles == (2, 2, 3)
    assert swin(Paper).window.tiles == (1, 1, 1)
