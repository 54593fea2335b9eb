"""Tests how a whole run treats a test that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
TESTS = """
from pathlib import Path

FILE = Path(__file__).with_suffix(".begun")


def test_that_fails_once():
    begun = FILE.exists()
    FILE.touch()
    assert begun, "at first"


def test_that_fails():
    assert False, "always"


def test_that_passes():
    pass
"""


def test_a_test_that_fails_is_run_again_and_told_of_and_fails_when_it_fails_twice(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    arguments = ["-p", "tests.support.by_file", "-p", "no:cacheprovider", "-n", "1", "-q", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed, 2 failed once in" in done.stdout.splitlines()[-1]
    assert "failed once: test_some.py::test_that_fails_once" in done.stdout
    assert "AssertionError: at first" in done.stdout and "AssertionError: always" in done.stdout
