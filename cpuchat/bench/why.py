"""What is known of the settings of a loaded model, gathered from the worker's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from cpuchat.base.errors import UsageError
from cpuchat.config.settings import Settings
from cpuchat.hardware.knobs import huge_pages
from cpuchat.hardware.numa.residency import Residency, read_residency
from cpuchat.hardware.process import MemoryPages, ThreadCpus, memory_pages, thread_cpus
from cpuchat.hardware.topology import ROOT, Topology, read_topology
from cpuchat.measure.answer import answer_greedily
from cpuchat.measure.peak import expected, with_peak
from cpuchat.models.cpu_modules import AUTO, engine_cpu
from cpuchat.models.gguf.header import model_files
from cpuchat.models.kernels import MeasuredProducts, ProductLog
from cpuchat.protocol.messages import Generate
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.machine import Peak

if TYPE_CHECKING:
    from cpuchat.session.conversation import Conversation

State = Literal["works", "off", "no effect", "fails", "unknown"]

_TEST_PROMPT: Final = "red green blue\n" * 6
_TEST_TOKENS: Final = 16


@dataclass(frozen=True)
class SettingFacts:
    """A loaded model with the settings `chosen`, and what the kernel says of its worker right after a test answer.

    `residency` and `pages` None: the kernel does not tell. `timings` are those of the test answer; `huge_pages` is the
    kernel's setting ("" where unknown). `products` were measured with both kernels, by type; `peak` of the cores."""

    chosen: Settings
    model: ModelInfo
    engine: EngineInfo
    topology: Topology
    timings: Timings
    residency: Residency | None = None
    pages: MemoryPages | None = None
    threads: tuple[ThreadCpus, ...] = ()
    huge_pages: str = ""
    products: Mapping[str, MeasuredProducts] = field(default_factory=dict[str, MeasuredProducts])
    peak: Peak | None = None


async def prove(conversation: Conversation) -> SettingFacts:
    """Let the loaded model continue a repetitive text, which drafters can draft; return what then is known of its
    settings. Raises UsageError, MeasureFailed."""
    model, engine, chosen = conversation.model, conversation.backend.engine, conversation.in_effect
    if model is None or engine is None or model.evidence is None:
        raise UsageError("This model runs on another engine, which shows no proofs.", "Choose another model or draft.")
    request = Generate(
        prompt=_TEST_PROMPT, max_tokens=_TEST_TOKENS, speculation=conversation.speculation, ignore_eos=True,
    )  # fmt: skip
    timings = await answer_greedily(conversation.generate_detached, request)
    return await asyncio.to_thread(gather, chosen, model, engine, timings)


def gather(chosen: Settings, model: ModelInfo, engine: EngineInfo, timings: Timings, root: Path = ROOT) -> SettingFacts:
    """Read what the kernel says of the worker `engine.pid`. Walks its page tables: call it in a thread."""
    files = [part for path in (model.path, model.draft_path) if path for part in model_files(Path(path))]
    thread_ids = model.evidence.thread_ids if model.evidence is not None else ()
    return SettingFacts(
        chosen=chosen,
        model=with_peak(model, engine.memory_policy),
        engine=engine,
        topology=read_topology(root),
        timings=timings,
        residency=read_residency(engine.pid, files, root),
        pages=memory_pages(engine.pid, root),
        threads=thread_cpus(engine.pid, thread_ids, root),
        huge_pages=huge_pages(root),
        peak=expected(model.cpus, engine.memory_policy, root=root),
        products=ProductLog(model.cpus, engine.memory_policy, engine_cpu(engine.module or AUTO)).read(),
    )


class SettingProof(msgspec.Struct, frozen=True, kw_only=True):
    """A setting: its value as chosen, whether that works, and the proof in words."""

    name: str
    value: str
    state: State
    proof: str
