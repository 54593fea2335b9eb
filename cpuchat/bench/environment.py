"""Records machine, engine and files of a benchmark, so that it can be repeated."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from cpuchat import __version__
from cpuchat.hardware.bandwidth.memory_modules import theoretical
from cpuchat.hardware.memory import total_bytes
from cpuchat.hardware.topology import read_topology
from cpuchat.model_info import EngineInfo
from cpuchat.models.fingerprint import file_fingerprint
from cpuchat.models.gguf.header import split_parts
from cpuchat.settings import Settings


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A model's file; `fingerprint` is the hash of a sample of its content (models.fingerprint), `size` in bytes."""

    path: str
    size: int
    fingerprint: str


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The reproducibility block. `load` is the load average of the minute before; `settings` are all that were in
    effect, without what cells vary."""

    date: str
    cpuchat: str
    python: str
    kernel: str
    cpu: str
    machine: str
    memory_bytes: int
    memory_modules: str
    engine: EngineInfo
    load: float
    files: tuple[ModelFile, ...] = ()
    settings: dict[str, Any] = {}

    @property
    def build(self) -> str:
        """Identify the engine's build."""
        return engine_build(self.engine)


def engine_build(engine: EngineInfo) -> str:
    """Identify an engine's build: version, commit and CPU features."""
    return f"{engine.version} {engine.llama_commit} {','.join(engine.features)}".strip()


def read_environment(engine: EngineInfo, models: Iterable[str], chosen: Settings) -> Environment:
    """Read what is known of this machine. Raises ModelNotFound for a model that cannot be read."""
    topology = read_topology()
    modules = theoretical(topology)
    tables = msgspec.to_builtins(chosen)
    return Environment(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpuchat=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        cpu=topology.cpu_name,
        machine=topology.name,
        memory_bytes=total_bytes(),
        memory_modules="" if modules is None else f"{modules.bytes_per_s / 1e9:.1f} GB/s, {modules.source}",
        engine=msgspec.structs.replace(engine, pid=0),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        files=tuple(_file(Path(path)) for path in dict.fromkeys(models) if path),
        settings={name: tables[name] for name in ("engine", "speculation")},
    )


def _file(path: Path) -> ModelFile:
    size = sum(part.stat().st_size for part in split_parts(path) or [path])
    return ModelFile(path=str(path), size=size, fingerprint=file_fingerprint(path))
