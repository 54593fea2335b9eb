"""Kernel calls that counters make, in one object that tests replace by a simulated machine."""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}


def perf_event_open(attr: bytes, pid: int, cpu: int, flags: int) -> int:
    """Call perf_event_open(2), for which the C library has no function; returns a file descriptor.

    Raises:
        OSError: refused; ENOSYS also on platforms without this system call.
    """
    number = _SYSTEM_CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attr, len(attr))
    whole = ctypes.c_long
    fd = libc.syscall(whole(number), buffer, whole(pid), whole(cpu), whole(-1), ctypes.c_ulong(flags))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


def _ioctl(fd: int, request: int, buffer: bytearray) -> None:
    import fcntl

    fcntl.ioctl(fd, request, buffer, True)


def _open_for_reading(path: Path) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))


@dataclass(frozen=True)
class Kernel:
    """Calls into the system; every one raises OSError when refused.

    `perf_event_open(attr, pid, cpu, flags)` returns a file descriptor. `ioctl` fills its buffer. `wall` is the clock
    that time stamps in files are of, in seconds since 1970.
    """

    perf_event_open: Callable[[bytes, int, int, int], int] = perf_event_open
    open: Callable[[Path], int] = _open_for_reading
    ioctl: Callable[[int, int, bytearray], None] = _ioctl
    read: Callable[[int, int], bytes] = os.read
    close: Callable[[int], None] = os.close
    wall: Callable[[], float] = time.time
