"""One side of a comparison: a model file with settings of its own, its worker, history and answers; and what both sides
share: prompts with their rounds, and memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.backend.base import Backend
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, MeasureFailed, UsageError
from cpuchat.compare.agreement import Agreement, AnswerAgreement, Written
from cpuchat.config.settings import Settings, explained
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.file_names import shortened
from cpuchat.models.fit import draft_memory, gigabytes, plan_memory
from cpuchat.models.gguf.header import known_as, read_model
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel, is_same_model
from cpuchat.models.machine import memory_here
from cpuchat.models.ollama import ollama_name
from cpuchat.protocol.messages import (
    AnyEvent,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    Message,
    ModelLoaded,
    Output,
    Sampling,
    Score,
    TextDelta,
    TokensScored,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.roofline import Roofline

KEYS: dict[str, tuple[str, ...]] = {
    "drafters": ("speculation.drafters",),
    "draft-model": ("speculation.draft_model",),
    "draft-depth": ("speculation.depth",),
    "threads": ("engine.threads",),
    "cores": ("engine.cores",),
    "memory-policy": ("engine.memory_policy",),
    "kv": ("engine.cache_type_k", "engine.cache_type_v"),
    "flash-attn": ("engine.flash_attn",),
    "temperature": ("sampling.temperature",),
}
"""Options of a side, and the settings that they stand for."""


PAIR = "Q8_0", "Q4_K_M"
"""The quantizations that most people compare."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A model file with `changes` by the names of `KEYS`; `model` and `quantization` from its header, else ""."""

    path: str
    changes: dict[str, str] = {}
    model: str = ""
    quantization: str = ""

    @classmethod
    def of(cls, path: Path, changes: dict[str, str] | None = None) -> Side:
        """Read the header for the names; one that cannot be read fails when it is loaded."""
        side = cls(path=str(path), changes=changes or {})
        try:
            header = read_model(path)
        except (CpuchatError, OSError):
            return side
        return msgspec.structs.replace(side, model=ollama_name(path) or header.name, quantization=header.quantization)

    def settings(self, base: Settings) -> Settings:
        """Return `base` with the changes of this side, else greedy and without drafters: two samples differ anyway, and
        a speed with drafts tells more about the text than about the file. Raises UsageError."""
        tables: dict[str, Any] = msgspec.to_builtins(base)
        tables["sampling"]["temperature"] = 0.0
        tables["speculation"]["drafters"] = "auto" if "draft-model" in self.changes else "off"
        for key, value in self.changes.items():
            for name in KEYS.get(key, ()):  # one that was kept may name what is no option any more
                section, _, field = name.partition(".")
                tables[section][field] = value
        try:
            return msgspec.convert(tables, prepared(Settings), strict=False)
        except msgspec.ValidationError as error:
            _, reason = explained(error)
            raise UsageError(f"{self.label}: {reason}.", f"Available settings: {', '.join(KEYS)}.") from None

    @property
    def name(self) -> str:
        """The model with its quantization: `Qwen2.5-1.5B-Instruct Q8_0`."""
        model = self.model or known_as(Path(self.path))
        return model if self.quantization.lower() in model.lower() else f"{model} {self.quantization}"

    @property
    def label(self) -> str:
        """The name with the changes: `Qwen2.5-1.5B-Instruct Q8_0 · threads 2`."""
        return " · ".join([self.name, *(f"{key} {value}" for key, value in self.changes.items())])


def short_names(a: Side, b: Side) -> tuple[str, str]:
    """Name the sides by what differs only: `1.5B Q8_0` and `0.5B Q4_K_M`, `Q8_0 · threads 1` and `Q8_0 · threads 2`."""
    same_model = a.model == b.model and bool(a.quantization and b.quantization)
    if a.path != b.path and (a.name == b.name or (same_model and a.quantization == b.quantization)):
        heads = known_as(Path(a.path)), known_as(Path(b.path))
    elif same_model:
        heads = a.quantization, b.quantization
    else:
        words = [re.split(" " if ":" in side.model else "[ -]", side.name) for side in (a, b)]  # Ollama's stay whole
        common = {*words[0]} & {*words[1]}
        own = [" ".join(word for word in name if word not in common) for name in words]
        heads = (own[0], own[1]) if all(own) else (a.name, b.name)
    first, second = (
        " · ".join(
            [head, *(f"{key} {value}" for key, value in side.changes.items() if other.changes.get(key) != value)]
        )
        for head, side, other in zip(shortened(heads), (a, b), (b, a), strict=True)
    )
    return first, second if second != first else f"{second} again"


def pair_of(path: Path, library: Library) -> tuple[Side, Side] | None:
    """Return `PAIR` of the model of a file, if both are on this machine. Blocks."""
    models: list[LocalModel] = []
    with contextlib.suppress(OSError):
        models += (one for one in library.local_models() if not one.damaged and one.kind == "model")
    model = next((one for one in models if one.path == path), None)
    found = {one.quantization: one for one in models if model is not None and is_same_model(model, one)}
    return (Side.of(found[PAIR[0]].path), Side.of(found[PAIR[1]].path)) if found.keys() >= {*PAIR} else None


def parse_side(text: str, resolve: Callable[[str], Path]) -> Side:
    """Read a side as the command line takes it: `demo-q4,drafters=off,cores=0,2`. Raises UsageError: an unknown
    setting; as `resolve`."""
    spec, changes, last = "", {}, ""
    for number, part in enumerate(text.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip().lower()
        if equals and key in KEYS:
            changes[key], last = value.strip(), key
        elif last and not equals:  # a list such as 0,2
            changes[last] += f",{part.strip()}"
        elif number == 0 or (not last and not equals):
            spec = f"{spec},{part}" if number else part
        else:
            raise UsageError(f"Unknown setting {key!r}.", f"Available settings: {', '.join(KEYS)}.")
    return Side.of(resolve(spec), changes)


def fit_together(sides: Sequence[Side], settings: Sequence[Settings], library: Library) -> tuple[int, str]:
    """Return the context for both with their draft models, in tokens, and why they do not fit together, "" when they
    do. A file that both map counts once. 0 where a header cannot be read: each chooses."""
    try:
        headers = [read_model(Path(side.path)) for side in sides]
    except (CpuchatError, OSError):
        return 0, ""
    available = memory_here(settings[0])
    drafts: list[Path | None] = []
    for side, one in zip(sides, settings, strict=True):
        draft = None
        with contextlib.suppress(CpuchatError, OSError):  # it is then loaded without a draft model
            draft, _ = choose_draft(Path(side.path), one.speculation.wanted_draft, library, strict=False)
        drafts.append(draft)
    options = [one.load_options(str(draft or "")) for one, draft in zip(settings, drafts, strict=True)]
    needs = [plan_memory(header, option, available)[0] for header, option in zip(headers, options, strict=True)]
    total = sum(need.min_bytes for need in needs)
    same_file = os.path.realpath(sides[0].path) == os.path.realpath(sides[1].path)
    if same_file and all(option.load_mode == "mmap" for option in options):
        total -= min(need.weights - need.reclaimable for need in needs)
    n_ctx = min(need.n_ctx for need in needs)
    for draft, header, option in zip(drafts, headers, options, strict=True):
        with contextlib.suppress(CpuchatError, OSError):
            total += draft_memory(read_model(draft), option, n_ctx, header).min_bytes if draft is not None else 0
    why = f"Both models need {gigabytes(total)} GB of {gigabytes(available)} GB available: they are loaded in turn."
    return n_ctx, why if total > available else ""


class TokenText:
    """Everything that a model wrote, reasoning included; the token that each character came from, and when it came."""

    def __init__(self) -> None:
        self.text = ""
        self.ends: list[int] = []
        """Where the text of each token ends."""
        self._times: list[float] = []  # ms after the request, of each token
        self._drafters: list[str] = []  # of each token

    def add(self, delta: TextDelta) -> None:
        """Append a delta. Where it has several tokens, their times are spread evenly since the one before."""
        at, before = len(self.text), self._times[-1] if self._times else delta.at_ms
        step = max(delta.at_ms - before, 0.0) / max(delta.n_tokens, 1)
        self._times += [before + step * (number + 1) for number in range(delta.n_tokens)]
        self._drafters += [delta.drafter] * delta.n_tokens
        self.text += delta.text
        lengths = delta.lengths if len(delta.lengths) == delta.n_tokens else ()
        for number in range(delta.n_tokens):
            if lengths:
                at += lengths[number]
            else:  # nobody counted: spread evenly
                at = len(self.text) - len(delta.text) * (delta.n_tokens - 1 - number) // delta.n_tokens
            self.ends.append(at)
        if self.ends:
            self.ends[-1] = len(self.text)

    @classmethod
    def of(cls, text: str, kept: KeptTokens) -> TokenText:
        """Return the text of an answer that was kept; without tokens where `kept` is of another text."""
        found, n = cls(), len(kept.ends)
        drafters = kept.drafters or ("",) * n
        if n and kept.ends[-1] == len(text) and n == len(kept.ms) == len(drafters):
            found.text, found.ends, found._times, found._drafters = text, [*kept.ends], [*kept.ms], [*drafters]
        return found

    @property
    def n_tokens(self) -> int:
        return len(self.ends)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Return who proposed each token, "" for the model itself; () where nothing was drafted."""
        return tuple(self._drafters) if any(self._drafters) else ()

    def tokens(self) -> Iterator[tuple[str, float]]:
        """Yield the text of each token, and its time in ms after the first one."""
        start = 0
        for end, at_ms in zip(self.ends, self._times, strict=True):
            yield self.text[start:end], round(at_ms - self._times[0], 3)
            start = end


class KeptTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the database has of an answer's tokens: where the text of each ends in what was written, when it came, in ms
    after the first one, and who drafted it; and what the other side predicts, if that was measured."""

    ends: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()
    drafters: tuple[str, ...] = ()
    agreement: AnswerAgreement | None = None


@dataclass
class SideAnswer:
    """One side's answer. `timings` and `roofline` are None until it is complete; `failed` is why it is not. The tokens
    are () where nobody told them; `memory` are the resident bytes of its worker."""

    content: str = ""
    reasoning: str = ""
    prompt_tokens: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    written: TokenText = field(default_factory=TokenText)
    stop_reason: str = ""
    timings: Timings | None = None
    model: ModelInfo | None = None
    roofline: Roofline | None = None
    memory: int | None = None
    failed: Failed | None = None

    @property
    def complete(self) -> bool:
        """It has ended by itself, or at its token limit."""
        return self.timings is not None and self.stop_reason != "cancelled" and self.failed is None

    def kept_tokens(self, agreement: AnswerAgreement | None) -> KeptTokens:
        """Return what is kept of its tokens, with the `agreement` on them."""
        written = self.written
        return KeptTokens(tuple(written.ends), tuple(ms for _, ms in written.tokens()), written.drafters, agreement)

    def as_written(self) -> Written | None:
        """Return what was written, token by token; None where that is not known."""
        if not self.tokens or self.written.n_tokens != len(self.tokens):
            return None
        return Written(self.prompt_tokens, self.tokens, self.written.text, self.written.ends)


@dataclass
class Round:
    """Both answers to one prompt, side `first` (0 or 1) first; `agreement_note` is why there is no agreement."""

    first: int = 0
    answers: tuple[SideAnswer, SideAnswer] = field(default_factory=lambda: (SideAnswer(), SideAnswer()))
    agreement: Agreement | None = None
    agreement_note: str = ""

    @property
    def complete(self) -> bool:
        """Both sides have finished, by themselves or at their token limit."""
        return all(one.complete for one in self.answers)

    @property
    def stopped(self) -> bool:
        """The user has stopped it."""
        return not self.complete and any(one.stop_reason == "cancelled" for one in self.answers)

    @property
    def disturbed(self) -> bool:
        """Other programs were using the cores for a part of it, so that its speeds are not those of the sides."""
        return self.cores_share < 1

    @property
    def cores_share(self) -> float:
        """Return the share of the cores (0-1) that the more disturbed side had; 1: other programs took no part."""
        shares = (one.timings.cores_share for one in self.answers if one.timings is not None)
        return min((share for share in shares if share is not None), default=1.0)

    @property
    def ratio(self) -> float | None:
        """Return the decoding rates B ÷ A."""
        a, b = (one.timings.predicted_per_second if one.timings is not None else None for one in self.answers)
        return b / a if a and b else None


@dataclass
class Turn:
    """One prompt and its rounds; the last one is what the next prompt continues."""

    prompt: str
    rounds: list[Round] = field(default_factory=list)

    def counted(self) -> list[Round]:
        """Return the rounds that count: complete and undisturbed ones, else the least disturbed, else the last."""
        complete = [one for one in self.rounds if one.complete]
        least_disturbed = sorted(complete, key=lambda one: one.cores_share)[-1:]
        return [one for one in complete if not one.disturbed] or least_disturbed or self.rounds[-1:]

    @property
    def agreement(self) -> Agreement | None:
        """Return the newest one on answers that count, else on the last ones: what repeats them has the same words."""
        rounds = (*self.rounds[-1:], *self.counted())
        return next((one.agreement for one in reversed(rounds) if one.agreement is not None), None)


class Runner:
    """One side with its conversation. `failed` is why it cannot answer, None when it can; `model` is the one that was
    loaded last, also after its worker crashed."""

    def __init__(self, side: Side, settings: Settings, backend: Backend, library: Library) -> None:
        self.side = side
        self.settings = settings
        self.conversation = Conversation(settings=settings, backend=backend, store=None, library=library)
        self.conversation.output = Output(tokens=True)
        self.conversation.logs_speed = not side.changes  # else with other settings than the user's
        self.failed: Failed | None = None
        self.model: ModelInfo | None = None
        self.n_prompts = 0
        """The number of prompts in its history."""

    async def load(self, tell: Callable[[AnyEvent], None]) -> bool:
        """Load the model, unless it is already; returns whether it can answer."""
        if self.conversation.model is not None:
            return True
        self.failed = None
        try:
            async with contextlib.aclosing(self.conversation.load_model(Path(self.side.path))) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        self.failed = event
                    elif isinstance(event, ModelLoaded):
                        self.model = event.model
                    elif isinstance(event, LoadCancelled):
                        return False
                    tell(event)
        except (CpuchatError, OSError) as error:
            expected = isinstance(error, CpuchatError)
            self.failed = Failed.of(error) if expected else Failed(code="error", message=str(error))
            tell(self.failed)
        if self.failed is not None or self.conversation.model is None:
            return False
        # The first prompt after a load starts the template's process and meets cold caches, and would take from the
        # figures of whichever side answers then: two tokens that nobody sees.
        request = Generate(
            messages=(Message(role="user", content="Hello"),), sampling=Sampling(temperature=0.0), max_tokens=2
        )
        async with contextlib.aclosing(self.conversation.generate_detached(request)) as events:
            async for _ in events:  # what fails here fails again in the answer
                pass
        return True

    async def answer(
        self, turns: Sequence[Turn], into: SideAnswer, tell: Callable[[AnyEvent], None], stopped: Callable[[], bool]
    ) -> None:
        """Answer the prompt of the last of `turns`, from the start: nothing of an earlier answer is reused."""
        conversation = self.conversation
        await conversation.backend.forget("")
        if self.n_prompts == len(turns):
            stream = conversation.regenerate()
        else:
            stream, self.n_prompts = conversation.send(turns[-1].prompt), len(turns)
        try:
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    self._take(event, into)
                    tell(event)
                    if stopped():  # asked for when it had not begun
                        await self.conversation.stop()
        except CpuchatError as error:
            into.failed = Failed.of(error)
            tell(into.failed)

    async def score(self, command: Score) -> TokensScored:
        """Run a command of a scoring job. Raises MeasureFailed: the worker failed, was stopped, or cannot score."""
        run = getattr(self.conversation.backend, "score", None)
        if run is None:
            raise MeasureFailed("This engine does not tell its predictions.", "Compare models that run in cpuchat.")
        found: TokensScored | Failed = await run(command)
        if isinstance(found, Failed):
            raise MeasureFailed(found.message, found.hint)
        return found

    async def end_scoring(self) -> None:
        """Let the worker free what scoring took."""
        backend = self.conversation.backend
        if hasattr(backend, "score") and backend.model is not None:
            await self.score(Score())

    async def stop(self) -> None:
        """Stop what runs."""
        await self.conversation.stop()
        await self.conversation.backend.cancel()  # scoring is no matter of the conversation

    def _take(self, event: AnyEvent, into: SideAnswer) -> None:
        match event:
            case TextDelta():
                into.written.add(event)
                if event.channel == "reasoning":
                    into.reasoning += event.text
                else:
                    into.content += event.text
            case ModelLoaded():
                self.model = event.model
            case GenerationFinished():
                into.timings, into.stop_reason = event.timings, event.stop_reason
                into.prompt_tokens, into.tokens = event.prompt_tokens, event.tokens
                into.roofline, into.model = self.conversation.figures().roofline, self.model
            case Failed():
                into.failed, into.stop_reason = event, event.code
