from __future__ import annotations

import numpy as np
import pytest

from tf_largebatch.core.epoch_order import checked_integer, shard_part, steps_in_epoch
from tf_largebatch.core.errors import ConfigurationError

IMAGENET_ROWS = 1_281_167


@pytest.mark.parametrize(
    ("num_rows", "batch", "drop", "wrap"),
    [(IMAGENET_ROWS, 8192, 156, 157), (1, 1, 1, 1), (997, 100, 9, 10), (1000, 100, 10, 10)],
)
def test_steps_in_epoch(num_rows: int, batch: int, drop: int, wrap: int) -> None:
    assert steps_in_epoch(num_rows, global_batch_size=batch) == drop
    assert steps_in_epoch(num_rows, global_batch_size=batch, remainder="wrap") == wrap


@pytest.mark.parametrize(("remainder", "updates"), [("drop", 156), ("wrap", 157)])
def test_steps_of_whole_updates(remainder: str, updates: int) -> None:
    """Of 8192 rows each, whatever they are cut into."""
    for accumulated in (1, 2, 32):
        steps = steps_in_epoch(
            IMAGENET_ROWS,
            global_batch_size=8192 // accumulated,
            accumulation_steps=accumulated,
            remainder=remainder,  # type: ignore[arg-type]
        )
        assert steps == updates * accumulated


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: steps_in_epoch(10, global_batch_size=3, accumulation_steps=4),
            "4 batches of 3 rows are more than the 10 rows.* accumulate at most 3",
        ),
        (
            lambda: steps_in_epoch(10, global_batch_size=3, accumulation_steps=0),
            "accumulation_steps must be at least 1",
        ),
        (lambda: steps_in_epoch(10, global_batch_size=11), "use at most 10, or remainder='wrap'"),
        (
            lambda: steps_in_epoch(10, global_batch_size=2, remainder="keep"),  # type: ignore[arg-type]
            "remainder must be 'drop' or 'wrap', but is 'keep'",
        ),
        (
            lambda: shard_part(10, shard_index=0, shard_count=4),
            "global_batch_size=10 cannot be divided equally among 4 shards; .*: 8 and 12",
        ),
        (lambda: shard_part(3, shard_index=0, shard_count=4), "nearest that can: 4"),
        (lambda: shard_part(8, shard_index=4, shard_count=4), r"shard_index must be in \[0, 3\]"),
    ],
)
def test_refused(call, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_numpy_integers_are_integers() -> None:
    assert checked_integer(np.int32(7), "x", minimum=0) == 7
    assert type(checked_integer(np.uint8(7), "x", minimum=0)) is int
