"""Tests disks that are, or get, full: by the limit of a process on the size of its files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import DiskFull
from cpuchat.models.downloads.hf_cache import check_space
from cpuchat.models.downloads.state import Download
from tests.models.downloads.conftest import CONTENT, Site

pytestmark = pytest.mark.slow


@contextmanager
def child(site: Site, before: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the download process in a shell after the commands `before`."""
    shell = ["sh", "-c", f'{before} && exec "$@"', "sh"]
    command = [*shell, sys.executable, "-m", "cpuchat.models.downloads.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(msgspec.json.encode(Download(order=site.order())) + b"\n")
        process.stdin.flush()  # and left open: its end means "stop"
        yield process


def test_room_is_looked_for_before_anything_is_asked(site: Site, tmp_path: Path) -> None:
    huge = tmp_path / "huge.gguf"
    with huge.open("wb") as stream:
        stream.truncate(shutil.disk_usage(tmp_path).free + 1_000_000_000_000)
    site.put({"huge.gguf": huge})
    with pytest.raises(DiskFull, match="GB free"):
        site.fetch()
    assert site.hub.requests == []


def test_room_that_other_downloads_need_is_not_free(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path / "not/there/yet", free // 2, 0)
    with pytest.raises(DiskFull, match="other downloads"):
        check_space(tmp_path, free // 2, free // 2 + 1_000_000_000)


def test_after_room_was_made_it_goes_on(site: Site) -> None:
    limit = 512 * 1024
    with child(site, f"ulimit -f {limit // 512}") as process:
        report = msgspec.json.decode(process.stdout.readlines()[-1], type=Download)
    assert (report.state, report.code) == ("failed", "disk_full")
    assert "too large for the file system" in report.message
    assert report.done == site.part().stat().st_size == limit
    assert site.fetch().read_bytes() == CONTENT
    assert site.asked()[-1] == f"bytes={limit}-"
