"""The process that quantizes, `python -m cpuchat.engine.quantize`; `models.quantize.messages` is its language.

llama.cpp does the work in one call that cannot be stopped and says how far it is only in its log. So it has a process
of its own, niced, which is killed to cancel it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from cpuchat.errors import CpuchatError, DiskFull, QuantizeFailed
from cpuchat.models.gguf.header import read_header
from cpuchat.models.gguf.types import ALIGNMENT
from cpuchat.models.quantize.messages import Answer, Begun, Foresee, Foreseen, Made, Make, Refused, Request

if TYPE_CHECKING:
    from cpuchat.models.quantize.imatrix import ImportanceMatrix

NICENESS = 10
# Rows of one tensor that are kept in memory at once: memory stays small, and the file grows steadily.
SLAB_BYTES = 256 << 20

# llama_model_quantize_impl logs "[   1/ 291] blk.0.attn_k.weight - [...], type =    f16, " and then, in a dry run,
# "size = 1.00 MiB -> 0.28 MiB (q4_K)"; the second half is missing where a tensor stays as it is.
_TENSOR = re.compile(rb"\[ *\d+/ *\d+\] (.+?) +- \[[^\[]*type = *(\w+), $", re.DOTALL)
_TARGET = re.compile(rb"size = .*MiB \((\w+)\)\n$")
_NEEDS_IMATRIX = b"will require an imatrix"
_ERROR = 4  # ggml_log_level
_FAILED = "failed to quantize: "
_CANNOT_WRITE = "iostream"  # std::ofstream is used for nothing but the output


class Output:
    """Answers, one per line."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def tell(self, answer: Answer) -> None:
        self._stream.write(msgspec.json.encode(answer) + b"\n")
        self._stream.flush()


class Listener:
    """Takes llama.cpp's log: which tensor it is at, what becomes of it, and what went wrong.

    Args:
        output: where each tensor that is begun is told; None: nowhere.
    """

    def __init__(self, llama: Any, output: Output | None = None) -> None:
        self.types: dict[str, str] = {}
        self.needs_imatrix = False
        self.errors: list[str] = []
        self._output = output
        self._name = ""
        self._callback = llama.llama_log_callback(self._hear)
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _hear(self, level: int, text: bytes, _user: object) -> None:
        if level == _ERROR:
            self.errors.append(text.decode("utf-8", "replace").strip())
        elif match := _TENSOR.search(text):
            self._name = match[1].decode("utf-8", "replace")
            self.types[self._name] = match[2].decode().upper()
            if self._output is not None:
                self._output.tell(Begun(name=self._name))
        elif match := _TARGET.search(text):
            self.types[self._name] = match[1].decode().upper()
        elif _NEEDS_IMATRIX in text:
            self.needs_imatrix = True

    def failure(self) -> CpuchatError:
        said = next((line for line in reversed(self.errors) if _FAILED in line), "")
        reason = said.partition(_FAILED)[2] or " ".join(filter(None, self.errors)) or "llama.cpp did not say why"
        if _CANNOT_WRITE in reason:
            return DiskFull(
                "The file cannot be written to its end: the disk is full, or a limit on files is reached.",
                "Free some space, or choose another place or a smaller type.",
            )
        return QuantizeFailed(f"llama.cpp could not quantize it: {reason.strip().rstrip('!.')}.")


class Quantizer:
    """Answers requests with llama.cpp."""

    def __init__(self, output: Output) -> None:
        """Raises EngineMismatch."""
        from cpuchat.engine.llama import bindings

        bindings.start()
        self._llama = bindings.llama
        self._output = output

    def foresee(self, request: Foresee) -> Foreseen:
        params = self._params(request.number)
        params.dry_run = True
        params.allow_requantize = True
        listener = Listener(self._llama)
        self._run(request.source, "", params, listener)
        return Foreseen(types=listener.types, needs_imatrix=listener.needs_imatrix)

    def make(self, request: Make) -> None:
        params = self._params(request.number)
        params.nthread = request.threads
        params.allow_requantize = request.requantize
        facts: dict[str, str | int] = {}
        # llama.cpp copies a source's other alignment into the header, but aligns to the usual one.
        if read_header(Path(request.source)).alignment != ALIGNMENT:
            facts["general.alignment"] = ALIGNMENT
        # Stays referenced until llama.cpp is done with it.
        matrix = _read(Path(request.imatrix)) if request.imatrix else None
        if matrix is not None:
            params.imatrix = _importance(self._llama, matrix)
            facts |= {
                "quantize.imatrix.file": Path(request.imatrix).name,
                "quantize.imatrix.entries_count": len(matrix.weights),
                "quantize.imatrix.chunks_count": matrix.chunks,
            }
        params.kv_overrides = _overrides(self._llama, facts)
        self._run(request.source, request.out, params, Listener(self._llama, self._output))

    def _params(self, number: int) -> Any:
        params = self._llama.llama_model_quantize_default_params()
        params.ftype = number
        params.max_buf_size = SLAB_BYTES
        return params

    def _run(self, source: str, out: str, params: Any, listener: Listener) -> None:
        status = self._llama.llama_model_quantize(os.fsencode(source), os.fsencode(out), ctypes.byref(params))
        if status:
            raise listener.failure()


def _read(path: Path) -> ImportanceMatrix:
    from cpuchat.models.quantize.imatrix import read_imatrix  # brings numpy along, which is not needed else

    return read_imatrix(path)


def _importance(llama: Any, matrix: ImportanceMatrix) -> Any:
    """The matrix as llama.cpp takes it; the numbers themselves stay where they are."""
    data = (llama.llama_model_imatrix_data * (len(matrix.weights) + 1))()  # the last one, all zero, ends the list
    for entry, (name, values) in zip(data, matrix.weights.items(), strict=False):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = len(values)
    return data


def _overrides(llama: Any, facts: dict[str, str | int]) -> Any:
    """Metadata to write instead of, or besides, the source's."""
    overrides = (llama.llama_model_kv_override * (len(facts) + 1))()  # the last one, without a key, ends the list
    for override, (key, value) in zip(overrides, facts.items(), strict=False):
        override.key = key.encode()
        if isinstance(value, int):
            override.tag, override.value.val_i64 = llama.LLAMA_KV_OVERRIDE_TYPE_INT, value
        else:
            override.tag = llama.LLAMA_KV_OVERRIDE_TYPE_STR
            override.value.val_str = value.encode("utf-8", "replace")[:127]
    return overrides


class Requests:
    """Requests in the order of their arrival; when there can be no more, the process ends.

    That takes a thread: llama.cpp's call does not look at anything. The file that is being written goes.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.unfinished: Path | None = None
        self._stream = stream
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.next = self._waiting.get
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            for line in self._stream:
                self._waiting.put(msgspec.json.decode(line, type=Request))
        if self.unfinished is not None:
            self.unfinished.unlink(missing_ok=True)
        os._exit(0)


def serve(stream: BinaryIO, output: Output) -> None:
    """Answer requests until there are no more."""
    requests = Requests(stream)
    quantizer: Quantizer | None = None
    while True:
        request = requests.next()
        try:
            quantizer = quantizer or Quantizer(output)
            if isinstance(request, Foresee):
                output.tell(quantizer.foresee(request))
            else:
                requests.unfinished = Path(request.out)
                quantizer.make(request)
                requests.unfinished = None
                output.tell(Made())
        except CpuchatError as error:
            output.tell(Refused(code=error.code, message=error.message, hint=error.hint))


def main() -> None:
    # Descriptor 1 carries answers and nothing else: whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Ctrl+C goes to the whole process group; the program that started this one decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    serve(sys.stdin.buffer, Output(answers))


if __name__ == "__main__":
    main()
