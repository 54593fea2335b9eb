"""From messages to the text that a model was trained on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cpuchat.errors import TemplateError
from cpuchat.protocol import Message

PLAIN_STOPS = ("\nUser:", "\nAssistant:", "\nSystem:")
"""Stop strings that go with `plain_completion`."""

MAX_SOURCE = 1 << 20
_MAX_REPLY = 1 << 28  # far beyond what the child lets a template write
_WALL_SECONDS = 60.0  # the child's own limit on CPU time comes first; this is for a child that does nothing at all
_SENTINEL = "cpuchat-probe-5f1c"
_HINT = "Another file of this model may have a sound template; --raw talks to it without one."


def plain_completion(messages: Sequence[Message]) -> str:
    """A transcript for models without a chat template. Use `PLAIN_STOPS` with it."""
    names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    return "".join(f"{names[m.role]}{m.content.strip()}\n" for m in messages) + "Assistant:"


class _Style(NamedTuple):
    """How a template wants its variables."""

    content_in_parts: bool = False
    tool_list: bool = False


_STYLES = (_Style(), _Style(tool_list=True), _Style(content_in_parts=True))


class ChatTemplate:
    """A model's own Jinja chat template.

    It is rendered in a helper process with limits on memory and CPU time (see template_process.py), started here
    and kept; a rendering costs well under a millisecond more than in the same process. When a template kills the
    helper, the next rendering starts a new one.

    What templates disagree about is found out with a probe: some show no system message (it is then put in front of
    the first user message), some want the content as a list of parts, some a list of tools even when there are none.
    When a template refuses the order of the roles, neighbours of the same role are merged and it is tried again.

    Args:
        source: Jinja text from the model file.
        bos_token, eos_token: texts that the template may place. A template that starts with the BOS token makes
            adding another one while tokenizing wrong.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._child = _Child(source)
        self._style: _Style | None = None
        self._shows_system: bool | None = None

    def check(self) -> None:
        """Render a first message, to learn of a broken template before it is needed.

        Raises:
            TemplateError: as `render`.
        """
        self.render([Message(role="user", content="Hello")])

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt for `messages`, ending where the model goes on.

        Raises:
            TemplateError: the template is wrong, refused the messages, or broke a limit (time, memory, output of
                8 MB, recursion, access to internals). The next call is safe.
        """
        if self._style is None:
            self._style = next((style for style in _STYLES if self._shows("user", style)), _STYLES[0])
        plain = list(messages)
        if any(m.role == "system" for m in plain):
            if self._shows_system is None:
                self._shows_system = self._shows("system", self._style)
            if not self._shows_system:
                plain = _system_into_user(plain)
        try:
            return self._render(plain, self._style, add_generation_prompt)
        except _Refused as refusal:
            merged = _merge_neighbours(plain)
            if len(merged) == len(plain):
                raise TemplateError(refusal.message, refusal.hint) from None
        try:
            return self._render(merged, self._style, add_generation_prompt)
        except _Refused as refusal:
            raise TemplateError(refusal.message, refusal.hint) from None

    def close(self) -> None:
        """End the helper process. A later rendering starts it again."""
        self._child.close()

    def _render(self, messages: Sequence[Message], style: _Style, add_generation_prompt: bool) -> str:
        return self._child.request(
            {
                "messages": [_as_dict(m, style.content_in_parts) for m in messages],
                "tools": [] if style.tool_list else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self._tokens,
            }
        )

    def _shows(self, role: str, style: _Style) -> bool:
        """Whether the text of a message of this role gets into the prompt."""
        messages = [Message(role="user", content=_SENTINEL)]
        if role == "system":
            messages = [Message(role="system", content=_SENTINEL), Message(role="user", content="Hello")]
        try:
            return _SENTINEL in self._render(messages, style, True)
        except _Refused:
            return False


def _as_dict(message: Message, in_parts: bool) -> dict[str, Any]:
    content = [{"type": "text", "text": message.content}] if in_parts else message.content
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "assistant" and message.reasoning:
        # One thing, three names: Qwen, GLM, Kimi, ... / gpt-oss, LFM, Command / Solar, Bielik.
        fields |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), message.reasoning)
    return fields


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    system = "\n\n".join(m.content for m in messages if m.role == "system")
    rest = [m for m in messages if m.role != "system"]
    for i, message in enumerate(rest):
        if message.role == "user":
            rest[i] = Message(role="user", content=f"{system}\n\n{message.content}")
            return rest
    return [Message(role="user", content=system), *rest]


def _merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            last = merged.pop()
            message = Message(
                role=message.role,
                content=f"{last.content}\n\n{message.content}",
                reasoning="\n\n".join(filter(None, (last.reasoning, message.reasoning))),
            )
        merged.append(message)
    return merged


class _Refused(TemplateError):
    """The template ran and failed; other messages may please it. Anything else that fails is final."""


class _Child:
    """The helper process, started early because its imports take a tenth of a second."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded = False
        self._reaper: weakref.finalize[..., Any] | None = None
        if len(source) <= MAX_SOURCE:
            self._start()

    def request(self, variables: dict[str, Any]) -> str:
        """Raises TemplateError, or its kind _Refused."""
        with self._lock:
            if len(self._source) > MAX_SOURCE:
                raise TemplateError("The model's chat template is longer than 1 MB.", _HINT)
            try:
                process = self._process or self._start()
            except OSError as error:
                raise TemplateError(f"The process for the chat template cannot be started: {error}.", _HINT) from None
            late = threading.Event()
            timer = threading.Timer(_WALL_SECONDS, lambda: (late.set(), process.kill()))
            timer.daemon = True
            timer.start()
            try:
                if not self._loaded:
                    reply = _exchange(process, self._source)
                    if "error" in reply:
                        self._end()
                        raise TemplateError(f"The model's chat template is wrong: {_clean(reply['error'])}.", _HINT)
                    self._loaded = True
                reply = _exchange(process, variables)
            except (EOFError, OSError, ValueError):
                raise TemplateError(f"The model's chat template {self._why_it_died(late.is_set())}.", _HINT) from None
            finally:
                timer.cancel()
        if "error" in reply:
            verb = "refused the conversation" if reply["raised"] else "failed"
            raise _Refused(f"The model's chat template {verb}: {_clean(reply['error'])}.", _HINT)
        return reply["text"]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        keep = ("PATH", "SYSTEMROOT", "TZ", "LD_LIBRARY_PATH")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in keep if name in os.environ},
        )
        self._loaded = False
        self._reaper = weakref.finalize(self, _reap, self._process)
        return self._process

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None or self._reaper is None:
            return None
        self._reaper()
        return process.returncode

    def _why_it_died(self, late: bool) -> str:
        process = self._process
        if process is not None:
            try:
                process.wait(1)
            except subprocess.TimeoutExpired:
                process.kill()
        status = self._end()
        if late or status == -getattr(signal, "SIGXCPU", 0):
            return "ran for too long and was stopped"
        return "broke its limits and was stopped"


def _reap(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:  # a broken pipe that still held something
                continue
    process.kill()
    process.wait()


def _exchange(process: subprocess.Popen[bytes], message: Any) -> dict[str, Any]:
    """Raises EOFError or OSError when the process ended, also in the middle of its reply; ValueError when the reply is
    none."""
    assert process.stdin is not None and process.stdout is not None
    body = json.dumps(message).encode()
    process.stdin.write(len(body).to_bytes(4, "little") + body)
    process.stdin.flush()
    header = process.stdout.read(4)
    length = int.from_bytes(header, "little") if len(header) == 4 else 0
    if length > _MAX_REPLY:
        raise ValueError("a reply of that length cannot be meant")
    body = process.stdout.read(length)
    if not body or len(body) < length:
        raise EOFError
    reply = json.loads(body)
    if not isinstance(reply, dict) or not isinstance(reply.get("error", reply.get("text")), str):
        raise ValueError("neither text nor error")
    return {"raised": False, **reply}


def _clean(text: str) -> str:
    """On one line, without control characters, without the full stop that the sentence gets."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split()).rstrip(".")
