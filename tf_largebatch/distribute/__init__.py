"""Training on several workers: the strategy."""

from tf_largebatch.distribute._strategy import LargeBatchStrategy

__all__ = ["LargeBatchStrategy"]
