"""ctypes bindings: what llama-cpp-python leaves out, checks of its version, and pinned pools of compute threads.

Importing this module loads libllama, silences its log and loads one CPU module of an engine that has them
(`models.cpu_modules`); nothing is ever printed. All symbols come from libllama's handle, those of the CPU backend from
its module's: opening libggml a second time would map a second copy with its own globals.
"""

from __future__ import annotations

import _ctypes
import collections
import ctypes
import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cpuchat.base.errors import EngineMismatch
from cpuchat.models import kernels
from cpuchat.models.cpu_modules import AUTO, MODULE_VARIABLE, engine_cpu, fastest_first, installed
from cpuchat.protocol.model_info import EngineInfo

PINNED_VERSION: Final = "0.3.36"
ABORT_PREFIX: Final = "CPUCHAT-ABORT: "

_REINSTALL = f"Reinstall llama-cpp-python {PINNED_VERSION} with `make setup`, or reinstall cpuchat."
_LOG_ERROR, _LOG_CONT = 4, 5  # ggml_log_level


def _load_low_level() -> Any:
    """Import `llama_cpp.llama_cpp` without the package's `__init__`.

    That imports its high-level classes (0.4 s) and installs a log callback that prints."""
    name = "llama_cpp.llama_cpp"
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("no module named llama_cpp")
        package = types.ModuleType("llama_cpp")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["llama_cpp"] = package
        try:
            return importlib.import_module(name)
        finally:
            # A later import of the package gets the real one, on the same library.
            del sys.modules["llama_cpp"]
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise EngineMismatch(f"Cannot load the llama.cpp library: {error}.", _REINSTALL) from None


llama: Any = _load_low_level()
_lib: Any = llama._lib
_libc = ctypes.CDLL(None)


def _function(name: str, restype: Any, *argtypes: Any, library: Any = None) -> Any:
    """Return a symbol of libllama or of what it links to, or of another library, with its prototype."""
    try:
        function = (library or _lib)[name]  # indexing creates a new object: the package's own prototype stays unchanged
    except AttributeError:
        raise EngineMismatch(f"This llama.cpp has no function {name}.", _REINSTALL) from None
    function.restype, function.argtypes = restype, list(argtypes)
    return function


class LogTail:
    """Keeps the last lines of llama.cpp's log, for error messages and for what a load did (a dozen lines per layer).

    llama.cpp logs from any thread, also in the middle of a decode: adding must stay one `append`."""

    def __init__(self) -> None:
        self._parts: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=8000)
        append = self._parts.append
        self._callback = llama.llama_log_callback(lambda level, text, _: append((level, text)))

    def install(self) -> None:
        """Redirect llama.cpp's log here. The callback lives as long as this object."""
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def clear(self) -> None:
        self._parts.clear()

    def lines(self, *, errors_only: bool = False) -> list[str]:
        """Return whole lines, oldest first. A part with the level "continued" belongs to the line before it."""
        joined: list[tuple[int, bytes]] = []
        for level, text in tuple(self._parts):
            if joined and (level == _LOG_CONT or not joined[-1][1].endswith(b"\n")):
                joined[-1] = (joined[-1][0], joined[-1][1] + text)
            else:
                joined.append((level, text))
        kept = (t for level, t in joined if level == _LOG_ERROR or not errors_only)
        return [line for t in kept if (line := t.decode("utf-8", "replace").strip())]


log = LogTail()
log.install()  # as early as possible: nothing of llama.cpp's log may reach a terminal


def _open_cpu_module(name: str) -> tuple[Any, str, tuple[str, ...]]:
    """Load a CPU module, which llama.cpp would choose by itself if it found none loaded.

    Args:
        name: `AUTO` for the one with the highest score.

    Returns:
        The library with the CPU backend, the module's name, and the modules that are worth timing on this CPU; for an
        engine built for one CPU libllama, which links to its CPU backend, and no names.

    Raises:
        EngineMismatch: the module is not installed or cannot run here.
    """
    modules = installed()
    if not modules:
        return _lib, "", ()
    scores = {one: _score(file) for one, file in modules.items()}
    worth_timing = fastest_first(scores)
    if not worth_timing:
        raise EngineMismatch("None of the engine's CPU modules runs on this CPU.", _REINSTALL)
    name = worth_timing[0] if name == AUTO else name
    if not scores.get(name):
        what = "does not run on this CPU" if name in modules else "is not installed"
        hint = f"Set engine.cpu_module to auto or one of {', '.join(worth_timing)}."
        raise EngineMismatch(f"The engine's CPU module {name} {what}.", hint)
    load = _function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)
    if not load(os.fsencode(modules[name])):
        said = next(iter(log.lines(errors_only=True)[-1:]), "llama.cpp gave no reason")
        raise EngineMismatch(f"Cannot load the CPU module {name} of the engine: {said}.", _REINSTALL)
    return ctypes.CDLL(str(modules[name])), name, worth_timing


def _score(module: Path) -> int:
    """Return how much of this CPU a module uses; 0 where it cannot run."""
    try:
        library = ctypes.CDLL(str(module))
        score = int(library.ggml_backend_score())
        _ctypes.dlclose(library._handle)
    except (OSError, AttributeError):
        return 0
    return score


class ThreadPoolParams(ctypes.Structure):
    """struct ggml_threadpool_params (ggml/include/ggml.h; GGML_MAX_N_THREADS is 512)."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


_cpu, _module, _worth_timing = _open_cpu_module(os.environ.get(MODULE_VARIABLE) or AUTO)

threadpool_params_default = _function("ggml_threadpool_params_default", ThreadPoolParams, ctypes.c_int)
threadpool_new = _function("ggml_threadpool_new", ctypes.c_void_p, ctypes.POINTER(ThreadPoolParams), library=_cpu)
threadpool_free = _function("ggml_threadpool_free", None, ctypes.c_void_p, library=_cpu)
threadpool_pause = _function("ggml_threadpool_pause", None, ctypes.c_void_p, library=_cpu)
attach_threadpool = _function("llama_attach_threadpool", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
detach_threadpool = _function("llama_detach_threadpool", None, ctypes.c_void_p)
logits_address = _function("llama_get_logits_ith", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
set_hidden_states = _function(
    "_Z26llama_set_embeddings_nextnP13llama_contextbb", None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool
)
hidden_states_address = _function("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.c_void_p, ctypes.c_void_p)
n_layer_nextn = _function("llama_model_n_layer_nextn", ctypes.c_int32, ctypes.c_void_p)
set_layer_inputs = _function(
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool
)
layer_inputs_address = _function(
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
)
hidden_state_address = _function(
    "_Z30llama_get_embeddings_nextn_ithP13llama_contexti", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
)
blck_size = _function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
tensor_bytes = _function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
tensor_type_name = _function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
buffer_name = _function("ggml_backend_buffer_name", ctypes.c_char_p, ctypes.c_void_p)
_buffer_is_host = _function("ggml_backend_buffer_is_host", ctypes.c_bool, ctypes.c_void_p)
_buffer_base = _function("ggml_backend_buffer_get_base", ctypes.c_void_p, ctypes.c_void_p)
_buffer_size = _function("ggml_backend_buffer_get_size", ctypes.c_size_t, ctypes.c_void_p)
_set_abort_hook = _function("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)
_ggml_commit = _function("ggml_commit", ctypes.c_char_p)
ggml_version = _function("ggml_version", ctypes.c_char_p)


def _open_kernels() -> Any:
    """Open cpuchat's kernels against the CPU backend in use, and put them before llama.cpp's: later than the first load
    that has no effect. They take no weights until `kernels.select`.

    Returns:
        The library; None where it is missing, was built for another engine or another cpuchat, or this CPU, or the
        chosen module, lacks the instructions.
    """
    file, instructions = kernels.library(), kernels.instructions_used(engine_cpu(_module or AUTO))
    if file is None or not instructions:
        return None
    # The backend's symbols must be known to the library. By name: the same file under another one would be mapped a
    # second time.
    names = ("libggml-base.so", os.fspath(_cpu._name)) if _module else ("libggml-base.so.0", "libggml-cpu.so.0")
    try:
        for name in names:
            ctypes.CDLL(name, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
        library = ctypes.CDLL(os.fspath(file))
        version = _function("cpuchat_kernels_version", ctypes.c_char_p, library=library)
        formats = _function("cpuchat_kernels_formats", ctypes.c_int, library=library)
        is_known = version() == ggml_version() and formats() == len(kernels.TYPES)
        is_known = is_known and all(
            hasattr(library, f"cpuchat_kernels_{one}") for one in ("select", "prepare", "measure")
        )
        return library if is_known and _register(library, instructions.encode()) else None
    except (OSError, EngineMismatch):
        return None


def _register(library: Any, wanted: bytes | None) -> str:
    """Put the kernels before llama.cpp's, unless that is done; returns their instruction set, "" without one here."""
    register = _function("cpuchat_kernels_register", ctypes.c_char_p, ctypes.c_char_p, library=library)
    return (register(wanted) or b"").decode()


kernels_library: Any = _open_kernels()


def has_function(name: str) -> bool:
    """Return whether the CPU module, libllama, or what they link to, has a function."""
    return hasattr(_cpu, name) or hasattr(_lib, name)


_TENSOR_MAP: Final = "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model"
_PAIR: Final = 40  # bytes of std::pair<std::string, ggml_tensor *> in libstdc++, which ends in the pointer


class _Tensor(ctypes.Structure):
    """The beginning of struct ggml_tensor (ggml/include/ggml.h)."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p))


def _weights(model: Any) -> Iterator[tuple[int, _Tensor]]:
    """Yield the address of each weight tensor, and the tensor; nothing where this build does not export them."""
    if not has_function(_TENSOR_MAP):
        return
    begin, end = _function(_TENSOR_MAP, ctypes.POINTER(ctypes.c_size_t * 2), ctypes.c_void_p)(model).contents
    for pair in range(begin, end, _PAIR):
        address = ctypes.c_size_t.from_address(pair + _PAIR - ctypes.sizeof(ctypes.c_void_p)).value
        tensor = _Tensor.from_address(address)
        if tensor.buffer:
            yield address, tensor


def weights_of(model: Any) -> list[tuple[str, str, int]]:
    """Return the buffer, the type and the bytes of each weight tensor; [] where this build does not export them."""
    return [
        (buffer_name(tensor.buffer).decode(), tensor_type_name(tensor.type).decode(), tensor_bytes(address))
        for address, tensor in _weights(model)
    ]


def lock_copies(model: Any) -> bool:
    """Lock the weights that were repacked or laid out anew into memory, which llama.cpp's mlock leaves out; returns
    whether the system allowed that. They are locked until they are freed."""
    copies = {tensor.buffer for _, tensor in _weights(model) if not _buffer_is_host(tensor.buffer)}
    lock = _function("mlock", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, library=_libc)
    return not any([lock(_buffer_base(one), _buffer_size(one)) for one in copies])


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _write_abort(message: bytes) -> None:
    # The last thing before abort(): one write of the assertion's text, without the build folder.
    text = message.decode("utf-8", "replace").strip().rpartition("/llama.cpp/")[2]
    os.write(2, f"\n{ABORT_PREFIX}{text}\n".encode())


class AbortFlag:
    """Stops a running decode from another thread, within one graph node.

    llama.cpp calls a callback after each node. The callback is libc's `strlen` over a two-byte buffer: it needs no GIL,
    costs nothing, and is non-zero ("abort") once the first byte is set. One flag may serve several contexts."""

    def __init__(self) -> None:
        self._is_final = False
        self._buffer = ctypes.create_string_buffer(2)
        self.callback = ctypes.cast(ctypes.cast(_libc.strlen, ctypes.c_void_p).value or 0, llama.ggml_abort_callback)
        self.data = ctypes.cast(self._buffer, ctypes.c_void_p)

    def set(self) -> None:
        self._buffer[0] = b"\x01"

    def set_permanently(self) -> None:
        """Set the flag permanently; `clear` then does nothing."""
        self._is_final = True
        self.set()

    def clear(self) -> None:
        if not self._is_final:
            self._buffer[0] = b"\x00"

    def is_set(self) -> bool:
        return self._buffer[0] != b"\x00"


# The pinned version's (bytes, last field, its offset) of each struct passed by value.
_STRUCTS: Final = {
    "llama_model_params": (80, "load_mtp", 77),
    "llama_context_params": (160, "ctx_other", 152),
    "llama_batch": (56, "logits", 48),
}
_MODEL_DEFAULTS: Final = {"n_gpu_layers": -1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
_CONTEXT_DEFAULTS: Final = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "n_threads": 4,
    "flash_attn_type": -1,
    "type_k": 1,
    "type_v": 1,
    "no_perf": True,
    "swa_full": True,
}
_POOL_DEFAULTS: Final = {"n_threads": 3, "prio": 0, "poll": 50, "strict_cpu": False, "paused": False}


def check_layout() -> None:
    """Compare struct sizes and default parameters with the pinned ones: a shifted field would silently corrupt memory.
    Raises EngineMismatch: names the first difference."""

    def differs(what: str, got: object, wanted: object) -> EngineMismatch:
        return EngineMismatch(f"Unsupported llama.cpp version: {what} is {got}, expected {wanted}.", _REINSTALL)

    version = installed_version()
    if version != PINNED_VERSION:
        raise differs("llama-cpp-python", version, PINNED_VERSION)
    for name, (size, field, offset) in _STRUCTS.items():
        struct = getattr(llama, name)
        if (found := (ctypes.sizeof(struct), getattr(struct, field).offset)) != (size, offset):
            raise differs(f"(size, offset of {field}) of {name}", found, (size, offset))
    for name, params, defaults in (
        ("llama_model_params", llama.llama_model_default_params(), _MODEL_DEFAULTS),
        ("llama_context_params", llama.llama_context_default_params(), _CONTEXT_DEFAULTS),
        ("ggml_threadpool_params", threadpool_params_default(3), _POOL_DEFAULTS),
    ):
        for field, wanted in defaults.items():
            if getattr(params, field) != wanted:
                raise differs(f"the default of {name}.{field}", getattr(params, field), wanted)


def installed_version() -> str:
    """Return the version of llama-cpp-python, read from its source: `importlib.metadata` takes 15 ms to import."""
    text = Path(llama.__file__).with_name("__init__.py").read_text(encoding="utf-8", errors="replace")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


_started = False


def start() -> None:
    """Initialize llama.cpp: checks, log, abort hook, backend. Calling it again does nothing. Raises EngineMismatch: as
    `check_layout`."""
    global _started
    log.install()
    if _started:
        return
    check_layout()
    _set_abort_hook(ctypes.cast(_write_abort, ctypes.c_void_p))
    llama.llama_backend_init()
    _started = True


def engine_info() -> EngineInfo:
    """Return version, commit, CPU features and kernels of the engine; needs no model. Raises EngineMismatch: as
    `check_layout`."""
    start()
    printed = (llama.llama_print_system_info() or b"").decode("ascii", "replace")
    features = [f.rpartition(":")[2].split("=")[0].strip() for f in printed.split("|") if f.strip().endswith("= 1")]
    commit = (_ggml_commit() or b"").decode("ascii", "replace").removesuffix("-dirty")
    return EngineInfo(
        version=PINNED_VERSION,
        llama_commit=commit,
        features=tuple(features),
        module=_module,
        modules=_worth_timing,
        kernels=_register(kernels_library, None) if kernels_library is not None else "",
        pid=os.getpid(),
    )
