"""Plans a training run on a cluster: batch, rates, steps, time and efficiency for counts of hosts.

    python tools/plan_scaling.py --model=resnet50 --hosts=1,2,4,8,16,32 --bandwidth_gbit=50 \\
        --plot=plan.png --output=plan.json
    python tools/plan_scaling.py --parameters=60000000 --backward_ms=80 --hosts=64 --simulate
    python tools/plan_scaling.py --paper

Nothing is measured, and TensorFlow is not needed. Batch, peak rate, warmup and steps are those of
`tf_largebatch.Recipe`; a step's time is that of `tf_largebatch/core/scaling_plan.py`, whose
docstring says what is modelled and what is not. The defaults are the cluster of Goyal et al. 2017:
hosts of 8 P100 with 50 Gbit/s between them.

A model by its name has the parameters of its architecture, and backward's time is spread over its
layers as their multiply-adds are. Unless `--backward_ms` and `--rest_ms` say it, a step takes what
a P100 takes for as many multiply-adds of ResNet-50: give your own device's, timed on one. Of a
model given as `--parameters`, gradients become ready evenly over backward.

`--simulate` runs the largest number of hosts through the discrete-event simulator
(`core/step_simulation.py`), and says the best size of buckets, how many in flight, and from which
size of a buffer on the ring is the fastest: never on a power of two of hosts, where
halving/doubling moves as much in fewer steps. 4,096 hosts take half a minute, nearly all of it the
ring's.

`--paper` prints the figures of the two papers against the planner's, and which were fitted (see
`_plan_papers.py` for what was fitted to which, and for the one that contradicts the others):

    figure                                           paper      planner   off by
    8 P100: hours for 90 epochs                      29         29.0       0 %    fitted
    256 P100: efficiency to 8                        90 %       90.0 %     0 %    fitted
    32 hosts: halving/doubling against ring          3 times    3.0        0 %    fitted
    256 P100: peak network rate, Gbit/s              12.8       13.2      +3 %    predicted
    256 P100: hours for 90 epochs                    1          1.00       0 %    predicted
    352 P100: seconds an epoch                       30         29.4      -2 %    predicted
    352 P100: images/s                               40,000     43,300    +8 %    predicted
    2,048 V100: efficiency to one                    77.0 %     77.6 %    +1 %    predicted
    2,048 V100: images/s, by a V100's rate alone     1.73 M     1.74 M    +1 %    predicted
    256 P100: images/s                               40,000     31,800   -20 %    contradicts

JSON: {"results": [a row for each number of hosts: `row_of` in `_plan_rows.py`], "settings",
"simulation"}; with `--paper` {"figures": [{"name", "paper", "planned", "kind"}]}.

Exit code: 0; 1 when a figure of `--paper` that the others allow is off by more than 10 %; 2 for a
wrong command line.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _command_line import exit_for_usage, parse_flags
from _plan_models import NAMES, ModelProfile, profile_of
from _plan_papers import (
    IMAGENET,
    P100_BACKWARD_SECONDS,
    P100_REST_SECONDS,
    VARIATION,
    goyal_setup,
    paper_figures,
)
from _plan_rows import RunSettings, Setup, even_gradients, gradients_of, row_of
from absl import app, flags

import tf_largebatch as tlb
from tf_largebatch.core.cost_model import LinkCost
from tf_largebatch.core.scaling_plan import ALGORITHMS, Gradient, ReplicaWork

_MODEL = flags.DEFINE_enum("model", "resnet50", NAMES, "The network.")
_DEPTH = flags.DEFINE_integer("depth", 8, "Of resnet_small: 6 d + 2.", lower_bound=8)
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 224, "Pixels of a side.", lower_bound=1)
_CLASSES = flags.DEFINE_integer("num_classes", 1000, "Outputs of the network.", lower_bound=1)
_PARAMETERS = flags.DEFINE_integer(
    "parameters", None, "Of another model, instead of --model.", lower_bound=1
)
_GRADIENT_BYTES = flags.DEFINE_integer(
    "gradient_bytes", None, "With --parameters; by default by --wire_dtype.", lower_bound=1
)
_WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype", "float32", ["float32", "bfloat16", "float16"], "In which gradients travel."
)
_BACKWARD = flags.DEFINE_float(
    "backward_ms", None, "Backward of one replica alone.", lower_bound=0.0
)
_REST = flags.DEFINE_float(
    "rest_ms", None, "All else of a step of one replica alone.", lower_bound=0.0
)
_VARIATION = flags.DEFINE_float(
    "compute_variation",
    VARIATION,
    "Deviation of a replica's computing time from step to step, relative to its mean; a step "
    "waits for the slowest. The default is what 90 % efficiency on 256 GPUs says; 0 is without.",
    lower_bound=0.0,
    upper_bound=0.3,
)
_BATCH = flags.DEFINE_integer("per_replica_batch_size", 32, "Images a GPU.", lower_bound=1)
_PER_HOST = flags.DEFINE_integer("replicas_per_host", 8, "GPUs a host.", lower_bound=1)
_HOSTS = flags.DEFINE_list("hosts", ["1", "2", "4", "8", "16", "32"], "Numbers of hosts.")
_LATENCY = flags.DEFINE_float("latency_us", 68.0, "Of a step between hosts.", lower_bound=0.0)
_BANDWIDTH = flags.DEFINE_float(
    "bandwidth_gbit", 50.0, "10^9 bits a second, of a host each way; 0: no limit.", lower_bound=0.0
)
_INSIDE_LATENCY = flags.DEFINE_float(
    "inside_latency_us", 10.0, "Of a step inside a host.", lower_bound=0.0
)
_INSIDE_BANDWIDTH = flags.DEFINE_float(
    "inside_bandwidth_gbit", 320.0, "Of a GPU each way; 0 is without limit.", lower_bound=0.0
)
_ALGORITHM = flags.DEFINE_enum("algorithm", "fastest", ["fastest", *ALGORITHMS], "Between hosts.")
_BUCKET_BYTES = flags.DEFINE_integer(
    "bucket_bytes", 8 * 2**20, "As of LargeBatchStrategy.", lower_bound=1
)
_IN_FLIGHT = flags.DEFINE_integer(
    "max_buckets_in_flight", 4, "As of LargeBatchStrategy.", lower_bound=1
)
_EXAMPLES = flags.DEFINE_integer(
    "num_examples", IMAGENET.num_examples, "Of the training set.", lower_bound=1
)
_EPOCHS = flags.DEFINE_integer("epochs", IMAGENET.epochs, "Passes over it.", lower_bound=1)
_RATE = flags.DEFINE_float("base_learning_rate", IMAGENET.base_learning_rate, "As of Recipe.")
_BASE_BATCH = flags.DEFINE_integer("base_batch_size", IMAGENET.base_batch_size, "As of Recipe.")
_WARMUP = flags.DEFINE_float("warmup_epochs", IMAGENET.warmup_epochs, "As of Recipe.")
_SIMULATE = flags.DEFINE_boolean("simulate", False, "Ask the simulator too.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the simulator's draws.", lower_bound=0)
_PAPER = flags.DEFINE_boolean("paper", False, "Only the papers' figures.")
_PLOT = flags.DEFINE_string("plot", None, "File for the plot, as .png or .svg.")
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _gradients_and_times() -> tuple[Sequence[Gradient], float, float]:
    """Gradients, seconds of backward, seconds of the rest."""
    item_bytes = _ITEM_BYTES[_WIRE_DTYPE.value]
    if _PARAMETERS.value is not None:
        if not _BACKWARD.value:
            exit_for_usage("--parameters needs --backward_ms: of another model nothing is known.")
        size = _GRADIENT_BYTES.value or _PARAMETERS.value * item_bytes
        return even_gradients(size), *_times(_BACKWARD.value / 1e3)
    if _GRADIENT_BYTES.value is not None:
        exit_for_usage("--gradient_bytes goes with --parameters; --model knows its gradients.")
    model = _model(_MODEL.value)
    reference = profile_of("resnet50").multiply_adds * goyal_setup().work.images
    scale = model.multiply_adds * _BATCH.value / reference
    return gradients_of(model, item_bytes=item_bytes), *_times(P100_BACKWARD_SECONDS * scale)


def _times(default_backward: float) -> tuple[float, float]:
    backward = default_backward if _BACKWARD.value is None else _BACKWARD.value / 1e3
    if _REST.value is not None:
        return backward, _REST.value / 1e3
    return backward, backward * P100_REST_SECONDS / P100_BACKWARD_SECONDS


def _model(name: str) -> ModelProfile:
    return profile_of(
        name, num_classes=_CLASSES.value, image_size=_IMAGE_SIZE.value, depth=_DEPTH.value
    )


def _link(latency_us: float, gbit: float) -> LinkCost:
    return LinkCost(latency_us / 1e6, 8e-9 / gbit if gbit else 0.0)


def _setup() -> Setup:
    gradients, backward, rest = _gradients_and_times()
    return Setup(
        work=ReplicaWork(
            images=_BATCH.value,
            before_seconds=rest,
            backward_seconds=backward,
            variation=_VARIATION.value,
        ),
        gradients=gradients,
        replicas_per_host=_PER_HOST.value,
        inside=_link(_INSIDE_LATENCY.value, _INSIDE_BANDWIDTH.value),
        between=_link(_LATENCY.value, _BANDWIDTH.value),
        bucket_bytes=_BUCKET_BYTES.value,
        max_buckets_in_flight=_IN_FLIGHT.value,
        algorithm=None if _ALGORITHM.value == "fastest" else _ALGORITHM.value,
        run=RunSettings(
            num_examples=_EXAMPLES.value,
            epochs=_EPOCHS.value,
            base_learning_rate=_RATE.value,
            base_batch_size=_BASE_BATCH.value,
            warmup_epochs=_WARMUP.value,
        ),
    )


def _hosts() -> list[int]:
    if not _HOSTS.value or not all(text.isdecimal() and int(text) for text in _HOSTS.value):
        exit_for_usage(f"--hosts must be whole numbers of at least 1, not {_HOSTS.value}.")
    return sorted({int(text) for text in _HOSTS.value})


def _settings(setup: Setup) -> dict[str, Any]:
    fields = dataclasses.asdict(setup)
    fields.pop("gradients")
    return fields | {
        "model": _MODEL.value if _PARAMETERS.value is None else None,
        "parameters": _PARAMETERS.value,
        "gradient_bytes": setup.gradient_bytes,
    }


def _print_and_store(tables: Sequence[Any], report: dict[str, Any]) -> None:
    from rich.console import Console  # not for --help

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for table in tables:
        title, table.title = table.title, None  # which rich would break at the table's width
        console.print(title)
        console.print(table)
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(json.dumps(report, indent=2) + "\n")


def _compare_papers() -> int:
    from _plan_tables import papers_table

    figures = paper_figures()
    report = {"figures": [dataclasses.asdict(figure) for figure in figures]}
    _print_and_store([papers_table(figures)], report)
    return int(any(not figure.is_met for figure in figures if figure.kind != "contradicts"))


def main(_: Sequence[str]) -> int:
    if _PAPER.value:
        return _compare_papers()
    from _plan_tables import answer_tables, run_table, step_table

    try:
        setup = _setup()
        rows = [row_of(setup, hosts) for hosts in _hosts()]
    except (tlb.ConfigurationError, ValueError) as error:
        exit_for_usage(str(error))
    tables = [run_table(rows), step_table(rows)]
    report = {"results": rows, "settings": _settings(setup), "simulation": None}
    if _SIMULATE.value:
        from _plan_answers import answers_of

        report["simulation"] = answers_of(setup, rows[-1]["hosts"], seed=_SEED.value)
        tables += answer_tables(report["simulation"])
    if _PLOT.value:
        from _plan_plot import write_plot

        try:
            write_plot(rows, alone_ms=1e3 * setup.work.seconds, path=_PLOT.value)
        except OSError as error:
            exit_for_usage(f"--plot={_PLOT.value} cannot be written: {error.strerror or error}.")
    _print_and_store(tables, report)
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
