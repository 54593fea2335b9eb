"""Tests `cpuchat why` with a real worker."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from cpuchat.bench.why import differences, read_report
from cpuchat.tune.halving import Speed
from cpuchat.tune.measurer import Measurer
from tests.cli.program import PLAIN, run
from tests.support.tuning import make_up_speeds, without_flash_attention


@pytest.fixture(autouse=True)
def on_a_measured_machine(measured_machine: None, one_core: None) -> None:
    """Avoid the bandwidth measurement."""


def test_a_table_json_markdown_and_what_differs(tmp_path: Path) -> None:
    page = tmp_path / "why.md"
    done = run("why", "demo-q4", *PLAIN, "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    assert ["SETTING", "VALUE", "PROOF"] in [line.split() for line in done.stdout.splitlines()]
    for words in ("Machine: ", "Command: cpuchat why ", "each pinned to one CPU", "in 7 of 7 attention nodes"):
        assert words in done.stdout
    assert "| flash attention | auto | in 7 of 7 attention nodes of the graph |" in page.read_text()

    saved = tmp_path / "then.json"
    saved.write_text(run("why", "demo-q4", *PLAIN, "--json").stdout)
    found = json.loads(run("why", "demo-q4", *PLAIN, "--flash-attn", "off", "--against", str(saved), "--json").stdout)
    assert ["flash attention", "auto", "off"] in found["differences"]
    assert found["command"].endswith("--flash-attn off")
    same = read_report(saved)
    assert differences(same, same) == []
    other = msgspec.structs.replace(same, settings=same.settings[1:])
    assert differences(same, other) == [("threads", same.settings[0].value, "not listed")]
    other = msgspec.structs.replace(same.settings[0], proof=same.settings[0].proof.replace("each pinned", "9 pinned"))
    assert [
        one[0] for one in differences(same, msgspec.structs.replace(same, settings=(other, *same.settings[1:])))
    ] == ["threads: proof"]
    assert "NOW" in run("why", "demo", *PLAIN, "--against", str(saved)).stdout


def test_measured_worths_are_shown_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def first(self: Measurer, chosen: object) -> Speed:
        return Speed(prefill=100, decode=(20,))

    make_up_speeds(monkeypatch, without_flash_attention)
    monkeypatch.setattr(Measurer, "first", first)
    found = json.loads(run("why", "demo", *PLAIN, "--measure", "--json").stdout)
    worth = {row["name"]: row["worth"] for row in found["settings"]}
    assert worth["flash attention"]["prefill"]["gain"] == pytest.approx(-0.2)
    assert worth["threads"]["skipped"] == "one thread"
    later = run("why", "demo", *PLAIN).stdout
    assert "−20.0 %" in later
    assert "± two standard" in " ".join(later.split())


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [(("demoo",), 3, "Did you mean demo"), (("demo", "--fresh"), 2, "Add --measure"),
     (("demo", "--against", "/dev/null"), 2, "is not a report")],
)  # fmt: skip
def test_wrong_usage_is_a_sentence(arguments: tuple[str, ...], status: int, words: str) -> None:
    done = run("why", *arguments)
    assert done.returncode == status
    assert words in done.stderr
