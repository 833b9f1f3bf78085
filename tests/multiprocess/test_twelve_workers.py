"""From eleven workers on, stock `gather` and so `predict` return rows out of order."""

from __future__ import annotations

import numpy as np
import pytest
from harness import case_values, run_workers

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def workers():
    return run_workers("twelve.py", 12, timeout_seconds=360)


def test_predictions_are_in_order(workers):
    expected = 2.0 * np.arange(31, dtype=np.float32)[:, None]
    for predictions in case_values(workers, "case_predict"):
        np.testing.assert_array_equal(predictions, expected)


def test_gather_is_in_rank_order(workers):
    for ranks in case_values(workers, "case_gather"):
        np.testing.assert_array_equal(ranks, np.arange(12))


def test_sums_are_of_all_ranks(workers):
    for sums in case_values(workers, "case_all_reduce"):
        np.testing.assert_array_equal(sums, np.arange(1, 13))
