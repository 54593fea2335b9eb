"""The KV caches of draft heads, whose batches hold a hidden state beside each token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Tokens
from typing import Any

import numpy as np

from cpuchat.base.errors import GenerationFailed
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.sequence import OK, Sequence

_ENCODED = 32
"""Hidden states that are encoded at once: llama.cpp has room for as many as for rows of logits."""


def _rows(address: int | None, n: int, width: int) -> np.ndarray:
    """Return llama.cpp's rows at `address`: a view of shape (n, width)."""
    if not address:
        raise GenerationFailed("llama.cpp has no hidden states of that batch.", "Reload the model without its head.")
    return np.ctypeslib.as_array((ctypes.c_float * (n * width)).from_address(address)).reshape(n, width)


class HeadSequence(Sequence):
    """The KV cache of a head that reads the model's last hidden states (MTP), which have `n_embd` values. `n_layer`:
    MTP layers of the head, of which the first one computes. `states`: of the tokens of the next batch, float32 of shape
    (n_batch, n_embd). `n_features`: values that are kept of each token of the model, from which its state is made."""

    def __init__(self, context: Any, *, n_vocab: int, n_embd: int, abort: AbortFlag, n_layer: int = 1) -> None:
        super().__init__(context, n_vocab=n_vocab, abort=abort)
        self._n_layer = n_layer
        self.states = np.zeros((self.n_batch, n_embd), np.float32)
        self.n_features = n_embd
        self._batch.embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        bindings.set_hidden_states(context, True, True)

    @property
    def max_draft(self) -> int:
        """Longest draft. Of several layers each was trained for one token of a draft: fed its own hidden state, the
        first one is wrong so often that drafts of one token are faster (llama.cpp pull request 23274)."""
        return 1 if self._n_layer > 1 else super().max_draft

    def read_from(self, target: Sequence) -> None:
        """Let llama.cpp keep what the head needs of each batch of the model."""
        bindings.set_hidden_states(target.context, True, False)

    def features(self, target: Sequence, n: int) -> np.ndarray:
        """Return what is kept of the `n` tokens of the model's last batch: (n, n_features)."""
        return _rows(bindings.hidden_states_address(target.context), n, self.n_features)

    def states_of(self, features: np.ndarray) -> np.ndarray:
        """Return the hidden states for the head: (n, n_embd)."""
        return features

    def hidden_state(self) -> np.ndarray:
        """Return the head's own hidden state of the last token with logits: a view until the next batch."""
        return _rows(bindings.hidden_state_address(self.context, -1), 1, self.states.shape[1])[0]

    def free(self) -> None:
        self._batch.embd = None  # llama_batch_free frees what llama.cpp has allocated
        super().free()


class EagleSequence(HeadSequence):
    """The KV cache of an EAGLE-3 head, which encodes the inputs of some of the model's layers. `layers`: of the model,
    which has `n_layer`; that number means its last hidden states. `n_target`: values of the model's hidden states.
    `sizes`: as of `HeadSequence`."""

    def __init__(self, context: Any, *, layers: Tokens[int], n_layer: int, n_target: int, **sizes: Any) -> None:
        super().__init__(context, **sizes)
        self._layers, self._n_target_layers, self._n_target = tuple(layers), n_layer, n_target
        self.n_features = len(self._layers) * n_target

    def read_from(self, target: Sequence) -> None:
        for layer in self._layers:
            if layer < self._n_target_layers:
                bindings.set_layer_inputs(target.context, layer, True)
            else:
                bindings.set_hidden_states(target.context, True, False)

    def features(self, target: Sequence, n: int) -> np.ndarray:
        addresses = [
            bindings.layer_inputs_address(target.context, layer)
            if layer < self._n_target_layers
            else bindings.hidden_states_address(target.context)
            for layer in self._layers
        ]
        return np.concatenate([_rows(address, n, self._n_target) for address in addresses], axis=1)

    def extend(self, tokens: Tokens[int], *, n_outputs: int = 0, whole: bool = False) -> None:
        # Its graph gives rows for the first tokens of a batch, whichever were asked for: those with rows go alone.
        n_before = len(tokens) - n_outputs if n_outputs else 0
        if n_before:
            super().extend(tokens[:n_before], whole=whole)
            self.states[:n_outputs] = self.states[n_before : len(tokens)].copy()
        super().extend(tokens[n_before:], n_outputs=n_outputs, whole=whole)

    def states_of(self, features: np.ndarray) -> np.ndarray:
        states = np.empty((len(features), self.states.shape[1]), np.float32)
        size = min(_ENCODED, self.n_ubatch)
        for at in range(0, len(features), size):
            rows = np.ascontiguousarray(features[at : at + size])
            states[at : at + len(rows)] = self._encoded(rows)
        return states

    def _encoded(self, rows: np.ndarray) -> np.ndarray:
        n = len(rows)
        batch = llama.llama_batch(
            n_tokens=n, token=None, embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), pos=self._batch.pos,
            n_seq_id=self._batch.n_seq_id, seq_id=self._batch.seq_id, logits=self._batch.logits,
        )  # fmt: skip
        self._pos[:n] = np.arange(len(self.tokens), len(self.tokens) + n)
        self._wanted[:n] = 1
        self._is_stepping = False
        if self.pool is not None:
            self.pool.prepare(self, 0.0)
        status = llama.llama_encode(self.context, batch)
        if status != OK:
            raise self.failure(status)
        return _rows(bindings.hidden_states_address(self.context), n, self.states.shape[1])
