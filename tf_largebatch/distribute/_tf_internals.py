"""The one door to TensorFlow's private Python API.

Every `tensorflow.python` name that this package uses is imported here and nowhere else, so that a
new TensorFlow release is checked in one file. `tf.distribute` has no public way to replace the
cross-device ops, the input iterators or the reduction of a multi-worker strategy; all of it is
done by subclassing what is imported below.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tf_largebatch.core.errors import UnsupportedVersionError

# Both ends are tested; see `make test-versions`.
OLDEST_TENSORFLOW = (2, 18)
FIRST_UNTESTED_TENSORFLOW = (2, 22)
OLDEST_KERAS = (3, 10)


def check_tensorflow_version(version: str) -> None:
    """Refuses a TensorFlow whose private API this package was not tested with.

    Raises:
        UnsupportedVersionError: `version` lies outside 2.18 to 2.21.
    """
    if not OLDEST_TENSORFLOW <= _numbers(version) < FIRST_UNTESTED_TENSORFLOW:
        raise UnsupportedVersionError(
            f"TensorFlow {version} is installed, but tf_largebatch.distribute subclasses private "
            "parts of TensorFlow and is tested with 2.18 to 2.21 only: "
            "pip install 'tensorflow>=2.18,<2.22'."
        )


def check_keras_version(version: str) -> None:
    """Refuses a Keras whose metrics come out wrong on several workers.

    Up to 3.9 each update of a metric's variables is summed over the workers, at once.

    Raises:
        UnsupportedVersionError: `version` is older than 3.10.
    """
    if _numbers(version) < OLDEST_KERAS:
        raise UnsupportedVersionError(
            f"Keras {version} is installed, whose metrics are not kept by each worker, and come "
            "out wrong; tf_largebatch.distribute needs Keras 3.10 or later: "
            "pip install 'keras>=3.10'."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


check_tensorflow_version(tf.__version__)
check_keras_version(keras.__version__)

# The imports below may fail in an untested release, so the check comes first.
from tensorflow.python.distribute import input_lib  # noqa: E402
from tensorflow.python.distribute.collective_all_reduce_strategy import (  # noqa: E402
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.collective_util import Options  # noqa: E402
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce  # noqa: E402
from tensorflow.python.distribute.cross_device_utils import (  # noqa: E402
    CollectiveReplicaLauncher,
)
from tensorflow.python.distribute.reduce_util import ReduceOp  # noqa: E402
from tensorflow.python.distribute.values import (  # noqa: E402
    DistributedValues,
    Mirrored,
    PerReplica,
    SyncOnReadVariable,
)
from tensorflow.python.eager.context import context  # noqa: E402
from tensorflow.python.ops.collective_ops import (  # noqa: E402
    broadcast_recv_v2,
    broadcast_send_v2,
)
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext  # noqa: E402

__all__ = [
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CollectiveReplicaLauncher",
    "DistributedValues",
    "Mirrored",
    "Options",
    "PerReplica",
    "ReduceOp",
    "SyncOnReadVariable",
    "broadcast_recv_v2",
    "broadcast_send_v2",
    "context",
    "in_xla_context",
    "input_lib",
    "run_independently",
    "tensorflow_has_started",
]


def in_xla_context() -> bool:
    """Whether the graph being built is compiled by XLA (`jit_compile=True`)."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def run_independently(op: tf.Operation) -> None:
    """Leaves the order of an op in a function's graph to the edges that it has.

    Else TensorFlow runs all ops one after the other that have effects but touch no variable.
    """
    manager = tf.compat.v1.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(op)


def tensorflow_has_started() -> bool:
    """Whether TensorFlow has run an op, after which it can join a cluster no more."""
    return context()._context_handle is not None
