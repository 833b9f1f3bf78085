"""Trains an image classifier with the large-minibatch recipe, on one worker or on many.

Alone:        python examples/train.py --run_dir=runs/alone
Two workers:  the same, behind `python tools/launch_local_cluster.py --workers=2 --`
By MPI:       the same with --transport=mpi, behind `mpiexec -n 2`

Every worker runs this script with its own TF_CONFIG; without one it runs on this host alone. By MPI
it needs none. The
chief writes to --run_dir: config.json, history.csv, tensorboard/, best.keras, state/ and, when all
is done, model.keras, plots/ and summary.json.

However a run ended, the same command with the same --run_dir takes it up at the step that state/
holds. SIGTERM has it saved first; the exit code is then 143.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _config
from _callbacks import training_callbacks
from _config import TrainConfig, config_from_flags, define_flags
from _datasets import load_dataset
from _models import build_model
from _plots import write_plots
from _report import refuse_other_run, save_model, write_config, write_summary
from absl import app, flags

import tf_largebatch as tlb


def train_and_evaluate(config: TrainConfig) -> dict[str, Any] | None:
    """Trains as `config` says, or what is left of it; returns the chief's summary, or None."""
    run_dir = Path(config.run_dir)
    refuse_other_run(config, run_dir)
    strategy = tlb.LargeBatchStrategy(all_reduce=config.all_reduce, transport=config.transport)
    topology = strategy.topology
    dataset = load_dataset(config)
    recipe = tlb.Recipe(
        num_examples=len(dataset.train),
        per_replica_batch_size=config.per_replica_batch_size,
        num_replicas=strategy.num_replicas_in_sync,
        base_learning_rate=config.base_learning_rate,
        base_batch_size=config.base_batch_size,
        epochs=config.epochs,
        warmup=config.warmup,
        warmup_epochs=config.warmup_epochs,
        decay_epochs=config.decay_epochs,
        accumulation_steps=config.accumulation_steps,
    )
    if topology.is_chief:
        print(recipe.describe(), flush=True)
    with strategy.scope():
        model = build_model(config, recipe, dataset)
    sharder = tlb.data.GlobalShuffleSharder(
        dataset.train,
        global_batch_size=recipe.global_batch_size // recipe.accumulation_steps,
        accumulation_steps=recipe.accumulation_steps,
        seed=config.seed,
        row_fn=dataset.train_row_fn,
        map_fn=dataset.map_fn,
    )
    if topology.is_chief:  # now that all settings have proved right
        write_config(config, recipe, run_dir)
    history = model.fit(
        sharder.train_dataset(strategy),
        epochs=recipe.epochs,
        shuffle=False,  # the sharder's part
        validation_data=tlb.data.evaluation_dataset(
            dataset.validation,
            batch_size=recipe.global_batch_size,
            strategy=strategy,
            row_fn=dataset.validation_row_fn,
            map_fn=dataset.map_fn,
        ),
        callbacks=training_callbacks(recipe, run_dir, save_every_steps=config.save_every_steps),
        verbose=_verbosity(topology.is_chief),
    ).history
    summary = None
    if topology.is_chief:
        save_model(model, run_dir / "model.keras")
        title = f"{config.model} on {config.dataset}, global batch {recipe.global_batch_size}"
        write_plots(history, recipe, run_dir / "plots", title=title)
        summary = write_summary(model, recipe, history, run_dir, num_workers=topology.num_workers)
    strategy.barrier()  # the others leave together with the chief
    return summary


def _verbosity(is_chief: bool) -> int:
    """A progress bar on a terminal, a line an epoch in a log file, nothing from other workers."""
    if not is_chief:
        return 0
    return 1 if sys.stdout.isatty() else 2


def main(argv: Sequence[str]) -> None:
    try:
        config = config_from_flags(argv[1:])
        summary = train_and_evaluate(config)
    except (tlb.ConfigurationError, tlb.DataError) as error:
        # Their messages say all; others keep their traceback.
        sys.exit(f"train.py: {error}")
    if summary is not None:
        print(
            f"Validation accuracy {summary['final_val_accuracy']:.2%} after {summary['steps']} "
            f"updates, {summary['images_per_second']:.0f} images/s.\n"
            f"Plots are in {Path(config.run_dir) / 'plots'}."
        )


if __name__ == "__main__":
    define_flags()
    flags.adopt_module_key_flags(_config)  # so that --help lists them
    app.run(main)
