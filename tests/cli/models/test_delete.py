"""Tests `cpuchat models delete`: asks first, and never touches what is not its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pexpect
import pytest

from cpuchat.config import settings
from cpuchat.telemetry.units import size
from tests.cli.program import COMMAND, HANG_GUARD, refused, run


def test_a_model_of_the_cache_goes_with_a_word_for_it(tiny: Path, hub: Path) -> None:
    assert "--yes" in refused(2, "models", "delete", "some/tiny-GGUF:F32") and tiny.exists()
    room = size(tiny.stat().st_size)
    done = run("models", "delete", "some/tiny-GGUF:F32", "--yes")
    assert (done.returncode, done.stdout) == (0, f"Freed {room}.\n"), done.stderr
    assert list(hub.iterdir()) == []


def test_what_stays_is_said(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "link.gguf").symlink_to(shutil.copy(tiny, tmp_path / "kept.gguf"))
    settings.update({"model": {"folders": [str(folder)]}})
    done = run("models", "delete", str(folder / "link.gguf"), "--yes")
    assert done.stdout.splitlines() == [
        f"  link.gguf is a link: its target {tmp_path / 'kept.gguf'} stays.",
        "Freed 0 B.",
    ]
    assert (tmp_path / "kept.gguf").exists()


@pytest.mark.parametrize(("key", "status", "left"), [("y", 0, False), ("n", 1, True)])
def test_on_a_terminal_it_shows_what_goes_and_asks(tiny: Path, key: str, status: int, left: bool) -> None:
    child = pexpect.spawn(COMMAND[0], [*COMMAND[1:], "models", "delete", "some/tiny-GGUF:F32"], timeout=HANG_GUARD)
    child.setwinsize(24, 400)
    child.expect_exact(f"tiny frees {size(tiny.stat().st_size)}:")
    child.expect_exact(f"delete {tiny.resolve()}")
    child.expect_exact("Delete?")
    child.sendline(key)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == status
    assert tiny.exists() == left


@pytest.mark.parametrize(
    ("spec", "status", "word"),
    [("demo", 2, "part of cpuchat"), ("some/tiny-GGUF", 3, "exactly"), ("tiny-F32", 3, "You have tiny.")],
)
def test_what_cannot_be_deleted(tiny: Path, spec: str, status: int, word: str) -> None:
    assert word in refused(status, "models", "delete", spec, "--yes")
