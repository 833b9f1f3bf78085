"""Training on several workers: the strategy."""

from tf_largebatch.distribute._options import AllReduceOptions
from tf_largebatch.distribute._strategy import LargeBatchStrategy

__all__ = ["AllReduceOptions", "LargeBatchStrategy"]
