"""Types that several threads decode into at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import cpuchat

_TWO_THREADS = """
import threading
import msgspec
from cpuchat.base.decoding import prepared

building, go_on = threading.Event(), threading.Event()

def slow() -> type:
    building.set()
    go_on.wait()
    return int

class Inner(msgspec.Struct):
    x: "slow()"

class Outer(msgspec.Struct):
    inner: Inner

def decode() -> None:
    decoded = msgspec.json.decode(b'{"inner": {"x": 1}}', type=prepared(Outer))
    print(f"{decoded}\\n", end="")  # in one write: the threads may print at once

threads = [threading.Thread(target=decode) for _ in range(2)]
threads[0].start()
building.wait()
threads[1].start()
threading.Timer(0.2, go_on.set).start()
for thread in threads:
    thread.join()
"""


def test_two_threads_decode_the_same_struct_for_the_first_time() -> None:
    """msgspec itself ends the process with SIGSEGV there."""
    done = subprocess.run([sys.executable, "-c", _TWO_THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Outer(inner=Inner(x=1))\n" * 2), done.stderr


def test_every_type_that_is_decoded_is_prepared() -> None:
    functions = {
        "msgspec.convert": (1, "type"),
        **{f"msgspec.{kind}.decode": (9, "type") for kind in ("json", "msgpack")},
        **{f"msgspec.{kind}.Decoder": (0, "type") for kind in ("json", "msgpack")},
    }
    bare = []
    for file in Path(cpuchat.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(call, ast.Call) and (place := functions.get(ast.unparse(call.func))) is not None:
                position, keyword = place
                kinds = [*call.args[position : position + 1], *(k.value for k in call.keywords if k.arg == keyword)]
                if any(not ast.unparse(kind).startswith(("prepared(", "str", "Any")) for kind in kinds):
                    bare.append(f"{file.name}:{call.lineno}")
    assert bare == ["decoding.py:" + bare[0].rpartition(":")[2]]  # where they are prepared
