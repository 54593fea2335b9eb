"""The quantizing process, `python -m cpuchat.engine.quantize`; its messages are in `models.quantize.types`.

llama.cpp does the work in one call that cannot be cancelled and reports progress only in its log. So it runs in its own
niced process, which is killed to cancel it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, DiskFull, QuantizeFailed
from cpuchat.base.line_process import LineOutput
from cpuchat.models.gguf.header import read_header
from cpuchat.models.gguf.parse import ALIGNMENT
from cpuchat.models.quantize.types import (
    ForecastRequest,
    ForecastResult,
    QuantizeFinished,
    QuantizeRequest,
    Request,
    TensorStarted,
)

NICENESS = 10
# Rows of one tensor in memory at a time: memory stays small, and the file grows steadily.
SLAB_BYTES = 256 << 20

# llama_model_quantize_impl logs "[   1/ 291] blk.0.attn_k.weight - [...], type =    f16, " and then, in a dry run,
# "size = 1.00 MiB -> 0.28 MiB (q4_K)"; the second half is missing where a tensor stays as it is.
_TENSOR = re.compile(rb"\[ *\d+/ *\d+\] (.+?) +- \[[^\[]*type = *(\w+), $", re.DOTALL)
_TARGET = re.compile(rb"size = .*MiB \((\w+)\)\n$")
_ERROR = 4  # ggml_log_level
_FAILED = "failed to quantize: "
_CANNOT_WRITE = "iostream"  # std::ofstream is used for nothing but the output


class LogParser:
    """Parses llama.cpp's log: the current tensor, its target type, and errors.

    Args:
        output: where each tensor that is begun is reported; None: nowhere.
    """

    def __init__(self, llama: Any, output: LineOutput | None = None) -> None:
        self.types: dict[str, str] = {}
        self.errors: list[str] = []
        self._output = output
        self._name = ""
        self._callback = llama.llama_log_callback(self._on_line)
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_line(self, level: int, text: bytes, _user: object) -> None:
        if level == _ERROR:
            self.errors.append(text.decode("utf-8", "replace").strip())
        elif match := _TENSOR.search(text):
            self._name = match[1].decode("utf-8", "replace")
            self.types[self._name] = match[2].decode().upper()
            if self._output is not None:
                self._output.send(TensorStarted(name=self._name))
        elif match := _TARGET.search(text):
            self.types[self._name] = match[1].decode().upper()

    def failure(self) -> CpuchatError:
        said = next((line for line in reversed(self.errors) if _FAILED in line), "")
        reason = said.partition(_FAILED)[2] or " ".join(filter(None, self.errors)) or "llama.cpp gave no reason"
        if _CANNOT_WRITE in reason:
            return DiskFull(
                "Cannot write the whole file: the disk is full, or a file size limit is reached.",
                "Free some space, or choose another folder or a smaller type.",
            )
        return QuantizeFailed(f"llama.cpp failed to quantize the model: {reason.strip().rstrip('!.')}.")


class Quantizer:
    """Runs requests with llama.cpp."""

    def __init__(self, output: LineOutput) -> None:
        """Load llama.cpp. Raises EngineMismatch."""
        from cpuchat.engine.llama import bindings

        bindings.start()
        self._bindings, self._llama = bindings, bindings.llama
        self._output = output

    def forecast(self, request: ForecastRequest) -> ForecastResult:
        params = self._params(request.number)
        params.dry_run = True
        params.allow_requantize = True
        log = LogParser(self._llama)
        self._run(request.source, "", params, log)
        return ForecastResult(types=log.types)

    def quantize(self, request: QuantizeRequest) -> None:
        params = self._params(request.number)
        params.nthread = request.threads
        params.allow_requantize = request.requantize
        facts: dict[str, str | int] = {}
        # llama.cpp copies a source's other alignment into the header, but aligns to the usual one.
        if read_header(Path(request.source)).alignment != ALIGNMENT:
            facts["general.alignment"] = ALIGNMENT
        params.kv_overrides = self._bindings.kv_overrides(facts)
        self._run(request.source, request.out, params, LogParser(self._llama, self._output))

    def _params(self, number: int) -> Any:
        params = self._llama.llama_model_quantize_default_params()
        params.ftype = number
        params.max_buf_size = SLAB_BYTES
        return params

    def _run(self, source: str, out: str, params: Any, log: LogParser) -> None:
        status = self._llama.llama_model_quantize(os.fsencode(source), os.fsencode(out), ctypes.byref(params))
        if status:
            raise log.failure()


class Requests:
    """Queues requests; when the input ends, so does the process, and the unfinished file is deleted.

    That takes a thread, because llama.cpp's call cannot be interrupted.
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
                self._waiting.put(msgspec.json.decode(line, type=prepared(Request)))
        if self.unfinished is not None:
            self.unfinished.unlink(missing_ok=True)
        os._exit(0)


def serve(stream: BinaryIO, output: LineOutput) -> None:
    """Run requests until the input ends."""
    requests = Requests(stream)
    quantizer: Quantizer | None = None
    while True:
        request = requests.next()
        try:
            quantizer = quantizer or Quantizer(output)
            if isinstance(request, ForecastRequest):
                output.send(quantizer.forecast(request))
            else:
                requests.unfinished = Path(request.out)
                quantizer.quantize(request)
                requests.unfinished = None
                output.send(QuantizeFinished())
        except CpuchatError as error:
            output.refuse(error)


def main() -> None:
    output = LineOutput.claim()
    os.nice(NICENESS)
    serve(sys.stdin.buffer, output)


if __name__ == "__main__":
    main()
