"""What a measured speed depends on: machine, cores, memory policy, build of the engine, files and options."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from cpuchat.protocol.options import EngineOptions

_NOT_OF_DECODING: Final = ("n_ctx", "n_batch", "n_ubatch", "mlock")
"""Options of the engine that do not change how fast this machine decodes."""


class MeasuredOn(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a measurement.

    `machine` names its CPU, memory and NUMA nodes, `memory_policy` is one in the words of `mempolicy`, `build`
    identifies the engine's, `files` are fingerprints of models, `options` whatever else matters, by name.
    """

    machine: str = ""
    cpus: tuple[int, ...] = ()
    memory_policy: str = ""
    build: str = ""
    files: tuple[str, ...] = ()
    options: dict[str, Any] = {}

    def key(self) -> str:
        """Return the key of a cache: 32 hex digits."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()


def decode_options(options: EngineOptions) -> dict[str, Any]:
    """Return the options that change how fast a machine decodes, poll and load mode among them."""
    return {name: getattr(options, name) for name in EngineOptions.__struct_fields__ if name not in _NOT_OF_DECODING}
