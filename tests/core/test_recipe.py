"""The recipe's arithmetic against the paper's figures and closed forms."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.recipe import Recipe

PAPER = {
    "num_examples": 1_281_167,
    "per_replica_batch_size": 32,
    "num_replicas": 256,
    "base_learning_rate": 0.1,
    "base_batch_size": 256,
    "epochs": 90,
    "warmup": "gradual",
    "warmup_epochs": 5,
    "decay_epochs": (30, 60, 80),
    "decay_factor": 0.1,
}


def paper(**changes):
    return Recipe(**{**PAPER, **changes})


def small(**changes):
    """10 updates an epoch, peak 0.8."""
    fields = {
        "num_examples": 1000,
        "per_replica_batch_size": 50,
        "num_replicas": 2,
        "base_batch_size": 25,
        "base_learning_rate": 0.2,
        "epochs": 9,
        "warmup_epochs": 1,
    }
    return Recipe(**{**fields, **changes})


def test_the_paper_s_numbers():
    recipe = paper()
    assert recipe.global_batch_size == 8192
    assert recipe.steps_per_epoch == 156
    assert recipe.total_steps == 14_040
    assert recipe.warmup_steps == 780
    assert recipe.decay_steps == (4680, 9360, 12_480)
    assert recipe.peak_learning_rate == pytest.approx(3.2, rel=1e-15)
    assert recipe.initial_learning_rate == 0.1


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.1),
        (1, 0.1 + 3.1 / 780),
        (779, 0.1 + 3.1 * 779 / 780),
        (780, 3.2),
        (781, 3.2),
        (4679, 3.2),
        (4680, 0.32),
        (9359, 0.32),
        (9360, 0.032),
        (12_479, 0.032),
        (12_480, 0.0032),
        (14_039, 0.0032),
        (2**24 + 1, 0.0032),
        (2**40, 0.0032),
    ],
)
def test_the_paper_s_rates_at_every_boundary(step, rate):
    assert paper().learning_rate_at(step) == pytest.approx(rate, rel=1e-14)


def test_constant_and_no_warmup():
    constant, none = paper(warmup="constant"), paper(warmup="none")
    steps = [0, 779, 780, 4680]
    np.testing.assert_allclose(constant.learning_rate_at(steps), [0.1, 0.1, 3.2, 0.32], rtol=1e-15)
    np.testing.assert_allclose(none.learning_rate_at(steps), [3.2, 3.2, 3.2, 0.32], rtol=1e-15)
    assert none.warmup_steps == 0


def test_reference_batch_has_the_reference_rate():
    recipe = paper(num_replicas=8)
    assert recipe.global_batch_size == 256
    assert set(recipe.learning_rate_at(np.arange(30 * recipe.steps_per_epoch))) == {0.1}


def test_a_batch_below_the_reference_has_no_ramp():
    recipe = paper(num_replicas=2)
    assert recipe.peak_learning_rate == 0.025
    assert recipe.initial_learning_rate == 0.025
    assert set(recipe.learning_rate_at(np.arange(1000))) == {0.025}


def test_default_decay_is_the_paper_s_share_of_epochs():
    assert paper(decay_epochs=None).decay_steps == (4680, 9360, 12_480)
    assert small(decay_epochs=None).decay_steps == (30, 60, 80)
    assert small(decay_epochs=None, epochs=10).decay_steps == (33, 67, 89)
    assert small(decay_epochs=()).decay_steps == ()
    assert small(decay_epochs=()).learning_rate_at(10**6) == pytest.approx(0.8)


SPLITS = [(n, k, a) for n in (16, 32, 64) for k in (1, 2, 4) for a in (1, 2, 4)]


@pytest.mark.parametrize("warmup", ["gradual", "constant", "none"])
def test_every_split_of_a_global_batch_has_the_same_rates(warmup):
    steps = np.concatenate([np.arange(600), [2**24 + 1, 2**31]])
    curves = {}
    for n, k, a in SPLITS:
        recipe = Recipe(
            num_examples=20_000,
            per_replica_batch_size=n,
            num_replicas=k,
            accumulation_steps=a,
            base_learning_rate=0.05,
            base_batch_size=32,
            epochs=7,
            warmup=warmup,
            warmup_epochs=1.5,
        )
        curve = recipe.learning_rate_at(steps)
        first = curves.setdefault(recipe.global_batch_size, curve)
        np.testing.assert_array_equal(curve, first)
    assert len(curves) == 7


def test_the_rate_against_epochs_is_the_same_line_whatever_the_batch():
    # At half of warmup the rate is half way up, for any number of replicas.
    for replicas in (1, 2, 4, 8):
        recipe = small(num_replicas=replicas, warmup_epochs=2)
        half = recipe.learning_rate_at(recipe.steps_per_epoch)
        middle = (recipe.initial_learning_rate + recipe.peak_learning_rate) / 2
        assert half == pytest.approx(middle, rel=1e-14)


@pytest.mark.parametrize("warmup", ["gradual", "constant"])
def test_warmup_of_zero_epochs_is_none(warmup):
    recipe = small(warmup=warmup, warmup_epochs=0, decay_epochs=())
    assert recipe.warmup_steps == 0
    np.testing.assert_allclose(recipe.learning_rate_at([0, 1]), 0.8)


def test_fractional_warmup_rounds_to_whole_updates():
    recipe = small(warmup_epochs=0.25)
    assert recipe.warmup_steps == 3
    expected = [0.2, 0.2 + 0.6 / 3, 0.2 + 1.2 / 3, 0.8]
    np.testing.assert_allclose(recipe.learning_rate_at(np.arange(4)), expected)


def test_warmup_longer_than_training_goes_on_past_its_end():
    recipe = small(epochs=3, warmup_epochs=6, decay_epochs=(1,))
    line = 0.2 + 0.6 * np.arange(30) / 60
    expected = np.where(np.arange(30) < 10, line, line * 0.1)
    np.testing.assert_allclose(recipe.learning_rate_at(np.arange(30)), expected, rtol=1e-14)


def test_one_update_an_epoch():
    recipe = small(num_examples=150, epochs=9, warmup_epochs=3)
    assert recipe.steps_per_epoch == 1
    expected = [0.2, 0.4, 0.6, 0.08, 0.08, 0.08, 0.008, 0.008, 0.0008]
    np.testing.assert_allclose(recipe.learning_rate_at(np.arange(9)), expected, rtol=1e-14)


@settings(deadline=None, max_examples=60)
@given(
    num_examples=st.integers(100, 10**7),
    n=st.integers(1, 10),
    k=st.integers(1, 10),
    epochs=st.integers(1, 100),
    warmup_epochs=st.floats(0, 120),
    warmup=st.sampled_from(["gradual", "constant", "none"]),
    step=st.integers(0, 2**45),
)
def test_rates_follow_the_formula(num_examples, n, k, epochs, warmup_epochs, warmup, step):
    recipe = Recipe(
        num_examples=num_examples,
        per_replica_batch_size=n,
        num_replicas=k,
        base_learning_rate=0.1,
        base_batch_size=8,
        epochs=epochs,
        warmup=warmup,
        warmup_epochs=warmup_epochs,
    )
    peak = 0.1 * n * k / 8
    initial = min(0.1, peak)
    w = 0 if warmup == "none" else math.floor(warmup_epochs * (num_examples // (n * k)) + 0.5)
    expected = peak
    if step < w:
        expected = initial if warmup == "constant" else initial + (peak - initial) * step / w
    expected *= 0.1 ** sum(step >= boundary for boundary in recipe.decay_steps)
    assert recipe.learning_rate_at(step) == pytest.approx(expected, rel=1e-13)


def test_learning_rate_at_returns_float_or_float64_array():
    recipe = paper()
    assert type(recipe.learning_rate_at(7)) is float
    assert type(recipe.learning_rate_at(np.int32(7))) is float
    rates = recipe.learning_rate_at(np.zeros((2, 3), np.int32))
    assert rates.shape == (2, 3)
    assert rates.dtype == np.float64
    flat = paper(warmup="none", decay_epochs=()).learning_rate_at([1, 2])
    np.testing.assert_allclose(flat, [3.2, 3.2])


@pytest.mark.parametrize("step", [-1, 0.5, [1, -2], True, "3", np.float32(2)])
def test_learning_rate_at_refuses_what_is_no_step(step):
    with pytest.raises(ConfigurationError, match="step="):
        paper().learning_rate_at(step)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_examples", 0),
        ("num_examples", 1e6),
        ("per_replica_batch_size", True),
        ("num_replicas", 2.0),
        ("epochs", 0),
        ("epochs", 90.5),
        ("base_batch_size", -256),
        ("accumulation_steps", 0),
        ("base_learning_rate", 0.0),
        ("base_learning_rate", math.nan),
        ("base_learning_rate", None),
        ("warmup", "linear"),
        ("warmup", None),
        ("warmup_epochs", -1),
        ("warmup_epochs", math.inf),
        ("warmup_epochs", False),
        ("decay_factor", 0.0),
        ("decay_factor", 1.0),
        ("decay_factor", math.nan),
        ("decay_epochs", 30),
        ("decay_epochs", "30"),
        ("decay_epochs", (0, 30)),
        ("decay_epochs", (30, 30)),
        ("decay_epochs", (60, 30)),
        ("decay_epochs", (30, 90)),
        ("decay_epochs", (math.nan,)),
        ("decay_epochs", (10**400,)),
        ("num_examples", 10**30),
        ("num_examples", 10**400),
        ("epochs", 10**400),
        ("epochs", 2**53),  # each of 156 updates
        ("warmup_epochs", 1e18),
        ("warmup_epochs", 1e308),
        ("warmup_epochs", 10**400),
        ("base_learning_rate", 1e308),
    ],
)
def test_refused_values_are_named(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        paper(**{name: value})


def test_the_largest_numbers_that_are_taken():
    recipe = small(num_examples=2**53, epochs=1, per_replica_batch_size=1, num_replicas=1)
    assert recipe.total_steps == recipe.warmup_steps == 2**53
    assert "9007199254740992 updates = 1 epochs" in recipe.describe()
    # The length of a warmup that there is not means nothing.
    assert paper(warmup="none", warmup_epochs=1e18).warmup_steps == 0


def test_a_batch_larger_than_the_data_says_what_would_fit():
    with pytest.raises(ConfigurationError) as raised:
        paper(num_examples=5000)
    message = str(raised.value)
    assert "num_examples=5000" in message
    assert "8192 = 32 per replica x 256 replicas" in message
    assert "num_replicas=156" in message
    assert "per_replica_batch_size=19" in message
    assert paper(num_examples=5000, num_replicas=156).steps_per_epoch == 1
    assert paper(num_examples=5000, per_replica_batch_size=19).steps_per_epoch == 1


def test_fields_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        Recipe(1000, 10, 1, 0.1, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        paper().epochs = 3


def test_numpy_numbers_become_python_ones():
    recipe = paper(num_replicas=np.int64(256), base_learning_rate=np.float64(0.1))
    assert recipe == paper()
    assert json.loads(json.dumps(recipe.to_dict()))["num_replicas"] == 256


@pytest.mark.parametrize("decay_epochs", [None, (), (30, 60.5)])
def test_a_way_through_json(decay_epochs):
    recipe = paper(decay_epochs=decay_epochs)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_from_dict_refuses_unknown_and_missing_keys():
    with pytest.raises(ConfigurationError, match=r"'warmup_epoch'.*'warmup_epochs'"):
        Recipe.from_dict({**PAPER, "warmup_epoch": 5})
    fields = dict(PAPER)
    del fields["epochs"]
    with pytest.raises(ConfigurationError, match="epochs"):
        Recipe.from_dict(fields)


def test_describe_has_what_to_check_before_a_long_run():
    text = paper().describe()
    lines = [line.split() for line in text.splitlines()]
    assert "8192 = 32 per replica x 256 replicas" in text
    assert "3.2 = 0.1 x 8192 / 256" in text
    assert "156 updates" in text
    assert "3215 examples dropped" in text
    assert "14040 updates = 90 epochs" in text
    table = {line[0]: line[1:] for line in lines if line and line[0].isdigit()}
    assert table["0"] == ["0.000", "0.1", "first", "update"]
    assert table["779"][1:] == ["3.19603", "last", "of", "warmup"]
    assert table["780"] == ["5.000", "3.2", "first", "after", "warmup"]
    assert table["4680"][:2] == ["30.000", "0.32"]
    assert table["9360"][:2] == ["60.000", "0.032"]
    assert table["12480"][:2] == ["80.000", "0.0032"]
    assert table["14039"][1:] == ["0.0032", "last", "update"]


def test_describe_notes_a_decay_within_warmup():
    assert "NOTE" in small(epochs=3, warmup_epochs=2, decay_epochs=(1,)).describe()
    assert "NOTE" not in small(epochs=3, warmup_epochs=1, decay_epochs=(1,)).describe()


def test_describe_of_a_batch_that_needs_no_warmup():
    recipe = small(base_batch_size=10**6, epochs=3, warmup_epochs=2, decay_epochs=(1,))
    text = recipe.describe()
    assert "none, as the peak is not above the base rate" in text
    assert "after warmup" not in text and "NOTE" not in text


def test_describe_shows_accumulation_and_stays_within_training():
    text = small(accumulation_steps=2, epochs=2, warmup_epochs=3, decay_epochs=()).describe()
    assert "200 = 50 per replica x 2 replicas x 2 accumulated" in text
    assert "longer than training" in text
    updates = [int(line.split()[0]) for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert updates == [0, 9]


def test_a_recipe_needs_no_tensorflow():
    code = (
        "import sys; from tf_largebatch.core.recipe import Recipe; "
        f"print(Recipe(**{PAPER!r}).describe()); "
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
