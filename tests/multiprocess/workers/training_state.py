"""Trainings that are killed and started again, as forks of one process (`forked_cluster.py`)."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from forked_cluster import Cluster

import tf_largebatch as tlb

ROWS, BATCH, EPOCHS = 48, 8, 3  # 6 steps an epoch, 18 in all
Ends = dict[int, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained, and how it comes to grief.

    Attributes:
        optimizer: "sgd", "lars" (with accumulation), or "float" (a rate that callbacks set).
        kill_after: batches after which a worker kills itself.
        victim: which worker; None for all.
    """

    optimizer: str = "sgd"
    steps_per_execution: int = 1
    given_steps: bool = False
    save_every_steps: int | None = 2
    kill_after: int | None = None
    victim: int | None = 0
    signal: int = signal.SIGKILL
    epochs: int = EPOCHS
    stop_on: int | None = None
    num_workers: int = 2
    replicas_per_worker: int = 1
    classes: int = 4


def data() -> tuple[Any, Any]:
    rng = np.random.Generator(np.random.Philox(5))
    return rng.normal(size=(ROWS, 6, 6, 1)).astype(np.float32), rng.integers(0, 4, ROWS)


def noise(seed: Any, image: Any, label: Any) -> Any:
    return image + tf.random.stateless_normal(tf.shape(image), seed), label


def compiled_model(run: Run, recipe: tlb.Recipe) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.Dropout(0.4, seed=3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(run.classes),
        ]
    )
    schedule = recipe.learning_rate_schedule()
    optimizer = {
        "sgd": lambda: tlb.optimizers.MomentumSGD(schedule, weight_decay=1e-3),
        "lars": lambda: tlb.optimizers.LARS(schedule, gradient_accumulation_steps=2),
        "float": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    }[run.optimizer]()
    model.compile(
        optimizer,
        tlb.losses.SparseCategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=["accuracy"],
        steps_per_execution=run.steps_per_execution,
    )
    return model


class Dies(keras.callbacks.Callback):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.left = run, run.kill_after

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.left -= self.run.steps_per_execution
        if self.left == 0:
            os.kill(os.getpid(), self.run.signal)


class Asks(keras.callbacks.Callback):
    """Stops the training by itself, after so many batches of an epoch."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch + 1 == self.after:
            self.model.stop_training = True


def train(run: Run, folder: Path) -> Callable[[int], None]:
    """A worker's script; its last line says what came out."""

    def body(rank: int) -> None:
        tf.config.experimental.enable_op_determinism()
        strategy = tlb.LargeBatchStrategy(all_reduce="ring", timeout_seconds=20.0)
        keras.utils.set_random_seed(11)
        accumulated = 2 if run.optimizer == "lars" else 1
        recipe = tlb.Recipe(
            num_examples=ROWS,
            per_replica_batch_size=BATCH // strategy.num_replicas_in_sync,
            num_replicas=strategy.num_replicas_in_sync,
            base_learning_rate=0.05,
            base_batch_size=BATCH // 2,
            epochs=run.epochs,
            warmup_epochs=1.5,
            accumulation_steps=accumulated,
        )
        with strategy.scope():
            model = compiled_model(run, recipe)
        x, y = data()
        sharder = tlb.data.GlobalShuffleSharder(
            tlb.data.ArraySource((x, y)),
            global_batch_size=BATCH,
            accumulation_steps=accumulated,
            seed=2,
            row_fn=noise,
        )
        history = model.fit(
            sharder.train_dataset(strategy),
            epochs=run.epochs,
            steps_per_epoch=sharder.steps_per_epoch if run.given_steps else None,
            shuffle=False,
            verbose=0,
            validation_data=tlb.data.evaluation_dataset(
                tlb.data.ArraySource((x[:10], y[:10])), batch_size=BATCH, strategy=strategy
            ),
            callbacks=callbacks(run, folder, rank),
        )
        print("RESULT", json.dumps(outcome(model, history)), flush=True)
        strategy.barrier()

    return body


def callbacks(run: Run, folder: Path, rank: int) -> list[keras.callbacks.Callback]:
    kinds = keras.callbacks
    chosen: list[keras.callbacks.Callback] = [
        tlb.callbacks.BatchNormSync(),
        kinds.EarlyStopping("loss", patience=2, min_delta=10.0, start_from_epoch=EPOCHS),
        tlb.callbacks.ChiefOnly(kinds.CSVLogger(str(folder / "log.csv"))),
        tlb.callbacks.ChiefOnly(kinds.TensorBoard(str(folder / "board"), write_graph=False)),
    ]
    if run.optimizer == "float":
        chosen += [
            kinds.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            kinds.ReduceLROnPlateau("loss", patience=1, min_delta=0.5, factor=0.5),
        ]
    if run.stop_on is not None:
        if rank == 1:
            chosen.append(Asks(run.stop_on))
        chosen.append(tlb.callbacks.StopTogether())
    chosen.append(
        tlb.callbacks.TrainingState(folder / "state", save_every_steps=run.save_every_steps)
    )
    if run.kill_after is not None and run.victim in (None, rank):
        chosen.append(Dies(run))
    return chosen


def outcome(model: keras.Model, history: Any) -> dict[str, Any]:
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return {
        "weights": digest.hexdigest(),
        "history": history.history,
        "epochs": history.epoch,
        "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
    }


# --- Runs of a cluster


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed by this process alone: its forks leave the context as well."""
    owner, folder = os.getpid(), Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder)


def one_run(run: Run, folder: Path) -> Ends:
    env = [{"TF_LARGEBATCH_CPU_REPLICAS": str(run.replicas_per_worker)}] * run.num_workers
    return Cluster(train(run, folder), num_workers=run.num_workers, env=env).join()


def result_of(ends: Ends) -> list[dict[str, Any]]:
    """What the workers found, which must have come to their end."""
    results = []
    for end in ends.values():
        lines = [line for line in end["log"].splitlines() if line.startswith("RESULT ")]
        assert end["returncode"] == 0 and lines, end["log"][-3000:]
        results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    return results


def scalars(folder: Path) -> dict[str, list[list[float]]]:
    """{tag: [step, value] of each event} of TensorBoard's files."""
    points: dict[str, list[list[float]]] = {}
    for path in sorted((folder / "board").glob("*/events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                tag = f"{path.parent.name}/{value.tag}"
                points.setdefault(tag, []).append(
                    [event.step, float(tf.make_ndarray(value.tensor))]
                )
    return points


def after(run: Run, *interruptions: Run) -> dict[str, Any]:
    """What a training comes to, broken off so many times, with what it has written."""
    with scratch() as folder:
        codes = []
        for interrupted in interruptions:
            ends = one_run(interrupted, folder)
            codes.append([end["returncode"] for end in ends.values()])
        ends = one_run(run, folder)
        results = result_of(ends)
        assert all(result == results[0] for result in results), results
        return results[0] | {
            "codes": codes,
            "csv": (folder / "log.csv").read_text(),
            "board": scalars(folder),
        }


@functools.cache
def undisturbed(run: Run) -> dict[str, Any]:
    return after(run)


def case_undisturbed() -> dict[str, Any]:
    return undisturbed(Run())


def case_killed_at_any_step() -> list[dict[str, Any]]:
    run = Run()
    return [
        undisturbed(run),
        after(
            run,
            dataclasses.replace(run, kill_after=7, victim=0),
            dataclasses.replace(run, kill_after=1, victim=1),
            dataclasses.replace(run, kill_after=6, victim=None),
        ),
    ]


def case_lars_with_accumulation() -> list[dict[str, Any]]:
    """And several replicas a worker, each with its own seeds and statistics."""
    run = Run(optimizer="lars", steps_per_execution=2, given_steps=True, replicas_per_worker=2)
    return [undisturbed(run), after(run, dataclasses.replace(run, kill_after=10))]


def case_rates_of_callbacks() -> list[dict[str, Any]]:
    run = Run(optimizer="float", save_every_steps=None)
    within = dataclasses.replace(run, save_every_steps=1)
    return [undisturbed(run), after(run, dataclasses.replace(within, kill_after=9))]


def case_terminated() -> list[dict[str, Any]]:
    told = Run(save_every_steps=None, kill_after=8, victim=1, signal=signal.SIGTERM)
    return [undisturbed(Run()), after(Run(save_every_steps=None), told)]


def case_terminated_before_fit() -> Ends:
    def body(rank: int) -> None:
        new = tlb.LargeBatchStrategy(all_reduce="ring")
        new.barrier()
        print("READY", flush=True)
        time.sleep(60.0)

    cluster = Cluster(body)
    for rank in range(2):
        cluster.wait_for(rank, "READY")
    cluster.kill(1, signal.SIGTERM)
    cluster.wait_until_ended(1, timeout_seconds=10.0)
    cluster.kill(0, signal.SIGTERM)
    return cluster.join(10.0)


def case_started_again_after_the_end() -> list[dict[str, Any]]:
    return [undisturbed(Run()), after(Run(), Run())]


def case_one_worker_asks_to_stop() -> dict[str, Any]:
    """Within an epoch, and with its last batch."""
    return {str(after_batch): after(Run(stop_on=after_batch)) for after_batch in (3, 6)}


# --- Directories, disks, other runs


@functools.cache
def killed_run() -> Path:
    """The folder of a run that was killed in its second epoch; removed with this process."""
    owner, folder = os.getpid(), Path(tempfile.mkdtemp())
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder))
    one_run(Run(kill_after=9), folder)
    return folder


@contextlib.contextmanager
def saved_by_killed_run() -> Iterator[Path]:
    """A copy of it."""
    with scratch() as parent:
        yield Path(shutil.copytree(killed_run(), parent / "copy"))


def case_directories_differ() -> list[dict[str, Any]]:
    """Only the chief has the state; then only the other worker."""
    with saved_by_killed_run() as folder:
        found = []
        for holder in range(2):
            with scratch() as parent:
                own = [parent / str(rank) for rank in range(2)]
                shutil.copytree(folder, own[holder])
                own[1 - holder].mkdir()
                ends = Cluster(lambda rank, own=own: train(Run(), own[rank])(rank)).join()
                found += result_of(ends)
    return found


def case_another_run() -> dict[str, Ends]:
    with saved_by_killed_run() as folder:
        return {
            "model": one_run(Run(classes=5), folder),
            "recipe": one_run(Run(epochs=EPOCHS + 1), folder),
            "optimizer": one_run(Run(optimizer="lars"), folder),
        }


def case_damaged_states() -> dict[str, Any]:
    """The newest is cut off: the one before it counts. Then all are."""
    with saved_by_killed_run() as folder:
        # Three, if the kill came before the oldest was removed.
        *older, newest = sorted((folder / "state").glob("state_*.tlb"))
        os.truncate(newest, newest.stat().st_size // 2)
        with scratch() as parent:
            copy = Path(shutil.copytree(folder, parent / "copy"))
            results = result_of(one_run(Run(), copy))
        for path in older:
            os.truncate(path, 20)
        return {"older": results, "none": one_run(Run(), folder)}


def case_one_worker_of_two() -> list[dict[str, Any]]:
    with saved_by_killed_run() as folder:
        return result_of(one_run(Run(num_workers=1), folder))


def case_full_disk() -> dict[str, Any]:
    """On the chief, from its second state on. What files on a full disk come to is tested apart."""

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Fills(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            os.fsync = no_space

    def body(rank: int) -> None:  # in its fork
        original = callbacks
        more = [Fills()] if rank == 0 else []
        globals()["callbacks"] = lambda *arguments: original(*arguments) + more
        train(Run(save_every_steps=1), folder)(rank)

    with scratch() as folder:
        ends = Cluster(body).join()
        files = sorted(path.name for path in (folder / "state").iterdir())
        return {"ends": ends, "files": files, "resumed": result_of(one_run(Run(), folder))}
