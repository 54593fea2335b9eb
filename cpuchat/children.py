"""Starts Python processes of this package: without the current folder on their path, without secrets in their
environment."""

from __future__ import annotations

import os
import sys

_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "TZ", "LANG", "LANGUAGE", "TMPDIR", "TEMP", "TMP",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "__PYVENV_LAUNCHER__",
    "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "PATHEXT", "COMSPEC",
})  # fmt: skip
_PREFIXES = (
    "LC_", "XDG_", "PYTHON", "DYLD_", "MALLOC_", "CPUCHAT_", "GGML_", "LLAMA_", "OMP_", "GOMP_", "KMP_", "OPENBLAS_",
)  # fmt: skip
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter with `-P`: `-m` and `-c` alone put the current folder first on the
    path, where anyone's `queue.py` would be executed."""
    return [sys.executable, "-P", *arguments]


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment for a computing child: what it needs of this process's environment, and `more`.

    These children read strangers' files, so they get the variables of system libraries, Python, llama.cpp and this
    package, and no tokens. Downloads, which need a token and proxies, get the whole environment instead.
    """
    kept = {name: value for name, value in os.environ.items() if _is_needed(name.upper())}
    return {**kept, **more}


def _is_needed(name: str) -> bool:
    if name in _NAMES:
        return True
    return name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)
