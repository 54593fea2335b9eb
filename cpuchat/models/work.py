"""Computes the work of a pass of a model from its header; `costmodel` turns it into time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuchat.costmodel.work import ALIKE, Attention, ModelWork, Weights, by_type
from cpuchat.model_info import ModelInfo, Traffic
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.traffic import TABLES, attention_madds, is_used, traffic_of

N_PAST = 650
"""Tokens in the context at which speed is predicted: the middle of an answer of 300 tokens to a prompt of 500."""
_HEAD = "output.weight"
_TIED = "token_embd.weight"


def model_work(
    header: GGUFHeader,
    *,
    type_k: str = "f16",
    type_v: str = "f16",
    n_experts: int = 0,
    flash_attn: bool = True,
    alike: float = 0.0,
) -> ModelWork:
    """Return the work of the model of `header` (of `read_model`).

    The arguments are those of `traffic_of`, and `alike` of `ModelWork`: 0 for random tokens, `ALIKE` for text.
    """
    traffic = traffic_of(header, type_k=type_k, type_v=type_v, n_experts=n_experts, flash_attn=flash_attn)
    head = _HEAD if any(tensor.name == _HEAD for tensor in header.tensors) else _TIED
    used = [tensor for tensor in header.tensors if is_used(header, tensor)]
    routed = {tensor.name for tensor in used if traffic.n_expert and tensor.is_routed}
    apart = {*TABLES, *routed, head}
    dense = [tensor for tensor in used if tensor.name not in apart]
    madds = attention_madds(header, flash_attn=flash_attn)
    return ModelWork(
        name=header.name,
        n_layer=header.n_layer,
        dense=by_type(_weights(one) for one in dense),
        head=by_type(_weights(one) for one in used if one.name == head),
        experts=by_type(_weights(one) for one in used if one.name in routed),
        n_expert=traffic.n_expert,
        n_expert_used=traffic.n_expert_used,
        alike=alike,
        row=traffic.row,
        state=traffic.state,
        attention=tuple(
            Attention(part.bytes_per_token, madds.get(part.window, 0), part.window, part.step) for part in traffic.kv
        ),
    )


def loaded_work(model: ModelInfo, *, alike: float = 0.0) -> ModelWork:
    """Return the work of a loaded model, with the KV cache and the attention that it was loaded with; `alike` as in
    `model_work`.

    Raises:
        ModelNotFound, ModelDamaged: its file is gone or has changed.
    """
    return _as_loaded(model.path, model.traffic, model.n_expert_used, alike)


def loaded_draft_work(model: ModelInfo) -> ModelWork | None:
    """Return the work of the draft model beside a loaded one, as `loaded_work`; None without one."""
    return _as_loaded(model.draft_path, model.draft_traffic, 0, ALIKE) if model.draft_path else None


def _as_loaded(path: str, traffic: Traffic | None, n_experts: int, alike: float) -> ModelWork:
    cache = traffic.kv if traffic is not None else ()
    work = model_work(
        read_model(Path(path)), n_experts=n_experts, flash_attn=all(part.step == 1 for part in cache), alike=alike
    )
    if [part.window for part in cache] != [one.window for one in work.attention]:
        return work
    attention = tuple(
        msgspec.structs.replace(one, nbytes=part.bytes_per_token)
        for one, part in zip(work.attention, cache, strict=True)
    )
    return msgspec.structs.replace(work, attention=attention)


def _weights(tensor: TensorInfo) -> Weights:
    """Return the work of a matrix, of a stack of matrices, or of a vector."""
    columns, rows, n = (*tensor.shape, 1, 1)[:3]
    return Weights(tensor.type, tensor.nbytes, tensor.n_elements, (columns + rows) * n)
