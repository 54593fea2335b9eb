"""A llama-shaped transformer in plain PyTorch: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. Every row length of the target is a multiple of 256, as K-quants want."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    context: int = 2048
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


TARGET = Shape(dim=256, layers=7, heads=4, kv_heads=2, ff=1024, vocab=3072)
DRAFT = Shape(dim=128, layers=3, heads=2, kv_heads=1, ff=384, vocab=3072)


class Block(nn.Module):
    """Attention and feed-forward with a residual around each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        self.attn_norm = nn.RMSNorm(shape.dim, eps=shape.eps)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.eps)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv, bias=False)
        self.v = nn.Linear(shape.dim, kv, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.ff, bias=False)
        self.up = nn.Linear(shape.dim, shape.ff, bias=False)
        self.down = nn.Linear(shape.ff, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """`x` (batch, time, dim); `cos`, `sin` (time, 1, head_dim/2); `mask` (batch · heads, time, time), added to the
        scores, or None for plain causal attention."""
        shape, (batch, time, _) = self.shape, x.shape
        h = self.attn_norm(x)
        q = _rope(self.q(h).view(batch, time, shape.heads, shape.head_dim), cos, sin).transpose(1, 2)
        k = _rope(self.k(h).view(batch, time, shape.kv_heads, shape.head_dim), cos, sin).transpose(1, 2)
        v = self.v(h).view(batch, time, shape.kv_heads, shape.head_dim).transpose(1, 2)
        groups = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # Twice as fast as the fused attention of a CPU for the short rows of training.
            q, k, v = (t.reshape(-1, time, shape.head_dim) for t in (q, k, v))
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=shape.head_dim**-0.5)
            y = torch.bmm(scores.softmax(-1).to(v.dtype), v).view(batch, shape.heads, time, shape.head_dim)
        x = x + self.o(y.transpose(1, 2).reshape(batch, time, shape.dim))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Token ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.eps)
        nn.init.normal_(self.embed.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.layers) ** 0.5 if deep else 1.0))

    def hidden(self, ids: Tensor, mask: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Final states (batch, time, dim) for `ids` (batch, time).

        `mask` (batch, 1, time, time) tells which positions each position sees (default: all earlier ones). `keep`
        (batch, time), 0 or 1, blanks the embedding of single tokens, to make the model read around missing words.
        """
        cos, sin = rope_table(self.shape, ids.shape[1], ids.device)
        x = self.embed(ids)
        if keep is not None:
            x = x * keep[..., None]
        if torch.is_autocast_enabled(ids.device.type):
            cos, sin = cos.bfloat16(), sin.bfloat16()
        if mask is not None:
            shut = torch.zeros(mask.shape, dtype=cos.dtype, device=mask.device).masked_fill(~mask, -1e4)
            mask = shut.expand(-1, self.shape.heads, -1, -1).flatten(0, 1)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, dim) to (…, vocab), through the embedding table."""
        return F.linear(hidden, self.embed.weight)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.logits(self.hidden(ids, mask))

    def size(self) -> int:
        """Number of parameters; the tied table counts once."""
        return sum(p.numel() for p in self.parameters())


def rope_table(shape: Shape, time: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, each (time, 1, head_dim/2)."""
    half = shape.head_dim // 2
    angle = torch.arange(time, device=device)[:, None] * shape.rope_base ** (
        -torch.arange(half, device=device, dtype=torch.float32) / half
    )
    return angle.cos()[:, None], angle.sin()[:, None]


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head of `x` (batch, time, heads, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
