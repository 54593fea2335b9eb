"""What is known of the settings of a loaded model: gathered from the worker's process, reported, compared, kept."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.base.files import JsonCache, read_json
from cpuchat.base.paths import shown
from cpuchat.bench.results import Environment, read_environment
from cpuchat.config.settings import Settings
from cpuchat.hardware.knobs import THP, value_of
from cpuchat.hardware.numa.residency import Residency, read_residency
from cpuchat.hardware.process import MemoryPages, ThreadCpus, memory_pages, thread_cpus
from cpuchat.hardware.topology import ROOT, Topology, read_topology
from cpuchat.models.cpu_modules import AUTO, engine_cpu
from cpuchat.models.gguf.header import model_files
from cpuchat.models.kernels import MeasuredProducts, ProductLog
from cpuchat.protocol.messages import Generate
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.answer import answer_greedily

if TYPE_CHECKING:
    from cpuchat.session.conversation import Conversation

State = Literal["works", "off", "no effect", "fails", "unknown"]

_TEST_PROMPT: Final = "red green blue\n" * 6
_TEST_TOKENS: Final = 16


@dataclass(frozen=True)
class SettingFacts:
    """A loaded model with the settings `chosen`, and what the kernel says of its worker right after a test answer.

    `residency` and `pages` None: the kernel does not tell. `timings` are those of the test answer; `huge_pages` is the
    kernel's setting ("" where unknown). `products` were measured with both kernels, by type.
    """

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


async def prove(conversation: Conversation) -> tuple[SettingFacts, Environment]:
    """Let the loaded model continue a repetitive text, which drafters can draft; return what then is known of its
    settings. Raises UsageError, MeasureFailed."""
    model, engine, chosen = conversation.model, conversation.backend.engine, conversation.in_effect
    if model is None or engine is None or model.evidence is None:
        raise UsageError("This model runs on another engine, which shows no proofs.", "Choose another model or draft.")
    request = Generate(
        prompt=_TEST_PROMPT, max_tokens=_TEST_TOKENS, speculation=conversation.speculation, ignore_eos=True,
    )  # fmt: skip
    timings = await answer_greedily(conversation.generate_detached, request)
    facts = await asyncio.to_thread(gather, chosen, model, engine, timings)
    return facts, await asyncio.to_thread(read_environment, engine, (model.path, model.draft_path), chosen)


def gather(chosen: Settings, model: ModelInfo, engine: EngineInfo, timings: Timings, root: Path = ROOT) -> SettingFacts:
    """Read what the kernel says of the worker `engine.pid`. Walks its page tables: call it in a thread."""
    files = [part for path in (model.path, model.draft_path) if path for part in model_files(Path(path))]
    thread_ids = model.evidence.thread_ids if model.evidence is not None else ()
    return SettingFacts(
        chosen=chosen,
        model=model,
        engine=engine,
        topology=read_topology(root),
        timings=timings,
        residency=read_residency(engine.pid, files, root),
        pages=memory_pages(engine.pid, root),
        threads=thread_cpus(engine.pid, thread_ids, root),
        huge_pages=value_of(root, f"{THP}/enabled"),
        products=ProductLog(model.cpus, engine.memory, engine_cpu(engine.module or AUTO)).read(),
    )


class SettingGain(msgspec.Struct, frozen=True, kw_only=True):
    """By what share a speed is higher with the setting than without (0.05: 5 %), its standard error, and whether the
    difference is significant."""

    gain: float
    error: float
    is_sure: bool


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting is worth beside an `alternative`; None for a rate that it cannot change. `noisy`: the machine was
    busy. `skipped` is why nothing was measured, "" when it was."""

    alternative: str = ""
    decode: SettingGain | None = None
    prefill: SettingGain | None = None
    noisy: bool = False
    skipped: str = ""


class SettingProof(msgspec.Struct, frozen=True, kw_only=True):
    """A setting: its value as chosen, whether that works, and the proof in words."""

    name: str
    value: str
    state: State
    proof: str
    worth: Worth | None = None


class WhyReport(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a model on a machine. `command` repeats it."""

    command: str
    model: str
    quantization: str
    environment: Environment
    settings: tuple[SettingProof, ...]


def without_effect(rows: Iterable[SettingProof]) -> frozenset[str]:
    """Return the settings that need not be measured: they change nothing on this machine or in this model."""
    return frozenset(row.name for row in rows if row.state == "no effect" and row.name != "drafters")


def worth_cache() -> JsonCache[dict[str, Worth]]:
    """Return the measured worths by `worth_key` and setting, from which a stopped measurement resumes."""
    return JsonCache(paths.worth_file(), dict[str, Worth], version=1, max_entries=100)


def worth_key(facts: SettingFacts, environment: Environment) -> str:
    """Identify what worths depend on."""
    chosen = facts.chosen
    parts = (facts.model.fingerprint, facts.model.cpus, environment.build, environment.cpu, environment.machine,
             chosen.engine, chosen.speculation)  # fmt: skip
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()


def read_report(file: Path) -> WhyReport:
    """Read what `cpuchat why --json` printed. Raises UsageError."""
    try:
        return read_json(file, msgspec.json.Decoder(prepared(WhyReport)).decode)
    except (OSError, ValueError):
        raise UsageError(f"{shown(file)} is not a report of cpuchat why.", "Save one: cpuchat why --json.") from None


_FIGURE: Final = re.compile(r"(?<!\w)\d[\d.,]*")


def differences(old: WhyReport, new: WhyReport) -> list[tuple[str, str, str]]:
    """Return what differs: its name, and both values. Figures in proofs do not count, nor do insignificant worths."""
    first, second = old.environment, new.environment
    found = [("model", old.model, new.model), ("quantization", old.quantization, new.quantization)]
    for name in ("cpuchat", "kernel", "cpu", "machine", "build"):
        found.append((name, getattr(first, name), getattr(second, name)))
    before_by_name, after_by_name = ({row.name: row for row in one.settings} for one in (old, new))
    for name in dict.fromkeys((*before_by_name, *after_by_name)):
        before, after = before_by_name.get(name), after_by_name.get(name)
        if before is None or after is None:
            found.append((name, before.value if before else "not listed", after.value if after else "not listed"))
            continue
        if before.value != after.value:
            found.append((name, before.value, after.value))
        elif (before.state, _FIGURE.sub("", before.proof)) != (after.state, _FIGURE.sub("", after.proof)):
            found.append((f"{name}: proof", before.proof, after.proof))
        if before.worth and after.worth and before.worth.alternative == after.worth.alternative:
            found += _rate_differences(f"{name}: decode worth", before.worth.decode, after.worth.decode)
            found += _rate_differences(f"{name}: prefill worth", before.worth.prefill, after.worth.prefill)
    return [one for one in found if one[1] != one[2]]


def _rate_differences(name: str, old: SettingGain | None, new: SettingGain | None) -> list[tuple[str, str, str]]:
    """Return the worths where they differ by more than three standard errors."""
    if old is None or new is None or abs(new.gain - old.gain) <= 3 * math.hypot(old.error, new.error):
        return []
    return [(name, f"{100 * old.gain:+.1f} %", f"{100 * new.gain:+.1f} %")]
