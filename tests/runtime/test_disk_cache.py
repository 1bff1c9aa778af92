"""Entries on disk are whole and right, whatever happens to the disk or beside us."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import warnings
from pathlib import Path

import pytest

from sta_compile import config
from sta_compile.runtime import disk_cache, say
from sta_compile.runtime.disk_cache import Entry, folder, key_of, load, store

KEY = key_of("a", "b")
ENTRY = Entry(b"\x7fELF" + bytes(range(128)), "ptxas info    : Used 168 registers")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(say, "_said", set())
    with config.patch(cache_dir=str(tmp_path / "cache")):
        yield


def the_file():
    (path,) = folder().glob("*.sta")
    return path


def test_what_was_stored_is_loaded():
    assert load(KEY) is None
    assert store(KEY, ENTRY)
    assert load(KEY) == ENTRY
    assert load(key_of("a", "c")) is None
    assert os.listdir(folder()) == [f"{KEY}.sta"]
    assert store(KEY, Entry(b"", ""))
    assert load(KEY) == Entry(b"", "")


def test_any_damage_is_found():
    store(KEY, ENTRY)
    path = the_file()
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert load(KEY) is None, at
        path.write_bytes(whole[:at])
        assert load(KEY) is None, at
    path.write_bytes(whole + b"\0")
    assert load(KEY) is None
    for start in range(0, len(whole) - 16, 16):
        path.write_bytes(whole[:start] + bytes(16) + whole[start + 16 :])
        assert load(KEY) is None or whole[start : start + 16] == bytes(16)
    assert store(KEY, ENTRY)  # a bad entry is replaced
    assert load(KEY) == ENTRY


def test_an_entry_under_another_name_is_not_taken():
    store(KEY, ENTRY)
    other = key_of("other")
    the_file().rename(folder() / f"{other}.sta")
    assert load(other) is None


def test_every_part_of_a_key_counts():
    keys = [key_of("a", "b"), key_of("ab"), key_of("a", "b", ""), key_of("", "a", "b")]
    keys += [key_of("b", "a"), key_of("a", "c"), key_of()]
    assert len(set(keys)) == len(keys)


def test_key_changes_with_whatever_decides_the_binary(monkeypatch):
    """Source, headers, flags, compiler, its version, target: each alone."""
    from dataclasses import replace

    from sta_compile.codegen.cutlass_source import Source
    from sta_compile.codegen.toolchain import Toolchain
    from sta_compile.runtime import build as building
    from tests.codegen.usage import specs

    keys = []
    monkeypatch.setattr(disk_cache, "load", lambda key: keys.append(key) or ENTRY)
    source, tools = Source("int a;", "headers"), Toolchain("nvrtc", "13.0", ())
    spec = specs()[0]

    def build(source=source, tools=tools, spec=spec):
        monkeypatch.setattr(building, "render", lambda *_: source)
        monkeypatch.setattr(building, "toolchain", lambda _: tools)
        building.build(spec)

    build()
    build(source=replace(source, text="int b;"))
    build(source=replace(source, headers="others"))
    build(tools=replace(tools, version="13.1"))
    build(tools=replace(tools, name="nvcc"))
    build(spec=replace(spec, arch=100))
    monkeypatch.setattr(building, "FLAGS", ("-std=c++20",))
    build()
    assert len(set(keys)) == len(keys) == 7


def test_two_writers_interleaved_leave_one_whole_entry(monkeypatch):
    """Each has written half when the other begins; both finish, in either order."""
    both, entries = threading.Barrier(2), [Entry(bytes([i]) * 5000, str(i)) for i in range(2)]
    real = disk_cache._pack

    class Slow:
        """A file that is written in two halves."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            both.wait(10)
            self.file.write(data[len(data) // 2 :])
            both.wait(10)

        def __getattr__(self, name):
            return getattr(self.file, name)

    fdopen = os.fdopen
    monkeypatch.setattr(disk_cache.os, "fdopen", lambda *args: Slow(fdopen(*args)))
    threads = [threading.Thread(target=store, args=(KEY, entry)) for entry in entries]
    with config.patch():
        chosen = config.cache_dir
    config.cache_dir = chosen  # threads don't see a patch
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        del config.cache_dir
    assert load(KEY) in entries
    assert os.listdir(folder()) == [f"{KEY}.sta"]
    assert the_file().read_bytes() in [real(KEY, entry) for entry in entries]


def write_and_read(number, answers):
    whole = True
    for _ in range(60):
        whole = store(KEY, Entry(bytes([number]) * 20000, str(number))) and whole
        found = load(KEY)
        whole = whole and found is not None and found.code == bytes([int(found.log)]) * 20000
    answers.put(whole)


def test_eight_processes_at_once():
    processes = multiprocessing.get_context("fork")
    answers = processes.Queue()
    started = [
        processes.Process(target=write_and_read, args=(n, answers), daemon=True) for n in range(8)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of forks beside threads
        for process in started:
            process.start()
    assert [answers.get(timeout=60) for _ in started] == [True] * 8
    for process in started:
        process.join(60)
    assert load(KEY) is not None
    assert os.listdir(folder()) == [f"{KEY}.sta"]


def said(action):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            action()
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("where", ["mkstemp", "fsync", "replace", "mkdir"])
def test_a_disk_that_can_not_be_written_costs_one_warning(where, number, monkeypatch):
    def broken(*_, **__):
        raise OSError(number, os.strerror(number))

    module = {"mkstemp": disk_cache.tempfile, "mkdir": Path}.get(where, disk_cache.os)
    monkeypatch.setattr(module, where, broken)
    messages = said(lambda: store(KEY, ENTRY))
    monkeypatch.undo()
    (message,) = messages
    assert os.strerror(number) in message
    assert "STA_CACHE_DIR" in message
    assert not folder().exists() or os.listdir(folder()) == []


def test_a_file_where_the_folder_should_be():
    folder().parent.mkdir(parents=True)
    folder().write_text("in the way")
    messages = said(lambda: (store(KEY, ENTRY), load(KEY)))
    assert len(messages) <= 2
    assert all("can't be used" in message for message in messages)


def test_a_folder_of_another_user_is_not_read(monkeypatch):
    store(KEY, ENTRY)
    monkeypatch.setattr(disk_cache.os, "getuid", lambda: 12345678)
    assert load(KEY) is None
    (message,) = said(lambda: store(KEY, ENTRY))
    assert "belongs to another user" in message


def test_a_build_goes_on_without_a_disk(monkeypatch):
    from sta_compile.codegen.cutlass_source import Source
    from sta_compile.codegen.toolchain import Toolchain
    from sta_compile.runtime import build as building
    from tests.codegen.usage import specs

    monkeypatch.setattr(building, "render", lambda *_: Source("", ""))
    monkeypatch.setattr(building, "toolchain", lambda _: Toolchain("nvrtc", "13.0", ()))
    monkeypatch.setattr(building, "_compile", lambda *_: (b"code", "Used 5 registers"))
    folder().parent.mkdir(parents=True)
    folder().write_text("in the way")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cubin = building.build(specs()[0])
    assert (cubin.code, cubin.usage.registers) == (b"code", 5)


def test_folder_follows_torch(monkeypatch, tmp_path):
    with config.patch(cache_dir=None):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        assert folder() == tmp_path / "sta_kernels"
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        assert folder() == Path(default_cache_dir()) / "sta_kernels"
