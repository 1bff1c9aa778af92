"""Compiled kernels on disk, by what they were made from. A wrong or torn entry is never loaded.

An entry is one file whose name is the hash of everything that decides its content. It is written to a file of its own
and moved into place, which is atomic: of several writers one wins, readers see one whole entry or none, and no lock is
needed. A checksum over the name and the content tells entries that are damaged, cut short or under another's name;
these are taken for missing, and are written again.

A folder that can't be read or written costs a compilation in each process, and one warning.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import config
from .say import say

MAGIC = b"sta-kernel-1\n"
_HEAD = struct.Struct("<QQ")  # bytes of the code, bytes of the log
_CHECKSUM = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Entry:
    """code: the binary. log: what the compiler said."""

    code: bytes
    log: str


def folder() -> Path:
    """The option `cache_dir`, or a folder in torch's own cache."""
    chosen = config.cache_dir or os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "sta_kernels"
    user = re.sub(r'[\\/:*?"<>|]', "_", _user())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}" / "sta_kernels"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return str(os.getuid())


def key_of(*parts: str) -> str:
    """A hash that no other sequence of texts has: parts can't run into each other."""
    digest = hashlib.sha256(MAGIC)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def load(key: str) -> Entry | None:
    try:
        place = _place(key)
        if not _is_ours(place.parent):
            return None
        data = place.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _say_unusable(error)
        return None
    return _unpack(key, data)


def store_first(key: str, entry: Entry) -> Entry:
    """What every process finds from now on: this entry, or one that was there before."""
    store(key, entry, first=True)
    return load(key) or entry


def store(key: str, entry: Entry, first: bool = False) -> bool:
    """Whether one is kept. Never raises for a disk's sake. first: a whole entry that is there already stays."""
    temporary = ""
    try:
        place = _place(key)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(place.parent):
            raise PermissionError(f"{place.parent} belongs to another user")
        handle, temporary = tempfile.mkstemp(prefix=f"{key[:16]}.", suffix=".tmp", dir=place.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_pack(key, entry))
            file.flush()
            os.fsync(file.fileno())
        if not (first and _linked(temporary, place, key)):
            os.replace(temporary, place)
    except OSError as error:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        _say_unusable(error)
        return False
    return True


def _linked(temporary: str, place: Path, key: str) -> bool:
    """Whether a whole entry is in place now; a link, unlike a move, fails where another process was faster."""
    try:
        os.link(temporary, place)
    except FileExistsError:
        if load(key) is None:
            return False
    except OSError:  # a file system without links
        return False
    os.unlink(temporary)
    return True


def _place(key: str) -> Path:
    return folder() / f"{key}.sta"


def _is_ours(where: Path) -> bool:
    """Binaries are run: a folder that somebody else made in a shared place is not read."""
    return not hasattr(os, "getuid") or where.stat().st_uid == os.getuid()


def _pack(key: str, entry: Entry) -> bytes:
    log = entry.log.encode()
    body = MAGIC + _HEAD.pack(len(entry.code), len(log)) + entry.code + log
    return body + _checksum(key, body)


def _unpack(key: str, data: bytes) -> Entry | None:
    body, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    start = len(MAGIC) + _HEAD.size
    if len(body) < start or checksum != _checksum(key, body):
        return None
    size, log_size = _HEAD.unpack_from(body, len(MAGIC))
    if not body.startswith(MAGIC) or start + size + log_size != len(body):
        return None
    return Entry(body[start : start + size], body[start + size :].decode())


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _say_unusable(error: OSError) -> None:
    say(
        f"the folder of compiled kernels can't be used ({error}); each process compiles them again. "
        "Set sta_compile.config.cache_dir or STA_CACHE_DIR to a folder that can be written"
    )
