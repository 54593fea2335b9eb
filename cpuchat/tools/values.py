"""Values of arguments in the text of a model: JSON, strings in quotes, and text that a schema gives a type."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_DECODER = json.JSONDecoder()
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_FENCE_END = re.compile(r"\s*```")
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
PLAIN_QUOTES = ("'", '"')
"""In which a backslash escapes."""


def json_object(text: str, at: int) -> tuple[dict[str, Any] | None, int]:
    """Return the JSON object at `at`, which may be in a code fence, and where it ends.

    None: it is another value. An end of -1: it is not complete, or no JSON.
    """
    begin = _FENCE.match(text, at)
    at = begin.end() if begin is not None else at
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, -1
    fence = _FENCE_END.match(text, end) if begin is not None and "`" in begin[0] else None
    return value if isinstance(value, dict) else None, fence.end() if fence is not None else end


def typed_value(text: str, schema: Any, quote: str = "") -> Any:
    """Return a value that stands without quotes, as the type that the schema of its parameter gives.

    Args:
        quote: in which strings inside it stand.
    """
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    for read in (json.loads, _read_quoted(quote), ast.literal_eval):  # the last: templates that write None and True
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if value is None or isinstance(value, str | int | float | dict | list):
            return value
    return text


def may_be_text(schema: Any) -> bool:
    """Return whether a schema takes a string, among others."""
    if not isinstance(schema, dict):
        return False
    choices = [schema]
    for key in ("anyOf", "oneOf"):
        choices += one if isinstance(one := schema.get(key), list) else ()
    kinds = [one.get("type") for one in choices if isinstance(one, dict)]
    return any(kind == "string" or (isinstance(kind, list) and "string" in kind) for kind in kinds)


def _read_quoted(quote: str) -> Any:
    """Return a reader of JSON with other quotes around its strings and none around its keys."""

    def read(text: str) -> Any:
        parts = text.split(quote) if quote and quote not in PLAIN_QUOTES else [text]
        written = [json.dumps(one) if at % 2 else _BARE_KEY.sub(r'\1"\2":', one) for at, one in enumerate(parts)]
        return json.loads("".join(written))

    return read


def string_end(text: str, at: int, quote: str) -> int:
    """Return where the string that begins at `at` ends; -1: nowhere. In plain quotes a backslash escapes."""
    while (end := text.find(quote, at)) >= 0:
        before = text[at:end]
        if quote not in PLAIN_QUOTES or (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return end
        at = end + 1
    return -1


def unescaped(text: str, quote: str) -> str:
    """Return the content of a string that stood in quotes."""
    if quote not in PLAIN_QUOTES or "\\" not in text:
        return text
    try:
        return json.loads('"' + text.replace("\\'", "'") + '"', strict=False)
    except ValueError:
        return text


def bare_value_end(text: str, at: int, quote: str) -> int:
    """Return where a value without quotes ends: at a comma or closing bracket that is not its own; -1: nowhere."""
    depth = 0
    while at < len(text):
        if quote and text.startswith(quote, at):
            if (at := string_end(text, at + len(quote), quote)) < 0:
                return -1
            at += len(quote)
            continue
        if depth == 0 and text[at] in ",)}]":
            return at
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return -1
