"""What each of 3 ranks runs: buckets in engines of their own, a case each; saves what came."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _mpi_alone import save, without_tensorflow

without_tensorflow()

from tf_largebatch.core.collective_plan import ring  # noqa: E402
from tf_largebatch.core.errors import LargeBatchError  # noqa: E402
from tf_largebatch.core.topology import ClusterTopology  # noqa: E402
from tf_largebatch.distribute._mpi import load_mpi  # noqa: E402
from tf_largebatch.distribute._mpi_cluster import exchange  # noqa: E402
from tf_largebatch.distribute._mpi_engine import Bucket, TransferEngine  # noqa: E402
from tf_largebatch.distribute._mpi_transfers import (  # noqa: E402
    all_reduce_by_plan,
    library_all_reduce,
)
from tf_largebatch.distribute._packed_blocks import BlockPool  # noqa: E402

MPI = load_mpi(timeout_seconds=60.0)
WORLD = MPI.COMM_WORLD
RANK = WORLD.rank
PATIENCE_SECONDS = 60.0


class Sum:
    """A bucket of `length` float32 values `key + rank`, and what is delivered for it."""

    def __init__(
        self, key: int, *, length: int = 5, description: str = "", by_ring: bool = False
    ) -> None:
        self.key, self.length, self.by_ring = key, length, by_ring
        self.description = description or f"bucket {key}"
        self.flat = np.full(length, key + RANK, np.float32)
        self.delivered: list[str | None] = []
        self.tags: list[int] = []
        self.when = 0.0
        self._is_there = threading.Event()

    def submit(self, engine: TransferEngine, *, linger: bool = False) -> Sum:
        def start(tag: int) -> Iterator[Any]:
            self.tags.append(tag)
            return self.transfer(engine, tag)

        bucket = Bucket(self.description, self.key, start, self._deliver)
        engine.submit(bucket, linger=linger)
        return self

    def transfer(self, engine: TransferEngine, tag: int) -> Iterator[Any]:
        if self.by_ring:
            plan = ring(WORLD.size, length=self.length)
            return all_reduce_by_plan(plan, engine.comm, self.flat, tag=tag, pool=BlockPool())
        return library_all_reduce(engine.mpi, engine.comm, self.flat)

    def _deliver(self, error: str | None) -> None:
        self.delivered.append(error)
        self.when = time.monotonic()
        self._is_there.set()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> Sum:
        assert self._is_there.wait(seconds), f"{self.description} was not delivered"
        return self

    @property
    def is_summed(self) -> bool:
        return bool(np.all(self.flat == 3 * self.key + 3))

    @property
    def is_untouched(self) -> bool:
        return bool(np.all(self.flat == self.key + RANK))


def new_engine(timeout_seconds: float = 60.0, **options: Any) -> TransferEngine:
    topology = ClusterTopology.from_addresses(["a:1", "b:2", "c:3"], rank=RANK)
    return TransferEngine(MPI, WORLD.Dup(), topology, timeout_seconds=timeout_seconds, **options)


def case_order() -> dict[str, Any]:
    """Ranks hand in at their own pace, buckets of very different sizes."""
    return in_order(new_engine(), lingers=lambda key: False)


def case_order_of_shared_cores() -> dict[str, Any]:
    return in_order(new_engine(share_cores=True), lingers=lambda key: False)


def case_order_of_callers_that_linger() -> dict[str, Any]:
    """Some callers ask MPI themselves, on each rank at other buckets."""
    return in_order(new_engine(), lingers=lambda key: (key + RANK) % 3 == 0)


def in_order(engine: TransferEngine, *, lingers: Callable[[int], bool]) -> dict[str, Any]:
    sizes = np.random.default_rng(0).choice([1, 3, 1000, 65_537, 500_000], size=60)
    pauses = np.random.default_rng(RANK).choice([0, 0, 0, 0.003], size=60)
    sums = []
    for key, (size, pause) in enumerate(zip(sizes, pauses, strict=True)):
        time.sleep(pause)
        sums.append(
            Sum(key, length=int(size), by_ring=key % 3 == 1).submit(engine, linger=lingers(key))
        )
    for each in sums:
        each.wait()
    return {
        "tags": [each.tags for each in sums],
        "summed": [each.is_summed for each in sums],
        "delivered": [each.delivered for each in sums],
        "waiting": engine.waiting(),
        "closed": engine.close(timeout_seconds=5.0),
    }


def case_threads() -> dict[str, Any]:
    """Handed in by two threads, in one order, one of them while the other waits."""
    engine = new_engine()
    first = Sum(1, length=200_000)
    thread = threading.Thread(target=lambda: first.submit(engine).wait())
    thread.start()
    while engine.waiting()[1] == "" and not first.delivered:
        time.sleep(0.001)
    second = Sum(2).submit(engine).wait()
    thread.join(PATIENCE_SECONDS)
    return {
        "summed": [first.is_summed, second.is_summed],
        "closed": engine.close(timeout_seconds=5),
    }


def mismatch(keys: list[int]) -> dict[str, Any]:
    """After two good buckets, those of `keys`, all handed in at once."""
    engine = new_engine()
    good = [Sum(key).submit(engine) for key in (1, 2)]
    for each in good:
        each.wait()
    bad = [
        Sum(key, length=3 * key, description=f"{key} float32 of rank {RANK}").submit(engine)
        for key in keys
    ]
    for each in bad:
        each.wait()
    later = Sum(50).submit(engine).wait(1.0)
    return {
        "good": [each.delivered for each in good],
        "delivered": [each.delivered for each in bad],
        "untouched": all(each.is_untouched for each in [*bad, later]),
        "later": later.delivered,
        "failure": engine.failure,
        "waiting": engine.waiting(),
        "closed": engine.close(timeout_seconds=5.0),
    }


def case_other_key() -> dict[str, Any]:
    return mismatch([7, 8, 9] if RANK != 1 else [6, 8, 9])


def case_all_keys_differ() -> dict[str, Any]:
    return mismatch([10 + RANK, 20])


def case_other_order() -> dict[str, Any]:
    return mismatch([7, 8] if RANK != 2 else [8, 7])


def case_fail() -> dict[str, Any]:
    """Rank 2 never hands in; the others are told by a thread that they wait in vain."""
    engine = new_engine()
    if RANK == 2:
        return {}
    sums = [Sum(key).submit(engine) for key in (1, 2)]
    time.sleep(0.3)
    before = [each.delivered[:] for each in sums]
    begin = time.monotonic()
    teller = threading.Thread(target=engine.fail, args=("the reason",))
    teller.start()
    for each in sums:
        each.wait()
    seconds = max(each.when for each in sums) - begin
    teller.join()
    engine.fail("another reason")
    later = Sum(3).submit(engine)
    return {
        "before": before,
        "delivered": [each.delivered for each in sums],
        "later": later.delivered,  # at once
        "seconds": seconds,
        "tags": [each.tags for each in sums],
        "waiting": engine.waiting(),
        "closed": engine.close(timeout_seconds=5.0),
    }


def case_late() -> dict[str, Any]:
    """A rank may be later than values may travel; nobody has announced them on its behalf."""
    engine = new_engine(timeout_seconds=0.3)
    idle = engine.waiting()
    seen: dict[str, Any] = {}
    if RANK == 2:
        time.sleep(1.5)
    first, second = (Sum(key, description=f"number {key}").submit(engine) for key in (1, 2))
    if RANK != 2:
        time.sleep(1.0)
        seen = {
            "waiting": engine.waiting(),
            "delivered": first.delivered + second.delivered,
            "failure": engine.failure,
        }
    first.wait(), second.wait()
    return {
        "idle": idle,
        "seen": seen,
        "summed": [first.is_summed, second.is_summed],
        "afterwards": engine.waiting(),
        "closed": engine.close(timeout_seconds=5.0),
    }


def case_close() -> dict[str, Any]:
    """An engine that is left with a bucket has not ended."""
    engine = new_engine()
    if RANK == 2:
        return {"closed": [engine.close(timeout_seconds=5.0)]}
    waits = Sum(1).submit(engine)
    closed = [engine.close(timeout_seconds=0.2)]
    engine.fail("no longer")
    closed.append(engine.close(timeout_seconds=5.0))
    return {"closed": closed, "delivered": waits.delivered}


class Silent(Sum):
    """Its values never come, on any rank."""

    def transfer(self, engine: TransferEngine, tag: int) -> Iterator[Any]:
        yield [engine.comm.Irecv(self.flat, source=(RANK + 1) % 3, tag=tag)]


class Broken(Sum):
    def transfer(self, engine: TransferEngine, tag: int) -> Iterator[Any]:
        if RANK == 1:
            raise ValueError("no transfer to be had")
        yield [engine.comm.Irecv(self.flat, source=(RANK + 1) % 3, tag=tag)]


def case_values_do_not_come() -> dict[str, Any]:
    engine = new_engine(timeout_seconds=0.5)
    begin = time.monotonic()
    silent, next_one = Silent(4, description="the silent one").submit(engine), Sum(5).submit(engine)
    silent.wait(), next_one.wait()
    return {
        "delivered": silent.delivered,
        "next": next_one.delivered,
        "seconds": time.monotonic() - begin,
        "closed": engine.close(timeout_seconds=5.0),
    }


def case_transfer_raises() -> dict[str, Any]:
    engine = new_engine(timeout_seconds=0.5)
    broken = Broken(6, description="the broken one").submit(engine).wait()
    return {"delivered": broken.delivered, "closed": engine.close(timeout_seconds=5.0)}


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    try:
        return "", str(function())
    except (LargeBatchError, ValueError) as error:
        return type(error).__name__, str(error)


def case_exchange() -> dict[str, Any]:
    comm = WORLD.Dup()
    small = [
        exchange(MPI, comm, {"rank": RANK, "turn": turn}, timeout_seconds=10.0)
        for turn in range(50)
    ]
    longest = "x" * (16 * 1024 - 2) if RANK == 1 else "y"  # two are the quotes
    sizes = [len(text) for text in exchange(MPI, comm, longest, timeout_seconds=10.0)]
    too_long = error_of(lambda: exchange(MPI, comm, longest + "x" * 16_384, timeout_seconds=10.0))
    names = exchange(MPI, comm, f'ä\n"{RANK}', timeout_seconds=10.0)
    return {"small": small, "sizes": sizes, "too long": too_long, "names": names}


def case_exchange_without_one() -> dict[str, Any]:
    comm = WORLD.Dup()
    if RANK == 1:
        return {}
    begin = time.monotonic()
    error = error_of(lambda: exchange(MPI, comm, RANK, timeout_seconds=0.5))
    return {"error": error, "seconds": time.monotonic() - begin}


def main() -> None:
    results = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            print(f"rank {RANK}: {name}", flush=True)
            results[name] = case()
            WORLD.Barrier()
    save(sys.argv[1], RANK, results)
    WORLD.Barrier()
    WORLD.Abort(0)  # some engines have left requests behind, with which MPI cannot be finalized


main()
