"""Which package may import which: read from the source, so that the layers stay what they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"sta_compile": ROOT / "sta_compile", "sta_compile.codegen": ROOT / "codegen"}

ALLOWED = {
    "errors": set(),
    "ir": {"errors"},
    "planning": {"errors", "ir"},
    "codegen": {"errors", "ir", "cutlass_templates"},
    # Where binaries are kept and what compiles them are options of the process.
    "runtime": {"errors", "ir", "codegen", "config", "tiers"},
    # Planning is pure: a spec for grids known only at run time is answered where it is launched.
    "ops": {"errors", "ir", "planning", "codegen", "runtime", "tiers"},
    "tiers": {"errors", "ir"},
    "_torch": set(),
    "_sizes": set(),
    # The layout problem and noise conventions are pure, so the analysis may ask planning.
    "analysis": {"errors", "ir", "planning", "_torch", "_sizes"},
    "rewriting": {"errors", "ir", "planning", "analysis", "_torch", "_sizes"},
    # A user of the whole package: it examines models.
    "coverage": {"errors", "ir", "report", "report_text", "explanation", "size_tables"},
    # Another one: it measures the operator.
    "bench": {"_version", "errors", "ir", "codegen", "ops", "runtime"},
    # Modules beside the packages are the top layer: they may import everything, but for these.
    "option_values": {"errors"},
    "settings": {"errors", "ir", "option_values", "config"},
    "config": {"errors", "settings"},
    "report": {"ir", "report_text"},
    "report_text": {"ir", "report"},
}
ABOVE_PIPELINE = {"backend", "explanation"}
NO_TORCH = ("torch", "triton")
NO_FX = ("torch.fx", "triton")


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            yield ".".join([package, *path.relative_to(folder).with_suffix("").parts]), path


def imports(module: str, tree: ast.AST, top_level: bool) -> Iterator[str]:
    """Absolute names of imported modules; `from a import b` counts as a.b."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif not (top_level and is_deferred(node)):
            yield from imports(module, node, top_level)


def is_deferred(node: ast.AST) -> bool:
    type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    return type_checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def starts_with(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


@pytest.mark.parametrize(("module", "path"), [pytest.param(*m, id=m[0]) for m in modules()])
def test_imports(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text())
    layer = module.split(".")[1]
    for name in imports(module, tree, top_level=False):
        if layer in ALLOWED and name.startswith("sta_compile."):
            assert name.split(".")[1] in ALLOWED[layer] | {layer}, f"{module} imports {name}"
        if name.startswith("sta_compile.pipeline"):
            assert layer in ABOVE_PIPELINE, f"{module} imports {name}"
    is_kernel_file = module.startswith("sta_compile.codegen.triton.")  # imported lazily
    for name in imports(module, tree, top_level=True):
        if layer in ("errors", "ir"):
            assert not starts_with(name, NO_TORCH), f"{module} imports {name}"
        if layer in ("planning", "codegen") and not is_kernel_file:
            assert not starts_with(name, NO_FX), f"{module} imports {name}"


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in FOLDERS["sta_compile"].glob("*/__init__.py")}
    assert packages | {"codegen"} <= ALLOWED.keys()
