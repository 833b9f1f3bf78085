"""Which epoch an iterator over a training data set reads."""

from __future__ import annotations

import threading


class EpochCursor:
    """The first epoch not begun yet; shared by all iterators of one training data set.

    An iterator asks for its epoch when its first batch is read, and reports the epoch as begun
    when it has delivered enough of it. Iterators run on TensorFlow's threads, several may be
    alive at once, and an old one may report late: an epoch once begun never comes back.

    Args:
        initial_epoch: the first one.
        advances: `False` holds the cursor at `initial_epoch`, whatever is reported.
    """

    def __init__(self, initial_epoch: int, *, advances: bool = True) -> None:
        self._lock = threading.Lock()
        self._first_not_begun = initial_epoch
        self._advances = advances

    @property
    def first_not_begun(self) -> int:
        with self._lock:
            return self._first_not_begun

    def mark_begun(self, epoch: int) -> None:
        with self._lock:
            if self._advances:
                self._first_not_begun = max(self._first_not_begun, epoch + 1)
