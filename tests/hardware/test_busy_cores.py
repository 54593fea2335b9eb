"""Tests how many cores are busy, on a simulated machine and on this one."""

from __future__ import annotations

from pathlib import Path

from cpuchat.hardware.placement.cores import BusyCores
from tests.hardware.knob_files import write


def test_cores_that_were_busy_since_the_last_look(tmp_path: Path) -> None:
    first = "cpu 1 1 1 1 1 1 1 1 0 0\ncpu0 100 0 0 900 0 0 0 0 50 0\ncpu1 0 0 0 1000 0 0 0 0 0 0\ncpu3 5 0 0 5 0 0 0 0"
    then = "cpu 1 1 1 1 1 1 1 1 0 0\ncpu0 150 20 10 910 10 0 0 0 90 0\ncpu1 10 0 0 1060 20 0 0 10 0 0"
    busy = BusyCores(write(tmp_path, {"proc/stat": first}))
    assert busy.since_last({0, 1}) is None
    write(tmp_path, {"proc/stat": then})
    assert busy.since_last({0, 1}) == 0.8 + 0.2
    write(tmp_path, {"proc/stat": first})
    assert busy.since_last({2}) == 0
