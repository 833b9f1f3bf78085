"""How the time of a step is divided, and what a report says of several."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tf_largebatch as tlb
from tf_largebatch.core.intervals import union
from tf_largebatch.core.step_parts import (
    Activity,
    StepParts,
    StepReport,
    StepWindow,
    divide,
    parts_of,
)

BILLION = 10**9
PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5)


def seconds_of(window: StepWindow, activity: Activity) -> dict[str, float]:
    parts = parts_of(window, divide(window, activity))
    names = ("seconds", "compute", "input_wait", "exposed_communication", "other")
    return {name: getattr(parts, name) for name in names}


@given(PAIRS, PAIRS, PAIRS, st.lists(st.integers(0, 30), max_size=3), st.integers(1, 4))
def test_each_instant_counts_once(compute, waits, collectives, data_starts, num_steps):
    window = StepWindow(step=7, num_steps=num_steps, begin=5, end=25)
    first = min((at for at in data_starts if at >= 5), default=25)
    expected = {"compute": 0, "input_wait": 0, "exposed_communication": 0, "other": 0}
    for instant in range(5, 25):  # one by one
        if any(begin <= instant < end for begin, end in compute):
            expected["compute"] += 1
        elif any(begin <= instant < end for begin, end in waits):
            expected["input_wait"] += 1
        elif instant >= first and any(begin <= instant < end for begin, end in collectives):
            expected["exposed_communication"] += 1
        else:
            expected["other"] += 1
    activity = Activity(union(compute), union(waits), union(collectives), data_starts)

    found = seconds_of(window, activity)

    scale = 1e-9 / num_steps
    assert found == pytest.approx(
        {"seconds": 20 * scale, **{part: scale * count for part, count in expected.items()}}
    )


def test_a_receive_that_is_posted_early_is_no_communication():
    whole = StepWindow(0, 1, 0, 100 * BILLION)
    activity = Activity(
        compute=union([(10 * BILLION, 60 * BILLION)]),
        input_wait=union([]),
        collectives=union([(5 * BILLION, 90 * BILLION)]),
        data_starts=[50 * BILLION],
    )
    assert seconds_of(whole, activity)["exposed_communication"] == pytest.approx(30.0)
    assert seconds_of(whole, activity)["other"] == pytest.approx(20.0)


def report() -> StepReport:
    return StepReport(
        (
            StepParts(10, 0.100, 0.060, 0.010, 0.020, 0.010),
            StepParts(11, 0.200, 0.060, 0.100, 0.030, 0.010),
            StepParts(12, 0.100, 0.070, 0.000, 0.025, 0.005),
        )
    )


def test_medians_and_shares():
    assert report().seconds == 0.100
    assert report().compute == 0.060
    assert report().input_wait == 0.010
    assert report().exposed_communication == 0.025
    assert report().other == 0.010
    assert report().share("compute") == pytest.approx(190 / 400)
    assert report().share("input_wait") == pytest.approx(110 / 400)
    assert report().share("other") == pytest.approx(25 / 400)


def test_what_it_says():
    lines = report().describe().splitlines()
    assert lines[0] == "A step took 100.00 ms (medians of 3 from step 10 on, shares of their sum):"
    assert [line.split()[-3:] for line in lines[1:]] == [
        ["60.00", "ms", "47.5%"],
        ["10.00", "ms", "27.5%"],
        ["25.00", "ms", "18.8%"],
        ["10.00", "ms", "6.2%"],
    ]


def test_refused():
    with pytest.raises(tlb.ConfigurationError, match="one step or more"):
        StepReport(())
    with pytest.raises(tlb.ConfigurationError, match="must be one of compute, input_wait"):
        report().share("network")
    assert np.isclose(StepReport((StepParts(0, 0.0, 0.0, 0.0, 0.0, 0.0),)).share("other"), 0.0)
