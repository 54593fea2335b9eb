"""Tests the program as others install it: from a wheel, in a folder far from any checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

CHECKOUT = Path(__file__).parent.parent
HANG_GUARD = 180


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked wheel of this checkout, built without network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, timeout=HANG_GUARD)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run_installed(site: Path, home: Path, program: str, *arguments: str) -> str:
    """Return the standard output of the Python `program`, which, like its children, imports cpuchat from `site`."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments], cwd=home, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=HANG_GUARD, env={**os.environ, "PYTHONPATH": str(site), "HOME": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_program(site: Path) -> None:
    ours = {
        file.relative_to(CHECKOUT)
        for file in (CHECKOUT / "cpuchat").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    packed = {file.relative_to(site) for file in (site / "cpuchat").rglob("*") if file.is_file()}
    assert not ours - packed
    brought = (*CHECKOUT.glob("themes/*"), *CHECKOUT.glob("docs/*"))
    assert packed - ours == {Path("cpuchat") / file.relative_to(CHECKOUT) for file in brought}


def test_the_installed_program_answers_and_finds_what_it_brings(
    site: Path, tmp_path: Path, measured_machine: None
) -> None:
    program = "from cpuchat.cli.main import main; main()"
    assert run_installed(site, tmp_path, program, "--version").startswith("cpuchat ")
    assert "~/models" in run_installed(site, tmp_path, program, "docs", "first-model")
    assert "qwen3-8b" in run_installed(site, tmp_path, program, "models", "catalog")
    assert run_installed(site, tmp_path, program, "ask", "--max-tokens", "4", "Hello").strip()
    brought = (
        "from cpuchat.bench import matrix; from cpuchat.quality import texts;"
        " print(all([matrix.load(), texts.prose(), texts.code(), texts.dialogues()]))"
    )
    assert run_installed(site, tmp_path, brought) == "True\n"
    places = "from cpuchat.base import paths; print(paths.packaged('themes'), paths.demo_dir())"
    assert run_installed(site, tmp_path, places).split() == [
        str(site / "cpuchat/themes"), str(site / "cpuchat/models/demo")
    ]  # fmt: skip
