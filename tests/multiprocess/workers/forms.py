"""The forms of models and inputs that users bring; two workers."""

from __future__ import annotations

import contextlib
import os
import warnings

import keras
import numpy as np
import tensorflow as tf

import tf_largebatch as tlb

RANDOM = np.random.default_rng(1)
FEATURES = RANDOM.normal(size=(32, 4)).astype(np.float32)
LABELS = (FEATURES.sum(1) > 0).astype(np.int64)
BATCH = 8


def setup():
    return tlb.LargeBatchStrategy(start_timeout_seconds=60, timeout_seconds=60)


def dense(units, **options):
    return keras.layers.Dense(
        units, kernel_initializer=keras.initializers.RandomNormal(seed=units), **options
    )


def compiled(strategy, make=None, **options):
    settings = {
        "optimizer": "sgd",
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    }
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), dense(2)]) if make is None else make()
        if isinstance(settings["optimizer"], type(lambda: 0)):
            settings["optimizer"] = settings["optimizer"]()
        model.compile(**settings)
    return model


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def outcome(model, history):
    return {
        "history": history.history,
        "weights": [np.asarray(weight.numpy(), np.float64) for weight in model.weights],
    }


def case_without_metrics(strategy):
    model = compiled(strategy)
    return outcome(model, model.fit(dataset(FEATURES, LABELS), verbose=0))


def case_unbuilt_sequential(strategy):
    model = compiled(strategy, lambda: keras.Sequential([dense(2)]), metrics=["accuracy"])
    return outcome(model, model.fit(dataset(FEATURES, LABELS), verbose=0))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = dense(2)

    def call(self, inputs, training=False):
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(inputs)))
        return self.layer(inputs)


def case_subclassed_with_add_loss(strategy):
    model = compiled(strategy, Subclassed, metrics=["accuracy"])
    return outcome(model, model.fit(dataset(FEATURES, LABELS), verbose=0))


class OwnTrainStep(keras.Model):
    def train_step(self, data):
        features, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=labels, y_pred=self(features, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"own": loss * 2.0, "count": tf.constant(3)}  # per replica: a half of the loss


def case_own_train_step(strategy):
    def make():
        inputs = keras.Input((4,))
        return OwnTrainStep(inputs, dense(2)(inputs))

    model = compiled(strategy, make)
    return outcome(model, model.fit(dataset(FEATURES, LABELS), verbose=0))


def case_sample_weight(strategy):
    model = compiled(strategy, weighted_metrics=["accuracy"])
    weights = np.linspace(0, 1, len(LABELS)).astype(np.float32)
    return outcome(model, model.fit(dataset(FEATURES, LABELS, weights), verbose=0))


def case_class_weight(strategy):
    model = compiled(strategy)
    sharder = tlb.data.GlobalShuffleSharder(
        tlb.data.ArraySource((FEATURES, LABELS)), global_batch_size=BATCH, seed=0
    )
    data = sharder.train_dataset(strategy)
    return outcome(model, model.fit(data, class_weight={0: 1.0, 1: 3.0}, verbose=0))


def case_embedding_in_a_loop(strategy):
    """Sparse gradients, `steps_per_execution` above 1."""
    words = (FEATURES > 0).astype(np.int32)

    def make():
        embedding = keras.layers.Embedding(
            2, 3, embeddings_initializer=keras.initializers.RandomNormal(seed=5)
        )
        return keras.Sequential(
            [keras.Input((4,), dtype="int32"), embedding, keras.layers.Flatten(), dense(2)]
        )

    model = compiled(strategy, make, steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices((words, LABELS)).batch(BATCH, drop_remainder=True)
    return outcome(model, model.fit(data, verbose=0))


def case_eagerly(strategy):
    model = compiled(strategy, run_eagerly=True, metrics=["accuracy"])
    return outcome(model, model.fit(dataset(FEATURES, LABELS), verbose=0))


def case_arrays_with_seeded_shuffle(strategy):
    keras.utils.set_random_seed(3)
    model = compiled(strategy)
    return outcome(model, model.fit(FEATURES, LABELS, batch_size=BATCH, verbose=0))


def two_outputs_frozen_norm():
    """As a detector: a frozen backbone's batch norm, a class and a box, each with its loss."""
    inputs = keras.Input((4,))
    norm = keras.layers.BatchNormalization(trainable=False)
    hidden = norm(dense(6, activation="tanh")(inputs))
    model = keras.Model(inputs, {"class": dense(2, name="class")(hidden), "box": dense(3)(hidden)})
    norm.moving_mean.assign(np.linspace(-1, 1, 6))
    norm.moving_variance.assign(np.linspace(0.5, 2, 6))
    return model


def transformer():
    """No batch norm: attention over 4 words, layer norms, an embedding."""
    inputs = keras.Input((4,), dtype="int32")
    initializers = [keras.initializers.RandomNormal(stddev=0.5, seed=seed) for seed in range(2)]
    words = keras.layers.Embedding(2, 8, embeddings_initializer=initializers[0])(inputs)
    attended = keras.layers.MultiHeadAttention(2, 4, kernel_initializer=initializers[1])(
        words, words
    )
    hidden = keras.layers.LayerNormalization()(words + attended)
    hidden = keras.layers.LayerNormalization()(hidden + dense(8, activation="gelu")(hidden))
    return keras.Model(inputs, dense(2)(keras.layers.GlobalAveragePooling1D()(hidden)))


def with_all_callbacks(strategy, make, features, labels, **options):
    """Updates of 8 rows, 4 at a time: by two workers, or by one that accumulates."""
    workers = strategy.topology.num_workers
    recipe = tlb.Recipe(
        num_examples=len(LABELS),
        per_replica_batch_size=BATCH // 2,
        num_replicas=workers,
        accumulation_steps=2 // workers,
        base_learning_rate=0.05,
        base_batch_size=4,
        epochs=3,
        warmup_epochs=1,
        decay_epochs=(2,),
    )
    model = compiled(
        strategy,
        make,
        optimizer=lambda: tlb.optimizers.MomentumSGD(
            0.1,
            weight_decay=1e-3,
            gradient_accumulation_steps=None if workers == 2 else 2,
        ),
        **options,
    )
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH // 2 * workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 16 examples to train on are above any noise scale
        history = model.fit(
            data,
            epochs=recipe.epochs,
            validation_data=data,
            verbose=0,
            callbacks=[
                tlb.callbacks.LearningRateWarmup(recipe),
                tlb.callbacks.BatchNormSync(),
                tlb.callbacks.GradientNoiseScale(recipe),
            ],
        )
    return outcome(model, history)


def case_two_outputs_and_a_frozen_norm(strategy):
    return with_all_callbacks(
        strategy,
        two_outputs_frozen_norm,
        FEATURES,
        {"class": LABELS, "box": FEATURES[:, :3]},
        loss={
            "class": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "box": "huber",
        },
        loss_weights={"class": 1.0, "box": 0.5},
        metrics={"class": "accuracy"},
    )


def case_transformer(strategy):
    words = (FEATURES > 0).astype(np.int32)
    return with_all_callbacks(strategy, transformer, words, LABELS, metrics=["accuracy"])


def case_jit_compile(strategy):
    model = compiled(strategy, jit_compile=True)
    with contextlib.suppress(NotImplementedError):
        try:
            model.fit(dataset(FEATURES, LABELS), verbose=0)
        except tlb.ConfigurationError as error:
            return str(error)
    return None


def case_clipping_is_warned_of(strategy):
    model = compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.1, clipnorm=1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(dataset(FEATURES, LABELS), verbose=0)
    return [str(each.message) for each in caught if "clipnorm" in str(each.message)]


def case_threads(strategy):
    """How many threads 60 steps leave behind: TensorFlow keeps one for a collective's timeout."""
    model = compiled(strategy)
    data = dataset(FEATURES, LABELS).repeat()
    counts = []
    for steps in (4, 60):
        model.fit(data, steps_per_epoch=steps, verbose=0)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[1] - counts[0]


def case_custom_loop(strategy):
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
    data = strategy.experimental_distribute_dataset(dataset(FEATURES[:, :2]))

    @tf.function
    def step(batch):
        def replica_step(rows):
            gradient = tf.reduce_sum(rows[0], axis=0) / BATCH
            gradient = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
            weight.assign_sub(gradient)
            return tf.reduce_sum(rows[0])

        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    sums = [float(step(batch)) for batch in data]
    nested = strategy.reduce(
        "MEAN",
        {"rank": strategy.run(lambda: tf.cast(_replica_id(), tf.float32)), "nothing": None},
        axis=None,
    )
    return {"sums": sums, "weight": weight.numpy(), "mean rank": float(nested["rank"])}


def _replica_id():
    return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)


@contextlib.contextmanager
def policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def case_bfloat16(strategy):
    with policy("mixed_bfloat16"):
        model = compiled(strategy, metrics=["accuracy"])
    return outcome(model, model.fit(dataset(FEATURES, LABELS), epochs=2, verbose=0))


def case_stock_loss_scaling_is_refused(strategy):
    with policy("mixed_float16"):
        model = compiled(strategy)
    try:
        model.fit(dataset(FEATURES, LABELS), verbose=0)
    except tlb.ConfigurationError as error:
        return str(error)
    return None


def case_non_finite_on_one_worker(strategy):
    """The second batch holds an infinity in the last worker's rows alone."""
    poisoned = FEATURES.copy()
    poisoned[2 * BATCH - 1] = np.inf
    with policy("mixed_float16"):
        model = compiled(
            strategy,
            optimizer=lambda: tlb.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=1024.0, dynamic_growth_steps=3
            ),
        )
    scales = []

    class Scales(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            scales.append(float(model.optimizer.dynamic_scale.numpy()))

    history = model.fit(dataset(poisoned, LABELS), verbose=0, callbacks=[Scales()])
    return {
        **outcome(model, history),
        "scales": scales,
        "updates": int(model.optimizer.inner_optimizer.iterations.numpy()),
    }
