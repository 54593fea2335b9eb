"""`cpuchat speak`: reads a text aloud, or writes it to a WAV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.cli.options import file_option, laid_over, section_options, stacked
from cpuchat.cli.output import json_line
from cpuchat.cli.question import ANYWHERE, TextCommand
from cpuchat.cli.terminal import TerminalOutput

_MAX_BYTES = 32 << 20
_SUFFIXES = (".md", ".markdown", ".txt", ".rst")

_EPILOG = """\b
Examples:
  cpuchat speak "Hello there."
  cpuchat speak notes.md -o notes.wav
  cpuchat ask "Why is the sky blue?" | cpuchat speak

Code blocks are announced and skipped, links are read by their text, numbers with their units. To install the voice, run
`uv tool install ".[speech]"` in the checkout.

Exit codes: 0 done, 2 wrong usage or settings, 23 no voice, or speech failed, 130 stopped by Ctrl+C,
1 anything else."""


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

    from cpuchat.cli.aloud import Aloud
    from cpuchat.present import chats as words
    from cpuchat.speech.speaker import read_aloud

    section = laid_over(values).speech
    content = _content(text, quiet)
    terminal = TerminalOutput(quiet=quiet)

    async def run() -> None:
        async with Aloud(section, output) as aloud:
            aloud.prepare()
            await read_aloud(aloud.speaker, content)
            figures = await aloud.wait()
            if not figures.sound_s:
                raise UsageError("Nothing to read aloud: the text has no words.", "Give another text.")
            if as_json:
                terminal.line(json_line(words.as_json(figures, aloud.where)))
            else:
                terminal.note(words.speech_summary(figures, aloud.where))

    asyncio.run(run())


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
    from cpuchat.cli.question import standard_input

    if (file := _file(text)) is not None:
        try:
            content = paths.read_text(file, max_size=_MAX_BYTES)
        except OSError as error:
            raise UsageError(
                f"Cannot read {paths.shown(file)}: {error.strerror}.", "Give a text file, or pipe a text in."
            ) from None
        except UnicodeDecodeError:
            raise UsageError(f"{paths.shown(file)} is not valid UTF-8 text.", "Give a text file.") from None
    else:
        content = " ".join(text) or standard_input(quiet)
    if not content.strip():
        raise UsageError("Nothing to read aloud.", 'Give a text, such as "Hello", a file, or pipe it in.')
    return content
