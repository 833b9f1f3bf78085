"""Which algorithm reduces a buffer the fastest, by what was measured between the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_largebatch.core.block_plan import binary_blocks
from tf_largebatch.core.collective_plan import AllReducePlan, halving_doubling, hierarchical, ring
from tf_largebatch.core.cost_model import (
    LinkCost,
    PlanCost,
    algorithm_cost,
    hierarchical_cost,
)
from tf_largebatch.core.errors import ConfigurationError
from tf_largebatch.core.scaling import require_count, require_number

LARGEST_MEASURED_BYTES = 2**20
# What was not measured is predicted within 10 to 20 percent; there TensorFlow's own, a single op
# with fewer copies of a large buffer, is taken unless another is faster by more than that.
_EXTRAPOLATED_ADVANTAGE = 0.75
_FORMAT = "tf_largebatch all-reduce costs 1"


@dataclass(frozen=True)
class AllReduceCosts:
    """What an all-reduce costs on one cluster.

    A plan of ours takes `overhead_seconds`, and what the cost model says of `link`. TensorFlow's
    own all-reduce takes `tensorflow_seconds`, however small the buffer, and
    `tensorflow_seconds_per_byte` for each byte.

    Args:
        num_workers: of the cluster.
        replicas_per_worker: devices of a worker.
        link: a step between workers, and a byte that travels.
        overhead_seconds: of any plan.
        tensorflow_seconds: of an empty buffer.
        tensorflow_seconds_per_byte: of the buffer's size.
        transport: by which buffers travel; by "mpi", its own all-reduce stands for TensorFlow's.

    Raises:
        ConfigurationError: a count is below 1, or a time is negative or not finite.
    """

    num_workers: int
    replicas_per_worker: int
    link: LinkCost
    overhead_seconds: float
    tensorflow_seconds: float
    tensorflow_seconds_per_byte: float
    transport: str = "tensorflow"

    def __post_init__(self) -> None:
        for name in ("num_workers", "replicas_per_worker"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        for name in ("overhead_seconds", "tensorflow_seconds", "tensorflow_seconds_per_byte"):
            require_number(name, getattr(self, name), may_equal_minimum=True)

    @classmethod
    def typical(
        cls, num_workers: int, *, replicas_per_worker: int, transport: str = "tensorflow"
    ) -> AllReduceCosts:
        """Of a network of 10 Gbit/s and gRPC, where nothing was measured."""
        link = LinkCost(latency_seconds=5e-4, seconds_per_byte=2e-9)
        own = algorithm_cost("ring", num_workers * replicas_per_worker, size_bytes=1.0)
        return cls(
            num_workers=num_workers,
            replicas_per_worker=replicas_per_worker,
            link=link,
            overhead_seconds=1e-3,
            tensorflow_seconds=1e-3 + own.steps * link.latency_seconds,
            tensorflow_seconds_per_byte=own.bytes_sent * link.seconds_per_byte,
            transport=transport,
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers and text, to be stored as JSON and given to `from_dict`."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> AllReduceCosts:
        """What `to_dict` returned.

        Raises:
            ConfigurationError: `stored` is something else.
        """
        fields = dict(stored) if isinstance(stored, Mapping) else {}
        found = fields.pop("format", None) if fields else type(stored).__name__
        if found != _FORMAT:
            raise ConfigurationError(
                f"Stored all-reduce costs must be a mapping with 'format': {_FORMAT!r}, but are of "
                f"{found!r}; store what `strategy.all_reduce_costs` returns."
            )
        try:
            return cls(**{**fields, "link": LinkCost(**fields["link"])})
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"Stored all-reduce costs are incomplete or have too much: {error}."
            ) from error


@dataclass(frozen=True)
class Candidate:
    """A way to reduce: `algorithm` is "tensorflow", or that of a plan, with its parameters."""

    algorithm: str
    halvings: int | None = None

    def describe(self) -> str:
        return self.algorithm + ("" if self.halvings is None else f"[halvings={self.halvings}]")


def candidates(algorithm: str, num_workers: int, *, replicas_per_worker: int) -> list[Candidate]:
    """The ways that an option stands for: "ring", "halving_doubling", "tensorflow" or "auto".

    Halving/doubling has one for each number of halvings, from none, for short buffers, up to
    `floor(log2 p) - 1`; one more would only send the same bytes in more steps. Where the workers
    are no power of two, and each has one replica, there are also the paper's binary blocks.
    """
    exponent = num_workers.bit_length() - 1
    halving = [Candidate("halving_doubling", halvings) for halvings in range(max(1, exponent))]
    if num_workers != 2**exponent and replicas_per_worker == 1:
        halving.append(Candidate("binary_blocks"))
    by_option = {
        "tensorflow": [Candidate("tensorflow")],
        "ring": [Candidate("ring")],
        "halving_doubling": halving,
    }
    by_option["auto"] = [way for ways in by_option.values() for way in ways]
    return by_option[algorithm]


def predicted_seconds(
    candidate: Candidate, costs: AllReduceCosts, *, size_bytes: float, at_once: int = 1
) -> float:
    """Of a buffer of `size_bytes` on every replica; of `at_once` such that share the links."""
    if candidate.algorithm == "tensorflow":
        return costs.tensorflow_seconds + costs.tensorflow_seconds_per_byte * size_bytes * at_once
    cost = plan_cost_of(
        candidate, costs.num_workers, costs.replicas_per_worker, size_bytes=size_bytes
    )
    shared = LinkCost(
        latency_seconds=costs.link.latency_seconds,
        seconds_per_byte=costs.link.seconds_per_byte * at_once,
        reduce_seconds_per_byte=costs.link.reduce_seconds_per_byte * at_once,
    )
    return costs.overhead_seconds + cost.seconds(shared)


def plan_cost_of(
    candidate: Candidate, num_workers: int, replicas_per_worker: int, *, size_bytes: float
) -> PlanCost:
    """The cost of the candidate's plan (TensorFlow's own has none) by its closed form."""
    return hierarchical_cost(
        num_workers,
        members_per_host=replicas_per_worker,
        size_bytes=size_bytes,
        inter=candidate.algorithm,  # type: ignore[arg-type]
        halvings=candidate.halvings,
    )


def rank_by_seconds(
    ways: Sequence[Candidate], costs: AllReduceCosts, *, size_bytes: float, at_once: int = 1
) -> list[tuple[Candidate, float]]:
    """`ways` with their predicted seconds, the best first; of equals, the first given.

    The best is the fastest; beyond `LARGEST_MEASURED_BYTES`, TensorFlow's own unless another is
    faster by a quarter.
    """

    def order(pair: tuple[Candidate, float]) -> float:
        way, seconds = pair
        is_extrapolated = size_bytes > LARGEST_MEASURED_BYTES and way.algorithm == "tensorflow"
        return seconds * (_EXTRAPOLATED_ADVANTAGE if is_extrapolated else 1.0)

    timed = [
        (way, predicted_seconds(way, costs, size_bytes=size_bytes, at_once=at_once)) for way in ways
    ]
    return sorted(timed, key=order)


def make_plan(
    candidate: Candidate,
    *,
    num_workers: int,
    replicas_per_worker: int,
    length: int,
    align: int,
) -> AllReducePlan | None:
    """The plan over all replicas, member `worker * replicas_per_worker + replica`.

    None where the candidate is TensorFlow's own. With several replicas a worker, plans are
    hierarchical: what a worker's replicas hold is summed inside of it first.
    """
    if candidate.algorithm == "tensorflow":
        return None
    if replicas_per_worker > 1:
        return hierarchical(
            num_workers,
            members_per_host=replicas_per_worker,
            length=length,
            inter=candidate.algorithm,  # type: ignore[arg-type]
            halvings=candidate.halvings,
            align=align,
        )
    if candidate.algorithm == "ring":
        return ring(num_workers, length=length, align=align)
    if candidate.algorithm == "binary_blocks":
        return binary_blocks(num_workers, length=length, align=align)
    return halving_doubling(num_workers, length=length, halvings=candidate.halvings, align=align)
