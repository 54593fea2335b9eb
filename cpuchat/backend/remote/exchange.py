"""One request to a server: sent again while nothing has come, without the oldest messages when the server rejects the
prompt as too long, and read to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import httpx
from msgspec.structs import replace

from cpuchat.backend.remote import connection
from cpuchat.backend.remote.adapter import Adapter
from cpuchat.backend.remote.connection import Retries, Status
from cpuchat.backend.remote.stream import Chunk, objects
from cpuchat.base.errors import ContextFull, ServerError, ServerUnreachable
from cpuchat.base.text import clean_line
from cpuchat.protocol.messages import ANSWER_SHARE, ContextTrimmed, Generate, Message, Reconnecting

MAX_TEXT = 16 << 20
"""Characters of an answer at most; one that goes on never ends."""
_PER_MESSAGE = 16  # characters that a template adds, about
_MAX_CHANGES = 8  # to a request that was too long
_STREAMS = ("text/event-stream", "application/x-ndjson", "application/json", "text/plain", "")


def without_oldest(
    messages: Sequence[Message], needed: int, n_ctx: int, in_steps: bool = True
) -> tuple[tuple[Message, ...], int] | None:
    """Return the messages without the oldest turns, and how many tokens that saves by their share of the characters.

    System messages and the last turn stay. None when nothing can be left out. `needed`: tokens of the prompt with all
    of them. An eighth of the context is left for the answer. Turns go in steps of a quarter of the context, so that the
    next prompts begin alike and are reused; without `in_steps`, for a prompt that none continues, of a sixteenth.
    """
    starts = [number for number, message in enumerate(messages) if message.role == "user"]
    if len(starts) < 2:
        return None
    sizes = [len(message.content) + len(message.reasoning) + _PER_MESSAGE for message in messages]
    step = max(1, n_ctx // (4 if in_steps else 16))
    excess = needed - (n_ctx - n_ctx // ANSWER_SHARE)
    goal = needed - max(1, -(-excess // step)) * step
    for start in starts[1:]:
        kept = [n for n, message in enumerate(messages) if n >= start or message.role == "system"]
        tokens = round(needed * sum(sizes[n] for n in kept) / sum(sizes))
        if tokens <= goal or start == starts[-1]:
            return tuple(messages[n] for n in kept), needed - tokens
    return None


class Exchange:
    """One request: `items` yields what comes. `name`: of the model at the server."""

    def __init__(self, adapter: Adapter, request: Generate, name: str, seed: int) -> None:
        self._adapter, self._request, self._name, self._seed = adapter, request, name, seed
        self.reconnected = False
        """Whether the server was away: it may have been started anew, with another model."""
        self._max_tokens = request.max_tokens
        self._answered = self._finished = False  # something has come; the server has said that it was all

    async def items(self) -> AsyncGenerator[Chunk | ContextTrimmed | Reconnecting, None]:
        """Send the request, again while nothing has come and another attempt is of use. Leaving early closes the
        connection, by which the server stops. Raises Status, httpx.HTTPError, ServerError, ContextFull: there is no
        answer, or it broke off.
        """
        changes, retries, request_id = 0, Retries(), self._request.request_id
        while True:
            try:
                async with contextlib.aclosing(self._chunks()) as chunks:  # at once, not when it is collected
                    async for chunk in chunks:
                        yield chunk
                return
            except (Status, httpx.HTTPError) as error:
                if self._finished:
                    return  # nothing of the answer is missing
                if self._answered:
                    cut = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
                    raise self._broken_off() if cut else error from None
                if isinstance(error, Status) and changes < _MAX_CHANGES:
                    changes += 1
                    if sizes := self._adapter.context_sizes(error):
                        if (trimmed := self._shorten(error, *sizes)) is not None:
                            yield trimmed
                        continue
                    if self._adapter.without_rejected(error):
                        continue
                attempt, wait = retries.next(error)
                # A server that is loading was started anew.
                self.reconnected = self.reconnected or not attempt or not isinstance(error, Status)
                attempts = len(connection.BACK_OFF) if attempt else 0
                yield Reconnecting(request_id=request_id, attempt=attempt, attempts=attempts)
                await asyncio.sleep(wait)

    def _shorten(self, status: Status, needed: int, n_ctx: int) -> ContextTrimmed | None:
        """Ask for a shorter answer if only it with Max tokens was too long, else leave out the oldest messages. Raises
        ContextFull when there is none to leave out, or none may be.
        """
        request = self._request
        # Without Max tokens a chat is answered up to the end of the context, a raw prompt with a few tokens.
        room = 0 if request.prompt is None else n_ctx - needed
        if self._adapter.counts_output(status) and request.max_tokens > room >= (request.prompt is not None):
            self._request = replace(request, max_tokens=room)
            return None
        found = without_oldest(request.messages, needed, n_ctx, in_steps=request.when_full == "drop")
        if found is None or request.when_full not in ("drop", "drop_least"):
            least = needed - (found[1] if found is not None else 0)
            alone = found is None or least >= n_ctx
            what, tokens = ("last message", least) if alone else ("chat", needed)
            told = f"{tokens:,}" if tokens > n_ctx + 1 else f"more than {n_ctx:,}"
            raise ContextFull(
                f"The {what} needs {told} tokens, but the server's context has {n_ctx:,}.",
                "Shorten it, or start the server with a larger context.",
                alone=alone,
            )
        kept, saved = found
        self._request = replace(request, messages=kept, max_tokens=self._max_tokens)
        dropped = len(request.messages) - len(kept)
        return ContextTrimmed(
            request_id=request.request_id, dropped_messages=dropped, dropped_tokens=saved, n_ctx=n_ctx
        )

    def _broken_off(self) -> ServerUnreachable:
        return ServerUnreachable(
            f"The connection to {self._adapter.place} was closed before the answer was complete.",
            "Regenerate it (Ctrl+R), or check the server's log.",
        )

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        adapter, size = self._adapter, 0
        path, content = adapter.request(self._request, self._name, self._seed)
        async with adapter.connection.stream(path, content) as response:
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind not in _STREAMS:
                raise ServerError(
                    f"{adapter.place} answered with {clean_line(kind)[:60]} instead of a stream of events.",
                    "Is this the address of an inference server, or of a login page or proxy before it?",
                )
            async for data in objects(response.aiter_raw()):
                if data is None:
                    self._finished = True
                    continue
                chunk = adapter.chunk(data)
                self._answered = True
                size += len(chunk.content) + len(chunk.reasoning)
                if size > MAX_TEXT:
                    problem = f"The answer is longer than {MAX_TEXT >> 20} million characters."
                    raise ServerError(problem, "Set Max tokens in the settings.")
                self._finished = self._finished or bool(chunk.finish)
                yield chunk
        if not self._finished:
            raise self._broken_off()
