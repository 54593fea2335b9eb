"""One measurement of one cell, with the loaded model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from itertools import cycle, islice

import msgspec
import numpy as np

from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import MeasureFailed
from cpuchat.bench.matrix import BenchCell, BenchPrompt
from cpuchat.config.settings import SpeculationSection
from cpuchat.hardware.process import process_memory
from cpuchat.measure.answer import answer_greedily
from cpuchat.protocol.messages import Failed, Generate, Measure, Message, StateKey, TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import MAX_CPU_WAIT, Timings
from cpuchat.telemetry.roofline import after_answer


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a run of random tokens, or all prompts of a kind, one after the other; or one of each user.

    `prefill` and `decode` are tok/s over all prompts, `seconds` all that was timed, `ttft_ms` the mean. Of several
    users `each` is the decode tok/s of one on average, and `decode` that of all together, while all of them are
    answered; where there is no such time (`staggered`), from the first token of one to the last of another. `passes`:
    of the target while something was drafted. `bandwidth`: bytes per second that decoding reads by the model's header;
    `utilization`: of the measured peak. `memory`: resident bytes of the worker. `text`: hash of what was written.
    `disturbed`: other programs used the cores."""

    seconds: float
    prompt_n: int = 0
    predicted_n: int = 0
    prefill: float | None = None
    decode: float | None = None
    ttft_ms: float | None = None
    each: float | None = None
    staggered: bool = False
    draft_n: int = 0
    draft_n_accepted: int = 0
    passes: int = 0
    bandwidth: float | None = None
    utilization: float | None = None
    memory: int | None = None
    text: str = ""
    disturbed: bool = False
    drafts_off: DraftsOff | None = None

    @property
    def rate(self) -> float:
        """Return the tok/s that the test is about."""
        return self.decode or self.prefill or 0.0


async def measure_cell(backend: LocalBackend, cell: BenchCell, prompts: Sequence[BenchPrompt]) -> Sample:
    """Measure a cell once, with `prompts` of its kind. Raises MeasureFailed: the engine failed, or has no model."""
    model = backend.model
    if model is None:
        raise MeasureFailed("No model is loaded.")
    if model.peak_estimated:  # no denominator of figures that are kept
        model = msgspec.structs.replace(model, peak_read=0.0)
    if cell.test.kind == "prompts":
        sample = await _prompts(backend, model, cell, prompts)
    else:
        sample = await _random(backend, model, cell)
    memory = process_memory(backend.pid) if backend.pid is not None else None
    return msgspec.structs.replace(sample, memory=memory.private + memory.shared if memory is not None else None)


async def _random(backend: LocalBackend, model: ModelInfo, cell: BenchCell) -> Sample:
    test = cell.test
    found = await backend.measure(Measure(n_prompt=test.n_prompt, n_gen=test.n_gen, depth=test.depth))
    if isinstance(found, Failed):
        raise MeasureFailed(found.message, found.hint)
    seconds, disturbed = found.seconds, (found.cpu_wait or 0.0) > MAX_CPU_WAIT
    if test.kind == "pp":
        rate = test.n_prompt / seconds
        return Sample(seconds=seconds, prompt_n=test.n_prompt, prefill=rate, disturbed=disturbed)
    timings = Timings(predicted_n=test.n_gen + 1, predicted_ms=1e3 * seconds, n_past=test.depth + test.n_gen)
    roofline = after_answer(model, timings)
    return Sample(
        seconds=seconds,
        predicted_n=test.n_gen,
        decode=test.n_gen / seconds,
        disturbed=disturbed,
        bandwidth=roofline.estimate.value,
        utilization=roofline.utilization.value,
    )


async def _prompts(backend: LocalBackend, model: ModelInfo, cell: BenchCell, prompts: Sequence[BenchPrompt]) -> Sample:
    """Measure greedy answers of exactly as many tokens as the test has, with nothing reused from earlier ones."""
    section = SpeculationSection(drafters=cell.drafters, depth=cell.draft_depth)
    users = cell.test.users
    if model.parallel < users:
        why = " ".join(note for note in model.notes if note.startswith("One answer at a time"))
        raise MeasureFailed(f"{model.parallel} of {users} users can be answered at once. {why}".strip())

    async def ask(user: int, prompt: BenchPrompt) -> tuple[Timings, list[TextDelta]]:
        written = list[TextDelta]()
        request = Generate(
            messages=(Message(role="user", content=prompt.text),),
            max_tokens=cell.test.n_gen,
            speculation=section.speculation(),
            ignore_eos=True,
            state=StateKey(owner=f"user {user}"),  # nothing is reused of another one
        )
        return await answer_greedily(backend.generate, request, written.append), written

    answers = list[tuple[Timings, list[TextDelta]]]()
    for group in ([prompt] for prompt in prompts) if users == 1 else [[*islice(cycle(prompts), users)]]:
        await backend.forget("")  # neither KV cache nor drafters know the text of the round before
        asked = [asyncio.ensure_future(ask(*one)) for one in enumerate(group)]
        try:
            answers += await asyncio.gather(*asked)
        finally:  # one that failed or was stopped ends all
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
    text = "\0".join("".join(delta.text for delta in deltas) for _, deltas in answers)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    sample = _summed(model, [timings for timings, _ in answers], digest)
    return sample if users == 1 else _together(sample, answers)


def _together(sample: Sample, answers: Sequence[tuple[Timings, list[TextDelta]]]) -> Sample:
    """Return the figures of answers that were written at once; what they read together is not known."""
    curves = [([one.at_ms for one in deltas], [one.predicted_n for one in deltas]) for _, deltas in answers]
    first, last = [at_ms[0] for at_ms, _ in curves], [at_ms[-1] for at_ms, _ in curves]
    staggered = max(first) >= min(last)
    start, end = (min(first), max(last)) if staggered else (max(first), min(last))
    written = sum(float(np.interp(end, *curve) - np.interp(start, *curve)) for curve in curves)
    rates = [rate for timings, _ in answers if (rate := timings.predicted_per_second)]
    return msgspec.structs.replace(
        sample,
        seconds=max(last) / 1e3,
        prefill=None,
        decode=1e3 * written / (end - start) if end > start else None,
        each=sum(rates) / len(rates) if rates else None,
        staggered=staggered,
        bandwidth=None,
        utilization=None,
    )


def _summed(model: ModelInfo, answers: Sequence[Timings], text: str) -> Sample:
    """Return the figures of all answers together; bandwidths are weighted with the time of decoding."""
    prompt_ms, predicted_ms = sum(one.prompt_ms for one in answers), sum(one.predicted_ms for one in answers)
    steps, prompt_n = sum(one.predicted_n - 1 for one in answers), sum(one.prompt_n for one in answers)
    rooflines = [after_answer(model, one) for one in answers]
    figures = [one.speculation for one in answers if one.speculation is not None]
    has_drafted = any(one.draft_n for one in answers)

    def weighted(values: list[float | None]) -> float | None:
        known = [(value, one.predicted_ms) for value, one in zip(values, answers, strict=True) if value is not None]
        total = sum(ms for _, ms in known)
        return sum(value * ms for value, ms in known) / total if total else None

    return Sample(
        seconds=(prompt_ms + predicted_ms) / 1e3,
        prompt_n=prompt_n,
        predicted_n=sum(one.predicted_n for one in answers),
        prefill=1e3 * prompt_n / prompt_ms if prompt_ms else None,
        decode=1e3 * steps / predicted_ms if predicted_ms else None,
        ttft_ms=sum(one.ttft_ms for one in answers) / len(answers),
        draft_n=sum(one.draft_n for one in answers),
        draft_n_accepted=sum(one.draft_n_accepted for one in answers),
        passes=sum(one.passes for one in figures) if has_drafted else 0,
        bandwidth=weighted([one.estimate.value for one in rooflines]),
        utilization=weighted([one.utilization.value for one in rooflines]),
        text=text,
        disturbed=any((one.cpu_wait or 0.0) > MAX_CPU_WAIT for one in answers),
        drafts_off=None if has_drafted else next((one.off for one in figures if one.off is not None), None),
    )
