"""Learns how a model writes calls from its chat template, which renders the calls of earlier answers: rendered with one
call and with two, whose names, keys and values are known, the text around them is the format. No family of models is
listed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from cpuchat.base.errors import TemplateError
from cpuchat.base.text import common_prefix
from cpuchat.tools.call_format import ID, KEY, CallFormat, PairStyle

Render = Callable[[list[dict[str, Any]], bool], str]
"""Renders a chat of these messages, with `add_generation_prompt` or not. Raises TemplateError."""

_NAMES = ("probe_first", "probe_second")
_IDS = ("Kq7mZp2xA", "Rt5nWy8cB")  # nine letters and digits: some templates insist
_KEYS = ("alpha_key", "beta_key", "gamma_key")  # of two texts and a number, to tell how texts are quoted
_VALUES: tuple[tuple[str, str, int], ...] = (("left text", "middle text", 7301), ("right text", "other text", 7302))
_SAID = "◊probe◊"
_LONGEST = 2_000  # characters around a call
_LONGEST_CHAT = 100_000  # templates put up to 20,000 before the first message
_DECODER = json.JSONDecoder()
_BEGINS_VALUE = re.compile(r'[{"]')
_INSIDE_MARKER = re.compile(r"[^<\[{(\s]*[>\])}]+(?=\s*[<\[\]])")  # what is left of one at the beginning
_CUT_MARKER = re.compile(r"(?:<[^<>]*|\[[^\[\]]*)$")  # the beginning of one at the end


class _Span(NamedTuple):
    """Where a call is in a text: from its name, or its object, to the end of its arguments."""

    begin: int
    end: int


class _Written(NamedTuple):
    """An answer with one call, with two ("": the template takes one only), and how an answer ends."""

    one_call: str
    two_calls: str
    end_of_turn: str


def learn_format(render: Render) -> CallFormat | None:
    """Return the format of calls of a template; None for one that renders none."""
    for as_text in (False, True):  # some want arguments as JSON in a string
        try:
            written = _render(render, as_text)
            found = _learn(written) if written is not None else None
        except (TemplateError, ValueError):
            continue
        if found is not None:
            return msgspec.structs.replace(found, arguments_as_text=as_text)
    return None


def _render(render: Render, as_text: bool) -> _Written | None:
    """Return what a template makes of calls; None when it leaves them out. Raises TemplateError."""
    user = {"role": "user", "content": "Hello"}
    prompt = render([user], True)
    said = render([user, {"role": "assistant", "content": _SAID}], False)
    one = render([user, _answer(1, as_text)], False)
    try:
        two = render([user, _answer(2, as_text)], False)
    except TemplateError:
        two = one
    if max(map(len, (prompt, said, one, two))) > _LONGEST_CHAT:
        return None
    # What stands before all that an assistant says, such as an empty block of reasoning, is no part of a call.
    heads = [prompt, said.partition(_SAID)[0]] if _SAID in said else [prompt]
    start = max(_shared(head, one) for head in heads)
    written, both = one[start:], two[start:]
    if not _name(0, written)[1] or len(written) > 2 * _LONGEST:
        return None
    end_of_turn = said.rpartition(_SAID)[2] if _SAID in said else ""
    return _Written(written, both if _name(1, both)[1] else "", end_of_turn)


def _shared(head: str, text: str) -> int:
    """Return how much of a head a text begins with; not with the first letters of two markers that differ."""
    both = head[: common_prefix(head, text)]
    return len(both) if both == head else max(both.rfind(end) + 1 for end in ">]\n ")


def _answer(n_calls: int, as_text: bool) -> dict[str, Any]:
    calls = []
    for index in range(n_calls):
        arguments = _arguments(index)
        function = {"name": _NAMES[index], "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": _IDS[index], "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _arguments(index: int) -> dict[str, Any]:
    return dict(zip(_KEYS, _VALUES[index], strict=True))


def _name(index: int, text: str) -> tuple[int, str]:
    """Return where a call is named before its arguments, and by what: name or, as with Kimi K2, id; "" by neither."""
    ahead = text.find(str(_VALUES[index][0]))
    for name in (_NAMES[index], _IDS[index]):
        if (at := text.rfind(name, 0, ahead)) >= 0:
            return at, name
    return -1, ""


def _learn(written: _Written) -> CallFormat | None:
    if str(_arguments(0)) in written.one_call:
        return None  # as Python writes it: the template wants a string
    if (outer := _object(written.one_call, 0)) is not None:
        begin, end, name_key, arguments_key = outer
        other = _object(written.two_calls, 1)
        parts = _around(written, _Span(begin, end), _Span(*other[:2]) if other is not None else None)
        return CallFormat(shape="object", name_key=name_key, arguments_key=arguments_key, **parts)
    first = _json_span(written.one_call, 0)
    if first is None:
        return _learn_pairs(written)
    second = _json_span(written.two_calls, 1)
    begin, name = _name(0, written.one_call)
    if first.begin < begin:
        return None
    middle = _without_ids(written.one_call[begin + len(name) : first.begin])
    if second is not None:
        second = second._replace(begin=_name(1, written.two_calls)[0])
    parts = _around(written, _Span(begin, first.end), second)
    return CallFormat(shape="json", middle=middle, name_in_id=name == _IDS[0], **parts)


def _json_span(text: str, index: int) -> _Span | None:
    """Return where the arguments of a call stand as JSON, or as JSON in a string."""
    arguments = _arguments(index)
    for begin in _BEGINS_VALUE.finditer(text):
        try:
            value, end = _DECODER.raw_decode(text, begin.start())
            if value == arguments or (isinstance(value, str) and json.loads(value) == arguments):
                return _Span(begin.start(), end)
        except (ValueError, RecursionError):
            continue
    return None


def _object(text: str, index: int) -> tuple[int, int, str, str] | None:
    """Return begin and end of a call's JSON object, its keys of name and arguments; None when it is no such object."""
    place, name = _name(index, text)
    at = text.rfind("{", 0, place)
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, -1
        if isinstance(value, dict) and end > place:
            keys = [key for key, one in value.items() if one == name]
            arguments = [key for key, one in value.items() if isinstance(one, dict | str) and _KEYS[0] in one]
            return (at, end, keys[0], arguments[0]) if keys and arguments else None
        at = text.rfind("{", 0, at)
    return None


def _learn_pairs(written: _Written) -> CallFormat | None:
    text = written.one_call
    begin, name = _name(0, text)
    keys = [text.find(key, begin) for key in _KEYS]
    if min(keys) < 0 or keys != sorted(keys):
        return None
    values = [text.find(str(value), key + len(word)) for value, key, word in zip(_VALUES[0], keys, _KEYS, strict=True)]
    if min(values) < 0:
        return None
    ends = [at + len(str(value)) for at, value in zip(values, _VALUES[0], strict=True)]
    lead = [text[key + len(word) : at] for key, word, at in zip(keys, _KEYS, values, strict=True)]
    joint = text[ends[0] : keys[1]].replace(_KEYS[0], KEY)  # behind a text
    last = text[ends[2] :].replace(_KEYS[2], KEY)  # behind the number
    assignment, quote = _assignment(lead[0], lead[2])
    if lead[1] != lead[0] or not assignment.strip() or not joint.startswith(quote):
        return None
    joint = joint[len(quote) :]
    closing = _CUT_MARKER.sub("", joint[: common_prefix(joint, last)])
    head = text[begin + len(name) : keys[0]]
    opening = _common_suffix(head, joint[len(closing) :])
    separator = joint[len(closing) : len(joint) - len(opening)]
    style = PairStyle(opening=opening, assignment=assignment, closing=closing, separator=separator, quote=quote)
    n_closing = len(closing.replace(KEY, _KEYS[2]))
    second = None
    if written.two_calls:
        number = str(_VALUES[1][2])
        place, _ = _name(1, written.two_calls)
        second = _Span(place, written.two_calls.find(number, place) + len(number) + n_closing)
    parts = _around(written, _Span(begin, ends[2] + n_closing), second)
    middle = _without_ids(head[: len(head) - len(opening)])
    return CallFormat(shape="pairs", middle=middle, pairs=style, **parts)


def _assignment(text: str, number: str) -> tuple[str, str]:
    """Return what stands between a key and its value, and the quote before a text; "" when they tell nothing."""
    begin = text[: common_prefix(text, number)]
    if begin == number:
        return begin, text[len(begin) :]
    end = _common_suffix(text[len(begin) :], number[len(begin) :])
    types = (one[len(begin) : len(one) - len(end)] for one in (text, number))
    if end and all(type.replace("-", "").isalnum() for type in types):  # an attribute tells the type of a value
        return f"{begin}{ID}{end}", ""
    return "", ""


def _around(written: _Written, first: _Span, second: _Span | None) -> dict[str, Any]:
    """Return the texts of a format around calls; with one call only, all that is before it is the opening."""
    head = _without_ids(written.one_call[: first.begin])
    tail = written.one_call[first.end :]
    turn_end = _common_suffix(tail, written.end_of_turn)
    if turn_end != written.end_of_turn:  # whole markers only
        turn_end = turn_end[at:] if (at := turn_end.find("<")) >= 0 else ""
    tail = _without_ids(tail.removesuffix(turn_end))
    if second is None:
        return _checked({"opening": head, "closing": tail.rstrip(), "turn_end": turn_end})
    joint = _without_ids(written.two_calls[first.end : second.begin])  # up to there both texts are the same
    opening = _common_suffix(head, joint)
    opening = opening[found.end() :] if (found := _INSIDE_MARKER.match(opening)) is not None else opening
    rest = joint[: len(joint) - len(opening)]
    closing = _CUT_MARKER.sub("", rest[: common_prefix(rest, tail)])
    both = head[: common_prefix(head, written.end_of_turn)]
    return _checked({
        "text_end": both[: both.rfind(">") + 1],
        "section": head[: len(head) - len(opening)],
        "opening": opening,
        "closing": closing,
        "between": rest[len(closing) :],
        "end": tail[len(closing) :],
        "turn_end": turn_end,
    })  # fmt: skip


def _checked(parts: dict[str, str]) -> dict[str, Any]:
    """Return the texts. Raises ValueError if they hold a whole message, and not only what is around a call."""
    if sum(map(len, parts.values())) > _LONGEST:
        raise ValueError("too long for the texts around a call")
    return parts


def _without_ids(text: str) -> str:
    for one in (*_IDS, *_NAMES):  # some name the call twice
        text = text.replace(one, ID)
    return text


def _common_suffix(text: str, other: str) -> str:
    return text[len(text) - common_prefix(text[::-1], other[::-1]) :]
