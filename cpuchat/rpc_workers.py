"""RPC workers: llama.cpp's rpc-server on other machines, each of which holds some layers of one model."""

from __future__ import annotations

import re
import shutil

from cpuchat.errors import EngineMissing, UsageError

PORT = 50052
"""llama.cpp's own default."""
PROGRAMS = ("ggml-rpc-server", "rpc-server")
"""The program's name in new and in old builds of llama.cpp."""
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+)(:(?P<port>\d{1,5}))?")  # llama.cpp splits at the colon: no IPv6


def parse_workers(text: str) -> tuple[str, ...]:
    """Return the addresses in `HOST:PORT,HOST,…`, each with its port. Raises UsageError."""
    found: list[str] = []
    for one in filter(None, map(str.strip, text.split(","))):
        match = _ADDRESS.fullmatch(one)
        port = int(match["port"] or PORT) if match is not None else 0
        if match is None or not 0 < port < 65536:
            raise UsageError(f"{one} is not the address of an RPC worker.", "Write HOST or HOST:PORT.")
        found.append(f"{match['host']}:{port}")
    return tuple(dict.fromkeys(found))


def find_worker_program() -> str:
    """Return the path of the rpc-server to start. Raises EngineMissing."""
    for name in PROGRAMS:
        if program := shutil.which(name):
            return program
    raise EngineMissing(
        f"There is no {PROGRAMS[0]} on PATH.",
        "Build llama.cpp with `cmake -DGGML_RPC=ON`, and put its bin folder on PATH.",
    )
