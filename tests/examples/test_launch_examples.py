"""examples/launch/: what each of them starts becomes the cluster that it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tf_largebatch as tlb
from tests.examples._plain_yaml import read_documents

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
FAKE_SRUN = """\
#!/bin/sh
printf '%s\\n' "$@" > "{folder}/srun"
exit {code}
"""
FAKE_SCONTROL = '#!/bin/sh\necho "$@" > "{folder}/scontrol"\n'


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def directives() -> dict[str, str]:
    text = (LAUNCH / "slurm.sbatch").read_text()
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.M)
    assert len(found) == text.count("#SBATCH") == len(dict(found))
    # slurm reads them up to the first command.
    assert text.rindex("#SBATCH") < min(text.index("\nRUN_DIR="), text.index("\nsrun"))
    return dict(found)


def test_the_batch_script_asks_for_a_warning_and_another_turn() -> None:
    asked = directives()
    assert re.fullmatch(r"TERM@[0-9]+", asked["signal"])  # to the tasks; B: would be the script
    assert "requeue" in asked
    assert asked["open-mode"] == "append"  # a requeued job does not lose its log


@pytest.mark.parametrize(("code", "requeues"), [(0, False), (143, True), (1, False), (137, False)])
def test_the_batch_script_queues_again_after_a_saved_end(
    tmp_path: Path, code: int, requeues: bool
) -> None:
    program(tmp_path / "srun", FAKE_SRUN.format(folder=tmp_path / "called", code=code))
    program(tmp_path / "scontrol", FAKE_SCONTROL.format(folder=tmp_path / "called"))
    (tmp_path / "called").mkdir()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "--epochs=3", "a b"],
        env=environment,
        cwd=tmp_path,
        timeout=30,
        check=False,
    )
    assert done.returncode == code
    arguments = (tmp_path / "called" / "srun").read_text().splitlines()
    assert "--distribution=block" in arguments
    assert "--kill-on-bad-exit=0" in arguments
    assert arguments[-4:] == ["examples/train.py", "--run_dir=runs/slurm-4711", "--epochs=3", "a b"]
    called = tmp_path / "called" / "scontrol"
    assert called.exists() == requeues
    assert not requeues or called.read_text() == "requeue 4711\n"


def test_the_step_of_the_batch_script_is_a_cluster() -> None:
    nodes, per_node = int(directives()["nodes"]), int(directives()["ntasks-per-node"])
    seen = set()
    for rank in range(nodes * per_node):
        topology = tlb.ClusterTopology.from_environment(
            {
                "SLURM_JOB_ID": "4711",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": f"node[01-{nodes:02d}]",
                "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
                "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
                "SLURM_PROCID": str(rank),
                "SLURM_NODEID": str(rank // per_node),
                "SLURM_LOCALID": str(rank % per_node),
                "SLURM_GTIDS": ",".join(
                    str(rank // per_node * per_node + local) for local in range(per_node)
                ),
            }
        )
        assert topology.rank == rank
        assert topology.address == topology.addresses[rank]
        assert topology.address.startswith(f"node{rank // per_node + 1:02d}:")
        seen.add(topology.addresses)
    assert len(seen) == 1


def pod_specs(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        kind: replica["template"]["spec"] for kind, replica in job["spec"]["tfReplicaSpecs"].items()
    }


def test_the_tfjob_becomes_a_cluster() -> None:
    (job,) = read_documents((LAUNCH / "kubeflow_tfjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    replicas = job["spec"]["tfReplicaSpecs"]
    assert set(replicas) == {"Chief", "Worker"}
    assert replicas["Chief"]["replicas"] == 1
    name = job["metadata"]["name"]
    cluster = {}
    for kind, spec in pod_specs(job).items():
        (container,) = spec["containers"]
        assert container["name"] == "tensorflow"  # where the operator puts TF_CONFIG
        (port,) = [p for p in container["ports"] if p["name"] == "tfjob-port"]
        assert replicas[kind]["restartPolicy"] == "OnFailure"  # lost peers end others with 1
        assert spec["terminationGracePeriodSeconds"] >= 60
        # As genClusterSpec of kubeflow's operator names them.
        cluster[kind.lower()] = [
            f"{name}-{kind.lower()}-{index}.default.svc:{port['containerPort']}"
            for index in range(replicas[kind]["replicas"])
        ]
    # All run the same, but for their number: workers compare their options, too.
    assert pod_specs(job)["Chief"] == pod_specs(job)["Worker"]

    def topology(kind: str, index: int) -> tlb.ClusterTopology:
        task = {"type": kind, "index": index}
        text = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
        return tlb.ClusterTopology.from_environment({"TF_CONFIG": text})

    assert topology("chief", 0).rank == 0
    assert [topology("worker", index).rank for index in range(3)] == [1, 2, 3]
    assert topology("worker", 2).address == "tf-largebatch-worker-2.default.svc:2222"
    assert topology("worker", 2).num_workers == 4
    evaluator = topology("evaluator", 0)  # which the operator lists in no cluster
    assert evaluator.is_evaluator and evaluator.address is None


def test_the_indexed_job_becomes_a_cluster(tmp_path: Path) -> None:
    service, job = read_documents((LAUNCH / "kubernetes_indexed_job.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    name, workers = job["metadata"]["name"], job["spec"]["completions"]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == workers
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment == {"WORKERS": str(workers)}

    # The `python` of the container: this one, but for the training itself.
    program(
        tmp_path / "python",
        f'#!/bin/sh\ntest "$1" = -c && exec "{sys.executable}" "$@"\necho "$TF_CONFIG" "$@"\n',
    )
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for index in range(workers):
        printed = subprocess.run(
            container["command"],
            env={**environment, "JOB_COMPLETION_INDEX": str(index)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        text, _, command = printed.partition(" examples/")
        assert command == "train.py --run_dir=/runs/tf-largebatch\n"
        topology = tlb.ClusterTopology.from_tf_config(text)
        assert topology.rank == index
        # Kubernetes names the pods of an Indexed Job so.
        assert topology.addresses == tuple(
            f"{name}-{each}.{spec['subdomain']}:{container['ports'][0]['containerPort']}"
            for each in range(workers)
        )

    failed = subprocess.run(
        container["command"], env=environment, capture_output=True, timeout=60, check=False
    )
    assert failed.returncode == 1 and failed.stdout == b""  # not trained alone without an index


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a: b\n  c: d",
        "a: b\na: c",
        "a: {b: c}",
        "a: &b c",
        "a:",
        "a: 'b'",
        "- a\nb: c",
        "\ta: b",
    ],
)
def test_what_is_not_plain_yaml_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_documents(text)
