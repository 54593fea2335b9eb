"""The read probe, which is the engine's library, and a read kernel of one stream, on the same cores in turn.

All pin one thread per core, read memory of the same size in huge pages, and count in windows of the same length; the
best window of each run is compared, as the probe reports it. Needs gcc. The library reads several streams: it may be
faster than the kernel, and a model must not be faster than it, which `kernels.py` measures.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from common import HERE, WORK, MeasureError, Row, Target, alternate, arguments, machine, report, run_main

from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.peak import buffer_bytes, measure

ROUNDS = 16
SECONDS = 0.3
WINDOWS = 3


def build() -> str:
    """Compile the kernel for this CPU; returns the program."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise MeasureError("there is no C compiler; install gcc")
    WORK.mkdir(exist_ok=True)
    program = WORK / "read_kernel"
    command = [compiler, "-O3", "-march=native", "-pthread", "-o", str(program), str(HERE / "read_kernel.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MeasureError(f"the kernel was not compiled: {done.stderr.strip()}")
    return str(program)


def compiled(program: str, cpus: Sequence[int], seconds: float) -> float:
    """GB/s of the compiled kernel: its best window."""
    command = [program, ",".join(map(str, cpus)), str(buffer_bytes(cpus)), str(seconds), str(WINDOWS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MeasureError(f"the compiled kernel failed: {done.stderr.strip() or done.returncode}")
    return max(map(float, done.stdout.split())) / 1e9


def ours(cpus: Sequence[int], seconds: float) -> float:
    """GB/s of the probe: its best window."""
    return measure(cpus, seconds=seconds, rounds=WINDOWS).bytes_per_s / 1e9


def main() -> None:
    given = arguments(__doc__)
    where = machine()
    rounds, seconds = (1, 0.1) if given.quick else (given.rounds or ROUNDS, SECONDS)
    program = build()
    every = choose_cores(read_topology()).cpus
    rows = [
        one
        for name, cpus in {"1 core": every[:1], f"{len(every)} cores": every}.items()
        for one in measured(f"read bandwidth, {name}", program, cpus, rounds, seconds)
    ]
    remarks = [
        f"The best of {WINDOWS} windows of {seconds:g} s per run, {buffer_bytes(every) >> 20} MiB per core; "
        "the baseline is benchmarks/read_kernel.c, compiled with -O3 -march=native.",
    ]
    report("probe", where, rows, quick=given.quick, remarks=remarks)


def measured(what: str, program: str, cpus: Sequence[int], rounds: int, seconds: float) -> list[Row]:
    sides = {
        "library": lambda: ours(cpus, seconds),
        "compiled": lambda: compiled(program, cpus, seconds),
    }
    found = alternate(rounds, sides)
    return [Row(what, "GB/s", found["library"], found["compiled"], Target(0.95))]


if __name__ == "__main__":
    run_main(main)
