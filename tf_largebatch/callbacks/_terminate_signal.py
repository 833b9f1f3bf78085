"""SIGTERM, which schedulers send some time before they kill: noted while `fit` runs."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class TerminateSignal:
    """Notes the first SIGTERM. A second one, or one outside of the `fit`, does what it did before.

    Python runs handlers in the main thread only; in another one nothing is noted.

    Args:
        callback: in whose `fit` it is noted.
    """

    def __init__(self, callback: Any) -> None:
        self.received = False
        self._callback = callback
        self._is_installed = False
        self._before: Any = signal.SIG_DFL

    def install(self) -> None:
        """From now on; does nothing where a `fit` has left it installed."""
        if threading.current_thread() is threading.main_thread() and not self._is_installed:
            # None is a handler that was not set from Python, and cannot be set again.
            self._before = signal.signal(signal.SIGTERM, self._note) or signal.SIG_DFL
            self._is_installed = True

    def remove(self) -> None:
        """As it was before; also where `install` was not called."""
        if self._is_installed:
            self._put_back()

    def _put_back(self) -> None:
        signal.signal(signal.SIGTERM, self._before)
        self._is_installed, self._before = False, signal.SIG_DFL

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received and self._is_within_fit(frame):
            self.received = True
            return
        self._put_back()
        os.kill(os.getpid(), number)

    def _is_within_fit(self, frame: FrameType | None) -> bool:
        # An exception may have left `fit` without a word to its callbacks; another may run now.
        while frame is not None:
            if frame.f_code.co_name == "fit":
                in_use = getattr(frame.f_locals.get("callbacks"), "callbacks", ())
                if any(each is self._callback for each in in_use):
                    return True
            frame = frame.f_back
        return False
