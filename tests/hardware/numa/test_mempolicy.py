"""Tests memory policies: words, the choice for a machine, and the system calls, real and of simulated kernels."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.hardware.numa import mempolicy
from cpuchat.hardware.numa.mempolicy import Policy, PolicyRefused, choose_policy, parse_policy
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.trees import make_tree

T = TypeVar("T")
INTERLEAVE, BIND, PREFERRED, PREFERRED_MANY, WEIGHTED = 3, 2, 1, 5, 6


def in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work` in a separate thread: a policy belongs to a thread and ends with it."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


class Kernel(mempolicy.LinuxCalls):
    """A kernel with the given nodes; `fails` is the errno of every set."""

    def __init__(self, nodes: Collection[int] = (0, 1), *, fails: int = 0, cannot_ask: int = 0) -> None:
        self.there = set(nodes)
        self.fails, self.cannot_ask = fails, cannot_ask
        self.policy: tuple[int, tuple[int, ...]] = (0, ())

    def set(self, mode: int, nodes: Collection[int]) -> None:
        if self.fails:
            raise OSError(self.fails, os.strerror(self.fails))
        kept = tuple(sorted(self.there & set(nodes)))
        if bool(mode) != bool(kept):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.policy = (mode, kept)

    def get(self, flags: int = 0) -> tuple[int, tuple[int, ...]]:
        if self.cannot_ask:
            raise OSError(self.cannot_ask, os.strerror(self.cannot_ask))
        return (0, tuple(sorted(self.there))) if flags else self.policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("local", Policy("local")),
        ("interleave", Policy("interleave")),
        (" interleave:0-2,5 ", Policy("interleave", (0, 1, 2, 5))),
        ("bind:1", Policy("bind", (1,))),
        ("preferred:0", Policy("preferred", (0,))),
    ],
)
def test_words(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(policy.words) == policy


@pytest.mark.parametrize(
    "text", ["", "auto", "bind", "bind:x", "bind:1-", "bind:3-1", "bind:12345", "local:0", "weighted"]
)
def test_wrong_words_say_what_is_possible(text: str) -> None:
    with pytest.raises(UsageError, match=r"Use auto, local|Use the form 0-3,8"):
        parse_policy(text)


def dual(tmp_path: Path) -> Topology:
    """Two sockets of 32 cores, one node each: CPUs 0-31 and their siblings 64-95 on node 0."""
    return read_topology(make_tree(tmp_path, "2x-epyc-7543"), allowed=range(128))


def test_auto_interleaves_over_the_nodes_of_the_cores_and_stays_near_those_of_one(tmp_path: Path) -> None:
    topology = dual(tmp_path)
    policy, reason = choose_policy(topology)
    assert policy == Policy("interleave", (0, 1)) and "2 nodes" in reason
    policy, reason = choose_policy(topology, "auto", range(32, 64))
    assert policy == Policy("preferred", (1,)) and "node 1" in reason  # wherever the file is read from
    assert choose_policy(topology, "interleave")[0] == Policy("interleave", (0, 1))
    assert choose_policy(topology, "bind:1")[0] == Policy("bind", (1,))
    assert choose_policy(topology, "local")[0] == Policy("local")


def test_auto_on_one_node_does_nothing(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9654"), allowed=range(192))
    policy, reason = choose_policy(topology)
    assert policy == Policy("local")
    assert "one NUMA node" in reason
    # Words that need several nodes mean the same there; a node that is not there is still wrong.
    assert choose_policy(topology, "interleave")[0] == Policy("local")
    assert choose_policy(topology, "bind:0")[0] == Policy("local")
    with pytest.raises(UsageError, match=r"Node 1 has no memory available to this process\. Available nodes: 0"):
        choose_policy(topology, "bind:1")


def test_nodes_without_memory_or_not_allowed_get_none(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    (root / "sys/devices/system/node/node1/meminfo").write_text("Node 1 MemTotal:       0 kB\n")
    topology = read_topology(root, allowed=range(128))
    assert choose_policy(topology)[0] == Policy("local")
    with pytest.raises(UsageError, match="Nodes 1-2 have no memory"):
        choose_policy(topology, "interleave:0-2")


@pytest.mark.parametrize(
    ("text", "number", "nodes"),
    [
        ("interleave", INTERLEAVE, (0, 1)),
        ("bind:1", BIND, (1,)),
        ("preferred:1", PREFERRED, (1,)),
        ("preferred:0-1", PREFERRED_MANY, (0, 1)),
        ("local", 0, ()),
    ],
)
def test_what_the_kernel_is_told(text: str, number: int, nodes: tuple[int, ...]) -> None:
    kernel = Kernel()
    mempolicy.apply(parse_policy(text), kernel)
    assert kernel.policy == (number, nodes)
    assert mempolicy.current(kernel).words == ("interleave:0-1" if text == "interleave" else text)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EPERM, "not permitted here.* --cap-add SYS_NICE"),
        (errno.ENOSYS, "has no memory policies"),
        (errno.ENOMEM, "rejected the memory policy: Cannot allocate memory"),
    ],
)
def test_refusals_say_why_and_what_to_do(number: int, message: str) -> None:
    with pytest.raises(PolicyRefused, match=message):
        mempolicy.apply(Policy("bind", (0,)), Kernel(fails=number))


def test_nodes_that_the_kernel_drops_are_a_refusal_that_leaves_nothing_behind() -> None:
    kernel = Kernel((0, 1))
    with pytest.raises(PolicyRefused, match=r"nodes 2-3 are missing or not allowed\. Available nodes: 0-1"):
        mempolicy.apply(Policy("interleave", (0, 1, 2, 3)), kernel)
    assert kernel.policy == (0, ())


@pytest.mark.parametrize("mode", ["bind", "interleave", "preferred"])
def test_this_kernel_takes_and_tells_a_policy(mode: mempolicy.Mode) -> None:
    node = mempolicy.allowed_nodes()[0]

    def work() -> Policy | None:
        mempolicy.apply(Policy(mode, (node,)))
        return mempolicy.current()

    assert in_thread(work) == Policy(mode, (node,))
    assert mempolicy.current() == in_thread(mempolicy.current)
