"""Shows how much of the gradients' all-reduce a training step hides behind its backward.

    python tools/benchmark_overlap.py --workers=4 --model=resnet_small --one_way_delay_ms=20 \\
        --output=overlap.json

Three traced functions are timed on all workers, call by call in turn, and before each call workers
agree on when to start:
    compute      forward and backward of a ResNet, with all gradients as outputs
    all_reduce   the all-reduce of tensors as these gradients
    step         forward, backward and the all-reduce of the gradients
the latter two once with `--bucket_bytes` (variant `buckets`), and once with all gradients in a
single bucket, which cannot start before backward has ended (`single_bucket`). The time of a call is
that of the slowest worker. Then

    hidden = (compute + all_reduce - step) / all_reduce,    at most min(1, compute / all_reduce)

Workers talk over loopback and share the machine's cores, one thread of computation each. What an
all-reduce waits for can be hidden, as the delay and the limited rate of the relay between workers
(`--one_way_delay_ms`, `--bandwidth_mbit`; see `_relay.py`); what it computes, copies and sends
cannot where backward keeps all cores busy: `cpu_p50_ms` says how much that is, of all workers.

Sums are verified before they are timed: those of `all_reduce` against TensorFlow's own, to what
rounding allows; those of `step` likewise, but for backward, which may round differently each time.
All that is returned must be equal to the bit on all workers, in all calls.

JSON: {"results": [{"variant", "bucket_bytes", "compute", "all_reduce", "step", "hidden",
"hidden_min", "hidden_max", "hidden_all", "possible", "hidden_of_possible", "verified",
"problems"}], "workers", "gradients", "gradient_bytes", "relay", "all_reduce_report", "settings",
"machine"}. `compute`, `all_reduce` and `step` are {"p50_ms", "min_ms", "max_ms", "all_ms",
"cpu_p50_ms"}; `hidden` is of medians, `hidden_all` of single repeats; `possible` is the bound
above.

Exit code: 0 when all rows are verified, 1 when one is not, 2 for a wrong command line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from _command_line import (
    NOT_VERIFIED,
    define_bandwidth,
    define_delay,
    hand_over,
    parse_flags,
    prepare_environment,
)
from _forked_run import run_forked
from _machine import machine_facts
from _overlap_results import figures_table, rows_of
from absl import app, flags
from rich.console import Console

_WORKERS = flags.DEFINE_integer("workers", 4, "Worker processes.", lower_bound=2)
_MODEL = flags.DEFINE_enum("model", "resnet_small", ["resnet_small", "resnet50"], "The network.")
_DEPTH = flags.DEFINE_integer("depth", 20, "Of resnet_small: 6 d + 2.", lower_bound=8)
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 32, "Pixels of a side.", lower_bound=8)
_BATCH = flags.DEFINE_integer("per_replica_batch_size", 32, "Images a worker.", lower_bound=1)
_DELAY = define_delay(20.0)
_BANDWIDTH = define_bandwidth()
_ALL_REDUCE = flags.DEFINE_enum(
    "all_reduce",
    "auto",
    ["auto", "ring", "halving_doubling", "tensorflow"],
    "As of LargeBatchStrategy.",
)
_WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype", "", ["", "bfloat16", "float16"], "As of LargeBatchStrategy."
)
_BUCKET_BYTES = flags.DEFINE_integer(
    "bucket_bytes", 128 * 2**10, "As of LargeBatchStrategy, but for the default.", lower_bound=1
)
_IN_FLIGHT = flags.DEFINE_integer(
    "max_buckets_in_flight", None, "As of LargeBatchStrategy.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 10, "Timed calls of each function.", lower_bound=1)
_WARMUP = flags.DEFINE_integer("warmup", 1, "Calls of each before them.", lower_bound=0)
_TIMEOUT = flags.DEFINE_float(
    "timeout_seconds", 600.0, "For all of it; then it has failed.", lower_bound=10.0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON.")

_WORKER = Path(__file__).with_name("_overlap_worker.py")
_FOR_WORKERS = (
    *(_MODEL, _DEPTH, _IMAGE_SIZE, _BATCH),
    *(_ALL_REDUCE, _WIRE_DTYPE, _BUCKET_BYTES, _IN_FLIGHT, _REPEATS, _WARMUP),
)
# Of each worker. What a collective wakes waits for a thread between operations, and the few that
# TensorFlow has by default are all within convolutions, tens of milliseconds each.
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "6", "OMP_NUM_THREADS": "1"}


def main(_: Sequence[str]) -> int:
    prepare_environment(**_THREADS)
    machine = machine_facts()
    for_workers = {flag.name: flag.value for flag in _FOR_WORKERS}
    run = run_forked(
        _WORKER,
        # Workers wait less than this program, so that they can still say who is late.
        {**for_workers, "timeout_seconds": _TIMEOUT.value / 3},
        workers=_WORKERS.value,
        timeout_seconds=_TIMEOUT.value,
        one_way_delay_ms=_DELAY.value,
        bandwidth_mbit=_BANDWIDTH.value,
    )
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if run.problem is not None:
        console.print(f"NOT VERIFIED: {run.problem}")
        return NOT_VERIFIED
    rows = rows_of(run.results, bucket_bytes=_BUCKET_BYTES.value)
    for row in rows:
        for problem in row["problems"]:
            console.print(f"NOT VERIFIED: {row['variant']}: {problem}")
    network = {flag.name: flag.value for flag in (_DELAY, _BANDWIDTH)}
    threads = {name: os.environ[name] for name in _THREADS}
    report = {
        "results": rows,
        "workers": _WORKERS.value,
        **{
            name: run.results[0][name]
            for name in ("gradients", "gradient_bytes", "all_reduce_report")
        },
        "relay": run.relay,
        "settings": {**for_workers, **network, "environment": threads},
        "machine": machine,
    }
    return hand_over(figures_table(rows), report, output=_OUTPUT.value)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
