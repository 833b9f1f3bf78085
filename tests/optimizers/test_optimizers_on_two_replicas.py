"""Two replicas of one process make the update of one: `_two_replicas_script.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.optimizers._two_replicas_script import CASES, REPLICAS, fitted, updated
from tests.processes import json_from_replicas


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return json_from_replicas("tests.optimizers._two_replicas_script", replicas=REPLICAS)


@pytest.mark.parametrize("case", CASES)
def test_two_parts_of_a_gradient_are_as_the_whole(seen: dict[str, Any], case: str) -> None:
    for two, one in zip(seen[case], updated(case, None), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)


def test_fit_is_as_on_one_replica_and_clips_without_a_warning(seen: dict[str, Any]) -> None:
    one = fitted(None)
    for ours, expected in zip(seen["fit"]["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert seen["fit"]["of_clipping"] == []
