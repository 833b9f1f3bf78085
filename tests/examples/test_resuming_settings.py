"""With which settings a run of the example trainer may be resumed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import run_python

SCRIPT = """
import dataclasses, json, pathlib, sys
import tf_largebatch as tlb
from _config import TrainConfig
from _report import refuse_other_run, write_config
folder = pathlib.Path(sys.argv[1])
base = dict(run_dir=str(folder), decay_epochs=(3.0, 6.0))
recipe = tlb.Recipe(num_examples=64, per_replica_batch_size=4, num_replicas=1,
                    base_learning_rate=0.1, epochs=8)
def refused(where=folder, **changes):
    try:
        refuse_other_run(TrainConfig(**{**base, **changes}), where)
    except tlb.ConfigurationError as error:
        return str(error)
found = {"empty": refused()}
write_config(TrainConfig(**base), recipe, folder)
found["same"] = refused()
for changes in json.loads(sys.argv[2]):
    found[json.dumps(changes)] = refused(**changes)
def with_recipe(**changes):
    other = dataclasses.replace(recipe, **changes)
    try:
        write_config(TrainConfig(**base), other, folder)
    except tlb.ConfigurationError as error:
        return str(error)
before = (folder / "config.json").read_text()
found["twice the replicas"] = with_recipe(num_replicas=2, per_replica_batch_size=2)
found["twice the batch"] = with_recipe(num_replicas=2)
assert (folder / "config.json").read_text() == before
older = json.loads((folder / "config.json").read_text())
del older["label_smoothing"]
(folder / "config.json").write_text(json.dumps(older))
found["older"] = refused()
(folder / "config.json").write_text("{")
found["damaged"] = refused()
print(json.dumps(found))
"""
MAY_CHANGE = [
    {"all_reduce": "ring"},
    {"save_every_steps": 7},
    {"data_dir": ""},
    {"per_replica_batch_size": 16},
]
REFUSED = {
    "epochs": (8, 9),
    "warmup": ("gradual", "none"),
    "seed": (1, 2),
    "momentum": (0.9, 0.8),
    "decay_epochs": ([3.0, 6.0], [3.0]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    changes = [*MAY_CHANGE, *({name: now} for name, (_, now) in REFUSED.items())]
    changes.append({"seed": 2, "epochs": 9})
    folder = tmp_path_factory.mktemp("run")
    printed = run_python("-c", SCRIPT, str(folder), json.dumps(changes), import_from=["examples"])
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize(
    "case", ["empty", "same", "twice the replicas", *map(json.dumps, MAY_CHANGE)]
)
def test_may_be_resumed(found: dict[str, Any], case: str) -> None:
    assert found[case] is None


@pytest.mark.parametrize("name", REFUSED)
def test_another_run(found: dict[str, Any], name: str) -> None:
    there, now = REFUSED[name]
    message = found[json.dumps({name: now})]
    assert "holds a run with other settings:" in message
    lines = [line for line in message.splitlines() if line.startswith("  --")]
    assert lines == [f"  --{name}: {there!r} there, {now!r} now"]


def test_all_that_differs_is_shown(found: dict[str, Any]) -> None:
    message = found[json.dumps({"seed": 2, "epochs": 9})]
    assert "--seed: 1 there, 2 now" in message and "--epochs: 8 there, 9 now" in message


def test_another_global_batch(found: dict[str, Any]) -> None:
    assert "global batch: 4 there, 8 now" in found["twice the batch"]


def test_files_of_other_programs(found: dict[str, Any]) -> None:
    assert "--label_smoothing: None there, 0.0 now" in found["older"]
    assert "is no file of train.py" in found["damaged"]
