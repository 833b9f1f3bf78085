"""A SLURM step into ranks and addresses: environments as recorded, and every contradiction."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tf_largebatch.core.errors import TopologyError
from tf_largebatch.core.slurm import expand_node_list, expand_tasks_per_node
from tf_largebatch.core.topology import ClusterTopology

# Two tasks on one node, as Open MPI's sources record it (orte/mca/ess/slurmd).
TWO_ON_ONE_NODE = {
    "SLURM_JOB_ID": "38749",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "odin097",
    "SLURM_NODELIST": "odin097",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_NPROCS": "2",
    "SLURM_STEPID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "odin097",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "0,1",
}
# `srun env` on two nodes, from the mailing list of Open MPI ("SLURM environment variables at
# runtime"): one task a node is "cyclic", and in blocks as well.
ONE_ON_EACH_NODE = {
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GTIDS": "1",
    "SLURM_JOB_ID": "29",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
# Two tasks on each of two nodes, from the same thread.
TWO_ON_EACH_NODE = {
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
# The test of TensorFlow's own resolver.
OF_TENSORFLOW = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "t02n13,t02n41,t02n43",
}


def hosts(topology):
    return [address.rpartition(":")[0] for address in topology.addresses]


def ports(topology):
    return [int(address.rpartition(":")[2]) for address in topology.addresses]


def read(recorded, **changes):
    merged = {**recorded, **changes}
    return ClusterTopology.from_environment({k: v for k, v in merged.items() if v is not None})


@pytest.mark.parametrize(
    ("recorded", "nodes", "rank"),
    [
        (TWO_ON_ONE_NODE, ["odin097", "odin097"], 1),
        (ONE_ON_EACH_NODE, ["node1", "node2"], 1),
        (TWO_ON_EACH_NODE, ["node1", "node1", "node2", "node2"], 3),
        (OF_TENSORFLOW, ["t02n13", "t02n41", "t02n43"], 0),
    ],
)
def test_recorded_steps(recorded, nodes, rank):
    topology = read(recorded)
    assert hosts(topology) == nodes
    assert topology.rank == rank
    assert (topology.task_type, topology.task_index) == ("worker", rank)
    assert len(set(topology.addresses)) == len(nodes)
    for node in nodes:  # the same ports on every node, one after the other
        of_node = [
            p for host, p in zip(hosts(topology), ports(topology), strict=True) if host == node
        ]
        first = ports(topology)[0]
        assert of_node == list(range(first, first + len(of_node)))


@pytest.mark.parametrize(
    "environ",
    [
        # The shell of `salloc`, and a batch script: a job, but no step.
        {"SLURM_JOB_ID": "29", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "8(x2)"},
        {"SLURM_JOB_ID": "29", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"},
        # The interactive step in which newer versions run that shell, as recorded.
        {
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NODELIST": "GPU71E4",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_PROCID": "0",
            "SLURM_TASKS_PER_NODE": "8",
        },
        # This process alone, in a task of a step.
        {**TWO_ON_ONE_NODE, "TF_CONFIG": "{}"},
    ],
)
def test_outside_of_a_step_of_several_tasks_is_one_worker(environ):
    assert ClusterTopology.from_environment(environ) == ClusterTopology()


def test_tf_config_goes_first():
    text = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert read(TWO_ON_ONE_NODE, TF_CONFIG=text).addresses == ("a:1",)
    assert read(TWO_ON_ONE_NODE, TF_CONFIG=" ").num_workers == 2


def test_a_step_of_unequal_nodes():
    nodes = ["rack0-n09", "rack0-n10", "rack1-n09", "rack1-n10", "spare"]
    tasks = [2, 2, 2, 1, 3]
    expected = [
        f"{node}:{5000 + local}"
        for node, count in zip(nodes, tasks, strict=True)
        for local in range(count)
    ]
    rank = 0
    for node, count in enumerate(tasks):
        for local in range(count):
            topology = ClusterTopology.from_environment(
                {
                    "SLURM_STEP_NUM_TASKS": "10",
                    "SLURM_STEP_NODELIST": "rack[0-1]-n[09-10],spare",
                    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,3",
                    "SLURM_PROCID": str(rank),
                    "SLURM_NODEID": str(node),
                    "SLURM_LOCALID": str(local),
                    "TF_LARGEBATCH_PORT": "5000",
                }
            )
            assert list(topology.addresses) == expected
            assert topology.rank == rank
            rank += 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login1", ["login1"]),
        ("node[001-003,007],gpu-[1-2]-ib,login1", None),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("c[1-2]n[1-2].cluster", ["c1n1.cluster", "c1n2.cluster", "c2n1.cluster", "c2n2.cluster"]),
        ("b,a", ["b", "a"]),
    ],
)
def test_node_lists(text, names):
    if names is None:
        names = ["node001", "node002", "node003", "node007", "gpu-1-ib", "gpu-2-ib", "login1"]
    assert expand_node_list(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a[1-2", "a1-2]", "a[]", "a[1-]", "a[2-1]", "a[1,x]", "a[[1]]", "a[1-2-3]"]
)
def test_texts_that_are_no_node_list(text):
    with pytest.raises(TopologyError, match="node"):
        expand_node_list(text)


def test_tasks_per_node():
    # The cases of TensorFlow's own test of the same syntax.
    assert expand_tasks_per_node("3(x2),2,11(x4)") == [3, 3, 2, 11, 11, 11, 11]
    assert expand_tasks_per_node("2,1,3") == [2, 1, 3]
    for text in ("", "2x3", "2(x3", "0", "2,,1", "-1"):
        with pytest.raises(TopologyError, match="SLURM_STEP_TASKS_PER_NODE"):
            expand_tasks_per_node(text)


def cyclic(rank):
    """Rank 0 and 2 on the first node, 1 and 3 on the second, as slurm tells them."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank % 2),
        "SLURM_LOCALID": str(rank // 2),
        "SLURM_GTIDS": "0,2" if rank % 2 == 0 else "1,3",
    }


@pytest.mark.parametrize("rank", range(4))
def test_every_task_of_a_cyclic_step_is_told_how_to_start_it(rank):
    with pytest.raises(TopologyError, match="srun --distribution=block"):
        read(TWO_ON_EACH_NODE, **cyclic(rank))
    if rank in (1, 2):  # for older versions, without the list of the node's ranks
        with pytest.raises(TopologyError, match=f"SLURM_PROCID={rank} .*SLURM_NODEID"):
            read(TWO_ON_EACH_NODE, **{**cyclic(rank), "SLURM_GTIDS": None})


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"SLURM_PROCID": None}, "SLURM_PROCID is missing.*srun"),
        ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is missing"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is missing"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({"SLURM_STEP_NUM_TASKS": "-4"}, "SLURM_STEP_NUM_TASKS is '-4'"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, "SLURM_STEP_NUM_TASKS=5.*4 task.* on 2 node.*TF_CONFIG"),
        ({"SLURM_STEP_NODELIST": "node[1-3]"}, r"node\[1-3\].*3 node"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4"),
        ({"SLURM_LOCALID": "0"}, "SLURM_LOCALID=1, but it is '0'"),
        ({"SLURM_STEP_NODELIST": "node[1-1],node1"}, "'node1:[0-9]+'.*already"),
        ({"TF_LARGEBATCH_PORT": "http"}, "TF_LARGEBATCH_PORT is 'http'"),
        ({"TF_LARGEBATCH_PORT": "65535"}, "TF_LARGEBATCH_PORT=65535.*1 to 65534"),
        ({"TF_LARGEBATCH_PORT": "0"}, "TF_LARGEBATCH_PORT=0"),
    ],
)
def test_what_does_not_fit_together_is_shown(changes, shown):
    with pytest.raises(TopologyError, match=shown):
        read(TWO_ON_EACH_NODE, **changes)


def test_reserved_ports_are_used_if_they_suffice():
    reserved = {"SLURM_STEP_RESV_PORTS": "12000,12010-12011"}
    assert ports(read(TWO_ON_EACH_NODE, **reserved)) == [12000, 12010, 12000, 12010]
    assert ports(read(TWO_ON_EACH_NODE, **reserved, TF_LARGEBATCH_PORT="7000"))[:2] == [7000, 7001]

    without = read(TWO_ON_EACH_NODE)
    for too_few in ("12000", "(null)"):
        assert read(TWO_ON_EACH_NODE, SLURM_STEP_RESV_PORTS=too_few) == without


def test_steps_that_may_share_a_node_have_different_ports():
    taken: Counter[int] = Counter()
    for job in range(7_000_000, 7_000_060):
        for step in range(7):
            topology = read(TWO_ON_ONE_NODE, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
            taken.update(ports(topology))
            # Below the kernel's range of outgoing ports, above those of services.
            assert all(10_000 <= port < 32_768 - 32 for port in ports(topology))
            again = read(TWO_ON_ONE_NODE, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
            assert again == topology
    assert max(taken.values()) == 1
