"""How a model writes calls of tools in its answer, where they begin, and the grammar that they must match.

A format is learned from the model's chat template, which renders the calls of earlier answers: rendered with one call
and with two, whose names, keys and values are known, the text around them is the format; no family of models is listed
here. `call_parser` reads the calls.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from cpuchat.base.errors import TemplateError, UsageError
from cpuchat.base.text import common_prefix
from cpuchat.grammar.gbnf import ROOT, check_grammar
from cpuchat.grammar.rules import SPACE, Rules, any_but, literal
from cpuchat.grammar.schema import add_schema, schema_grammar
from cpuchat.protocol.messages import MessageData, Tool

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


class PairStyle(MessageData, frozen=True):
    """How arguments stand one by one: `opening` key `assignment` value `closing`, with `separator` between two.

    A string is between two `quote`; "" writes it as it is.
    """

    opening: str = ""
    assignment: str = ""
    closing: str = ""
    separator: str = ""
    quote: str = ""


class CallFormat(MessageData, frozen=True):
    """How calls are written: `section`, then calls with `between` two of them, then `end`. `turn_end` ends any
    answer, `text_end`, with which `section` begins, any text.

    "object": a call is a JSON object with the keys `name_key` and `arguments_key`, in `opening` and `closing`. "json":
    `opening` name `middle` arguments as JSON `closing`. "pairs": as "json", but the arguments are written as `pairs`
    says. `name_in_id`: an id such as `functions.search:0` stands for the name. `arguments_as_text`: the template takes
    arguments as JSON in a string.
    """

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
        """Return where calls of tools with these names begin in a text; -1: nowhere. `at_start`: the text begins an
        answer.
        """
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
    """An answer with one call, with two (None: the template takes one only), and how an answer ends."""

    one_call: str
    two_calls: str | None
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
    return _Written(written, both if _name(1, both)[1] else None, end_of_turn)


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
        other = _object(written.two_calls, 1) if written.two_calls is not None else None
        parts = _around(written, _Span(begin, end), _Span(*other[:2]) if other is not None else None)
        return CallFormat(shape="object", name_key=name_key, arguments_key=arguments_key, **parts)
    first = _json_span(written.one_call, 0)
    if first is None:
        return _learn_pairs(written)
    second = _json_span(written.two_calls, 1) if written.two_calls is not None else None
    begin, name = _name(0, written.one_call)
    if first.begin < begin:
        return None
    middle = _without_ids(written.one_call[begin + len(name) : first.begin])
    if second is not None and written.two_calls is not None:
        second = _Span(_name(1, written.two_calls)[0], second.end)
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
    if written.two_calls is not None:
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
    if second is None or written.two_calls is None:
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


_MAX_CHECKED: Final = 32 << 10
"""Bytes of schemas that are checked one by one when they are too much together."""
_ANY_ID: Final = "[0-9A-Za-z_.:-]{1,64}"
_ID_PAIR: Final = rf'"\"" ("id" | "tool_call_id" | "call_id") "\":" space "\"" {_ANY_ID} "\""'
_MARKERS: Final = re.compile(r"<[^<>]*>|[^<]+|<")
_SCALARS: Final = ("integer", "number", "boolean", "null")
_NESTED: Final = ("object", "array")


def call_grammar(form: CallFormat, tools: Sequence[Tool], *, single: bool = False) -> str:
    """Return the GBNF of one or more calls from `form.trigger` on; `single`: of one call. Tools that are not strict
    take any object if their schemas are too much for a grammar; "" if those of strict ones are, or there are no tools.
    """
    if not tools:
        return ""
    lax = [tool for tool in tools if not tool.strict]
    for loose in (lambda: (), lambda: filter(_is_unusable(), lax), lambda: lax)[: 3 if lax else 1]:
        with contextlib.suppress(UsageError):
            return _calls(form, tools, {tool.name for tool in loose()}, single=single)
    return ""


def _is_unusable() -> Callable[[Tool], bool]:
    """Return what says whether no grammar can hold a tool to its schema; of many large ones, not all are checked."""
    left = _MAX_CHECKED

    def check(tool: Tool) -> bool:
        nonlocal left
        left -= len(msgspec.json.encode(tool.parameters))
        with contextlib.suppress(UsageError):
            return left < 0 or not schema_grammar(tool.parameters, tool.name)
        return True

    return check


def _calls(form: CallFormat, tools: Sequence[Tool], loose: Collection[str], *, single: bool) -> str:
    """Return the GBNF of calls, of the tools named in `loose` with any arguments. Raises UsageError."""
    rules = Rules()
    rules.define(ROOT, "")
    rules.built_in(SPACE)
    writer = _CallWriter(form, rules, loose)
    rules.define("call", "")
    rules.define("call", " | ".join(map(writer.call, sorted(tools, key=lambda tool: not tool.strict))))
    # Without anything between two calls, more could not be told from text.
    between = writer.lenient(form.between.strip())
    can_tell = (form.between + form.opening).strip() and not single
    more = f"({_joined(SPACE, between, between and SPACE)} call)*" if can_tell else ""
    end = ""
    for part in reversed(_MARKERS.findall(form.end)):  # some of which may come after the model's last token
        end = f"({_joined(SPACE, writer.lenient(part.strip()), end)})?" if part.strip() else end
    section = _joined(writer.lenient(form.section.strip()), SPACE) if form.section.strip() else ""
    rules.define(ROOT, _joined(section, "call", more, end))
    grammar = rules.text()
    check_grammar(grammar, "tools")
    return grammar


class _CallWriter:
    """Writes the rules of calls in one format, of the tools named in `loose` with any arguments."""

    def __init__(self, form: CallFormat, rules: Rules, loose: Collection[str]) -> None:
        self._form = form
        self._rules = rules
        self._loose = loose
        self._marks: dict[str, str] = {}

    def call(self, tool: Tool) -> str:
        """Return the expression of a call of this tool."""
        form, name = self._form, literal(tool.name)
        before, after = self.lenient(form.opening.lstrip()), self.lenient(form.closing)
        if form.shape == "object":
            return _joined(before, self._object(tool), after)
        if form.name_in_id:
            name = f'"functions." {name} ":" [0-9]{{1,3}}'
        arguments = self._arguments(tool) if form.shape == "json" else self._pairs(tool)
        return _joined(before, name, self.lenient(form.middle), arguments, after)

    def lenient(self, text: str) -> str:
        """Return the expression of a literal with free white space, any number, and any id."""
        parts = list[str]()
        for part in re.split(rf"(\s+|\d+|{ID})", text):
            if part == ID:
                parts.append(self._rules.add("call-id", _ANY_ID))
            elif part.isdecimal():  # as some number their calls
                parts.append("[0-9]{1,6}")
            elif part:
                parts.append(SPACE if part.isspace() else literal(part))
        return " ".join(parts)

    def _object(self, tool: Tool) -> str:
        id_pair = self._rules.add("id-pair", _ID_PAIR)
        name = f"{literal(json.dumps(self._form.name_key))} space {literal(':')} space {literal(json.dumps(tool.name))}"
        key = literal(json.dumps(self._form.arguments_key))
        return (
            f'"{{" space ({id_pair} space "," space)? {name} space "," space'
            f' {key} space ":" space {self._arguments(tool)} (space "," space {id_pair})? space "}}"'
        )

    def _arguments(self, tool: Tool) -> str:
        name = f"call-{tool.name}"
        if tool.strict:
            return add_schema(tool.parameters, name, self._rules, name)
        is_object = tool.name not in self._loose and tool.parameters.get("type", "object") == "object"
        return self._value(tool.parameters if is_object else {}, name, "object")

    def _value(self, schema: Any, name: str, otherwise: str = "value") -> str:
        """Return the rule of a value in JSON; `otherwise` if a grammar cannot say it: the call is checked."""
        try:
            return add_schema(schema, name, self._rules, name) if schema else self._rules.built_in(otherwise)
        except UsageError:
            return self._rules.built_in(otherwise)

    # Arguments one by one

    def _pairs(self, tool: Tool) -> str:
        """Return the expression of the arguments, in any order; which are missing is checked later. Those of a strict
        tool come in the order of the schema, the required ones all.
        """
        style, pairs = self._form.pairs, list[str]()
        properties, required = tool.parameters.get("properties"), tool.parameters.get("required") or ()
        for key, schema in properties.items() if isinstance(properties, dict) else ():
            start = _joined(self.lenient(style.opening.strip()), literal(key), self.lenient(style.assignment))
            schema = schema if isinstance(schema, dict) and tool.name not in self._loose else {}
            value = self._written(schema, f"call-{tool.name}-{key}", key)
            one = _joined(start, value)
            if tool.strict and not style.separator.strip():
                one = f"{one} {SPACE}" if key in required else f"({one} {SPACE})?"
            pairs.append(one)
        if not pairs:
            return ""
        if tool.strict and not style.separator.strip():
            return _joined(SPACE, *pairs)
        pair = self._rules.add(f"call-{tool.name}-pair", " | ".join(pairs))
        many = f"{pair} ({self.lenient(style.separator) or SPACE} {pair})*"
        return f"{SPACE} {many if required else f'({many})?'} {SPACE}"

    def _written(self, schema: dict[str, Any], name: str, key: str) -> str:
        style, kind, values = self._form.pairs, schema.get("type"), schema.get("enum")
        end, quote = style.closing.replace(KEY, key), style.quote
        closing = self.lenient(end)
        if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
            return _joined(f"({self._rules.choice((f'{quote}{one}{quote}' for one in values), name)})", closing)
        is_json = quote in ("", *PLAIN_QUOTES) and KEY not in style.closing
        if kind == "boolean" and quote in PLAIN_QUOTES:  # as in Python
            return _joined('("True" | "False" | "true" | "false")', closing)
        if kind in _NESTED and quote in PLAIN_QUOTES:
            return _joined(f"({self._value(schema, name)} | {self._own_value(quote)})", closing)
        if kind in _SCALARS or (kind in _NESTED and is_json):
            return _joined(self._value(schema, name), closing)
        if not quote:
            return self._until(end.strip() or "\n")
        return _joined(self._string(quote) if kind == "string" else self._own_value(quote), closing)

    def _string(self, quote: str) -> str:
        """Return the rule of a text in quotes."""
        if quote not in PLAIN_QUOTES:
            return self._rules.add("quoted", f"{literal(quote)} {self._until(quote)}")
        backslash = "\\"
        inside = f"({any_but(quote + backslash)} | {literal(backslash)} {any_but('')})*"
        return self._rules.add("quoted", f"{literal(quote)} {inside} {literal(quote)}")

    def _own_value(self, quote: str) -> str:
        """Return the rule of a value as in JSON, with other quotes around texts, and around keys plain ones only."""
        for name in ("number", "boolean", "null"):
            self._rules.built_in(name)
        value = "own-value"
        key = self._string(quote) if quote in PLAIN_QUOTES else "[0-9A-Za-z_.-]{1,64}"
        self._rules.define("own-pair", f'{key} ":" {SPACE} {value}')
        self._rules.define(
            value,
            f'"{{" (own-pair ("," {SPACE} own-pair)*)? "}}" | "[" ({value} ("," {SPACE} {value})*)? "]"'
            f" | {self._string(quote)} | number | boolean | null",
        )
        return value

    def _until(self, mark: str) -> str:
        """Return the rule of any text up to and with `mark`, from the automaton of Knuth, Morris and Pratt."""
        if mark in self._marks:
            return self._marks[mark]
        names = [self._rules.reserve("until") for _ in mark]
        self._marks[mark] = names[0]
        for at, name in enumerate(names):
            steps = dict[str, int]()
            for character in mark[: at + 1]:
                text = mark[:at] + character
                steps[character] = next(n for n in range(len(text), -1, -1) if text.endswith(mark[:n]))
            known = "".join(character for character, state in steps.items() if state)
            parts = [_joined(literal(one), names[steps[one]] if steps[one] < len(mark) else "") for one in known]
            self._rules.define(name, " | ".join([*parts, f"{any_but(known)} {names[0]}"]))
        return names[0]


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))
