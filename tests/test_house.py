"""The house around the code: what the top package shows, loads and registers; who imports whom."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf_largebatch as tlb
from tests.processes import run_python

ROOT = Path(__file__).parents[1]
SUBPACKAGES = (
    "callbacks",
    "data",
    "losses",
    "models",
    "normalization",
    "optimizers",
    "schedules",
)
THE_ONE_DOOR = "tf_largebatch/distribute/_tf_internals.py"


def public_names() -> set[str]:
    """As a user writes them behind `tlb.`: a subpackage stands for what it exports."""
    names = set(tlb.__all__) - set(SUBPACKAGES)
    for subpackage in SUBPACKAGES:
        names |= {f"{subpackage}.{name}" for name in getattr(tlb, subpackage).__all__}
    return names


def test_all_is_sorted_and_every_name_loads() -> None:
    assert list(tlb.__all__) == sorted(set(tlb.__all__))
    assert set(SUBPACKAGES) < set(tlb.__all__)
    for name in tlb.__all__:
        assert getattr(tlb, name) is not None
    for subpackage in SUBPACKAGES:
        module = importlib.import_module(f"tf_largebatch.{subpackage}")
        assert getattr(tlb, subpackage) is module
        assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(tlb.__all__) <= set(dir(tlb))


def test_names_for_type_checkers_are_those_that_load() -> None:
    tree = ast.parse(Path(tlb.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told: dict[str, Any] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            home = importlib.import_module(node.module)
            told[alias.name] = getattr(home, alias.name)
    assert told == {name: getattr(tlb, name) for name in tlb.__all__}


def test_the_readme_lists_exactly_the_public_names() -> None:
    section = (ROOT / "README.md").read_text().split("\n## API\n")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert set(listed) == public_names()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tf_largebatch' has no attribute 'LARGE'"):
        _ = tlb.LARGE


def test_the_version_is_the_packages_and_in_the_changelog() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert tlb.__version__ == version
    assert version in (ROOT / "CHANGELOG.md").read_text()


def test_plans_and_errors_need_no_tensorflow() -> None:
    errors = [
        name
        for name in tlb.__all__
        if isinstance(getattr(tlb, name), type) and issubclass(getattr(tlb, name), Exception)
    ]
    assert "LargeBatchError" in errors
    script = """
import sys
import tf_largebatch as tlb

for name in sys.argv[1:]:
    assert issubclass(getattr(tlb, name), tlb.LargeBatchError), name
recipe = tlb.Recipe(num_examples=1024, per_replica_batch_size=32, num_replicas=2,
                    base_learning_rate=0.1, epochs=3)
recipe.describe()
tlb.ClusterTopology.from_environment({})
print(tlb.linear_scaling_rule(0.1, global_batch_size=512))
print(tlb.sqrt_scaling_rule(0.1, global_batch_size=1024))
assert set(tlb.__all__) <= set(dir(tlb))
assert not {"keras", "tensorflow"} & set(sys.modules)
"""
    assert run_python("-c", script, *errors).split() == ["0.2", "0.2"]


# One process, both orders: the second import finds neither the package nor its registered classes.
LOADS = """
import sys
import tf_largebatch as tlb
assert "keras" not in sys.modules
import keras
first = keras.models.load_model(sys.argv[1])

keras.saving.get_custom_objects().clear()
for name in [name for name in sys.modules if name.startswith("tf_largebatch")]:
    del sys.modules[name]
import tf_largebatch
second = keras.models.load_model(sys.argv[1])
registered = sorted(keras.saving.get_custom_objects())

import json
import numpy as np
x, y = np.load(sys.argv[2])["x"], np.load(sys.argv[2])["y"]
second.fit(x, y, batch_size=4, shuffle=False, verbose=0)
np.savez(sys.argv[2], *second.get_weights())
print(json.dumps({
    "registered": registered,
    "optimizers": [type(model.optimizer).__module__ for model in (first, second)],
    "updates": [int(model.optimizer.iterations.numpy()) for model in (first, second)],
}))
"""


def compiled_model() -> keras.Model:
    recipe = tlb.Recipe(
        num_examples=16,
        per_replica_batch_size=4,
        num_replicas=1,
        accumulation_steps=2,
        base_learning_rate=0.1,
        base_batch_size=4,
        epochs=3,
        warmup_epochs=2,
        decay_epochs=(2,),
    )
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(
        tlb.optimizers.MomentumSGD(
            recipe.learning_rate_schedule(),
            weight_decay=1e-4,
            gradient_accumulation_steps=recipe.accumulation_steps,
        ),
        tlb.losses.SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    )
    return model


def test_a_compiled_model_trains_on_in_a_process_that_imported_the_top_package(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 4)).astype("float32")
    y = random.integers(3, size=16)
    model = compiled_model()
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "arrays.npz", x=x, y=y)
    seen = json.loads(
        run_python("-c", LOADS, str(tmp_path / "model.keras"), str(tmp_path / "arrays.npz"))
    )
    assert seen["optimizers"] == ["tf_largebatch.optimizers._momentum_sgd"] * 2
    assert seen["updates"] == [2, 4]

    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    with np.load(tmp_path / "arrays.npz") as loaded:
        for weight, name in zip(model.get_weights(), loaded.files, strict=True):
            np.testing.assert_allclose(loaded[name], weight, rtol=1e-5, atol=1e-6)

    assert public_names()  # imports every floor
    ours = {name for name in keras.saving.get_custom_objects() if name.startswith("tf_largebatch>")}
    assert set(seen["registered"]) == ours


def imports_of(*folders: str) -> Iterator[tuple[str, str]]:
    """(file, imported module or name) of every import statement below these folders."""
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import in line {node.lineno}"
                yield from ((file, f"{node.module}.{alias.name}") for alias in node.names)


def test_private_parts_of_tensorflow_and_keras_have_one_door() -> None:
    inside = [
        (file, name)
        for file, name in imports_of("tf_largebatch", "examples", "tools")
        if f"{name}.".startswith(("tensorflow.python.", "keras.src."))
    ]
    assert {file for file, _ in inside} == {THE_ONE_DOOR}
    assert all(name.startswith("tensorflow.python.") for _, name in inside)


def test_nothing_imports_the_top_floor() -> None:
    upwards = [
        (file, name)
        for file, name in imports_of("tf_largebatch")
        if name.split(".")[0] in ("examples", "tests", "tools")
    ]
    assert upwards == []


def test_examples_and_tools_use_public_names_only() -> None:
    ours = [
        (file, name)
        for file, name in imports_of("examples", "tools")
        if name.split(".")[0] == "tf_largebatch"
    ]
    assert ours
    assert [(file, name) for file, name in ours if "._" in name] == []
