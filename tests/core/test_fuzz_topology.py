"""Whatever describes the cluster, it is a topology that holds together, or a TopologyError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import TopologyError
from tf_largebatch.core.topology import ClusterTopology

FUZZ = settings(max_examples=400, deadline=None, derandomize=True)

# Mostly good ones, so that many examples get as far as the last check.
ADDRESSES = st.builds("w{}:{}".format, st.integers(0, 20), st.integers(1, 9)) | st.sampled_from(
    ["[::1]:2222", "[::01]:2222", "W1:01", "10.0.0.1:65536", "a", "a:b", ":", "[]:1", "", "\0:1"]
)
JOBS = st.sampled_from(["worker", "chief", "evaluator", "master", "ps", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | ADDRESSES,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(JOBS | st.text(max_size=3), of),
    max_leaves=8,
)
CONFIGS = st.fixed_dictionaries(
    {
        "cluster": st.dictionaries(JOBS, st.lists(ADDRESSES, max_size=4, unique=True)) | JSON,
        "task": st.fixed_dictionaries({"type": JOBS | JSON, "index": st.integers(-1, 4) | JSON})
        | JSON,
    },
    optional={"sparseCluster": JSON, "environment": JSON},
)
GOOD = json.dumps(
    {
        "cluster": {"chief": ["a:1"], "worker": ["b:1", "[::1]:2"], "evaluator": ["e:1"]},
        "task": {"type": "worker", "index": 1},
    }
)


def topology_or_error(environ: dict[str, str]) -> ClusterTopology | None:
    try:
        topology = ClusterTopology.from_environment(environ)
    except TopologyError:
        return None
    assert_holds_together(topology)
    return topology


def assert_holds_together(topology: ClusterTopology) -> None:
    addresses = topology.addresses
    assert topology.num_workers == max(1, len(addresses))
    assert len(set(addresses)) == len(addresses)
    for address in (*addresses, *topology.evaluator_addresses):
        host, _, port = address.rpartition(":")
        assert host and 1 <= int(port) <= 65535
    others = [rank for rank in range(len(addresses)) if rank != topology.rank]
    assert [rank for rank, _ in topology.peers] == others
    if topology.is_evaluator:
        assert topology.rank == -1 and not topology.is_chief
    else:
        assert topology.address == (addresses[topology.rank] if addresses else None)
        assert 0 <= topology.rank < topology.num_workers
        assert topology.is_chief == (topology.rank == 0)


def test_the_good_text_is_good() -> None:
    topology = topology_or_error({"TF_CONFIG": GOOD})
    assert topology is not None
    assert (topology.addresses, topology.rank) == (("a:1", "b:1", "[::1]:2"), 2)


@FUZZ
@given(CONFIGS | JSON)
def test_any_json(config: Any) -> None:
    topology_or_error({"TF_CONFIG": json.dumps(config)})


@FUZZ
@given(
    st.integers(0, len(GOOD)),
    st.integers(0, 12),
    st.text(max_size=4) | st.sampled_from(["}", "]", '"', "null", "-1", "1e400", "NaN", "\ud800"]),
)
def test_a_good_text_with_a_part_replaced(start: int, length: int, piece: str) -> None:
    topology_or_error({"TF_CONFIG": GOOD[:start] + piece + GOOD[start + length :]})


@FUZZ
@given(st.text())
def test_any_text(text: str) -> None:
    topology_or_error({"TF_CONFIG": text})


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"cluster":' * 100_000,
        # Nested as deep as the parser takes, or nearly so, and then shown in a message.
        *(f'{{"cluster": {"[" * depth}{"]" * depth}}}' for depth in range(800, 1000, 7)),
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": %s}}' % ("1" * 5000),
        '{"cluster": {"worker": ["a:%s"]}}' % ("1" * 5000),
        '{"cluster": {"worker": ["%s:1"]}}' % ("a" * 10_000),
    ],
    ids=lambda text: f"{text[:20]}...{len(text)}",
)
def test_text_beyond_what_a_parser_takes(text: str) -> None:
    assert topology_or_error({"TF_CONFIG": text}) is None


SLURM_GOOD = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[001-002],gpu-7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_RESV_PORTS": "12000-12003",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "TF_LARGEBATCH_PORT": "2222",
}
SLURM_PIECES = st.text("0123456789[](),-x*a ", max_size=8) | st.text(max_size=3)


def test_the_good_step_is_good() -> None:
    topology = topology_or_error(SLURM_GOOD)
    assert topology is not None and topology.rank == 3
    assert topology.addresses == (
        *("node001:2222", "node001:2223", "node002:2222", "node002:2223"),
        "gpu-7:2222",
    )


@FUZZ
@given(st.data())
def test_a_good_step_with_parts_replaced_or_removed(data: st.DataObject) -> None:
    environ = dict(SLURM_GOOD)
    for name in data.draw(st.lists(st.sampled_from(sorted(environ)), max_size=3)):
        text = environ.pop(name, "")
        if data.draw(st.booleans()):
            start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
            environ[name] = text[:start] + data.draw(SLURM_PIECES) + text[end:]
    topology_or_error(environ)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SLURM_STEP_NODELIST", "node[1-999999999999]"),
        ("SLURM_STEP_NODELIST", "n[1-9999][1-9999][1-9999]"),
        ("SLURM_STEP_NODELIST", f"node[{'1' * 5000}]"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x999999999999)"),
        ("SLURM_STEP_TASKS_PER_NODE", "9" * 5000),
        ("SLURM_STEP_NUM_TASKS", "9" * 5000),
        ("SLURM_STEP_RESV_PORTS", "1-999999999999"),
        ("SLURM_STEP_RESV_PORTS", "9" * 5000),
        ("TF_LARGEBATCH_PORT", "9" * 5000),
    ],
)
def test_a_step_beyond_all_clusters(name: str, text: str) -> None:
    """Small texts that stand for more nodes than fit in memory."""
    environ = {**SLURM_GOOD, name: text}
    if name == "SLURM_STEP_RESV_PORTS":
        del environ["TF_LARGEBATCH_PORT"]
    topology_or_error(environ)
