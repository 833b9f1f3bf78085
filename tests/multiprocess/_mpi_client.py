"""What mpiexec starts as a rank of `workers/mpi_cluster.py`: `_mpi_client.py SOCKET`.

Hands its environment, and its line to mpiexec, to the process that forks the rank, and ends when
the rank does, by its code or 128 and the signal. It is not the rank itself, as importing TensorFlow
would take seconds of each.
"""

import json
import os
import signal
import socket
import sys

# By this mpiexec tells ranks that one has ended; MPI has a handler, which is in the rank itself.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as forker:
    forker.connect("\0" + sys.argv[1])
    line = int(os.environ["PMI_FD"])
    socket.send_fds(forker, [b"{"], [line])  # the first byte of what follows
    forker.sendall(json.dumps(dict(os.environ)).encode()[1:] + b"\n")
    os.close(line)
    code = json.loads(forker.makefile().readline() or "1")
# Of a process that is killed by a signal, mpiexec kills the others at once, whatever its flags say.
sys.exit(code if code >= 0 else 128 - code)
