"""What is asked: the question, standard input and files."""

from __future__ import annotations

import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base.errors import UsageError

if TYPE_CHECKING:
    from cpuchat.chats.records import Attachment

INPUT_LIMIT = 32 << 20
_PATIENCE_SECONDS = 3.0


def compose(question: str, material: str, *, raw: bool) -> str:
    """Return the prompt: the question, a blank line, the text from standard input; either may be missing.

    A raw prompt is continued to the letter, so only the line feed that `echo` adds is taken off. Raises UsageError:
    there is nothing, or no valid text.
    """
    require_text(question, "The question")
    if raw:
        material = material.removesuffix("\n").removesuffix("\r")
        parts = [part for part in (question, material) if part]
    else:
        parts = [part for part in (question.strip(), material.strip("\r\n").rstrip()) if part]
    prompt = "\n\n".join(parts)
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
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Standard input is not valid UTF-8 text (byte {error.start + 1}).", "Convert it, for example with iconv."
        ) from None


def attached(files: tuple[str, ...]) -> tuple[Attachment, ...]:
    """Read the files to send with the question. Raises UsageError."""
    if not files:
        return ()
    from cpuchat.session.attachments import read_file

    return tuple(read_file(name, Path.cwd()) for name in files)
