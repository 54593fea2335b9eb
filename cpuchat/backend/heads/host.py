"""Hosts a llama-server: `python -m cpuchat.backend.heads.host OPTIONS`, which ends with its standard input.

A server that outlives the app would keep its memory and its cores. So this process stands between: it starts the
llama-server, and ends it when the pipe from the app closes, however the app ended; on Linux the server also ends with
this process. The only line on standard output is the PID of the process that computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from cpuchat.backend.heads.server import ServerOptions, command
from cpuchat.base.decoding import prepared

_ENDING_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; return the exit status of the server."""
    server = msgspec.json.decode(arguments[0], type=prepared(ServerOptions))
    pin(server.cpus)
    return _run(server)


def pin(cpus: tuple[int, ...]) -> None:
    """Let this process and its children run on these CPUs only, where the system can do that.

    llama.cpp ignored its own mask in some releases, and the threads of its HTTP server have none.
    """
    if sys.platform == "linux" and cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def _run(server: ServerOptions) -> int:
    process = subprocess.Popen(
        command(server), stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), preexec_fn=_ending_with_this_process()
    )
    print(process.pid, flush=True)
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    status = process.wait()
    # As the server ended, so that the app can tell a crash from an exit.
    if status < 0:
        with contextlib.suppress(ValueError, OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _ending_with_this_process() -> Callable[[], None] | None:
    """Return what a child calls before it becomes the server; None where a system cannot do that."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    """End the server once the app closes the pipe; not by `sys.stdin`, whose lock Python aborts on when it exits."""
    while os.read(0, 4096):
        pass
    process.terminate()
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
