"""Times GhostBatchNormalization against keras.layers.BatchNormalization, forward and backward.

    python tools/benchmark_ghost_batch_norm.py --sizes=128x32x32x64,64x56x56x64 --output=ghost.json

A call is one `tf.function` that runs the layer in training mode and differentiates it by its
inputs, gamma and beta. Calls of the two layers alternate on the same inputs, `--repeats` times,
after one of each that traces, so that whatever else the machine does meets both. The ratio is the
median over repeats of ghost's time to that of Keras' call just before it, with the least and the
greatest. The CPU ratio is the same of processor time, over all threads, which other load on the
machine changes less.

Ghost's row is verified when its outputs, gradients and moving statistics are, within 1e-4 of their
greatest value, those of Keras' layer on each `--virtual_batch_size` rows alone. Keras' own row is
verified when its outputs have mean 0 and a variance of nearly 1.

JSON: {"results": [{"layer", "size", "time_ms_p50", "time_ms_min", "time_ms_max", "time_ms_all",
"cpu_ms_p50", "cpu_ms_all", "verified", "problems"}], "ratios": [{"size", "ratio", "lowest",
"highest", "cpu_ratio", "verified"}], "settings", "machine"}.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from _command_line import exit_for_usage, hand_over, parse_flags, prepare_environment
from _machine import machine_facts
from absl import app, flags
from rich import box
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np

_SIZES = flags.DEFINE_list(
    "sizes", ["128x32x32x64", "64x56x56x64", "128x14x14x256"], "Inputs: rows, places, channels."
)
_VIRTUAL_BATCH = flags.DEFINE_integer("virtual_batch_size", 32, "Rows of a group.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls of each layer.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_TOLERANCE = 1e-4
Step = Callable[[Any, Any], Any]


def _step(layer: Any) -> Step:
    """`(inputs, their gradient's factors)` to outputs and the gradients of inputs, gamma, beta."""
    import tensorflow as tf

    weights = [layer.gamma.value, layer.beta.value]

    @tf.function(autograph=False)
    def step(inputs: Any, upstream: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
        gradients = tape.gradient(outputs, [inputs, *weights], output_gradients=upstream)
        return [outputs, *gradients]

    return step


def _largest_difference(actual: Any, expected: np.ndarray) -> float:
    import numpy as np

    return float(np.max(np.abs(np.asarray(actual) - expected)) / np.max(np.abs(expected)))


def _ghost_problems(outcome: Sequence[Any], layer: Any, inputs: Any, upstream: Any) -> list[str]:
    """What differs from Keras' layer on each group of rows alone."""
    import keras
    import numpy as np

    size = _VIRTUAL_BATCH.value
    parts = []
    for start in range(0, inputs.shape[0], size):
        alone = keras.layers.BatchNormalization()
        alone.build(inputs.shape)
        rows = slice(start, start + size)
        values = [np.asarray(value) for value in _step(alone)(inputs[rows], upstream[rows])]
        parts.append([*values, alone.moving_mean.numpy(), alone.moving_variance.numpy()])
    outputs, by_inputs, by_gamma, by_beta, means, variances = zip(*parts, strict=True)
    expected = {
        "outputs": np.concatenate(outputs),
        "gradients of the inputs": np.concatenate(by_inputs),
        "gradient of gamma": np.sum(by_gamma, axis=0),
        "gradient of beta": np.sum(by_beta, axis=0),
        "moving mean": np.mean(means, axis=0),
        "moving variance": np.mean(variances, axis=0),
    }
    actual = [*outcome, layer.moving_mean.numpy(), layer.moving_variance.numpy()]
    differences = {
        name: _largest_difference(value, expected[name])
        for name, value in zip(expected, actual, strict=True)
    }
    return [
        f"{name} differ from separate groups by {difference:.1e} of the greatest"
        for name, difference in differences.items()
        if not difference <= _TOLERANCE
    ]


def _keras_problems(outcome: Sequence[Any], epsilon: float) -> list[str]:
    import numpy as np

    flat = np.reshape(outcome[0], [-1, outcome[0].shape[-1]]).astype(np.float64)
    fits = np.allclose(flat.mean(0), 0, atol=1e-3) and np.allclose(flat.var(0), 1, atol=2 * epsilon)
    return [] if fits else ["outputs are not normalised"]


def _measure(size: tuple[int, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of both layers, and their ratio."""
    import keras
    import tensorflow as tf

    import tf_largebatch as tlb

    layers = {
        "keras": keras.layers.BatchNormalization(),
        "ghost": tlb.normalization.GhostBatchNormalization(_VIRTUAL_BATCH.value),
    }
    inputs, upstream = (tf.random.stateless_normal(size, [seed, 0]) for seed in (1, 2))
    steps = {}
    problems = {}
    for name, layer in layers.items():
        layer.build(size)
        steps[name] = _step(layer)
        outcome = [value.numpy() for value in steps[name](inputs, upstream)]
        problems[name] = (
            _keras_problems(outcome, layer.epsilon)
            if name == "keras"
            else _ghost_problems(outcome, layer, inputs, upstream)
        )
    times: dict[str, list[float]] = {name: [] for name in layers}
    cpu: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(_REPEATS.value):
        for name, step in steps.items():
            started_at, cpu_before = time.perf_counter(), time.process_time()
            for value in step(inputs, upstream):
                value.numpy()  # which waits for it; on a CPU without a copy
            times[name].append(1e3 * (time.perf_counter() - started_at))
            cpu[name].append(1e3 * (time.process_time() - cpu_before))
    text = "x".join(map(str, size))
    rows = [
        {
            "layer": name,
            "size": text,
            "time_ms_p50": statistics.median(values),
            "time_ms_min": min(values),
            "time_ms_max": max(values),
            "time_ms_all": values,
            "cpu_ms_p50": statistics.median(cpu[name]),
            "cpu_ms_all": cpu[name],
            "verified": not problems[name],
            "problems": problems[name],
        }
        for name, values in times.items()
    ]
    return rows, _ratio(text, rows)


def _ratio(size: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios, cpu_ratios = (
        [ghost / keras for keras, ghost in zip(*(row[name] for row in rows), strict=True)]
        for name in ("time_ms_all", "cpu_ms_all")
    )
    return {
        "size": size,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "verified": all(row["verified"] for row in rows),
    }


def _table(rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Milliseconds, forward and backward", box=box.SIMPLE_HEAD)
    for heading in (
        "size",
        "layer",
        "p50",
        "min",
        "max",
        "CPU p50",
        "ratio",
        "CPU ratio",
        "verified",
    ):
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    texts = {
        ratio["size"]: (
            "{ratio:.2f} ({lowest:.2f}-{highest:.2f})".format(**ratio),
            f"{ratio['cpu_ratio']:.2f}",
        )
        for ratio in ratios
    }
    times = ("time_ms_p50", "time_ms_min", "time_ms_max", "cpu_ms_p50")
    for row in rows:
        table.add_row(
            row["size"],
            row["layer"],
            *(f"{row[name]:.2f}" for name in times),
            *(texts[row["size"]] if row["layer"] == "ghost" else ("", "")),
            "yes" if row["verified"] else "NO",
        )
    return table


def _checked_sizes() -> list[tuple[int, ...]]:
    """The sizes, or an exit with what is wrong with them."""
    sizes = []
    for text in dict.fromkeys(_SIZES.value):
        parts = text.split("x")
        if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
            exit_for_usage(f"--sizes must be like 128x32x32x64 or 512x256, not {text!r}.")
        size = tuple(map(int, parts))
        if size[0] % _VIRTUAL_BATCH.value:
            exit_for_usage(
                f"--virtual_batch_size={_VIRTUAL_BATCH.value} must divide the rows of {text}; "
                f"{math.gcd(_VIRTUAL_BATCH.value, size[0])} does."
            )
        sizes.append(size)
    return sizes


def main(_: Sequence[str]) -> int:
    sizes = _checked_sizes()
    prepare_environment()
    machine = machine_facts()
    rows, ratios = [], []
    for size in sizes:
        its_rows, ratio = _measure(size)
        rows += its_rows
        ratios.append(ratio)
        for row in its_rows:
            for problem in row["problems"]:
                print(f"NOT VERIFIED: {row['layer']} at {row['size']}: {problem}")
    report = {
        "results": rows,
        "ratios": ratios,
        "settings": {
            "virtual_batch_size": _VIRTUAL_BATCH.value,
            "repeats": _REPEATS.value,
        },
        "machine": machine,
    }
    return hand_over(_table(rows, ratios), report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
