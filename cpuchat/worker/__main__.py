"""Entry of the inference process.

File descriptor 1 carries protocol frames and nothing else, so before any library is loaded it is moved away and C-level
stdout is pointed at stderr, which the parent keeps as a log file.
"""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    gc.disable()  # until the engine is imported, which makes next to no garbage
    output = os.dup(1)  # not inheritable
    os.dup2(2, 1)
    # Ctrl+C in the terminal goes to the whole process group; only the UI decides what it means.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from cpuchat.worker.server import serve

    return serve(sys.stdin.fileno(), output)


if __name__ == "__main__":
    sys.exit(main())
