"""Tests what `make setup` says and leaves, with a uv that installs nothing."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

CI = Path(__file__).parent.parent / ".ci"
HANG_GUARD = 180
# Of the programs on this machine, those that the scripts use themselves.
NEEDED = ("bash", "env", "grep", "mktemp", "rm", "tail", "touch")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the scripts, a `bin` that is the whole PATH, and a uv that writes down its arguments."""
    (tmp_path / ".ci").symlink_to(CI)
    (tmp_path / ".venv").mkdir()
    (tmp_path / "bin").mkdir()
    for name in NEEDED:
        program = shutil.which(name)
        (tmp_path / "bin" / name).symlink_to(program)
    return tmp_path


def program(checkout: Path, name: str, script: str = "") -> None:
    file = checkout / "bin" / name
    file.write_text(f"#!/usr/bin/env bash\n{script}\n")
    file.chmod(0o755)


def set_up(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [".ci/setup", "uv", *arguments], cwd=checkout, env={"PATH": str(checkout / "bin")}, capture_output=True,
        text=True, timeout=HANG_GUARD,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "sudo apt-get install gcc libc6-dev g++"),
        ("dnf", "sudo dnf install gcc gcc-c++"),
        ("apk", "apk add gcc musl-dev g++"),
        ("xcode-select", "xcode-select --install"),
    ],
)
def test_a_missing_compiler_is_named_with_the_package_that_brings_it(
    checkout: Path, manager: str, command: str
) -> None:
    program(checkout, "uv", 'if [[ $1 == pip ]]; then echo "Failed to build llama-cpp-python"; exit 1; fi')
    program(checkout, manager)
    done = set_up(checkout)
    assert done.returncode == 1
    assert "needs gcc and g++." in done.stderr
    assert done.stderr.splitlines()[1].endswith(command)
    assert len(done.stderr.splitlines()) == 3 and "CPUCHAT_WHEELS" in done.stderr
    assert not (checkout / ".venv/.ready").exists()


def test_all_systems_are_named_where_none_is_known_and_an_old_python_may_be_replaced_by_uv(checkout: Path) -> None:
    program(checkout, "uv", "exit 1")
    done = set_up(checkout)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr and "g++" not in done.stderr
    for system in ("Debian, Ubuntu", "Fedora", "Alpine", "macOS", "UV_PYTHON_DOWNLOADS=automatic"):
        assert system in done.stderr


def test_the_log_is_shown_where_a_tool_is_not_the_reason(checkout: Path) -> None:
    program(checkout, "uv", 'if [[ $1 == pip ]]; then echo "no space left"; exit 1; fi')
    assert "no space left" in set_up(checkout).stderr
    program(
        checkout, "uv", 'if [[ $1 == pip ]]; then echo "Failed to build llama-cpp-python: no space left"; exit 1; fi'
    )
    program(checkout, "cc")
    program(checkout, "c++")
    assert "no space left" in set_up(checkout).stderr


def test_the_tools_of_the_tests_are_installed_when_they_are_asked_for_and_kept_from_then_on(checkout: Path) -> None:
    program(checkout, "uv", 'echo "$@" >>calls')
    app, tests = checkout / ".venv/.ready", checkout / ".venv/.ready-for-tests"

    def with_tests(*arguments: str) -> bool:
        (checkout / "calls").unlink(missing_ok=True)
        assert set_up(checkout, *arguments).returncode == 0
        return "--group dev" in (checkout / "calls").read_text()

    assert not with_tests()
    assert app.exists() and not tests.exists()
    assert with_tests("tests")
    assert app.exists() and tests.exists()
    assert with_tests()


def test_an_engine_is_built_anew_when_the_kernels_change() -> None:
    """uv keeps a built engine for as long as its build variables are the same: one of them stands for the sources."""
    root = CI.parent
    files = sorted(file for file in (root / "cpuchat" / "kernels").iterdir() if file.is_file())
    expected = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    variables = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["extra-build-variables"]
    assert variables["llama-cpp-python"]["CPUCHAT_KERNELS"] == expected
