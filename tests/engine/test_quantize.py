"""Tests the process that quantizes, spoken to directly: one answer a line, and it never outlives its input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.line_process import Refused
from cpuchat.models.gguf.header import read_header
from cpuchat.models.quantize.types import Answer, QuantizeFinished, QuantizeRequest, TensorStarted, quant_type
from tests.support.tiny_gguf import write_tiny_gguf

HANG_GUARD = 180


class Child:
    """The real process with its pipes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cpuchat.engine.quantize"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def ask(self, request: QuantizeRequest | bytes) -> None:
        line = request if isinstance(request, bytes) else msgspec.json.encode(request)
        self.requests.write(line + b"\n")
        self.requests.flush()

    def answer(self) -> Answer | Refused:
        return msgspec.json.decode(self.answers.readline(), type=Answer | Refused)

    def end(self) -> int:
        self.requests.close()
        self.process.stdin = None
        return self.process.wait(HANG_GUARD)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.kill()
    child.process.communicate()


def test_it_foresees_makes_and_ends(child: Child, tiny_model: Path, tmp_path: Path) -> None:
    out, number = tmp_path / "out", quant_type("Q8_0").number
    child.ask(QuantizeRequest(source=str(tiny_model), number=number))
    result = child.answer()
    assert isinstance(result, QuantizeFinished)
    assert not out.exists()
    child.ask(QuantizeRequest(source=str(tiny_model), out=str(out), number=number, threads=2))
    answers = [child.answer()]
    while isinstance(answers[-1], TensorStarted):
        answers.append(child.answer())
    assert isinstance(answers.pop(), QuantizeFinished)
    made = {tensor.name: tensor.type for tensor in read_header(out).tensors}
    assert made == result.types
    assert sorted(one.name for one in answers if isinstance(one, TensorStarted)) == sorted(made)
    assert child.end() == 0
    assert out.exists()  # what is whole stays
    assert child.answers.read() == b""


def test_a_refusal_says_why_and_the_next_request_is_answered(child: Child, tiny_model: Path, tmp_path: Path) -> None:
    number = quant_type("Q8_0").number
    child.ask(QuantizeRequest(source=str(tmp_path / "nowhere.gguf"), number=number))
    answer = child.answer()
    assert isinstance(answer, Refused) and answer.code == "quantize_failed" and "nowhere.gguf" in answer.message
    child.ask(QuantizeRequest(source=str(tiny_model), number=39))  # NVFP4 can be read, not made
    answer = child.answer()
    assert isinstance(answer, Refused) and "invalid output file type 39" in answer.message
    child.ask(QuantizeRequest(source=str(tiny_model), number=number))
    assert isinstance(child.answer(), QuantizeFinished)


def test_the_work_ends_with_the_program_that_wanted_it(child: Child, tmp_path: Path) -> None:
    """Its end of the pipe closes, as it does when it is killed: what is not whole goes."""
    large = write_tiny_gguf(tmp_path / "large.gguf", n_embd=512, n_layer=6, n_ff=2048, n_head=8)
    out = tmp_path / "out"
    child.ask(QuantizeRequest(source=str(large), out=str(out), number=quant_type("IQ4_XS").number, threads=1))
    assert isinstance(child.answer(), TensorStarted)
    assert out.exists()
    assert child.end() == 0
    assert not out.exists()
