"""Chooses the algorithm of each bucket, the same on all workers, and can tell why."""

from __future__ import annotations

from dataclasses import dataclass

from tf_largebatch.core.algorithm_choice import (
    AllReduceCosts,
    Candidate,
    candidates,
    make_plan,
    rank_by_seconds,
)
from tf_largebatch.core.collective_plan import AllReducePlan

# TensorFlow slices and splits without a copy at multiples of this.
_ALIGNMENT_BYTES = 64


_OWN = Candidate("tensorflow")  # of the library that sums


@dataclass(frozen=True)
class _Decision:
    size_bytes: int
    option: str
    at_once: int
    ranked: tuple[tuple[Candidate, float], ...]  # with predicted seconds, the chosen one first

    def name(self, own: str) -> str:
        """Without times; `own` is what to call the all-reduce of the library that sums."""
        chosen = self.ranked[0][0]
        return f"{self._buffer()}: {own if chosen == _OWN else chosen.describe()}"

    def describe(self) -> str:
        chosen, *others = [
            f"{way.describe()} {1e3 * seconds:.2f} ms" for way, seconds in self.ranked
        ]
        rest = f" (others: {', '.join(others)})" if others else ""
        return f"{self._buffer()}: {chosen} predicted{rest}"

    def _buffer(self) -> str:
        at_once = "" if self.at_once == 1 else f", {self.at_once} at once"
        return f"  {self.size_bytes} bytes{at_once}, {self.option!r}"


class AlgorithmSelector:
    """Ranks the algorithms that an option stands for by predicted time.

    Predictions come from costs on which all workers agree, so that all choose alike.

    Args:
        num_workers: of the cluster.
        replicas_per_worker: devices of a worker.
        has_nccl: whether collectives are NCCL's. Its own rings and trees are what it is best at,
            and it needs equal pieces.
        has_mpi: whether MPI sums instead of TensorFlow, to which "auto" then leaves the algorithm.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        replicas_per_worker: int,
        has_nccl: bool = False,
        has_mpi: bool = False,
    ) -> None:
        self._has_nccl = has_nccl
        self._has_mpi = has_mpi
        self._num_workers = num_workers
        self.replicas_per_worker = replicas_per_worker
        self.costs = AllReduceCosts.typical(
            num_workers,
            replicas_per_worker=replicas_per_worker,
            transport="mpi" if has_mpi else "tensorflow",
        )
        self._source = "typical costs, as nothing was measured"
        self._decisions: dict[tuple[int, str, int, bool], _Decision] = {}

    def use(self, costs: AllReduceCosts, source: str) -> None:
        """Predicts from `costs` from now on; `source` says where they are from."""
        self.costs, self._source = costs, source
        self._decisions.clear()

    def plan(
        self,
        option: str,
        *,
        length: int,
        item_bytes: int,
        at_once: int = 1,
        sums_wider_than_wire: bool = False,
    ) -> AllReducePlan | None:
        """The plan for a buffer of `length` elements, or None for TensorFlow's, or MPI's, own.

        Args:
            option: as `AllReduceOptions.algorithm`.
            length: elements.
            item_bytes: of an element as it travels.
            at_once: how many such buffers travel at a time.
            sums_wider_than_wire: whether sums are kept in another dtype than what travels, which
                TensorFlow's own cannot do.
        """
        key = (length * item_bytes, option, at_once, sums_wider_than_wire)
        if key not in self._decisions:
            self._decisions[key] = self._decide(*key)
        chosen, _ = self._decisions[key].ranked[0]
        return self.plan_of(chosen, length=length, item_bytes=item_bytes)

    def plan_of(
        self, candidate: Candidate, *, length: int, item_bytes: int
    ) -> AllReducePlan | None:
        """The candidate's plan; None for TensorFlow's own all-reduce."""
        if self._has_nccl:
            replicas = self._num_workers * self.replicas_per_worker
            length = -(-length // replicas) * replicas
        return make_plan(
            candidate,
            num_workers=self._num_workers,
            replicas_per_worker=self.replicas_per_worker,
            length=length,
            align=1 if self._has_nccl else max(1, _ALIGNMENT_BYTES // item_bytes),
        )

    def _decide(
        self, size_bytes: int, option: str, at_once: int, sums_wider_than_wire: bool
    ) -> _Decision:
        ways = candidates(option, self._num_workers, replicas_per_worker=self.replicas_per_worker)
        if self._has_nccl:
            is_power_of_two = self._num_workers & (self._num_workers - 1) == 0
            plans = option == "halving_doubling" and is_power_of_two
            ways = ways[-1:] if plans else [_OWN]
        if sums_wider_than_wire:
            ways = [way for way in ways if way != _OWN]
        elif self._has_mpi and _OWN in ways:
            ways = [_OWN]
        ranked = rank_by_seconds(ways, self.costs, size_bytes=size_bytes, at_once=at_once)
        return _Decision(size_bytes, option, at_once, tuple(ranked))

    @property
    def has_decided(self) -> bool:
        """Whether anything was reduced by what it chose."""
        return bool(self._decisions)

    def report(self) -> str:
        """What was decided for which buffers, and from what."""
        lines = [self._premise()]
        decisions = sorted(self._decisions.values(), key=lambda each: each.size_bytes)
        lines += [
            # Nothing was measured of NCCL's own, or of MPI's.
            decision.name("mpi" if self._has_mpi else "tensorflow")
            if self._has_nccl or self._has_mpi
            else decision.describe()
            for decision in decisions
        ]
        return "\n".join(lines if decisions else [*lines, "  No buffer was reduced yet."])

    def _premise(self) -> str:
        if self._has_nccl:
            return (
                "Collectives are NCCL's: its own all-reduce ('tensorflow' below, also where 'ring' "
                "was asked for), which chooses between rings and trees. 'halving_doubling' is put "
                "together from groups, but only where the workers are a power of two."
            )
        if self._has_mpi:
            return (
                "Buckets travel by MPI: by its own all-reduce ('mpi' below), which chooses among "
                "its algorithms; by plans where these were asked for, or where sums are wider than "
                f"what travels ({self._source})."
            )
        costs, per_mib = self.costs, 1e3 * 2**20
        return (
            f"Costs ({self._source}): a call {1e3 * costs.overhead_seconds:.3f} ms, a step "
            f"{1e3 * costs.link.latency_seconds:.3f} ms, a MiB that travels "
            f"{per_mib * costs.link.seconds_per_byte:.3f} ms; TensorFlow's own all-reduce "
            f"{1e3 * costs.tensorflow_seconds:.3f} ms and "
            f"{per_mib * costs.tensorflow_seconds_per_byte:.3f} ms a MiB."
        )
