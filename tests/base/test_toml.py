from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base import paths, toml
from cpuchat.base.errors import SettingsError
from cpuchat.config import settings
from cpuchat.models.catalog import load_catalog
from cpuchat.tui.themes import ThemeError, parse_theme

PARTS = ".".join("a" * 50_000)
"""A key that takes `tomllib` over two minutes."""


@pytest.mark.parametrize("text", [
    f"{PARTS} = 1", f"[{PARTS}]\nb = 1", f"[[{PARTS}]]", f"x = {{{PARTS} = 1}}", PARTS,
    " . ".join(['"a b"', "'c'"] * 99),
])  # fmt: skip
def test_a_key_of_many_parts_is_refused_before_it_takes_minutes(text: str) -> None:
    with pytest.raises(ValueError, match=r"over 32 dotted parts \(at line 3\)"):
        toml.loads(f"x = '''\n'''\n{text}")


@pytest.mark.parametrize("text", ["[" * 9000 + "]" * 9000, "{a=" * 9000 + "1" + "}" * 9000])
def test_brackets_nested_too_deep_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        toml.loads(f"x = {text}")


def test_dots_in_texts_are_no_parts() -> None:
    said = "Answer in 1.5 sentences. Never more. See https://a.b.c.d.example/x.y?z. No. No. No. " * 99
    assert toml.loads(f'a.b."c.d" = """{said}"""') == {"a": {"b": {"c.d": said}}}


def test_whoever_reads_such_a_file_says_so() -> None:
    for read in (settings.parse, parse_theme):
        with pytest.raises((SettingsError, ThemeError), match="not valid TOML: a key with over 32 dotted parts"):
            read(f"{PARTS} = 1")
    paths.user_catalog().parent.mkdir(parents=True, exist_ok=True)
    paths.user_catalog().write_text(f"{PARTS} = 1")
    assert any("a key with over 32 dotted parts" in problem for problem in load_catalog().problems)


def test_a_file_in_another_encoding_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes("[chat]\r\n".encode("utf-16"))
    with pytest.raises(SettingsError, match=r"config.toml is not UTF-8 text \(byte 1\)") as refused:
        toml.read(file)
    assert refused.value.hint == "Save it as UTF-8."
