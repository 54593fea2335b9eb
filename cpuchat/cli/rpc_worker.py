"""`cpuchat serve --rpc-worker`: lends this machine's memory and cores to a model that runs on another one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from cpuchat.errors import UsageError
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.cli.terminal import Terminal
    from cpuchat.settings import Settings


def serve_worker(host: str, port: int, chosen: Settings, terminal: Terminal) -> int:
    """Become llama.cpp's rpc-server, on the cores and under the memory policy of the settings; returns only where a
    process cannot do that.

    Raises:
        EngineMissing: there is no rpc-server.
        UsageError: a placement that this machine does not allow.
    """
    from cpuchat.backend.placing import place_here
    from cpuchat.children import child_environment
    from cpuchat.hardware.numa.launch import launch_command
    from cpuchat.hardware.placement.placement import PlacementSpec
    from cpuchat.rpc_workers import find_worker_program
    from cpuchat.servers import is_loopback

    program, placement = find_worker_program(), place_here(PlacementSpec.of(chosen), with_draft=False)
    if not port:
        raise UsageError("An RPC worker needs a port.", "Other machines name it: --rpc HOST:PORT.")
    if not is_loopback(host):
        terminal.warn(
            "cpuchat: llama.cpp's RPC has neither a key nor encryption: whoever reaches this port can use it. "
            "Listen only inside a network that you trust."
        )
    threads = len(placement.cpus)
    terminal.line(f"RPC worker on {host}:{port}, {units.plural(threads, 'thread')}, memory {placement.memory.words}")
    if sys.platform == "linux" and placement.cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, placement.cpus)
    wanted = [program, "--host", host, "--port", str(port), "--threads", str(threads)]
    command = launch_command(placement.memory.words, wanted)
    if sys.platform == "win32":
        return subprocess.call(command, env=child_environment())
    sys.stdout.flush()
    os.execve(command[0], command, child_environment())
