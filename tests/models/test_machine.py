"""Tests what this machine has for a model, from what was measured before: nothing is measured here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.config.settings import Settings, parse
from cpuchat.hardware.memory import total_bytes
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.peak import ReadBandwidth, keep
from cpuchat.models.fit import PROCESS_BYTES, required_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.models.machine import this_machine, unloaded_bytes
from cpuchat.models.synthetic.model import write_model
from cpuchat.protocol.messages import LoadOptions
from tests.hardware.trees import make_tree
from tests.models.library.test_usage import info


def test_memory_that_is_bound_to_a_node_is_that_of_the_node(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    everywhere = this_machine(Settings(), root=root)
    bound = this_machine(parse('[engine]\nmemory_policy = "bind:1"\n'), root=root)
    assert everywhere.available == pytest.approx(0.75 * 512 * 2**30, rel=0.01)
    assert bound.available == everywhere.available // 2
    assert bound.total == everywhere.total
    assert everywhere.cache_bytes == 16 * 32 << 20  # 16 L3 groups
    assert this_machine(parse('[engine]\ncores = "l3:0-1"\n'), root=root).cache_bytes == 64 << 20


def test_what_the_loaded_model_gives_back_is_free(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "tiny", "Q4_0")
    loaded = msgspec.structs.replace(info(path), n_ctx=1024, kv_size=1)
    options = LoadOptions(n_ctx=4096)
    need = required_memory(read_model(path), options, 1024)
    # The pages of the file count as available anyway.
    assert unloaded_bytes(loaded, options) == need.total - need.weights - PROCESS_BYTES
    for locked in (msgspec.structs.replace(options, mlock=True), msgspec.structs.replace(options, load_mode="read")):
        need = required_memory(read_model(path), locked, 1024)
        assert unloaded_bytes(loaded, locked) == need.min_bytes - PROCESS_BYTES
    assert this_machine(Settings(), loaded=loaded).available <= total_bytes()
    path.unlink()
    assert unloaded_bytes(loaded, options) == 1


def test_before_a_probe_passes_cost_what_is_usual_of_such_cores() -> None:
    """Of the cores in the settings."""
    keep(ReadBandwidth(cpus=choose_cores(read_topology(), "auto", 1).cpus, bytes_per_s=25e9, rounds=(25e9,)))
    machine = this_machine(parse("[engine]\nthreads = 1\n"))
    assert this_machine(Settings()).estimated and machine.profile.read_rate(1e12) == pytest.approx(0.85 * 25e9)
    assert machine.source == "85 % of 25, measured, 1 core; passes not measured"
    assert not (machine.fitted or machine.probed)
