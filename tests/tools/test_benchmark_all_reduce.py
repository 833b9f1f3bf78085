"""The all-reduce benchmark: a short real run, and its checks and figures on made-up results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tool_runs import load, refusal, run_tool

DELAY_MS = 10.0
KIB, MIB = 2**10, 2**20

Way = load("_all_reduce_ways").Way
results = load("_all_reduce_results")
Link = results.Link


# --- Real workers


@pytest.mark.timeout(300)
def test_two_workers_behind_a_relay(tmp_path: Path) -> None:
    algorithms = ["tensorflow", "halving_doubling"]
    flags = ["--workers=2", "--sizes=1KiB,64KiB", f"--algorithms={','.join(algorithms)}"]
    flags += ["--repeats=3", "--warmup=1", f"--one_way_delay_ms={DELAY_MS}", "--output=out.json"]
    flags += ["--wire_dtype=bfloat16", "--buckets=2", "--timeout_seconds=140"]
    done = run_tool("benchmark_all_reduce", *flags, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    rows = report["results"]
    assert [(row["size_bytes"], row["algorithm"]) for row in rows] == [
        (size, algorithm) for size in (KIB, 64 * KIB) for algorithm in algorithms
    ]
    for row in rows:
        assert row["verified"] is True, row["problems"]
        assert (row["workers"], row["transport"]) == (2, "tensorflow")
        assert "to_raw" not in row
        low, middle, high = sorted(row["time_all_ms"])
        assert [row["time_min_ms"], row["time_p50_ms"], row["time_max_ms"]] == [low, middle, high]
        assert low >= DELAY_MS  # nothing arrives earlier
        assert row["wire_dtype"] == (None if row["algorithm"] == "tensorflow" else "bfloat16")
    assert rows[2]["ratio"] == 1.0
    assert rows[3]["ratio"] == pytest.approx(rows[3]["time_p50_ms"] / rows[2]["time_p50_ms"])
    (run,) = report["runs"]
    assert run["relay"]["chunks"] > 0
    assert report["settings"]["one_way_delay_ms"] == DELAY_MS
    assert report["settings"]["buckets"] == 2
    assert {"cores", "tensorflow", "python"} <= set(report["machine"])
    assert "ratio to tensorflow" in done.stdout


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--workers=1", "--workers must be whole numbers of at least 2"),
        ("--workers=two", "--workers must be whole numbers of at least 2"),
        ("--sizes=1KB", "'1KB' is no size; use a whole number and B, KiB, MiB or GiB"),
        ("--sizes=1KiB,1022B", "one is 1022 B; nearest: 1024 B"),
        ("--algorithms=ring,torus", "--algorithms must be one or more of tensorflow, ring,"),
        ("--wire_dtype=float8", "wire_dtype"),
        ("--one_way_delay_ms=-1", "one_way_delay_ms"),
        ("--buckets=0", "buckets"),
        ("--transports=mpi,pigeons", "--transports must be one or more of tensorflow, mpi"),
        ("--transports=", "--transports must be one or more of tensorflow, mpi"),
    ],
)
def test_wrong_flags(flag: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in refusal("benchmark_all_reduce", flag, cwd=tmp_path)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--one_way_delay_ms=5"], "MPI does not go through the relay"),
        (["--bandwidth_mbit=100"], "MPI does not go through the relay"),
        (["--algorithms=tensorflow"], "leave nothing to --transports=mpi"),
        (["--algorithms=auto"], "leave nothing to --transports=tensorflow"),
    ],
)
def test_what_does_not_go_with_mpi(flags: list[str], complaint: str, tmp_path: Path) -> None:
    done = run_tool("benchmark_all_reduce", "--transports=tensorflow,mpi", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


# --- Ways to sum

BY_TENSORFLOW, BY_MPI, RAW = (
    [Way("tensorflow", "ring")],
    [Way("mpi", "ring")],
    [Way("mpi4py", "Allreduce")],
)


@pytest.mark.parametrize(
    ("transports", "algorithms", "expected"),
    [
        (["tensorflow"], ["ring"], BY_TENSORFLOW),
        (["tensorflow"], ["ring", "auto"], [*BY_TENSORFLOW, Way("tensorflow", "auto")]),
        (["mpi"], ["ring"], [*BY_MPI, *RAW]),
        (["mpi"], ["tensorflow", "auto"], [Way("mpi", "auto"), *RAW]),
        (["mpi", "tensorflow"], ["ring"], [*BY_MPI, *BY_TENSORFLOW, *RAW]),
        (
            ["tensorflow", "mpi"],
            ["tensorflow", "ring", "auto"],
            [Way("tensorflow", "tensorflow"), *BY_TENSORFLOW, *BY_MPI, Way("mpi", "auto"), *RAW],
        ),
    ],
)
def test_ways_of_transports(
    transports: list[str], algorithms: list[str], expected: list[Any]
) -> None:
    assert sys.modules["_all_reduce_ways"].ways_of(transports, algorithms) == expected


@pytest.mark.parametrize(
    ("way", "has_wire_dtype"),
    [
        (Way("tensorflow", "tensorflow"), False),
        (Way("tensorflow", "ring"), True),
        (Way("mpi", "auto"), True),
        (*RAW, False),
    ],
)
def test_which_ways_have_a_dtype_of_the_wire(way: Any, has_wire_dtype: bool) -> None:
    assert way.has_wire_dtype is has_wire_dtype


# --- Checks and times


def worker_row(**changes: Any) -> dict[str, Any]:
    return {
        "algorithm": "ring",
        "size_bytes": 4000,
        "wire_dtype": None,
        "sha256": "ab",
        "spans_seconds": [[1.0, 1.004], [2.0, 2.002]],
        "graph_spans_seconds": [[51.001, 51.003], [52.0, 52.001]],
        "cpu_seconds": [0.001, 0.003],
        "problems": [],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"sha256": "cd"}, "worker 1 has other bits than worker 0"),
        ({"spans_seconds": [[1.0, 1.004]]}, "worker 1 has timed another number of calls"),
        ({"problems": ["sums are wrong"]}, "worker 1: sums are wrong"),
    ],
)
def test_one_worker_that_is_not_as_the_others(
    changes: dict[str, Any], complaint: str | None
) -> None:
    problems = results.check_row([worker_row(), worker_row(**changes)])
    assert (problems == []) if complaint is None else (complaint in problems[0])


def test_times_are_those_of_the_slowest_worker() -> None:
    slower = worker_row(
        spans_seconds=[[1.001, 1.011], [2.003, 2.004]],
        graph_spans_seconds=[[51.002, 51.009], [52.0, 52.004]],
        cpu_seconds=[0.0, 0.0],
    )
    by_rank = [worker_row(), slower, worker_row(), worker_row()]
    run = results.Run(4, tuple({"rows": [row]} for row in by_rank), None, None)
    (row,) = results.rows_of(run, ways=BY_TENSORFLOW, sizes_bytes=[4000])
    assert row["time_all_ms"] == pytest.approx([10.0, 2.0])
    assert (row["time_p50_ms"], row["time_min_ms"]) == pytest.approx((6.0, 2.0))
    assert row["time_max_ms"] == pytest.approx(10.0)
    assert row["start_spread_p50_ms"] == pytest.approx(2.0)  # 1 and 3 ms
    assert row["cpu_p50_ms"] == pytest.approx(6.0)  # 3 workers with 1 and 3 ms
    assert row["in_graph_p50_ms"] == pytest.approx(5.5)  # 7 and 4 ms after the last one has values
    assert row["algbw_mb_per_second"] == pytest.approx(4000 / 6e-3 / 1e6)
    assert row["busbw_mb_per_second"] == pytest.approx(1.5 * 4000 / 6e-3 / 1e6)
    assert row["verified"] is True


def test_a_run_that_failed_has_rows_that_say_so() -> None:
    run = results.Run(4, (), "worker 2 was killed", {"chunks": 3})
    ways = [Way("tensorflow", "tensorflow"), *BY_TENSORFLOW]
    rows = results.rows_of(run, ways=ways, sizes_bytes=[KIB])
    results.add_predictions(rows, link=results.fit_link(rows, one_way_delay_seconds=0.0))
    assert [row["algorithm"] for row in rows] == ["tensorflow", "ring"]
    for row in rows:
        assert row["time_p50_ms"] is row["ratio"] is row["predicted_ms"] is None
        assert (row["verified"], row["problems"]) == (False, ["worker 2 was killed"])
    measured = results.Run(4, tuple({"rows": [worker_row()]} for _ in range(4)), None, None)
    (good,) = results.rows_of(measured, ways=BY_TENSORFLOW, sizes_bytes=[4000])
    assert {*good, "predicted_ms"} == set(rows[0])
    assert results.figures_table(rows, reference=ways[0]).row_count == len(rows)


def rows_that_took(milliseconds: list[float], *, ways: list[Any]) -> list[dict[str, Any]]:
    measured = {
        "rows": [
            worker_row(
                spans_seconds=[[0.0, each / 1e3]],
                graph_spans_seconds=[[0.0, each / 2e3 + 1e-3]],
                cpu_seconds=[0.0],
            )
            for each in milliseconds
        ]
    }
    run = results.Run(2, (measured, measured), None, None)
    return results.rows_of(run, ways=ways, sizes_bytes=[KIB, MIB])


def test_ratios_are_to_the_first_row_of_the_size() -> None:
    ways = [Way("tensorflow", "tensorflow"), *BY_TENSORFLOW]
    rows = rows_that_took([10.0, 5.0, 40.0, 60.0], ways=ways)
    assert [row["ratio"] for row in rows] == pytest.approx([1.0, 0.5, 1.0, 1.5])
    assert all("to_raw" not in row for row in rows)


def test_with_mpi_there_are_ratios_to_the_bare_call_as_well() -> None:
    ways = [*BY_TENSORFLOW, *BY_MPI, *RAW]
    rows = rows_that_took([10.0, 5.0, 2.0, 40.0, 60.0, 30.0], ways=ways)
    assert [row["ratio"] for row in rows] == pytest.approx([1.0, 0.5, 0.2, 1.0, 1.5, 0.75])
    # Within the graph 6, 3.5, 2; 21, 31, 16 ms.
    assert [row["in_graph_ratio"] for row in rows] == pytest.approx(
        [1.0, 3.5 / 6, 2 / 6, 1.0, 31 / 21, 16 / 21]
    )
    assert [row["to_raw"] for row in rows] == pytest.approx([3.0, 1.75, 1.0, 21 / 16, 31 / 16, 1.0])
    assert [row["transport"] for row in rows[:3]] == ["tensorflow", "mpi", "mpi4py"]
    table = results.figures_table(rows, reference=ways[0])
    assert "ring by tensorflow" in table.title
    assert {"transport", "to raw"} <= {column.header for column in table.columns}


# --- Sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1024", 1024), ("12B", 12), ("1KiB", KIB), (" 256KiB", 256 * KIB), ("4MiB", 4 * MIB)],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert results.parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "KiB", "1.5MiB", "-4", "1kb", "1MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        results.parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12B"), (1025, "1025B"), (KIB, "1KiB"), (1536 * KIB, "1536KiB"), (2**30, "1GiB")],
)
def test_sizes_are_shown(num_bytes: int, text: str) -> None:
    assert results.format_size(num_bytes) == text


# --- Prediction


@pytest.mark.parametrize(
    ("algorithm", "workers", "expected"),
    [
        ("ring", 8, [(14, 14 / 8)]),
        ("tensorflow", 5, [(8, 8 / 5)]),
        # Recursive doubling, one step of halving, two, and the paper's halving and doubling.
        ("halving_doubling", 8, [(3, 3), (4, 1 + 2 / 2), (5, 1.5 + 1 / 4), (6, 14 / 8)]),
        # Five workers: the fifth's values are folded onto four workers, and the result sent back.
        ("halving_doubling", 5, [(4, 4), (5, 2 + 1 + 1 / 2), (6, 2 + 1.5)]),
        ("auto", 2, [(2, 1), (1, 1), (2, 1)]),
        ("ring", 1, [(0, 0)]),
    ],
)
def test_steps_and_bytes(algorithm: str, workers: int, expected: list[tuple[float, float]]) -> None:
    forms = results.costs(algorithm, workers=workers, size_bytes=1.0)
    np.testing.assert_allclose(forms, expected)


def test_a_prediction_is_that_of_the_best_form() -> None:
    slow_start, slow_rate = Link(1.0, 1e-9), Link(1e-9, 1.0)
    arguments: dict[str, Any] = {"workers": 8, "size_bytes": 1000}
    assert results.predict("auto", link=slow_start, **arguments) == pytest.approx(3.0)
    assert results.predict("auto", link=slow_rate, **arguments) == pytest.approx(1750.0)
    assert results.predict("ring", link=slow_start, **arguments) == pytest.approx(14.0)


def made_up(algorithm: str, size_bytes: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "transport": "tensorflow",
        "algorithm": algorithm,
        "workers": 8,
        "size_bytes": size_bytes,
        "time_p50_ms": 1e3 * seconds,
        "wire_dtype": None,
        "verified": True,
        **changes,
    }


def test_a_link_is_found_again() -> None:
    """5 ms and 100 MB/s: halving/doubling takes its form with 3 steps, and the one with 5."""
    rows = [
        made_up("ring", KIB, 14 * 0.005 + 1.75 * KIB * 1e-8),
        made_up("ring", 64 * MIB, 14 * 0.005 + 1.75 * 64 * MIB * 1e-8),
        made_up("halving_doubling", KIB, 3 * 0.005 + 3 * KIB * 1e-8),
        made_up("halving_doubling", 64 * MIB, 5 * 0.005 + 1.75 * 64 * MIB * 1e-8),
        made_up("tensorflow", KIB, 9.0),  # not this package's, so it does not count
        made_up("ring", KIB, 9.0, verified=False),
    ]
    link = results.fit_link(rows, one_way_delay_seconds=0.005)
    assert link.latency_seconds == pytest.approx(0.005)
    assert link.seconds_per_byte == pytest.approx(1e-8)
    results.add_predictions(rows, link=link)
    assert rows[1]["predicted_ms"] == pytest.approx(rows[1]["time_p50_ms"])
    assert rows[4]["predicted_ms"] == pytest.approx(1e3 * (14 * 0.005 + 1.75 * KIB * 1e-8))


def test_half_the_bytes_travel_in_half_precision() -> None:
    rows = [
        made_up("ring", size, 14 * 0.005 + 1.75 * size / 2 * 1e-8, wire_dtype="bfloat16")
        for size in (KIB, 64 * MIB)
    ]
    link = results.fit_link(rows, one_way_delay_seconds=0.005)
    assert link.seconds_per_byte == pytest.approx(1e-8)
    results.add_predictions(rows, link=link)
    assert rows[1]["predicted_ms"] == pytest.approx(rows[1]["time_p50_ms"])


def test_what_mpi_does_by_itself_is_not_predicted() -> None:
    rows = [
        made_up("ring", KIB, 1.0, transport="mpi"),
        made_up("auto", KIB, 1.0, transport="mpi"),
        made_up("auto", KIB, 1.0),
    ]
    results.add_predictions(rows, link=Link(0.005, 0.0))
    assert rows[0]["predicted_ms"] == pytest.approx(14 * 5.0)
    assert rows[1]["predicted_ms"] is None
    assert rows[2]["predicted_ms"] == pytest.approx(3 * 5.0)


def test_a_rate_is_never_negative() -> None:
    """The large size was even faster than the small one: all is taken for latency."""
    rows = [made_up("ring", KIB, 0.14), made_up("ring", MIB, 0.07)]
    link = results.fit_link(rows, one_way_delay_seconds=0.0)
    assert link.seconds_per_byte == 0.0
    # Least squares of the relative errors 14 a / 0.14 - 1 and 14 a / 0.07 - 1.
    assert link.latency_seconds == pytest.approx((100 + 200) / (100**2 + 200**2))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [made_up("ring", KIB, 0.1)],
        [made_up("ring", KIB, 0.1), made_up("tensorflow", MIB, 0.2)],
    ],
)
def test_too_little_for_a_link(rows: list[dict[str, Any]]) -> None:
    assert results.fit_link(rows, one_way_delay_seconds=0.0) is None
