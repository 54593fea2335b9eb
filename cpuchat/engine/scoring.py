"""Predicts the tokens of a written text, and compares the predictions with those of another worker (`Score`).

A row of logits has the size of the vocabulary. One worker writes a block of rows to a file in memory that both share,
the other compares them with its own: neither keeps vocabulary × text, or waits inside a command for the other.

That takes more rows for a pass than contexts for chats have. So the text is evaluated in a context of its own, which
gets a copy of the prompt's state and is freed afterwards: what is measured of an answer stays what it is in a chat.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cpuchat.base.text import common_prefix
from cpuchat.engine.answer import LoadedModel
from cpuchat.engine.states.prompt import RenderedPrompt
from cpuchat.protocol.messages import Score, ScoredRows, StateKey, TokensScored
from cpuchat.quality.messages import RowComparer


class Scorer:
    """Runs the commands of one job. Used and closed on the engine's thread. Raises DoesNotFit: too little memory."""

    def __init__(self, loaded: LoadedModel, command: Score) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._sizes = command.n_ctx, command.n_rows
        self._sequence = self._model.sequence_beside(command.n_ctx, command.n_rows)
        self._comparer: RowComparer | None = None

    def fits(self, command: Score) -> bool:
        """Return whether the command belongs to the same job."""
        return self._sizes == (command.n_ctx, command.n_rows)

    def close(self) -> None:
        self._model.free_sequence(self._sequence)
        if self._comparer is not None:
            self._comparer.close()

    def score(self, command: Score) -> TokensScored:
        """Run one command. Raises Aborted: cancelled; the scorer must be closed; GenerationFailed: llama.cpp rejected a
        batch. OSError: the file cannot be used."""
        rows = self._rows(list(command.tokens), command.n, command.n_prompt)
        self._model.pool.rest()  # its threads would spin on the cores that comparing needs
        compared: list[ScoredRows] = []
        if command.bases:
            n_vocab, vocab, tokens = len(rows[0]), self._model.vocab, command.tokens[-command.n :]
            if self._comparer is None:
                self._comparer = RowComparer(self._model.pool.cpus, n_vocab)
            given = np.memmap(command.file, np.float32, "r", shape=(len(rows), n_vocab))
            for base in command.bases:
                pair = (given, rows) if base == "file" else (rows, given)
                scores, tops = self._comparer.compare(*pair, tokens)
                ranks = self._comparer.ranks(pair[1], tokens).astype("<i4").tobytes()
                texts = tuple(vocab.raw_piece(int(top)).decode("utf-8", "replace") for top in tops.other)
                top_p = tops.other_p.astype("<f4").tobytes()
                compared.append(ScoredRows(**scores.packed(), ranks=ranks, tops=texts, tops_p=top_p))
        else:
            with Path(command.file).open("r+b", buffering=0) as file:
                for row in rows:
                    file.write(row.data)
        return TokensScored(request_id=command.request_id, compared=tuple(compared))

    def _rows(self, tokens: list[int], n: int, n_prompt: int) -> list[np.ndarray]:
        """Return the rows of logits after which each of the last `n` tokens follows: views, until the next pass."""
        sequence, first = self._sequence, len(tokens) - n - 1  # the token after which the first of them follows
        rows: list[np.ndarray] = []
        held = min(common_prefix(sequence.tokens, tokens), first)
        if not held or sequence.truncate(held) < held:
            # Copy what the chat's KV cache holds of the prompt.
            states, source, prompt = self._loaded.states, self._model.sequence, tokens[:n_prompt]
            start = states.begin(RenderedPrompt(b"".join(map(states.piece, prompt)), prompt), StateKey())
            sequence.clear()
            is_copied = start.n > 0 and sequence.set_state(source.tokens, source.state())
            if is_copied and start.row is not None and first == n_prompt - 1 and not sequence.can_cut(first):
                rows.append(start.row.copy())  # one token less in the pass, which then is shorter than a tile
            else:
                sequence.truncate(min(len(sequence), first))
        for at in range(len(sequence), first, sequence.n_ubatch):
            sequence.extend(tokens[at : min(at + sequence.n_ubatch, first)])
        batch = tokens[len(sequence) : -1]
        if batch:
            sequence.extend(batch, n_outputs=len(batch))
        return rows + [sequence.logits(i) for i in range(len(batch))]
