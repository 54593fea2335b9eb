"""Tests the ctypes layer against the installed llama.cpp."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from cpuchat.base.errors import EngineMismatch
from cpuchat.engine.llama import bindings
from cpuchat.models import engine_version


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)


def test_engine_info_needs_no_model() -> None:
    info = bindings.engine_info()
    assert info.version == engine_version.PINNED_VERSION
    assert len(info.llama_commit) >= 7
    assert info.pid == os.getpid()
    assert all(f.isidentifier() for f in info.features)


def test_another_version_or_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings.check_layout()
    with monkeypatch.context() as patch:
        patch.setattr(bindings, "installed_version", lambda: "0.3.99")
        with pytest.raises(EngineMismatch, match=r"llama-cpp-python is 0\.3\.99, expected 0\.3\.36"):
            bindings.check_layout()
    with monkeypatch.context() as patch:
        patch.setitem(engine_version.STRUCTS, "llama_context_params", (168, "ctx_other", 160))
        with pytest.raises(EngineMismatch, match=r"llama_context_params is \(160, 152\), expected \(168, 160\)"):
            bindings.check_layout()
    with monkeypatch.context() as patch:
        patch.setitem(engine_version.DEFAULTS["llama_context_params"], "n_ubatch", 1024)
        with pytest.raises(EngineMismatch, match=r"llama_context_params\.n_ubatch is 512, expected 1024"):
            bindings.check_layout()


def test_another_llama_cpp_in_its_place_is_refused_before_it_fills_a_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLAMA_CPP_LIB_PATH names one: its default parameters may be longer than the room that they are written to."""
    monkeypatch.setattr(bindings, "ggml_version", lambda: b"1.0.0")
    monkeypatch.setattr(bindings.llama, "llama_context_default_params", lambda: pytest.fail("a struct was passed"))
    with pytest.raises(EngineMismatch, match=r"ggml is 1\.0\.0, expected "):
        bindings.check_layout()


def test_nothing_is_printed() -> None:
    # A model that does not exist makes llama.cpp log an error.
    result = run(
        "from cpuchat.engine.llama import bindings as b\n"
        "b.start()\n"
        "assert not b.llama.llama_model_load_from_file(b'/no/such.gguf', b.llama.llama_model_default_params())\n"
        "assert any('such.gguf' in line for line in b.log.lines(errors_only=True))\n"
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_an_abort_leaves_the_assertion_in_stderr() -> None:
    result = run(
        "from cpuchat.engine.llama import bindings as b\n"
        "import ctypes\n"
        "b.start()\n"
        "b._lib.ggml_abort(b'/build/llama.cpp/src/file.cpp', 12, b'GGML_ASSERT(%s) failed', b'n > 0')\n"
    )
    assert result.returncode == -signal.SIGABRT
    assert f"\n{bindings.ABORT_PREFIX}src/file.cpp:12: GGML_ASSERT(n > 0) failed\n" in result.stderr


def test_abort_flag() -> None:
    flag = bindings.AbortFlag()
    assert not flag.is_set() and not flag.callback(flag.data)
    flag.set()
    assert flag.is_set() and flag.callback(flag.data)
    flag.clear()
    assert not flag.is_set() and not flag.callback(flag.data)
