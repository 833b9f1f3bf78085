"""`LearningRateWarmup` in real `fit`s, against NumPy oracles of the paper's update rules.

The model is one float64 weight whose gradient is 1 at every update, so that its moves show the
rates and the momentum buffer directly.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.processes import run_python
from tf_largebatch.callbacks import LearningRateWarmup
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.recipe import Recipe
from tf_largebatch.optimizers import MomentumSGD


def tiny(**changes):
    """4 updates an epoch of 8 examples: warmup from 0.1 to 0.4 over 8, decay at 12 and 16 of 20."""
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


def witness():
    """Rate 0.1 for one update, then 0.01."""
    return Recipe(
        num_examples=1,
        per_replica_batch_size=1,
        num_replicas=1,
        base_learning_rate=0.1,
        base_batch_size=1,
        epochs=2,
        warmup="none",
        decay_epochs=(1,),
    )


def mean_output(y_true, y_pred):
    return tf.reduce_mean(y_pred)


def make_model(optimizer, **compile_options):
    model = keras.Sequential(
        [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, dtype="float64")]
    )
    model.compile(optimizer, loss=mean_output, **compile_options)
    model.set_weights([np.zeros((1, 1))])
    return model


class Recorder(keras.callbacks.Callback):
    """The weight before training and after every batch, and the logs of every batch."""

    def on_train_begin(self, logs=None):
        self.weights = [self.model.get_weights()[0].item()]
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights()[0].item())
        self.rates.append(logs.get("learning_rate"))

    @property
    def moves(self):
        return np.diff(self.weights)


def fit(model, recipe, *, callbacks=None, batch_size=None, **options):
    """Trains on ones; returns the recorder."""
    recorder = Recorder()
    if callbacks is None:
        callbacks = [LearningRateWarmup(recipe)]
    ones = np.ones((recipe.num_examples, 1))
    options = {"epochs": recipe.epochs, **options}
    model.fit(
        ones,
        ones,
        batch_size=batch_size or recipe.per_replica_batch_size,
        callbacks=[*callbacks, recorder],
        verbose=0,
        **options,
    )
    return recorder


def moves_with_rate_outside(rates, *, momentum, nesterov=False):
    """u = m u + g; w -= rate (u, or g + m u): needs no correction, gradient 1."""
    buffer, moves = 0.0, []
    for rate in rates:
        buffer = momentum * buffer + 1.0
        moves.append(-rate * (1.0 + momentum * buffer if nesterov else buffer))
    return np.array(moves)


def recipe_rates(recipe):
    return np.float32(recipe.learning_rate_at(np.arange(recipe.total_steps))).astype(np.float64)


def test_witness_of_momentum_correction():
    corrected = fit(make_model(keras.optimizers.SGD(0.1, momentum=0.9)), witness())
    np.testing.assert_allclose(corrected.moves, [-0.1, -0.019], rtol=1e-6)
    schedule = witness().learning_rate_schedule()
    stock = fit(make_model(keras.optimizers.SGD(schedule, momentum=0.9)), witness(), callbacks=[])
    np.testing.assert_allclose(stock.moves, [-0.1, -0.1], rtol=1e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_stock_sgd_moves_as_if_the_rate_were_outside_the_buffer(momentum, nesterov):
    recipe = tiny()
    optimizer = keras.optimizers.SGD(0.123, momentum=momentum, nesterov=nesterov)
    recorder = fit(make_model(optimizer), recipe)
    expected = moves_with_rate_outside(recipe_rates(recipe), momentum=momentum, nesterov=nesterov)
    np.testing.assert_allclose(recorder.moves, expected, rtol=1e-6)


@pytest.mark.parametrize("warmup", ["gradual", "constant", "none"])
def test_the_applied_rate_is_in_the_logs(warmup):
    recipe = tiny(warmup=warmup)
    model = make_model(keras.optimizers.SGD(0.123))
    recorder = fit(model, recipe)
    np.testing.assert_array_equal(recorder.rates, recipe_rates(recipe))
    np.testing.assert_array_equal(-recorder.moves.astype(np.float32), np.float32(recorder.rates))
    last_of_each_epoch = recipe_rates(recipe)[3::4]
    np.testing.assert_array_equal(model.history.history["learning_rate"], last_of_each_epoch)


def test_a_second_fit_goes_on_where_the_first_stopped():
    recipe = tiny()
    expected = fit(make_model(keras.optimizers.SGD(0.5, momentum=0.9)), recipe).moves
    model = make_model(keras.optimizers.SGD(0.5, momentum=0.9))
    callback = LearningRateWarmup(recipe)
    moves = list(fit(model, recipe, callbacks=[callback], epochs=1).moves)
    # The same callback again, then a new one. Without initial_epoch Keras counts epochs from 0
    # again; updates go on all the same.
    moves += list(fit(model, recipe, callbacks=[callback], initial_epoch=1, epochs=3).moves)
    moves += list(fit(model, recipe, epochs=2).moves)
    np.testing.assert_allclose(moves, expected, rtol=1e-6)


def test_a_loaded_model_goes_on_whatever_rate_it_was_saved_at(tmp_path):
    recipe = tiny()
    expected = fit(make_model(keras.optimizers.SGD(0.5, momentum=0.9)), recipe).moves
    model = make_model(keras.optimizers.SGD(0.5, momentum=0.9))
    # Stopped within warmup, at a rate that is neither base nor peak.
    moves = list(fit(model, recipe, epochs=1, steps_per_epoch=3).moves)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"mean_output": mean_output}
    )
    moves += list(fit(loaded, recipe, epochs=1, steps_per_epoch=17, batch_size=1).moves)
    np.testing.assert_allclose(moves, expected, rtol=1e-6)


def test_a_buffer_from_before_the_callback_is_corrected_from_its_own_rate():
    recipe = tiny(warmup="none", decay_epochs=())
    model = make_model(keras.optimizers.SGD(0.05, momentum=0.9))
    moves = list(fit(model, recipe, callbacks=[], epochs=1).moves)
    moves += list(fit(model, recipe, epochs=1).moves)
    expected = moves_with_rate_outside([0.05] * 4 + [0.4] * 4, momentum=0.9)
    np.testing.assert_allclose(moves, expected, rtol=1e-6)


@pytest.mark.parametrize("accumulation_steps", [2, 4])
def test_accumulation_has_the_rates_of_its_updates(accumulation_steps):
    recipe = tiny(
        per_replica_batch_size=8 // accumulation_steps, accumulation_steps=accumulation_steps
    )
    optimizer = keras.optimizers.SGD(
        0.5, momentum=0.9, gradient_accumulation_steps=accumulation_steps
    )
    recorder = fit(make_model(optimizer), recipe)
    moves = recorder.moves.reshape(recipe.total_steps, accumulation_steps)  # [update, batch]
    expected = moves_with_rate_outside(recipe_rates(tiny()), momentum=0.9)
    np.testing.assert_array_equal(moves[:, :-1], 0.0)
    np.testing.assert_allclose(moves[:, -1], expected, rtol=1e-6)
    np.testing.assert_array_equal(recorder.rates[::accumulation_steps], recipe_rates(tiny()))


def test_loss_scale_optimizer_is_looked_into():
    recipe = tiny()
    inner = keras.optimizers.SGD(0.5, momentum=0.9)
    recorder = fit(make_model(keras.optimizers.LossScaleOptimizer(inner)), recipe)
    expected = moves_with_rate_outside(recipe_rates(recipe), momentum=0.9)
    np.testing.assert_allclose(recorder.moves, expected, rtol=1e-6)


def test_our_momentum_sgd_is_neither_corrected_nor_warned_about():
    recipe = tiny()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="LearningRateWarmup")
        recorder = fit(make_model(MomentumSGD(0.5, momentum=0.9)), recipe)
    expected = moves_with_rate_outside(recipe_rates(recipe), momentum=0.9)
    np.testing.assert_allclose(recorder.moves, expected, rtol=1e-6)


class OtherSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("make", [keras.optimizers.Adam, OtherSGD])
def test_other_optimizers_get_the_rate_and_a_warning(make):
    recipe = tiny()
    with pytest.warns(UserWarning, match=rf"{make.__name__}: the linear scaling rule"):
        recorder = fit(make_model(make(0.5)), recipe, epochs=1)
    np.testing.assert_array_equal(recorder.rates, recipe_rates(recipe)[:4])


def test_the_rate_is_assigned_only_when_it_changes():
    assigned = []

    class CountingSGD(keras.optimizers.SGD):
        @property
        def learning_rate(self):
            return super().learning_rate

        @learning_rate.setter
        def learning_rate(self, rate):
            assigned.append(rate)
            keras.optimizers.SGD.learning_rate.fset(self, rate)

    fit(make_model(CountingSGD(0.5, momentum=0.9)), tiny())
    # Every update of warmup, its end at 8, the decays at 12 and 16.
    expected = tiny().learning_rate_at([*range(9), 12, 16])
    np.testing.assert_array_equal(assigned, expected)


def test_only_a_recipe_will_do():
    with pytest.raises(ConfigurationError, match=r"must be a tf_largebatch\.Recipe"):
        LearningRateWarmup({"epochs": 3})


@pytest.mark.parametrize(
    "make_rate", [lambda: tiny().learning_rate_schedule(), lambda: lambda: 0.1]
)
def test_a_rate_that_cannot_be_set_is_found_at_train_begin(make_rate):
    model = make_model(keras.optimizers.SGD(make_rate()))
    with pytest.raises(ConfigurationError, match="SGD was not built with a float") as raised:
        fit(model, tiny())
    assert "recipe.learning_rate_schedule()" in str(raised.value)
    assert int(model.optimizer.iterations.numpy()) == 0


def test_several_steps_per_execution_are_refused():
    model = make_model(keras.optimizers.SGD(0.1), steps_per_execution=2)
    with pytest.raises(ConfigurationError, match=r"steps_per_execution=2.*learning_rate_schedule"):
        fit(model, tiny())


@pytest.mark.parametrize(("of_optimizer", "of_recipe"), [(None, 2), (2, 1), (4, 2)])
def test_other_accumulation_than_the_recipe_s_is_refused(of_optimizer, of_recipe):
    model = make_model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=of_optimizer))
    with pytest.raises(
        ConfigurationError,
        match=f"gradient_accumulation_steps={of_optimizer or 1}.*accumulation_steps={of_recipe}",
    ):
        fit(model, tiny(accumulation_steps=of_recipe))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "make_other",
    [
        lambda: keras.callbacks.ReduceLROnPlateau(monitor="loss"),
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        lambda: LearningRateWarmup(tiny()),
    ],
)
def test_two_callbacks_that_set_the_rate_are_both_named_at_train_begin(make_other, first):
    other = make_other()
    callbacks = [LearningRateWarmup(tiny()), other]
    model = make_model(keras.optimizers.SGD(0.1))
    names = f"LearningRateWarmup and {type(other).__name__}"
    with pytest.raises(ConfigurationError, match=names):
        fit(model, tiny(), callbacks=callbacks if first else callbacks[::-1])
    assert int(model.optimizer.iterations.numpy()) == 0


def test_a_rate_changed_by_something_else_is_found_before_it_is_overwritten():
    class Meddler(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.7

    model = make_model(keras.optimizers.SGD(0.1))
    with pytest.raises(ConfigurationError, match=r"0\.69999.*had set 0\.2125"):
        fit(model, tiny(), callbacks=[LearningRateWarmup(tiny()), Meddler()])
    assert int(model.optimizer.iterations.numpy()) == 4


def test_hooks_called_by_a_loop_of_one_s_own():
    recipe = tiny()
    model = make_model(keras.optimizers.SGD(0.5, momentum=0.9))
    callback = LearningRateWarmup(recipe)
    callback.set_model(model)
    callback.on_train_begin()
    weights = [0.0]
    for step in range(recipe.total_steps):
        callback.on_train_batch_begin(step)
        model.train_on_batch(np.ones((8, 1)), np.ones((8, 1)))
        callback.on_train_batch_end(step)
        weights.append(model.get_weights()[0].item())
    expected = moves_with_rate_outside(recipe_rates(recipe), momentum=0.9)
    np.testing.assert_allclose(np.diff(weights), expected, rtol=1e-6)


TWO_REPLICAS = """
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

from tf_largebatch.callbacks import LearningRateWarmup
from tf_largebatch.core.recipe import Recipe

recipe = Recipe(num_examples=32, per_replica_batch_size=4, num_replicas=2, base_learning_rate=0.1,
                base_batch_size=2, epochs=5, warmup_epochs=2, decay_epochs=(3, 4))
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, dtype="float64")]
    )
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9),
                  loss=lambda y_true, y_pred: tf.reduce_mean(y_pred, axis=-1))
model.set_weights([np.zeros((1, 1))])
ones = np.ones((32, 1))
model.fit(ones, ones, batch_size=8, epochs=5, callbacks=[LearningRateWarmup(recipe)], verbose=0)
for variable in (model.trainable_weights[0], model.optimizer.momentums[0]):
    print(*(value.numpy().item().hex() for value in variable.value.values))
print(*(value.numpy().item().hex() for value in model.optimizer.learning_rate.value.values))
"""


def test_replicas_stay_equal_and_right():
    # In a process of its own, as logical devices must be made before TensorFlow starts.
    printed = run_python("-c", TWO_REPLICAS)
    rows = [[float.fromhex(value) for value in line.split()] for line in printed.splitlines()]
    assert [len(row) for row in rows] == [2, 2, 2]
    assert all(first == second for first, second in rows)
    moves = moves_with_rate_outside(recipe_rates(tiny()), momentum=0.9)
    np.testing.assert_allclose([rows[0][0], rows[1][0]], [moves.sum(), moves[-1]], rtol=1e-6)
    assert rows[2][0] == np.float32(tiny().learning_rate_at(19))
