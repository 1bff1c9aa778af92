"""How C++ kernels divide a problem, compiled for the CPU: every row once, and the keys that the definition says."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from sta_compile.codegen.cutlass_layout import CONTEXTS, PROBLEM, Layout
from sta_compile.codegen.cutlass_source import templates
from sta_compile.ops.arguments import geometry_of
from sta_compile.runtime.cutlass_parameters import Arguments
from sta_compile.runtime.cutlass_problem import problem_tables, problem_values, thread_blocks
from tests.ops.problems import build, problems

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no host compiler")
LAYOUT = Layout("Problem", (), PROBLEM)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")

    @cache
    def compiled(warpgroups, per_head):
        path = folder / f"work_{warpgroups}_{per_head}.so"
        flags = [f"-DWARPGROUPS={warpgroups}", f"-DHEAD_WINDOWS={str(per_head).lower()}"]
        source = Path(__file__).with_name("work_on_host.cpp")
        command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *flags]
        subprocess.run([*command, f"-I{templates()}", str(source), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))

    return compiled


def packed(geometry, warpgroups, batch, heads, key_lengths, dense):
    """(parameters, thread blocks) as a launch has them."""
    rows = 64 * warpgroups
    blocks = thread_blocks(rows, geometry, heads[0], dense is not None)
    values = problem_values(rows, geometry, blocks, (batch, *heads), 1.0, key_lengths)
    pointers = {"problem.lengths": 0, "problem.dense": 1}
    tables = problem_tables(geometry, torch.device("cpu"), rows)
    arguments = Arguments(LAYOUT, (), pointers, values, tables)
    return arguments, blocks.total(batch, heads[0])


def mask_of_work(library, arguments, blocks, tensors, shape):
    """bool [batch, heads, query, key], and how often each row is owned."""
    parameters = arguments.of(tensors)
    at = ctypes.c_void_p.from_address(parameters.address).value
    room = (ctypes.c_int * 4_000_000)()
    used = library.query_work(ctypes.c_void_p(at), blocks, room)
    numbers = iter(room[:used])
    mask, owned = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape[:3], dtype=torch.int64)
    for batch, head, first, count, runs in zip(*[numbers] * 5, strict=False):
        rows = slice(first, first + count)
        owned[batch, head, rows] += 1
        for _ in range(runs):
            start, length = next(numbers), next(numbers)
            mask[batch, head, rows, start : start + length] = True
    return mask, owned


@settings(max_examples=80, deadline=None)
@given(problems())
def test_rows_and_keys(library, problem):
    problem |= {"key_mask": None, "video_mask": None, "head_dim": 1}
    (q, k, _, lengths, dense, segments, grid, spec, *_), mask = build(problem)
    geometry = geometry_of(segments, grid, spec)
    if len(geometry.contexts) > CONTEXTS or not geometry.queries:
        return
    heads = q.shape[1], k.shape[1]
    for warpgroups in (2, 3):
        arguments, blocks = packed(geometry, warpgroups, q.shape[0], heads, lengths, dense)
        compiled = library(warpgroups, bool(geometry.head_windows))
        shape = (q.shape[0], q.shape[1], geometry.queries, geometry.keys)
        found, owned = mask_of_work(compiled, arguments, blocks, (lengths, dense), shape)
        assert (owned == 1).all()
        expected = mask if mask.dim() == 4 else mask[:, None]
        assert (found == expected).all()


@settings(max_examples=40, deadline=None)
@given(problems())
def test_the_transposed_window(library, problem):
    problem |= {"roles": ("video",), "segments": [torch.Size(problem["grid"]).numel()]}
    problem |= {"key_lengths": None, "key_mask": None, "video_mask": None, "dense": None}
    (q, k, *_, segments, grid, spec, _), _ = build(problem)
    geometry = geometry_of(segments, grid, spec)
    arguments, _ = packed(geometry, 3, q.shape[0], (q.shape[1], k.shape[1]), None, None)
    at = ctypes.c_void_p.from_address(arguments.of((None, None)).address)
    compiled = library(3, bool(geometry.head_windows))
    tiling = geometry.tiling
    for head in range(q.shape[1]):
        window = geometry.head_windows[head] if geometry.head_windows else geometry.window
        width = window.effective(tiling)
        for tile in product(*map(range, tiling.tiles)):
            out = (ctypes.c_int * 6)()
            compiled.seen_by(at, head, (ctypes.c_int * 3)(*tile), out)
            for axis in range(3):
                firsts = [window.first(tiling, (i,) * 3)[axis] for i in range(tiling.tiles[axis])]
                sees = [i for i, a in enumerate(firsts) if a <= tile[axis] < a + width[axis]]
                first, count = out[2 * axis : 2 * axis + 2]
                assert sees == list(range(first, first + count))
