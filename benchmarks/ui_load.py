"""A terminal UI in miniature: bursts of computing ten times a second, until stdin closes.

    python benchmarks/ui_load.py DUTY NICE

`DUTY` is the share of one core. At the end it prints, as a JSON list, by how many ms each burst ended later than on an
idle machine: what somebody who types would feel.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

PERIOD = 0.1


class UiLoad:
    """Runs this file as a process while the block runs; `late_ms` afterwards."""

    def __init__(self, duty: float, nice: int) -> None:
        self._command = [sys.executable, __file__, str(duty), str(nice)]
        self.late_ms: list[float] = []

    def __enter__(self) -> UiLoad:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *_exception: object) -> None:
        output = self._process.communicate("")[0]
        self.late_ms = json.loads(output)


def main() -> None:
    duty, nice = float(sys.argv[1]), int(sys.argv[2])
    os.nice(nice)
    print("ready", flush=True)
    late: list[float] = []
    due = time.perf_counter()
    while True:
        due += PERIOD
        if select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
            break
        worked = time.thread_time()
        while time.thread_time() - worked < PERIOD * duty:
            pass
        now = time.perf_counter()
        late.append(1e3 * (now - due - PERIOD * duty))
        due = max(due, now - PERIOD)
    print(json.dumps(late))


if __name__ == "__main__":
    main()
