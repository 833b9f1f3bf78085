"""Times the update of a network's variables on CPU: ours against Keras' momentum SGD.

    python tools/benchmark_optimizers.py --output=optimizers.json

What is timed is a `tf.function` that applies given gradients, as large as the weights, to copies of
the network's trainable variables: no forward, no backward, no strategy. Runs of the optimizers
alternate, `--repeats` times, each of `--updates` updates. Before that, two updates of each are
compared with NumPy's in float64; an optimizer is verified when all its variables agree.

Optimizers (times are compared with the first one's):
    keras_sgd           keras.optimizers.SGD(momentum=0.9), without weight decay
    momentum_sgd        MomentumSGD, without weight decay
    momentum_sgd_decay  MomentumSGD with weight decay as L2
    lars                LARS with weight decay

JSON: {"results": [{"optimizer", "update_ms_p50", "update_ms_min", "update_ms_max", "update_ms_all",
"cpu_ms_p50", "cpu_ms_all", "verified", "problems"}], "ratios": [{"optimizer", "reference", "ratio",
"cpu_ratio", "lowest", "highest", "verified"}], "settings", "machine"}. A ratio is that of the
medians; lowest and highest are those of single repeats.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _command_line import exit_for_usage, hand_over, parse_flags, prepare_environment
from _machine import machine_facts
from _optimizer_results import (
    Arrays,
    Timing,
    check_weights,
    compare,
    expected_weights,
    figures_table,
    summarise,
)
from absl import app, flags
from rich.console import Console

_RATE, _MOMENTUM, _DECAY, _TRUST = 0.1, 0.9, 1e-4, 0.001
_SETTINGS = {  # of the oracle
    "keras_sgd": {},
    "momentum_sgd": {},
    "momentum_sgd_decay": {"weight_decay": _DECAY},
    "lars": {"weight_decay": _DECAY, "trust_coefficient": _TRUST},
}
_OPTIMIZERS = flags.DEFINE_list(
    "optimizers", list(_SETTINGS), f"Two or more of {', '.join(_SETTINGS)}."
)
_NETWORK = flags.DEFINE_enum(
    "network", "resnet50", ["resnet50", "resnet_small"], "Whose variables are updated."
)
_REPEATS = flags.DEFINE_integer("repeats", 15, "Runs of each optimizer.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", 4, "Updates of a run.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_SEED = 1
_VERIFIED_UPDATES = 2


def _optimizer(name: str) -> Any:
    import keras

    import tf_largebatch as tlb

    if name == "keras_sgd":
        return keras.optimizers.SGD(_RATE, momentum=_MOMENTUM)
    make = tlb.optimizers.LARS if name == "lars" else tlb.optimizers.MomentumSGD
    decay = _SETTINGS[name].get("weight_decay", 0.0)
    return make(_RATE, momentum=_MOMENTUM, weight_decay=decay)


def _network_variables() -> tuple[list[str], Arrays, Arrays]:
    """Names and first values of the variables, and gradients for them."""
    import tf_largebatch as tlb

    if _NETWORK.value == "resnet50":
        model = tlb.models.ResNet50(1000, input_shape=(224, 224, 3), seed=_SEED)
    else:
        model = tlb.models.ResNetSmall(10, depth=8, input_shape=(32, 32, 3), seed=_SEED)
    names = [variable.path for variable in model.trainable_variables]
    weights = [variable.numpy() for variable in model.trainable_variables]
    random = np.random.default_rng(_SEED)
    return names, weights, [random.normal(0, 0.01, w.shape).astype("float32") for w in weights]


def _prepared(
    name: str, weights: Arrays, gradients: Sequence[Any]
) -> tuple[Callable[[], Any], list[Any]]:
    """A function that makes one update, traced here, and the variables that it updates."""
    import keras
    import tensorflow as tf

    variables = [keras.Variable(value) for value in weights]
    optimizer = _optimizer(name)
    optimizer.build(variables)
    update = tf.function(lambda: optimizer.apply(gradients, variables))
    return update.get_concrete_function(), variables


def _timed(name: str, update: Callable[[], Any]) -> Timing:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(_UPDATES.value):
        update()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Timing(name, wall_ms=1e3 * wall / _UPDATES.value, cpu_ms=1e3 * cpu / _UPDATES.value)


def _run_all(console: Console) -> tuple[list[Timing], dict[str, list[str]]]:
    import tensorflow as tf

    names, weights, arrays = _network_variables()
    gradients = [tf.constant(array) for array in arrays]
    updates, problems = {}, {}
    for name in dict.fromkeys(_OPTIMIZERS.value):
        updates[name], variables = _prepared(name, weights, gradients)
        for _ in range(_VERIFIED_UPDATES):
            updates[name]()
        expected = expected_weights(
            weights,
            arrays,
            updates=_VERIFIED_UPDATES,
            learning_rate=_RATE,
            momentum=_MOMENTUM,
            **_SETTINGS[name],
        )
        found = [variable.numpy() for variable in variables]
        problems[name] = check_weights(names, weights, found, expected)
        console.print(f"{name}: {len(problems[name])} of {len(names)} variables are not as NumPy's")
    timings = [
        _timed(name, update) for _ in range(_REPEATS.value) for name, update in updates.items()
    ]
    return timings, problems


def main(_: Sequence[str]) -> int:
    chosen = set(_OPTIMIZERS.value)
    if not chosen <= set(_SETTINGS) or len(chosen) < 2:
        exit_for_usage(f"--optimizers must be two or more of {', '.join(_SETTINGS)}.")
    prepare_environment()
    machine = machine_facts()
    console = Console(stderr=True, highlight=False, markup=False)
    timings, problems = _run_all(console)
    rows = summarise(timings, problems)
    ratios = compare(rows)
    for row in rows:
        for problem in row["problems"]:
            console.print(f"NOT VERIFIED: {row['optimizer']}: {problem}")
    report = {
        "results": rows,
        "ratios": ratios,
        "settings": {flag.name: flag.value for flag in (_NETWORK, _REPEATS, _UPDATES)},
        "machine": machine,
    }
    return hand_over(figures_table(rows, ratios), report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
