"""Tests `ask --json-schema` and `--grammar`: the answer's form, files that cannot be used, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import run
from tests.cli.test_ask import ask

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "東京"]}, "ok": {"type": "boolean"}},
    "required": ["city", "ok"],
}


@pytest.fixture
def schema(tmp_path: Path) -> str:
    file = tmp_path / "city.json"
    file.write_text(json.dumps(SCHEMA))
    return str(file)


def test_the_answer_is_json_of_the_schema(tiny_model: Path, schema: str) -> None:
    done = ask(tiny_model, "--json-schema", schema, "--max-tokens", "0", "Hello")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["city"] in ("Köln", "東京") and isinstance(answer["ok"], bool)


def test_an_answer_that_is_cut_off_has_an_exit_code_of_its_own(tiny_model: Path, schema: str) -> None:
    done = ask(tiny_model, "--json-schema", schema, "--max-tokens", "4", "--json", "Hello")
    assert done.returncode == 24
    result = json.loads(done.stdout)
    assert result["valid"] is False and result["stop_reason"] == "max_tokens" and result["text"].startswith("{")
    assert "does not match the schema: it was cut off after 4 tokens" in done.stderr and "--max-tokens" in done.stderr


def test_a_grammar_constrains_a_raw_prompt_with_free_drafts(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "moves.gbnf"
    file.write_text('root ::= move (" " move){2}\nmove ::= [a-h] [1-8]\n')
    done = run(
        "ask", "--model", str(tiny_model), "--raw", "--quiet", "--grammar", str(file), "--drafters", "suffix", "--seed",
        "1", "e2 e4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moves = done.stdout.split()
    assert len(moves) == 3 and all(file in "abcdefgh" and rank in "12345678" for file, rank in moves)


def test_tools_have_a_form_of_their_own(schema: str) -> None:
    done = run("ask", "--json-schema", schema, "--tools", "files", "Hello")
    assert done.returncode == 2 and "--tools cannot be used with --json-schema" in done.stderr


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--json-schema", '{\n  "type": "object",,\n}', "line 2 column 20"),
        ("--json-schema", '{"not": {}}', "#: not is not supported"),
        ("--grammar", 'root ::= "a"\nb c', "line 2: expected ::= after b"),
        ("--grammar", b'root ::= "a"\n# \xff', "not valid UTF-8 text (line 2"),
        ("--grammar", "#" * ((1 << 20) + 1), "larger than 1 MiB"),
        ("--grammar", None, "Cannot read "),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, option: str, content: str | bytes | None, message: str) -> None:
    file = tmp_path / "form"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run("ask", option, str(file), "Hello")
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and str(file) in done.stderr
