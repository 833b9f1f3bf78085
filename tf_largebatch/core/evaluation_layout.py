"""How an evaluation cuts rows into steps and replicas so that each row is seen exactly once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import ConfigurationError


def evaluation_edges(
    num_rows: int, *, global_batch_size: int, num_replicas: int = 1
) -> npt.NDArray[np.int64]:
    """The edges of the slots (step, place in the step) of an exact evaluation.

    Nothing is padded, for Keras' `metrics=[...]` ignore sample weights, so that padded rows of
    weight zero would still count in an accuracy or an AUC. Instead every slot gets a fair share:
    with `R` replicas there are

        `steps = max(1, min(ceil(num_rows / global_batch_size), num_rows // R))`

    steps and `Q = steps * R` slots, and slot `q` holds rows `[q * num_rows // Q,
    (q + 1) * num_rows // Q)`. So rows stay in order; sizes differ by at most one; no slot is
    empty when `num_rows >= R`; and none exceeds `ceil(global_batch_size / R) + 1` (it exceeds
    `ceil(global_batch_size / R)` only where that is 1 and a further step would leave a slot
    empty). With fewer rows than replicas there is one step and some slots are empty.

    Returns:
        int64 `[steps, num_replicas, 2]`: first row, and one past the last, of each slot.

    Raises:
        ConfigurationError: a count below 1.
    """
    for name, value in (
        ("num_rows", num_rows),
        ("global_batch_size", global_batch_size),
        ("num_replicas", num_replicas),
    ):
        if value < 1:
            raise ConfigurationError(f"{name} must be at least 1, but is {value}.")
    steps = max(1, min(-(-num_rows // global_batch_size), num_rows // num_replicas))
    slots = steps * num_replicas
    edges = np.arange(slots + 1, dtype=np.int64) * num_rows // slots
    pairs = np.stack([edges[:-1], edges[1:]], axis=-1)  # [slot, (first, end)]
    return pairs.reshape(steps, num_replicas, 2)  # [step, place in the step, (first, end)]


def place_in_step(*, worker: int, num_workers: int, local_replica: int) -> int:
    """Where in a step Keras puts a replica's rows when it joins the outputs of `predict`.

    Keras gathers the workers' outputs in rank order, then takes the first replica of every
    worker, then the second of every worker, and so on: `local_replica * num_workers + worker`
    (`_multi_worker_concat` in Keras' TensorFlow trainer). With one replica a worker this is rank
    order, with one worker it is the order of its replicas.
    """
    return local_replica * num_workers + worker
