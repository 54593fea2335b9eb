"""Renders one chat template in a separate process, for chat_template.py.

A template is untrusted code. Jinja's sandbox keeps it from reaching Python's objects, but nothing in Python bounds the
time and memory of `"a" * 10**9 | sort` and the like. The kernel does: this process gets limits on address space, CPU
time, open files and file size, and may die of them without harm.

It is run by path with `python -I`, so it imports nothing of cpuchat. Requests and replies are lines of JSON; the first
one holds the template, each later one the variables of a rendering. Replies are `{"text": ...}` or
`{"error": ..., "raised": bool}`.
"""

import codecs
import contextlib
import datetime
import json
import re
import resource
import sys
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_MEMORY = 512 << 20
MAX_CPU_SECONDS = 2
MAX_OUTPUT = 8 << 20  # characters, on top of four times the input
NOT_ASCII = re.compile("[^\x00-\x7f\ufdd0]+")  # but for MARK of vocab.py


class Raised(Exception):
    """Raised when the template calls raise_exception."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Lets a template change lists that it made itself (Kimi K2 keeps a queue of ids), never those it was given."""

    given: frozenset[int] = frozenset()

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is list and attr in ("append", "pop") and id(obj) not in self.given:
            return True
        return super().is_safe_attribute(obj, attr, value)


def _lists(value: Any) -> Iterator[int]:
    """Give the identities of all lists in a value from JSON."""
    if isinstance(value, list):
        yield id(value)
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _lists(one)


def _raise(message: object = "") -> None:
    raise Raised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as JSON; unlike Jinja's own without HTML escapes and sorting. Keeps the marks of vocab.py."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def compile_template(source: str) -> jinja2.Template:
    """Compile in the environment that chat templates are written for (transformers' apply_chat_template)."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.pop("lipsum")
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any], limit: int) -> str:
    """Render. Raises OverflowError past `limit` characters."""
    assert isinstance(template.environment, Sandbox)
    template.environment.given = frozenset(_lists(variables))
    parts: list[str] = []
    size = 0
    for part in template.generate(variables):
        size += len(part)
        if size > limit:
            raise OverflowError(f"its output is longer than {limit >> 20} MB")
        parts.append(part)
    return "".join(parts)


def answer(request: bytes, template: jinja2.Template) -> dict[str, Any]:
    try:
        return {"text": render(template, json.loads(request), MAX_OUTPUT + 4 * len(request))}
    except Raised as error:
        return {"error": str(error)[:500], "raised": True}
    except Exception as error:
        known = {MemoryError: "out of memory", RecursionError: "recursion limit exceeded"}
        return {"error": known.get(type(error), f"{type(error).__name__}: {error}"[:500]), "raised": False}


def _allow_cpu_time() -> None:
    """Raise the limit for each rendering: it counts the whole life of the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(used.ru_utime + used.ru_stime) + 1 + MAX_CPU_SECONDS
    if hard == resource.RLIM_INFINITY or soft <= hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _write(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


def main() -> None:
    # Import everything that a template may need: later no file can be opened.
    for name in ("ascii", "latin-1", "unicode_escape", "raw_unicode_escape", "utf-16", "utf-8"):
        codecs.lookup(name)
    used = "{% for m in messages %}{{ '\\n' ~ m | tojson }}{{ strftime_now('%B') }}{% endfor %}"
    for source in (used, "{{ 1 / 0 }}"):
        answer(b'{"messages": [{}]}', compile_template(source))
    source = sys.stdin.buffer.readline()
    if not source:
        return
    limits = ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_FSIZE, 0))
    for what, maximum in limits:
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the system has no such limit
            resource.setrlimit(what, (maximum, maximum))
    _allow_cpu_time()
    try:
        template = compile_template(json.loads(source))
    except Exception as error:  # also RecursionError and MemoryError
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        _write({"error": f"{type(error).__name__}: {error}{where}"[:500], "raised": False})
        return
    _write({"text": ""})
    for request in sys.stdin.buffer:
        _allow_cpu_time()
        _write(answer(request, template))


if __name__ == "__main__":
    main()
