"""How a llama-server is started for a model and its draft head, as a command line and as data for the process that does
it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import msgspec

from cpuchat.errors import HeadEngineMissing
from cpuchat.protocol import LoadOptions

WHEEL = "xllamacpp"
PROGRAM = "llama-server"
HOST = "127.0.0.1"
KEY_VARIABLE = "LLAMA_API_KEY"
"""Where llama-server looks for its API key; other users would see one on the command line."""

DEPTHS = {"eagle3": 3, "mtp": 2, "dflash": 7, "dspark": 7}
"""Tokens of a draft. On a CPU each verified token costs compute; a DFlash head drafts a block in one pass."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a llama-server with one slot, for the process that hosts it.

    `program` is its path; "" for the one in the wheel. `head` is the file of the draft head, "" for one that the model
    contains. `cpus` has one logical CPU for each thread.
    """

    program: str
    model: str
    head: str
    kind: Literal["eagle3", "mtp", "dflash", "dspark"]
    port: int
    n_ctx: int
    cpus: tuple[int, ...]
    options: LoadOptions = LoadOptions()

    @property
    def depth(self) -> int:
        return DEPTHS[self.kind]


def find_program() -> str:
    """Return the path of the llama-server to start; "" for the one in the wheel.

    Raises:
        HeadEngineMissing: there is neither.
    """
    program = shutil.which(PROGRAM)
    if program is not None:
        return program
    if find_spec(WHEEL) is not None:
        return ""
    raise HeadEngineMissing(
        "Draft heads need a llama-server, and there is none on PATH.",
        "Install llama.cpp, or its wheel: pip install 'cpuchat[heads]'.",
    )


def command(server: ServerOptions) -> list[str]:
    """Return the command line of a llama-server from PATH."""
    options, threads = server.options, str(len(server.cpus))
    found = [
        server.program, "--model", server.model, "--host", HOST, "--port", str(server.port),
        "--ctx-size", str(server.n_ctx), "--parallel", "1", "--metrics", "--device", "none",
        "--threads", threads, "--threads-batch", threads,
        "--cpu-mask", cpu_mask(server.cpus), "--cpu-strict", "1", "--poll", str(options.poll),
        "--batch-size", str(options.n_batch), "--ubatch-size", str(min(options.n_ubatch, options.n_batch)),
        "--cache-type-k", options.type_k, "--cache-type-v", options.type_v, "--flash-attn", options.flash_attn,
        "--spec-type", f"draft-{server.kind}", "--spec-draft-n-max", str(server.depth),
    ]  # fmt: skip
    if server.head:
        found += ["--spec-draft-model", server.head]
    if options.mlock or options.load_mode == "read":
        found += ["--load-mode", "mlock" if options.mlock else "none"]
    if not options.use_repack:
        found.append("--no-repack")
    return found


def cpu_mask(cpus: Sequence[int]) -> str:
    """Return the CPUs as llama.cpp's hexadecimal mask: `b` for 0, 1 and 3."""
    return f"{sum(1 << cpu for cpu in set(cpus)):x}"
