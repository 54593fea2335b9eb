"""How a llama-server is started for a model and its draft head, as a command line and as data for the process that does
it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cpuchat.models.heads import HeadKind
from cpuchat.protocol import LoadOptions, Speculation

HOST = "127.0.0.1"
KEY_VARIABLE = "LLAMA_API_KEY"
"""Where llama-server looks for its API key; other users would see one on the command line."""

_DEPTHS = {"eagle3": 3, "mtp": 2, "dflash": 7, "dspark": 7}
"""Draft depth where the settings say adaptive. On a CPU each verified token costs compute; a DFlash head drafts a block
in one pass."""


class Drafting(msgspec.Struct, frozen=True):
    """How a llama-server drafts from its start on: its requests cannot change that. `depth` 0: not at all."""

    depth: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, wanted: Speculation, kind: HeadKind | None) -> Drafting:
        if kind is None or "draft" not in wanted.drafters:
            return cls()
        return cls(wanted.depth or _DEPTHS[kind], wanted.min_probability)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a llama-server with one slot, for the process that hosts it.

    `program` is its path; "" for the one in the wheel. `head` is the file of the draft head, "" for one that the model
    contains. `cpus` has one logical CPU for each thread. `cache_mib` limits the memory for the
    KV caches of other chats. `kind` is None without a head. The RPC workers of the options hold `rpc_layers` layers.

    Threads that wait do not spin (`options.poll` is for the worker): llama-server computes drafts on other threads, on
    the same cores.
    """

    program: str
    model: str
    head: str
    kind: HeadKind | None
    drafting: Drafting
    rpc_layers: int = 0
    port: int
    n_ctx: int
    cache_mib: int = 0
    cpus: tuple[int, ...]
    options: LoadOptions = LoadOptions()


def command(server: ServerOptions) -> list[str]:
    """Return the command line of a llama-server from PATH."""
    options, threads = server.options, str(len(server.cpus))
    found = [
        server.program, "--model", server.model, "--host", HOST, "--port", str(server.port),
        "--ctx-size", str(server.n_ctx), "--parallel", "1", "--metrics",
        "--cache-ram", str(server.cache_mib),
        "--threads", threads, "--threads-batch", threads,
        "--cpu-mask", cpu_mask(server.cpus), "--cpu-strict", "1", "--poll", "0",
        "--batch-size", str(options.n_batch), "--ubatch-size", str(min(options.n_ubatch, options.n_batch)),
        "--cache-type-k", options.type_k, "--cache-type-v", options.type_v, "--flash-attn", options.flash_attn,
    ]  # fmt: skip
    found += _devices(server)
    drafting = server.drafting
    if drafting.depth:
        found += ["--spec-type", f"draft-{server.kind}", "--spec-draft-n-max", str(drafting.depth)]
        found += ["--spec-draft-p-min", str(drafting.min_p)]
        if server.head:
            found += ["--spec-draft-model", server.head, "--spec-draft-device", "none"]
    if options.mlock or options.load_mode == "read":
        modes = ["mmap"] if options.load_mode == "mmap" else []
        found += ["--load-mode", "+".join([*modes, *(["mlock"] if options.mlock else [])]) or "none"]
    if options.from_disk or not options.use_repack:
        found.append("--no-repack")
    return found


def _devices(server: ServerOptions) -> list[str]:
    """Return who computes besides the CPU here: the RPC workers, in their order, the last layers.

    Embedding and output stay here, so that a worker gets and sends hidden states only, no logits.
    """
    workers = server.options.rpc
    if not workers or not server.rpc_layers:
        return ["--device", "none"]
    names = ",".join(f"RPC{number}" for number in range(len(workers)))
    return [
        "--rpc", ",".join(workers), "--device", names, "--fit", "off",
        "--n-gpu-layers", str(server.rpc_layers + 1),  # llama.cpp counts the output as one
        "--override-tensor", "^output=CPU,^token_embd=CPU",
    ]  # fmt: skip


def cpu_mask(cpus: Sequence[int]) -> str:
    """Return the CPUs as llama.cpp's hexadecimal mask: `b` for 0, 1 and 3."""
    return f"{sum(1 << cpu for cpu in set(cpus)):x}"
