"""The callbacks that stand beside one in a running `fit`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras


def callbacks_in_use() -> Sequence[Any]:
    """All callbacks of the running `fit`, or none if they cannot be found.

    Keras gives a callback no way to see the others. The list that is calling it is on the stack,
    and is a public class; in a loop of the user's own there is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return tuple(owner.callbacks)
        frame = frame.f_back
    return ()
