"""Tells model files apart, by content or by path, size and time of change; and builds of the engine."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from pathlib import Path

from cpuchat.errors import ModelNotFound
from cpuchat.models.gguf.header import split_parts


def file_fingerprint(path: Path) -> str:
    """Identify a model file by content: 32 hex digits, the same wherever and whenever the file was copied.

    A hash over the length, the first MiB (the header), the last 64 KiB and 64 blocks of 4 KiB spread evenly
    between; all parts of a split model. Under 50 ms for a file of any size on a solid-state disk. It distinguishes
    models; it does not prove that a file is intact.

    Raises:
        ModelNotFound: the file or one of its parts cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in split_parts(path) or [path]:
        try:
            _sample(part, digest)
        except OSError as error:
            raise ModelNotFound(f"Cannot read {part}: {error.strerror}.", "Check the path.") from None
    return digest.hexdigest()


def _sample(path: Path, digest: hashlib.blake2b, head: int = 1 << 20, tail: int = 1 << 16, blocks: int = 64) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        digest.update(file.read(head))
        step = max((size - head - tail) // blocks, 4096)
        for at in range(head, max(size - tail, head), step):
            file.seek(at)
            digest.update(file.read(4096))
        file.seek(max(size - tail, 0))
        digest.update(file.read(tail))


def stat_fingerprint(parts: list[Path], *, with_times: bool = True) -> str:
    """Identify the files of a model by real path, size and time of change: 32 hex digits, without reading them.

    Raises:
        OSError: one of them does not exist.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        status = part.stat()
        digest.update(os.fsencode(os.path.realpath(part)))
        digest.update(f"|{status.st_size}|{status.st_mtime_ns if with_times else ''}|".encode())
    return digest.hexdigest()


@functools.cache
def engine_fingerprint() -> str:
    """Identify the build of the installed engine by its version and the sizes of its libraries, without loading them:
    the same after a reinstall, and wherever it is installed. "" without one."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return ""
    package, digest = Path(found.origin).parent, hashlib.blake2b(digest_size=16)
    try:
        names = [one.name for one in package.parent.glob("llama_cpp_python-*.dist-info")]
        sizes = [(one.name, one.stat().st_size) for one in (package / "lib").glob("lib*")]
    except OSError:
        return ""
    digest.update(repr((sorted(names), sorted(sizes))).encode())
    return digest.hexdigest()


def engine_replaced() -> bool:
    """Return whether another build was installed since `engine_fingerprint` identified it: new workers run that one."""
    return engine_fingerprint.__wrapped__() != engine_fingerprint()
