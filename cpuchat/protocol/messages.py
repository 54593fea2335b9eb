"""The messages between the UI process and a worker: commands go to the worker, events come back.

Field names of the figures are llama-server's (`prompt_n`, `cache_n`, ...). Tools, calls of them and their results are
plain data inside the messages. A frame is a 4-byte little-endian length followed by msgpack of one message.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Annotated, Any, Final, Literal

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import ContextFull, CpuchatError
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.options import DraftOptions, EngineOptions
from cpuchat.protocol.timings import Reuse, SpeculationFigures, Timings


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as it is offered to a model.

    `parameters` is the JSON schema of its arguments, `source` names who has it: a server of mcp.json, "" for a
    client. `origin` stands for the command and variables that start the server. `read_only` is what the source
    says of it. `strict`: all arguments must be valid under the schema, those written one by one in its order."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    source: str = ""
    origin: str = ""
    read_only: bool = False
    strict: bool = False

    @property
    def fingerprint(self) -> str:
        """Return what an approval for good belongs to: a tool that changes is another one."""
        told = [self.source, self.origin, self.name, self.description, self.parameters, self.read_only]
        return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()[:32]

    def declaration(self) -> dict[str, Any]:
        """Return it in the form that chat templates and servers take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a model has written. `problem` is why its arguments cannot be used; "" when they can."""

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    problem: str = ""

    def __post_init__(self) -> None:
        """Leave out what can be neither sent nor stored: half a surrogate pair, an integer of over 64 bits."""
        try:
            msgspec.msgpack.encode([self.name, self.id, self.arguments])
        except (ValueError, OverflowError, RecursionError):
            for field in ("name", "id"):
                text = getattr(self, field).encode(errors="replace").decode()
                msgspec.structs.force_setattr(self, field, text)
            msgspec.structs.force_setattr(self, "arguments", {})
            msgspec.structs.force_setattr(self, "problem", "The arguments have a value that cannot be sent.")

    def declaration(self, *, as_text: bool) -> dict[str, Any]:
        """Return it in the form that chat templates and servers take; `as_text`: arguments are JSON in a string."""
        arguments = json.dumps(self.arguments, ensure_ascii=False) if as_text else self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a call returned, as the model reads it. `failed`: the tool reported an error, or was not run. `ended` is how
    the user kept it from returning anything."""

    text: str
    failed: bool = False
    ended: Literal["", "refused", "stopped"] = ""


class ToolStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a model wrote on the way to an answer: what it said, its calls, and a result for each that was made."""

    said: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()


Role = Literal["system", "user", "assistant"]
Channel = Literal["answer", "reasoning"]
StopReason = Literal["end", "stop_string", "max_tokens", "context", "cancelled"]
EFFORTS: Final = {"none": 0, "minimal": 512, "low": 1024, "medium": 4096, "high": 8192, "xhigh": 16384, "max": -1}
"""Words for how much to reason, and the tokens that they stand for where a template wants a number (-1: no limit)."""
ANSWER_SHARE: Final = 8
"""Of the context, one part in so many is kept for the answer at most."""
AUTO_PARALLEL: Final = 4
"""Answers at once where nobody chose: with more, each is much slower than alone."""
MAX_PARALLEL: Final = 32
FRAME_SECONDS: Final = 0.08
"""Shortest time between two events with text, unless a request says otherwise."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off; `repeat_penalty` 1 and the
    other penalties 0 are neutral. `seed` None draws a new one each time."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None


class Speculation(DraftOptions, frozen=True):  # pyright: ignore[reportGeneralTypeIssues] msgspec allows it
    """Speculation options of one answer. No drafters that the engine knows: plain decoding."""

    drafters: tuple[str, ...] = ()


class LoadOptions(EngineOptions, frozen=True):  # pyright: ignore[reportGeneralTypeIssues] msgspec allows it
    """Options of a load.

    `parallel` answers may run at once, each with a context of `n_ctx` tokens; 0: as many as there is memory for, up to
    `AUTO_PARALLEL`. `draft_path` is a draft model to load beside it ("" = none), or a draft head. `calibrate`: measure
    what passes cost, for adaptive draft depth, unless that was done before."""

    parallel: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARALLEL)] = 1
    draft_path: str = ""
    calibrate: bool = False


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `reasoning` is the model's reasoning, separate from `content`.

    `calls` are what an answer calls. Each is followed by a message of the role "tool" with what it returned, for
    `call_id` of the tool `tool`."""

    role: Role | Literal["tool"]
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    tool: str = ""


class CallRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools an answer may call. "required": it is calls and nothing else; "none": it calls nothing, although the
    tools stay in the prompt. `names`: only these (() all). `single`: one call at most."""

    mode: Literal["auto", "required", "none"] = "auto"
    names: tuple[str, ...] = ()
    single: bool = False


ANY_CALL: Final = CallRule()


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the UI's commands."""


class LoadModel(Command, frozen=True):
    """Load `path`, replacing the model in use.

    `cpus` has one logical CPU for each thread, ascending. `roams`: the threads may move among these CPUs; () pins each
    to its own. `state_dir` is where saved states live ("" = keep none). `state_limit` bytes are for states of
    conversations: on disk, and as many in memory, but at most half of what the model leaves free. `resumes`: what a
    client used last is brought back into memory."""

    path: str
    cpus: tuple[int, ...]
    roams: tuple[int, ...] = ()
    options: LoadOptions = LoadOptions()
    request_id: int = 0
    state_dir: str = ""
    state_limit: int = 2 << 30
    resumes: bool = False


Overflow = Literal["drop", "drop_least", "refuse", "refuse_early"]
"""What becomes of messages that do not fit. The oldest are left out: a quarter of the context at a time, or no more
than has to be, for a request that none continues. Or it is an error; early: also where there is no room for
`max_tokens`, an eighth of the context at most.
"""


class StateKey(msgspec.Struct, frozen=True, kw_only=True):
    """Which states of the model's memory a request may reuse, and what its own are kept as.

    What was evaluated for another `owner` is not reused. `chat` is the conversation, which is saved; one without a name
    is only if `on_disk`, as nobody can delete it."""

    owner: str = ""
    chat: str = ""
    on_disk: bool = False


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is told.

    `frame_seconds` pass between two events with text, at least; the first does not wait. `unsplit`: reasoning and its
    markers are part of the answer's text. `streams_calls` asks for `CallDelta` events. `tokens`: `GenerationFinished`
    has the token IDs."""

    frame_seconds: float = FRAME_SECONDS
    unsplit: bool = False
    streams_calls: bool = False
    tokens: bool = False


class FillIn(msgspec.Struct, frozen=True, kw_only=True):
    """What to write stands between a prompt and `suffix`. `files` are pairs of a name and a text that belong to it.

    Once `max_ms` have passed since the first token, the text ends with its line (0: no limit); it ends before a line
    that is indented by less than `n_indent` characters."""

    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    n_indent: int = 0
    max_ms: int = 0


class Generate(Command, frozen=True):
    """Answer. Either `messages` (chat) or `prompt` (plain completion, no template; with `fill`, the text before a gap).

    `unset` names options of `sampling` that nobody has chosen: a server keeps its own values. `request_id` is the
    backend's to give. `max_tokens` 0 = until the model ends or the context is full. `ignore_eos`: the model cannot end
    the answer, its end-of-generation tokens are never chosen. `grammar` (GBNF, or what `schema_grammar` returns; "" =
    none) is what the answer must match; reasoning before it is free. `json_schema` is the schema that it was made of,
    for servers ("" = none). `reasoning` asks the chat template for reasoning or for none (None: its default), `effort`
    for how much, one of `EFFORTS` ("": its default); `reasoning_budget` is how many tokens it may take (None: no
    limit). `tools` are what the model may call, within `calling`. `continues`: the last of `messages` is an answer,
    which the model goes on writing."""

    request_id: int = 0
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    fill: FillIn | None = None
    sampling: Sampling = Sampling()
    unset: tuple[str, ...] = ()
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    state: StateKey = StateKey()
    speculation: Speculation = Speculation()
    when_full: Overflow = "drop"
    output: Output = Output()
    ignore_eos: bool = False
    grammar: str = ""
    json_schema: str = ""
    reasoning: bool | None = None
    effort: str = ""
    reasoning_budget: int | None = None
    tools: tuple[Tool, ...] = ()
    calling: CallRule = ANY_CALL
    continues: bool = False


class Score(Command, frozen=True):
    """Predict each of the last `n` of `tokens` from those before it, to compare that with what another worker predicts.

    The first `n_prompt` tokens are a prompt: its state is reused. A job has several such commands; `n_ctx` is the
    longest text of the job, `n_rows` the largest `n`. `file` has the rows of logits, float32 of shape (n, n_vocab).
    Without `bases` they are written; else those of another worker are read and compared, once for each of `bases`:
    which rows are the base's. Ends with `TokensScored` or `Failed`; one without `tokens` ends the job."""

    request_id: int = 0
    tokens: tuple[int, ...] = ()
    n: int = 0
    n_prompt: int = 0
    n_ctx: int = 0
    n_rows: int = 0
    file: str = ""
    bases: tuple[Literal["file", "own"], ...] = ()


class Measure(Command, frozen=True):
    """Time random tokens, as llama-bench does: prefill of `n_prompt` tokens, then `n_gen` tokens decoded one by one.

    `depth` tokens are in the KV cache before and are not timed. `calibrates`: instead, what passes cost, unless that is
    known, or there is no memory to keep the chat meanwhile. Replaces the chat in the KV cache. Ends with `Measured` or
    `Failed` (code "interrupted" when cancelled)."""

    request_id: int = 0
    n_prompt: int = 0
    n_gen: int = 0
    depth: int = 0
    calibrates: bool = False


class Cancel(Command, frozen=True):
    """Stop a generation, a measurement or a load, running or queued; finished and other ones are not affected. The
    partial answer is kept."""

    request_id: int


class EndReasoning(Command, frozen=True):
    """Let the model end its reasoning and answer now. Does nothing to an answer that is not running."""

    request_id: int


class ForgetChat(Command, frozen=True):
    """Delete the states of a deleted chat; "": all in memory, so that nothing is reused. Has no event."""

    chat_id: str


class CountTokens(Command, frozen=True):
    """Count the tokens of `text`, or of the prompt of `prompt`, once everything sent before is done. Ends with
    `TokensCounted`."""

    request_id: int
    text: str = ""
    prompt: Generate | None = None


class Shutdown(Command, frozen=True):
    """Save what is worth saving and exit."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of a worker's events."""


class WorkerReady(Event, frozen=True):
    """First event of a worker."""

    engine: EngineInfo


class ShuttingDown(Event, frozen=True):
    """`Shutdown` has arrived: the worker saves and exits. A worker that does not send this soon is hung."""


class LoadProgress(Event, frozen=True):
    """`done` of `total` of the current `phase`: bytes while "reading" and "preparing", measurements while
    "calibrating", types of weights while "measuring" kernels, one step while "warming". Phases of a draft model, which
    follow those of the target, end in " draft"."""

    phase: str
    done: int
    total: int


class ModelLoaded(Event, frozen=True):
    """The model is ready to answer."""

    model: ModelInfo


class LoadCancelled(Event, frozen=True):
    """A load was stopped; no model is loaded."""


class ContextTrimmed(Event, frozen=True):
    """The oldest messages did not fit and were left out of the prompt; they stay in the chat."""

    request_id: int
    dropped_messages: int
    dropped_tokens: int
    n_ctx: int


class PrefillProgress(Event, frozen=True):
    """`processed` of `total` prompt tokens, of which `cache_n` were reused; `reuse` is as in `Timings`."""

    request_id: int
    processed: int
    total: int
    cache_n: int
    reuse: Reuse | None = None


class TextDelta(Event, frozen=True):
    """New text. `n_tokens` generated since the last delta, `predicted_n` so far, `at_ms` since the request arrived.

    `drafter` names who proposed this span ("" = the model itself). `lengths`: the characters of `text` that each of the
    `n_tokens` gave; 0 for a token whose text only a later one completes. () also where nobody counted. `cpu_wait`
    and `cpu_ran`: as in `Timings`, of the answer so far, about once a second."""

    request_id: int
    text: str
    channel: Channel = "answer"
    n_tokens: int = 1
    lengths: tuple[int, ...] = ()
    predicted_n: int = 0
    at_ms: float = 0.0
    drafter: str = ""
    cpu_wait: float | None = None
    cpu_ran: float | None = None


class CallDelta(Event, frozen=True):
    """More of the `index`-th call in an answer, as it is written: a piece of its arguments as JSON. The first one names
    the tool, and the `id` if the model gave one. `predicted_n`, `at_ms`: as of `TextDelta`."""

    request_id: int
    index: int
    name: str
    arguments: str
    id: str = ""
    predicted_n: int = 0
    at_ms: float = 0.0


class SpeculationUpdate(Event, frozen=True):
    """The speculation figures, a few times a second while an answer with drafters is written."""

    request_id: int
    predicted_n: int
    figures: SpeculationFigures


class Reconnecting(Event, frozen=True):
    """The server was not reached, or was busy: the request is sent again, for the `attempt`-th of `attempts` times.
    `attempt` 0: it is loading its model, which may take long."""

    request_id: int
    attempt: int = 0
    attempts: int = 0


class GenerationFinished(Event, frozen=True):
    """The answer is complete (or was stopped). `note` is what else is to be said about it, in a few words.
    `matches_grammar`: the whole text matches the request's grammar, or there is none; None: a server said so. `calls`
    are the calls of tools in it, which are no part of its text. `prompt_tokens` and `tokens`, those of the answer, are
    told where the request asks for them. `stop_string` is the one that ended the answer."""

    request_id: int
    stop_reason: StopReason
    timings: Timings
    note: str = ""
    matches_grammar: bool | None = True
    calls: tuple[ToolCall, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    stop_string: str = ""


class CallsMade(Event, frozen=True):
    """The answer calls tools; it goes on after a `CallDone` for each. Of the backend's side: no worker sends it."""

    request_id: int
    said: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class CallDone(Event, frozen=True):
    """A call was made, or refused; `result` is what the model reads."""

    request_id: int
    call: ToolCall
    result: ToolResult


class Measured(Event, frozen=True):
    """A measurement took `seconds`; `cpu_wait` is as in `Timings`, `pass_ms` as in `ModelInfo` after a calibration."""

    request_id: int
    seconds: float
    cpu_wait: float | None = None
    pass_ms: tuple[float, ...] = ()


class ScoredRows(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of `n` tokens: those of `quality.statistics.Scores` as float32, little-endian; `ranks` (int32, from 1) of
    each token with the other, `tops` the text of the other's most probable token, `tops_p` (float32) its probability.
    """

    kld: bytes
    base_nll: bytes
    other_nll: bytes
    same_top: bytes
    ranks: bytes
    tops: tuple[str, ...]
    tops_p: bytes


class TokensScored(Event, frozen=True):
    """`compared` has an entry for each of the request's `bases`."""

    request_id: int
    compared: tuple[ScoredRows, ...] = ()


class TokensCounted(Event, frozen=True):
    """`n_tokens` of a text or a prompt; None without a model, or when the prompt cannot be made."""

    request_id: int
    n_tokens: int | None = None


class Failed(Event, frozen=True):
    """A request failed; `code` is one of errors.py. `request_id` 0: no answer, load or measurement of the worker did.

    `n_tokens` of a prompt that does not fit (0: not counted); `alone`: its last message does not fit even without those
    before it. A dead worker is reported with code "worker_died" by the backend, never as an exception."""

    code: str
    message: str
    hint: str = ""
    request_id: int = 0
    n_tokens: int = 0
    alone: bool = False

    @classmethod
    def of(cls, error: CpuchatError, request_id: int = 0) -> Failed:
        """Return the event that reports `error`."""
        n_tokens, alone = (error.n_tokens, error.alone) if isinstance(error, ContextFull) else (0, False)
        return cls(error.code, error.message, error.hint, request_id, n_tokens, alone)


AnyCommand = LoadModel | Generate | Measure | Score | Cancel | EndReasoning | ForgetChat | CountTokens | Shutdown
AnyEvent = (
    WorkerReady | ShuttingDown | LoadProgress | ModelLoaded | LoadCancelled | ContextTrimmed | PrefillProgress
    | TextDelta | CallDelta | SpeculationUpdate | Reconnecting | GenerationFinished | CallsMade
    | CallDone | Measured | TokensScored | TokensCounted
    | Failed
)  # fmt: skip


MAX_FRAME = 64 << 20
_HEADER = struct.Struct("<I")
HEADER_SIZE = _HEADER.size

_encoder = msgspec.msgpack.Encoder()
decode_command = msgspec.msgpack.Decoder(prepared(AnyCommand)).decode
decode_event = msgspec.msgpack.Decoder(prepared(AnyEvent)).decode
"""Decode the body of a frame. Raises msgspec.DecodeError or msgspec.ValidationError on anything else."""


def encode(message: Command | Event) -> bytearray:
    """Return one frame."""
    frame = bytearray(HEADER_SIZE)
    _encoder.encode_into(message, frame, HEADER_SIZE)
    _HEADER.pack_into(frame, 0, len(frame) - HEADER_SIZE)
    return frame


def frame_length(header: bytes | bytearray) -> int:
    """Return the number of bytes that follow a frame's header. Raises ValueError: the length is above `MAX_FRAME` (the
    stream is not ours or out of step)."""
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes")
    return length
