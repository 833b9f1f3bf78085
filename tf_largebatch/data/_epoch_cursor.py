"""Where an iterator over a training data set begins."""

from __future__ import annotations

import threading


class EpochCursor:
    """The first epoch not begun yet; shared by all iterators of one training data set.

    An iterator asks for its place when its first batch is read, and reports the epoch as begun
    when it has delivered enough of it. Iterators run on TensorFlow's threads, several may be
    alive at once, and an old one may report late: an epoch once begun never comes back, unless it
    is sought.

    Args:
        initial_epoch: the first one.
        first_step: where in the first epoch its iterator begins; in later ones at 0.
        advances: `False` holds the cursor at its place, whatever is reported.
    """

    def __init__(self, initial_epoch: int, *, first_step: int = 0, advances: bool = True) -> None:
        self._lock = threading.Lock()
        self._epoch = initial_epoch
        self._step = first_step
        self._advances = advances

    @property
    def place(self) -> tuple[int, int]:
        """(first epoch not begun, step at which an iterator over it begins)."""
        with self._lock:
            return self._epoch, self._step

    def seek(self, epoch: int, step: int) -> None:
        """The next iterator to be read begins at `step` of `epoch`."""
        with self._lock:
            self._epoch, self._step = epoch, step

    def mark_begun(self, epoch: int) -> None:
        with self._lock:
            if self._advances and epoch >= self._epoch:
                self._epoch, self._step = epoch + 1, 0
