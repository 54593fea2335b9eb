"""Measures how fast a model answers with given settings, in a worker process of its own.

Every measurement is an answer as in a chat, with nothing reused: a prompt of built-in text, and some tokens.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

import msgspec

from cpuchat.backend.loading import load_to_measure
from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import Interrupted, MeasureFailed
from cpuchat.bench.matrix import load
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.measure.answer import answer_greedily
from cpuchat.protocol.messages import Generate, LoadOptions, Message, Speculation
from cpuchat.protocol.timings import Timings
from cpuchat.tune.candidates import TuningChoice

_DECODE_SECONDS: Final = 1.0
_TEXT_SECONDS: Final = 2.5
_REPEATS: Final = 2  # answers per measurement, of which the fastest counts: what interrupts one only slows it down
CTX: Final = 2048
TOKENS: Final = (8, 128)
_PROMPT_TOKENS: Final = 64  # at least
_WARM_UP: Final = (256, 4)  # characters and tokens
_FIRST_SECONDS: Final = (0.3, 1.0)


OVERALL: Final = "overall"


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second: `prefill`, and `decode` of each text that was written."""

    prefill: float
    decode: tuple[float, ...]

    @property
    def mean_decode(self) -> float:
        """Return the geometric mean of all texts."""
        return statistics.geometric_mean(self.decode)

    def rates(self) -> dict[str, float]:
        """Return all rates by name; half of all tokens are prompts'."""
        texts = {f"text {number}": rate for number, rate in enumerate(self.decode)}
        overall = statistics.harmonic_mean((self.prefill, self.mean_decode))
        return {OVERALL: overall, "decode": self.mean_decode, "prefill": self.prefill, **texts}


class Measurer:
    """Measures speeds; loads the model again when settings need it. `name` is the model's, "" before it is loaded. Once
    it is `stopped`, and its `backend` cancelled or killed, `measure` raises Interrupted."""

    def __init__(self, path: Path) -> None:
        self.name = ""
        self.backend = LocalBackend()
        self.stopped = False
        self._path = path
        self._loaded: tuple[LoadOptions, PlacementSpec] | None = None
        self._rates = Speed(prefill=1.0, decode=(1.0,))
        self._chars_per_token = 4.0
        prompts = load()
        self._text = "\n\n".join(one.text for one in prompts)
        self._prompts = [next(one for one in prompts if one.kind == kind) for kind in ("code", "chat")]

    @property
    def max_tokens(self) -> int:
        """Return the longest prompt that fits the context."""
        model = self.backend.model
        return min(model.n_ctx if model is not None else CTX, CTX) // 2

    async def first(self, chosen: Settings) -> Speed:
        """Load the model and find out about how fast it is. Raises CpuchatError if that is not possible."""
        await self._load(chosen, "")
        for seconds in _FIRST_SECONDS:  # the second lengths are made from the first speeds
            prompt = self._prompt(seconds)
            timings = await self._answer(prompt, self._tokens(seconds))
            self._rates = _speed(timings)
            self._chars_per_token = len(prompt) / timings.prompt_n
        return self._rates

    async def measure(self, chosen: Settings, choice: TuningChoice, draft: str) -> Speed:
        """Measure once; `draft`: the draft model of choices about texts. Raises Interrupted: stopped; CpuchatError."""
        of_texts = choice.test == "texts"
        if await self._load(chosen, draft if of_texts else "", calibrate=of_texts):
            await self._answer(self._text[: _WARM_UP[0]], _WARM_UP[1])
        if of_texts:
            return await self._texts(chosen)
        prompt = self._prompt(choice.prompt_seconds)
        n_tokens = 2 if choice.test == "prefill" else self._tokens(_DECODE_SECONDS)
        found = [_speed(await self._answer(prompt, n_tokens)) for _ in range(_REPEATS)]
        decode = self._rates.mean_decode if choice.test == "prefill" else max(one.mean_decode for one in found)
        return Speed(prefill=max(one.prefill for one in found), decode=(decode,))

    async def _texts(self, chosen: Settings) -> Speed:
        """Measure the decoding of a text of each kind, drafted as `chosen` says."""
        model, rates = self.backend.model, list[float]()
        for prompt in self._prompts:
            messages = (Message(role="user", content=prompt.text),)
            timings = await self._answer(
                prompt.text if model is not None and not model.has_template else messages,
                self._tokens(_TEXT_SECONDS),
                chosen.speculation.speculation(),
            )
            rates.append(_speed(timings).mean_decode)
        return Speed(prefill=self._rates.prefill, decode=tuple(rates))

    def _prompt(self, seconds: float) -> str:
        """Return a text that takes about so many seconds of prefill."""
        tokens = min(max(int(seconds * self._rates.prefill), _PROMPT_TOKENS), self.max_tokens)
        length = int(tokens * self._chars_per_token)
        return (self._text * (1 + length // len(self._text)))[:length]

    def _tokens(self, seconds: float) -> int:
        min_n, max_n = TOKENS
        return min(max(int(seconds * self._rates.mean_decode), min_n), max_n)

    async def _answer(
        self, prompt: str | tuple[Message, ...], n_tokens: int, speculation: Speculation | None = None
    ) -> Timings:
        """Return the figures of one greedy answer, with nothing reused from earlier ones."""
        if self.stopped:
            raise Interrupted("Stopped.")
        await self.backend.forget("")
        request = Generate(
            prompt=prompt if isinstance(prompt, str) else None,
            messages=() if isinstance(prompt, str) else prompt,
            max_tokens=n_tokens,
            speculation=speculation or Speculation(),
            ignore_eos=True,
        )
        try:
            return await answer_greedily(self.backend.generate, request)
        except MeasureFailed:
            if self.stopped:
                raise Interrupted("Stopped.") from None
            raise

    async def _load(self, chosen: Settings, draft: str, *, calibrate: bool = False) -> bool:
        """Load the model if it is not loaded so; returns whether it was. Raises CpuchatError. `calibrate`: measure
        what passes cost, which adaptive draft depths need."""
        if self.stopped:
            raise Interrupted("Stopped.")
        options = chosen.load_options(draft)
        options = msgspec.structs.replace(options, n_ctx=options.n_ctx or CTX, calibrate=calibrate)
        wanted = options, PlacementSpec.of(chosen)
        if self._loaded == wanted and self.backend.model is not None:
            return False
        self._loaded = None
        self.name = (await load_to_measure(self.backend, self._path, *wanted, lambda: self.stopped)).name
        self._loaded = wanted
        return True


def _speed(timings: Timings) -> Speed:
    """Raises MeasureFailed for an answer without figures."""
    prefill, decode = timings.prompt_per_second, timings.predicted_per_second
    if prefill is None or decode is None:
        raise MeasureFailed("The model wrote too few tokens to measure.", "Choose another model.")
    return Speed(prefill=prefill, decode=(decode,))
