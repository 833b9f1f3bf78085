"""The Keras schedules against the closed form, in real optimizers and through saved files."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.processes import run_python
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.recipe import Recipe
from tf_largebatch.schedules import AccumulatedSteps, ConstantWarmup, GradualWarmup, StepDecay


def paper(**changes):
    fields = {
        "num_examples": 1_281_167,
        "per_replica_batch_size": 32,
        "num_replicas": 256,
        "base_learning_rate": 0.1,
        "epochs": 90,
        "decay_epochs": (30, 60, 80),
    }
    return Recipe(**{**fields, **changes})


def tiny(**changes):
    """4 updates an epoch: warmup up to update 8, decay at 12 and 16 of 20."""
    fields = {
        "num_examples": 32,
        "per_replica_batch_size": 8,
        "num_replicas": 1,
        "base_learning_rate": 0.1,
        "base_batch_size": 2,
        "epochs": 5,
        "warmup_epochs": 2,
        "decay_epochs": (3, 4),
    }
    return Recipe(**{**fields, **changes})


BOUNDARIES = np.concatenate(
    [
        np.array([0, 1, 779, 780, 781, 4679, 4680, 4681, 9359, 9360, 12_479, 12_480, 14_039]),
        2**24 + np.arange(-1, 3),
        [2**31 - 1, 2**31, 2**40],
    ]
)


@pytest.mark.parametrize("warmup", ["gradual", "constant", "none"])
def test_recipe_schedule_is_the_closed_form_rounded_once(warmup):
    recipe = paper(warmup=warmup)
    schedule = recipe.learning_rate_schedule()
    rates = schedule(tf.constant(BOUNDARIES, tf.int64))
    assert rates.dtype == tf.float32
    np.testing.assert_array_equal(rates, np.float32(recipe.learning_rate_at(BOUNDARIES)))
    in_graph = tf.function(schedule)
    for step in BOUNDARIES:
        expected = np.float32(recipe.learning_rate_at(step))
        assert in_graph(tf.constant(step, tf.int64)).numpy() == expected
        assert schedule(int(step)).numpy() == expected


def test_steps_beyond_float32_are_told_apart():
    edge = 2**24 + 1
    recipe = Recipe(
        num_examples=edge,
        per_replica_batch_size=1,
        num_replicas=1,
        base_learning_rate=0.5,
        base_batch_size=1,
        epochs=3,
        warmup_epochs=0,
        decay_epochs=(1, 2),
    )
    schedule = recipe.learning_rate_schedule()
    np.testing.assert_allclose(
        [schedule(edge - 1), schedule(edge), schedule(2 * edge - 1), schedule(2 * edge)],
        [0.5, 0.05, 0.05, 0.005],
    )
    warmup = GradualWarmup(3.0, warmup_steps=2**25, initial_learning_rate=1.0)
    exact = warmup.exact_rate(tf.constant([edge - 1, edge], tf.int64)).numpy()
    np.testing.assert_allclose(exact, [2.0, 2.0 + 2.0 / 2**25], rtol=1e-16)


def test_gradual_warmup_of_a_number():
    schedule = GradualWarmup(3.2, warmup_steps=780, initial_learning_rate=0.1)
    steps = np.arange(800)
    expected = np.where(steps < 780, 0.1 + 3.1 * steps / 780, 3.2)
    np.testing.assert_allclose(schedule(steps), expected, rtol=1e-7)


def test_constant_warmup_of_a_number():
    schedule = ConstantWarmup(3.2, warmup_steps=3, initial_learning_rate=0.1)
    np.testing.assert_allclose(schedule(np.arange(5)), [0.1, 0.1, 0.1, 3.2, 3.2])


def test_warmup_of_zero_steps_is_the_schedule_itself():
    for warmup in (GradualWarmup, ConstantWarmup):
        schedule = warmup(3.2, warmup_steps=0, initial_learning_rate=0.1)
        np.testing.assert_allclose([schedule(0), schedule(1)], [3.2, 3.2])


def test_a_schedule_after_warmup_sees_steps_from_the_start_of_training():
    cosine = keras.optimizers.schedules.CosineDecay(1.0, decay_steps=100)
    gradual = GradualWarmup(cosine, warmup_steps=20, initial_learning_rate=0.1)
    constant = ConstantWarmup(cosine, warmup_steps=20, initial_learning_rate=0.1)
    at_the_end = 0.5 * (1 + np.cos(np.pi * 20 / 100))
    np.testing.assert_allclose(gradual(10), (0.1 + at_the_end) / 2, rtol=1e-6)
    np.testing.assert_allclose(constant(10), 0.1)
    for step in (20, 21, 60):
        expected = 0.5 * (1 + np.cos(np.pi * step / 100))
        np.testing.assert_allclose([gradual(step), constant(step)], expected, rtol=1e-6)


def test_step_decay_lowers_the_rate_at_the_boundary_keras_one_later():
    ours = StepDecay(1.0, boundaries=[3, 5], decay_factor=0.1)
    theirs = keras.optimizers.schedules.PiecewiseConstantDecay([3, 5], [1.0, 0.1, 0.01])
    np.testing.assert_allclose([ours(t) for t in range(7)], [1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    np.testing.assert_allclose([float(theirs(t)) for t in (3, 4, 5, 6)], [1, 0.1, 0.1, 0.01])


def test_step_decay_of_a_schedule():
    cosine = keras.optimizers.schedules.CosineDecay(1.0, decay_steps=100)
    decayed = StepDecay(cosine, boundaries=(50,), decay_factor=0.5)
    np.testing.assert_allclose(decayed(49), float(cosine(49)))
    np.testing.assert_allclose(decayed(50), 0.5 * float(cosine(50)), rtol=1e-6)


def applied_rates(schedule, *, updates, accumulation_steps, compiled):
    """What a real optimizer takes off a weight whose gradient is always 1."""
    optimizer = keras.optimizers.SGD(
        schedule,
        gradient_accumulation_steps=accumulation_steps if accumulation_steps > 1 else None,
    )
    weight = keras.Variable(0.0, dtype="float64")
    optimizer.build([weight])

    def apply():
        optimizer.apply([tf.constant(1.0, tf.float64)])

    if compiled:
        apply = tf.function(apply)
    values = [0.0]
    for _ in range(updates * accumulation_steps):
        apply()
        values.append(float(weight.numpy()))
    after_each_update = np.array(values[::accumulation_steps])
    return -np.diff(after_each_update)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_an_optimizer_applies_the_rate_of_its_update(accumulation_steps, compiled):
    recipe = tiny(
        per_replica_batch_size=8 // accumulation_steps, accumulation_steps=accumulation_steps
    )
    got = applied_rates(
        recipe.learning_rate_schedule(),
        updates=recipe.total_steps,
        accumulation_steps=accumulation_steps,
        compiled=compiled,
    )
    expected = np.float32(tiny().learning_rate_at(np.arange(20)))
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_accumulated_steps_wraps_any_keras_schedule():
    cosine = keras.optimizers.schedules.CosineDecay(1.0, decay_steps=6)
    got = applied_rates(
        AccumulatedSteps(cosine, accumulation_steps=3),
        updates=6,
        accumulation_steps=3,
        compiled=False,
    )
    np.testing.assert_allclose(got, [float(cosine(t)) for t in range(6)], rtol=1e-6)


def test_float64_models_get_float64_rates():
    recipe = paper()
    keras.config.set_floatx("float64")
    try:
        rates = recipe.learning_rate_schedule()(BOUNDARIES)
    finally:
        keras.config.set_floatx("float32")
    np.testing.assert_array_equal(rates, recipe.learning_rate_at(BOUNDARIES))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: GradualWarmup(-1.0, warmup_steps=1, initial_learning_rate=0.1), "after_warmup"),
        (lambda: GradualWarmup("1", warmup_steps=1, initial_learning_rate=0.1), "after_warmup"),
        (lambda: GradualWarmup(1.0, warmup_steps=1.5, initial_learning_rate=0.1), "warmup_steps"),
        (lambda: ConstantWarmup(1.0, warmup_steps=-1, initial_learning_rate=0.1), "warmup_steps"),
        (
            lambda: ConstantWarmup(1.0, warmup_steps=1, initial_learning_rate=float("nan")),
            "initial_learning_rate",
        ),
        (lambda: StepDecay(1.0, boundaries=[5, 3]), "boundaries"),
        (lambda: StepDecay(1.0, boundaries=[1.5]), "boundaries"),
        (lambda: StepDecay(1.0, boundaries=[1], decay_factor=0), "decay_factor"),
        (lambda: AccumulatedSteps(0.1, accumulation_steps=2), "schedule"),
        (
            lambda: AccumulatedSteps(StepDecay(1.0, boundaries=[1]), accumulation_steps=0),
            "accumulation_steps",
        ),
        (lambda: StepDecay(1.0, boundaries=[1])(tf.constant(3.0)), "step"),
    ],
)
def test_wrong_arguments_are_named(make, name):
    with pytest.raises(ConfigurationError, match=name):
        make()


LOAD = """
import sys
import tf_largebatch.schedules
import keras
for path in sys.argv[1:]:
    optimizer = keras.models.load_model(path).optimizer
    schedule = keras.optimizers.schedules.deserialize(optimizer.get_config()["learning_rate"])
    rates = [optimizer.learning_rate, *(schedule(step) for step in range(60))]
    print(int(optimizer.iterations), *(float(rate).hex() for rate in rates))
"""


def save_trained_model(path, schedule):
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(
        keras.optimizers.SGD(schedule, gradient_accumulation_steps=schedule.accumulation_steps),
        "mse",
    )
    model.fit(np.ones((32, 1)), np.ones((32, 1)), batch_size=4, verbose=0)
    model.save(path)


def test_saved_models_keep_their_schedule_in_a_fresh_process(tmp_path):
    recipe = tiny(accumulation_steps=2, per_replica_batch_size=4)
    cosine = keras.optimizers.schedules.CosineDecay(1.0, decay_steps=50)
    nested = ConstantWarmup(
        StepDecay(cosine, boundaries=[9], decay_factor=0.3),
        warmup_steps=4,
        initial_learning_rate=0.01,
    )
    schedules = {
        tmp_path / "recipe.keras": recipe.learning_rate_schedule(),
        tmp_path / "nested.keras": AccumulatedSteps(nested, accumulation_steps=3),
    }
    for path, schedule in schedules.items():
        save_trained_model(path, schedule)
    printed = run_python("-c", LOAD, *map(str, schedules))
    lines = printed.splitlines()
    for line, schedule in zip(lines, schedules.values(), strict=True):
        # The file holds 8 batches of training, and the schedule is asked for batch 8 next.
        rates = [float(schedule(step)).hex() for step in (8, *range(60))]
        assert line.split() == [str(8 // schedule.accumulation_steps), *rates]
