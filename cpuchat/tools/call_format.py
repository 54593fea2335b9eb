"""How a model writes calls of tools in its answer, and where they begin.

`call_learner` learns the format from a chat template, `call_parser` reads calls in a whole text, `call_stream` while
they are written, and `call_grammar` holds a model to them. Models whose chat template knows no tools get them described
in the system prompt and write calls as JSON (`GENERIC`, `as_text`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from cpuchat.protocol.messages import Message, Tool

ID = "\0"
"""Stands for the id of a call in the texts of a format, or another word: any."""
PLAIN_QUOTES = ("'", '"')
"""In which a backslash escapes."""
KEY = "\1"
"""Stands for the key of an argument in what closes it."""
_MARKER_FIRST = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_VARIES = re.compile(rf"[\s\d\"{ID}]|(?<!^)\{{")  # where what a model writes may differ from the template
_MARKER = re.compile(r"[<\[|>(=]\S{2,}")
_LAST_MARKER = re.compile(r"[<\[][^<>\[\]\s]+[>=]?\s*$|[<\[][^<>\[\]]+=\"$")  # which leads to the name of a call
_LOOSE_MARKERS = re.compile(r"(?:\s*<\|[^<>|]*\|>\w*)+\s*$")  # before a call that names its channel

Shape = Literal["object", "json", "pairs"]


class PairStyle(msgspec.Struct, frozen=True, kw_only=True):
    """How arguments stand one by one: `opening` key `assignment` value `closing`, with `separator` between two; a
    string between two `quote`, "" as it is."""

    opening: str = ""
    assignment: str = ""
    closing: str = ""
    separator: str = ""
    quote: str = ""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written: `section`, then calls with `between` two of them, then `end`. `turn_end` ends any answer,
    `text_end`, with which `section` begins, any text.

    "object": a call is a JSON object with `name_key` and `arguments_key`, in `opening` and `closing`. "json": `opening`
    name `middle` arguments as JSON `closing`. "pairs": as "json", but with arguments as of `pairs`. `name_in_id`: an id
    such as `functions.search:0` is the name. `arguments_as_text`: the template takes arguments as JSON in a string."""

    shape: Shape
    section: str = ""
    opening: str = ""
    middle: str = ""
    closing: str = ""
    between: str = ""
    end: str = ""
    turn_end: str = ""
    text_end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    pairs: PairStyle = PairStyle()
    name_in_id: bool = False
    arguments_as_text: bool = False

    @property
    def trigger(self) -> str:
        """Return the text with which calls begin, up to where it can differ."""
        start = f"{self.section}{self.opening}".lstrip()
        if not start and self.shape == "object":
            return "{"
        if (marker := _MARKER_FIRST.match(start.removeprefix(self.text_end))) is not None:
            return f"{self.text_end}{marker[0]}"
        varies = _VARIES.search(start)
        return start[: varies.start()] if varies is not None else start

    @property
    def literals(self) -> str:
        """Return all texts of the format together."""
        pairs = self.pairs
        around = self.section, self.opening, self.middle, self.closing, self.between, self.end
        return "".join((*around, pairs.opening, pairs.assignment, pairs.closing, pairs.separator, pairs.quote))

    @property
    def only_at_start(self) -> bool:
        """Return whether the trigger is ordinary text, which begins a call only where an answer begins."""
        return _MARKER.search(self.trigger) is None

    def starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that begin a call of one of these tools only where an answer begins."""
        if self._is_headless:
            return tuple(f"{name}{self.middle}" for name in names)
        return (self.trigger,) if self.only_at_start and self.trigger else ()

    def triggers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that begin a call of one of these tools wherever they stand."""
        if self._is_headless:
            return tuple(f"{self.between}{name}{self.middle}" for name in names) if self.between.strip() else ()
        if not self.only_at_start:
            lead = self.lead.strip()
            return tuple(dict.fromkeys((self.trigger, lead if _MARKER.search(lead) else self.trigger)))
        if self.shape != "object":
            return ()
        key = f'{{"{self.name_key}":'
        return (
            (f"\n{key}", '\n{"type": "function",') if self.is_bare else (f"{self.section}{self.opening}{key}".lstrip(),)
        )

    @property
    def is_bare(self) -> bool:
        """Return whether nothing tells a call from another JSON object."""
        return self.trigger == "{"

    @property
    def _is_headless(self) -> bool:
        """Return whether a call begins with its name; what leads to it is in the prompt, as with Functionary."""
        return self.shape == "json" and not f"{self.section}{self.opening}".strip()

    @property
    def lead(self) -> str:
        """Return what stands right before a name; models leave out the markers that may precede it."""
        opening = self.opening.lstrip()
        found = _LAST_MARKER.search(opening) if self.shape != "object" else None
        return found[0] if found is not None else opening

    def find(self, text: str, names: Sequence[str], *, at_start: bool = True) -> int:
        """Return where calls of tools with these names begin in a text, which begins an answer `at_start`; else -1."""
        if at_start and text.lstrip().startswith(self.starts(names) or ("\0",)):
            return 0
        return min((at for trigger in self.triggers(names) if (at := text.find(trigger)) >= 0), default=-1)

    def split(self, text: str, names: Sequence[str] = (), *, at_start: bool = True) -> tuple[str, str]:
        """Return what an answer says before its calls, and the calls."""
        at = self.find(text, names, at_start=at_start)
        return (text, "") if at < 0 else (self.without_channel(text[:at]).rstrip(), text[at:])

    def without_channel(self, said: str) -> str:
        """Return what is said before calls without the markers that name their channel."""
        return _LOOSE_MARKERS.sub("", said) if self.in_channel else said

    @property
    def in_channel(self) -> bool:
        """Return whether markers that tell a channel may stand before a call."""
        return not self.only_at_start and self.trigger[:1] not in "<["


GENERIC = CallFormat(shape="object", opening="<tool_call>\n", closing="\n</tool_call>", between="\n")
"""Models that were trained on it, and many that were not, know this form from Hermes and Qwen."""


def as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the messages with calls and their results as text, after a description of the tools."""
    found = list[Message]()
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if found and found[-1].role == "user" and found[-1].tool:
                text = f"{found.pop().content}\n{text}"
            found.append(Message(role="user", content=text, tool=message.tool or "-"))
        elif message.calls:
            bodies = ({"name": call.name, "arguments": call.arguments} for call in message.calls)
            written = (f"{GENERIC.opening}{json.dumps(one, ensure_ascii=False)}{GENERIC.closing}" for one in bodies)
            content = "\n".join(filter(None, (message.content, *written)))
            found.append(msgspec.structs.replace(message, content=content, calls=()))
        else:
            found.append(message)
    if not tools:
        return found
    listed = "\n".join(json.dumps(tool.declaration()["function"], ensure_ascii=False) for tool in tools)
    about = (
        "You can call these tools, each given with the JSON schema of its arguments:\n"
        f"{listed}\n\n"
        "To call one, write nothing but this, and you will get its result:\n"
        '<tool_call>\n{"name": "the tool", "arguments": {"argument": "value"}}\n</tool_call>'
    )
    if found and found[0].role == "system":
        about = f"{found.pop(0).content}\n\n{about}"
    return [Message(role="system", content=about), *found]
