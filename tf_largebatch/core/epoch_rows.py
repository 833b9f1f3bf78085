"""Which rows are read in which step, by which shard: order and cut together."""

from __future__ import annotations

import numpy as np

from tf_largebatch.core.epoch_order import (
    Remainder,
    RowNumbers,
    checked_integer,
    shard_part,
    steps_in_epoch,
)
from tf_largebatch.core.epoch_permutation import EpochPermutation


class EpochRows:
    """The rows of all steps of all epochs.

    Step `s` of an epoch holds the places `s * B .. (s + 1) * B - 1` of its order
    (`EpochPermutation`), of which shard `i` of `k` owns the contiguous `i`-th part. The cut does
    not know how many shards there are, so at an equal global batch size `B` a step holds the same
    rows on any number of them. Places beyond the last row, which only `remainder="wrap"` has, begin
    again at the first: the last step is filled up with the first rows of the same order (again and
    again where `B` exceeds the number of rows), so `steps * B - num_rows` rows are seen once more
    than the others.

    Args:
        num_rows: rows in the data set, at least 1.
        global_batch_size: `B`, at least 1.
        seed: 0 to 2**64 - 1.
        remainder, accumulation_steps: see `steps_in_epoch`.

    Raises:
        ConfigurationError: an argument is of the wrong kind or out of range, or no step fits into
            an epoch.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        global_batch_size: int,
        seed: int,
        remainder: Remainder,
        accumulation_steps: int = 1,
    ) -> None:
        # These two check all arguments.
        self.steps_per_epoch = steps_in_epoch(
            num_rows,
            global_batch_size=global_batch_size,
            accumulation_steps=accumulation_steps,
            remainder=remainder,
        )
        # The one last used, as making one takes up to milliseconds.
        self._latest = 0, EpochPermutation(num_rows, seed=seed, epoch=0)
        self.num_rows = int(num_rows)
        self.global_batch_size = int(global_batch_size)
        self.seed = int(seed)
        self.remainder = remainder

    def rows(
        self,
        epoch: int,
        first_step: int,
        end_step: int,
        *,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> RowNumbers:
        """The rows that a shard reads in steps `first_step .. end_step - 1`.

        Returns:
            int64 `[steps, B // shard_count]`.

        Raises:
            ConfigurationError: `first_step` or `shard_index` out of range, or a `shard_count` that
                does not divide `B`.
        """
        part = shard_part(self.global_batch_size, shard_index=shard_index, shard_count=shard_count)
        first_step = checked_integer(
            first_step, "step", minimum=0, maximum=self.steps_per_epoch - 1
        )
        steps = np.arange(first_step, end_step, dtype=np.int64)
        offsets = np.arange(part.start, part.stop, dtype=np.int64)
        places = steps[:, None] * self.global_batch_size + offsets  # [step, row]
        return self._permutation(epoch).rows_at(places % self.num_rows)

    def _permutation(self, epoch: int) -> EpochPermutation:
        latest_epoch, permutation = self._latest  # one read: threads share this object
        if latest_epoch != epoch:
            permutation = EpochPermutation(self.num_rows, seed=self.seed, epoch=epoch)
            self._latest = epoch, permutation
        return permutation
