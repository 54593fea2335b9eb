"""As much of llama.cpp as judging needs: load, tokenize, render the chat template, greedy decoding, verification."""

from __future__ import annotations

import ctypes
from pathlib import Path

import jinja2.sandbox
import llama_cpp as lc
import numpy as np

MAX_BATCH = 2048


@lc.llama_log_callback
def _quiet(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Drops llama.cpp's log."""


class Engine:
    """One model with one context; `past` holds the ids whose keys and values are in the cache."""

    def __init__(self, path: Path, threads: int = 1, context: int = 2048) -> None:
        lc.llama_log_set(_quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        mparams = lc.llama_model_default_params()
        self.model = lc.llama_model_load_from_file(str(path).encode(), mparams)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        cparams = lc.llama_context_default_params()
        cparams.n_ctx = context
        cparams.n_batch = cparams.n_ubatch = MAX_BATCH
        cparams.n_threads = cparams.n_threads_batch = threads
        self.context = lc.llama_init_from_model(self.model, cparams)
        self.vocab = lc.llama_model_get_vocab(self.model)
        self.n_vocab = lc.llama_vocab_n_tokens(self.vocab)
        self._batch = lc.llama_batch_init(MAX_BATCH, 0, 1)
        self.past: list[int] = []
        template = lc.llama_model_chat_template(self.model, None)
        self._template = jinja2.sandbox.SandboxedEnvironment().from_string(template.decode())

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of `messages` as the model's own chat template renders them, opened for an answer."""
        return self.tokenize(self._template.render(messages=messages, add_generation_prompt=True), special=True)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`; with `special`, names of control tokens in it count as such."""
        data = text.encode()
        room = len(data) + 8
        ids = (lc.llama_token * room)()
        n = lc.llama_tokenize(self.vocab, data, len(data), ids, room, False, special)
        return list(ids[:n])

    def text(self, ids: list[int]) -> str:
        """The text of `ids`, control tokens left out."""
        data = b""
        buffer = ctypes.create_string_buffer(256)
        for token in ids:
            n = lc.llama_token_to_piece(self.vocab, token, buffer, 256, 0, False)
            data += buffer.raw[:n]
        return data.decode("utf-8", errors="replace")

    def ends(self, token: int) -> bool:
        """Whether `token` ends an answer."""
        return bool(lc.llama_vocab_is_eog(self.vocab, token))

    def logits(self, ids: list[int], rows: int) -> np.ndarray:
        """Logits (rows, vocab) at the last `rows` positions of `ids`; what the cache holds is not computed again."""
        same = 0
        while same < min(len(self.past), len(ids) - rows) and self.past[same] == ids[same]:
            same += 1
        lc.llama_memory_seq_rm(lc.llama_get_memory(self.context), 0, same, -1)
        new = ids[same:]
        self._batch.n_tokens = len(new)
        for i, token in enumerate(new):
            self._batch.token[i] = token
            self._batch.pos[i] = same + i
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0
            self._batch.logits[i] = 1
        if code := lc.llama_decode(self.context, self._batch):
            raise RuntimeError(f"llama_decode: {code}")
        self.past = list(ids)
        found = np.ctypeslib.as_array(lc.llama_get_logits(self.context), shape=(len(new), self.n_vocab))
        return found[-rows:].copy()

    def greedy(self, ids: list[int], limit: int) -> list[int]:
        """The most likely continuation of `ids`, its end token included, at most `limit` tokens."""
        ids = list(ids)
        start = len(ids)
        while len(ids) - start < limit:
            ids.append(int(self.logits(ids, 1)[0].argmax()))
            if self.ends(ids[-1]):
                break
        return ids[start:]
