"""NUMA memory policies: on which nodes the kernel places what a process allocates or reads in first.

System calls set_mempolicy(2) and get_mempolicy(2); modes and flags from include/uapi/linux/mempolicy.h, meaning from
Documentation/admin-guide/mm/numa_memory_policy.rst. A policy belongs to a thread, is inherited over fork and exec, and
counts only for what is allocated after it was set. No privilege is needed, but containers often block both calls.

So this module is also a program that sets a policy and becomes another one, whose process id stays the same:

    python -m cpuchat.hardware.numa.mempolicy --memory interleave -- PROGRAM ARGUMENT...

The same by hand: `numactl --interleave=all PROGRAM ARGUMENT...`. A refusal does not keep the program from starting; it
finds the reason in its environment. Every worker of a machine with several nodes is started so: nothing slow to import.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.processes import python_command
from cpuchat.hardware.lists import LIST, format_cpu_list, parse_cpu_list

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology


Mode = Literal["local", "interleave", "bind", "preferred"]

# Linux: MPOL_*. "preferred" with several nodes is PREFERRED_MANY (Linux 5.15), with one the older PREFERRED.
_DEFAULT, _PREFERRED, _BIND, _INTERLEAVE, _LOCAL, _PREFERRED_MANY, _WEIGHTED = range(7)
_MODES: dict[int, Mode] = {
    _DEFAULT: "local",
    _PREFERRED: "preferred",
    _BIND: "bind",
    _INTERLEAVE: "interleave",
    _LOCAL: "local",
    _PREFERRED_MANY: "preferred",
    _WEIGHTED: "interleave",  # of numactl: in another ratio
}
# MPOL_F_STATIC_NODES, MPOL_F_RELATIVE_NODES and MPOL_F_NUMA_BALANCING come in the same number as the mode.
_MODE_FLAGS = (1 << 15) | (1 << 14) | (1 << 13)
_MEMS_ALLOWED = 1 << 2
# get_mempolicy(2) wants room for every node the kernel could know; 1024 is the most it can be built for.
_MASK_BITS = 1024
_WORD = 64
# arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/unistd.h for the others: (get, set).
SYSTEM_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237), "riscv64": (236, 237)}

_EXAMPLES = "Use auto, local, interleave, bind:0 or preferred:0 (node lists such as 0-1)."


class PolicyRefused(CpuchatError, code="policy_refused"):
    """Raised when the kernel rejected a memory policy; memory is placed as before."""


class Policy(NamedTuple):
    """Where memory is placed. `nodes` empty: all that this process may use (interleave only).

    local: on the node of the CPU that touches it first. interleave: page by page over `nodes` in turn. bind: only on
    `nodes`. preferred: on `nodes` while they have room."""

    mode: Mode
    nodes: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        return f"{self.mode}:{format_cpu_list(self.nodes)}" if self.nodes else self.mode

    @property
    def bound(self) -> tuple[int, ...]:
        """Return the nodes that memory may be on; () where it may be on any."""
        return self.nodes if self.mode == "bind" else ()

    @property
    def places(self) -> bool:
        """Return whether the policy differs from first touch."""
        return self.mode != "local"


class LinuxCalls:
    """The two system calls of the running kernel; both raise OSError. The C library has no wrappers for them (libnuma
    has). Tests put simulated kernels in its place."""

    def __init__(self) -> None:
        import ctypes

        machine = os.uname().machine if sys.platform == "linux" and sys.maxsize > 1 << 32 else ""
        if machine not in SYSTEM_CALLS:
            import errno

            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._get, self._set = SYSTEM_CALLS[machine]
        self._ctypes = ctypes
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    def _check(self, result: int) -> None:
        if result < 0:
            number = self._ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def set(self, mode: int, nodes: Collection[int]) -> None:
        long = self._ctypes.c_ulong
        if not nodes:
            self._check(self._syscall(self._set, mode, None, long(0)))
            return
        bits = sum(1 << node for node in set(nodes) if node < _MASK_BITS)
        words = (long * (_MASK_BITS // _WORD))(*(bits >> shift & (1 << _WORD) - 1 for shift in _shifts()))
        # The kernel uses one bit less than `maxnode`.
        self._check(self._syscall(self._set, mode, words, long(_MASK_BITS + 1)))

    def get(self, flags: int = 0) -> tuple[int, tuple[int, ...]]:
        """Return the mode's number (with its flags) and the nodes, ascending."""
        ctypes = self._ctypes
        mode, words = ctypes.c_int(0), (ctypes.c_ulong * (_MASK_BITS // _WORD))()
        result = self._syscall(
            self._get, ctypes.byref(mode), words, ctypes.c_ulong(_MASK_BITS + 1), None, ctypes.c_ulong(flags)
        )
        self._check(result)
        bits = sum(word << shift for word, shift in zip(words, _shifts(), strict=True))
        return mode.value, tuple(node for node in range(bits.bit_length()) if bits >> node & 1)


def _shifts() -> range:
    return range(0, _MASK_BITS, _WORD)


def parse_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as ascending numbers. Raises UsageError: anything else, an empty list, a number over four digits."""
    numbers = parse_cpu_list(text) if re.fullmatch(LIST, text) else ()
    if not numbers:
        raise UsageError(f'Invalid list: "{text}".', "Use the form 0-3,8.")
    return numbers


def parse_policy(text: str) -> Policy:
    """Parse a policy such as "interleave", "interleave:0-1" or "bind:0" ("auto" is handled by `choose_policy`). Raises
    UsageError: unknown words, nodes where none belong or none where they are needed."""
    mode, colon, nodes = text.strip().partition(":")
    match mode:
        case "local" if not colon:
            return Policy("local")
        case "interleave":
            return Policy(mode, parse_list(nodes) if colon else ())
        case "bind" | "preferred" if colon:
            return Policy(mode, parse_list(nodes))
    raise UsageError(f'Unknown memory policy: "{text}".', _EXAMPLES)


def choose_policy(topology: Topology, words: str = "auto", cpus: Collection[int] = ()) -> tuple[Policy, str]:
    """Resolve `words` to a policy with explicit nodes on this machine, and one sentence why.

    `cpus` are the logical CPUs that will compute (empty: all that are allowed). "auto": nothing on one node; near
    `cpus` when they all sit on one of several; else interleaved over the nodes of `cpus`, so that every core reads all
    memory controllers. Raises UsageError: unknown words, or nodes that are not there, have no memory or are not
    allowed."""
    allowed = topology.allowed_nodes or [node.number for node in topology.nodes]
    usable = tuple(node.number for node in topology.nodes if node.memory and node.number in allowed)
    wanted = None if words == "auto" else parse_policy(words)
    if wanted is not None and (missing := [node for node in wanted.nodes if node not in (usable or (0,))]):
        what = f"Node {missing[0]} has" if len(missing) == 1 else f"Nodes {format_cpu_list(missing)} have"
        hint = f"Available nodes: {format_cpu_list(usable or (0,))}."
        raise UsageError(f"{what} no memory available to this process.", hint)
    if len(usable) <= 1:
        return Policy("local"), "one NUMA node, nothing to place"
    if wanted is not None:
        nodes = wanted.nodes or (usable if wanted.mode == "interleave" else ())
        return Policy(wanted.mode, nodes), "set in the settings"
    near = sorted({node for cpu in cpus or topology.allowed if (node := topology.node_of(cpu)) is not None})
    nodes = tuple(node for node in near if node in usable)
    if len(near) == 1 and nodes:
        # Not "local": the thread that reads the file in may run on another node than those that compute.
        return Policy("preferred", nodes), f"all cores in use are on node {nodes[0]}"
    if len(nodes) < 2:
        return Policy("interleave", usable), "the nodes of the cores in use have no memory of their own"
    reason = f"cores of {len(nodes)} nodes read the weights, so they are spread over all of them"
    return Policy("interleave", nodes), reason


def apply(policy: Policy, calls: LinuxCalls | None = None) -> None:
    """Set the calling thread's policy, all of it or nothing; programs it starts and threads made later inherit it.
    Raises PolicyRefused: the kernel, a container or the platform does not allow it, or a node is not there."""
    try:
        calls = calls or LinuxCalls()
        nodes = policy.nodes or (allowed_nodes(calls) if policy.mode == "interleave" else ())
        number = next(number for number, mode in _MODES.items() if mode == policy.mode)
        calls.set(_PREFERRED_MANY if policy.mode == "preferred" and len(nodes) > 1 else number, nodes)
        # The kernel refuses nodes that don't exist only when it is left with none; else it drops them silently.
        kept = calls.get()[1]
        if set(nodes) - set(kept):
            calls.set(_DEFAULT, ())
            raise _no_such_node(sorted(set(nodes) - set(kept)), kept)
    except OSError as error:
        raise _refusal(policy, error) from error


def current(calls: LinuxCalls | None = None) -> Policy | None:
    """Return the calling thread's policy; None where that can't be asked."""
    try:
        mode, nodes = (calls or LinuxCalls()).get()
    except OSError:
        return None
    name = _MODES.get(mode & ~_MODE_FLAGS)
    # Linux before 5.14 says "preferred, no node" for local.
    return None if name is None else Policy(name, nodes) if name != "local" and nodes else Policy("local")


def allowed_nodes(calls: LinuxCalls | None = None) -> tuple[int, ...]:
    """Return nodes from which this thread may get memory; () where that can't be asked."""
    try:
        return (calls or LinuxCalls()).get(_MEMS_ALLOWED)[1]
    except OSError:
        return ()


def _no_such_node(missing: list[int], there: Collection[int]) -> PolicyRefused:
    name = f"node {missing[0]} is" if len(missing) == 1 else f"nodes {format_cpu_list(missing)} are"
    hint = f"Available nodes: {format_cpu_list(there)}." if there else ""
    return PolicyRefused(f"The kernel rejected the memory policy: {name} missing or not allowed.", hint)


def _refusal(policy: Policy, error: OSError) -> PolicyRefused:
    import errno

    if sys.platform != "linux":
        return PolicyRefused("Memory policies are supported on Linux only.", "Set engine.memory_policy to local.")
    match error.errno:
        case errno.EPERM | errno.EACCES:
            return PolicyRefused(
                "Setting a memory policy is not permitted here, as in most containers.",
                "Start the container with --cap-add SYS_NICE, or set engine.memory_policy to local.",
            )
        case errno.ENOSYS:
            return PolicyRefused("This kernel has no memory policies.", "Set engine.memory_policy to local.")
        case errno.EINVAL if policy.nodes:
            return _no_such_node(list(policy.nodes), ())
    return PolicyRefused(
        f"The kernel rejected the memory policy: {error.strerror or error}.", "Set engine.memory_policy to local."
    )


MEMORY = "CPUCHAT_MEMORY"
MEMORY_REFUSED = "CPUCHAT_MEMORY_REFUSED"


def launch_command(words: str, argv: Sequence[str]) -> list[str]:
    """Return the command to run `argv` under the policy `words`, if it needs one. Raises UsageError: unknown words."""
    if sys.platform != "linux" or not (policy := parse_policy(words)).places:
        return list(argv)
    return python_command("-m", "cpuchat.hardware.numa.mempolicy", "--memory", policy.words, "--", *argv)


def in_effect() -> tuple[str, str]:
    """Return the policy that this process runs under, in words, and why it is not the one asked for.

    "" for the policy where the kernel does not tell, "" for the reason when nothing was refused."""
    policy = current()
    return policy.words if policy else os.environ.get(MEMORY, ""), os.environ.get(MEMORY_REFUSED, "")


def main(arguments: Sequence[str]) -> int:
    """Set the policy and become the program, whose environment tells which it has, or why not. Returns only where the
    program cannot be started: 126 or 127, as a shell would."""
    _, words, _, *program = arguments
    os.environ.pop(MEMORY_REFUSED, None)
    try:
        apply(parse_policy(words))
    except PolicyRefused as refused:
        os.environ[MEMORY_REFUSED] = str(refused)
    now = current()
    os.environ[MEMORY] = now.words if now else ""
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
