"""Child processes: commands without the current folder on their path, environments without secrets, and their end.

The launcher of every worker imports this: what takes long to import (asyncio, msgspec) stays out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "TZ", "LANG", "LANGUAGE", "TMPDIR", "TEMP", "TMP",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "__PYVENV_LAUNCHER__",
    "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "PATHEXT", "COMSPEC",
})  # fmt: skip
_PREFIXES = (
    "LC_", "XDG_", "PYTHON", "DYLD_", "MALLOC_", "CPUCHAT_", "GGML_", "LLAMA_", "OMP_", "GOMP_", "KMP_", "OPENBLAS_",
)  # fmt: skip
_TAIL_BYTES = 16_384
_ASSERTION = re.compile(r"CPUCHAT-ABORT: *(.+)")
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")
_VMSTAT = Path("/proc/vmstat")


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter with `-P`: `-m` and `-c` alone put the current folder first on the
    path, where anyone's `queue.py` would be executed."""
    return [sys.executable, "-P", *arguments]


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment for a computing child: what it needs of this process's environment, and `more`.

    These children read strangers' files, so they get the variables of system libraries, Python, llama.cpp and this
    package, and no tokens. Downloads, which need a token and proxies, get the whole environment instead."""
    kept = {
        name: value for name, value in os.environ.items()
        if (upper := name.upper()) in _NAMES
        or (upper.startswith(_PREFIXES) and not any(word in upper for word in _SECRET))
    }  # fmt: skip
    return {**kept, **more}


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to what is left of the process group of a child that leads one."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def stop_job(workers: Collection[int]) -> float:
    """Stop as on Ctrl+Z, and return after how many seconds the shell continued the job.

    The whole process group stops, as when the terminal itself sends the signal: a shell may wait for a parent of ours.
    So do the groups of the `workers`. If nothing could continue the job, the kernel does not stop it."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTSTP, signal.SIGCONT)}
    stopped_at = time.monotonic()
    for pid in workers:
        kill_group(pid, signal.SIGSTOP)
    os.killpg(os.getpgrp(), signal.SIGTSTP)
    for pid in workers:
        kill_group(pid, signal.SIGCONT)
    for number, handler in before.items():
        signal.signal(number, handler)
    return time.monotonic() - stopped_at


def last_output(log: IO[bytes]) -> str:
    """Return the end of what a child wrote to `log`. Raises OSError."""
    log.seek(max(log.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
    return log.read(_TAIL_BYTES).decode("utf-8", "replace").strip()


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for memory since it started; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return int(_VMSTAT.read_text().partition("\noom_kill ")[2].partition("\n")[0])
    return 0


_known_oom_kills = _oom_kills()  # when this process began, or a child was killed last


def exit_reason(status: int, output: str, known: str = "") -> str:
    """Return why a child ended: llama.cpp's assertion if `output` has one, else `known`, the signal or the status. The
    OOM killer is named only where the kernel counted a kill of its own since."""
    global _known_oom_kills
    if assertion := _ASSERTION.findall(output):
        return f"assertion failed in llama.cpp: {assertion[-1].strip()}"
    if known:
        return known
    if status == -signal.SIGKILL:
        before, _known_oom_kills = _known_oom_kills, _oom_kills()
        return f"killed by SIGKILL{', probably by the OOM killer' if _known_oom_kills > before else ''}"
    if status < 0:
        return f"killed by {signal_name(-status)}"
    return f"exit status {status}"


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15; `signal 40` for one without a name, as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@functools.cache
def starter() -> ThreadPoolExecutor:
    """Return the one thread of this process that starts what computes: workers and measurements.

    On Linux niceness belongs to a thread and a child inherits it from the one that starts it. The user interface
    lowers itself once it runs; what it starts after that must not be lowered with it, so this thread is made before."""
    from concurrent.futures import ThreadPoolExecutor

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")
    thread.submit(lambda: None)  # which has the thread made now
    return thread


T = TypeVar("T")


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, so many seconds at most; returns whether it is set."""
    import asyncio

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` in a separate daemon thread; returns or raises what it does.

    Unlike an executor's, the thread does not delay the exit: when cancelled, this returns at once, and the program
    can exit meanwhile. The function goes on to its end: an exception from outside could leave a lock held for ever."""
    import asyncio  # 50 ms
    from concurrent.futures import Future

    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # else it could be cancelled, and would refuse its result

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="daemon-call", daemon=True).start()
    return await asyncio.wrap_future(future)
