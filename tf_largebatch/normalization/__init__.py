"""Batch norm for large minibatches."""

from tf_largebatch.normalization._ghost_batch_normalization import GhostBatchNormalization
from tf_largebatch.normalization._recalibration import recalibrate_batch_norm

__all__ = ["GhostBatchNormalization", "recalibrate_batch_norm"]
