"""One model over several machines by llama.cpp's RPC: what the network between them costs.

The machine with the chat holds the first layers, the embedding and the output; each worker some of the others. They
compute one after the other, so a pass takes as long as on one machine that holds all of it, and the network on top.
"""

from __future__ import annotations

import msgspec

from cpuchat.costmodel.passes import MICRO_BATCH
from cpuchat.costmodel.usual import Figure
from cpuchat.planner.machine_specs import MachineSpec

ROUND_TRIP_S = 2e-4
"""Of a request in a wired network, switch and both kernels included; 10 GbE takes half of it."""
_REQUESTS = 5120
"""Bytes of a pass's requests to a worker. Measured with llama.cpp 0.5.0-dev through a proxy that counts, beside the
rest: 3.2 kB for a token of a model of width 256, 4.7 kB for one of width 896 (12 layers there)."""
_STATE_BYTES = 4
_MASK_BYTES = 2


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """`machines` alike that hold one model, and `gbit` per second between them."""

    machines: int
    gbit: float = 1.0

    @property
    def workers(self) -> int:
        return self.machines - 1

    def seconds(self, width: int, n_tokens: float, n_past: float) -> float:
        """Return what it adds to a pass over `n_tokens` tokens of a model with hidden states of `width` values."""
        return self.workers * (ROUND_TRIP_S + 8 * traffic(width, n_tokens, n_past) / (1e9 * self.gbit))

    def prompt_seconds(self, width: int, n_prompt: int) -> float:
        """Return what it adds to the evaluation of a prompt, in micro-batches."""
        starts = range(0, n_prompt, MICRO_BATCH)
        return sum(self.seconds(width, min(MICRO_BATCH, n_prompt - start), start) for start in starts)


def traffic(width: int, n_tokens: float, n_past: float) -> float:
    """Return the bytes between the machine with the chat and one worker in a pass: a hidden state for each token there
    and back, the attention mask, and requests."""
    each = 2 * _STATE_BYTES * width + _MASK_BYTES * (n_past + n_tokens)
    return n_tokens * each + _REQUESTS


def combined(machine: MachineSpec, network: Network) -> MachineSpec:
    """Return the machines as one with the memory and the price of all of them. Their power is not known: one computes
    while the others wait."""
    n = network.machines

    def times(one: Figure | None) -> Figure | None:
        return one and msgspec.structs.replace(one, value=n * one.value, low=n * one.low, high=n * one.high)

    return msgspec.structs.replace(
        machine,
        name=f"{n} × {machine.name}",
        memory_gb=times(machine.memory_gb),
        free_gb=times(machine.free_gb),
        price_usd=times(machine.price_usd),
        usd_per_hour=times(machine.usd_per_hour),
        watts=None,
    )
