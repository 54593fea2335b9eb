"""What the installed engine cannot run, and what it runs on this CPU without vector instructions.

Everything is told from a header, before a download or a load, by processes that never load llama.cpp. The architectures
are those whose names the engine's library contains (LLM_ARCH_NAMES in llama-arch.cpp); the types without a vectorized
dot product are those of arch-fallback.h and of the last branches in arch/x86/quants.c (ggml 0.25.3).
"""

from __future__ import annotations

import platform
import re
import tomllib
from collections import Counter
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Final

from cpuchat.base.errors import CpuchatError, ModelDamaged, ModelUnsupported
from cpuchat.base.text import clean_line
from cpuchat.hardware.topology import Instructions
from cpuchat.models.engine_version import DAMAGED
from cpuchat.models.file_names import engine_knows
from cpuchat.models.gguf.header import GGUFHeader, vocabulary
from cpuchat.models.gguf.parse import BY_NAME
from cpuchat.models.ollama import file_name
from cpuchat.protocol.model_info import ModelWork

_ROTATED: Final = "prism.hadamard."
"""Keys of models whose activations have to be rotated before each product (Bonsai 2). llama.cpp ignores the keys."""
_RANK = 4  # LLAMA_POOLING_TYPE_RANK
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_VISION = ("v.", "mm.", "vision", "model.vision", "mmproj.", "resampler.")
_PRE = ("viking", "smaug-bpe", "poro-chat")
"""Pre-tokenizers: where a compiler made their names unfindable, nothing is said of others."""
_OTHER_MODEL: Final = "Choose another model, or run this one on a server that supports it (--server URL)."
_OTHER_FILE: Final = (
    "It was made for another program or version: choose another publisher's file (`cpuchat models search`)."
)
_X86 = ("x86_64", "amd64", "i686", "i386")
_SHARE = 0.1  # of the weights that a pass reads, from which their type decides


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("unsupported.toml").read_text(encoding="utf-8"))


def why_unsupported(header: GGUFHeader) -> str:
    """Return why the engine cannot run the model of `header`, or cannot chat with it, as a clause; "" when nothing is
    known against it."""
    return _refusal(header)[0]


def _refusal(header: GGUFHeader) -> tuple[str, str]:
    """Return why, and what to do about it; "" for both when nothing is known against the model."""
    if header.other:
        return "", ""
    if why := _why_not_the_model(header):
        return why, _OTHER_MODEL
    if why := _why_not_the_file(header):
        return why, _OTHER_FILE
    pre = header.text("tokenizer.ggml.pre")
    if vocabulary(header).kind == "BPE" and pre and not engine_knows(pre) and all(map(engine_knows, _PRE)):
        why = f"it needs a newer engine: this llama.cpp does not know the pre-tokenizer {clean_line(pre)[:40]!r}"
        return why, _OTHER_MODEL
    return "", ""


def _why_not_the_model(header: GGUFHeader) -> str:
    """Return why no file of this model would run, or chat."""
    if any(key.startswith(_ROTATED) for key in header.metadata):
        return "it would print garbage: its weights are rotated (Bonsai 2), which this llama.cpp does not undo"
    if why := why_unknown(header.architecture):
        return why
    if vocabulary(header).kind == "none":
        return "it has no tokenizer: it reads and writes token IDs, not text"
    if header.number("pooling_type") == _RANK or any(t.name.startswith("cls.") for t in header.tensors):
        return "it is a reranker or a classifier, which rates texts and writes none"
    if header.number("pooling_type"):
        return "it is an embedding model, which turns texts into numbers and writes none"
    return "it is an encoder: it reads in both directions" if header.value("attention.causal") is False else ""


def why_unknown(architecture: str) -> str:
    """Return why the engine cannot chat with this architecture, as a clause; "" when it can."""
    for why, names in _table()["architectures"].items():
        if architecture in names:
            return why
    if engine_knows(architecture):
        return ""
    return f"it needs a newer engine: this llama.cpp does not know the architecture {clean_line(architecture)[:40]!r}"


def _why_not_the_file(header: GGUFHeader) -> str:
    """Return what this llama.cpp does not know of a file, which another publisher may have made as it needs it."""
    names = {_NUMBER.sub("%d", tensor.name): tensor.name for tensor in header.tensors}
    unknown = [one for name, one in names.items() if not (engine_knows(name) or engine_knows(name.rpartition(".")[0]))]
    if any(name.startswith(_VISION) for name in unknown):
        return "it has the vision part inside, as Ollama's own format has; llama.cpp needs that in a file beside it"
    for key in ("block_count", "context_length", "embedding_length") if "blk.%d.attn_norm.weight" in names else ():
        if header.value(key) is None:
            return f"its header lacks {clean_line(header.architecture)}.{key}, which its architecture needs"
    if unknown:
        return f"it has tensors that this llama.cpp does not know, such as {clean_line(unknown[0])}"
    return ""


def load_refusal(path: Path, reason: str) -> CpuchatError:
    """Return the error for a file that llama.cpp did not load, for the `reason` that it gave."""
    if any(sign in reason for sign in DAMAGED):
        return ModelDamaged(f"llama.cpp cannot load {file_name(path)}: {reason}.", "Download it again.")
    for subject, hint in (("file", _OTHER_FILE), ("engine", _OTHER_MODEL)):
        for expression, clause in _table()["refusals"][subject].items():
            if found := re.search(expression, reason):
                return _unsupported(path, clause.format(*map(clean_line, found.groups())), hint)
    return ModelUnsupported(
        f"llama.cpp cannot load {file_name(path)}: {reason}.",
        "Compare it with its checksum (`cpuchat models verify`); if it is intact, choose another publisher's file.",
    )


def _unsupported(path: Path, why: str, hint: str) -> ModelUnsupported:
    return ModelUnsupported(f"{file_name(path)} cannot run here: {why}.", hint)


def check_supported(header: GGUFHeader) -> None:
    """Refuse a model that the engine cannot run. Raises ModelUnsupported: the message says why."""
    why, hint = _refusal(header)
    if why:
        raise _unsupported(header.path, why, hint)


def scalar_types(cpu: Instructions, machine: str = "") -> frozenset[str]:
    """Return the tensor types that `cpu` computes without vector instructions; of other CPUs than those of x86, where
    ARM has them for all, nothing is known. `machine` as `platform.machine` names it; "": this one."""
    if (machine or platform.machine()).lower() not in _X86:
        return frozenset()
    if "AVX" not in cpu.features:
        quantized = {name for name, kind in BY_NAME.items() if kind.block > 1}
        return frozenset(quantized - {"Q1_0", "Q4_0", "Q8_1", "Q8_K"})
    return frozenset({"Q2_0"} if "AVX2" in cpu.features else {"Q2_0", "TQ1_0", "TQ2_0"})


def scalar_type_of(work: ModelWork, scalar: Collection[str]) -> str:
    """Return which of the `scalar` types a tenth or more of a model's weights have; "" for none."""
    nbytes = Counter[str]()
    for one in (*work.dense, *work.head, *work.experts):
        nbytes[one.type] += round(one.nbytes)
    found = [(count, kind) for kind, count in nbytes.items() if kind in scalar and count >= _SHARE * nbytes.total()]
    return max(found)[1] if found else ""


def why_slow(scalar: str) -> str:
    """Return why no speed is predicted for weights of a scalar type, as a clause."""
    return f"{scalar} has no SIMD kernel on this CPU, which makes it several times slower"
