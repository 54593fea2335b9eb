"""A llama-server for draft heads: its options, by the files, the free memory and the cores, and the
process that hosts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.backend.base import place_here
from cpuchat.backend.process import ChildProcess, Launch, Spawned, Spawner
from cpuchat.hardware.memory import available_within
from cpuchat.hardware.placement.placement import Placement, PlacementSpec
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.fit import check_fit, choose_context, draft_memory, required_memory
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.heads import ENGINE, HeadKind, find_program, require_head, title
from cpuchat.protocol.messages import LoadOptions, Speculation
from cpuchat.protocol.model_info import ModelInfo

HOST = "127.0.0.1"
KEY_VARIABLE = "LLAMA_API_KEY"
"""Where llama-server looks for its API key; other users would see one on the command line."""

_DEPTHS = {"eagle3": 3, "mtp": 2, "dflash": 7, "dspark": 7}
"""Draft depth where the settings say adaptive. On a CPU each verified token costs compute; a DFlash head drafts a block
in one pass."""


class ServerDraftOptions(msgspec.Struct, frozen=True):
    """How a llama-server drafts from its start on: its requests cannot change that. `depth` 0: not at all."""

    depth: int = 0

    @classmethod
    def of(cls, wanted: Speculation, kind: HeadKind | None) -> ServerDraftOptions:
        if kind is None or "draft" not in wanted.drafters:
            return cls()
        return cls(wanted.depth or _DEPTHS[kind])


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a llama-server with one slot, for the process that hosts it.

    `program` is its path. `head` is the file of the draft head, "" for one that the model
    contains. `cpus` has one logical CPU for each thread. `cache_mib` limits the memory for the
    KV caches of other chats. `kind` is None without a head.

    Threads that wait do not spin (`options.poll` is for the worker): llama-server computes drafts on other threads, on
    the same cores.
    """

    program: str
    model: str
    head: str
    kind: HeadKind | None
    drafting: ServerDraftOptions
    port: int
    n_ctx: int
    cache_mib: int = 0
    cpus: tuple[int, ...]
    options: LoadOptions = LoadOptions()


def command(server: ServerOptions) -> list[str]:
    """Return the command line of a llama-server from PATH."""
    return [server.program, *(word for option in arguments(server).items() for word in option if word)]


def arguments(server: ServerOptions) -> dict[str, str]:
    """Return the options of a llama-server, with their values; "" for one that takes none."""
    options, drafting, threads = server.options, server.drafting, str(len(server.cpus))
    found = {
        "--model": server.model, "--host": HOST, "--port": str(server.port),
        "--ctx-size": str(server.n_ctx), "--parallel": "1", "--metrics": "", "--cache-ram": str(server.cache_mib),
        "--threads": threads, "--threads-batch": threads,
        "--cpu-mask": cpu_mask(server.cpus), "--cpu-strict": "1", "--poll": "0",
        "--batch-size": str(options.n_batch), "--ubatch-size": str(min(options.n_ubatch, options.n_batch)),
        "--cache-type-k": options.type_k, "--cache-type-v": options.type_v, "--flash-attn": options.flash_attn,
        "--device": "none",
    }  # fmt: skip
    if drafting.depth:
        found |= {"--spec-type": f"draft-{server.kind}", "--spec-draft-n-max": str(drafting.depth)}
        if server.head:
            found |= {"--spec-draft-model": server.head, "--spec-draft-device": "none"}
    if options.mlock or options.load_mode == "read":
        modes = {"mmap": options.load_mode == "mmap", "mlock": options.mlock}
        found["--load-mode"] = "+".join(name for name, is_on in modes.items() if is_on) or "none"
    if not options.use_repack:
        found["--no-repack"] = ""
    return found


def cpu_mask(cpus: Sequence[int]) -> str:
    """Return the CPUs as llama.cpp's hexadecimal mask: `b` for 0, 1 and 3."""
    return f"{sum(1 << cpu for cpu in set(cpus)):x}"


MODULE = "cpuchat.backend.heads.host"
_LAST_WORDS = re.compile(
    r'^(?:error: |error while handling argument "[^"]*": |\S+\.(?:cpp|c|h):\d+: )(.+)$', re.MULTILINE
)  # fmt: skip
"""What it says last: about its arguments, or as ggml's GGML_ABORT does."""
_POLL_SECONDS = 0.05
_ENDING_SECONDS = 5.0


class LlamaServerProcess(ChildProcess):
    """A running host, as `start` makes one; `pid` is None until it has reported it. `key` is what its server wants."""

    title = "llama-server"

    def __init__(self, spawned: Spawned, port: int, key: str) -> None:
        super().__init__(spawned)
        self.pid, self.key = None, key
        self._port, self.url = port, f"http://{HOST}:{port}"
        threading.Thread(target=self._watch, name=f"llama-server-{self._process.pid}", daemon=True).start()

    @classmethod
    async def start(cls, spawner: Spawner, log_dir: Path, server: ServerOptions, memory: str) -> LlamaServerProcess:
        """Start a host under the memory policy `memory`, in words. Raises OSError."""
        key, text = secrets.token_urlsafe(24), msgspec.json.encode(server).decode()
        more = {KEY_VARIABLE: key, "GGML_NO_BACKTRACE": "1"}  # which would wait for a debugger
        spawning = spawner.spawn(log_dir, lambda: Launch(memory), (MODULE, text), **more)
        return cls(await asyncio.wrap_future(spawning), server.port, key)

    def _watch(self) -> None:
        """Read the PID, then wait for the end. Runs on a separate thread."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            self.pid = int(self._process.stdout.readline())
        self._reap()

    async def listening(self) -> bool:
        """Wait until the server accepts connections; False when it ended instead. It may be loading its model still."""
        while self.alive:
            try:
                _, writer = await asyncio.open_connection(HOST, self._port)
            except OSError:
                await self.is_gone_within(_POLL_SECONDS)
                continue
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return True
        return False

    async def close(self) -> None:
        """Let the server exit; kill it if it takes longer than a few seconds."""
        self._close_stdin()
        if not await self.is_gone_within(_ENDING_SECONDS):
            self.kill()
            await self.is_gone_within(_ENDING_SECONDS)

    def _last_words(self, tail: str) -> str:
        return next(iter(_LAST_WORDS.findall(tail)), "").rstrip(".")


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


_MAX_CACHE_MIB = 8192  # llama-server's own limit


class ServerPlan(msgspec.Struct, frozen=True):
    """What a load needs to know of the files and of the machine. `head` is None for one that the model contains."""

    path: Path
    placement: Placement
    header: GGUFHeader
    head: GGUFHeader | None
    server: ServerOptions
    fingerprint: str

    @classmethod
    def of(cls, path: Path, options: LoadOptions, spec: PlacementSpec) -> ServerPlan:
        """Read the files and choose the cores. Blocks.

        Raises:
            EngineMissing: there is no llama-server.
            DraftMismatch: the head does not fit the model.
            DoesNotFit: both do not fit into memory.
            ModelNotFound, ModelDamaged, ModelUnsupported: a file cannot be read.
            UsageError: a placement that this machine does not allow.
        """
        draft = Path(options.draft_path) if options.draft_path else None
        kind = require_head(path, draft) if draft is not None else None
        program, placement, header = find_program(), place_here(spec, with_draft=False), read_model(path)
        head = read_model(draft) if draft is not None and kind is not None and draft != path else None
        available = available_within(placement.memory_policy.bound)
        options = msgspec.structs.replace(options, kernels="llama.cpp")  # llama-server has no others
        n_ctx, spare = _fit(header, head, options, available)
        server = ServerOptions(
            program=program,
            model=str(header.path.absolute()),
            head=str(head.path.absolute()) if head is not None else "",
            kind=kind,
            drafting=ServerDraftOptions.of(options.speculation, kind),
            port=free_port(),
            n_ctx=n_ctx,
            cache_mib=min(spare // 4 >> 20, _MAX_CACHE_MIB),
            cpus=placement.cpus,
            options=options,
        )
        return cls(path, placement, header, head, server, file_fingerprint(path))

    def described(self, model: ModelInfo) -> ModelInfo:
        """Return the model that the server describes as one of this machine."""
        placement, head, kind = self.placement, self.head, self.server.kind
        named = title(kind) if kind is not None else ""
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
            unreported=(),
        )

    def _notes(self, head: str) -> list[str]:
        drafts = f", which drafts with its {head}" if head else ""
        return [f"Answered by {ENGINE}{drafts}."]


def _fit(header: GGUFHeader, head: GGUFHeader | None, options: LoadOptions, available: int) -> tuple[int, int]:
    """Return the context, and the bytes that are left beside the rest. Raises DoesNotFit."""
    n_ctx = choose_context(header, options, available)
    beside = draft_memory(head, options, n_ctx) if head is not None else None
    if beside is not None:
        n_ctx = choose_context(header, options, available - beside.min_bytes)
    need = required_memory(header, options, n_ctx)
    check_fit(need, available, header, options, beside)
    return n_ctx, available - need.min_bytes - (beside.min_bytes if beside is not None else 0)
