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
from typing import Any

import msgspec

from cpuchat.backend.heads.server import HOST, KEY_VARIABLE, ServerOptions, command
from cpuchat.models.heads import WHEEL
from cpuchat.protocol.messages import LoadOptions

_ENDING_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve until standard input ends; return the exit status of the server."""
    server = msgspec.json.decode(arguments[0], type=ServerOptions)
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


def parameters(server: ServerOptions, xllamacpp: Any) -> Any:
    """Return the parameters of the wheel's server: those of `options.command`."""
    params, options = xllamacpp.CommonParams(), server.options
    params.model.path = server.model
    params.hostnames = [HOST]
    params.port = server.port
    params.n_ctx = server.n_ctx
    params.n_parallel = 1
    params.cache_ram_mib = server.cache_mib
    params.n_batch = options.n_batch
    params.n_ubatch = min(options.n_ubatch, options.n_batch)
    draft = params.speculative.draft
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads = len(server.cpus)
        cpu.poll = 0
        cpu.cpumask = [number in server.cpus for number in range(len(cpu.cpumask))]
        cpu.mask_valid = cpu.strict_cpu = True
    params.no_extra_bufts = options.from_disk or not options.use_repack
    params.endpoint_metrics = True
    params.endpoint_slots = True
    _set_types(params, options, xllamacpp)
    if key := os.environ.get(KEY_VARIABLE):
        params.api_keys = [key]
    if server.drafting.depth and server.kind is not None:
        kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{server.kind.upper()}")
        params.speculative.types = [kind]
        params.load_mtp = server.kind == "mtp" and not server.head
        draft.n_max, draft.p_min = server.drafting.depth, server.drafting.min_p
        if server.head:
            draft.mparams.path = server.head
    return params


def _set_types(params: Any, options: LoadOptions, xllamacpp: Any) -> None:
    """Set what is not the default: enumerations of the wheel, which may be named otherwise in another version."""
    modes = {("mmap", True): "MMAP_MLOCK", ("read", False): "NONE", ("read", True): "MLOCK"}
    if mode := modes.get((options.load_mode, options.mlock)):
        params.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{mode}")
    if options.flash_attn != "auto":
        wanted = "ENABLED" if options.flash_attn == "on" else "DISABLED"
        params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{wanted}")
    if options.type_k != "f16":
        params.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options.type_k.upper()}")
    if options.type_v != "f16":
        params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options.type_v.upper()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
