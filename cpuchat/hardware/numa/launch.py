"""Starts a program under a memory policy and on chosen CPUs, without privileges and without numactl.

    python -m cpuchat.hardware.numa.launch --memory interleave [--cpus 0-7] -- PROGRAM ARGUMENT...

A policy has to be set before a program allocates anything, so it is set here and inherited over exec (the process id
stays the same). What is refused does not keep the program from starting; it finds the reasons in its environment.
The same by hand: `numactl --interleave=all -C 0-7 PROGRAM ARGUMENT...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from cpuchat.children import python_command
from cpuchat.errors import CpuchatError, UsageError
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.numa.mempolicy import (
    Calls,
    Policy,
    apply,
    choose_policy,
    current,
    parse_list,
    parse_policy,
)

MEMORY = "CPUCHAT_MEMORY"
MEMORY_REFUSED = "CPUCHAT_MEMORY_REFUSED"
CPUS_REFUSED = "CPUCHAT_CPUS_REFUSED"
_USAGE = "python -m cpuchat.hardware.numa.launch --memory WORDS [--cpus LIST] -- PROGRAM [ARGUMENT...]"


def launch_command(words: str, argv: Sequence[str], *, root: str = "/") -> list[str]:
    """The command that runs `argv` under the policy `words` ("auto" included); `argv` itself where none is needed.

    "auto" keeps a policy that this process was started under (by numactl).

    Raises:
        UsageError: unknown words, or ("auto" never) nodes that are not there.
    """
    if sys.platform != "linux":
        return list(argv)
    policy = _automatic(root) if words == "auto" else parse_policy(words)
    if not policy.places:
        return list(argv)
    return python_command("-m", "cpuchat.hardware.numa.launch", "--memory", policy.words, "--", *argv)


def _automatic(root: str = "/") -> Policy:
    # Most machines have one node. One small file tells, where the topology and system calls take a while to load.
    if len(parse_cpu_list(_text(f"{root}/sys/devices/system/node/has_memory"))) < 2:
        return Policy("local")
    inherited = current()
    if inherited is None or inherited.places:
        return Policy("local")
    from cpuchat.hardware.topology import read_topology

    return choose_policy(read_topology())[0]


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - pathlib takes longer to load than all of this
            return file.read()
    except OSError:
        return ""


def in_effect(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """For a program started by this module: the words of the policy it runs under and why it is not the one asked for.

    "" for the words where nobody knows, "" for the reason when nothing was refused.
    """
    policy = current()
    return policy.words if policy else environ.get(MEMORY, ""), environ.get(MEMORY_REFUSED, "")


def prepare(
    memory: str,
    cpus: str,
    environ: MutableMapping[str, str],
    *,
    calls: Calls | None = None,
    set_affinity: Callable[[int, tuple[int, ...]], None] | None = None,
) -> None:
    """Set policy and affinity of this process ("": leave as it is) and write into `environ` what came of it.

    Raises:
        UsageError: words that mean nothing.
    """
    for name in (MEMORY, MEMORY_REFUSED, CPUS_REFUSED):
        environ.pop(name, None)
    if memory:
        try:
            apply(parse_policy(memory), calls)
        except UsageError:
            raise
        except CpuchatError as refused:
            environ[MEMORY_REFUSED] = str(refused)
        policy = current(calls)
        environ[MEMORY] = policy.words if policy else ""
    if cpus:
        wanted = parse_list(cpus)
        try:
            (set_affinity or os.sched_setaffinity)(0, wanted)
        except (OSError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else "this system cannot pin processes"
            environ[CPUS_REFUSED] = f"CPUs {format_cpu_list(wanted)} cannot be used: {why}."


def main(arguments: Sequence[str], execute: Callable[[str, list[str]], object] = os.execvp) -> int:
    """Become the program; returns only when that can't be: 2 for wrong arguments, 126 or 127 as a shell would."""
    options = {"--memory": "", "--cpus": ""}
    rest = list(arguments)
    while len(rest) > 1 and rest[0] in options:
        options[rest[0]] = rest[1]
        del rest[:2]
    if len(rest) < 2 or rest[0] != "--":
        print(f"usage: {_USAGE}", file=sys.stderr)
        return 2
    try:
        prepare(options["--memory"], options["--cpus"], os.environ)
    except UsageError as error:
        print(f"{error}\nusage: {_USAGE}", file=sys.stderr)
        return 2
    try:
        execute(rest[1], rest[1:])
    except OSError as error:
        print(f"{rest[1]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
