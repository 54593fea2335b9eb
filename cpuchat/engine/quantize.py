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
from typing import Any

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, DiskFull, QuantizeFailed
from cpuchat.base.line_process import LineOutput
from cpuchat.models.engine_version import LOG_ERROR, QUANTIZE_FAILED, QUANTIZED_TENSOR, QUANTIZED_TO
from cpuchat.models.gguf.header import read_header, read_model
from cpuchat.models.gguf.parse import ALIGNMENT, BY_NAME
from cpuchat.models.quantize.types import QuantizeFinished, QuantizeRequest, TensorStarted

NICENESS = 10
# Rows of one tensor in memory at a time: memory stays small, and the file grows steadily.
SLAB_BYTES = 256 << 20


class LogParser:
    """Parses llama.cpp's log: the current tensor, told to `output`, its target type, and errors."""

    def __init__(self, llama: Any, output: LineOutput | None = None) -> None:
        self.types: dict[str, str] = {}
        self.errors: list[str] = []
        self._output = output
        self._name = ""
        self._callback = llama.llama_log_callback(self._on_line)
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_line(self, level: int, text: bytes, _user: object) -> None:
        if level == LOG_ERROR:
            self.errors.append(text.decode("utf-8", "replace").strip())
        elif match := QUANTIZED_TENSOR.search(text):
            self._name = match[1].decode("utf-8", "replace")
            self.types[self._name] = match[2].decode().upper()
            if self._output is not None:
                self._output.send(TensorStarted(name=self._name))
        elif match := QUANTIZED_TO.search(text):
            self.types[self._name] = match[1].decode().upper()

    def failure(self) -> CpuchatError:
        said = next((line for line in reversed(self.errors) if QUANTIZE_FAILED in line), "")
        reason = said.partition(QUANTIZE_FAILED)[2] or " ".join(filter(None, self.errors)) or "llama.cpp gave no reason"
        if "iostream" in reason:  # std::ofstream is used for nothing but the output
            return DiskFull(
                "Cannot write the whole file: the disk is full, or a file size limit is reached.",
                "Free some space, or choose another folder or a smaller type.",
            )
        return QuantizeFailed(f"llama.cpp failed to quantize the model: {reason.strip().rstrip('!.')}.")


def run(request: QuantizeRequest, output: LineOutput) -> QuantizeFinished:
    """Run one request with llama.cpp. Raises EngineMismatch, QuantizeFailed, DiskFull."""
    from cpuchat.engine.llama import bindings

    bindings.start()
    params = bindings.llama.llama_model_quantize_default_params()
    params.ftype = request.number
    params.max_buf_size = SLAB_BYTES
    if request.matrices.output:
        params.output_tensor_type = BY_NAME[request.matrices.output].id
    if request.matrices.embedding:
        params.token_embedding_type = BY_NAME[request.matrices.embedding].id
    if request.keeps:
        tensors = read_model(Path(request.source)).tensors
        kept = (bindings.llama.llama_model_tensor_override * (len(tensors) + 1))()  # an empty pattern ends them
        for override, tensor in zip(kept, tensors, strict=False):
            override.pattern = f"^{re.escape(tensor.name)}$".encode()
            override.type = BY_NAME[tensor.type].id
        params.tt_overrides = kept
    log = LogParser(bindings.llama, output if request.out else None)
    if not request.out:
        params.dry_run = params.allow_requantize = True
    else:
        params.nthread = request.threads
        params.allow_requantize = request.requantize
        # llama.cpp copies a source's other alignment into the header, but aligns to the usual one.
        if read_header(Path(request.source)).alignment != ALIGNMENT:
            overrides = (bindings.llama.llama_model_kv_override * 2)()  # an empty key ends them
            overrides[0].key, overrides[0].value.val_i64 = b"general.alignment", ALIGNMENT
            overrides[0].tag = bindings.llama.LLAMA_KV_OVERRIDE_TYPE_INT
            params.kv_overrides = overrides
    source, out = os.fsencode(request.source), os.fsencode(request.out)
    if bindings.llama.llama_model_quantize(source, out, ctypes.byref(params)):
        raise log.failure()
    return QuantizeFinished(types={} if out else log.types)


def main() -> None:
    """Run requests until the input ends."""
    output = LineOutput.claim()
    os.nice(NICENESS)
    requests: queue.SimpleQueue[QuantizeRequest] = queue.SimpleQueue()
    unfinished: Path | None = None

    def read() -> None:
        """Queue requests; end the process with the input, also inside llama.cpp, and delete the unfinished file."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            for line in sys.stdin.buffer:
                requests.put(msgspec.json.decode(line, type=prepared(QuantizeRequest)))
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    while True:
        request = requests.get()
        try:
            unfinished = Path(request.out) if request.out else None
            answer = run(request, output)
            unfinished = None
            output.send(answer)
        except CpuchatError as error:
            output.refuse(error)


if __name__ == "__main__":
    main()
