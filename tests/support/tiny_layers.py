"""Layers with random weights for the models of `tiny_gguf`: attention, and the recurrent kinds of llama.cpp.

Shapes are numpy's, which is GGUF's read backwards; they follow llama.cpp's src/models/*.cpp.
"""

from __future__ import annotations

import gguf
import numpy as np

D_CONV, D_STATE, DT_RANK = 4, 16, 8
"""Mamba: width of the convolution, values of state per channel, rank of the time step (in Mamba-2 the heads)."""
DELTA = (2, 32)
"""Gated delta net: heads (of Q, K and V alike) and values of a head."""
_NORMS = ("attn_norm.weight", "ffn_norm.weight", "post_attention_norm.weight", "post_ffw_norm.weight")
_OUTPUTS = ("attn_output.weight", "ffn_down.weight", "ssm_out.weight", "out_proj.weight")
_SLOWER = 0.05


def add_sizes(writer: gguf.GGUFWriter, n_embd: int, n_head: int, n_ff: int, *, names_heads: bool = False) -> None:
    """Add the sizes of a model in which every layer has as many heads; some have to say how large a head is."""
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_feed_forward_length(n_ff)
    writer.add_rope_dimension_count(n_embd // n_head)
    if names_heads:
        writer.add_key_length(n_embd // n_head)
        writer.add_value_length(n_embd // n_head)


class Layers:
    """Adds the tensors of one layer at a time to `writer`. `delta` is as `DELTA`, `gain` as of `write_tiny_gguf`."""

    def __init__(
        self,
        writer: gguf.GGUFWriter,
        rng: np.random.Generator,
        n_embd: int,
        n_ff: int,
        n_head: int,
        delta: tuple[int, int] = DELTA,
        gain: float | None = None,
    ) -> None:
        self._writer = writer
        self._rng = rng
        self._n_embd = n_embd
        self._n_ff = n_ff
        self._head = n_embd // n_head
        self.delta_heads, self.delta_dim = delta
        self._gain = gain

    def _add(self, tensor: str, *shape: int, scale: float = 0.3) -> None:
        values = (self._rng.standard_normal(shape) * scale).astype(np.float32)
        if self._gain is not None and tensor.endswith(_OUTPUTS):
            values[0] = 0.0
        self._writer.add_tensor(tensor, values)

    def ones(self, tensor: str, *shape: int) -> None:
        values = np.ones(shape, dtype=np.float32)
        if self._gain is not None and tensor.endswith(_NORMS):
            values *= self._gain
            values[0] = 0.0
        self._writer.add_tensor(tensor, values)

    def _decay(self, tensor: str, values: np.ndarray) -> None:
        self._writer.add_tensor(tensor, -values.astype(np.float32) * np.float32(_SLOWER if self._gain else 1.0))

    def attention(self, i: int) -> None:
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            self._add(f"blk.{i}.{part}.weight", self._n_embd, self._n_embd, scale=1.2 / self._n_embd**0.5)

    def head_norms(self, i: int) -> None:
        self.ones(f"blk.{i}.attn_q_norm.weight", self._head)
        self.ones(f"blk.{i}.attn_k_norm.weight", self._head)

    def gated_attention(self, i: int) -> None:
        """Add the attention of Qwen3.5: the projection of Q gives a gate too."""
        for part, times in (("attn_q", 2), ("attn_k", 1), ("attn_v", 1), ("attn_output", 1)):
            self._add(f"blk.{i}.{part}.weight", times * self._n_embd, self._n_embd, scale=1.2 / self._n_embd**0.5)
        self.head_norms(i)

    def feed_forward(self, i: int, *, gated: bool = True) -> None:
        if gated:
            self._add(f"blk.{i}.ffn_gate.weight", self._n_ff, self._n_embd, scale=1.0 / self._n_embd**0.5)
        self._add(f"blk.{i}.ffn_up.weight", self._n_ff, self._n_embd, scale=1.0 / self._n_embd**0.5)
        self._add(f"blk.{i}.ffn_down.weight", self._n_embd, self._n_ff, scale=1.0 / self._n_ff**0.5)

    def latent_attention(self, i: int, n_head: int, latent: int, rope: int, nope: int, value: int) -> None:
        """Add the attention of DeepSeek 2: one compressed row for K and V of all heads, in sizes of
        `tiny_attention`."""
        scale = 1.0 / self._n_embd**0.5
        self._add(f"blk.{i}.attn_q_a.weight", latent, self._n_embd, scale=scale)
        self.ones(f"blk.{i}.attn_q_a_norm.weight", latent)
        self._add(f"blk.{i}.attn_q_b.weight", n_head * (nope + rope), latent, scale=scale)
        self._add(f"blk.{i}.attn_kv_a_mqa.weight", latent + rope, self._n_embd, scale=scale)
        self.ones(f"blk.{i}.attn_kv_a_norm.weight", latent)
        self._add(f"blk.{i}.attn_k_b.weight", n_head, latent, nope, scale=scale)
        self._add(f"blk.{i}.attn_v_b.weight", n_head, value, latent, scale=scale)
        self._add(f"blk.{i}.attn_output.weight", self._n_embd, n_head * value, scale=scale)

    def experts(self, i: int, n_expert: int, n_ff: int) -> None:
        """Add routed experts and a shared one."""
        scale = 1.0 / self._n_embd**0.5
        self._add(f"blk.{i}.ffn_gate_inp.weight", n_expert, self._n_embd, scale=scale)
        for part, first in (("exps", (n_expert,)), ("shexp", ())):
            self._add(f"blk.{i}.ffn_gate_{part}.weight", *first, n_ff, self._n_embd, scale=scale)
            self._add(f"blk.{i}.ffn_up_{part}.weight", *first, n_ff, self._n_embd, scale=scale)
            self._add(f"blk.{i}.ffn_down_{part}.weight", *first, self._n_embd, n_ff, scale=scale)

    def predict_further(self, i: int) -> None:
        """Make a layer one that predicts a further token."""
        self._add(f"blk.{i}.nextn.eh_proj.weight", self._n_embd, 2 * self._n_embd)
        self.ones(f"blk.{i}.nextn.enorm.weight", self._n_embd)
        self.ones(f"blk.{i}.nextn.hnorm.weight", self._n_embd)

    def mamba(self, i: int, *, normed: bool = False) -> None:
        """Add a Mamba layer; `normed`: with Jamba's norms of the time step, B and C."""
        d_inner = 2 * self._n_embd
        self._add(f"blk.{i}.ssm_in.weight", 2 * d_inner, self._n_embd, scale=1.0 / self._n_embd**0.5)
        self._add(f"blk.{i}.ssm_conv1d.weight", d_inner, D_CONV)
        self._add(f"blk.{i}.ssm_conv1d.bias", d_inner)
        self._add(f"blk.{i}.ssm_x.weight", DT_RANK + 2 * D_STATE, d_inner, scale=1.0 / d_inner**0.5)
        self._add(f"blk.{i}.ssm_dt.weight", d_inner, DT_RANK)
        self._add(f"blk.{i}.ssm_dt.bias", d_inner)
        self._decay(f"blk.{i}.ssm_a", np.tile(np.arange(1, D_STATE + 1), (d_inner, 1)))
        self.ones(f"blk.{i}.ssm_d", d_inner)
        self._add(f"blk.{i}.ssm_out.weight", self._n_embd, d_inner, scale=1.0 / d_inner**0.5)
        if normed:
            self.ones(f"blk.{i}.ssm_dt_norm.weight", DT_RANK)
            self.ones(f"blk.{i}.ssm_b_norm.weight", D_STATE)
            self.ones(f"blk.{i}.ssm_c_norm.weight", D_STATE)

    def mamba2(self, i: int) -> None:
        """Add a Mamba-2 layer of one group, as in Nemotron-H."""
        d_inner = 2 * self._n_embd
        convolved = d_inner + 2 * D_STATE
        self._add(f"blk.{i}.ssm_in.weight", d_inner + convolved + DT_RANK, self._n_embd, scale=1.0 / self._n_embd**0.5)
        self._add(f"blk.{i}.ssm_conv1d.weight", convolved, D_CONV)
        self._add(f"blk.{i}.ssm_conv1d.bias", convolved)
        self._add(f"blk.{i}.ssm_dt.bias", DT_RANK)
        self._decay(f"blk.{i}.ssm_a", np.linspace(0.1, 2.0, DT_RANK, dtype=np.float32).reshape(-1, 1))
        self.ones(f"blk.{i}.ssm_d", DT_RANK, 1)
        self.ones(f"blk.{i}.ssm_norm.weight", 1, d_inner)
        self._add(f"blk.{i}.ssm_out.weight", self._n_embd, d_inner, scale=1.0 / d_inner**0.5)

    def delta_net(self, i: int) -> None:
        """Add a gated delta net of Qwen3.5."""
        d_inner = self.delta_heads * self.delta_dim
        scale = 1.0 / self._n_embd**0.5
        self._add(f"blk.{i}.attn_qkv.weight", 3 * d_inner, self._n_embd, scale=scale)
        self._add(f"blk.{i}.attn_gate.weight", d_inner, self._n_embd, scale=scale)
        self._add(f"blk.{i}.ssm_conv1d.weight", 3 * d_inner, D_CONV)
        self._add(f"blk.{i}.ssm_dt.bias", self.delta_heads)
        self._decay(f"blk.{i}.ssm_a", np.linspace(0.1, 1.0, self.delta_heads, dtype=np.float32))
        self._add(f"blk.{i}.ssm_beta.weight", self.delta_heads, self._n_embd, scale=scale)
        self._add(f"blk.{i}.ssm_alpha.weight", self.delta_heads, self._n_embd, scale=scale)
        self.ones(f"blk.{i}.ssm_norm.weight", self.delta_dim)
        self._add(f"blk.{i}.ssm_out.weight", self._n_embd, d_inner, scale=1.0 / d_inner**0.5)

    def short_convolution(self, i: int) -> None:
        """Add a gated convolution of LFM2: its whole state are the last D_CONV - 1 inputs."""
        scale = 1.0 / self._n_embd**0.5
        self._add(f"blk.{i}.shortconv.conv.weight", self._n_embd, D_CONV)
        self._add(f"blk.{i}.shortconv.in_proj.weight", 3 * self._n_embd, self._n_embd, scale=scale)
        self._add(f"blk.{i}.shortconv.out_proj.weight", self._n_embd, self._n_embd, scale=scale)
