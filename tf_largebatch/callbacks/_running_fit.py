"""What a callback cannot ask Keras for: the `fit` that calls it, and the callbacks beside it.

Keras hands a callback its model and a few numbers. The rest is on the stack, in the public list of
callbacks and in the arguments of the public `fit`; in a loop of the user's own there is neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import keras


class _EpochIsOver:
    """`model.stop_training` while a resumed epoch ends: true, and told from anybody's `True`."""

    def __bool__(self) -> bool:
        return True


EPOCH_IS_OVER = _EpochIsOver()


@dataclass(frozen=True)
class RunningFit:
    """The arguments of a `fit`, as its code has them by now.

    Attributes:
        data: what is trained on, `x`.
        batches: Keras' iterator over it.
        validates: whether there is validation data.
    """

    data: Any
    batches: Any
    validates: bool

    @property
    def batch_spec(self) -> Any:
        """Of a batch, as TensorFlow has it, whatever kind of data `x` is."""
        return self.batches.data_adapter.get_tf_dataset().element_spec

    def begin_pass(self) -> None:
        """Has the next epoch read the data from a new iterator on, whatever is left of this one.

        Keras goes on with the old iterator where `steps_per_epoch` is given.
        """
        self.batches.reset()


class InitialEpoch(int):
    """The epoch that a `fit` begins with, for `model._initial_epoch`; no public way leads there.

    It is for the `fit` of one callback alone: for any other, as one that follows an exception, it
    counts as none.
    """

    _callback: Any

    @classmethod
    def of(cls, callback: Any, epoch: int) -> InitialEpoch:
        made = cls(epoch)
        made._callback = callback
        return made

    def __bool__(self) -> bool:
        """Keras takes `model._initial_epoch or initial_epoch`, so that also 0 must be true."""
        for frame in _frames():
            callbacks = frame.f_locals.get("callbacks")
            if isinstance(callbacks, keras.callbacks.CallbackList):
                return any(each is self._callback for each in callbacks.callbacks)
        return False


def running_fit(model: keras.Model) -> RunningFit | None:
    """The `fit` of `model` that is calling; None if there is none."""
    for frame in _frames():
        known = frame.f_locals
        is_fit = frame.f_code.co_name == "fit" and "epoch_iterator" in known
        if is_fit and known.get("self") is model:
            return RunningFit(
                data=known.get("x"),
                batches=known["epoch_iterator"],
                validates=known.get("validation_data") is not None,
            )
    return None


def callbacks_in_use() -> Sequence[Any]:
    """All callbacks of the running `fit`, or none if they cannot be found."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return tuple(owner.callbacks)
    return ()


def inner_callback(callback: Any) -> Any:
    """The callback within one that wraps another, such as `ChiefOnly`; else itself."""
    inner = getattr(callback, "callback", None)
    return inner_callback(inner) if isinstance(inner, keras.callbacks.Callback) else callback


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
