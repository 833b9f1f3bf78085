"""Losses."""

from tf_largebatch.losses._sparse_categorical_crossentropy import SparseCategoricalCrossentropy

__all__ = ["SparseCategoricalCrossentropy"]
