"""Tests how much memory a model may take."""

from __future__ import annotations

import pytest

from cpuchat.engine.llama import model
from cpuchat.hardware import memory
from cpuchat.hardware.numa.mempolicy import Policy

GIB = 1 << 30


@pytest.mark.parametrize(
    ("policy", "allowed", "expected"),
    [
        (Policy("bind", (1,)), (0, 1), 3),  # more is killed, whatever node 0 has
        (Policy("preferred", (1,)), (0, 1), 12),
        (Policy("local"), (1,), 3),  # a container on one node
        (None, (), 12),
    ],
)
def test_bound_to_a_node(
    monkeypatch: pytest.MonkeyPatch, policy: Policy | None, allowed: tuple[int, ...], expected: int
) -> None:
    monkeypatch.setattr(model, "current", lambda: policy)
    monkeypatch.setattr(model, "allowed_nodes", lambda: allowed)
    monkeypatch.setattr(memory, "available_bytes", lambda root: 12 * GIB)
    monkeypatch.setattr(memory, "available_on", lambda nodes, root: 3 * GIB if tuple(nodes) == (1,) else None)
    assert model.available_for_model() == expected * GIB
