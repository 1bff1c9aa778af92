"""Stops early where the package is not installed: the root folders are packages only once it is."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("sta_compile.codegen") is None:
    raise pytest.UsageError(
        "sta_compile.codegen is missing: the repository's folders are mapped when the package is "
        "installed. Run `pip install -e '.[test]'`, or `make test`, which does it in .venv."
    )
