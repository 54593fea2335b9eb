"""The CPU that a test process loads models on where their threads are not what it tests."""

from __future__ import annotations

import os
import resource
from typing import Final

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.sysfs import own_cpus

_PROCESS: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

ONE_CPU: Final = (own_cpus()[_PROCESS % len(own_cpus())],)
"""Threads of one model spin while they wait for each other, beside other tests for a whole time slice; and all test
processes on the same CPU would leave the others idle."""

ON_ONE_CPU: Final = PlacementSpec(cores=str(ONE_CPU[0]))


def no_stacks() -> None:
    """Let this process start no more threads: they take the limit at the start of the process for their stacks."""
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 47, resource.RLIM_INFINITY))
