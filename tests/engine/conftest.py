"""Loaded models for the tests of the engine, on one thread so that a busy machine does not slow them down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.prompt.chat_template import TemplateHelper
from cpuchat.protocol.messages import LoadOptions
from tests.support.cores import ONE_CPU
from tests.support.engine_chat import OPTIONS, Chat
from tests.support.tiny_gguf import write_tiny_gguf

Load = Callable[..., Model]


class _KeptHelper(TemplateHelper):
    """Renders for one engine after the other: its process takes longer to start than these models to load."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def kept_templates() -> Iterator[None]:
    """Share the process of a template between all engines of a file."""
    helpers: dict[str, _KeptHelper] = {}

    def helper(source: str) -> _KeptHelper:
        if source not in helpers:
            helpers[source] = _KeptHelper(source)
        return helpers[source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpuchat.engine.engine.TemplateHelper", helper)
        yield
    for one in helpers.values():
        TemplateHelper.close(one)


@pytest.fixture
def abort() -> AbortFlag:
    return AbortFlag()


@pytest.fixture
def load(abort: AbortFlag) -> Iterator[Load]:
    """Load models and free them after the test."""
    models: list[Model] = []

    def _load(path: Path, options: LoadOptions = OPTIONS, **more: object) -> Model:
        more = {"on_progress": lambda *_: None, "threads": ONE_CPU, "abort": abort, **more}
        model = Model.load(path, options, **more)  # type: ignore[arg-type]
        models.append(model)
        return model

    yield _load
    for model in reversed(models):  # each gives its thread back the affinity that it found
        model.free()


@pytest.fixture(scope="module")
def _kept_models() -> Iterator[list[tuple[object, Model]]]:
    """The models of a file's tests that `reuse` them, by what they were loaded with."""
    kept: list[tuple[object, Model]] = []
    yield kept
    for _, model in reversed(kept):
        model.free()


@pytest.fixture(scope="module")
def _kept_abort() -> AbortFlag:
    return AbortFlag()


@pytest.fixture
def reuse(_kept_models: list[tuple[object, Model]], _kept_abort: AbortFlag) -> Load:
    """Load as `load`, or return, cleared, what an earlier test of the file loaded: for tests of answers, not of loads.
    Their file's `abort` is `_kept_abort`."""
    taken: list[Model] = []
    _kept_abort.clear()

    def _reuse(path: Path, options: LoadOptions = OPTIONS, threads: object = ONE_CPU) -> Model:
        key = (path, options, threads)
        model = next((one for other, one in _kept_models if other == key and one not in taken), None)
        if model is None:
            more = {"on_progress": lambda *_: None, "threads": threads}
            model = Model.load(path, options, abort=_kept_abort, **more)  # type: ignore[arg-type]
            _kept_models.append((key, model))
        model.sequence.clear()
        taken.append(model)
        return model

    return _reuse


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass."""
    passes: list[int] = []
    evaluate = Sequence.evaluate

    def counted(self: Sequence, tokens: list[int], whole: bool) -> None:
        passes.append(len(tokens))
        evaluate(self, tokens, whole)

    monkeypatch.setattr(Sequence, "evaluate", counted)
    return passes


@pytest.fixture
def model(load: Load, tiny_model: Path) -> Model:
    return load(tiny_model)


@pytest.fixture
def chat() -> Iterator[Chat]:
    chat = Chat()
    yield chat
    chat.engine.close()


@pytest.fixture(scope="session")
def recurrent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose state cannot be rolled back."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "mamba-F32.gguf", arch="mamba")
