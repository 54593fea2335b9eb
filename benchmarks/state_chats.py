"""Chats with two servers, and what people do to them: answer again, stop, edit, branch. For `states.py`.

All texts consist of letters of which each is one token (no merge of the vocabulary applies), so both servers evaluate
the same number of tokens, whatever their models write.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from common import MeasureError
from serve import until_idle

from cpuchat.base.text import common_prefix

LETTERS = "abcdefgikmopqstuvwxyz"
"""No merge of the vocabulary of `tiny_gguf` is made of these alone."""
TEMPLATE = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
"""ChatML that leaves out the reasoning of earlier answers, as Qwen3's does. `enable_thinking`: the answer starts inside
its reasoning."""
TURN_START = "<|im_start|>"

STORED_TURNS, LIVE_TURNS = 6, 4
"""Turns that the first request brings, as of a chat from last week; turns that are answered one after the other."""
SYSTEM, ASKED, STORED_ANSWER, NEW, EDITED = 80, 260, 160, 100, 30
"""Letters: of the system prompt, of a message in the chat, of an answer in it, of a new message, of an edit."""
ANSWER, SHORT, LONGEST = 32, 4, 256
"""Tokens: of the answers of the chat, of the answers that are timed, of the answers that are stopped."""
RECEIVED, UNREAD = 24, 8
"""Tokens of a stopped answer: those that the client has read, and more that the server has sent at least."""

Message = dict[str, str]


@dataclass(frozen=True)
class Seen:
    """A streamed answer as the client saw it, with the server's count of evaluated and reused prompt tokens."""

    first_ms: float
    text: str
    prompt_n: int
    cache_n: int


@dataclass(frozen=True)
class Measured:
    """Tokens evaluated for one request, of how many, and how many of them no earlier request had; ms to the first."""

    evaluated: int
    prompt: int
    changed: int
    first_ms: float

    def __str__(self) -> str:
        return f"{self.evaluated} of {self.prompt} ({self.changed} changed), {self.first_ms:.0f} ms"


class Client:
    """Sends chat requests to one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        # llama-server hangs up after a stream; a connection kept for the next request would be a dead one.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, timeout=300.0, limits=limits, trust_env=False)

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _events(
        self, messages: list[Message], max_tokens: int, think: bool, **more: object
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Raises MeasureError when the server refuses the request."""
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        body |= {"chat_template_kwargs": {"enable_thinking": think}, **more}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise MeasureError(f"{self.url}: {response.status_code} {response.read()[:300]!r}")
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
            yield (json.loads(line) for line in lines)

    def ask(self, messages: list[Message], max_tokens: int = SHORT, *, think: bool = False) -> Seen:
        """Stream an answer of exactly `max_tokens`. Raises MeasureError."""
        first, text, timings = 0.0, "", None
        start = time.perf_counter()
        with self._events(messages, max_tokens, think) as events:
            for event in events:
                timings = event.get("timings", timings)
                if new := _text(event):
                    first = first or time.perf_counter()
                    text += new
        if timings is None or timings["predicted_n"] != max_tokens or len(text) != max_tokens:
            raise MeasureError(f"{self.url}: not {max_tokens} tokens: {timings}, {text!r}")
        return Seen(1e3 * (first - start), text, timings["prompt_n"], timings["cache_n"])

    def ask_and_stop(self, messages: list[Message]) -> str:
        """Hang up in the middle of an answer; returns what of it was read."""
        text = ""
        with self._events(messages, LONGEST, False) as events:
            while len(text) < RECEIVED + UNREAD:
                text += _text(next(events))
        until_idle(self.url)
        return text[:RECEIVED]

    def stop_in_prefill(self, messages: list[Message]) -> int:
        """Hang up once half of the prompt is evaluated; returns the tokens that were evaluated by then."""
        with self._events(messages, SHORT, False, return_progress=True) as events:
            for event in events:
                progress = event.get("prompt_progress")
                if progress and 2 * progress["processed"] >= progress["total"]:
                    break
            else:
                raise MeasureError(f"{self.url} reports no progress")
        until_idle(self.url)
        return progress["processed"]

    def render(self, messages: list[Message], think: bool) -> str:
        """Return the prompt that llama-server makes of messages."""
        body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": think}}
        return self._post("/apply-template", body)["prompt"]

    def count(self, text: str) -> int:
        """Return llama-server's count of the tokens of a prompt."""
        return len(self._post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"])

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(route, json=body).raise_for_status().json()


def _text(event: dict[str, Any]) -> str:
    deltas = [choice["delta"] for choice in event["choices"]]
    return "".join((delta.get("reasoning_content") or "") + (delta.get("content") or "") for delta in deltas)


@dataclass
class Chat:
    """A chat with one server.

    Attributes:
        tokenizer: the llama-server, which renders and counts for both.
        think: the template opens the reasoning of every answer.
        strips: what the model writes is reasoning, which the next prompt leaves out.
        known: the prompts that were evaluated, with what was written after them.
    """

    client: Client
    tokenizer: Client
    salt: str
    think: bool = False
    strips: bool = False
    messages: list[Message] = field(default_factory=list)
    known: list[str] = field(default_factory=list)

    def words(self, length: int, salt: object) -> str:
        """Return a text of `length` tokens, another one for each chat and `salt`."""
        dice = random.Random(f"{self.salt} {salt}")
        text = "".join(" " if i % 7 == 5 else dice.choice(LETTERS) for i in range(length - 1))
        return text + dice.choice(LETTERS)

    def store(self, turns: int) -> None:
        """Add turns that no server has seen."""
        self.messages = [{"role": "system", "content": self.words(SYSTEM, "system")}]
        for turn in range(turns):
            self.messages.append(_user(self.words(ASKED, f"stored {turn}")))
            self.messages.append(_assistant(self.words(STORED_ANSWER, f"answer {turn}")))

    def open(self) -> None:
        """Have a chat of some 4,000 tokens, its last turns answered by the server."""
        self.store(STORED_TURNS)
        for turn in range(LIVE_TURNS):
            self.messages.append(_user(self.words(ASKED, f"live {turn}")))
            self.answer(ANSWER, f"said {turn}")

    def answer(self, max_tokens: int, salt: object) -> Measured:
        """Have the chat answered, and add the answer to it."""
        seen = self.client.ask(self.messages, max_tokens, think=self.think)
        measured = self._measured(seen)
        said = _assistant(self.words(NEW, salt)) | {"reasoning_content": seen.text} if self.strips else None
        self._remember(seen.text)
        self.messages = [*self.messages, said or _assistant(seen.text)]
        return measured

    def measure(self, messages: list[Message], *, since_turn: bool = False) -> Measured:
        """Ask for a short answer that does not become part of the chat.

        Args:
            since_turn: all of the first message that differs counts as changed.
        """
        self.messages, kept = messages, self.messages
        try:
            seen = self.client.ask(messages, SHORT, think=self.think)
            measured = self._measured(seen, since_turn)
            self._remember(seen.text)
        finally:
            self.messages = kept
        return measured

    def stop_answer(self) -> None:
        """Stop an answer; what was read stays."""
        text = self.client.ask_and_stop(self.messages)
        self._remember(text)
        self.messages = [*self.messages, _assistant(text)]

    def _prompt(self) -> str:
        return self.tokenizer.render(self.messages, self.think)

    def _remember(self, text: str) -> None:
        self.known.append(self._prompt() + text)

    def _measured(self, seen: Seen, since_turn: bool = False) -> Measured:
        prompt, total = self._prompt(), seen.prompt_n + seen.cache_n
        same = max((common_prefix(one, prompt) for one in self.known), default=0)
        if since_turn:
            same = max(prompt.rfind(TURN_START, 0, same + 1), 0)
        return Measured(seen.prompt_n, total, total - self.tokenizer.count(prompt[:same]), seen.first_ms)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


Figures = dict[str, Measured]


def _regenerate(chat: Chat) -> Figures:
    chat.open()
    return {"regenerate": chat.measure(chat.messages[:-1])}


def _stop_and_ask(chat: Chat) -> Figures:
    chat.open()
    chat.messages.append(_user(chat.words(NEW, "long")))
    chat.stop_answer()
    return {"Esc, new message": chat.measure([*chat.messages, _user(chat.words(NEW, "new"))])}


def _stop_prefill(chat: Chat) -> Figures:
    """The figures are those of a stop at exactly half of the prompt. A server that has evaluated more after the client
    hung up has done so in vain: it counts as evaluated again."""
    chat.store(STORED_TURNS + LIVE_TURNS - 2)
    messages = [*chat.messages, _user(chat.words(NEW, "new"))]
    processed = chat.client.stop_in_prefill(messages)
    seen = chat.client.ask(messages)
    total = seen.prompt_n + seen.cache_n
    again, half = max(seen.prompt_n - (total - processed), 0), total - total // 2
    first_ms = seen.first_ms * (again + half) / max(seen.prompt_n, 1)
    return {"Esc in prefill, again": Measured(again + half, total, half, first_ms)}


def _edit(chat: Chat) -> Figures:
    chat.open()
    *before, asked, _ = chat.messages
    edited = asked["content"][:-EDITED] + chat.words(EDITED, "edit")
    return {"edit": chat.measure([*before, _user(edited)], since_turn=True)}


def _strip(chat: Chat) -> Figures:
    chat.strips = True
    chat.open()
    return {"stripped reasoning": chat.measure([*chat.messages, _user(chat.words(NEW, "new"))])}


def _strip_opened(chat: Chat) -> Figures:
    chat.think = chat.strips = True
    chat.open()
    return {"stripped, <think> in prompt": chat.measure([*chat.messages, _user(chat.words(NEW, "new"))])}


def _fork(chat: Chat) -> Figures:
    chat.open()
    trunk = chat.messages
    chat.messages = [*trunk[:-4], _user(chat.words(NEW, "fork"))]
    forked = chat.answer(ANSWER, "forked")
    chat.messages = trunk
    return {"fork": forked, "return": chat.measure([*trunk, _user(chat.words(NEW, "new"))])}


def _change_system(chat: Chat) -> Figures:
    chat.open()
    system = {"role": "system", "content": chat.words(SYSTEM, "other")}
    return {"other system prompt": chat.measure([system, *chat.messages[1:-1]])}


SCENARIOS: tuple[Callable[[Chat], Figures], ...] = (
    _regenerate,
    _stop_and_ask,
    _stop_prefill,
    _edit,
    _strip,
    _strip_opened,
    _fork,
    _change_system,
)
