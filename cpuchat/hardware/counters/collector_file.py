"""The file in which the collector (hardware.collector), or another privileged program, reports figures.

Of any program, `{"bw": 212.5, "util": 46.1, "ts": 1700000000.0}` will do: gigabytes per second, percent of what the
memory carries, and seconds since 1970. The collector's own file holds more, under names of their own; see `content_of`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cpuchat.hardware.counters.base import ROOT, UNIT_COMMAND, CannotCount, Counter, Patience
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power

DEFAULT = Path("/run/cpuchat/bandwidth.json")
VARIABLE = "CPUCHAT_BANDWIDTH_FILE"
"""Environment variable that names another file."""
FRESH_SECONDS = 5.0
_LARGEST_FILE = 1 << 16
_MOST_BYTES_PER_S, _MOST_WATTS = 1e15, 1e6
"""Upper limits of plausible figures."""
_MOST_GROUPS = 1024
_INSTALL = f"`{UNIT_COMMAND}` prints how to install it"


def place(root: Path = ROOT) -> Path:
    """Return the file that is read."""
    other = os.environ.get(VARIABLE)
    return Path(other) if other and root == ROOT else root / DEFAULT.relative_to("/")


def content_of(sample: MachineSample, ts: float, theoretical: float | None = None) -> dict[str, Any]:
    """Return the content that the collector writes; `bytes_per_s`, `read`, `write` and `per_l3` are in bytes per
    second. `ts`: seconds since 1970. `theoretical`: what the memory carries, in bytes per second, for `util`.
    """
    bandwidth, power = sample.bandwidth, sample.power
    content: dict[str, Any] = {"version": 1, "ts": round(ts, 3), "bw": None, "util": None}
    if bandwidth is not None:
        content["bw"] = round(bandwidth.total / 1e9, 3)
        content["util"] = round(100 * bandwidth.total / theoretical, 1) if theoretical else None
        content["source"] = bandwidth.source
        content["bytes_per_s"] = round(bandwidth.total)
        content["read"] = None if bandwidth.read is None else round(bandwidth.read)
        content["write"] = None if bandwidth.write is None else round(bandwidth.write)
        content["per_l3"] = [round(value) for value in bandwidth.per_l3]
    else:
        content["no_bandwidth"] = sample.no_bandwidth
    if power is not None:
        content |= {"watts": round(power.watts, 2), "joules": round(power.joules, 3), "power_source": power.source}
    else:
        content["no_power"] = sample.no_power
    return content


def write(path: Path, sample: MachineSample, ts: float, theoretical: float | None = None) -> None:
    """Replace the file in one step, readable by everyone; arguments as of `content_of`. Raises OSError."""
    # Not `files.write_atomically`, which needs msgspec: the service has the standard library and nothing else.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("x", encoding="utf-8") as file:  # "x" never follows a link that another user placed there
            os.fchmod(file.fileno(), 0o644)  # whatever the umask
            file.write(json.dumps(content_of(sample, ts, theoretical)) + "\n")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


V = TypeVar("V", Bandwidth, Power)


class _File(Counter[V]):
    """Reads the file's content at each sample; rejects stale content."""

    def __init__(self, root: Path, kernel: Kernel | None) -> None:
        self._path = place(root)
        self._kernel = kernel or Kernel()
        self._patience = Patience()

    def _content(self) -> Mapping[str, Any]:
        """Return the content. Raises CannotCount if the file is missing, stale or malformed."""
        try:
            text, changed = _read(self._path)
        except PermissionError:
            raise CannotCount(f"{self._path} is not readable", f"`sudo chmod a+r {self._path}`") from None
        except OSError:
            raise CannotCount("not running", _INSTALL) from None
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise CannotCount(f"{self._path} is malformed", _INSTALL)
        written = _number(content.get("ts"))
        age = self._kernel.wall() - (changed if written is None else written)
        if not -FRESH_SECONDS <= age <= FRESH_SECONDS:
            raise CannotCount("stopped: its figures are stale", "`sudo systemctl restart cpuchat-bwd`")
        return content

    def _patiently(self, found: Callable[[Mapping[str, Any]], V]) -> V | None:
        """Apply `found` to the content; returns None for the first few failures, as while the collector restarts."""
        return self._patience.read(lambda: found(self._content()), CannotCount)


class CollectorFile(_File[Bandwidth]):
    """Memory traffic as the collector sees it."""

    def __init__(self, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        super().__init__(root, kernel)
        self.name = _bandwidth(self._content()).source

    def sample(self, now: float) -> Bandwidth | None:
        return self._patiently(_bandwidth)


class CollectedPower(_File[Power]):
    """Power as the collector sees it; joules since this was opened."""

    def __init__(self, root: Path = ROOT, kernel: Kernel | None = None) -> None:
        super().__init__(root, kernel)
        found = _power(self._content())
        self.name = found.source
        self._last = found.joules
        self._joules = 0.0

    def sample(self, now: float) -> Power | None:
        found = self._patiently(_power)
        if found is None:
            return None
        self._joules += max(found.joules - self._last, 0.0)  # it counts from zero when it starts again
        self._last = found.joules
        return Power(found.watts, self._joules, found.source)


def _read(path: Path) -> tuple[str, float]:
    """(the text, when it was written). Raises OSError, also for a pipe or a device, which reading could block on."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a file")
        return os.read(fd, _LARGEST_FILE).decode("utf-8", "replace"), status.st_mtime
    finally:
        os.close(fd)


def _number(value: object, most: float = math.inf) -> float | None:
    """Return a finite number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and 0 <= number <= most else None


def _rate(value: object, unit: float = 1.0) -> float | None:
    """Return bytes per second of a figure in `unit` bytes per second."""
    number = _number(value, _MOST_BYTES_PER_S / unit)
    return None if number is None else number * unit


def _words(value: object) -> str:
    """Return a short text for a label, without control characters."""
    return "".join(c for c in value[:200] if c.isprintable()) if isinstance(value, str) else ""


def _source(value: object) -> str:
    name = _words(value)[:24]
    return f"{name} via collector" if name else "collector"


def _bandwidth(content: Mapping[str, Any]) -> Bandwidth:
    """Return the figure. Raises CannotCount if the content has none."""
    total = _rate(content.get("bytes_per_s"))
    if total is None:
        total = _rate(content.get("bw"), 1e9)
    if total is None:
        raise CannotCount(_words(content.get("no_bandwidth")) or "no bandwidth")
    groups = content.get("per_l3")
    values = [_rate(value) for value in groups] if isinstance(groups, list) and len(groups) <= _MOST_GROUPS else []
    per_l3 = tuple(value for value in values if value is not None)
    return Bandwidth(
        total,
        _source(content.get("source")),
        "machine",
        _rate(content.get("read")),
        _rate(content.get("write")),
        per_l3 if len(per_l3) == len(values) else (),
    )


def _power(content: Mapping[str, Any]) -> Power:
    """Return the figure. Raises CannotCount if the content has none."""
    watts, joules = _number(content.get("watts"), _MOST_WATTS), _number(content.get("joules"))
    if watts is None or joules is None:
        raise CannotCount(_words(content.get("no_power")) or "no power")
    return Power(watts, joules, _source(content.get("power_source")))
