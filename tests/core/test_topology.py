"""TF_CONFIG into ranks and addresses, and every way it can be wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tf_largebatch.core.errors import TopologyError
from tf_largebatch.core.topology import ClusterTopology


def tf_config(cluster, task_type="worker", task_index=0):
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": task_index}})


def workers(count):
    return [f"10.0.0.{index}:2222" for index in range(count)]


@pytest.mark.parametrize(
    "environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}, {"TF_CONFIG": "{}"}]
)
def test_no_description_is_one_worker(environ):
    topology = ClusterTopology.from_environment(environ)
    assert topology.num_workers == 1
    assert topology.rank == 0
    assert topology.is_chief
    assert not topology.is_evaluator
    assert topology.address is None
    assert topology.peers == ()


def test_from_environment_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": workers(3)}, task_index=2))
    assert ClusterTopology.from_environment().rank == 2
    monkeypatch.delenv("TF_CONFIG")
    assert ClusterTopology.from_environment() == ClusterTopology()


def test_twelve_workers_keep_list_order():
    # Sorted as text, 10 and 11 would come before 2.
    addresses = [f"worker-{index}:2222" for index in range(12)]
    for index in range(12):
        topology = ClusterTopology.from_tf_config(tf_config({"worker": addresses}, "worker", index))
        assert topology.addresses == tuple(addresses)
        assert topology.rank == index
        assert topology.address == f"worker-{index}:2222"
        assert topology.is_chief == (index == 0)
        assert [rank for rank, _ in topology.peers] == [r for r in range(12) if r != index]
        assert all(address == f"worker-{rank}:2222" for rank, address in topology.peers)


@pytest.mark.parametrize(
    ("task_type", "index", "rank"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_chief_is_rank_0_wherever_it_is_written(task_type, index, rank):
    cluster = {"worker": ["b:1", "a:1"], "chief": ["z:1"]}
    topology = ClusterTopology.from_tf_config(tf_config(cluster, task_type, index))
    assert topology.addresses == ("z:1", "b:1", "a:1")
    assert topology.rank == rank
    assert topology.is_chief == (rank == 0)
    assert (topology.task_type, topology.task_index) == (task_type, index)


def test_a_chief_alone_is_one_worker():
    topology = ClusterTopology.from_tf_config(tf_config({"chief": ["a:1"]}, "chief"))
    assert topology.num_workers == 1
    assert topology.address == "a:1"


def test_evaluator_is_not_counted_among_workers():
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["e:1"]}
    worker = ClusterTopology.from_tf_config(tf_config(cluster, "worker", 0))
    assert worker.num_workers == 2
    assert worker.rank == 1
    assert worker.peers == ((0, "a:1"),)

    evaluator = ClusterTopology.from_tf_config(tf_config(cluster, "evaluator", 0))
    assert evaluator.is_evaluator
    assert not evaluator.is_chief
    assert evaluator.rank == -1
    assert evaluator.num_workers == 2
    assert evaluator.address == "e:1"
    assert evaluator.peers == ((0, "a:1"), (1, "b:1"))


def test_an_evaluator_need_not_be_listed():
    # kubeflow's operator lists it in nobody's cluster, not even in its own.
    topology = ClusterTopology.from_tf_config(
        tf_config({"chief": ["a:1"], "worker": ["b:1"]}, "evaluator")
    )
    assert topology.is_evaluator
    assert topology.rank == -1
    assert topology.address is None
    assert topology.num_workers == 2
    assert topology.peers == ((0, "a:1"), (1, "b:1"))


@pytest.mark.parametrize(("task_type", "rank"), [("master", 0), ("worker", 1)])
def test_master_is_an_old_name_of_chief(task_type, rank):
    cluster = {"worker": ["b:1"], "master": ["a:1"], "ps": []}
    topology = ClusterTopology.from_tf_config(tf_config(cluster, task_type))
    assert topology.addresses == ("a:1", "b:1")
    assert topology.rank == rank
    assert topology.task_type == ("worker" if rank else "chief")


def test_a_cluster_from_addresses_and_back_by_tf_config():
    addresses = ["a:1", "[::1]:2222", "10.0.0.1:02222"]
    for rank, address in enumerate(addresses):
        topology = ClusterTopology.from_addresses(addresses, rank=rank)
        assert topology.address == address  # as it was written
        assert topology.num_workers == 3
        for other in range(3):
            read = ClusterTopology.from_tf_config(topology.tf_config(other))
            assert read == ClusterTopology.from_addresses(addresses, rank=other)

    with_chief = ClusterTopology.from_tf_config(
        tf_config({"chief": ["c:1"], "worker": ["a:1"], "evaluator": ["e:1"]}, "evaluator")
    )
    assert json.loads(with_chief.tf_config(1)) == {
        "cluster": {"worker": ["c:1", "a:1"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize(
    ("addresses", "rank", "shown"),
    [
        ([], 0, "0 worker"),
        (["a:1"], 1, "rank=1"),
        (["a:1"], -1, "rank=-1"),
        (["a:1", "A:01"], 0, r"addresses\[1\] is 'A:01', which addresses\[0\] has"),
        (["a"], 0, r"addresses\[0\] is 'a'"),
    ],
)
def test_addresses_that_are_no_cluster(addresses, rank, shown):
    with pytest.raises(TopologyError, match=shown):
        ClusterTopology.from_addresses(addresses, rank=rank)


def test_there_is_a_tf_config_of_workers_only():
    for topology in (ClusterTopology(), ClusterTopology.from_addresses(["a:1"])):
        with pytest.raises(TopologyError, match="rank=1 is none"):
            topology.tf_config(1)


def test_other_top_level_entries_are_not_our_business():
    text = json.dumps(
        {
            "cluster": {"worker": ["a:1"]},
            "task": {"type": "worker", "index": 0, "trial": "1"},
            "environment": "cloud",
        }
    )
    assert ClusterTopology.from_tf_config(text).num_workers == 1


def test_topology_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClusterTopology().rank = 1


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "10.0.0.1:65535", "[::1]:2222", "[fe80::1]:80", "my_host-0.svc.local:2222"],
)
def test_good_addresses(address):
    topology = ClusterTopology.from_tf_config(tf_config({"worker": [address]}))
    assert topology.address == address


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("localhost", "host:port"),
        ("localhost:", "host:port"),
        (":2222", "host:port"),
        ("localhost:0", "'0'"),
        ("localhost:65536", "'65536'"),
        ("localhost:+22", "'\\+22'"),
        ("localhost:²", "1 to 65535"),
        ("::1:2222", "brackets"),
        ("[::g]:2222", "'::g'"),
        ("grpc://a:2222", "scheme"),
        ("a b:2222", "'a b'"),
        (2222, "2222"),
        (None, "missing"),
    ],
)
def test_bad_addresses_are_shown_with_their_place(address, shown):
    text = tf_config({"worker": ["good:1", address]})
    with pytest.raises(TopologyError, match=shown) as raised:
        ClusterTopology.from_tf_config(text)
    assert "TF_CONFIG['cluster']['worker'][1]" in str(raised.value)


TASK = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"cluster": {"worker": ["a:1"]', "no valid JSON.*worker"),
        ("[1]", r"\[1\]"),
        ("3", "3"),
        (json.dumps({"task": TASK}), r"\['cluster'\] is missing"),
        (json.dumps({"cluster": ["a:1"], "task": TASK}), r"\[\"a:1\"\]"),
        (json.dumps({"cluster": {}, "task": TASK}), "no worker"),
        (json.dumps({"cluster": {"worker": []}, "task": TASK}), "no worker"),
        (json.dumps({"cluster": {"evaluator": ["a:1"]}, "task": TASK}), "no worker"),
        (json.dumps({"cluster": {"worker": "a:1"}, "task": TASK}), r"\['worker'\] is \"a:1\""),
        (json.dumps({"cluster": {"worker": {"0": "a:1"}}, "task": TASK}), "enableDynamicWorker"),
        (
            # As kubeflow's operator writes it, without parameter servers.
            json.dumps({"sparseCluster": {"worker": {"1": "a:1"}, "ps": None}, "task": TASK}),
            r"\"a:1\".*enableDynamicWorker",
        ),
        (json.dumps({"cluster": {"worker": None}, "task": TASK}), "must be a list"),
        (
            json.dumps({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": TASK}),
            "'ps'.*b:1.*no parameter servers",
        ),
        (json.dumps({"cluster": {"worker": ["a:1"], "tpu": None}, "task": TASK}), "'tpu'"),
        (
            json.dumps({"cluster": {"chief": ["a:1"], "master": ["b:1"]}, "task": TASK}),
            r"\['master'\] has \"b:1\" .* \"a:1\"",
        ),
        (
            json.dumps({"cluster": {"worker": ["a:1"], "chief": ["b:1", "c:1"]}, "task": TASK}),
            "c:1",
        ),
        (
            json.dumps({"cluster": {"worker": ["a:1", "a:1"]}, "task": TASK}),
            r"\[1\] is 'a:1'.*\[0\]",
        ),
        (
            json.dumps({"cluster": {"worker": ["a:1"], "evaluator": ["A:1"]}, "task": TASK}),
            r"\['evaluator'\]\[0\] is 'A:1'.*\['worker'\]\[0\] has already, as 'a:1'",
        ),
        (tf_config({"worker": ["a:1", "a:01"]}), r"\[1\] is 'a:01'.*\[0\] has already, as 'a:1'"),
        (tf_config({"worker": ["[::1]:1", "[0::0:1]:1"]}), r"\[1\] is '\[0::0:1\]:1'"),
        (json.dumps({"cluster": {"worker": ["a:1"]}}), r"\['task'\] is missing"),
        (json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}), r"\['task'\]"),
        (json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}), r"\['task'\]"),
        (tf_config({"worker": ["a:1"]}, "chief"), r"\"chief\".*\['worker'\]"),
        (tf_config({"worker": ["a:1"], "ps": []}, "ps"), r"\"ps\".*\['worker'\]"),
        (tf_config({"worker": ["a:1"]}, "evaluator", -1), "is -1"),
        (tf_config({"worker": ["a:1"], "evaluator": ["e:1"]}, "evaluator", 1), r"is 1.*'e:1'"),
        (tf_config({"worker": ["a:1"]}, ["worker"]), r"\[\"worker\"\]"),
        (tf_config({"worker": ["a:1", "b:1"]}, "worker", 2), r"is 2, .* 2 address.*'b:1'"),
        (tf_config({"worker": ["a:1"]}, "worker", -1), "is -1"),
        (tf_config({"worker": ["a:1"]}, "worker", "0"), r"is \"0\".*without quotes"),
        (tf_config({"worker": ["a:1"]}, "worker", 0.0), "is 0.0"),
        (tf_config({"worker": ["a:1"]}, "worker", True), "is true"),
    ],
)
def test_errors_show_the_offending_part(text, shown):
    with pytest.raises(TopologyError, match=shown):
        ClusterTopology.from_tf_config(text)
