"""Keeping calls of tools out of the text of an answer while it streams."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cpuchat.engine.text.reasoning import ReasoningSplitter, Unsplit
from cpuchat.engine.text.stops import held_back
from cpuchat.protocol import Channel
from cpuchat.tool_calls import Tool, ToolCall
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.call_parser import parse_calls
from cpuchat.tools.unmarked import may_begin, unmarked_calls

_CHANNEL = re.compile(r"(?:\s*<\|[^<>|]*\|>\w*)*\s*(?:<(?:\|[^<>|]*\|?)?)?$")  # markers, the last one maybe unfinished


class CallSplitter:
    """Splits text as `splitter` does, without the calls in the answer; these are in `calls` after `flush`.

    From where calls begin nothing is passed on before the end. Text that turns out to be no call is, then.
    """

    def __init__(self, splitter: ReasoningSplitter | Unsplit, form: CallFormat, tools: Sequence[Tool]) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        self.literals = form.literals
        self._splitter = splitter
        self._form = form
        self._tools = tools
        self._names = tuple(tool.name for tool in tools)
        self._triggers = form.triggers(self._names)
        self._held = ""  # may be the beginning of a trigger, or a call without one
        self._calling = ""  # from the trigger on
        self._thought = ""  # reasoning from where it looks like a call
        self._has_said = False  # something but white space

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        """Return the text that is surely no call."""
        return self._without_calls(self._splitter.feed(text))

    def flush(self) -> list[tuple[Channel, str]]:
        """Return the rest, without calls."""
        pieces = self._without_calls(self._splitter.flush())
        thought, self._thought = self._thought, ""
        if thought and isinstance(self._splitter, ReasoningSplitter) and self._splitter.in_reasoning:
            rest, calls = parse_calls(self._form, thought, self._tools)
            if calls:  # they end the reasoning, which nothing else ended
                self.calls = tuple(calls)
                return [*pieces, ("answer", rest)] if rest else pieces
        if thought:
            pieces.append(("reasoning", thought))
        rest, self._held = self._held, ""
        if self._calling:
            rest, calls = parse_calls(self._form, self._calling, self._tools, at_start=not self._has_said)
            self.calls, self._calling = tuple(calls), ""
        elif not self._has_said:
            rest, calls = unmarked_calls(rest, self._tools)
            self.calls = tuple(calls)
        return [*pieces, ("answer", rest)] if rest else pieces

    def _without_calls(self, pieces: list[tuple[Channel, str]]) -> list[tuple[Channel, str]]:
        found = list[tuple[Channel, str]]()
        for channel, text in pieces:
            if channel == "reasoning":
                passed = self._reasoned(text)
            else:
                if self._thought:
                    found.append(("reasoning", self._thought))
                    self._thought = ""
                passed = self._said(text)
            if passed:
                found.append((channel, passed))
        return found

    def _reasoned(self, text: str) -> str:
        """Return what of the next text of the reasoning is no call; from what looks like one on it is held."""
        if self._thought.startswith(self._triggers):
            self._thought += text
            return ""
        text, self._thought = self._thought + text, ""
        at = min((at for one in self._triggers if (at := text.find(one)) >= 0), default=len(text))
        at = min(at, len(text) - held_back(text, self._triggers))
        text, self._thought = text[:at], text[at:]
        return text

    def _said(self, text: str) -> str:
        """Return what of the next text of the answer is said; the rest is held."""
        form = self._form
        if self._calling:
            self._calling += text
            return ""
        text, self._held = self._held + text, ""
        at = form.find(text, self._names, at_start=not self._has_said)
        if at >= 0:
            said, self._calling = form.without_channel(text[:at]), text[at:]
            self._has_said = self._has_said or bool(said.strip())
            return said
        starts = form.starts(self._names)
        if not self._has_said and (any(start.startswith(text.lstrip()) for start in starts) or may_begin(text)):
            self._held = text
            return ""
        n_said = len(text) - held_back(text, self._triggers)
        if form.in_channel and (channel := _CHANNEL.search(text[:n_said])) is not None:
            n_said = channel.start()
        said, self._held = text[:n_said], text[n_said:]
        self._has_said = self._has_said or bool(said.strip())
        return said
