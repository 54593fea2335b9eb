"""Runs pyright over the package and the benchmarks: one process of a minute and more, beside which the others work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_types() -> None:
    command = [str(Path(sys.executable).with_name("pyright")), "--warnings"]
    # Fewer garbage collections, which take a tenth of the time.
    environ = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=64"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
