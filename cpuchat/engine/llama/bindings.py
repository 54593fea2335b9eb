"""ctypes bindings: what llama-cpp-python leaves out, checks of its version, and pinned pools of compute threads.

Importing this module loads libllama, silences its log and loads one CPU module of an engine that has them
(`models.cpu_modules`). All symbols come from libllama's handle, those of the CPU backend from its module's: opening
libggml a second time would map a second copy with its own globals.
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
from ctypes import c_bool, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, Final

from cpuchat.base.errors import EngineMismatch
from cpuchat.hardware.placement.placement import MAX_CPUS
from cpuchat.models import kernels
from cpuchat.models.cpu_modules import AUTO, MODULE_VARIABLE, engine_cpu, fastest_first, installed
from cpuchat.models.engine_version import (
    CXX_NAMES,
    DEFAULTS,
    GGML_VERSION,
    LOG_CONTINUED,
    LOG_ERROR,
    PINNED_VERSION,
    STRUCTS,
    TENSOR_PAIR,
)
from cpuchat.protocol.model_info import EngineInfo

ABORT_PREFIX: Final = "CPUCHAT-ABORT: "

_REINSTALL = (
    "Unset LLAMA_CPP_LIB_PATH, which names the folder of another llama.cpp."
    if "LLAMA_CPP_LIB_PATH" in os.environ
    else f"Reinstall llama-cpp-python {PINNED_VERSION} with `make setup`, or reinstall cpuchat."
)


def _load_low_level() -> Any:
    """Import `llama_cpp.llama_cpp` without its package, which takes 0.4 s and installs a log callback that prints."""
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


def _symbol(name: str) -> str:
    """Return the symbol of a function: its name in C, or the one that C++ gives it."""
    return name if hasattr(_lib, name) else CXX_NAMES.get(name, name)


def _function(name: str, restype: Any, *argtypes: Any, library: Any = None) -> Any:
    """Return a function of libllama or of what it links to, or of another library, with its prototype."""
    try:
        # Indexing creates a new object: the package's own prototype stays unchanged.
        function = (library or _lib)[_symbol(name)]
    except AttributeError:
        raise EngineMismatch(f"This llama.cpp has no function {name}.", _REINSTALL) from None
    function.restype, function.argtypes = restype, list(argtypes)
    return function


class LogTail:
    """Keeps the last lines of llama.cpp's log, for error messages and for what a load did (a dozen lines per layer).
    Any thread logs, also in the middle of a decode: adding must stay one `append`."""

    def __init__(self) -> None:
        self._parts: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=8000)
        append = self._parts.append
        self._callback = llama.llama_log_callback(lambda level, text, _: append((level, text)))

    def install(self) -> None:
        """Redirect llama.cpp's log here. The callback lives as long as this object."""
        llama.llama_log_set(self._callback, c_void_p(0))

    def clear(self) -> None:
        self._parts.clear()

    def lines(self, *, errors_only: bool = False) -> list[str]:
        """Return whole lines, oldest first. A part with the level "continued" belongs to the line before it."""
        joined: list[tuple[int, bytes]] = []
        for level, text in tuple(self._parts):
            if joined and (level == LOG_CONTINUED or not joined[-1][1].endswith(b"\n")):
                joined[-1] = (joined[-1][0], joined[-1][1] + text)
            else:
                joined.append((level, text))
        kept = (t for level, t in joined if level == LOG_ERROR or not errors_only)
        return [line for t in kept if (line := t.decode("utf-8", "replace").strip())]


log = LogTail()
log.install()  # as early as possible: nothing of llama.cpp's log may reach a terminal


def _open_cpu_module(name: str) -> tuple[Any, str, tuple[str, ...]]:
    """Load the CPU module `name`, or for `AUTO` the one with the highest score, as llama.cpp would. Returns the library
    with the CPU backend, the module's name, and the modules worth timing on this CPU; for an engine built for one CPU
    libllama, and no names. Raises EngineMismatch: the module is not installed or cannot run here."""
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
    load = _function("ggml_backend_load", c_void_p, c_char_p)
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
    """struct ggml_threadpool_params (ggml/include/ggml.h)."""

    _fields_ = (
        ("cpumask", c_bool * MAX_CPUS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


_cpu, _module, _worth_timing = _open_cpu_module(os.environ.get(MODULE_VARIABLE) or AUTO)

threadpool_params_default = _function("ggml_threadpool_params_default", ThreadPoolParams, c_int)
threadpool_new = _function("ggml_threadpool_new", c_void_p, ctypes.POINTER(ThreadPoolParams), library=_cpu)
threadpool_free = _function("ggml_threadpool_free", None, c_void_p, library=_cpu)
threadpool_pause = _function("ggml_threadpool_pause", None, c_void_p, library=_cpu)
attach_threadpool = _function("llama_attach_threadpool", None, c_void_p, c_void_p, c_void_p)
detach_threadpool = _function("llama_detach_threadpool", None, c_void_p)
logits_address = _function("llama_get_logits_ith", c_void_p, c_void_p, c_int32)
set_hidden_states = _function("llama_set_embeddings_nextn", None, c_void_p, c_bool, c_bool)
hidden_states_address = _function("llama_get_embeddings_nextn", c_void_p, c_void_p)
hidden_state_address = _function("llama_get_embeddings_nextn_ith", c_void_p, c_void_p, c_int32)
n_layer_nextn = _function("llama_model_n_layer_nextn", c_int32, c_void_p)
set_layer_inputs = _function("llama_set_embeddings_layer_inp", None, c_void_p, c_uint32, c_bool)
layer_inputs_address = _function("llama_get_embeddings_layer_inp", c_void_p, c_void_p, c_uint32)
tensor_bytes = _function("ggml_nbytes", c_size_t, c_void_p)
tensor_type_name = _function("ggml_type_name", c_char_p, c_int)
buffer_name = _function("ggml_backend_buffer_name", c_char_p, c_void_p)
_buffer_is_host = _function("ggml_backend_buffer_is_host", c_bool, c_void_p)
_buffer_base = _function("ggml_backend_buffer_get_base", c_void_p, c_void_p)
_buffer_size = _function("ggml_backend_buffer_get_size", c_size_t, c_void_p)
_set_abort_hook = _function("ggml_set_abort_callback", c_void_p, c_void_p)
_ggml_commit = _function("ggml_commit", c_char_p)
ggml_version = _function("ggml_version", c_char_p)


def _open_kernels() -> Any:
    """Open cpuchat's kernels against the CPU backend in use, and put them before llama.cpp's: later than the first load
    that has no effect. They take no weights until `kernels.select`. Returns the library; None where it is missing, was
    built for another engine or another cpuchat, or this CPU, or the chosen module, lacks the instructions."""
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
        version = _function("cpuchat_kernels_version", c_char_p, library=library)
        formats = _function("cpuchat_kernels_formats", c_int, library=library)
        is_known = version() == ggml_version() and formats() == len(kernels.TYPES)
        is_known = is_known and all(
            hasattr(library, f"cpuchat_kernels_{one}") for one in ("select", "prepare", "measure")
        )
        return library if is_known and _register(library, instructions.encode()) else None
    except (OSError, EngineMismatch):
        return None


def _register(library: Any, wanted: bytes | None) -> str:
    """Put the kernels before llama.cpp's, unless that is done; returns their instruction set, "" without one here."""
    register = _function("cpuchat_kernels_register", c_char_p, c_char_p, library=library)
    return (register(wanted) or b"").decode()


kernels_library: Any = _open_kernels()


def has_function(name: str) -> bool:
    """Return whether the CPU module, libllama, or what they link to, has a function."""
    return hasattr(_cpu, name) or hasattr(_lib, _symbol(name))


class _Tensor(ctypes.Structure):
    """The beginning of struct ggml_tensor (ggml/include/ggml.h)."""

    _fields_ = (("type", c_int), ("buffer", c_void_p))


def _weights(model: Any) -> Iterator[tuple[int, _Tensor]]:
    """Yield the address of each weight tensor, and the tensor; nothing where this build does not export them."""
    if not has_function("llama_internal_get_tensor_map"):
        return
    weights = _function("llama_internal_get_tensor_map", ctypes.POINTER(c_size_t * 2), c_void_p)
    begin, end = weights(model).contents
    for pair in range(begin, end, TENSOR_PAIR):
        address = c_size_t.from_address(pair + TENSOR_PAIR - ctypes.sizeof(c_void_p)).value
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
    lock = _function("mlock", c_int, c_void_p, c_size_t, library=_libc)
    return not any([lock(_buffer_base(one), _buffer_size(one)) for one in copies])


@ctypes.CFUNCTYPE(None, c_char_p)
def _write_abort(message: bytes) -> None:
    # The last thing before abort(): one write of the assertion's text, without the build folder.
    text = message.decode("utf-8", "replace").strip().rpartition("/llama.cpp/")[2]
    os.write(2, f"\n{ABORT_PREFIX}{text}\n".encode())


class AbortFlag:
    """Stops a running decode from another thread, within one graph node. One flag may serve several contexts.

    llama.cpp calls a callback after each node: libc's `strlen` over a two-byte buffer. It needs no GIL, costs nothing,
    and is non-zero ("abort") once the first byte is set."""

    def __init__(self) -> None:
        self._is_final = False
        self._buffer = ctypes.create_string_buffer(2)
        self.callback = ctypes.cast(ctypes.cast(_libc.strlen, c_void_p).value or 0, llama.ggml_abort_callback)
        self.data = ctypes.cast(self._buffer, c_void_p)

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


def check_layout() -> None:
    """Compare versions, struct sizes and default parameters with the pinned ones: a shifted field would silently
    corrupt memory. Raises EngineMismatch: names the first difference."""

    def check(what: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise EngineMismatch(f"Unsupported llama.cpp version: {what} is {found}, expected {wanted}.", _REINSTALL)

    check("llama-cpp-python", installed_version(), PINNED_VERSION)
    check("ggml", ggml_version().decode("ascii", "replace"), GGML_VERSION)  # before any struct is passed
    for name, (size, field, offset) in STRUCTS.items():
        struct = getattr(llama, name)
        found = ctypes.sizeof(struct), getattr(struct, field).offset
        check(f"(size, offset of {field}) of {name}", found, (size, offset))
    params = {
        "llama_model_params": llama.llama_model_default_params(),
        "llama_context_params": llama.llama_context_default_params(),
        "llama_model_quantize_params": llama.llama_model_quantize_default_params(),
        "ggml_threadpool_params": threadpool_params_default(3),
    }
    for name, defaults in DEFAULTS.items():
        for field, wanted in defaults.items():
            check(f"the default of {name}.{field}", getattr(params[name], field), wanted)


def installed_version() -> str:
    """Return the version of llama-cpp-python, read from its source: `importlib.metadata` takes 15 ms to import."""
    text = Path(llama.__file__).with_name("__init__.py").read_text(encoding="utf-8", errors="replace")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


_started = False


def start() -> None:
    """Initialize llama.cpp: checks, log, abort hook, backend; once. Raises EngineMismatch as `check_layout`."""
    global _started
    log.install()
    if _started:
        return
    check_layout()
    _set_abort_hook(ctypes.cast(_write_abort, c_void_p))
    llama.llama_backend_init()
    _started = True


def engine_info() -> EngineInfo:
    """Return version, commit, CPU features and kernels; needs no model. Raises EngineMismatch as `check_layout`."""
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
