"""Tests `cpuchat models verify`: checksums of what is in the cache."""

from __future__ import annotations

from pathlib import Path

from tests.cli.program import run, succeeded
from tests.models.library.test_verifying import flip_a_bit


def test_a_sound_and_a_damaged_one(tiny: Path) -> None:
    done = succeeded("models", "verify", "some/tiny-GGUF:F32")
    assert done.stdout == "verified   tiny  (SHA-256 matches)\n"
    flip_a_bit(tiny)
    done = run("models", "verify", "some/tiny-GGUF:F32")
    assert done.returncode == 4
    assert done.stdout.startswith("damaged    tiny  (tiny-F32.gguf is damaged: its checksum")
    assert "  damaged  " in run("models", "list").stdout.splitlines()[-1]
    done = run("models", "verify", "--all")
    assert done.returncode == 4
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["unchecked"] * 3 + ["damaged"]
