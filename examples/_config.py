"""What a training run is told: one frozen dataclass, which is also the list of flags."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags

import tf_largebatch as tlb

DATASETS = ("mnist5k", "photo_patches", "image_folder", "tfrecord", "array_record", "tfds")
MODELS = ("resnet_small", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
WARMUPS = ("gradual", "constant", "none")
# Each with the rate known to work at 32 rows of the default data set.
_BASE_RATES = {"sgd": 0.2, "lars": 4.0}
OPTIMIZERS = tuple(_BASE_RATES)
ALL_REDUCES = ("auto", "ring", "halving_doubling", "tensorflow")
TRANSPORTS = ("tensorflow", "mpi")


def _option(default: Any, description: str, *, choices: tuple[str, ...] | None = None) -> Any:
    metadata = {"help": description, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run. Rules between them are checked by `tlb.Recipe` and the models."""

    run_dir: str = _option("", "Folder for everything the run writes; required.")
    dataset: str = _option("mnist5k", "Data to train on.", choices=DATASETS)
    data_dir: str = _option(
        "",
        "Folder of the images, for all data sets but mnist5k and photo_patches: with train/CLASS/ "
        "and val/CLASS/; with train-*.tfrecord and val-*.tfrecord (or .array_record) of "
        "tools/pack_images.py; or of a prepared builder of TensorFlow Datasets.",
    )
    image_size: int = _option(224, "Height and width of what is cut out of images in data_dir.")
    num_classes: int | None = _option(None, "Of data_dir, where its files do not tell.")
    model: str = _option("resnet_small", "Network.", choices=MODELS)
    depth: int = _option(8, "Depth of resnet_small: 6 d + 2.")
    epochs: int = _option(8, "Passes over the training data.")
    per_replica_batch_size: int = _option(32, "Examples that one replica takes at once.")
    accumulation_steps: int = _option(1, "Batches whose gradients make one update.")
    optimizer: str = _option("sgd", "Nesterov momentum SGD, or LARS.", choices=OPTIMIZERS)
    base_learning_rate: float | None = _option(
        None, "Rate known to work at base_batch_size; default: 0.2, and 4 for lars."
    )
    base_batch_size: int = _option(32, "Global batch size of base_learning_rate.")
    warmup: str = _option("gradual", "How the rate gets to its peak.", choices=WARMUPS)
    warmup_epochs: float = _option(1.0, "Length of the warmup.")
    decay_epochs: tuple[float, ...] | None = _option(
        None, "Epochs at which the rate falls to a tenth; default: 1/3, 2/3 and 8/9 of all."
    )
    momentum: float = _option(0.9, "Momentum (of SGD, Nesterov's).")
    weight_decay: float = _option(1e-4, "L2 in the gradient of convolutions and classifier.")
    label_smoothing: float = _option(0.0, "Share of each label spread over all classes.")
    all_reduce: str = _option("auto", "How gradients are summed.", choices=ALL_REDUCES)
    transport: str = _option(
        "tensorflow", "By what they travel; mpi: start by mpiexec.", choices=TRANSPORTS
    )
    save_every_steps: int | None = _option(
        None, "Steps from one saved state to the next; default: an epoch."
    )
    seed: int = _option(1, "Of the initial weights and of the order of the data.")

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise tlb.ConfigurationError(
                "--run_dir is required: the folder for everything the run writes."
            )
        if self.base_learning_rate is None:  # the one thing that depends on another
            object.__setattr__(self, "base_learning_rate", _BASE_RATES.get(self.optimizer))
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            if choices and value not in choices:
                raise tlb.ConfigurationError(
                    f"--{field.name}={value}: must be one of {', '.join(choices)}."
                )


def define_flags() -> None:
    """Defines one absl flag for each field of TrainConfig."""
    define = {
        int: flags.DEFINE_integer,
        int | None: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        float | None: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    types = typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        description = field.metadata["help"]
        if field.metadata["choices"]:
            flags.DEFINE_enum(field.name, field.default, field.metadata["choices"], description)
        elif types[field.name] in define:
            define[types[field.name]](field.name, field.default, description)
        else:
            flags.DEFINE_list(field.name, field.default, description)


def config_from_flags(others: Sequence[str]) -> TrainConfig:
    """Returns the configuration of the parsed flags; raises ConfigurationError for a wrong one.

    Args:
        others: what the command line has beside flags; nothing may be.
    """
    if others:
        raise tlb.ConfigurationError(
            f"unknown arguments: {' '.join(others)}; flags begin with --. See --help."
        )
    values = {
        field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(TrainConfig)
    }
    if values["decay_epochs"] is not None:
        try:
            values["decay_epochs"] = tuple(float(epoch) for epoch in values["decay_epochs"])
        except ValueError as error:
            message = f"--decay_epochs: must be numbers, as 30,60,80; {error}."
            raise tlb.ConfigurationError(message) from None
    return TrainConfig(**values)
