"""Tools that a client offers by a type in place of a schema, and in which form their calls go back to it.

What the clients run themselves (a shell, an editor) is offered to the model as a function, with the schema that the
vendor documents (the guides to tools of OpenAI and Anthropic). What the vendor would run, such as a search of the web,
is left out.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.protocol.messages import Tool
from cpuchat.serving.errors import field_error

Dialect = Literal["chat", "responses", "messages"]


class Kind(NamedTuple):
    """What a tool is to its client: "custom" has one text. `name` and `namespace` are the client's."""

    type: Literal["function", "custom"] = "function"
    name: str = ""
    namespace: str = ""

    def item(self, arguments: str) -> dict[str, Any]:
        """Return what an item of a call has beside its ids, with arguments as JSON that may be cut."""
        if self.type == "custom":
            given: dict[str, Any] = {}
            for end in ("", '"}', "}"):  # it may be cut in its last text
                with contextlib.suppress(ValueError):
                    given = msgspec.json.decode(arguments + end, type=prepared(dict[str, Any]))
                    break
            return {"name": self.name, "input": str(given.get("input", ""))}
        return {"name": self.name, **({"namespace": self.namespace} if self.namespace else {}), "arguments": arguments}


@dataclass(frozen=True)
class Offered:
    """The tools of a request, what each is to the client, and the names and types of those that are left out."""

    tools: tuple[Tool, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    left_out: frozenset[str] = frozenset()


NO_TOOLS: Final = Offered()


_TEXT: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}


def _schema(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {required: _TEXT} | properties, "required": [required]}


_RUN_BY_CLIENT: Final = {
    "bash": ("Runs a command in a shell that stays open.", _schema("command", restart={"type": "boolean"})),
    "text_editor": (
        "Views and changes files: command is view, create, str_replace or insert.",
        _schema(
            "command", path=_TEXT, file_text=_TEXT, old_str=_TEXT, new_str=_TEXT, insert_line=_INTEGER,
            insert_text=_TEXT, view_range={"type": "array", "items": _INTEGER},
        ),
    ),
}  # fmt: skip
"""By type, without its date: what the tool does, its schema."""


def declarations(one: Any, where: str, dialect: Dialect) -> Iterator[tuple[dict[str, Any], str, Kind | None]]:
    """Give the functions that a declared tool stands for, each with its place; None for one that is left out.

    Raises:
        Refusal: it is no tool.
    """
    kind = one.get("type") or "function" if isinstance(one, dict) else ""
    plain = re.sub(r"_\d{8}$", "", str(kind))
    name = str(one.get("name") or plain) if isinstance(one, dict) else ""
    if dialect == "messages" and kind == "custom":
        yield one, where, Kind(name=name)
    elif kind == "function" or (kind == "custom" and dialect == "responses"):
        # Some clients mix the forms of both of OpenAI's dialects, and that of Anthropic's.
        inner, at = (one[kind], f"{where}.{kind}") if isinstance(one.get(kind), dict) else (one, where)
        found = Kind(kind, name=str(inner.get("name")))
        if kind == "custom":  # it takes a text
            form, about = inner.get("format"), [str(inner.get("description") or "")]
            if isinstance(form, dict) and "definition" in form:
                about.append(f"The input must match this grammar ({form.get('syntax')}):\n{form['definition']}")
            about = "\n\n".join(filter(None, about))
            inner = {"name": inner.get("name"), "description": about, "parameters": _schema("input")}
        yield inner, at, found
    elif kind == "namespace" and dialect == "responses" and isinstance(one.get("tools"), list):
        inside = (inner for inner in one["tools"] if not (isinstance(inner, dict) and inner.get("type") == kind))
        for number, inner in enumerate(inside):
            for function, at, found in declarations(inner, f"{where}.tools[{number}]", dialect):
                if found is not None:
                    function = {**function, "name": namespaced(name, found.name)}
                yield function, at, found and found._replace(namespace=name)
    elif plain in _RUN_BY_CLIENT:
        about, schema = _RUN_BY_CLIENT[plain]
        yield {"name": name, "description": about, "parameters": schema}, where, Kind(name=name)
    elif isinstance(kind, str) and kind:
        yield {"type": kind, "name": name}, where, None
    else:
        raise field_error(where, "a tool is an object with a `type`")


def namespaced(namespace: str, name: str) -> str:
    """Return the name under which the model sees a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name
