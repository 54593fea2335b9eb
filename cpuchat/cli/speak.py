"""`cpuchat speak`: reads a text aloud, or writes it to a WAV file.

Reads one text aloud for a command.

Prints an answer phrase by phrase, for screen readers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

import click

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.paths import shown
from cpuchat.base.text import clean_line
from cpuchat.cli.options import file_option, laid_over, section_options, stacked
from cpuchat.cli.output import Terminal, json_line
from cpuchat.config.settings import SpeechSection
from cpuchat.hardware.topology import read_topology
from cpuchat.present import chats as words
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.speech.player import Player, SoundDevice, WavPlayer, unused_file
from cpuchat.speech.speaker import Speaker, beside_model, choose_voice
from cpuchat.telemetry.speech import Speech

_MAX_BYTES = 32 << 20
_SUFFIXES = (".md", ".markdown", ".txt", ".rst")

_EPILOG = """\b
Examples:
  cpuchat speak "Hello there."
  cpuchat speak notes.md -o notes.wav
  cpuchat ask "Why is the sky blue?" | cpuchat speak

Code blocks are announced and skipped, links are read by their text, numbers with their units. Without a sound
device, a WAV file is written. To install a voice, run `uv tool install ".[speech]"` in the checkout.

Exit codes: 0 done, 2 wrong usage or settings, 23 no voice, or speech failed, 130 stopped by Ctrl+C,
1 anything else."""


@click.command(epilog=_EPILOG)
@click.argument("text", nargs=-1, metavar="[TEXT|FILE]...")
@stacked(
    file_option("-o", "--output", help="Write a WAV file instead of playing."),
    section_options("speech"),
    click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
    click.option("--quiet", "-q", is_flag=True, help="Print only warnings and errors."),
)  # fmt: skip
def speak(text: tuple[str, ...], output: Path | None, as_json: bool, quiet: bool, **values: Any) -> int:
    """Read TEXT, or the Markdown or text FILE, aloud. Without either, standard input is read."""
    import asyncio

    from cpuchat.present import chats as words
    from cpuchat.speech.speaker import read_aloud

    section = laid_over(values).speech
    content = _content(text, quiet)
    terminal = Terminal(quiet=quiet)

    async def run() -> None:
        async with Aloud(section, output, terminal) as aloud:
            await aloud.prepare()
            await read_aloud(aloud.speaker, content)
            figures = await aloud.wait()
            if not figures.sound_s:
                raise UsageError("Nothing to read aloud: the text has no words.", "Give another text.")
            if as_json:
                terminal.line(json_line(words.as_json(figures, aloud.where)))
            else:
                terminal.note(words.speech_summary(figures, aloud.where))

    asyncio.run(run())
    return 0


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
            content = paths.read_text(file, most=_MAX_BYTES)
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


_STEM = "cpuchat-speech"


class Aloud:
    """An async context manager; leaving it stops the sound. `where` is the player or the file, once that is known.

    Args:
        output: a WAV file to write instead of playing; None plays, and writes one where there is no sound device.

    Raises:
        SpeechFailed: no voice is installed.
        UsageError: the folder of `output` does not exist.
    """

    def __init__(self, section: SpeechSection, output: Path | None, terminal: Terminal) -> None:
        if output is not None and not output.absolute().parent.is_dir():
            raise UsageError(f"{shown(output.parent)} is not a folder.", "Choose another file.")
        self._section = section
        self._output = output
        self._terminal = terminal
        self._problem: CpuchatError | None = None
        self._device = SoundDevice()
        self._player: Player | None = None
        self.where = ""
        self.speaker = Speaker(choose_voice(section), self._prepared_player, tell=self._fail)

    async def __aenter__(self) -> Self:
        if self._output is None:
            self._device.look()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._device.close()
        await self.speaker.close()

    async def prepare(self, model: ModelInfo | None = None) -> None:
        """Load the voice beside `model`, in the background; returns when it is known where the sound goes."""
        cpus, shared = beside_model(read_topology(), self._section.cores, model)
        self.speaker.prepare(cpus, shared=shared)
        self._player = await self._new_player()
        self.where = self._player.name

    async def wait(self) -> Speech:
        """Return the figures once everything was heard. Raises SpeechFailed."""
        await self.speaker.wait()
        if self._problem is not None:
            raise self._problem
        return self.speaker.figures()

    async def _new_player(self) -> Player:
        if self._output is not None:
            return WavPlayer(self._output)
        return await self._device.player(
            lambda: unused_file(Path.cwd(), _STEM),
            lambda file: self._terminal.warn(f"cpuchat: {words.no_device(shown(file))}"),
        )

    async def _prepared_player(self) -> Player:
        assert self._player is not None
        return self._player

    def _fail(self, error: CpuchatError) -> None:
        self._problem = error


_LONGEST_PHRASE = 240
_PHRASE = re.compile(r"\n|[.!?:;…][\"')\]”’*_]*\s|[。！？]")


class Phrases:
    """Prints an answer and its reasoning in sentences and lines: from single words, a screen reader makes
    stammering.
    """

    def __init__(self, terminal: Terminal, name: str, show_reasoning: bool, hint: str = "") -> None:
        """`hint` is printed when the model begins to reason."""
        self._terminal, self._name, self._shows = terminal, clean_line(name) or "Answer", show_reasoning
        self._hint = hint
        self._waiting = self._thought = ""
        self._begun = self._reasoned = False

    @property
    def is_reasoning(self) -> bool:
        """Return whether the model reasons now."""
        return self._reasoned and not (self._begun or self._waiting)

    def answer(self, text: str) -> None:
        self._end_reasoning()
        self._waiting += text
        self._print(_end_of_phrase(self._waiting))

    def reasoning(self, text: str) -> None:
        if not self._reasoned:
            self._terminal.note(f"The model is reasoning. {self._hint}".rstrip())
        self._reasoned = True
        if self._shows:
            self._thought += text
            end = _end_of_phrase(self._thought)
            self._terminal.reasoning(self._thought[:end])
            self._thought = self._thought[end:]

    def finish(self) -> None:
        """Print the rest."""
        self._end_reasoning()
        self._print(len(self._waiting))

    def _end_reasoning(self) -> None:
        self._terminal.reasoning(self._thought)
        self._thought = ""

    def _print(self, end: int) -> None:
        phrase, self._waiting = self._waiting[:end], self._waiting[end:]
        if phrase:
            self._terminal.answer(phrase if self._begun else f"{self._name}: {phrase.lstrip()}")
            self._begun = True


def _end_of_phrase(text: str) -> int:
    """Return where the last whole phrase ends, 0 without one; a very long one ends at a space."""
    end = max((found.end() for found in _PHRASE.finditer(text)), default=0)
    if not end and len(text) > _LONGEST_PHRASE:
        end = text.rfind(" ") + 1 or len(text)
    return end
