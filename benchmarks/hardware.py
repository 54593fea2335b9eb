"""The machine: everything that is measured about seeing and using it, one part after the other.

    python benchmarks/hardware.py [--quick] [--only probe,traffic,reach,telemetry,placement]

Each part is a script of its own and keeps its own results; here they run in turn, on a machine that does nothing else.
The last one needs QEMU (see numa.py) and is left out where that is not there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from common import HERE, MeasureError, arguments, run_main, say

PARTS = {
    "probe": "probe.py",
    "traffic": "traffic.py",
    "reach": "reach.py",
    "telemetry": "telemetry_cost.py",
    "placement": "numa.py",
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")


def main() -> None:
    options = arguments(__doc__, _options)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        raise MeasureError(f"there is no part {', '.join(unknown)}; choose of {', '.join(PARTS)}")
    failed: list[str] = []
    for name in chosen:
        say(f"{name}:")
        command = [sys.executable, str(HERE / PARTS[name]), *(["--quick"] if options.quick else [])]
        if subprocess.run(command).returncode:
            failed.append(name)
    if failed:
        raise MeasureError(", ".join(failed))


if __name__ == "__main__":
    run_main(main)
