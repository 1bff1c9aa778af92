"""`sta_compile.rewrite(exported_program, ...)`: the same stages for a program that `torch.export` captured.

    program = torch.export.export(model, (), inputs)
    program = sta_compile.rewrite(program, window=(18, 24, 24), noise="0..1000")
    torch._inductor.aoti_compile_and_package(program, package_path="model.pt2")

A package calls `torch.ops.sta.*`, so a process that loads it imports sta_compile first.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from . import _torch
from .analysis.graph_view import mark_constant, mark_parameter
from .backend import rewrite_for_device
from .errors import StaError
from .report import record
from .rewriting.fake_values import VALUE
from .rewriting.python_indexing import index_in_python
from .settings import Settings, given_options


def rewrite(
    program: ExportedProgram, options: Mapping[str, Any] | None = None, **more: Any
) -> ExportedProgram:
    """A program in which every self-attention over video tokens that can be replaced is; the given one stays as it is.

    options and further keywords: options of sta_compile. What was done is the last of `sta_compile.reports()`. The first
    value of the timestep, which the noise convention is inferred from, is that of the program's example inputs. Raises
    StaError for what is no program, for a mistake in the options, and for options of inductor, which belong to the compile
    of the program.
    """
    if not isinstance(program, ExportedProgram):
        raise StaError(
            f"rewrite takes what torch.export.export returns, not {type(program).__name__}; pass "
            "torch.export.export(model, args), or compile the model itself by sta_compile.compile(model)"
        )
    settings, patches = Settings.resolve({**given_options(options), **more})
    if patches:
        raise StaError(
            f"{', '.join(patches)} are options of inductor; pass them to the compile of the program, for example "
            "aoti_compile_and_package(program, inductor_configs={...})"
        )
    gm = copy.deepcopy(program.graph_module)
    signature = copy.deepcopy(program.graph_signature)
    own = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    for module in _torch.graph_modules(gm):
        for node in module.graph.nodes:
            if "val" in node.meta:
                node.meta[VALUE] = node.meta["val"]
            if node.op == "placeholder" and node.name in own:
                mark_parameter(node)
    constants = signature.inputs_to_lifted_tensor_constants
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in constants:
            mark_constant(node, program.constants[constants[node.name]])
    for module in _torch.graph_modules(gm):
        index_in_python(module)
    gm, report = rewrite_for_device(gm, _values(program, gm), settings, remember=False)
    if any(p.requires_grad for p in program.parameters()):
        report.say_of_gradients()
    record(report)
    if not report.replaced:
        return program
    output = next(iter(reversed(gm.graph.nodes)))
    outputs = output.args[0]
    for spec, node in zip(signature.output_specs, outputs, strict=True):
        if isinstance(node, torch.fx.Node):
            spec.arg.name = node.name
    edited: ExportedProgram = _torch.program_of(program, gm, signature)
    return edited


def _values(program: ExportedProgram, gm: torch.fx.GraphModule) -> list[Any]:
    """What the program was captured with, one for each placeholder; None for weights."""
    names = list(program.graph_signature.user_inputs)
    given = tree_leaves(program.example_inputs) if program.example_inputs is not None else []
    known = dict(zip(names, given, strict=True)) if len(names) == len(given) else {}
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [known.get(node.name, node.meta.get("val")) for node in inputs]
