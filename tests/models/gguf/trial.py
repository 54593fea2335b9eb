"""Loads models in llama.cpp, each in a process of its own: what becomes of them.

    python -m tests.models.gguf.trial FILE ...

Prints one line for each: "works", "refused" (NULL instead of a model), "endless" (3 s of CPU time), or "died".
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import llama_cpp as llama

_SECONDS = 3
_TEXT = "Hé llo\n\x01🙂".encode()


@llama.llama_log_callback
def _quiet(_level: int, _text: bytes, _user: Any) -> None:
    pass


def main() -> None:
    os.environ["GGML_NO_BACKTRACE"] = "1"  # it takes a while, and may start a debugger
    llama.llama_log_set(_quiet, ctypes.c_void_p(0))
    for path in sys.argv[1:]:
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
            os._exit(_use(Path(path)))
        print(_fate(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)


def _fate(code: int) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "endless"
    return {0: "works", 1: "refused"}.get(code, "died")


def _use(path: Path) -> int:
    """Load, tokenize a text with begin and end tokens, and compute one token."""
    model = llama.llama_model_load_from_file(os.fsencode(path), llama.llama_model_default_params())
    if not model:
        return 1
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    context = llama.llama_init_from_model(model, params)
    if not context:
        return 1
    out = (ctypes.c_int32 * 256)()
    vocab: Any = llama.llama_model_get_vocab(model)
    llama.llama_tokenize(vocab, _TEXT, len(_TEXT), out, 256, True, True)
    return 1 if llama.llama_decode(context, llama.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)) else 0


if __name__ == "__main__":
    main()
