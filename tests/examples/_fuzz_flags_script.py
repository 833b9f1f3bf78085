"""Any command line of the example trainer, and what becomes of it; fails at the first surprise.

Prints how many became a configuration, and how many of these a recipe. Runs in a process of its
own, with the folder of the examples on its path, as flags are one table for a process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import _config
from absl import flags
from absl.testing import flagsaver
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_largebatch as tlb

NAMES = [field.name for field in dataclasses.fields(_config.TrainConfig)]
CHOICES = {
    field.name: field.metadata["choices"]
    for field in dataclasses.fields(_config.TrainConfig)
    if field.metadata["choices"]
}
NUMBERS = st.integers(1, 100) | st.integers() | st.floats(0, 1) | st.floats()
NUMBERS |= st.sampled_from(["1e999", "nan", "-0", "1_0", "٣", "0x10", "1" * 5000])
VALUES = NUMBERS.map(str) | st.text(max_size=6)
VALUES |= st.lists(NUMBERS.map(str) | st.text(',"\n\r 1', max_size=3), max_size=3).map(",".join)
counts = {"configurations": 0, "recipes": 0}


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    """Flags that are mostly there, each with one value that is mostly of its kind."""
    given_names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    made = ["--run_dir=r"] if draw(st.integers(0, 9)) else []
    for name in given_names:
        values = VALUES
        if name in CHOICES and draw(st.integers(0, 4)):
            values = st.sampled_from(CHOICES[name])
        elif name in ("epochs", "per_replica_batch_size", "warmup_epochs") and draw(st.booleans()):
            values = st.integers(1, 200).map(str)
        made.append(f"--{name}={draw(values)}")
    if not draw(st.integers(0, 5)):
        others = st.sampled_from(["--", "-", "--no", "--epochs", "--noseed", "--=1"]) | st.text()
        made.insert(draw(st.integers(0, len(made))), draw(others))
    return made


def parsed(made: list[str]) -> _config.TrainConfig | None:
    with flagsaver.flagsaver():
        try:
            _, *others = flags.FLAGS(["train.py", *made])
            return _config.config_from_flags(others)
        except (flags.Error, tlb.ConfigurationError) as error:
            assert str(error)
            return None


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(arguments())
def every_command_line_is_a_configuration_or_a_typed_error(made: list[str]) -> None:
    config = parsed(made)
    if config is None:
        return
    counts["configurations"] += 1
    assert config.run_dir and config.base_learning_rate is not None
    assert all(getattr(config, name) in choices for name, choices in CHOICES.items())
    try:
        recipe = tlb.Recipe(
            num_examples=5000,
            per_replica_batch_size=config.per_replica_batch_size,
            num_replicas=1,
            base_learning_rate=config.base_learning_rate,
            base_batch_size=config.base_batch_size,
            epochs=config.epochs,
            warmup=config.warmup,
            warmup_epochs=config.warmup_epochs,
            decay_epochs=config.decay_epochs,
            accumulation_steps=config.accumulation_steps,
        )
    except tlb.ConfigurationError as error:
        assert str(error)
        return
    counts["recipes"] += 1
    assert math.isfinite(recipe.peak_learning_rate) and recipe.describe()


if __name__ == "__main__":
    _config.define_flags()
    every_command_line_is_a_configuration_or_a_typed_error()
    assert "tensorflow" not in sys.modules
    print(json.dumps(counts))
