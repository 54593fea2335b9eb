"""What names and files tell without reading a model: quantization and role by the name, identity of files and engine.

Heads predict further tokens from what the model computes and cannot answer by themselves. Publishers put them beside
the model, mostly with a prefix (`eagle3-gpt-oss-20b-Q8_0`, `mtp-Qwen3.5-27B-Q8_0`: ggml-org) or into a folder (`MTP/`).
A model that contains such a head has `MTP` further back in its name and is a model.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cpuchat.base.errors import ModelNotFound
from cpuchat.base.paths import engine_libraries
from cpuchat.models.gguf.header import model_files

Role = Literal["model", "head", "projector", "imatrix"]

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0")
"""Quantizations in order of preference, the usual trade-off of size and quality first."""

SIZE = re.compile(r"(?<![A-Za-z0-9.])\d+(?:\.\d+)?[BbMm](?![A-Za-z0-9])")
"""The number of parameters in a model's name."""
_USUAL_BITS = 4
_NAMED = re.compile(
    r"(?<![A-Z0-9])(?:(?P<prefix>UD|QAT)[-_.])?"
    r"(?P<type>(?:I|P?T|P)?Q[1-9]_(?:[01]|K[LST]{0,2}|XXS|XS|S|M|NL|G\d+)(?:_(?:XXS|XS|S|M|X*L|[48]|R[48]|G\d+))*"
    r"|MXFP4(?:_MOE)?|NVFP4|BF16|FP?(?:16|32))(?![A-Z0-9])",
    re.IGNORECASE,
)
_HEAD = re.compile(r"mtp(?![a-z0-9])|(?:.*[^a-z0-9])?(?:eagle-?3|dflash|dspark)(?![a-z0-9])", re.IGNORECASE)
_HEADS = frozenset({"mtp", "eagle3", "eagle-3", "dflash", "dspark"})


def role_of(path: str) -> Role:
    """Return the role of the file at `path` in its repository, with or without `.gguf`.

    "projector": the multimodal projector of a model; "imatrix": weights for quantizing."""
    *folders, name = path.lower().removesuffix(".gguf").split("/")
    if "mmproj" in name:
        return "projector"
    if "imatrix" in name and not quantization_of(path):
        return "imatrix"
    if _HEAD.match(name) or _HEADS.intersection(folders):
        return "head"
    return "model"


def quantization_of(path: str) -> str:
    """Return `Q4_K_M`, `UD-Q4_K_XL`, `QAT-Q4_0`, `BF16`: from the file's name, else its folder's; "" if neither says.

    Upper case, groups as `Q2_0_G64`. The `i1-` of weighted quantizations is left out: all of a repository have it, or
    none."""
    for part in reversed(path.split("/")):
        found = _last(part)
        if found is not None:
            kind = found["type"].upper().replace("FP16", "F16").replace("FP32", "F32").replace("Q2_G", "Q2_0_G")
            return f"{found['prefix'].upper()}-{kind}" if found["prefix"] else kind
    return ""


def without_quantization(name: str) -> str:
    """Return `Qwen3-8B` for `Qwen3-8B-UD-Q4_K_XL`; `name` itself where it contains nothing else, or no quantization."""
    found = _last(name)
    if found is None:
        return name
    before, behind = name[: found.start()].rstrip("-._"), name[found.end() :]
    return f"{before}{behind}".strip("-._") or name


def shortened(names: Sequence[str], width: int = 36) -> list[str]:
    """Cut long names of models in their middle, so that size and quantization stay:
    `hf.co/bartowski/Qwen2.5-Coder…7B:Q4_K_M`; none where two would be alike."""
    found = [_shortened(name, width) for name in names]
    return found if len({*found}) == len({*names}) else [*names]


def _shortened(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    quantization, size = _last(name), SIZE.search(name)
    ending = name[max(quantization.start() - 1, 0) : quantization.end()] if quantization is not None else ""
    if size is not None and size.end() >= width - len(ending):
        ending = size[0] + ending
    return f"{name[: max(width - len(ending) - 1, 0)]}…{ending}"


def without_prefix(quantization: str) -> str:
    """Return `Q4_K_M` for `UD-Q4_K_M`: the same format, quantized with more care."""
    return quantization.removeprefix("UD-").removeprefix("QAT-")


def rank(quantization: str) -> tuple[int, int, bool]:
    """Return a sort key: preferred ones first, then by distance from 4 bits; plain ones before `UD-`."""
    plain = without_prefix(quantization)
    bits = re.search(r"\d+", plain)
    place = PREFERRED.index(plain) if plain in PREFERRED else len(PREFERRED)
    return place, abs(int(bits[0]) - _USUAL_BITS) if bits else 99, plain != quantization


def _last(name: str) -> re.Match[str] | None:
    """Return the last quantization in a name: names of models contain such words, too."""
    return max(_NAMED.finditer(name), key=re.Match.start, default=None)


def file_fingerprint(path: Path) -> str:
    """Identify a model file by content: 32 hex digits, the same wherever and whenever the file was copied.

    A hash over the length, the first MiB (the header), the last 64 KiB and 64 blocks of 4 KiB spread evenly between;
    all parts of a split model. Under 50 ms for a file of any size on a solid-state disk. It distinguishes models; it
    does not prove that a file is intact. Raises ModelNotFound: the file or one of its parts cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for part in model_files(path):
        try:
            digest.update(part.stat().st_size.to_bytes(8, "little") + b"".join(samples(part)))
        except OSError as error:
            raise ModelNotFound(f"Cannot read {part}: {error.strerror}.", "Check the path.") from None
    return digest.hexdigest()


def samples(path: Path, head: int = 1 << 20, tail: int = 1 << 16) -> list[bytes]:
    """Return the beginning of a file, some blocks of its middle, and its end. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        found = [file.read(head)]
        step = max((size - head - tail) // 64, 4096)
        for at in range(head, max(size - tail, head), step):
            file.seek(at)
            found.append(file.read(4096))
        file.seek(max(size - tail, 0))
        return [*found, file.read(tail)]


def stat_fingerprint(parts: list[Path], *, with_times: bool = True) -> str:
    """Identify the files of a model by real path, size and time of change: 32 hex digits, without reading them. Raises
    OSError: one of them does not exist."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        status = part.stat()
        digest.update(os.fsencode(os.path.realpath(part)))
        digest.update(f"|{status.st_size}|{status.st_mtime_ns if with_times else ''}|".encode())
    return digest.hexdigest()


@functools.cache
def engine_fingerprint() -> str:
    """Identify the build of the installed engine by its version and the sizes of its libraries (of cpuchat's kernels,
    which change more often, by the content), without loading them: the same after a reinstall, and wherever it is
    installed. "" without one."""
    libraries = engine_libraries()
    if libraries is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    try:
        names = [one.name for one in libraries.parents[1].glob("llama_cpp_python-*.dist-info")]
        sizes = [(one.name, one.stat().st_size) for one in libraries.glob("lib*")]
        for kernels in libraries.glob("libcpuchat-*"):
            digest.update(kernels.read_bytes())
    except OSError:
        return ""
    digest.update(repr((sorted(names), sorted(sizes))).encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=4096)
def engine_knows(name: str) -> bool:
    """Return whether the engine's library contains this name, of an architecture or a tensor, without loading it; True
    without an engine. Up to 10 ms for a name that was not asked for before."""
    folder = engine_libraries()
    library = min(folder.glob("*llama.*"), default=None) if folder is not None else None
    try:
        # Linkers merge strings with the ends of others, so what precedes the name does not matter.
        return library is None or name.encode("utf-8", "replace") + b"\0" in library.read_bytes()
    except OSError:
        return True


def engine_replaced() -> bool:
    """Return whether another build was installed since `engine_fingerprint` identified it: new workers run that one."""
    return engine_fingerprint.__wrapped__() != engine_fingerprint()
