"""Wishes of workers, whose steps are summed by hand here."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf

from tf_largebatch.distribute._agreed_flags import WISHES, AgreedFlags


def step_of(*workers: AgreedFlags, replicas: int = 1) -> None:
    """A training step of all workers, which sums over all replicas of all of them."""
    by_worker = [worker.in_step() for worker in workers]
    sums = [replicas * tf.add_n(of_kind) for of_kind in zip(*by_worker, strict=True)]
    for worker in workers:
        worker.note_sum(sums)


def taken(flags: AgreedFlags) -> set[str]:
    return {name for name in WISHES if flags.take(name)}


def test_of_one_worker_at_once() -> None:
    flags = AgreedFlags(1)
    assert taken(flags) == set()
    flags.wish("save")
    assert taken(flags) == {"save"}
    assert taken(flags) == set()
    flags.wish("stop")
    flags.withdraw("stop")
    assert taken(flags) == set()


@pytest.mark.parametrize("wished", [*itertools.combinations(WISHES, 2)])
@pytest.mark.parametrize("replicas", [1, 4])
def test_all_learn_of_it_with_the_next_step(wished: tuple[str, str], replicas: int) -> None:
    workers = [AgreedFlags(3) for _ in range(3)]
    step_of(*workers, replicas=replicas)
    workers[1].wish(wished[0])
    workers[2].wish(wished[0])
    workers[2].wish(wished[1])
    assert [taken(worker) for worker in workers] == [set()] * 3
    step_of(*workers, replicas=replicas)
    assert [taken(worker) for worker in workers] == [set(wished)] * 3
    # Once only.
    step_of(*workers, replicas=replicas)
    assert [taken(worker) for worker in workers] == [set()] * 3


def test_several_steps_of_one_call() -> None:
    """Callbacks are asked after all of them."""
    workers = [AgreedFlags(2) for _ in range(2)]
    workers[0].wish("leave")
    for _ in range(3):
        step_of(*workers)
    assert [taken(worker) for worker in workers] == [{"leave"}] * 2
    step_of(*workers)
    assert [taken(worker) for worker in workers] == [set()] * 2


def test_others_stay_when_one_is_taken() -> None:
    workers = [AgreedFlags(2) for _ in range(2)]
    workers[0].wish("save")
    workers[1].wish("stop")
    step_of(*workers)
    for worker in workers:
        assert worker.take("save")
        assert not worker.take("save")
        assert worker.take("stop")


def test_withdrawn_before_it_has_travelled() -> None:
    workers = [AgreedFlags(2) for _ in range(2)]
    workers[0].wish("stop")
    workers[0].wish("save")
    workers[0].withdraw("stop")
    step_of(*workers)
    assert [taken(worker) for worker in workers] == [{"save"}] * 2


def test_within_a_graph() -> None:
    workers = [AgreedFlags(2) for _ in range(2)]

    @tf.function
    def step() -> None:
        step_of(*workers)

    step()
    workers[1].wish("save")
    assert [taken(worker) for worker in workers] == [set()] * 2
    step()
    assert [taken(worker) for worker in workers] == [{"save"}] * 2
