"""What each of 16 ranks runs: all cases, in groups of all sizes, one by one and several at a time.

Saves, by number of ranks and case: the result's digest and, on a group's first rank, the result;
of both ways.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from typing import Any

from _mpi_alone import save, without_tensorflow

without_tensorflow()

from _mpi_transfer_cases import ROUNDS, WIRE_DTYPES, Case, cases  # noqa: E402

from tf_largebatch.core.topology import ClusterTopology  # noqa: E402
from tf_largebatch.distribute._mpi import load_mpi  # noqa: E402
from tf_largebatch.distribute._mpi_engine import Bucket, TransferEngine  # noqa: E402
from tf_largebatch.distribute._mpi_transfers import (  # noqa: E402
    Transfer,
    all_reduce_by_plan,
    library_all_reduce,
)
from tf_largebatch.distribute._packed_blocks import BlockPool  # noqa: E402

AT_ONCE = 16


def main() -> None:
    mpi = load_mpi(timeout_seconds=60.0)
    world = mpi.COMM_WORLD
    results: dict[int, dict[str, Any]] = {}
    for sizes in ROUNDS:
        edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        own = next((i for i in range(len(sizes)) if edges[i] <= world.rank < edges[i + 1]), None)
        comm = world.Split(mpi.UNDEFINED if own is None else own, world.rank)
        if own is not None:
            results[comm.size] = Group(mpi, comm).run()
        world.Barrier()
    save(sys.argv[1], world.rank, results)
    mpi.Finalize()


class Group:
    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._pool = BlockPool()

    def run(self) -> dict[str, Any]:
        found = cases(self._comm.size)
        return {"directly": self._directly(found), "by the engine": self._by_the_engine(found)}

    def _values(self, case: Case) -> Any:
        return case.values(self._comm.size, self._comm.rank)

    def _transfer(self, case: Case, flat: Any, tag: int) -> Transfer:
        plan = case.plan(self._comm.size)
        if plan is None:
            return library_all_reduce(self._mpi, self._comm, flat)
        return all_reduce_by_plan(
            plan,
            self._comm,
            flat,
            tag=tag,
            pool=self._pool,
            wire_dtype=WIRE_DTYPES[case.wire],
        )

    def _directly(self, found: list[Case]) -> dict[Case, Any]:
        results = {}
        for case in found:
            flat = self._values(case)
            for requests in self._transfer(case, flat, 0):
                while not self._mpi.Request.Testall(requests):
                    os.sched_yield()
            results[case] = self._result(flat)
        return results

    def _by_the_engine(self, found: list[Case]) -> dict[Case, Any]:
        topology = ClusterTopology.from_addresses(
            [f"host:{1 + rank}" for rank in range(self._comm.size)], rank=self._comm.rank
        )
        engine = TransferEngine(
            self._mpi, self._comm, topology, timeout_seconds=60.0, share_cores=True
        )
        # So long that several are under way at any time, so short that memory is reused.
        free = threading.Semaphore(AT_ONCE)
        flats = {case: self._values(case) for case in found}
        errors: list[str | None] = []

        def deliver(error: str | None) -> None:
            errors.append(error)
            free.release()

        for key, (case, flat) in enumerate(flats.items()):
            free.acquire()
            engine.submit(
                Bucket(
                    str(case),
                    key,
                    start=lambda tag, case=case, flat=flat: self._transfer(case, flat, tag),
                    deliver=deliver,
                ),
                linger=key % 5 == 0,
            )
        for _ in range(AT_ONCE):
            free.acquire()
        assert errors == [None] * len(found), errors
        assert engine.close(timeout_seconds=10.0)
        return {case: self._result(flat) for case, flat in flats.items()}

    def _result(self, flat: Any) -> Any:
        digest = hashlib.sha256(flat.tobytes()).hexdigest()
        return digest, flat if self._comm.rank == 0 else None


main()
