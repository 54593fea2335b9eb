"""Reads calls of tools while they are written: a model takes minutes for a long argument."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from cpuchat.protocol.messages import Tool, ToolCall
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.call_parser import MAX_CALLS, find_name, json_object, read_pairs, skipped_closing

_STRUCTURE = re.compile(r"\\.|[\"{}\[\]]", re.DOTALL)


class CallPiece(NamedTuple):
    """More of the `index`-th call: a piece of its arguments as JSON."""

    index: int
    name: str
    id: str
    text: str


class _Object:
    """Finds the end of a JSON object that is still written."""

    def __init__(self, begin: int) -> None:
        self.end = -1
        self.known = begin
        self._depth = 0
        self._in_string = False

    def follow(self, text: str) -> None:
        """Look at what is new of the text that the object is in."""
        for found in _STRUCTURE.finditer(text, self.known):
            self.known = found.end()
            if (mark := found[0]) == '"':
                self._in_string = not self._in_string
            elif not self._in_string and len(mark) == 1:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    self.end = found.end()
                    return
        self.known = len(text) - text.endswith("\\", self.known)


class CallReader:
    """Reads calls while they are written: arguments in JSON as they are, others one by one. What is not written in the
    format, to the end of a name that a tool has, waits for `finish`."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        self._form = form
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._text = ""
        self._at = 0  # behind the calls that are read
        self._pieces: list[CallPiece] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # name, id, pieces of arguments
        self._object: _Object | None = None
        self._begin = self._n_pairs = 0  # of the arguments of the last call; -1: it is whole
        self._open = False

    def take(self) -> list[CallPiece]:
        """Return the pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def feed(self, text: str) -> None:
        """Add more of the text from the trigger on."""
        self._text += text
        while len(self._calls) < MAX_CALLS and (self._open or self._find()):
            if not (self._follow_json() if self._form.shape != "pairs" else self._follow_pairs()):
                return
            self._open = False

    def finish(self, calls: Sequence[ToolCall]) -> tuple[tuple[ToolCall, ...], bool]:
        """Return the calls of the whole text, of which `calls` were found in it, and whether one is not whole. Adds
        the pieces of those that were not read before."""
        found = list(calls)
        for index, (name, id, parts) in enumerate(self._calls):
            is_whole = not self._open or index + 1 < len(self._calls)
            if is_whole and (index >= len(found) or found[index].name != name):
                found[index:] = [ToolCall(name=name, id=id, arguments=json_object("".join(parts), 0)[0] or {})]
        for index, call in enumerate(found):
            if self._open and index == len(self._calls) - 1 and call.name == self._calls[index][0]:
                self._open = False  # nothing closes it in this format
                rest = list(call.arguments.items())[self._n_pairs :]
                told = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in rest)
                self._add(f"{told if self._n_pairs else '{' + told.removeprefix(', ')}}}")
            elif index >= len(self._calls):
                self._pieces.append(CallPiece(index, call.name, call.id, json.dumps(call.arguments)))
        if self._open and not self._calls[-1][2]:
            self._add("")  # cut before its first argument
        return tuple(found), self._open

    def _add(self, text: str) -> None:
        name, id, parts = self._calls[-1]
        parts.append(text)
        self._pieces.append(CallPiece(len(self._calls) - 1, name, id, text))

    def _find(self) -> bool:
        """Look for the next call; True: it begins, up to its arguments."""
        form, found = self._form, None
        if form.shape != "object":
            found = find_name(form, self._text, self._at)
        elif (head := _head_of_object(form.name_key, form.arguments_key).search(self._text, self._at)) is not None:
            found = head["name"], head["id"] or "", head.end()
        if found is None or found[0] not in self._schemas:
            return False
        name, id, begin = found
        rest = self._text[begin:].lstrip()
        if not rest or (form.shape != "pairs" and rest[0] != "{"):
            return False
        self._begin = len(self._text) - len(rest)
        self._object, self._n_pairs, self._open = _Object(self._begin), 0, True
        self._calls.append((name, id, []))
        return True

    def _follow_json(self) -> bool:
        """Add what is new of the arguments; True once they are whole."""
        state = self._object
        assert state is not None
        before = state.known
        state.follow(self._text)
        end = state.end if state.end >= 0 else state.known
        if end > before or not self._calls[-1][2]:
            self._add(self._text[before:end])
        self._at = end
        return state.end >= 0

    def _follow_pairs(self) -> bool:
        """Add the arguments that are whole now; True once the call is."""
        at, n, schema = self._begin, 0, self._schemas[self._calls[-1][0]]
        for key, value, end in read_pairs(self._form, self._text, self._begin, schema):
            if end < 0:
                return False
            at, n = end, n + 1
            if n > self._n_pairs:
                self._add(f"{'{' if n == 1 else ', '}{json.dumps(key)}: {json.dumps(value)}")
                self._n_pairs = n
        if (closed := skipped_closing(self._form, self._text, at)) is None:
            return False
        self._add("}" if n else "{}")
        self._at = closed
        return True


@lru_cache(16)
def _head_of_object(name_key: str, arguments_key: str) -> re.Pattern[str]:
    """Return a pattern for a call that is an object, up to its arguments."""
    name, arguments = re.escape(name_key), re.escape(arguments_key)
    id = r'"(?:id|tool_call_id|call_id)"\s*:\s*"(?P<id>[^"]*)"\s*,\s*'
    return re.compile(rf'\{{\s*(?:{id})?"{name}"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"{arguments}"\s*:\s*(?=\{{)')
