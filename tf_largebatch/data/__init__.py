"""Rows by number to batches: a global shuffle for training, exact cuts for evaluation."""

from tf_largebatch.data._evaluation import evaluation_dataset
from tf_largebatch.data._sharder import GlobalShuffleSharder
from tf_largebatch.data._sources import ArraySource, RandomAccessSource

__all__ = ["ArraySource", "GlobalShuffleSharder", "RandomAccessSource", "evaluation_dataset"]
