"""The dialect of LM Studio: OpenAI's, and a list of models with their sizes.

Fields: LM Studio's REST API v0.
"""

from __future__ import annotations

from typing import Any

from cpuchat.backend.remote.adapter import Adapter, ListedModel, listed, name_of
from cpuchat.backend.remote.chunk import Chunk, Numbers
from cpuchat.backend.remote.stream import valid_text


class LMStudio(Adapter):
    """See `Adapter`."""

    kind = "LM Studio"
    takes = Adapter.takes | {"top_k", "min_p", "repeat_penalty"}
    unreported = (
        ("tokens", "reported at the end of the answer"),
        ("prefill_tok_s", "not reported"),
        ("prefill_cached", "not reported"),
        ("queue_s", "not reported"),
        ("running", "not reported"),
        ("acceptance", "only for draft models of LM Studio"),
    )

    def chunk(self, data: dict[str, Any]) -> Chunk:
        chunk = super().chunk(data)
        stats = Numbers(data.get("stats"))
        if stats:
            chunk.reported.draft_n = stats.count("total_draft_tokens_count")
            chunk.reported.draft_n_accepted = stats.count("accepted_draft_tokens_count")
            chunk.lies += stats.lies
        return chunk


def parse_models(data: dict[str, Any]) -> tuple[ListedModel, ...]:
    """Return the models of `/api/v0/models` that answer."""
    found = []
    for entry in listed(data):
        numbers = Numbers(entry)
        if (name := name_of(entry)) and entry.get("type") != "embeddings":
            found.append(
                ListedModel(
                    name,
                    quantization=valid_text(entry.get("quantization"))[:20],
                    n_ctx=numbers.count("loaded_context_length") or 0,
                    n_ctx_train=numbers.count("max_context_length") or 0,
                    architecture=valid_text(entry.get("arch"))[:40],
                    loaded=entry.get("state") == "loaded",
                )
            )
    return tuple(found)
