"""The source of a C++ kernel: a rendered preamble, and the template that it includes.

The preamble is all that depends on a KernelSpec, so that the template stays a file that an editor can read. Everything
that decides the binary is in `Source`: its text, its include folders, and the content of each header that it reaches.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..ir.kernel_spec import KernelSpec
from .cutlass_programs import program_of

OPERANDS = {"bf16": "BF16", "fp16": "F16"}  # in the names of CUTLASS
_INCLUDE = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]*(?:[<"]([^>"]+)[>"]|CUDA_STD_HEADER\((\w+)\))', re.M
)


@dataclass(frozen=True)
class Source:
    """text: the file to compile. headers: a hash of every file that it can include."""

    text: str
    headers: str


def templates() -> Path:
    """The folder of the templates; packages are installed as folders (no zip)."""
    return Path(str(resources.files("sta_compile.cutlass_templates")))


def render(spec: KernelSpec, include: tuple[Path, ...]) -> Source:
    """include: folders that headers are looked for in, in order."""
    text = _template("sm90/kernel.cu.jinja").render(
        spec=spec,
        program=program_of(spec),
        layouts=list(dict.fromkeys(program_of(spec).entries.values())),
        mma=OPERANDS[spec.dtype],
    )
    return Source(text, _headers(_includes(text), include))


@lru_cache(maxsize=16)
def _template(name: str) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates()),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def _includes(text: str) -> tuple[str, ...]:
    return tuple(a or f"cuda/std/{b}" for a, b in _INCLUDE.findall(text))


@lru_cache(maxsize=64)
def _headers(names: tuple[str, ...], include: tuple[Path, ...]) -> str:
    """A hash of the files that can be reached, whatever the conditions around an #include say.

    A name that is in no folder is part of it too: a file that appears later is a change.
    """
    digest = hashlib.sha256()
    seen: set[str] = set()
    todo = [(name, "") for name in reversed(names)]
    while todo:
        name, beside = todo.pop()
        path = _find(name, beside, include)
        at = name if path is None else str(path)
        if at in seen:
            continue
        seen.add(at)
        content = b"" if path is None else path.read_bytes()
        digest.update(f"{name} {len(content)} {path is None}\n".encode())
        digest.update(content)
        folder = "" if path is None else str(path.parent)
        todo += [(n, folder) for n in reversed(_includes(content.decode(errors="replace")))]
    return digest.hexdigest()


def _find(name: str, beside: str, include: tuple[Path, ...]) -> Path | None:
    folders = (Path(beside), *include) if beside else include
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
