"""What the workers of `chaos_train.py` and `benchmark_failures.py` train, and where they stand."""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

_PROGRESS = struct.Struct("<qqq")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A small training, in which much has to be the same again after a restart.

    Attributes:
        run_dir: of what it leaves: states, a CSV file, event files.
        workers: how many.
        optimizer: `"lars"` with the recipe's schedule, or `"sgd"` with a rate that
            ReduceLROnPlateau lowers.
        epochs: at most, as it stops early.
        updates_per_epoch: of the optimizer.
        accumulation_steps: batches of an update.
        steps_per_execution: batches that are one step for Keras.
        patience: epochs without a better loss until it stops.
        save_every_steps: batches between states; 0 saves only where it must.
        with_state: whether TrainingState is there at all.
        all_reduce: one whose sums do not depend on what was measured at start.
        start_timeout_seconds, timeout_seconds: of the strategy.
        seed: of all that is random.
    """

    run_dir: str
    workers: int
    optimizer: str = "lars"
    epochs: int = 8
    updates_per_epoch: int = 8
    accumulation_steps: int = 2
    steps_per_execution: int = 1
    patience: int = 3
    save_every_steps: int = 5
    with_state: bool = True
    all_reduce: str = "ring"
    start_timeout_seconds: float = 60.0
    timeout_seconds: float = 60.0
    seed: int = 1

    @property
    def batches_per_epoch(self) -> int:
        return self.updates_per_epoch * self.accumulation_steps

    @property
    def state_dir(self) -> Path:
        return Path(self.run_dir) / "state"

    @property
    def csv_path(self) -> Path:
        return Path(self.run_dir) / "history.csv"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a worker has come.

    Attributes:
        first: the batch, counted from the beginning of the run, at which its process began.
        batches: trained since the beginning of the run.
        epoch: in which it is.
    """

    first: int
    batches: int
    epoch: int

    def write(self, file: BinaryIO) -> None:
        """In one piece, in place: a reader sees what was before, or this."""
        os.pwrite(file.fileno(), _PROGRESS.pack(self.first, self.batches, self.epoch), 0)

    @staticmethod
    def read(path: Path) -> Progress | None:
        """None where there is none yet."""
        try:
            return Progress(*_PROGRESS.unpack(path.read_bytes()))
        except (FileNotFoundError, struct.error):
            return None


def progress_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:02d}.progress"


def arrays_path(folder: Path, rank: int) -> Path:
    """Of the variables that a worker had in the end."""
    return folder / f"rank_{rank:02d}.npz"
