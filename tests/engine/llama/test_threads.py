"""CPUs that threads can be pinned to."""

from __future__ import annotations

import pytest

from cpuchat.engine.drafting.speculation_setup import leave_draft_cores
from cpuchat.engine.llama import threads
from cpuchat.engine.llama.load_plan import _threads
from cpuchat.errors import UsageError
from cpuchat.hardware.topology import Core, Node, Topology
from cpuchat.protocol import LoadOptions


def many_cores(monkeypatch: pytest.MonkeyPatch, allowed: range) -> None:
    """A machine of 768 cores of which this process may use some."""
    everything = tuple(range(768))
    topology = Topology(
        cores=tuple(Core(cpu, (cpu,), 0, 0, None) for cpu in everything),
        nodes=(Node(0, everything, {0: 10}, 0),),
        online=everything,
        allowed=tuple(allowed),
    )
    monkeypatch.setattr(threads, "read_topology", lambda: topology)


def test_threads_that_were_asked_for_are_there_below_the_end_of_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    many_cores(monkeypatch, range(768))
    assert len(_threads(LoadOptions(n_threads=64)).cpus) == 64
    assert _threads(LoadOptions()).cpus == tuple(range(512))
    with pytest.raises(UsageError, match="768 threads cannot be used"):
        _threads(LoadOptions(n_threads=768))
    with pytest.raises(UsageError, match="CPU 600 is not allowed"):
        leave_draft_cores(LoadOptions(draft_path="d.gguf", draft_cores="600-603"))


def test_a_process_that_may_only_use_what_cannot_be_pinned_to(monkeypatch: pytest.MonkeyPatch) -> None:
    many_cores(monkeypatch, range(600, 640))
    for options in (LoadOptions(), LoadOptions(cpus=(600,)), LoadOptions(cores="600")):
        with pytest.raises(UsageError, match="from number 512 on") as caught:
            _threads(options)
        assert "taskset" in caught.value.hint
