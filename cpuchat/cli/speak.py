"""`cpuchat speak`: reads a text aloud, or writes it to a WAV file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.cli.options import file_option, laid_over, section_options, stacked
from cpuchat.cli.output import print_json
from cpuchat.cli.question import ANYWHERE, INPUT_LIMIT, TextCommand, file_text, standard_input
from cpuchat.cli.terminal import TerminalOutput

if TYPE_CHECKING:
    from cpuchat.config.settings import SpeechSection
    from cpuchat.speech.player import Player
    from cpuchat.telemetry.speech import Speech

_SUFFIXES = (".md", ".markdown", ".txt", ".rst")

_EPILOG = """\b
Examples:
  cpuchat speak "Hello there."
  cpuchat speak notes.md -o notes.wav
  cpuchat ask "Why is the sky blue?" | cpuchat speak

Code blocks are announced and skipped, links are read by their text, numbers with their units. To install the voice, run
`uv tool install ".[speech]"` in the checkout."""


@click.command(cls=TextCommand, n_before=ANYWHERE, epilog=_EPILOG)
@click.argument("text", nargs=-1, metavar="[TEXT|FILE]...")
@stacked(
    file_option("-o", "--output", help="Write a WAV file instead of playing."),
    section_options("speech"),
    click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
    click.option("--quiet", "-q", is_flag=True, help="Print only warnings and errors."),
)  # fmt: skip
def speak(text: tuple[str, ...], output: Path | None, as_json: bool, quiet: bool, **values: Any) -> None:
    """Read TEXT, or the Markdown or text FILE, aloud. Without either, standard input is read."""
    import asyncio

    from cpuchat.present import chats as words
    from cpuchat.speech.speaker import check_voice

    section, content = laid_over(values).speech, _content(text, quiet)
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"{paths.shown(output.parent)} is not a folder.", "Choose another file.")
    check_voice()
    figures, where = asyncio.run(_read_aloud(section, content, output))
    if not figures.sound_s:
        raise UsageError("Nothing to read aloud: the text has no words.", "Give another text.")
    if as_json:
        print_json(words.as_json(figures, where))
    else:
        TerminalOutput(quiet=quiet).note(words.speech_summary(figures, where))


async def _read_aloud(section: SpeechSection, content: str, output: Path | None) -> tuple[Speech, str]:
    """Return the figures, and the player or the file. Raises SpeechFailed."""
    from cpuchat.hardware.topology import read_topology
    from cpuchat.speech.player import ProgramPlayer, WavPlayer, playing_program
    from cpuchat.speech.speaker import Speaker, cpus_beside, read_aloud

    where = paths.shown(output) if output is not None else await playing_program()
    problems: list[CpuchatError] = []

    def player() -> Player:
        return WavPlayer(output) if output is not None else ProgramPlayer(where)

    speaker = Speaker(section.speed, player, tell=problems.append)
    try:
        cpus, shared = cpus_beside(read_topology(), section.cores, None)
        speaker.prepare(cpus, shared=shared)
        await read_aloud(speaker, content)
        for problem in problems:
            raise problem
        return speaker.figures(), where
    finally:
        await speaker.close()


def _file(text: tuple[str, ...]) -> Path | None:
    """Return the file that the arguments name: one that exists, or is called like a text file; None for a text."""
    if len(text) != 1 or not text[0].strip() or "\n" in text[0]:
        return None
    file = paths.expanded(text[0])
    named = file.suffix in _SUFFIXES and not any(character.isspace() for character in text[0])
    try:
        return file if named or (file.exists() and not file.is_dir()) else None
    except OSError:  # too long for a name
        return None


def _content(text: tuple[str, ...], quiet: bool) -> str:
    """Return what is to be read. Raises UsageError: nothing, or a file that is not text."""
    if (file := _file(text)) is not None:
        content = file_text(file, INPUT_LIMIT)
    else:
        content = " ".join(text) or standard_input(quiet)
    if not content.strip():
        raise UsageError("Nothing to read aloud.", 'Give a text, such as "Hello", a file, or pipe it in.')
    return content
