"""Tests a sample of benchmarks/hostile/configs.py, without starting the program: what reads configurations only
refuses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.hostile import configs
from cpuchat.base import paths
from cpuchat.base.errors import ModelNotFound, SettingsError
from cpuchat.config import settings
from cpuchat.models.catalog import load_catalog
from cpuchat.models.library.library import Library
from cpuchat.tui.keys import load_keymap
from cpuchat.tui.themes import load_themes

pytestmark = pytest.mark.slow


def test_whatever_a_configuration_holds_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: set[str] = set()
    for case in configs.cases(0, 120):
        file = tmp_path / str(case.number) / case.file
        file.parent.mkdir(parents=True)
        configs.KINDS[case.kind](file, configs.FILES[case.file], random.Random(case.number))
        if case.file == "config.toml":
            try:
                settings.load(file)
            except SettingsError as error:
                assert error.hint
                ends.add("refused")
            else:
                ends.add("read")
        elif case.file.startswith("themes"):
            loaded = load_themes([file.parent])
            assert len(loaded.themes) + len(loaded.problems) == 1
        elif case.file == "keymap.toml":
            monkeypatch.setattr(paths, "keymap_file", lambda file=file: file)
            keymap = load_keymap()
            assert len(keymap.problems) <= 9 and all(key.isprintable() for key in keymap.moved.values())
        else:
            load_catalog(file)
    assert ends == {"read", "refused"}


@pytest.mark.parametrize(
    "spec", ["~a", "~nobody/x", "x" * 5000, "a\0b", "/" + "y" * 300, "\ud800", "[", "owner/" + "n" * 300]
)
def test_what_no_path_can_be_is_no_model(spec: str) -> None:
    library = Library(["~nobody/x", "/nowhere", "x" * 5000])
    assert all(model.source == "demo" for model in library.local_models())
    with pytest.raises(ModelNotFound):
        library.resolve(spec)
