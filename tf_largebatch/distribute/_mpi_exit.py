"""How a process leaves MPI: together with the others or, if it cannot wait, ending them.

`MPI_Finalize` waits for all ranks without end, so that a rank that ended with an error would hang,
and the others with it. A rank that leaves without it is one that crashed: its launcher kills the
others at once, before they can say anything. So all wait for one another first, with a deadline:
short after an error, of which the others hear meanwhile.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import time
from collections.abc import Callable
from typing import Any

from tf_largebatch.core.topology import ClusterTopology
from tf_largebatch.distribute._last_words import at_exit, how_it_ended, must_be_told
from tf_largebatch.distribute._mpi_witness import Witness

# For the others to notice (see `_progress.py`), or, where they know, to say so.
_GRACE_SECONDS = 10.0
_SHORT_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.01
_CLOSE_SECONDS = 1.0
_STANDARD_ERROR = 2


class MpiExit:
    """The end of MPI in this process, at its exit. Args as of `of`."""

    _only: MpiExit | None = None

    def __init__(self, mpi: Any, timeout_seconds: float) -> None:
        self._mpi = mpi
        self._timeout_seconds = timeout_seconds
        self._comm: Any = mpi.COMM_WORLD
        self._name = f"rank {mpi.COMM_WORLD.rank}"
        self._close: Callable[..., bool] = lambda *, timeout_seconds: True
        self._witness: Witness | None = None
        at_exit(self._leave)

    @classmethod
    def of(cls, mpi: Any, *, timeout_seconds: float) -> MpiExit:
        """That of this process, which is registered once.

        Args:
            mpi: `mpi4py.MPI`.
            timeout_seconds: how long to wait, where this process ends without an error, for ranks
                that still run.
        """
        cls._only = cls._only or cls(mpi, timeout_seconds)
        return cls._only

    def joined(self, topology: ClusterTopology, comm: Any, close: Callable[..., bool]) -> None:
        """From now on all ranks wait in `comm`, and `close` ends whatever uses MPI here."""
        if self._witness is not None:  # of a strategy that was not to be
            self._witness.dismiss()
            self._close(timeout_seconds=_CLOSE_SECONDS)
        self._name = f"worker {topology.rank} at {topology.address}"
        self._comm, self._close = comm, close
        self._witness = Witness(self._name, topology.addresses)

    def _leave(self) -> None:
        if self._mpi.Is_finalized():  # by the program
            if self._witness is not None:
                self._witness.dismiss()
            return
        error = getattr(sys, "last_value", None)
        seconds = self._timeout_seconds
        if error is not None:
            seconds = _GRACE_SECONDS if must_be_told(error) else _SHORT_GRACE_SECONDS
        if self._close(timeout_seconds=_CLOSE_SECONDS) and self._all_leave(seconds):
            self._finalize()
            if self._witness is not None:
                self._witness.dismiss()
            return
        text = (
            f"tf_largebatch: {self._name} has waited {seconds:g} s for the other ranks to end as "
            f"well, and ends them now. It has ended {how_it_ended(error)}"
        )
        if self._witness is not None:
            self._witness.speak_for_all(text)
        else:
            print(text, file=sys.stderr, flush=True)
        self._mpi.COMM_WORLD.Abort(1)

    def _finalize(self) -> None:
        """Ends MPI, or this process: buckets that nobody waits for may still be under way."""
        faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True, file=_STANDARD_ERROR)
        self._mpi.Finalize()
        faulthandler.cancel_dump_traceback_later()

    def _all_leave(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with contextlib.suppress(self._mpi.Exception):  # a rank is gone
            request = self._comm.Ibarrier()
            while not request.Test():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
            return True
        return False
