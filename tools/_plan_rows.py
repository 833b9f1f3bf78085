"""What `plan_scaling.py` is asked, and the figures of each number of hosts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _plan_models import ModelProfile

import tf_largebatch as tlb
from tf_largebatch.core.cost_model import FlatAlgorithm, LinkCost
from tf_largebatch.core.scaling_plan import (
    ALGORITHMS,
    BucketLoad,
    Cluster,
    Gradient,
    ReplicaWork,
    all_reduce_seconds,
    bucket_loads,
    inside_host_seconds,
    network_bits_per_second,
    plan_step,
)


@dataclass(frozen=True)
class RunSettings:
    """Of the recipe, but for what depends on the number of replicas."""

    num_examples: int
    epochs: int
    base_learning_rate: float
    base_batch_size: int
    warmup_epochs: float

    def recipe(self, *, images: int, replicas: int) -> tlb.Recipe:
        """The recipe of `images` on each of `replicas`."""
        return tlb.Recipe(
            **dataclasses.asdict(self), per_replica_batch_size=images, num_replicas=replicas
        )


@dataclass(frozen=True)
class Setup:
    """What is planned, but for the number of hosts.

    Args:
        work: of a replica.
        gradients: in the order in which backward makes them.
        replicas_per_host: L.
        inside, between: links inside a host, and of a host to the network.
        bucket_bytes, max_buckets_in_flight: as of `LargeBatchStrategy`.
        algorithm: between hosts; None is the fastest for each bucket.
        run: of the recipe.
    """

    work: ReplicaWork
    gradients: Sequence[Gradient]
    replicas_per_host: int
    inside: LinkCost
    between: LinkCost
    bucket_bytes: int
    max_buckets_in_flight: int
    algorithm: FlatAlgorithm | None
    run: RunSettings

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.size_bytes for gradient in self.gradients)

    def cluster(self, hosts: int) -> Cluster:
        return Cluster(hosts, self.replicas_per_host, self.inside, self.between)

    def buckets(self, bucket_bytes: int | None = None) -> list[BucketLoad]:
        """In buckets of this size; by default of the setup's own."""
        return bucket_loads(self.gradients, bucket_bytes=bucket_bytes or self.bucket_bytes)


def gradients_of(model: ModelProfile, *, item_bytes: int) -> list[Gradient]:
    """A model's gradients, last layer first, as backward makes them."""
    return [
        Gradient(each.elements * item_bytes, float(each.multiply_adds))
        for each in reversed(model.weights)
    ]


def even_gradients(gradient_bytes: int, *, parts: int = 100) -> list[Gradient]:
    """Gradients of which nothing but their size is known: spread evenly over backward."""
    edges = [gradient_bytes * part // parts for part in range(parts + 1)]
    return [Gradient(end - begin, 1.0) for begin, end in itertools.pairwise(edges)]


def row_of(setup: Setup, hosts: int) -> dict[str, Any]:
    """All figures of this number of hosts; times in milliseconds.

    Raises:
        ConfigurationError: the recipe cannot be, as there are fewer examples than a global batch.
    """
    cluster, buckets = setup.cluster(hosts), setup.buckets()
    recipe = setup.run.recipe(images=setup.work.images, replicas=cluster.replicas)
    by_algorithm = {
        name: plan_step(
            setup.work,
            buckets,
            cluster,
            algorithm=name,
            max_buckets_in_flight=setup.max_buckets_in_flight,
        )
        for name in (*ALGORITHMS, None)
    }
    plan = by_algorithm[setup.algorithm]
    one_host = plan_step(
        setup.work,
        buckets,
        setup.cluster(1),
        max_buckets_in_flight=setup.max_buckets_in_flight,
    )
    size = setup.gradient_bytes
    whole = all_reduce_seconds(cluster, size_bytes=size, algorithm=setup.algorithm)
    inside = sum(inside_host_seconds(cluster, size_bytes=size))
    needed = network_bits_per_second(cluster, size_bytes=size, seconds=setup.work.backward_seconds)
    return {
        "hosts": hosts,
        "replicas": cluster.replicas,
        "global_batch_size": recipe.global_batch_size,
        "peak_learning_rate": recipe.peak_learning_rate,
        "warmup_steps": recipe.warmup_steps,
        "total_steps": recipe.total_steps,
        "all_reduce_ms": {
            name or "fastest": 1e3 * each.all_reduce_seconds for name, each in by_algorithm.items()
        },
        "used_all_reduce_ms": 1e3 * plan.all_reduce_seconds,
        "one_buffer_inside_ms": 1e3 * inside,
        "one_buffer_between_ms": 1e3 * (whole - inside),
        "hidden": plan.hidden_share,
        "exposed_ms": 1e3 * plan.exposed_seconds,
        "compute_ms": 1e3 * plan.compute_seconds,
        "step_ms": 1e3 * plan.step_seconds,
        "images_per_second": plan.images_per_second,
        "efficiency": plan.efficiency,
        "efficiency_to_one_host": one_host.step_seconds / plan.step_seconds,
        "epoch_seconds": recipe.steps_per_epoch * plan.step_seconds,
        "hours": recipe.total_steps * plan.step_seconds / 3600.0,
        "network_gbit_per_second": 1e-9 * needed,
    }
