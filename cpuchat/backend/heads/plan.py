"""What a llama-server for draft heads or RPC workers is started with: by the files, the free memory and the cores."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from cpuchat.backend.heads.options import Drafting, ServerOptions
from cpuchat.backend.heads.process import free_port
from cpuchat.backend.placing import place_here
from cpuchat.errors import DoesNotFit, EngineMissing
from cpuchat.hardware.disk import read_rate
from cpuchat.hardware.memory import available_bytes
from cpuchat.hardware.placement.placement import Placement, PlacementSpec
from cpuchat.model_info import ModelInfo
from cpuchat.models.fingerprint import file_fingerprint
from cpuchat.models.fit import check_fit, choose_context, draft_memory, layers_elsewhere, required_memory
from cpuchat.models.from_disk import slowness, where_needed
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.heads import ENGINE, HeadKind, find_program, require_head, title
from cpuchat.protocol import LoadOptions
from cpuchat.telemetry import units
from cpuchat.telemetry.units import gigabytes

_MOST_CACHE_MIB = 8192  # llama-server's own limit


class ServerPlan(msgspec.Struct, frozen=True):
    """What a load needs to know of the files and of the machine. `head` is None for one that the model contains, `slow`
    is the note about weights that stay on disk.
    """

    path: Path
    options: LoadOptions
    placement: Placement
    kind: HeadKind | None
    header: GGUFHeader
    head: GGUFHeader | None
    server: ServerOptions
    fingerprint: str
    slow: str = ""

    @classmethod
    def of(cls, path: Path, options: LoadOptions, spec: PlacementSpec) -> ServerPlan:
        """Read the files and choose the cores. Blocks.

        Raises:
            EngineMissing: there is no llama-server, or none for RPC workers.
            DraftMismatch: the head does not fit the model.
            DoesNotFit: both do not fit into memory.
            ModelNotFound, ModelDamaged, ModelUnsupported: a file cannot be read.
            UsageError: a placement that this machine does not allow.
        """
        draft = Path(options.draft_path) if options.draft_path else None
        kind = require_head(path, draft) if draft is not None else None
        program, placement, header = find_program(), place_here(spec, with_draft=False), read_model(path)
        head = read_model(draft) if draft is not None and kind is not None and draft != path else None
        options, slow = where_needed(header, options, available_bytes()), ""
        n_ctx, layers, spare = _fit(header, head, options)
        if layers and not program:
            raise EngineMissing(
                "RPC workers need a llama-server on PATH; the one in the wheel has no RPC.",
                "Build llama.cpp with `cmake -DGGML_RPC=ON`, and put its bin folder on PATH.",
            )
        server = ServerOptions(
            program=program,
            model=str(header.path.absolute()),
            head=str(head.path.absolute()) if head is not None else "",
            kind=kind,
            drafting=Drafting.of(options.speculation, kind),
            port=free_port(),
            n_ctx=n_ctx,
            rpc_layers=layers,
            cache_mib=0 if layers else min(spare // 4 >> 20, _MOST_CACHE_MIB),  # it would fetch the workers' KV caches
            cpus=placement.cpus,
            options=options,
        )
        if options.from_disk:
            need = required_memory(header, options, n_ctx)
            slow = slowness(header, need, available_bytes(), read_rate(header.path), options.n_experts)
        return cls(path, options, placement, kind, header, head, server, file_fingerprint(path), slow)

    def described(self, model: ModelInfo) -> ModelInfo:
        """Return the model that the server describes as one of this machine."""
        placement, head = self.placement, self.head
        named = title(self.kind) if self.kind is not None else ""
        return msgspec.structs.replace(
            model,
            path=str(self.path),
            name=self.header.name,
            architecture=self.header.architecture,
            quantization=self.header.quantization,
            size=self.header.file_size,
            n_layer=self.header.n_layer,
            has_template=bool(self.header.chat_template),
            n_threads=len(placement.cpus),
            cpus=placement.cpus,
            fingerprint=self.fingerprint,
            draft=head.path.stem if head is not None else named,
            draft_quantization=head.quantization if head is not None else "",
            notes=(*placement.notes, *self._notes(named), *model.notes),
            server="",
            engine=ENGINE,
            rpc_layers=self.server.rpc_layers,
            no_speculation="" if self.kind is not None else "off: with RPC workers, only draft heads are used",
            unreported=(),
        )

    def _notes(self, head: str) -> list[str]:
        """Return who answers, and what of the options has no effect."""
        options, layers = self.options, self.server.rpc_layers
        drafts = f", which drafts with its {head}" if head else ""
        notes = [f"Answered by {ENGINE}{drafts}."]
        if options.draft_path and not head:
            notes.append(f"{Path(options.draft_path).name} is not used: with RPC workers, only draft heads are.")
        if self.slow:
            notes.append(self.slow)
        if layers:
            notes.append(f"{units.plural(layers, 'layer')} of {self.header.n_layer} on {', '.join(options.rpc)}.")
        return notes


def _fit(header: GGUFHeader, head: GGUFHeader | None, options: LoadOptions) -> tuple[int, int, int]:
    """Return the context, how many layers the RPC workers hold, and the bytes that are left here beside the rest.

    Raises:
        DoesNotFit: all of it, or what stays here, does not fit.
    """
    available = available_bytes()
    n_ctx = choose_context(header, options, sys.maxsize if options.rpc else available)
    beside = draft_memory(head, options, n_ctx) if head is not None else None
    if beside is not None and not options.rpc:
        n_ctx = choose_context(header, options, available - beside.least)
    need = required_memory(header, options, n_ctx)
    taken = need.least + (beside.least if beside is not None else 0)
    if not options.rpc:
        check_fit(need, available, header, options, beside)
        return n_ctx, 0, available - taken
    layers, elsewhere = layers_elsewhere(header, options, n_ctx, taken - available)
    if taken - elsewhere > available:
        raise DoesNotFit(
            f"Not enough memory: {gigabytes(taken - elsewhere)} GB stay here with {layers} layers on the RPC workers, "
            f"and {gigabytes(available)} GB are available.",
            "Give the workers more layers (--rpc-layers), or use a smaller --ctx.",
        )
    return n_ctx, layers, available - taken + elsewhere
