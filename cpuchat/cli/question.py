"""What is asked: the question, standard input and files."""

from __future__ import annotations

import re
import select
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from cpuchat.base.errors import UsageError
from cpuchat.cli.lazy import SectionedCommand

INPUT_LIMIT = 32 << 20
_PATIENCE_SECONDS = 3.0
_LIKE_OPTION = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_LONGEST_LINE = 300


class TextCommand(SectionedCommand):
    """A command whose last argument is a text, in which nothing is an option.

    The text begins after `n_before` words that are no options. A word that begins with a dash but cannot be an option,
    such as "-5" or a diff, is one of the text. Options behind the text's first word are options if nothing else is
    there: `ask "Why?" --json`."""

    def __init__(self, *args: Any, n_before: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._n_before = n_before

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options and text. Raises UsageError, which names `--`, for a word that looks like an option."""
        known = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        flags = {name: one for one in known for name in (*one.opts, *one.secondary_opts)}
        options, words, rest = list[str](), list[str](), list(args)
        while rest and rest[0] != "--" and len(words) <= self._n_before:
            length = _length(rest[0], flags)
            if not length and _LIKE_OPTION.fullmatch(rest[0]):
                line = shlex.join([*ctx.command_path.split(), *options, "--", *words, *rest])
                hint = f"{no_option_hint(ctx, rest[0])} For a text, put -- before it"
                hint += f": {line}" if len(line) < _LONGEST_LINE else "."
                raise UsageError(f"No such option: {rest[0].partition('=')[0]}.", hint)
            (options if length else words).extend(rest[: length or 1])
            del rest[: length or 1]
        if rest[:1] == ["--"]:
            del rest[0]
        elif _only_options(rest, flags):
            options, rest = [*options, *rest], []
        elif late := next(
            (one for one in rest if one.partition("=")[0] in flags.keys() - {*ctx.help_option_names}), ""
        ):
            click.echo(f"cpuchat: {late} is part of the text here: options go before it.", err=True)
        if isinstance(ctx.obj, list):  # what `main` looks for --json in
            ctx.obj[:] = options
        return super().parse_args(ctx, [*options, "--", *words, *rest] if words or rest else options)


def _length(word: str, flags: dict[str, click.Option]) -> int:
    """Return how many arguments an option takes with its name and value; 0: `word` is none of the options."""
    name, equals, _ = word.partition("=")
    if name in flags:
        return 1 if flags[name].is_flag or equals else 2
    for place, letter in enumerate(word[1:] if word[:1] == "-" != word[1:2] else "", 2):  # flags, the last with a value
        option = flags.get(f"-{letter}")
        if option is None or not option.is_flag:
            return 0 if option is None else 1 if place < len(word) else 2
        if place == len(word):
            return 1
    return 0


def _only_options(words: list[str], flags: dict[str, click.Option]) -> bool:
    place = 0
    while place < len(words) and (length := _length(words[place], flags)):
        place += length
    return place == len(words) > 0


def no_option_hint(ctx: click.Context | None, wrong: str) -> str:
    """Return which options `wrong` may stand for: abbreviated, extended by a word, or misspelled; and where to look.

    click compares the dashes as well, so that it takes every short option for every other."""
    import difflib

    help = f"See {ctx.command_path if ctx is not None else 'cpuchat'} --help."
    word = wrong.partition("=")[0].lstrip("-")
    if ctx is None or len(word) < 2:
        return help
    names = {flag[2:] for one in ctx.command.get_params(ctx) for flag in one.opts if flag.startswith("--")}
    parts = set(word.split("-"))
    related = [name for name in names if name.startswith(word) or word in name.split("-") or name in parts]
    close = related or difflib.get_close_matches(word, names, n=2, cutoff=0.7)
    return f"Did you mean {' or '.join(f'--{name}' for name in sorted(close))}? {help}" if close else help


def compose(question: str, material: str, *, raw: bool) -> str:
    """Return the prompt: the question, a blank line, the text from standard input; either may be missing, "-" is none.

    A raw prompt is continued to the letter, so only the line feed that `echo` adds is taken off. Raises UsageError:
    there is nothing, or no valid text."""
    question = "" if question == "-" else question
    require_text(question, "The question")
    if raw:
        parts = question, material.removesuffix("\n").removesuffix("\r")
    else:
        parts = question.strip(), material.strip("\r\n").rstrip()
    prompt = "\n\n".join(filter(None, parts))
    if not prompt.strip() and not (raw and prompt):
        raise UsageError("No question given.", 'Give one, such as "Why is the sky blue?", or pipe it in.')
    return prompt


def require_text(text: str, what: str) -> None:
    """Check that an argument is valid UTF-8: the shell passes any bytes, but only valid text can be tokenized."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8 text.", "Convert it, for example with iconv.") from None


def standard_input(quiet: bool) -> str:
    """Return the piped text; "" for a terminal or none. Raises UsageError: over `INPUT_LIMIT` bytes, or not UTF-8."""
    stream = sys.stdin
    if stream is None or stream.closed or stream.isatty():
        return ""
    try:
        ready, _, _ = select.select([stream], [], [], _PATIENCE_SECONDS)
        if not ready and not quiet and sys.stderr is not None:
            print("cpuchat: waiting for standard input (to use none: < /dev/null)", file=sys.stderr)
        data = stream.buffer.read(INPUT_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"Cannot read standard input: {error.strerror}.") from None
    if len(data) > INPUT_LIMIT:
        raise UsageError(f"Standard input is longer than {INPUT_LIMIT >> 20} MiB.", "Shorten it.")
    return _decoded(data, "Standard input")


def file_text(name: str | Path, max_bytes: int) -> str:
    """Return the text of a file that the user named. Raises UsageError: it cannot be read, is larger, or not UTF-8."""
    try:
        with Path(name).expanduser().open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"Cannot read {name}: {reason}.", "Give a text file.") from None
    if len(data) > max_bytes:
        raise UsageError(f"{name} is larger than {max_bytes >> 20} MiB.", "Shorten it.")
    return _decoded(data, str(name))


def _decoded(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{what} is not valid UTF-8 text (line {line}, byte {error.start + 1})."
        raise UsageError(message, "Convert it, for example with iconv.") from None
