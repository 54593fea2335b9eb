"""Collects the tests of a file in the process that runs them, when it begins with it (`-p tests.support.by_file`).

pytest-xdist lets every process import all files and make an item of each test: a tenth of the whole run. Here an item
stands for a file, and pytest-xdist hands those out. What a file's tests report passes through it as usual."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol


class LazyFile(pytest.File):
    """A file of tests that nobody has imported."""

    def collect(self) -> Iterator[pytest.Item]:
        item = TestsOfFile.from_parent(self, name="tests")
        item.add_marker(pytest.mark.timeout(0))  # its tests have their own
        yield item


class TestsOfFile(pytest.Item):
    """Stands for all tests of a file."""

    def runtest(self) -> None:
        raise NotImplementedError("run_all takes its place")

    def run_all(self, next_file: pytest.Item | None) -> None:
        """Collect the file's tests, leave out what -m does, and run the others."""
        assert self.parent is not None and self.parent.parent is not None
        module = pytest.Module.from_parent(self.parent.parent, path=self.path)
        tests = list(self.session.genitems(module))
        self.ihook.pytest_collection_modifyitems(session=self.session, config=self.config, items=tests)
        if not tests:  # the test before has kept what this file and its own have in common
            self.session._setupstate.teardown_exact(next_file)
        place = self.session.items.index(self)
        for number, test in enumerate(tests, 1):
            self.session.items[place] = test  # pytest-xdist asks whether a report is that of the item it handed out
            following = tests[number] if number < len(tests) else next_file
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            if self.session.shouldfail or self.session.shouldstop:
                break
        self.session.items[place] = self


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> LazyFile:
    return LazyFile.from_parent(parent, path=module_path)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a file or a test. Of a test that passes, one report of the usual five messages is sent; its duration, as
    `--durations` shows it, is that of all three: what a test takes is often what its fixtures start and end."""
    if isinstance(item, TestsOfFile):
        item.run_all(nextitem)
        return True
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        if report.when == "call":
            report.duration = sum(one.duration for one in reports)
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True
