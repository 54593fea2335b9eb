"""From messages to the text that a model was trained on: its chat template, rendered by template_process.py."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from cpuchat.base.errors import TemplateError
from cpuchat.base.text import clean_line
from cpuchat.engine.prompt.turns import TurnFitter
from cpuchat.protocol.messages import EFFORTS, Message, Tool
from cpuchat.tools.call_format import GENERIC, CallFormat, as_text
from cpuchat.tools.call_learner import learn_format

MAX_SOURCE: Final = 1 << 20
_MAX_REPLY: Final = 1 << 28  # far beyond what the helper lets a template write
_WALL_SECONDS: Final = 60.0  # the helper's own limit on CPU time comes first; this is for one that does nothing at all
_HINT: Final = "Use --raw to send text without a template, or choose another file of this model."


class TemplateRejection(TemplateError):
    """The template ran and failed; other messages may work. Any other failure is final."""


class TemplateHelper:
    """Renders one template in a process with limits on memory and CPU time, in a millisecond. It is started early,
    because its imports take a tenth of a second, and anew after a template has killed it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._is_compiled = False
        self._reaper: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()
        if len(source) <= MAX_SOURCE:
            self._start()

    def warm_up(self) -> None:
        def compile_it() -> None:
            with contextlib.suppress(TemplateError), self._lock:  # raised again when a chat is rendered
                self._ask(None)

        threading.Thread(target=compile_it, name="template", daemon=True).start()

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text. Raises TemplateRejection: the template raised an error with these variables;
        TemplateError: it is invalid, or exceeded a limit."""
        with self._lock:
            reply = self._ask(variables)
        if "error" in reply:
            verb = "rejected the conversation" if reply["raised"] else "failed"
            raise TemplateRejection(f"The model's chat template {verb}: {reply['error']}.", _HINT)
        return reply["text"]

    def _ask(self, variables: dict[str, Any] | None) -> dict[str, Any]:
        """Compile the template if it is not, and return the reply to `variables` (None: none). Raises TemplateError."""
        if len(self.source) > MAX_SOURCE:
            raise TemplateError("The model's chat template is larger than 1 MB.", _HINT)
        try:
            process = self._process or self._start()
        except OSError as error:
            raise TemplateError(f"Cannot start the process for the chat template: {error}.", _HINT) from None
        timed_out = threading.Event()
        timer = threading.Timer(_WALL_SECONDS, lambda: (timed_out.set(), process.kill()))
        timer.daemon = True
        timer.start()
        try:
            if not self._is_compiled:
                reply = _exchange(process, self.source)
                if "error" in reply:
                    self._end()
                    raise TemplateError(f"The model's chat template is invalid: {reply['error']}.", _HINT)
                self._is_compiled = True
            return {} if variables is None else _exchange(process, variables)
        except (EOFError, OSError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            self._end()
            what = "time" if timed_out.is_set() or process.returncode == -signal.SIGXCPU else "memory or output"
            raise TemplateError(f"The model's chat template exceeded its {what} limit.", _HINT) from None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process. A later rendering starts it again."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._process = None
        if self._reaper is not None:
            self._reaper()

    def _start(self) -> subprocess.Popen[bytes]:
        keep = ("PATH", "SYSTEMROOT", "TZ", "LD_LIBRARY_PATH")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in keep if name in os.environ},
        )
        self._is_compiled = False
        self._reaper = weakref.finalize(self, _reap, self._process)
        return self._process


def _reap(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # a broken pipe with something left in the buffer
                stream.close()
    process.kill()
    process.wait()


def _exchange(process: subprocess.Popen[bytes], message: Any) -> dict[str, Any]:
    """Send one request and return the reply. Raises EOFError, OSError: the process ended, maybe in the middle of its
    reply; ValueError: the reply is malformed."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline(_MAX_REPLY)
    if not line.endswith(b"\n"):
        raise EOFError
    reply = json.loads(line)
    if not isinstance(reply, dict) or not isinstance(reply.get("error", reply.get("text")), str):
        raise ValueError("the reply has neither text nor error")
    if "error" in reply:
        reply["error"] = clean_line(reply["error"]).rstrip(".")
    return {"raised": False, **reply}


PLAIN_STOPS = ("\nUser:", "\nAssistant:", "\nSystem:")
"""Stop strings for `plain_completion`."""

_SENTINEL = "cpuchat-probe-5f1c"
_HELLO = Message(role="user", content=_SENTINEL)
_EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")  # gpt-oss, ... / Kimi K3 / Muse Glimmer
_USUAL_EFFORTS = ("low", "medium", "high")  # of templates that write the word they are given, as gpt-oss
_PROBE = Tool(
    name="probe_tool_0",
    description="Probe.",
    parameters={"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}},
)


def plain_completion(messages: Sequence[Message]) -> str:
    """Render a transcript for models without a chat template. Use `PLAIN_STOPS` with it."""
    names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    return "".join(f"{names[m.role]}{m.content.strip()}\n" for m in messages) + "Assistant:"


class _Style(NamedTuple):
    """How a template wants its variables."""

    content_in_parts: bool = False
    tool_list: bool = False


_STYLES = (_Style(), _Style(tool_list=True), _Style(content_in_parts=True))


class ChatTemplate:
    """A model's own Jinja chat template, rendered in a helper process.

    What templates disagree about is found out with probes: some want the content as a list of parts, some a list of
    tools even when there are none, and `turns` tells what they make of messages. `helper`: renders the template; its
    owner closes it. `bos_token`, `eos_token`: texts that the template may place."""

    def __init__(self, helper: TemplateHelper, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._helper = helper
        self._fitter = TurnFitter(self._accepts)
        self._efforts: dict[str, dict[str, Any]] = {}
        self._call_format: CallFormat | None = None

    def render(
        self, messages: Sequence[Message], reasoning: bool | None = None, tools: Sequence[Tool] = (), effort: str = ""
    ) -> str:
        """Return the prompt for `messages`, ending where the model continues.

        `reasoning`: whether the model shall reason first, for templates that offer the choice; None: their default.
        `effort`: how much, for templates that take such a word. `tools`: what the model may call; for a template that
        knows no calls they are described in the system prompt. Raises TemplateError: the template is invalid, rejected
        the messages, or exceeded a limit (time, memory, output of 8 MB, recursion, access to internals)."""
        style = self._style
        if (tools or any(message.calls for message in messages)) and self.call_format is GENERIC:
            messages, tools = as_text(messages, tools), ()
        return self._render(self._fitter.fit(messages), style, reasoning, tools, self._effort_in_words(effort))

    @property
    def takes_effort(self) -> bool:
        """Return whether the template can be told how much the model shall reason."""
        return re.search("|".join((*_EFFORT_NAMES, "thinking_budget")), self._helper.source) is not None

    @property
    def call_format(self) -> CallFormat:
        """Return how the model writes calls of tools. Raises TemplateError if the template is invalid."""
        if self._call_format is None:
            style = self._style
            learned = learn_format(lambda messages, more: self._render_dicts(messages, style, more))
            self._call_format = learned or GENERIC
        return self._call_format

    def _effort_in_words(self, effort: str) -> dict[str, Any]:
        """Return the variables that tell the template an effort: the nearest word that it takes."""
        if effort and effort not in self._efforts:
            words, quoted = list(EFFORTS), re.findall("['\"]([a-z_]+)['\"]", self._helper.source)
            spelled = {one: one for one in words if one in (*_USUAL_EFFORTS, *quoted)}
            spelled |= {"none": "no_think"} if "no_think" in quoted else {}  # Hy3's
            known = sorted(spelled, key=lambda one: (abs(words.index(one) - words.index(effort)), -words.index(one)))
            choices = [{name: spelled[one] for name in _EFFORT_NAMES} for one in known]
            taken = (one for one in choices if self._has_all([_HELLO], words=one))
            self._efforts[effort] = {"thinking_budget": EFFORTS[effort]} | next(taken, {})
        return self._efforts.get(effort, {})

    @cached_property
    def _style(self) -> _Style:
        """Return the first style in which the text of a message gets into the prompt."""
        for style in _STYLES:
            with contextlib.suppress(TemplateRejection):
                if _SENTINEL in self._render([_HELLO], style):
                    return style
        return _STYLES[0]

    def _render(
        self,
        messages: Sequence[Message],
        style: _Style,
        reasoning: bool | None = None,
        tools: Sequence[Tool] = (),
        words: dict[str, Any] | None = None,
    ) -> str:
        # One thing, two names: Qwen, GLM, Hunyuan, ... / DeepSeek, Granite.
        choice: dict[str, Any] = dict(words or {})
        if reasoning is not None:
            choice |= dict.fromkeys(("enable_thinking", "thinking"), reasoning)
        in_text = self._call_format is not None and self._call_format.arguments_as_text
        dicts: list[dict[str, Any]] = []
        for message in messages:
            fields: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "tool":
                fields |= {"tool_call_id": message.call_id, "name": message.tool}
            if message.calls:
                fields["tool_calls"] = [call.declaration(as_text=in_text) for call in message.calls]
            if message.role == "assistant" and message.reasoning:
                # One thing, three names: Qwen, GLM, Kimi, ... / gpt-oss, LFM, Command / Solar, Bielik.
                fields |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), message.reasoning)
            dicts.append(fields)
        return self._render_dicts(dicts, style, True, {**choice, "tools": [tool.declaration() for tool in tools]})

    def _render_dicts(
        self,
        messages: list[dict[str, Any]],
        style: _Style,
        add_generation_prompt: bool,
        more: dict[str, Any] | None = None,
    ) -> str:
        variables: dict[str, Any] = {"documents": None, "tools": [], **(more or {}), **self._tokens}
        # Firefunction wants its tools as text, and the day.
        functions = json.dumps(variables["tools"], ensure_ascii=False) if variables["tools"] else "[]"
        variables |= {"functions": functions, "datetime": f"{datetime.date.today():%b %d %Y}"}
        if not variables["tools"] and not style.tool_list:
            variables["tools"] = None
        if style.content_in_parts:
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        return self._helper.render({"messages": messages, "add_generation_prompt": add_generation_prompt, **variables})

    def _accepts(self, messages: Sequence[Message]) -> bool:
        """Return whether the prompt has all of these messages, with tools too if the template takes tools at all."""
        more = [Message(role="assistant", content="Yes."), _HELLO] if messages[-1].role == "tool" else []
        takes_tools = self._has_all([_HELLO], tools=[_PROBE])
        return self._has_all(messages, more) and (not takes_tools or self._has_all(messages, more, [_PROBE]))

    def _has_all(
        self,
        messages: Sequence[Message],
        more: Sequence[Message] = (),
        tools: Sequence[Tool] = (),
        words: dict[str, Any] | None = None,
    ) -> bool:
        """Return whether a prompt has the calls of messages, and their texts in order, and can go on with `more`."""
        style, at = self._style, 0
        try:
            text = self._render(messages, style, None, tools, words)
            if more:
                self._render([*messages, *more], style, None, tools)
        except TemplateRejection:
            return False
        calls = [word for one in messages for call in one.calls for word in (call.name, *call.arguments.values())]
        for one in messages:
            at = text.find(one.content.strip(), at)
            if at < 0:
                return False
        return all(word in text for word in calls)
