"""Meters in the states that the telemetry panel shows, with what the machine's sensors tell."""

from __future__ import annotations

import math

import msgspec

from cpuchat.hardware.process import ProcessMemory
from cpuchat.protocol.messages import (
    Event,
    GenerationFinished,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
    Speculation,
    SpeculationUpdate,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import Reuse, SpeculationFigures, Timings
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power
from cpuchat.telemetry.meter import Meter
from tests.support.costs import work_of_size
from tests.support.scripted_backend import DRAFTING, REFUSED

MEMORY = ProcessMemory(private=312_000_000, shared=1_610_000_000)
MODEL = ModelInfo(
    path="m.gguf", name="m", architecture="llama", quantization="Q8_0", n_params=1, size=1, n_ctx=8192,
    n_ctx_train=8192, n_vocab=1, n_layer=1, n_threads=8, cpus=tuple(range(8)), peak_read=51e9, cache_bytes=32 << 20,
    pass_ms=tuple(39.7 + 3.4 * n for n in range(32)),
    work=work_of_size(1_640_000_000, 28_672),
    draft_work=work_of_size(531_000_000, 12_288),
)  # fmt: skip
LOADED: list[Event] = [LoadProgress(phase="reading", done=61, total=100), ModelLoaded(model=MODEL)]
READING: list[Event] = [
    PrefillProgress(request_id=1, processed=1536, total=2048, cache_n=1536),
    PrefillProgress(request_id=1, processed=1792, total=2048, cache_n=1536),
]
EDITED = Reuse(source="disk", ms=40.0, changed="message", message=2, again=210)


def reading(reuse: Reuse) -> list[Event]:
    """Return the progress of a prompt that reused this much."""
    return [msgspec.structs.replace(event, reuse=reuse) for event in READING]


def writing(seconds: float, rate: float = 41.3) -> list[Event]:
    """Return deltas of an answer whose speed swings by 15 % around `rate`."""
    events: list[Event] = []
    at_ms = 210.0
    for n in range(1, int(seconds * rate)):
        events.append(TextDelta(request_id=1, text="x", predicted_n=n, at_ms=at_ms))
        at_ms += 1000 / (rate + 6 * math.sin(n / 90))
    return events


FINISHED = GenerationFinished(
    request_id=1,
    stop_reason="cancelled",
    timings=Timings(
        cache_n=1536, prompt_n=512, prompt_ms=1954, predicted_n=412, predicted_ms=9975, ttft_ms=210, n_past=2460,
        n_ctx=8192,
    ),
)  # fmt: skip


def finished(figures: SpeculationFigures) -> GenerationFinished:
    return msgspec.structs.replace(
        FINISHED, timings=msgspec.structs.replace(FINISHED.timings, speculation=figures, draft_n=470)
    )


DRAFTERS = Speculation(drafters=("suffix", "draft"))


def drafted(figures: SpeculationFigures, predicted_n: int = 412) -> SpeculationUpdate:
    return SpeculationUpdate(request_id=1, predicted_n=predicted_n, figures=figures)


COUNTED = MachineSample(
    bandwidth=Bandwidth(39e9, "umc", read=36e9, write=3e9),
    power=Power(143.0, 9000.0, "rapl"),
)


def counting(meter: Meter, sample: MachineSample = COUNTED) -> Meter:
    """Return `meter` after a reading of the counters."""
    meter.machine(sample)
    return meter


def loaded(**changes: object) -> list[Event]:
    """Return a load of the model with these differences."""
    return [ModelLoaded(model=msgspec.structs.replace(MODEL, **changes))]


def meter_after(*events: Event, speculation: Speculation = DRAFTERS) -> Meter:
    meter = Meter()
    meter.asked = speculation
    for number, event in enumerate(events):
        meter.observe(event, float(number))
    return meter


READ = (*LOADED, *READING)
WRITTEN = (*READ, *writing(10))
STATES = {
    "idle": (meter_after(), None),
    "loading": (meter_after(LOADED[0]), None),
    "loaded": (meter_after(*LOADED), MEMORY),
    "reading": (meter_after(*READ), MEMORY),
    "undrafted": (meter_after(*READ, *writing(60)), MEMORY),
    "writing": (meter_after(*WRITTEN, drafted(DRAFTING)), MEMORY),
    "refused": (meter_after(*WRITTEN, drafted(REFUSED)), MEMORY),
    "done": (meter_after(*WRITTEN, finished(DRAFTING)), MEMORY),
}

SERVED = ModelInfo(
    path="http://127.0.0.1:8080#m", name="m", architecture="", quantization="Q8_0", n_params=1, size=1, n_ctx=8192,
    n_ctx_train=8192, n_vocab=1, n_layer=0, n_threads=0, server="vLLM at 127.0.0.1:8080",
    unreported=(("prefill_cached", "start vLLM with --enable-prompt-tokens-details"),),
)  # fmt: skip
SILENT = msgspec.structs.replace(
    SERVED,
    n_ctx=0,
    server="OpenAI-compatible server at 127.0.0.1:8080",
    drafts_off=DraftsOff("model", note="not reported by this server"),
    unreported=(
        ("tokens", "reported at the end of the answer"),
        ("prefill_tok_s", "not reported"),
        ("prefill_cached", "not reported"),
        ("acceptance", "not reported by this server; start it with drafts"),
        ("n_ctx", "not reported"),
    ),
)
COUNTED_THERE = msgspec.structs.replace(
    DRAFTING, source="server", by_drafter=(), drafter="", draft_ms=0.0, plain_ms=None, draft_passes=0
)
SERVERS = {
    "serving": (meter_after(ModelLoaded(model=SERVED), *READING, *writing(10), drafted(COUNTED_THERE)), None),
    "served": (meter_after(ModelLoaded(model=SERVED), *READING, *writing(10), finished(COUNTED_THERE)), None),
    "silent": (meter_after(ModelLoaded(model=SILENT), *writing(10)), None),
}
"""A model on a server that reports much, before and after the end of an answer, and on one that reports little."""

MACHINES = {
    "counted": (counting(meter_after(*WRITTEN, drafted(DRAFTING))), MEMORY),
    "other load": (counting(meter_after(*WRITTEN, drafted(DRAFTING)), MachineSample(Bandwidth(49e9, "umc"))), MEMORY),
    "off": (meter_after(*WRITTEN), MEMORY),
    "cached": (
        meter_after(*loaded(work=work_of_size(8_000_000), draft_work=None), *READING, *writing(10)),
        MEMORY,
    ),
    "no peak": (meter_after(*loaded(peak_read=0.0), *READING, *writing(10)), MEMORY),
}
"""What the roofline says on machines that differ."""
