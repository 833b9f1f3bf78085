"""Writes states in the background, one after the other."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from tf_largebatch.core.state_directory import StateDirectory

# Of all objects: an exception may have left `fit` while a state was on its way.
_on_their_way: set[concurrent.futures.Future[Any]] = set()


def wait_for_all_writers() -> None:
    """Returns once no state is on its way in this process; errors are left to who began it."""
    concurrent.futures.wait(list(_on_their_way))


class StateWriter:
    """At most one state is on its way. Python waits for it when the process ends.

    Args:
        directory: where states go.
    """

    def __init__(self, directory: StateDirectory) -> None:
        self._directory = directory
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "tf_largebatch_state")
        self._writing: concurrent.futures.Future[Any] | None = None

    def write(self, update: int, contents: dict[str, Any], arrays: list[Any]) -> None:
        """Begins to write a state, which nobody may change any more, once the last is written."""
        self.wait()
        self._writing = self._thread.submit(self._directory.save, update, contents, arrays)
        _on_their_way.add(self._writing)
        self._writing.add_done_callback(_on_their_way.discard)

    def wait(self) -> None:
        """Returns once nothing is on its way.

        Raises:
            StateWriteError: the state could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def check(self) -> None:
        """Raises the error of a state that could not be written, as `wait`, without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()
