"""What one run of the study is, and which runs make up each of its parts.

All runs have micro-batches of `WORKER_BATCH` rows, the n of the paper: batch norm sees those alone.
A larger minibatch is k of them, by accumulation in one process or by k workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tf_largebatch as tlb

WORKER_BATCH = 8  # n
BASE_RATE = 0.1
LARGE = 128
SELECTION_SEED = 0  # runs of it are for choosing settings: they never see the test patches
_DECAYS = (1 / 2, 3 / 4, 9 / 10)  # of the epochs: 10, 15 and 18 of 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One run; equal settings are the same run.

    Args:
        batch: kn, a multiple of `WORKER_BATCH`.
        rate: the peak rate.
        warmup: "gradual", "constant" or "none".
        base_rate: where warmup starts.
        seed: of the initial weights, the order of the rows, and mirroring.
        zero_gamma: whether the last gamma of a residual block starts as 0, else as 1.
        optimizer: "sgd" or "lars".
        workers: real ones; 1 is one process that accumulates gradients.
        split: of the data.
        epochs, warmup_epochs: of training, and of the warmup within.
    """

    batch: int
    rate: float
    warmup: str
    base_rate: float = BASE_RATE
    seed: int = 1
    zero_gamma: bool = True
    optimizer: str = "sgd"
    workers: int = 1
    split: int = 0
    epochs: int = 20
    warmup_epochs: float = 3.0

    def recipe(self, num_examples: int) -> tlb.Recipe:
        """The recipe: the rule's reference batch is the one that gives `rate` at `batch`.

        With the linear rule from 0.1 at 8 that is 8; the square root's 0.4 at 128 has 32, and a
        rate that is not scaled has the whole batch.

        Raises:
            ConfigurationError: no whole reference batch gives the rate, or as `tlb.Recipe`.
        """
        base_batch = round(self.batch * self.base_rate / self.rate)
        if abs(base_batch * self.rate - self.batch * self.base_rate) > 1e-9 * self.batch:
            raise tlb.ConfigurationError(
                f"rate={self.rate} is not base_rate={self.base_rate} times batch={self.batch} over "
                f"a whole number; the nearest is {self.base_rate * self.batch / base_batch:g}."
            )
        return tlb.Recipe(
            num_examples=num_examples,
            per_replica_batch_size=WORKER_BATCH,
            num_replicas=self.workers,
            accumulation_steps=self.batch // (WORKER_BATCH * self.workers),
            base_learning_rate=self.base_rate,
            base_batch_size=base_batch,
            epochs=self.epochs,
            warmup=self.warmup,
            warmup_epochs=self.warmup_epochs,
            decay_epochs=tuple(self.epochs * share for share in _DECAYS),
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return dataclasses.asdict(self)


Variants = Mapping[str, Setting]


def linear(batch: int, *, base_rate: float = BASE_RATE, **others: Any) -> Setting:
    """`base_rate` at `WORKER_BATCH`, scaled linearly; gradual warmup, if it is scaled at all."""
    rate = base_rate * batch / WORKER_BATCH
    warmup = "none" if batch == WORKER_BATCH else "gradual"
    return Setting(
        **{"batch": batch, "rate": rate, "warmup": warmup, "base_rate": base_rate} | others
    )


def at_rate(batch: int, rate: float, warmup: str = "gradual") -> Setting:
    """A peak rate of no rule, warmed up from the base rate, or from itself if that is lower."""
    return Setting(batch=batch, rate=rate, warmup=warmup, base_rate=min(rate, BASE_RATE))


def _lars(batch: int, rate: float) -> Setting:
    start = rate * WORKER_BATCH / batch
    return Setting(batch=batch, rate=rate, warmup="gradual", base_rate=start, optimizer="lars")


def _four_lines(base_rate: float) -> dict[str, Setting]:
    """The paper's table: small, and large with each kind of warmup."""
    return {
        "baseline": linear(WORKER_BATCH, base_rate=base_rate),
        **{
            warmup: linear(LARGE, base_rate=base_rate, warmup=warmup)
            for warmup in ("gradual", "none", "constant")
        },
    }


_BASELINE, _GRADUAL = linear(WORKER_BATCH), linear(LARGE)
STUDIES: Mapping[str, Variants] = {
    "table": {
        **_four_lines(BASE_RATE),
        "unscaled": at_rate(LARGE, BASE_RATE, "none"),
        "sqrt": at_rate(LARGE, 0.4),
    },
    "size": {f"size_{batch}": linear(batch) for batch in (8, 16, 32, 64, 128, 256, 512)},
    "gamma": {
        "baseline": _BASELINE,
        "gradual": _GRADUAL,
        "baseline_gamma_1": dataclasses.replace(_BASELINE, zero_gamma=False),
        "gradual_gamma_1": dataclasses.replace(_GRADUAL, zero_gamma=False),
    },
    "rates": {
        **{f"rate_8_{rate:g}": at_rate(8, rate, "none") for rate in (0.05, 0.1, 0.2)},
        "rate_128_0.1": at_rate(LARGE, 0.1, "none"),
        **{f"rate_128_{rate:g}": at_rate(LARGE, rate) for rate in (0.4, 0.8, 1.6, 3.2)},
    },
    "controls": {f"{name}_at_0.05": setting for name, setting in _four_lines(0.05).items()},
    "lars": {
        f"lars_{batch}_{rate:g}": _lars(batch, rate)
        for batch in (256, 512)
        for rate in (2.0, 4.0, 8.0, 16.0, 32.0)
    },
    "workers": {
        **{f"accumulated_{8 * k}": linear(8 * k) for k in (2, 4)},
        **{f"workers_{k}": linear(8 * k, workers=k) for k in (2, 4)},
    },
}


def chosen_settings(
    studies: list[str], *, only: list[str], seeds: list[int], split: int
) -> list[Setting]:
    """The runs to make, each once, seed after seed, so that what is stopped has whole seeds.

    Raises:
        ConfigurationError: a variant of `only` is in none of the studies.
    """
    variants = {name: setting for study in studies for name, setting in STUDIES[study].items()}
    if unknown := sorted(set(only) - set(variants)):
        raise tlb.ConfigurationError(
            f"--only={','.join(unknown)}: --study={','.join(studies)} has {', '.join(variants)}."
        )
    runs = [
        dataclasses.replace(setting, seed=seed, split=split)
        for seed in seeds
        for name, setting in variants.items()
        if not only or name in only
    ]
    return list(dict.fromkeys(runs))
