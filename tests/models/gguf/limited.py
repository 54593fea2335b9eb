"""Reads headers with at most 175 MB of memory beside what the program has, and 20 s of CPU time for each.

    python -m tests.models.gguf.limited

Takes paths on standard input, one a line; answers each with `ok` or the name of the typed error and its words. The
system ends it when a header takes more.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

from cpuchat.base.errors import CpuchatError
from cpuchat.models import fit
from cpuchat.models.gguf.header import GGUFHeader, read_header
from cpuchat.models.inspect import inspect
from cpuchat.present.models import sections
from cpuchat.protocol.messages import LoadOptions

_MEMORY = 175_000_000
_SECONDS = 20  # for endless loops: the slowest header takes 0.5 to 1.5 s


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        print(_answer(Path(line.rstrip("\n"))), flush=True)


def _answer(path: Path) -> str:
    try:
        ask_everything(read_header(path))
    except CpuchatError as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "ok"


def ask_everything(header: GGUFHeader) -> None:
    """Call everything that uses a header, however odd its values are."""
    for name in dir(GGUFHeader):
        if isinstance(getattr(GGUFHeader, name), property):
            getattr(header, name)
    assert fit.required_memory(header, LoadOptions(), 4096).total >= 0
    fit.largest_context(header, LoadOptions(), 1 << 34)
    fit.choose_context(header, LoadOptions(), 1 << 34)
    assert sections(inspect(header))


if __name__ == "__main__":
    main()
