"""Finds the control groups of this process (cgroup v1 and v2) and reads their files.

Kernel documentation: admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def read_text(path: Path) -> str:
    """Return the file's text without surrounding space; "" when it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the file's one number; None when it is absent or says something else ("max")."""
    text = read_text(path)
    return int(text) if text.removeprefix("-").isdigit() and len(text) <= 20 else None


class Cgroups:
    """Folders of this process's groups, innermost first, up to the root of each hierarchy.

    In a container /proc/self/cgroup often names the path on the host while /sys/fs/cgroup shows the group itself
    as the root: folders that don't exist are left out, the mount point is always in.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.mount = root / "sys/fs/cgroup"
        self.entries: list[tuple[list[str], str]] = []
        for line in read_text(root / "proc/self/cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, colon, path = rest.partition(":")
            if colon:
                self.entries.append((controllers.split(",") if controllers else [], path))

    @staticmethod
    def _upwards(mount: Path, path: str) -> Iterator[Path]:
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for length in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:length])
            if folder.is_dir():
                yield folder

    def v2(self) -> list[Path]:
        """Return folders of the unified hierarchy (also when it is mounted beside version 1)."""
        mount = self.mount if (self.mount / "cgroup.controllers").exists() else self.mount / "unified"
        return [folder for names, path in self.entries if not names for folder in self._upwards(mount, path)]

    def v1(self, controller: str) -> list[Path]:
        """Return folders of one version 1 controller, such as "memory"."""
        folders: list[Path] = []
        for names, path in self.entries:
            if controller in names:
                mount = next((m for n in (",".join(names), controller) if (m := self.mount / n).is_dir()), None)
                folders += self._upwards(mount, path) if mount else ()
        return folders


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the cgroup CPU quota in CPUs (2.5 = two and a half); None when unlimited.

    The smallest limit on the way from this process's group to the root: `cpu.max` (v2) or
    `cpu.cfs_quota_us` / `cpu.cfs_period_us` (v1).
    """
    quotas: list[float] = []
    groups = Cgroups(root)
    for folder in groups.v2():
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if _is_number(quota) and _is_number(period) and int(period) > 0:
            quotas.append(int(quota) / int(period))
    for folder in groups.v1("cpu"):
        quota_us, period_us = read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us is not None and period_us > 0:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def _is_number(text: str) -> bool:
    return text.isdigit() and len(text) <= 20
