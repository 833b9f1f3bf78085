from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.evaluation_layout import evaluation_edges, place_in_step


@settings(deadline=None, max_examples=300)
@given(rows=st.integers(1, 500), batch=st.integers(1, 200), replicas=st.integers(1, 33))
def test_every_row_once_in_order_and_no_slot_empty(rows: int, batch: int, replicas: int) -> None:
    edges = evaluation_edges(rows, global_batch_size=batch, num_replicas=replicas)
    assert edges.shape[1:] == (replicas, 2)
    slots = [np.arange(first, end) for first, end in edges.reshape(-1, 2)]
    assert np.array_equal(np.concatenate(slots), np.arange(rows))
    sizes = np.array([len(slot) for slot in slots])
    assert sizes.max() - sizes.min() <= 1
    if rows >= replicas:
        assert sizes.min() >= 1
    else:
        assert len(edges) == 1
    assert sizes.max() <= -(-batch // replicas) + 1
    if sizes.max() > -(-batch // replicas):
        assert -(-batch // replicas) == 1


@pytest.mark.parametrize(
    ("rows", "batch", "replicas", "sizes"),
    [
        (37, 16, 4, [[3, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 4]]),
        (7, 4, 4, [[1, 2, 2, 2]]),  # a second step would have a slot without rows
        (2, 4, 4, [[0, 1, 0, 1]]),
        (8, 4, 4, [[1, 1, 1, 1]] * 2),
    ],
)
def test_slot_sizes(rows: int, batch: int, replicas: int, sizes: list[list[int]]) -> None:
    edges = evaluation_edges(rows, global_batch_size=batch, num_replicas=replicas)
    assert (edges[..., 1] - edges[..., 0]).tolist() == sizes


def test_places_are_local_replica_major() -> None:
    places = [
        [place_in_step(worker=w, num_workers=3, local_replica=r) for w in range(3)]
        for r in range(2)
    ]
    assert places == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", ["num_rows", "global_batch_size", "num_replicas"])
def test_counts_below_one_are_refused(name: str) -> None:
    counts = {"num_rows": 5, "global_batch_size": 5, "num_replicas": 1, name: 0}
    with pytest.raises(ConfigurationError, match=f"{name} must be at least 1, but is 0"):
        evaluation_edges(
            counts["num_rows"],
            global_batch_size=counts["global_batch_size"],
            num_replicas=counts["num_replicas"],
        )
