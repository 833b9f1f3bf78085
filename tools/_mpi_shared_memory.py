"""What MPI leaves in /dev/shm when its ranks do not end by MPI_Finalize.

MPICH keeps a file of about 1 MiB a rank there, Open MPI one of 16 MiB a rank, which only
MPI_Finalize removes. A container often has 64 MiB for all of them, so that after some restarts
none could start any more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

_FILES = re.compile(r"(/dev/shm/(?:mpich_shm_|sm_segment\.)\S+)$", re.MULTILINE)


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """The files of MPI that these processes use now, by the names that they still have."""
    files: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or this is no Linux
            files |= {Path(name) for name in _FILES.findall(Path(f"/proc/{pid}/maps").read_text())}
    return files
