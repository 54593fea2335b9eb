"""Starts a program under a NUMA memory policy, without privileges and without numactl.

    python -m cpuchat.hardware.numa.launch --memory interleave -- PROGRAM ARGUMENT...

A policy has to be set before a program allocates anything, so it is set here and inherited over exec (the process id
stays the same). A refusal does not keep the program from starting; it finds the reason in its environment.
The same by hand: `numactl --interleave=all PROGRAM ARGUMENT...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.processes import python_command
from cpuchat.hardware.numa.mempolicy import Calls, apply, current, parse_policy

MEMORY = "CPUCHAT_MEMORY"
MEMORY_REFUSED = "CPUCHAT_MEMORY_REFUSED"
_USAGE = "python -m cpuchat.hardware.numa.launch --memory POLICY -- PROGRAM [ARGUMENT...]"


def launch_command(words: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` under the policy `words`; `argv` itself where none is needed.

    Raises:
        UsageError: unknown words ("auto" is for `placement.place` to decide).
    """
    if sys.platform != "linux":
        return list(argv)
    policy = parse_policy(words)
    if not policy.places:
        return list(argv)
    return python_command("-m", "cpuchat.hardware.numa.launch", "--memory", policy.words, "--", *argv)


def in_effect(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the policy that this process runs under, in words, and why it is not the one asked for.

    "" for the policy where the kernel does not tell, "" for the reason when nothing was refused.
    """
    policy = current()
    return policy.words if policy else environ.get(MEMORY, ""), environ.get(MEMORY_REFUSED, "")


def prepare(memory: str, environ: MutableMapping[str, str], *, calls: Calls | None = None) -> None:
    """Set the policy of this process and write into `environ` which one it has, and why if it was refused.

    Raises:
        UsageError: words that are no policy.
    """
    policy = parse_policy(memory)
    environ.pop(MEMORY_REFUSED, None)
    try:
        apply(policy, calls)
    except CpuchatError as refused:
        environ[MEMORY_REFUSED] = str(refused)
    now = current(calls)
    environ[MEMORY] = now.words if now else ""


def main(arguments: Sequence[str], execute: Callable[[str, list[str]], object] = os.execvp) -> int:
    """Exec the program; returns only on failure: 2 for wrong arguments, 126 or 127 as a shell would."""
    if len(arguments) < 4 or arguments[0] != "--memory" or arguments[2] != "--":
        print(f"usage: {_USAGE}", file=sys.stderr)
        return 2
    try:
        prepare(arguments[1], os.environ)
    except UsageError as error:
        print(f"{error}\nusage: {_USAGE}", file=sys.stderr)
        return 2
    program = list(arguments[3:])
    try:
        execute(program[0], program)
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
