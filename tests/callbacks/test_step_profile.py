"""The parts of real steps whose times are known, and of recordings made by hand."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_largebatch as tlb
from tf_largebatch.callbacks._recorded_run import (
    Span,
    find_recording,
    read_recording,
    sorted_out,
)

COMPUTE, INPUT, CALLBACK = 0.05, 0.03, 0.02
# Of what is asked for: a sleep ends late, and the step has work of its own.
LATE = 0.02


class Pause(keras.layers.Layer):
    """An operation that takes a known time."""

    def call(self, inputs):
        def pause(values):
            time.sleep(COMPUTE)
            return values

        paused = tf.numpy_function(pause, [inputs], tf.float32)
        paused.set_shape(inputs.shape)
        return inputs + 0.0 * tf.stop_gradient(paused)


class SlowCallback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(CALLBACK)


def slow_rows(count: int) -> tf.data.Dataset:
    """Batches that take a known time, of which none is made ahead."""

    def rows():
        for _ in range(count):
            time.sleep(INPUT)
            yield np.ones((4, 8), np.float32), np.ones((4, 1), np.float32)

    signature = (tf.TensorSpec((4, 8)), tf.TensorSpec((4, 1)))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return tf.data.Dataset.from_generator(rows, output_signature=signature).with_options(options)


def small_model(*layers, **options) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


X = np.ones((40, 8), np.float32)
Y = X[:, :1]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A profile of steps that take known times, and its directory."""
    directory = tmp_path_factory.mktemp("profile")
    profile = tlb.callbacks.StepProfile(first_step=3, steps=6, directory=directory)
    small_model(Pause()).fit(
        slow_rows(12), epochs=1, verbose=0, shuffle=False, callbacks=[profile, SlowCallback()]
    )
    return profile, directory


@pytest.mark.alone
def test_each_part_has_its_time(known):
    report = known[0].report
    assert [each.step for each in report.steps] == list(range(3, 9))
    for name, expected in (
        ("compute", COMPUTE),
        ("input_wait", INPUT),
        ("other", CALLBACK),
        ("seconds", COMPUTE + INPUT + CALLBACK),
    ):
        assert expected <= getattr(report, name) <= expected + LATE, report.describe()
    assert report.exposed_communication == 0.0
    for each in report.steps:
        parts = (each.compute, each.input_wait, each.exposed_communication, each.other)
        assert sum(parts) == pytest.approx(each.seconds)


@pytest.mark.alone
def test_the_files(known):
    profile, directory = known
    assert (directory / "report.txt").read_text() == profile.report.describe() + "\n"
    assert len(list(directory.glob("plugins/profile/*/*.xplane.pb"))) == 1
    with gzip.open(directory / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    threads = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    spans = [event for event in events if event["ph"] == "X"]
    steps = [span for span in spans if threads[span["tid"]] == "steps"]
    assert [span["name"] for span in steps] == [f"step {step}" for step in range(3, 9)]
    assert [span["dur"] / 1e6 for span in steps] == pytest.approx(
        [each.seconds for each in profile.report.steps], rel=1e-6
    )
    for part in ("compute", "input_wait"):
        shown = [span["dur"] for span in spans if threads[span["tid"]] == part.replace("_", " ")]
        whole = sum(getattr(each, part) for each in profile.report.steps)
        assert sum(shown) / 1e6 == pytest.approx(whole, rel=1e-4)
    assert any(span["name"].endswith(":PyFunc") for span in spans)


@pytest.mark.alone
def test_several_steps_a_call_over_several_epochs():
    profile = tlb.callbacks.StepProfile(first_step=2, steps=12)
    small_model(Pause(), steps_per_execution=2).fit(
        slow_rows(24).repeat(), epochs=3, steps_per_epoch=6, verbose=0, callbacks=[profile]
    )
    # Calls of two steps; from the second epoch on the numbers go on.
    assert [each.step for each in profile.report.steps] == [2, 4, 6, 8, 10, 12]
    assert COMPUTE <= profile.report.compute <= COMPUTE + LATE
    # The second batch of a call is read while the first step computes.
    assert INPUT / 2 <= profile.report.input_wait <= INPUT / 2 + LATE


def test_compiled_steps_and_validation():
    profile = tlb.callbacks.StepProfile(first_step=6, steps=8)
    model = small_model(keras.layers.Dense(512), keras.layers.Dense(512), jit_compile=True)
    model.fit(X, Y, 4, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[profile])
    assert [each.step for each in profile.report.steps] == list(range(6, 14))
    assert profile.report.compute > 0.0


def test_training_that_is_too_short():
    profile = tlb.callbacks.StepProfile(first_step=8, steps=5)
    model = small_model()
    model.fit(X, Y, 4, epochs=1, verbose=0, callbacks=[profile])
    assert [each.step for each in profile.report.steps] == [8, 9]
    with pytest.warns(UserWarning, match="ended after 5 steps, none of which StepProfile"):
        model.fit(X, Y, 8, epochs=1, verbose=0, callbacks=[profile])
    assert profile.report is None


def test_a_second_fit_after_an_exception():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise RuntimeError("on purpose")

    profile = tlb.callbacks.StepProfile(first_step=2, steps=5)
    model = small_model()
    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(X, Y, 4, verbose=0, callbacks=[profile, Fails()])
    assert profile.report is None
    model.fit(X, Y, 4, verbose=0, callbacks=[profile])
    assert len(profile.report.steps) == 5


def test_a_profiler_that_runs_already(tmp_path):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(tlb.ProgramOrderError, match=r"first_step=1\) cannot start"):
            small_model().fit(
                X, Y, 4, verbose=0, callbacks=[tlb.callbacks.StepProfile(first_step=1)]
            )
    finally:
        tf.profiler.experimental.stop(save=False)


def test_refused():
    with pytest.raises(tlb.ConfigurationError, match="steps"):
        tlb.callbacks.StepProfile(steps=0)
    with pytest.raises(tlb.ConfigurationError, match="first_step"):
        tlb.callbacks.StepProfile(first_step=-1)
    with pytest.raises(tlb.ConfigurationError, match="run_eagerly=True"):
        small_model(run_eagerly=True).fit(
            X, Y, 4, verbose=0, callbacks=[tlb.callbacks.StepProfile()]
        )


def test_what_is_no_recording(tmp_path: Path):
    with pytest.raises(tlb.DataError, match=r"no \*\.xplane\.pb below"):
        find_recording(tmp_path)
    path = tmp_path / "damaged.xplane.pb"
    path.write_bytes(b"\x0a\xff\xff\xff")
    with pytest.raises(tlb.DataError, match=r"damaged\.xplane\.pb is no recording"):
        read_recording(path)


def span(what: str, begin: int, end: int, *, kind: str = "", line: str = "a", **facts) -> Span:
    plane = "/device:GPU:0" if line.startswith("stream") else "/host:CPU"
    return Span(plane, line, what, kind, begin, end, facts)


STEP = span("train", 0, 100, line="python", step_num=4, num_steps=2)


def pairs(intervals) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in intervals.tolist()]


def test_what_the_names_on_the_host_mean():
    process, start, done = (
        f"ExecutorState::Process{end}" for end in ("", "Async::Start", "Async::Done")
    )
    run = sorted_out(
        (
            STEP,
            span("InstantiatedCapturedFunction::Run", 0, 30, line="data", id=2),
            span(process, 1, 30, line="data", id=2),
            span("map:Mul", 2, 9, kind="Mul", line="data"),  # of the input pipeline
            span(process, 0, 60, id=1),
            span(start, 0, 1, name="get", kernel_type="IteratorGetNext", step_id=1, _p=7),
            span(start, 1, 2, name="r", kernel_type="CollectiveBcastRecvV2", step_id=1, _p=8),
            span(process, 10, 20, id=3),  # a graph that is called
            span("m:MatMul", 12, 18, kind="MatMul"),
            span("b:Mul", 30, 34, kind="Mul"),
            span("c:CollectiveReduceV2", 40, 44, kind="CollectiveReduceV2"),
            span("outside:Mul", 70, 75, kind="Mul"),  # eager, as of a callback
            span("IteratorGetNextOp::DoCompute", 3, 12, line="next", id=1),
            span("IteratorGetNextOp::DoCompute", 12, 18, line="next", id=2),  # within the data
            span(done, 13, 14, line="next", name="get", _c=7),
            span(start, 50, 51, name="s", kernel_type="CollectiveBcastSendV2", step_id=1, _p=9),
            span(done, 79, 80, line="other", name="r", _c=8),
            span(done, 90, 91, line="other", name="s", _c=9),
            span(done, 95, 96, line="other", name="lost", _c=10),  # began before the recording
        )
    )
    (window,) = run.windows
    assert (window.step, window.num_steps, window.begin, window.end) == (4, 2, 0, 100)
    assert pairs(run.activity.compute) == [(12, 18), (30, 34)]
    assert pairs(run.activity.input_wait) == [(0, 14)]
    assert pairs(run.activity.collectives) == [(1, 91)]
    assert run.activity.data_starts == [50]
    assert [(each.name, each.begin, each.end) for each in run.collectives] == [
        ("r", 1, 80),
        ("s", 50, 91),
    ]


def test_on_a_gpu_its_streams_compute_and_nccl_communicates():
    run = sorted_out(
        (
            STEP,
            span("ExecutorState::Process", 0, 60, id=1),
            span("m:MatMul", 2, 50, kind="MatMul"),  # only enqueues
            span("ampere_sgemm", 10, 40, line="stream 1"),
            span("ncclDevKernel_AllReduce_Sum_f32", 30, 70, line="stream 2"),
        )
    )
    assert pairs(run.activity.compute) == [(10, 40)]
    assert pairs(run.activity.collectives) == [(30, 70)]
    assert run.activity.data_starts == [30]
