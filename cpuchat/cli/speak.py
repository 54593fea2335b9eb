"""`cpuchat speak`: reads a text aloud, or writes it to a WAV file."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.files import check_place
from cpuchat.cli.options import file_option, laid_over, section_options
from cpuchat.cli.question import INPUT_LIMIT, TextCommand, file_text, standard_input
from cpuchat.cli.terminal import TerminalOutput

_SUFFIXES = (".md", ".markdown", ".txt", ".rst")

_EPILOG = """\b
Examples:
  cpuchat speak notes.md -o notes.wav
  cpuchat ask "Why is the sky blue?" | cpuchat speak

Code blocks are announced and skipped, links are read by their text, numbers with their units. To install the voice, run
`uv tool install ".[speech]"` in the checkout."""


@click.command(cls=TextCommand, n_before=sys.maxsize, epilog=_EPILOG)
@click.argument("text", nargs=-1, metavar="[TEXT|FILE]...")
@file_option("-o", "--output", help="Write a WAV file instead of playing.")
@section_options("speech")
@click.option("--quiet", "-q", is_flag=True, help="Print only warnings and errors.")
def speak(text: tuple[str, ...], output: Path | None, quiet: bool, **values: Any) -> None:
    """Read TEXT, or the Markdown or text FILE, aloud. Without either, standard input is read."""
    import asyncio

    from cpuchat.speech.player import ProgramPlayer, WavPlayer, playing_program
    from cpuchat.speech.speaker import Speaker, check_voice, read_aloud

    speed, content = laid_over(values).speech.speed, _content(text, quiet)
    if output is not None:
        check_place(output, force=True)
    check_voice()
    problems: list[CpuchatError] = []

    async def read() -> tuple[float, str]:
        program = await playing_program() if output is None else ""
        speaker = Speaker(speed, lambda: WavPlayer(output) if output else ProgramPlayer(program), tell=problems.append)
        try:
            await read_aloud(speaker, content)
            return speaker.seconds, paths.shown(output) if output else program
        finally:
            await speaker.close()

    seconds, where = asyncio.run(read())
    for problem in problems:
        raise problem
    if not seconds:
        raise UsageError("Nothing to read aloud: the text has no words.", "Give another text.")
    TerminalOutput(quiet=quiet).note(f"{seconds:.1f} s of speech to {where}")


def _content(text: tuple[str, ...], quiet: bool) -> str:
    """Return what is to be read: the text of the one file that is named, one that exists or is called like a text file;
    else the words, else standard input. Raises UsageError: nothing, or a file that is not text."""
    content = " ".join(text)
    file = paths.expanded(content)
    is_file = file.suffix in _SUFFIXES and not any(character.isspace() for character in content)
    with contextlib.suppress(OSError):  # too long for a name
        is_file = is_file or (file.exists() and not file.is_dir())
        if len(text) == 1 and is_file and "\n" not in content:
            content = file_text(file, INPUT_LIMIT)
    if not any(text):
        content = standard_input(quiet)
    if not content.strip():
        raise UsageError("Nothing to read aloud.", 'Give a text, such as "Hello", a file, or pipe it in.')
    return content
