"""Tells whether other programs compute: /proc/stat (proc_stat(5)); elsewhere psutil."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from cpuchat.hardware.cgroups import read_text

ROOT = Path("/")
MAX_BUSY_CORES = 0.5
"""Cores on which other programs may run beside a measurement; a program that computes takes a whole one."""
_N_TIMES = 8  # user, nice, system, idle, iowait, irq, softirq, steal; what follows is part of them
_IDLE = (3, 4)


class BusyCores:
    """Follows how many cores are busy, by all programs together. `root` replaces `/` in tests."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._last: dict[int, tuple[float, float]] = {}

    def since_last(self, cpus: Collection[int]) -> float | None:
        """Return how many of `cpus` were busy on average since the last call; None at the first one.

        0 where the system does not tell.
        """
        last, self._last = self._last, self._times()
        shares = [_share(last[cpu], now) for cpu, now in self._last.items() if cpu in cpus and cpu in last]
        return None if self._last and not last else sum(shares)

    def _times(self) -> dict[int, tuple[float, float]]:
        """Return (busy, all) of each logical CPU, in units of time since the system started."""
        found: dict[int, tuple[float, float]] = {}
        for line in read_text(self._root / "proc/stat").splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdecimal():
                times = [int(number) for number in numbers[:_N_TIMES]]
                found[int(name[3:])] = (sum(times) - sum(times[n] for n in _IDLE if n < len(times)), sum(times))
        return found or _times_elsewhere()


def _times_elsewhere() -> dict[int, tuple[float, float]]:
    import psutil

    times = psutil.cpu_times(percpu=True)
    return {cpu: (sum(one) - one.idle, sum(one)) for cpu, one in enumerate(times)}


def _share(last: tuple[float, float], now: tuple[float, float]) -> float:
    busy, total = now[0] - last[0], now[1] - last[1]
    return busy / total if total > 0 else 0.0
