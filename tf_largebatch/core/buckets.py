"""Which gradients travel together: a static grouping in the order in which backward makes them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# The first bucket's part of `bucket_bytes`: communication starts while backward is at its first
# layers.
_FIRST_BUCKET_DIVISOR = 8


def assign_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], *, bucket_bytes: int
) -> list[list[int]]:
    """Groups values into buckets; returns the positions in each.

    Consecutive values of a kind share a bucket as long as it stays within `bucket_bytes`; a larger
    value has a bucket of its own. Of two buckets or more, the first closes at an eighth of
    `bucket_bytes`. A kind has buckets of its own (values of two dtypes cannot be one buffer), which
    stand in the order in which they are complete, as that is when each can travel.

    Args:
        sizes_bytes: of each value, in the order in which they come to exist.
        kinds: what each value must have in common with those it travels with, as its dtype.
        bucket_bytes: the largest bucket of several values; at least 1.

    Returns:
        Lists of positions, each ascending; every position is in exactly one.

    Source: Yamazaki et al. 2019, section III-C.2 (static groups of neighbouring layers, each sent
    when its layers are done).
    """
    buckets: list[list[int]] = []
    for kind in dict.fromkeys(kinds):
        positions = [place for place, each in enumerate(kinds) if each == kind]
        total = sum(sizes_bytes[place] for place in positions)
        limit = bucket_bytes if total <= bucket_bytes else bucket_bytes // _FIRST_BUCKET_DIVISOR
        bucket: list[int] = []
        filled = 0
        for place in positions:
            if bucket and filled + sizes_bytes[place] > limit:
                buckets.append(bucket)
                bucket, filled, limit = [], 0, bucket_bytes
            bucket.append(place)
            filled += sizes_bytes[place]
        if bucket:
            buckets.append(bucket)
    return sorted(buckets, key=lambda bucket: bucket[-1])
