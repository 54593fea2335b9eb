"""Chats in words: rows of a list, a chat as Markdown, and the machine as an empty chat shows it."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base.text import clean, clean_line
from cpuchat.chats.history import fenced
from cpuchat.chats.records import Attachment, Chat
from cpuchat.chats.transfer import Imported, PortableChat, encoded
from cpuchat.config.servers import Source
from cpuchat.config.settings import Settings
from cpuchat.present.answers import summary
from cpuchat.protocol.messages import ToolStep
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.units import plural

if TYPE_CHECKING:
    from cpuchat.models.catalog import CatalogModel
    from cpuchat.models.library.library import Library
    from cpuchat.models.library.places import LocalModel

SHORT_ID = 8
"""Characters of a chat's id that are shown."""
HEADINGS = ("ID", "UPDATED", "MESSAGES", "MODEL", "TITLE")


def when(seconds: float) -> str:
    """Format a time since the epoch as local time: `2026-11-23 02:36`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def row(chat: Chat, n_messages: int) -> tuple[str, ...]:
    """Return the cells of a chat under `HEADINGS`."""
    model = "comparison" if chat.sides else chat.model
    return chat.id[:SHORT_ID], when(chat.updated), f"{n_messages:,}", model, chat.title or "New chat"


def document(chats: Sequence[PortableChat], file: Path) -> bytes:
    """Return what to write to `file`: Markdown if its name ends in .md, else the JSON of an export."""
    if file.suffix.lower() in (".md", ".markdown"):
        return "\n".join(map(markdown, chats)).encode()
    return encoded(chats)


def markdown(chat: PortableChat) -> str:
    """Return the open branch as a document: figures under answers, reasoning quoted and attachments folded before."""
    messages = chat.branch
    facts = [clean_line(chat.model), when(chat.updated), plural(len(messages), "message")]
    parts = [f"# {clean_line(chat.title) or 'New chat'}", f"*{' · '.join(filter(None, facts))}*"]
    if system_prompt := clean(chat.system_prompt).strip():
        parts += ["## System prompt", system_prompt]
    tree = chat.tree
    for message in messages:
        siblings = tree.siblings(message.id)
        system = "Summary" if message.model else "System"
        speaker = {"user": "You", "system": system}.get(message.role) or clean_line(message.model) or "Answer"
        place = f" ({siblings.index(message.id) + 1} of {len(siblings)})" if len(siblings) > 1 else ""
        reasoning = clean(message.reasoning).strip()
        used = message.settings
        defaults = used and used.default_sampling
        note = summary(message.timings, message.stop_reason or "", used and used.sampling, defaults)
        shown = [
            f"## {speaker}{place}",
            "\n".join(f"> {line}".rstrip() for line in reasoning.splitlines()),
            *map(_attachment, message.attachments),
            *(part for step in message.steps for part in _step(step)),
            clean(message.content).strip("\n"),
            f"*{clean_line(note)}*" if note else "",
        ]
        parts += filter(None, shown)
    return "\n\n".join(parts) + "\n"


def _attachment(attachment: Attachment) -> str:
    title = html.escape(clean_line(attachment.title), quote=False)
    return f"<details><summary>{title}</summary>\n\n{fenced(clean(attachment.text))}\n\n</details>"


def _step(step: ToolStep) -> list[str]:
    parts = [clean(step.said).strip("\n")]
    for call, result in zip(step.calls, step.results, strict=False):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        text = f"{arguments}\n\n{result.text}"
        parts.append(_attachment(Attachment(title=f"{call.name}{' (failed)' if result.failed else ''}", text=text)))
    return parts


def imported(done: Imported) -> str:
    """Format `12 chats added, 3 already here, 1 without messages.`"""
    parts = [f"{plural(len(done.added), 'chat')} added"]
    parts += [f"{done.known:,} already here"] if done.known else []
    parts += [f"{done.empty:,} without messages"] if done.empty else []
    return ", ".join(parts) + "."


_BYTES_OF_4B = round(4e9 * 4.85 / 8)
"""Size of a file with 4 billion parameters in Q4_K_M."""


_TOLD_RATE = 100e6
"""Bits per second for which the time of a download is told: none was measured before the first one."""


@dataclass(frozen=True)
class Offer:
    """What Enter does in an empty chat with the demo: it opens `path`, a model of the user, or downloads `model`."""

    title: str
    details: str = ""
    path: Path | None = None
    model: CatalogModel | None = None


@dataclass(frozen=True)
class Welcome:
    """`machine`: `8 cores · 51 GB/s · a 4B model: ≈13 tok/s`; `offer`: None as long as it is not read."""

    machine: str = ""
    offer: Offer | None = None


def welcome(settings: Settings, loaded: ModelInfo | None, library: Library, failed: Collection[Source] = ()) -> Welcome:
    """Read the topology, the measured bandwidth, the models of the library and the catalog: call it in a thread. Models
    that have `failed` to load are not offered."""
    from cpuchat.hardware.topology import read_topology
    from cpuchat.models.catalog import best_local, estimates, load_catalog, ranked
    from cpuchat.models.hub.errors import is_offline
    from cpuchat.models.library.places import grouped
    from cpuchat.models.machine import this_machine
    from cpuchat.models.prediction import estimate, estimate_local

    machine = this_machine(settings, loaded=loaded)
    parts = [units.plural(len(read_topology().allowed_cores), "core")]
    if machine.peak:
        about = "≈" if machine.estimated else "at least " if machine.at_least else ""
        parts.append(f"{about}{units.bandwidth(machine.peak)} GB/s")
        usual = estimate(_BYTES_OF_4B, machine, quantization="Q4_K_M", params=4e9)
        parts += [f"a 4B model: ≈{units.about(usual.tok_s)} tok/s"] if usual.tok_s else []
    models = [one for one in library.local_models() if one.size and one.path not in failed]
    here = [(one, estimate_local(one, machine)) for one in models]
    if (best := best_local(here)) is not None:
        groups = grouped(one for one, _ in here)
        offer = _opens(best, groups, dict(here)[best].tok_s)
    elif is_offline():
        offer = Offer("Copy a .gguf file to ~/models, then press Ctrl+N", "offline mode · cpuchat docs offline")
    else:
        catalog = load_catalog().on(machine).models
        predictions = estimates(catalog, machine)
        suits = ranked(catalog, predictions).suits
        none = Offer("No model of the catalog suits this machine", "Ctrl+O lists all, and searches Hugging Face")
        offer = _downloads(suits[0], predictions[suits[0].id].tok_s) if suits else none
    return Welcome(" · ".join(parts), offer)


def _opens(model: LocalModel, groups: Sequence[Sequence[LocalModel]], tok_s: float | None) -> Offer:
    """`Open qwen2.5-coder:7b` and `Q4_K_M 4.7 GB · ≈3.7 tok/s · Ctrl+O: 2 more`."""
    from cpuchat.models.library.places import shown_name

    yours = [group for group in groups if group[0].source != "demo" and not group[0].damaged]
    name = next(shown_name(list(group)) for group in yours if model in group)
    speed = units.rate(model.measured_tok_s) if model.measured_tok_s else f"≈{units.about(tok_s)}" if tok_s else ""
    details = [f"{model.quantization} {units.size(model.size)}", f"{speed} tok/s" if speed else ""]
    if (files := sum(map(len, yours))) > 1:
        details.append(f"Ctrl+O: {units.plural(files - 1, 'more file')}")
    return Offer(f"Open {clean_line(name)}", " · ".join(filter(None, details)), model.path)


def _downloads(model: CatalogModel, tok_s: float | None) -> Offer:
    """`Download Gemma 4 E2B` and `Q4_K_M 3.1 GB, 4 min at 100 Mbit/s · ≈10 tok/s`."""
    takes = units.time_left(8 * model.size / _TOLD_RATE).removesuffix(" left")
    details = [f"{model.quantization} {units.size(model.size)}, {takes} at {_TOLD_RATE / 1e6:.0f} Mbit/s"]
    details += [f"≈{units.about(tok_s)} tok/s"] if tok_s else []
    return Offer(f"Download {model.name}", " · ".join(details), model=model)
