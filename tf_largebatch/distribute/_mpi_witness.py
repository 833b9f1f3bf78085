"""Says which rank ended first without a word, though its launcher kills the others at once.

A rank that is killed, as by the kernel for lack of memory, can say nothing, and `mpiexec` leaves
the others no time to find out: it kills them, and shows a process id. So each rank has a witness, a
shell that waits in a session of its own for the end of a pipe from it. Of those of a host the first
one speaks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_GOODBYE, _TIDY = b"goodbye\n", b"tidy\n"
# $1: the file whose maker speaks (noclobber: the first one alone can make it), $2: what it says.
_SCRIPT = """
read -r word
[ "$word" = goodbye ] && exit
if [ "$word" != tidy ]; then
    set -C
    { : > "$1"; } 2> /dev/null || exit
    echo "$2" >&2
fi
exec 2>&-  # whoever started the worker waits for the end of its output
sleep 10
rm -f "$1"
"""


class Witness:
    """Watches over this process until it is dismissed.

    Args:
        name: of this worker.
        addresses: of all workers, which tell one job from another.
    """

    def __init__(self, name: str, addresses: Sequence[str]) -> None:
        job = hashlib.sha256(" ".join(addresses).encode()).hexdigest()[:16]
        self._claim = Path(tempfile.gettempdir()) / f"tf_largebatch_end_of_{job}"
        text = (
            f"tf_largebatch: {name} (process {os.getpid()} on {socket.gethostname()}) is the first "
            "worker of this host to have ended without a word, as one that was killed: by the "
            "kernel for lack of memory (see dmesg), by a signal, or by what started it, because a "
            "worker on another host ended before."
        )
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", str(self._claim), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what kills this process kills its session
        )

    def dismiss(self) -> None:
        """This process ends in good order."""
        self._end(_GOODBYE)

    def speak_for_all(self, text: str) -> None:
        """Says why this process ends the others, in place of their witnesses on this host."""
        with contextlib.suppress(OSError):
            self._claim.touch()
        print(text, file=sys.stderr, flush=True)
        self._end(_TIDY)

    def _end(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(word)
            self._process.stdin.close()
