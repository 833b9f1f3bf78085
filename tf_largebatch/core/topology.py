"""Who the workers are: the description of the cluster, read once into a frozen value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tf_largebatch.core.addresses import check_addresses
from tf_largebatch.core.errors import TopologyError
from tf_largebatch.core.slurm import slurm_step
from tf_largebatch.core.tf_config import EVALUATOR, RANKED_JOBS, read_tf_config, tf_config_text


@dataclass(frozen=True, kw_only=True)
class ClusterTopology:
    """The workers of a synchronous cluster, and which of them this process is.

    Attributes:
        addresses: `host:port` of every worker, in rank order: the chief first, then the workers
            in list order (never sorted as text). Empty when no cluster was described.
        rank: this process' place in `addresses`; 0 without a cluster; -1 for an evaluator, which
            is not one of the workers.
        task_type: "chief", "worker" or "evaluator"; None without a cluster.
        task_index: the index within `task_type`; None without a cluster.
        evaluator_addresses: `host:port` of the evaluators, usually none or one.
    """

    addresses: tuple[str, ...] = ()
    rank: int = 0
    task_type: str | None = None
    task_index: int | None = None
    evaluator_addresses: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        """Workers that train, evaluators not counted; 1 without a cluster."""
        return max(1, len(self.addresses))

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates beside the workers; it takes part in no collective."""
        return self.task_type == EVALUATOR

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0: the chief, or worker 0 of a cluster without one."""
        return self.rank == 0

    @property
    def address(self) -> str | None:
        """This process' own `host:port`; None without a cluster, or of an unlisted evaluator."""
        if self.is_evaluator:
            listed = dict(enumerate(self.evaluator_addresses))
            return None if self.task_index is None else listed.get(self.task_index)
        return self.addresses[self.rank] if self.addresses else None

    @property
    def peers(self) -> tuple[tuple[int, str], ...]:
        """(rank, address) of every other worker, in rank order."""
        return tuple(
            (rank, address) for rank, address in enumerate(self.addresses) if rank != self.rank
        )

    def tf_config(self, rank: int) -> str:
        """The text of `TF_CONFIG` for the worker `rank` of these addresses, for who starts it.

        All of them are listed under "worker", in rank order; evaluators are not listed.

        Raises:
            TopologyError: there is no such worker.
        """
        _check_rank(rank, self.addresses)
        return tf_config_text(self.addresses, rank)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ClusterTopology:
        """Reads the cluster from environment variables.

        - `TF_CONFIG`, if it is set and not empty. `TF_CONFIG={}` is one worker, whatever else says.
        - Else SLURM's variables, in a task of a step (`srun`) of more than one task: a worker a
          task, rank `SLURM_PROCID`; for ports see `TF_LARGEBATCH_PORT` in `core/slurm.py`.
        - Else one worker; so is the batch script or the `salloc` shell of a SLURM job.

        Args:
            environ: the variables; default `os.environ`.

        Raises:
            TopologyError: `TF_CONFIG` is set and cannot be used, or the variables of a SLURM step
                are incomplete or contradict one another, as when its tasks are not distributed in
                blocks.
        """
        variables = os.environ if environ is None else environ
        text = variables.get("TF_CONFIG", "")
        if not text.strip() and (step := slurm_step(variables)) is not None:
            addresses, rank = step
            return cls.from_addresses(addresses, rank=rank)
        return cls.from_tf_config(text)

    @classmethod
    def from_addresses(cls, addresses: Sequence[str], *, rank: int = 0) -> ClusterTopology:
        """A cluster of workers at these addresses.

        Args:
            addresses: `host:port` of every worker, in rank order; an IPv6 address in brackets.
            rank: which of them this process is.

        Raises:
            TopologyError: there is none, one is malformed or repeated, or `rank` is none of them.
        """
        check_addresses((f"addresses[{index}]", each) for index, each in enumerate(addresses))
        _check_rank(rank, addresses)
        return cls(addresses=tuple(addresses), rank=rank, task_type="worker", task_index=rank)

    @classmethod
    def from_tf_config(cls, text: str) -> ClusterTopology:
        """Reads the JSON text of a `TF_CONFIG`; an empty one, or `{}`, is one worker.

        "master" is taken as "chief". An evaluator need not be listed in the cluster.

        Raises:
            TopologyError: the text is no JSON object, has jobs other than chief, worker and
                evaluator, no worker, a malformed or repeated address, the sparse form of Kubeflow's
                `enableDynamicWorker`, or a task that is missing or not in the cluster. The message
                shows the offending part.
        """
        config = read_tf_config(text)
        if config is None:
            return cls()
        rank = -1
        if config.task_type != EVALUATOR:
            before = RANKED_JOBS[: RANKED_JOBS.index(config.task_type)]
            rank = sum(len(config.jobs.get(job, ())) for job in before) + config.task_index
        return cls(
            addresses=tuple(address for job in RANKED_JOBS for address in config.jobs.get(job, ())),
            rank=rank,
            task_type=config.task_type,
            task_index=config.task_index,
            evaluator_addresses=config.jobs.get(EVALUATOR, ()),
        )


def _check_rank(rank: int, addresses: Sequence[str]) -> None:
    if not 0 <= rank < len(addresses):
        raise TopologyError(
            f"rank={rank} is none of the {len(addresses)} worker(s) {list(addresses)[:8]}; ranks "
            "start at 0."
        )
