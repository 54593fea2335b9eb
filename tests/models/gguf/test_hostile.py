"""Tests headers made to harm: a typed error within 200 MB and a bounded time, and never a crash.

The limits are those of the process that reads them (`limited`): the system ends it when they are exceeded.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpuchat.models.gguf.parse import KEPT_TEXT, MAX_ENTRIES, MAX_HEADER, MAX_STRINGS, MAX_TENSORS, MAX_VALUES
from tests.models.gguf.fields import fields, patched
from tests.models.gguf.test_header import write_reference

pytestmark = pytest.mark.slow

N_MUTATED = 40
MB = 1 << 20


class Reader:
    """The limited process; started again when it was ended."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "hostile.gguf"
        self._process: subprocess.Popen[str] | None = None

    def read(self, content: bytes) -> str:
        """Return the result for a file with this content: `ok`, a typed error with its words, or `ended`."""
        self._path.write_bytes(content)
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "tests.models.gguf.limited"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process.stdin.write(f"{self._path}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip() or f"ended with status {self._process.wait()}"

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    one = Reader(tmp_path_factory.mktemp("hostile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[bytes]:
    """Return a file with every kind of value, and one with a vocabulary and a template."""
    every = write_reference(tmp_path_factory.mktemp("sound") / "every.gguf")
    return [every.read_bytes(), tiny_model.read_bytes()]


def acceptable(answer: str) -> bool:
    """Return whether the result is allowed: some changes leave a sound header, all others are damage."""
    typed = answer.startswith(("ModelDamaged: ", "ModelUnsupported: "))
    return answer == "ok" or (typed and "hostile.gguf" in answer)


def test_untouched_files_are_read_within_the_limits(reader: Reader, sound: list[bytes]) -> None:
    assert [reader.read(content) for content in sound] == ["ok", "ok"]


_NUMBERS = st.sampled_from([0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])


@settings(max_examples=N_MUTATED, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers(reader: Reader, sound: list[bytes], data: st.DataObject) -> None:
    """Lengths, types, counts, sizes, offsets, values and strings changed, and bytes flipped, cut out and put in."""
    content = data.draw(st.sampled_from(sound))
    known = fields(content)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from([*known, "flip", "cut", "insert"]))
        if kind in known:
            at, size = data.draw(st.sampled_from(known[kind]))
            if kind == "string":
                content = content[:at] + data.draw(st.binary(min_size=size, max_size=size)) + content[at + size :]
            else:
                old = int.from_bytes(content[at : at + size], "little")
                content = patched(content, at, size, data.draw(_NUMBERS | st.integers(max(old - 2, 0), old + 2)))
            continue
        at = data.draw(st.integers(0, max(at for at, _ in known["offset"])))
        match kind:
            case "flip":
                content = patched(content, at, 1, content[at] ^ 1 << data.draw(st.integers(0, 7)))
            case "cut":
                content = content[:at] + content[at + data.draw(st.integers(1, 64)) :]
            case _:
                content = content[:at] + data.draw(st.binary(min_size=1, max_size=16)) + content[at:]
    answer = reader.read(content)
    assert acceptable(answer), answer


def head(n_tensors: int, n_values: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_values)


def string(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def strings(key: bytes, values: list[bytes]) -> bytes:
    return string(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(string, values))


def text(data: bytes) -> bytes:
    return struct.pack("<I", 8) + string(data)


def with_vocabulary(count: int, word: bytes, last: bytes) -> bytes:
    """Return a model whose tokens are numbers, except for the last one, which begins every text."""
    tokens = [word % i for i in range(count - 1)] + [last]
    settings = (
        string(b"general.architecture") + text(b"llama"),
        string(b"llama.block_count") + struct.pack("<II", 4, 1),
        string(b"tokenizer.ggml.model") + text(b"gpt2"),
        string(b"tokenizer.ggml.bos_token_id") + struct.pack("<II", 4, count - 1),
        strings(b"tokenizer.ggml.tokens", tokens),
    )
    return head(1, len(settings)) + b"".join(settings) + tensors(1)


def tensors(count: int) -> bytes:
    entries = (
        string(b"blk.%d.attn_k.weight" % i) + struct.pack("<I4QIQ", 4, 1, 1, 1, 1, 24, 32 * i) for i in range(count)
    )
    return b"".join(entries) + bytes(32 * count + 32)


# As much as the limits of `parse` allow.
LARGEST: dict[str, Callable[[], bytes]] = {
    "vocabulary": lambda: with_vocabulary(3 << 17, b"%x", b"\n"),
    "long strings": lambda: head(0, 1) + strings(b"k", ["🙂".encode() * MB] * 15),
    "text": lambda: (
        head(0, 7)
        + b"".join(string(b"%d" % i) + text(b"x" * (KEPT_TEXT - 4) + "🙂".encode()) for i in range(6))
        + string(b"k")
        + text(b"x" * (MAX_HEADER - 7 * MB))
    ),
    "settings": lambda: (
        head(0, MAX_ENTRIES)
        + b"".join(string(b"k%d" % i) + struct.pack("<I", 8) + string(b"x" * 100) for i in range(MAX_ENTRIES))
    ),
    "arrays": lambda: head(0, MAX_ENTRIES) + b"".join(strings(b"%d" % i, [b"x" * 3800]) for i in range(MAX_ENTRIES)),
    "tensors": lambda: head(MAX_TENSORS, 0) + tensors(MAX_TENSORS),
}


@pytest.mark.parametrize("kind", LARGEST)
def test_the_largest_headers(reader: Reader, kind: str) -> None:
    answer = reader.read(LARGEST[kind]())
    assert answer == "ok" or answer.startswith("ModelDamaged"), answer


# One more than the limits allow.
TOO_LARGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "strings": (lambda: head(0, 1) + strings(b"k", [b""] * (MAX_STRINGS + 1)), "more than any vocabulary"),
    "text": (
        lambda: head(0, 9) + b"".join(string(b"%d" % i) + text(bytes(KEPT_TEXT)) for i in range(9)),
        "more text than any valid header",
    ),
    "numbers": (
        lambda: head(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 0, MAX_VALUES + 1) + bytes(MAX_VALUES + 1),
        "more than any valid header",
    ),
    "tensors": (lambda: head(MAX_TENSORS + 1, 0) + tensors(MAX_TENSORS + 1), "are too many"),
    "bytes": (lambda: head(0, 1) + strings(b"k", [bytes(MAX_HEADER)]), "beyond the longest valid header"),
}


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_beyond_the_limits(reader: Reader, kind: str) -> None:
    content, words = TOO_LARGE[kind]
    answer = reader.read(content())
    assert answer.startswith("ModelDamaged") and words in answer, answer
