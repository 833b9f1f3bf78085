"""The example trainer on images in files: what it opens, and that it trains."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python

# All in one process, as importing TensorFlow takes long.
PREPARE_AND_OPEN = "tests/examples/_prepare_and_open_script.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("made")
    return json.loads(
        run_python(
            PREPARE_AND_OPEN, str(folder), seconds=200, import_from=("tools", "examples")
        ).splitlines()[-1]
    )


@pytest.mark.parametrize("dataset", ["image_folder", "tfrecord", "array_record", "tfds"])
def test_each_kind_of_files_gives_the_same_rows(made: dict[str, Any], dataset: str) -> None:
    opened = made["opened"][dataset]
    assert opened["rows"] == [12, 6]
    assert opened["classes"] == 3
    assert opened["shape"] == [12, 32, 32, 3, "uint8"]
    assert opened["labels"] == [4, 4, 4]
    if dataset != "tfds":  # which stores rows in an order of its own
        assert opened["validation_labels"] == [0, 0, 1, 1, 2, 2]
    assert sorted(opened["validation_labels"]) == [0, 0, 1, 1, 2, 2]


def test_what_is_missing_is_named(made: dict[str, Any]) -> None:
    refused = iter(made["refused"])
    no_folder, no_such_folder, no_validation, no_files, no_classes, few_classes = itertools.islice(
        refused, 6
    )
    assert "--dataset=tfrecord needs --data_dir" in no_folder
    assert "/none" in no_such_folder
    assert "needs a folder for validation: val or validation or test" in no_validation
    assert "as val-00000-of-00001.array_record" in no_files
    assert "has no train.json with the class names; give --num_classes" in no_classes
    assert "--num_classes=2 is less than the 3 classes" in few_classes
    other_classes, lost_file = refused
    assert "packed with other classes for validation" in other_classes
    assert "tells of 12 images, but train-* hold 8" in lost_file


def test_resnet50_of_a_thousand_classes_makes_some_steps(
    made: dict[str, Any], tmp_path: Path
) -> None:
    run_python(
        "examples/train.py",
        "--dataset=tfrecord",
        f"--data_dir={made['opened']['tfrecord']['place']}",
        "--model=resnet50",
        "--num_classes=1000",
        "--epochs=1",
        "--per_replica_batch_size=4",
        "--base_learning_rate=0.01",
        "--warmup=none",
        "--decay_epochs=",
        f"--run_dir={tmp_path}",
        seconds=400,
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 3
    assert 5.0 < summary["final_val_loss"] < 9.0  # of chance: log(1000) = 6.9
    assert (tmp_path / "model.keras").exists()
