"""Tests the process of a download: what it says, and what is left when it is ended in every way there is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from cpuchat.models.downloads.state import Download
from tests.models.downloads.conftest import CONTENT, NAME, REPO, Site
from tests.support.hub_server import Fault, Gate

pytestmark = pytest.mark.slow

SIZE = len(CONTENT)


class Child:
    """A running one, started for the site's order."""

    def __init__(self, site: Site, *command: str) -> None:
        command = command or ("-m", "cpuchat.models.downloads.child")
        self.process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.stdin.write(msgspec.json.encode(Download(order=site.order())) + b"\n")
        self.stdin.flush()

    def reports(self) -> list[Download]:
        """Return all remaining reports; the process has ended then."""
        reports = [msgspec.json.decode(line, type=Download) for line in self.stdout]
        self.process.wait()
        return reports


@pytest.fixture
def started(site: Site) -> Iterator[list[Child]]:
    """Yield a list; processes put into it are killed at the end of the test."""
    children: list[Child] = []
    yield children
    for child in children:
        child.process.kill()
        child.process.wait()
        child.stdin.close()
        child.stdout.close()


def held(site: Site, started: list[Child], at: int) -> tuple[Child, Gate]:
    """Return a child that has received everything before byte `at`, and waits for more."""
    gate = Gate(at=at)
    site.hub.fault(REPO, NAME, Fault(gate=gate))
    child = Child(site)
    started.append(child)
    site.wait_for_part(gate)
    return child, gate


def test_it_ends_with_whoever_started_it(site: Site, started: list[Child]) -> None:
    child, _gate = held(site, started, 500_000)
    child.stdin.close()
    assert child.reports()[-1].state == "running"
    assert site.part().stat().st_size == 500_000


SLOW_COPY = """
import pathlib, shutil, time
from cpuchat.models.downloads.child import main
shutil.copyfile = lambda _, copy: (pathlib.Path(copy).write_bytes(b"the beginning"), time.sleep(1000))
main()
"""


@pytest.mark.parametrize("ending", ["SIGTERM", "end of input", "SIGKILL"])
def test_of_a_copy_that_was_not_finished_nothing_stays(
    site: Site, started: list[Child], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    site.fetch()  # its link holds the content, so that another name of it is a copy
    files = site.files
    site.put({NAME: CONTENT, "new.txt": b"new"})
    site.files = files
    monkeypatch.setenv("HF_HUB_DISABLE_SYMLINKS", "1")
    started.append(child := Child(site, "-c", SLOW_COPY))
    copies = site.blobs.parent / "snapshots" / site.commit
    while not (copies.is_dir() and [*copies.iterdir()]):
        assert child.process.poll() is None
        time.sleep(0.01)
    if ending == "end of input":
        child.stdin.close()
    else:
        child.process.send_signal(signal.SIGKILL if ending == "SIGKILL" else signal.SIGTERM)
    child.process.wait()
    if ending == "SIGKILL":  # the next one finds it
        site.fetch()
    assert [path.name for path in copies.iterdir()] == ([NAME] if ending == "SIGKILL" else [])


def test_while_another_has_the_file_it_waits_and_says_so(site: Site, started: list[Child]) -> None:
    first, gate = held(site, started, 500_000)
    second = Child(site)
    started.append(second)
    waiting = msgspec.json.decode(second.stdout.readline(), type=Download)
    assert waiting.state == "waiting"
    assert "Another program" in waiting.message
    assert waiting.done == 500_000
    gate.open()
    assert first.reports()[-1].state == "done"
    assert second.reports()[-1].state == "done"
    assert site.hub.bytes_sent(NAME) == SIZE
