"""How callbacks of single workers come to act together."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


class WorkerWishes:
    """What this worker wishes for, and what all workers have learnt to be wished for.

    Args:
        strategy: the model's; of others than `LargeBatchStrategy` each process stands for itself.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._extended = strategy.extended
        self._flags: Any = getattr(strategy.extended, "agreed_flags", None)
        self._own: set[str] = set()

    def wish(self, name: str) -> None:
        """One of `AgreedFlags`; all workers learn of it after the next training step."""
        if self._flags is None:
            self._own.add(name)
        else:
            self._flags.wish(name)

    def take(self, name: str) -> bool:
        """Whether all workers have learnt of it, after a training step, since the last call."""
        if self._flags is not None:
            return self._flags.take(name)
        taken = name in self._own
        self._own.discard(name)
        return taken

    def withdraw(self, name: str) -> None:
        """Takes back a wish that nobody has learnt of."""
        if self._flags is not None:
            self._flags.withdraw(name)
        self._own.discard(name)

    def any_worker(self, answer: bool, *, purpose: str) -> bool:
        """Whether any worker says yes, outside of steps; all must ask."""
        gather = getattr(self._extended, "gather", None)
        if gather is None:
            return answer
        return bool(np.any(gather(np.array([answer], np.int64), purpose=purpose)))
