"""The workers of `benchmark_overlap.py`; see `_forks.py` for how they start."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _all_reduce_values import rounding_tolerance
from _forks import run_forks
from _start_line import StartLine
from absl import app, flags

import tf_largebatch as tlb

_RESULT_DIR = flags.DEFINE_string("result_dir", None, "See _forks.py.", required=True)
_MODEL = flags.DEFINE_enum("model", None, ["resnet_small", "resnet50"], "Network.", required=True)
_DEPTH = flags.DEFINE_integer("depth", 8, "Of resnet_small.")
_IMAGE_SIZE = flags.DEFINE_integer("image_size", None, "Pixels of a side.", required=True)
_BATCH = flags.DEFINE_integer("per_replica_batch_size", None, "Images a worker.", required=True)
_ALL_REDUCE = flags.DEFINE_string("all_reduce", None, "As of LargeBatchStrategy.", required=True)
_WIRE_DTYPE = flags.DEFINE_string("wire_dtype", None, "As of LargeBatchStrategy.")
_BUCKET_BYTES = flags.DEFINE_integer("bucket_bytes", None, "As of LargeBatchStrategy.")
_IN_FLIGHT = flags.DEFINE_integer("max_buckets_in_flight", None, "As of LargeBatchStrategy.")
_REPEATS = flags.DEFINE_integer("repeats", None, "Timed calls of each function.", required=True)
_WARMUP = flags.DEFINE_integer("warmup", None, "Calls before them.", required=True)
_TIMEOUT = flags.DEFINE_float("timeout_seconds", None, "For each wait.", required=True)

_CLASSES = 10
_SEED = 1
_SINGLE_BUCKET_BYTES = 2**40
# Of two gradients of the same batch, relative to the tensor's largest: kernels may add in another
# order each time.
_REPEATED_BACKWARD = 1e-4


def build_model() -> keras.Model:
    keras.utils.set_random_seed(_SEED)
    shape = (_IMAGE_SIZE.value, _IMAGE_SIZE.value, 3)
    if _MODEL.value == "resnet50":
        return tlb.models.ResNet50(_CLASSES, input_shape=shape)
    return tlb.models.ResNetSmall(_CLASSES, depth=_DEPTH.value, input_shape=shape)


def make_gradients(model: keras.Model, rank: int) -> Callable[[], list[tf.Tensor]]:
    """Forward and backward of this worker's batch, as in a training step."""
    random = np.random.Generator(np.random.Philox(key=[_SEED, rank]))
    size = (_BATCH.value, *model.input_shape[1:])
    images = tf.constant(random.standard_normal(size, dtype=np.float32))
    labels = tf.constant(random.integers(_CLASSES, size=_BATCH.value))

    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, model.trainable_variables)

    return gradients


def all_reduce(tensors: Sequence[tf.Tensor], options: tlb.AllReduceOptions) -> list[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", list(tensors), options=options)


class Timed:
    """A traced function: its times, and a digest of all that it has returned.

    Args:
        call: what to time.
        is_reduced: whether all workers must get the same.
    """

    def __init__(self, call: Callable[[], Sequence[tf.Tensor]], *, is_reduced: bool) -> None:
        self._call = call
        self._digest = hashlib.sha256() if is_reduced else None
        self._spans: list[tuple[float, float]] = []
        self._cpu_seconds: list[float] = []

    def warm_up(self) -> list[tf.Tensor]:
        """Returns what the last call did."""
        for _ in range(1 + _WARMUP.value):
            outputs = self._call()
        return list(outputs)

    def time(self) -> None:
        cpu_start, start = time.process_time(), time.monotonic()
        outputs = self._call()
        end, cpu_end = time.monotonic(), time.process_time()
        self._spans.append((start, end))
        self._cpu_seconds.append(cpu_end - cpu_start)
        if self._digest is not None:
            for output in outputs:
                self._digest.update(output.numpy().tobytes())

    def report(self) -> dict[str, Any]:
        return {
            "spans_seconds": self._spans,
            "cpu_seconds": self._cpu_seconds,
            "sha256": self._digest.hexdigest() if self._digest is not None else None,
        }


class Sums:
    """What the workers' gradients sum to by TensorFlow's own all-reduce, and how near to expect it.

    Args:
        strategy: the workers'.
        gradients: this worker's.
    """

    def __init__(self, strategy: Any, gradients: Sequence[tf.Tensor]) -> None:
        self._workers = strategy.num_replicas_in_sync
        self._wire_dtypes = (_WIRE_DTYPE.value or None, None)  # of what is checked, and of these
        options = tlb.AllReduceOptions(algorithm="tensorflow")
        reduce = tf.function(
            lambda *tensors: strategy.run(lambda *own: all_reduce(own, options), args=tensors)
        )
        self._sums, self._magnitudes = (
            [tensor.numpy() for tensor in reduce(*own)]
            for own in (gradients, [tf.abs(gradient) for gradient in gradients])
        )

    def check(self, sums: Sequence[tf.Tensor], name: str, *, is_repeated: bool) -> list[str]:
        """What is wrong with sums of the same gradients, or of those of the same batch."""
        for place, (mine, theirs, magnitude) in enumerate(
            zip(sums, self._sums, self._magnitudes, strict=True)
        ):
            allowed = sum(
                rounding_tolerance(magnitude, self._workers, wire) for wire in self._wire_dtypes
            )
            if is_repeated:
                allowed = allowed + _REPEATED_BACKWARD * np.max(magnitude)
            excess = float(np.max(np.abs(mine.numpy() - theirs) - allowed))
            if not excess <= 0.0:
                return [f"{name}: gradient {place} is {excess:.1e} beyond what rounding allows"]
        return []


def chosen_options() -> dict[str, Any]:
    """Those of the command line, by the names that the strategy and AllReduceOptions share."""
    own = {
        "bucket_bytes": _BUCKET_BYTES.value,
        "max_buckets_in_flight": _IN_FLIGHT.value,
        "wire_dtype": _WIRE_DTYPE.value or None,
    }
    return {name: value for name, value in own.items() if value is not None}


def measure(rank: int) -> dict[str, Any]:
    """All functions of one worker, timed call by call in turn."""
    chosen = chosen_options()
    strategy = tlb.LargeBatchStrategy(
        all_reduce=_ALL_REDUCE.value,
        start_timeout_seconds=_TIMEOUT.value,
        timeout_seconds=_TIMEOUT.value,
        **chosen,
    )
    with strategy.scope():
        model = build_model()
    gradients = make_gradients(model, rank)
    single = {**chosen, "bucket_bytes": _SINGLE_BUCKET_BYTES}
    timed = {"compute": Timed(tf.function(lambda: strategy.run(gradients)), is_reduced=False)}
    local = timed["compute"].warm_up()
    sums = Sums(strategy, local)
    problems: dict[str, list[str]] = {}
    for variant, fields in {"buckets": chosen, "single_bucket": single}.items():
        options = tlb.AllReduceOptions(algorithm=_ALL_REDUCE.value, **fields)
        for part, call in make_functions(strategy, gradients, local, options).items():
            name = f"{variant}_{part}"
            timed[name] = Timed(call, is_reduced=True)
            outputs = timed[name].warm_up()
            found = sums.check(outputs, part, is_repeated=part == "step")
            problems.setdefault(variant, []).extend(found)
    time_in_turn(list(timed.values()), StartLine(strategy))
    strategy.barrier()
    return {
        "timed": {name: each.report() for name, each in timed.items()},
        "problems": problems,
        "gradients": len(local),
        "gradient_bytes": sum(gradient.numpy().nbytes for gradient in local),
        "all_reduce_report": strategy.all_reduce_report(),
    }


def make_functions(
    strategy: Any,
    gradients: Callable[[], list[tf.Tensor]],
    local: Sequence[tf.Tensor],
    options: tlb.AllReduceOptions,
) -> dict[str, Callable[[], Any]]:
    """The all-reduce of `local` alone, and a step: backward and the all-reduce of what it makes."""
    reduce = tf.function(
        lambda *tensors: strategy.run(lambda *own: all_reduce(own, options), args=tensors)
    )
    step = tf.function(lambda: strategy.run(lambda: all_reduce(gradients(), options)))
    return {"all_reduce": functools.partial(reduce, *local), "step": step}


def time_in_turn(timed: Sequence[Timed], start_line: StartLine) -> None:
    """Call by call, so that whatever else the machine does meets all of them."""
    for repeat in range(_REPEATS.value):
        first = repeat % len(timed)
        for each in (*timed[first:], *timed[:first]):
            start_line.wait()
            each.time()


def main(_: Sequence[str]) -> int:
    return run_forks(Path(_RESULT_DIR.value), measure)


if __name__ == "__main__":
    app.run(main)
