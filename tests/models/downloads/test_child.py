"""Tests the process of a download: what it says, and what is left when it is ended in every way there is."""

from __future__ import annotations

import subprocess
import sys
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

    def __init__(self, site: Site) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cpuchat.models.downloads.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None and self.process.stdout is not None
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
