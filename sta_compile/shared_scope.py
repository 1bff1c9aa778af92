"""A change that calls of a model make for their own time and share where they overlap, in whatever threads they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SharedScope:
    """The first call that is inside makes the change, the last one that leaves undoes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0

    @contextmanager
    def held(self, enter: Callable[[], None], leave: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                enter()
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    leave()
