"""Tests `cpuchat speak` with the real voice."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest

from tests.cli.program import refused, run, succeeded
from tests.support.sound_program import SoundProgram, no_sound_program


def seconds(file: Path) -> float:
    with wave.open(str(file)) as sound:
        return sound.getnframes() / sound.getframerate()


def test_a_markdown_file_is_read_sensibly_to_a_file_and_faster(tmp_path: Path) -> None:
    source, slow, fast = (tmp_path / name for name in ("notes.md", "a.wav", "b.wav"))
    source.write_text("# Notes\n\n```\n" + "secret = 1\n" * 200 + "```\n\nThat is all.", encoding="utf-8")
    done = run("speak", str(source), "-o", str(slow))
    assert (done.returncode, done.stdout) == (0, "")
    assert "s of speech to" in done.stderr and slow.name in done.stderr
    done = succeeded("speak", str(source), "-o", str(fast), "--speed", "1.6")
    assert 2 < seconds(slow) < 8  # the code is not read
    assert seconds(fast) < 0.8 * seconds(slow)


def test_standard_input_is_read_to_the_sound_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = SoundProgram(tmp_path / "bin", monkeypatch)
    done = succeeded("speak", stdin="Hello.")
    assert "aplay" in done.stderr
    assert program.seconds() > 0.4


def test_without_a_sound_device_it_says_how_to_write_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sound_program(tmp_path / "bin", monkeypatch)
    told = refused(23, "speak", "Hello.", "--quiet")
    assert "No sound device" in told and "speak -o FILE" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "Nothing to read aloud."),
        (("/dev/null",), "Nothing to read aloud."),  # a file: standard input is not read in its place
        (("no-such-file.md",), "Cannot read no-such-file.md"),
        (("🎉", "-o", "never.wav"), "Nothing to read aloud"),
        (("Hello", "-o", "no/such/folder/a.wav"), "There is no folder"),
        (("Hello", "--speed", "9"), "--speed: must be 0.5 to 2."),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], told: str) -> None:
    done = run("speak", *arguments, stdin="Hello." if arguments else None)
    assert done.returncode == 2
    assert told in done.stderr
