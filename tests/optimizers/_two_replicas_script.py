"""Updates by two CPU replicas, each with its part of the gradient; prints weights as JSON.

A process of its own: logical devices must be configured before anything else uses TensorFlow. The
test imports the cases, and makes the same updates without a strategy.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_largebatch.distribute import LargeBatchStrategy
from tf_largebatch.optimizers import LARS, LossScaleOptimizer, MomentumSGD

REPLICAS, STEPS, SCALE = 2, 4, 8.0
SHAPES = [(3, 4), (4,), (2, 5)]
RNG = np.random.default_rng(0)
STARTS = [RNG.normal(size=shape).astype("float32") for shape in SHAPES]
# [variable]: [step, replica, ...]
GRADIENTS = [RNG.normal(size=(STEPS, REPLICAS, *shape)).astype("float32") for shape in SHAPES]
X, Y = RNG.normal(size=(8, 3)).astype("float32"), RNG.normal(size=(8, 4)).astype("float32")


def lars(**options: Any) -> LARS:
    return LARS(0.5, trust_coefficient=0.05, weight_decay=0.3, epsilon=0.1, **options)


def sgd(**options: Any) -> MomentumSGD:
    return MomentumSGD(0.5, nesterov=True, weight_decay=0.3, **options)


# All bounds lie below the norms.
CASES: dict[str, Callable[[], Any]] = {
    "lars": lars,
    "lars clipnorm": lambda: lars(clipnorm=0.5),
    "sgd clipnorm": lambda: sgd(clipnorm=0.5),
    "sgd global_clipnorm": lambda: sgd(global_clipnorm=0.5),
    "sgd clipvalue": lambda: sgd(clipvalue=0.2),
    "lars accumulated": lambda: lars(clipnorm=0.3, gradient_accumulation_steps=2),
    "lars scaled": lambda: LossScaleOptimizer(lars(global_clipnorm=0.5), initial_scale=SCALE),
    "sparse": lambda: lars(clipnorm=0.5),
    "eager": lambda: lars(global_clipnorm=0.5),
}


def gradients_of(case: str, step: Any, replica: Any) -> list[Any]:
    """One replica's; the first one of the case "sparse" has a row twice."""
    factor = SCALE if case == "lars scaled" else 1.0
    tensors: list[Any] = [factor * tf.constant(array)[step, replica] for array in GRADIENTS]
    if case == "sparse":
        values = tf.concat([tensors[0], tensors[0][:1]], 0)
        tensors[0] = tf.IndexedSlices(values, tf.constant([2, 0, 1, 2]), (3, 4))
    return tensors


def updated(case: str, strategy: tf.distribute.Strategy | None) -> list[list[float]]:
    """The variables after all steps, by replicas that hold a part of each gradient, or by one."""
    with (strategy or tf.distribute.get_strategy()).scope():
        variables = [keras.Variable(start) for start in STARTS]
        optimizer = CASES[case]()
        optimizer.build(variables)

    def apply_part(step: Any) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply(gradients_of(case, step, replica), variables)

    def apply_sum(step: Any) -> None:
        parts = [gradients_of(case, step, replica) for replica in range(REPLICAS)]
        gradients = [sum(map(tf.convert_to_tensor, of)) for of in zip(*parts, strict=True)]
        optimizer.apply(gradients, variables)

    def update(step: Any) -> None:
        if strategy is None:
            apply_sum(step)
        else:
            strategy.run(apply_part, args=(step,))

    update = update if case == "eager" else tf.function(update)
    for step in range(STEPS):
        update(tf.constant(step))
    return [variable.numpy().ravel().tolist() for variable in variables]


def fitted(strategy: tf.distribute.Strategy | None) -> dict[str, Any]:
    """Weights after `fit`, and what was said of clipping."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.set_weights(STARTS[:2])
        model.compile(lars(clipnorm=0.1), "mse", jit_compile=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return {
        "weights": [weights.ravel().tolist() for weights in model.get_weights()],
        "of_clipping": [str(each.message) for each in caught if "clip" in str(each.message)],
    }


def main() -> None:
    strategy = LargeBatchStrategy()
    assert strategy.num_replicas_in_sync == REPLICAS
    results: dict[str, Any] = {case: updated(case, strategy) for case in CASES}
    results["fit"] = fitted(strategy)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
