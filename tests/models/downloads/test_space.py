"""Tests disks that are, or get, full: a real small file system where one may be mounted, the device that is always
full, and the limit of a process on the size of its files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import DiskFull, DownloadFailed
from cpuchat.models.downloads.hf_cache import check_space, free_bytes
from cpuchat.models.downloads.state import Download
from tests.models.downloads.conftest import CONTENT, NAME, REPO, Site
from tests.support.hub_server import Fault, Gate

pytestmark = pytest.mark.slow

_MOUNTED = ["unshare", "--map-root-user", "--mount"]
"""A process that may mount what only it sees."""


def may_mount() -> bool:
    """Return whether mounts are possible: some systems forbid namespaces to users, and containers even to root."""
    command = [*_MOUNTED, "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


@contextmanager
def child(site: Site, before: str = "true", *, around: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Start the download process in a shell after the commands `before`."""
    shell = ["sh", "-c", f'{before} && exec "$@"', "sh"]
    command = [*around, *shell, sys.executable, "-m", "cpuchat.models.downloads.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(Download(order=site.order())) + b"\n")
        process.stdin.flush()  # and left open: its end means "stop"
        yield process


def last_report(process: subprocess.Popen[bytes]) -> Download:
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readlines()[-1], type=Download)


def test_room_is_looked_for_before_anything_is_asked(site: Site, tmp_path: Path) -> None:
    huge = tmp_path / "huge.gguf"
    with huge.open("wb") as stream:
        stream.truncate(shutil.disk_usage(tmp_path).free + 1_000_000_000_000)
    site.put({"huge.gguf": huge})
    with pytest.raises(DiskFull, match="GB free"):
        site.fetch()
    assert site.hub.requests == []


def test_what_is_here_already_needs_no_room(site: Site) -> None:
    site.fetch()
    site.fetch(msgspec.structs.replace(site.order(), reserved=free_bytes(site.cache)))


def test_room_that_other_downloads_need_is_not_free(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not/there/yet")
    check_space(tmp_path / "not/there/yet", free // 2, 0)
    with pytest.raises(DiskFull, match="other downloads"):
        check_space(tmp_path, free // 2, free // 2 + 1_000_000_000)


def test_a_cache_that_cannot_be_looked_at_is_an_error_that_says_so(site: Site) -> None:
    site.cache = site.cache / ("long" * 100)
    with pytest.raises(DownloadFailed, match="too long"):
        site.fetch()


def test_a_full_disk_ends_it(site: Site) -> None:
    """The system's own device that is always full takes the place of the part."""
    site.blobs.mkdir(parents=True)
    site.part().symlink_to("/dev/full")
    with child(site) as process:
        report = last_report(process)
    assert (report.state, report.code, report.done) == ("failed", "disk_full", 0)
    assert "Free some space" in report.hint


def a_small_file_system(site: Site, gate: Gate) -> Download:
    """Mount 2 MiB that only the download sees and that something else fills meanwhile."""
    with child(site, f"mount -t tmpfs -o size=2m none '{site.cache}'", around=_MOUNTED) as process:
        gate.wait()
        inside = Path(f"/proc/{process.pid}/root{site.cache}")
        free = shutil.disk_usage(inside).free
        (inside / "something else").write_bytes(bytes(free - 600_000))
        gate.open()
        return last_report(process)


def a_limit_on_the_size_of_files(site: Site, gate: Gate) -> Download:
    gate.open()
    with child(site, "ulimit -f 1000") as process:
        return last_report(process)


@pytest.mark.parametrize(
    "fill", [a_limit_on_the_size_of_files, *([a_small_file_system] if may_mount() else [])]
)  # fmt: skip
def test_where_no_more_can_be_written_it_ends_with_what_arrived(
    site: Site, fill: Callable[[Site, Gate], Download]
) -> None:
    site.cache.mkdir(parents=True)
    gate = Gate(at=400_000)
    site.hub.fault(REPO, NAME, Fault(gate=gate))
    report = fill(site, gate)
    assert (report.state, report.code) == ("failed", "disk_full")
    assert report.message and report.hint
    assert gate.at < report.done < len(CONTENT)


def test_after_room_was_made_it_goes_on(site: Site) -> None:
    limit = 512 * 1024
    with child(site, f"ulimit -f {limit // 512}") as process:
        report = last_report(process)
    assert "too large for the file system" in report.message
    assert report.done == site.part().stat().st_size == limit
    assert site.fetch().read_bytes() == CONTENT
    assert site.asked()[-1] == f"bytes={limit}-"
