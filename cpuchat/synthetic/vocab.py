"""A synthetic vocabulary that works like a real one: any text is tokenized and detokenized losslessly.

Layout: 0 `<unk>`, 1 `<s>`, 2 `</s>`, 3 `<|im_start|>`, 4 `<|im_end|>`, 5..260 the bytes, then words: a lone space,
` a` ... ` z`, ` aa` ... Every beginning of a word is a word, so SentencePiece merging finds exactly the token that
was written.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Vocab = Literal["bytes", "none"]

FIRST_BYTE = 5
FIRST_WORD = FIRST_BYTE + 256
END = 4

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word(index: int) -> str:
    """Return the text of token FIRST_WORD + `index`: a space and nothing, a, b, ... z, aa, ab, ..."""
    letters = ""
    while index:
        index, letter = divmod(index - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return " " + letters


def vocab_metadata(architecture: str, n_vocab: int, vocab: Vocab, template: str | None) -> dict[str, Any]:
    """Return the tokenizer metadata.

    "none" writes no tokens at all: llama.cpp loads such a file and computes with token ids, but aborts when asked
    for text or for what a token is.
    """
    size = {f"{architecture}.vocab_size": n_vocab}
    if vocab == "none":
        return size | {"tokenizer.ggml.model": "none"}
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["\u2581" + word(i)[1:] for i in range(n_vocab - FIRST_WORD)]
    # llama_token_type: 1 normal, 2 unknown, 3 control, 6 byte.
    types = np.array([2, 3, 3, 3, 3] + [6] * 256 + [1] * (n_vocab - FIRST_WORD), np.int32)
    metadata = size | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(n_vocab, np.float32),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return metadata | {"tokenizer.chat_template": template} if template else metadata
