"""Describes the machine for an empty chat: one line of facts, and a recommended model."""

from __future__ import annotations

from dataclasses import dataclass

from cpuchat.model_info import ModelInfo
from cpuchat.running_servers import running_servers
from cpuchat.settings import Settings
from cpuchat.telemetry import units


@dataclass(frozen=True)
class Welcome:
    """`machine`: `8 cores · 51 GB/s · a 4B model runs at about 13 tok/s here`. `model`: name, size and speed (where
    known) of the recommended model, "" where none is."""

    machine: str = ""
    model: str = ""


def welcome(settings: Settings, loaded: ModelInfo | None) -> Welcome:
    """Read the topology, the measured bandwidth and the catalog: tens of milliseconds, in a thread."""
    from cpuchat.hardware.topology import read_topology
    from cpuchat.models.catalog import load_catalog
    from cpuchat.models.machine import this_machine
    from cpuchat.models.shortlist import estimates, ranked
    from cpuchat.present import typical

    machine = this_machine(settings, loaded=loaded)
    parts = [units.plural(len(read_topology().allowed_cores), "core")]
    if machine.peak:
        speed = typical.FOUR_BILLION.on(machine).tok_s
        parts.append(f"{units.bandwidth(machine.peak)} GB/s")
        parts += [f"a 4B model runs at about {units.about(speed)} tok/s here"] if speed else []
    else:
        parts.append("F12 measures the read bandwidth")
    models = load_catalog().models
    predictions = estimates(models, machine)
    best = next(iter(ranked(models, predictions).suits), None)
    if best is None:
        return Welcome(" · ".join(parts))
    tok_s = predictions[best.id].tok_s
    about = [best.name, f"{best.quantization} {units.size(best.size)}"]
    about += [f"≈{units.about(tok_s)} tok/s"] if tok_s else []
    return Welcome(" · ".join(parts), " · ".join(about))


def serving() -> str:
    """Return `Serving qwen-1.5b on http://127.0.0.1:8080/v1`, all servers of this user; "" without one. Reads files."""
    found = " · ".join(f"{one.model} on {one.url}/v1" for one in running_servers())
    return f"Serving {found}" if found else ""
