"""From tokens to the events that carry their text: calls of tools kept out of it, on a thread of its own.

Between two decode calls every core but one waits. Detokenizing, splitting off reasoning and sending a frame take longer
than sampling, because decoding has just evicted the interpreter's data from the caches. On `OutputThread` they run
while the next token is computed, without the GIL; several tokens at a time, because each wake-up takes a core away.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from queue import SimpleQueue

from cpuchat.engine.text.reasoning import LineMatcher, ReasoningSplitter, StopMatcher, Unsplit, held_back
from cpuchat.protocol.messages import (
    ANY_CALL,
    FRAME_SECONDS,
    CallDelta,
    CallRule,
    Channel,
    Event,
    FillIn,
    TextDelta,
    Tool,
    ToolCall,
)
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.call_parser import may_begin, parse_calls, unmarked_calls
from cpuchat.tools.call_stream import CallPiece, CallReader

_CHANNEL = re.compile(r"(?:\s*<\|[^<>|]*\|>\w*)*\s*(?:<(?:\|[^<>|]*\|?)?)?$")  # markers, the last one maybe unfinished


class CallSplitter:
    """Splits text as `splitter` does, without the calls in the answer; these are in `calls` after `flush`, and with
    `streams` in `pieces` as they are written. From where calls begin nothing is passed on before the end; what turns
    out to be no call is, then. `rule`: what may be called."""

    def __init__(
        self,
        splitter: ReasoningSplitter | Unsplit,
        form: CallFormat,
        tools: Sequence[Tool],
        rule: CallRule = ANY_CALL,
        *,
        streams: bool = False,
    ) -> None:
        self.calls: tuple[ToolCall, ...] = ()
        self.pieces: list[CallPiece] = []
        self.literals = form.literals
        self._rule = rule
        self._reader = CallReader(form, tools) if streams else None
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
        rest, calls = self._rest()
        calls = tuple(calls)[:1] if self._rule.single else tuple(calls)
        if self._reader is not None:
            calls, begun = self._reader.finish(calls)
            self.pieces += self._reader.take()
            if begun or self._rule.mode == "required":  # the pieces tell of a cut call, if its name is written
                rest = [one for one in rest if one[0] == "reasoning"]
        self.calls = calls
        return rest

    def _rest(self) -> tuple[list[tuple[Channel, str]], Sequence[ToolCall]]:
        pieces = self._without_calls(self._splitter.flush())
        calls: Sequence[ToolCall] = ()
        thought, self._thought = self._thought, ""
        rest, self._held = self._held, ""
        if thought and isinstance(self._splitter, ReasoningSplitter) and self._splitter.in_reasoning:
            said, calls = parse_calls(self._form, thought, self._tools)
            if calls:  # they end the reasoning, which nothing else ended
                return [*pieces, ("answer", said)] if said else pieces, calls
        if thought:
            pieces.append(("reasoning", thought))
        if self._calling:
            rest, calls = parse_calls(self._form, self._calling, self._tools, at_start=not self._has_said)
            self._calling = ""
        elif not self._has_said:
            rest, calls = unmarked_calls(rest, self._tools)
        return [*pieces, ("answer", rest)] if rest else pieces, calls

    def _without_calls(self, pieces: list[tuple[Channel, str]]) -> list[tuple[Channel, str]]:
        found = list[tuple[Channel, str]]()
        for channel, text in pieces:
            if channel == "reasoning" and self._thought.startswith(self._triggers):
                self._thought += text
                continue
            if channel == "reasoning":  # from what looks like a call on it is held
                text = self._thought + text
                at = min((at for one in self._triggers if (at := text.find(one)) >= 0), default=len(text))
                at = min(at, len(text) - held_back(text, self._triggers))
                passed, self._thought = text[:at], text[at:]
            else:
                if self._thought:
                    found.append(("reasoning", self._thought))
                    self._thought = ""
                passed = self._said(text)
            if passed:
                found.append((channel, passed))
        return found

    def _said(self, text: str) -> str:
        """Return what of the next text of the answer is said; the rest is held."""
        form = self._form
        if self._calling:
            self._calling += text
            self._read(text)
            return ""
        text, self._held = self._held + text, ""
        at = form.find(text, self._names, at_start=not self._has_said)
        starts = form.starts(self._names)
        if at >= 0:
            said, self._calling = form.without_channel(text[:at]), text[at:]
            self._read(self._calling)
        elif not self._has_said and (any(start.startswith(text.lstrip()) for start in starts) or may_begin(text)):
            said, self._held = "", text
        else:
            n_said = len(text) - held_back(text, self._triggers)
            if form.in_channel and (channel := _CHANNEL.search(text[:n_said])) is not None:
                n_said = channel.start()
            said, self._held = text[:n_said], text[n_said:]
        self._has_said = self._has_said or bool(said.strip())
        return said

    def _read(self, text: str) -> None:
        if self._reader is not None:
            self._reader.feed(text)
            self.pieces += self._reader.take()


class TextStream:
    """The text of one answer: tokens in, `TextDelta` events out, at most one frame per `frame_seconds` after the first
    text.

    Stop strings count in the answer only. A UTF-8 sequence that continues in the next token waits for it; invalid UTF-8
    becomes U+FFFD. `piece_of`: returns the bytes of one token. `arrived`: `perf_counter()` when the request arrived,
    the zero of `at_ms`. `fill`: ends the text at a line, too."""

    def __init__(
        self,
        request_id: int,
        emit: Callable[[Event], None],
        piece_of: Callable[[int], bytes],
        splitter: ReasoningSplitter | Unsplit | CallSplitter,
        stops: tuple[str, ...],
        arrived: float,
        frame_seconds: float = FRAME_SECONDS,
        fill: FillIn | None = None,
    ) -> None:
        self.frame_seconds = frame_seconds
        self._calls = splitter if isinstance(splitter, CallSplitter) else None
        self._request_id = request_id
        self._emit = emit
        self._piece_of = piece_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = self._decoder.decode
        self._split = splitter.feed
        self._splitter = splitter
        self._matcher = LineMatcher(stops, fill) if fill is not None else StopMatcher(stops) if stops else None
        self._arrived = arrived
        self._now = arrived  # when the newest token was generated
        self._deltas: list[TextDelta] = []  # to be emitted, without the open one
        self._channel: Channel = "answer"
        self._drafter = ""
        self._text = ""
        self._lengths: list[int] = []  # of the tokens that `_text` came from
        self._n_held = 0  # tokens whose text is held back
        self._n_emitted = 0
        self._next_frame = 0.0  # nothing was emitted yet

    @property
    def has_emitted(self) -> bool:
        return self._next_frame > 0.0

    @property
    def stop_string(self) -> str:
        """Return the stop string that was found, "" = none."""
        return self._matcher.hit if self._matcher is not None else ""

    def feed(self, token: int, now: float, drafter: str = "") -> bool:
        """Add a token that `drafter` proposed ("": none) at `now`; returns True at a stop string, or the end of a line.
        Text that only later tokens complete is attributed to them."""
        self._now = now
        hit = self._take(token, drafter)
        if now >= self._next_frame:
            self.flush(now)
        return hit

    def feed_all(self, runs: list[tuple[str, list[int]]], now: float) -> None:
        """Add runs of (drafter, tokens), the last token generated at `now`, and emit their text."""
        self._now = now
        for drafter, tokens in runs:
            for token in tokens:
                self._take(token, drafter)
        self.flush(now)

    def _take(self, token: int, drafter: str) -> bool:
        if drafter != self._drafter:
            self._close_span()
            self._drafter = drafter
        self._n_held += 1
        text = self._decode(self._piece_of(token))
        return bool(text) and self._add(self._split(text))

    def _add(self, pieces: list[tuple[Channel, str]]) -> bool:
        matcher = self._matcher
        for channel, text in pieces:
            hit = False
            if matcher is not None and channel == "answer":
                text, hit = matcher.feed(text)
            if text:
                self._append(channel, text)
            if hit:
                return True
        return False

    def _append(self, channel: Channel, text: str) -> None:
        if channel != self._channel:
            self._close_span()
            self._channel = channel
        self._text += text
        if self._n_held:
            self._lengths += [0] * (self._n_held - 1)
            self._lengths.append(len(text))
            self._n_held = 0
        elif self._lengths:
            self._lengths[-1] += len(text)

    def _close_span(self) -> None:
        if not self._text and not self._lengths:
            return
        self._n_emitted += len(self._lengths)
        self._deltas.append(
            TextDelta(
                request_id=self._request_id,
                text=self._text,
                channel=self._channel,
                n_tokens=len(self._lengths),
                lengths=tuple(self._lengths),
                predicted_n=self._n_emitted,
                at_ms=1e3 * (self._now - self._arrived),
                drafter=self._drafter,
            )
        )
        self._text = ""
        self._lengths.clear()

    def flush(self, now: float) -> None:
        self._close_span()
        pieces = self._calls.pieces if self._calls is not None else []
        if not self._deltas and not pieces:
            return
        for delta in self._deltas:
            self._emit(delta)
        self._deltas.clear()
        for _, call in groupby(pieces, lambda piece: piece.index):
            first, *others = call
            self._emit(
                CallDelta(
                    request_id=self._request_id,
                    index=first.index,
                    name=first.name,
                    id=first.id,
                    arguments="".join(one.text for one in (first, *others)),
                    predicted_n=self._n_emitted + self._n_held,
                    at_ms=1e3 * (self._now - self._arrived),
                )
            )
        pieces.clear()
        self._next_frame = now + self.frame_seconds

    def finish(self, now: float, *, stopped: bool) -> None:
        """Emit the rest. After a stop string (`stopped`) what was held back is not part of the text."""
        self._now = now
        if not stopped:
            rest = self._decode(b"", final=True)
            pieces = [*(self._split(rest) if rest else ()), *self._splitter.flush()]
            if not self._add(pieces) and self._matcher is not None and (held := self._matcher.flush()):
                self._append("answer", held)
        if self._n_held:  # tokens without text are counted too
            self._append(self._channel, "")
        self.flush(now)


class OutputThread:
    """The thread. Create it before the engine's thread is pinned: it inherits the CPUs of its creator."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | ThreadedStream | None] = SimpleQueue()
        self.put = self._jobs.put
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, ThreadedStream):
                job.done.set()
                continue
            stream, runs, now = job
            if stream.error is None:
                try:
                    stream.inner.feed_all(runs, now)
                except Exception as error:
                    stream.error = error  # raised by `finish`, on the thread that waits for the answer

    def close(self) -> None:
        """End the thread after the texts that are queued."""
        self._jobs.put(None)
        self._thread.join()


_Job = tuple["ThreadedStream", list[tuple[str, list[int]]], float]


class ThreadedStream:
    """A `TextStream` fed on an `OutputThread`. Not for stop strings: nothing waits for what `feed` finds."""

    def __init__(self, output_thread: OutputThread, inner: TextStream) -> None:
        self._put = output_thread.put
        self._drafter = ""
        self._tokens: list[int] = []
        self._runs: list[tuple[str, list[int]]] = [("", self._tokens)]
        self._last = 0.0
        self._next_frame = 0.0
        self.inner = inner
        self.done = threading.Event()
        self.error: Exception | None = None

    def feed(self, token: int, now: float, drafter: str = "") -> bool:
        """Add a token as `TextStream.feed`; always returns False."""
        if drafter != self._drafter:
            self._drafter, self._tokens = drafter, []
            self._runs.append((drafter, self._tokens))
        self._tokens.append(token)
        self._last = now
        # The first text does not wait, even if the first tokens had none.
        if now >= self._next_frame or not self.inner.has_emitted:
            self._next_frame = now + self.inner.frame_seconds
            self._hand_over()
        return False

    def _hand_over(self) -> None:
        runs, self._tokens = self._runs, []
        self._runs = [(self._drafter, self._tokens)]
        self._put((self, runs, self._last))

    def finish(self, now: float, *, stopped: bool) -> None:
        """Finish as `TextStream.finish`, after all that was fed. Raises the error of the other thread, if any."""
        self._hand_over()
        self._put(self)
        self.done.wait()
        if self.error is not None:
            raise self.error
        self.inner.finish(now, stopped=stopped)
