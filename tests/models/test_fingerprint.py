"""Model files are told apart by their content."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from cpuchat.base.errors import ModelNotFound
from cpuchat.models.file_names import engine_fingerprint, file_fingerprint
from cpuchat.models.synthetic.model import write_model


def test_fingerprints_tell_content_apart(tmp_path: Path) -> None:
    half = write_model(tmp_path / "half.gguf", "tiny", "Q4_0")
    tiny = write_model(tmp_path / "tiny.gguf", "tiny", "Q8_0")
    original = file_fingerprint(half)
    copy = Path(shutil.copy(half, tmp_path / "copy.gguf"))
    copy.touch()
    assert file_fingerprint(copy) == original
    assert file_fingerprint(tiny) != original
    other = write_model(tmp_path / "other.gguf", "tiny", "Q8_0", seed=1)
    assert file_fingerprint(other) != file_fingerprint(tiny)
    with copy.open("r+b") as file:
        file.truncate(copy.stat().st_size - 1)
    assert file_fingerprint(copy) != original
    with pytest.raises(ModelNotFound):
        file_fingerprint(tmp_path / "nowhere.gguf")


def test_a_reinstalled_engine_is_the_same_and_another_build_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine_fingerprint()  # remembered in this process, so before anything is replaced

    def identified(folder: str) -> str:
        spec = importlib.util.spec_from_file_location("llama_cpp", tmp_path / folder / "llama_cpp" / "__init__.py")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        return engine_fingerprint.__wrapped__()

    library = tmp_path / "first" / "llama_cpp" / "lib" / "libllama.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"engine")
    shutil.copytree(tmp_path / "first", tmp_path / "moved")
    assert identified("first") == identified("moved") != ""
    (tmp_path / "moved" / "llama_cpp_python-0.3.37.dist-info").mkdir()
    library.write_bytes(b"another engine")
    assert len({identified("first"), identified("moved")} | {own}) == 3
