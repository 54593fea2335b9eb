"""Hosts a llama-server: `python -m cpuchat.backend.heads.host OPTIONS`, which ends with its standard input.

A server that outlives the app would keep its memory and its cores. So this process stands between: it starts the
llama-server of the PATH, or that of the `xllamacpp` wheel inside itself, and ends it when the pipe from the app closes,
however the app ended; on Linux the server also ends with this process. The only line on standard output is the PID of
the process that computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import msgspec

from cpuchat.backend.heads.server import HOST, KEY_VARIABLE, ServerOptions, arguments, command
from cpuchat.base.decoding import prepared
from cpuchat.models.heads import WHEEL

_ENDING_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; return the exit status of the server."""
    server = msgspec.json.decode(arguments[0], type=prepared(ServerOptions))
    pin(server.cpus)
    return _run_program(server) if server.program else _run_wheel(server)


def pin(cpus: tuple[int, ...]) -> None:
    """Let this process and its children run on these CPUs only, where the system can do that.

    llama.cpp ignored its own mask in some releases, and the threads of its HTTP server have none.
    """
    if sys.platform == "linux" and cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def _run_program(server: ServerOptions) -> int:
    process = subprocess.Popen(
        command(server), stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), preexec_fn=_ending_with_this_process()
    )
    print(process.pid, flush=True)
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    status = process.wait()
    # As the server ended, so that the app can tell a crash from an exit.
    if status < 0:
        with contextlib.suppress(ValueError, OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _ending_with_this_process() -> Callable[[], None] | None:
    """Return what a child calls before it becomes the server; None where a system cannot do that."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    _read_to_end()
    process.terminate()
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _read_to_end() -> None:
    """Wait until the app closes the pipe; not by `sys.stdin`, whose lock Python aborts on when it exits meanwhile."""
    while os.read(0, 4096):
        pass


def _run_wheel(server: ServerOptions) -> int:
    xllamacpp: Any = importlib.import_module(WHEEL)
    print(os.getpid(), flush=True)
    _running = xllamacpp.Server(parameters(server, xllamacpp))
    _read_to_end()
    os._exit(0)  # what runs there has nothing to save


_FIELDS: Final = {
    "--model": "model.path", "--port": "port", "--ctx-size": "n_ctx", "--parallel": "n_parallel",
    "--cache-ram": "cache_ram_mib", "--batch-size": "n_batch", "--ubatch-size": "n_ubatch",
    "--metrics": "endpoint_metrics", "--no-repack": "no_extra_bufts", "--cache-type-k": "cache_type_k",
    "--cache-type-v": "cache_type_v", "--flash-attn": "flash_attn_type", "--load-mode": "load_mode",
    "--spec-type": "speculative.types", "--spec-draft-model": "speculative.draft.mparams.path",
    "--spec-draft-n-max": "speculative.draft.n_max",
}  # fmt: skip
"""What the wheel calls the options of a llama-server."""
_ENUMS: Final = {
    "--cache-type-k": "ggml_type.GGML_TYPE", "--cache-type-v": "ggml_type.GGML_TYPE",
    "--flash-attn": "llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE", "--load-mode": "llama_load_mode.LLAMA_LOAD_MODE",
    "--spec-type": "common_speculative_type.COMMON_SPECULATIVE_TYPE",
}  # fmt: skip
_MEMBERS: Final = {"on": "enabled", "off": "disabled"}
_DEFAULTS: Final = ("f16", "auto")
"""Values that are not set: enumerations may be named otherwise in another version of the wheel."""


def parameters(server: ServerOptions, xllamacpp: Any) -> Any:
    """Return the parameters of the wheel's server for the same `arguments`."""
    params = xllamacpp.CommonParams()
    for option, text in arguments(server).items():
        value: Any = text
        if option in _ENUMS:
            if text in _DEFAULTS:
                continue
            member = _MEMBERS.get(text, text).upper().replace("-", "_").replace("+", "_")
            value = attrgetter(f"{_ENUMS[option]}_{member}")(xllamacpp)
        if option in _FIELDS:
            path, _, name = f".{_FIELDS[option]}".rpartition(".")
            part = attrgetter(path[1:])(params) if path else params
            kind = type(getattr(part, name))
            setattr(part, name, [value] if kind is list else not text or value if kind is bool else kind(value))
    params.endpoint_slots = True
    params.hostnames = [HOST]
    draft = params.speculative.draft
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads, cpu.poll = len(server.cpus), 0
        cpu.cpumask = [number in server.cpus for number in range(len(cpu.cpumask))]
        cpu.mask_valid = cpu.strict_cpu = True
    params.load_mtp = server.kind == "mtp" and not server.head and bool(server.drafting.depth)
    if key := os.environ.get(KEY_VARIABLE):
        params.api_keys = [key]
    return params


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
