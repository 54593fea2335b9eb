"""Options that are settings too and reach the worker as they are: of a load, and of drafting.

Each is declared here once, with its type, bounds, default and words. The section of config.toml (`config.settings`) and
the message to the worker (`protocol.messages`) inherit it, and the settings form and the command line follow from the
section. A field whose name in config.toml is another one has that as its encoded name.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from cpuchat.base.setting import Setting

FlashAttention = Literal["auto", "on", "off"]
LoadMode = Literal["mmap", "read"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
Kernels = Literal["auto", "llama.cpp"]
UNQUANTIZED: Final[tuple[CacheType, ...]] = ("f32", "f16", "bf16")
"""Types that a V cache may have without flash attention."""
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
_Tokens = Annotated[int, Meta(ge=1, le=65_536)]
MIN_CTX: Final = 256
"""Tokens of the smallest context: llama.cpp makes them in steps of this size."""


class EngineOptions(msgspec.Struct, kw_only=True):
    """How the engine loads a model. 0 means "automatic"."""

    n_ctx: Annotated[
        int,
        Meta(ge=0, le=16_777_216),
        Setting("Context", "tokens; 0 = auto", is_basic=True, is_option=True, option="--ctx"),
    ] = msgspec.field(default=0, name="ctx")
    n_batch: Annotated[_Tokens, Setting("Batch size", "prompt tokens per decode call", is_option=True)] = msgspec.field(
        default=512, name="batch"
    )
    n_ubatch: Annotated[_Tokens, Setting(about="prompt tokens per graph, at most the batch size")] = msgspec.field(
        default=512, name="ubatch"
    )
    flash_attn: Annotated[
        FlashAttention, Setting("Flash attention", "less memory traffic at long context", is_option=True)
    ] = "auto"
    type_k: Annotated[
        CacheType, Setting("KV cache type, K", "q8_0 halves it; prefill at 4k is under half as fast", is_option=True)
    ] = msgspec.field(default="f16", name="cache_type_k")
    type_v: Annotated[CacheType, Setting("KV cache type, V", "below f16 it needs flash attention", is_option=True)] = (
        msgspec.field(default="f16", name="cache_type_v")
    )
    load_mode: Annotated[
        LoadMode, Setting("Load mode", "mmap starts at once; read copies the file into memory", is_option=True)
    ] = "mmap"
    mlock: Annotated[bool, Setting("Lock memory", "keep the weights from being swapped out", is_option=True)] = False
    use_repack: Annotated[bool, Setting("Repack weights", "faster kernels, but a second copy in memory")] = (
        msgspec.field(default=True, name="repack")
    )
    kernels: Annotated[
        Kernels, Setting("Kernels", "auto = cpuchat's where they are measured to be faster", is_option=True)
    ] = "auto"
    poll: Annotated[int, Meta(ge=0, le=100), Setting(about="how hard idle threads spin before they sleep")] = 50
    prefill_share: Annotated[
        float,
        Meta(ge=0.1, le=1.0),
        Setting(about="share of the time for reading a prompt while other answers are written; the rest is theirs"),
    ] = 0.35
    cpu_module: Annotated[
        str,
        Meta(pattern=r"^[a-z0-9_.]{1,40}$", description="auto or the name of a module such as haswell"),
        Setting(
            "CPU module",
            "only for an engine from a wheel; auto = the engine's choice, or what tune found",
            is_option=True,
            metavar="NAME",
        ),
    ] = "auto"


class DraftOptions(msgspec.Struct, kw_only=True):
    """How the drafters of an answer draft."""

    depth: Annotated[
        int,
        Meta(ge=0, le=31),
        Setting("Draft depth", "tokens drafted per pass; 0 = adaptive", is_option=True, option="--draft-depth"),
    ] = 0
