"""Memory bandwidth monitoring through resctrl: bytes of each L3 group since boot.

Files: Documentation/filesystems/resctrl.rst. They count for the whole machine, without DMA by devices. On AMD the
hardware has fewer counters than groups may want, and then files say words instead of numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.counters.base import ROOT, CannotCount, Counter, Patience
from cpuchat.hardware.sysfs import entries, read_text
from cpuchat.telemetry.machine import Bandwidth

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

MOUNT = "sys/fs/resctrl"
_MOUNT_IT = "`sudo mount -t resctrl resctrl /sys/fs/resctrl`"
_WORDS = ("Unavailable", "Unassigned", "Error")
_FAILURES = 10


class MemoryBandwidthMonitoring(Counter[Bandwidth]):
    """Reads `mbm_total_bytes` of every L3 group, over all control groups."""

    name = "mbm"

    def __init__(self, topology: Topology, root: Path = ROOT) -> None:
        mount = root / MOUNT
        flags = topology.flags
        if flags and "cqm_mbm_total" not in flags:
            raise CannotCount("this CPU or virtual machine has no memory bandwidth monitoring")
        if not (mount / "info").is_dir():
            raise CannotCount("resctrl is not mounted", _MOUNT_IT)
        self._mount = mount
        numbers = _files(mount).keys()
        if not numbers:
            raise CannotCount("resctrl has no monitoring groups")
        # resctrl numbers L3 groups as the caches do; without those numbers only the sum can be told.
        order = [group.id for group in topology.l3_groups]
        self._order = [number for number in order if number is not None] if set(order) == numbers else []
        self._last: dict[int, int] = {}
        self._patience = Patience(_FAILURES)
        self._counts()

    def _counts(self) -> dict[int, int]:
        """Return bytes by L3 group number, ascending. Raises CannotCount: a file holds no number."""
        sums: dict[int, int] = {}
        for number, files in sorted(_files(self._mount).items()):  # control groups come and go
            texts = [read_text(file) for file in files]
            wrong = next((text for text in texts if not text.isdigit() or len(text) > 20), None)
            if wrong is not None:
                raise _explained(wrong)
            sums[number] = sum(map(int, texts))
        if not sums:
            raise CannotCount("resctrl was unmounted", _MOUNT_IT)
        return sums

    def sample(self, now: float) -> Bandwidth | None:
        seconds, before = self._elapsed(now), self._last
        # A counter that was lent to another group comes back, from zero.
        counts = self._last = self._patience.read(self._counts, CannotCount) or {}
        grown = {number: count - before.get(number, count) for number, count in counts.items()}
        if seconds is None or not counts or counts.keys() != before.keys() or min(grown.values()) < 0:
            return None
        per_l3 = tuple(grown[number] / seconds for number in self._order)
        return Bandwidth(sum(grown.values()) / seconds, self.name, self.scope, per_l3=per_l3)


def _files(mount: Path) -> dict[int, list[Path]]:
    """Return the files of each L3 group: a control group's count has its monitoring groups in it, but no others."""
    files: dict[int, list[Path]] = {}
    for folder in sorted(entries(mount, "mon_data/mon_L3_*") + entries(mount, "*/mon_data/mon_L3_*")):
        number = folder.name.rpartition("_")[2]
        if number.isdigit() and (folder / "mbm_total_bytes").exists():
            files.setdefault(int(number), []).append(folder / "mbm_total_bytes")
    return files


def _explained(text: str) -> CannotCount:
    if not text:
        return CannotCount("its files are not readable", "`sudo chmod -R a+rX /sys/fs/resctrl/mon_data`")
    word = text if text in _WORDS else "an unknown value"
    how = {
        "Unavailable": "stop other monitoring such as pqos; the CPU has few counters",
        "Unassigned": "`echo default | sudo tee /sys/fs/resctrl/info/L3_MON/mbm_assign_mode`",
    }.get(word, "")
    return CannotCount(f"the counter reports {word}", how)
