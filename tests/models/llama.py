"""Runs a GGUF file in llama.cpp itself, in this process: the judge of what this room reads and writes."""

from __future__ import annotations

import ctypes
import re
from collections import deque
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from cpuchat.engine.llama import kernels

log: deque[str] = deque(maxlen=10_000)


@llama.llama_log_callback
def keep(_level: int, text: bytes, _user: Any) -> None:
    log.append(text.decode(errors="replace"))


class Llama:
    """A loaded model with a context; greedy decoding over token ids."""

    def __init__(self, path: Path, n_ctx: int = 512, n_ubatch: int = 512, flash_attn: int = -1, **params: int) -> None:
        llama.llama_log_set(keep, ctypes.c_void_p(0))
        llama.llama_backend_init()
        kernels.select(())  # what another test chose in this process
        log.clear()
        model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        assert model, "".join(log)[-2000:]
        context = llama.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx, n_ubatch, n_ubatch
        context.n_threads = context.n_threads_batch = 1
        context.flash_attn_type = flash_attn
        context.n_outputs_max = 1
        for name, value in params.items():
            setattr(context, name, value)
        self.model = model
        self.context: Any = llama.llama_init_from_model(model, context)
        assert self.context, "".join(log)[-2000:]
        self.log = "".join(log)
        self.vocab: Any = llama.llama_model_get_vocab(model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return `count` tokens after `prompt`; asserts that every logit is finite."""
        out: list[int] = []
        tokens = prompt
        for _ in range(count):
            batch = llama.llama_batch_get_one((ctypes.c_int32 * len(tokens))(*tokens), len(tokens))
            assert llama.llama_decode(self.context, batch) == 0
            row = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), (self.n_vocab,))
            assert np.isfinite(row).all()
            tokens = [int(row.argmax())]
            out += tokens
        return out

    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        out = (ctypes.c_int32 * 1024)()
        count = llama.llama_tokenize(self.vocab, data, len(data), out, 1024, False, True)
        return list(out[:count])

    def text(self, tokens: list[int]) -> str:
        data = b""
        for token in tokens:
            piece = ctypes.create_string_buffer(64)
            count = llama.llama_token_to_piece(self.vocab, token, piece, 64, 0, True)
            data += piece.raw[:count]
        return data.decode(errors="replace")

    def mebibytes(self, what: str) -> float:
        """Return the sum of the log's "`what` = ... MiB" figures."""
        return sum(float(number) for number in re.findall(rf"{what}\s*=\s*([\d.]+) MiB", self.log))
