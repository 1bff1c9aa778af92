"""The source of a C++ kernel: a rendered preamble, the template that it includes, and the parameters' layout.

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
from .cutlass_blocks import shared_bytes

ENTRY = "sta_attention_forward"
OPERANDS = {"bf16": "BF16", "fp16": "F16"}  # in the names of CUTLASS
MAP_BYTES = 128
MAPS = ("q", "k", "v", "k_group", "v_group")
POINTERS = ("out", "lse", "lengths", "dense", "key_mask", "video_mask", "shown")
CONTEXTS = 4  # segments beside the video at most
# The kernel's parameters behind its tensor maps: name, format character of `struct` and how many of it. An axis and a
# group of tiles are four integers, a divisor is three.
FIELDS = (
    *((name, "Q", 1) for name in POINTERS),
    *((name, "q", 1) for name in ("out_batch", "out_head", "out_token")),
    ("scale", "f", 1),
    *((name, "i", 1) for name in ("length_bytes", "batch_heads", "heads", "queries")),
    *((name, "i", 1) for name in ("video_key", "video_query")),
    *((name, "i", 12) for name in ("axis", "groups")),
    *((name, "I", 3) for name in ("by_share", "by_heads", "by_context_blocks", "by_video_blocks")),
    *((name, "i", 1) for name in ("context_blocks", "video_blocks")),
    *(("slab_blocks", "I", 9), ("band_blocks", "I", 27), ("group_blocks", "I", 81)),
    *((name, "i", 1) for name in ("contexts", "context_keys")),
    *((f"context_{name}", "i", CONTEXTS) for name in ("column", "key", "length", "query", "rows")),
)
SIZES = {"Q": 8, "q": 8, "f": 4, "i": 4, "I": 4}
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


def offsets() -> dict[str, int]:
    """Byte offset of each parameter."""
    found = {name: MAP_BYTES * index for index, name in enumerate(MAPS)}
    at = MAP_BYTES * len(MAPS)
    for name, kind, count in FIELDS:
        found[name] = at
        at += SIZES[kind] * count
    return found


def parameters_bytes() -> int:
    """Size of the parameters, padded to the alignment of a tensor map."""
    used = MAP_BYTES * len(MAPS) + sum(SIZES[kind] * count for _, kind, count in FIELDS)
    return -(-used // 64) * 64


def render(spec: KernelSpec, include: tuple[Path, ...]) -> Source:
    """include: folders that headers are looked for in, in order."""
    text = _template("sm90/attention_forward.cu.jinja").render(
        spec=spec,
        mma=OPERANDS[spec.dtype],
        shared_bytes=shared_bytes(spec.head_dim, spec.blocks),
        offsets=offsets(),
        parameters_bytes=parameters_bytes(),
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
