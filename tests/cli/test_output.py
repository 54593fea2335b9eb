"""Figures, JSON and what reaches a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import tty
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.cli.ask import compose
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal
from cpuchat.errors import UsageError
from cpuchat.present.answers import roofline_json, summary, timings_json
from cpuchat.protocol import LoadProgress, ModelInfo, Traffic
from cpuchat.telemetry.roofline import after_answer
from cpuchat.telemetry.units import size
from cpuchat.timings import DrafterCount, SpeculationFigures, Timings

FULL = Timings(
    cache_n=1024, prompt_n=512, prompt_ms=1954.2, predicted_n=412, predicted_ms=9951.6, ttft_ms=210.0, seed=7
)


def test_the_summary_has_every_figure_with_its_unit() -> None:
    assert summary(FULL, "end") == (
        "412 tokens · 41.3 tok/s · first token 0.21 s · prompt 262 tok/s (512 new, 1,024 reused) · end"
    )


def test_the_summary_of_one_token_has_no_rate() -> None:
    text = summary(Timings(predicted_n=1, prompt_n=0, cache_n=5, ttft_ms=3.0), "max_tokens")
    assert text == "1 token · n/a tok/s · first token 3 ms · prompt n/a tok/s (0 new, 5 reused) · token limit"


def test_the_summary_of_an_answer_that_was_stopped_before_its_first_token() -> None:
    assert "first token" not in summary(Timings(prompt_n=12, prompt_ms=40.0), "cancelled")


def test_json_timings_carry_llama_servers_names_and_our_definition_of_the_rate() -> None:
    fields = timings_json(FULL)
    assert list(fields) == [
        "cache_n",
        "prompt_n",
        "prompt_ms",
        "prompt_per_token_ms",
        "prompt_per_second",
        "predicted_n",
        "predicted_ms",
        "predicted_per_token_ms",
        "predicted_per_second",
    ]
    assert fields["predicted_per_second"] == pytest.approx(411 / 9.9516)
    assert fields["predicted_per_token_ms"] == pytest.approx(9951.6 / 411)
    assert fields["prompt_per_token_ms"] == pytest.approx(1954.2 / 512)


def test_json_timings_with_a_draft_model() -> None:
    fields = timings_json(Timings(draft_n=100, draft_n_accepted=74))
    assert (fields["draft_n"], fields["draft_n_accepted"]) == (100, 74)
    assert fields["predicted_per_second"] is None


DRAFTED = msgspec.structs.replace(
    FULL,
    draft_n=410,
    draft_n_accepted=295,
    speculation=SpeculationFigures(
        passes=133,
        draft_n=410,
        draft_n_accepted=295,
        by_position=((133, 110), (110, 90)),
        by_drafter=(
            DrafterCount(name="draft", draft_n=400, draft_n_accepted=290),
            DrafterCount(name="suffix", draft_n=10, draft_n_accepted=5),
        ),
        drafter="draft",
        depth=4,
        draft_ms=1200.0,
        plain_ms=34.4,
    ),
)


def off(reason: str, **figures: Any) -> Timings:
    return msgspec.structs.replace(FULL, speculation=SpeculationFigures(passes=412, reason=reason, **figures))


def test_the_summary_tells_how_drafting_went() -> None:
    assert " · 72 % of 410 drafted accepted (3.1 per pass, 1.42×) · end" in summary(DRAFTED, "end")
    unknown = msgspec.structs.replace(
        DRAFTED, speculation=SpeculationFigures(passes=133, draft_n=410, draft_n_accepted=295)
    )
    assert " · 72 % of 410 drafted accepted (3.1 per pass) · end" in summary(unknown, "end")
    bare = msgspec.structs.replace(DRAFTED, speculation=None)
    assert " · 72 % of 410 drafted accepted · end" in summary(bare, "end")


def test_the_summary_says_why_nothing_was_drafted() -> None:
    reason = "off: at 31 % acceptance plain decoding is 12 % faster on these cores"
    text = summary(off(reason), "end")
    assert text.endswith(" · speculation off: at 31 % acceptance plain decoding is 12 % faster on these cores · end")
    assert "speculation" not in summary(off(""), "end")
    assert "speculation" not in summary(FULL, "end")


def test_the_summary_has_the_figures_and_no_reason_when_drafting_was_off_only_for_a_while() -> None:
    mixed = msgspec.structs.replace(
        DRAFTED, speculation=SpeculationFigures(passes=133, draft_n=410, draft_n_accepted=295, reason="off: for now")
    )
    assert "drafted accepted" in summary(mixed, "end")
    assert "off" not in summary(mixed, "end")


def test_json_timings_carry_everything_about_drafting() -> None:
    fields = json.loads(json_line(timings_json(DRAFTED)))
    assert (fields["draft_n"], fields["draft_n_accepted"]) == (410, 295)
    drafting = fields["speculation"]
    assert drafting["tokens_per_pass"] == pytest.approx(411 / 133)
    assert drafting["speed_up"] == pytest.approx(411 / 9951.6 * 34.4)
    assert drafting["by_position"] == [
        {"draft_n": 133, "draft_n_accepted": 110},
        {"draft_n": 110, "draft_n_accepted": 90},
    ]
    assert drafting["drafters"] == [
        {"name": "draft", "draft_n": 400, "draft_n_accepted": 290},
        {"name": "suffix", "draft_n": 10, "draft_n_accepted": 5},
    ]
    assert drafting["reason"] == ""


def test_json_timings_say_why_nothing_was_drafted() -> None:
    fields = timings_json(off("off: nothing is predictable here"))
    assert "draft_n" not in fields
    assert fields["speculation"]["reason"] == "off: nothing is predictable here"
    assert fields["speculation"]["speed_up"] is None
    assert "speculation" not in timings_json(FULL)


MODEL = ModelInfo(
    path="m.gguf", name="m", architecture="llama", quantization="Q8_0", n_params=1, size=1, n_ctx=8192,
    n_ctx_train=8192, n_vocab=1, n_layer=1, n_threads=2, cpus=(0, 1), peak_read=51e9, cache_bytes=32 << 20,
    traffic=Traffic(weights=1_000_000_000),
)  # fmt: skip


def test_the_summary_has_the_bandwidth_where_there_is_a_peak() -> None:
    text = summary(FULL, "end", after_answer(MODEL, FULL))
    assert text.endswith(" · 41 of 51 GB/s (81 %) · end")  # 41.3 tok/s x 1 GB
    unmeasured = msgspec.structs.replace(MODEL, peak_read=0.0)
    assert "GB/s" not in summary(FULL, "end", after_answer(unmeasured, FULL))
    small = msgspec.structs.replace(MODEL, traffic=Traffic(weights=8_000_000))
    assert summary(FULL, "end", after_answer(small, FULL)).endswith(" · weights fit in L3: no memory limit · end")
    slow = msgspec.structs.replace(MODEL, peak_read=20e9)
    assert "(206 %, calibration is off · " in summary(FULL, "end", after_answer(slow, FULL))


def test_json_carries_the_bandwidth_and_what_it_is_held_against() -> None:
    found = json.loads(json_line(roofline_json(after_answer(MODEL, FULL))))
    assert found["bandwidth"] == pytest.approx(1e9 * 411 / 9.9516)
    assert found["utilization"] == pytest.approx(found["bandwidth"] / 51e9)
    assert (found["peak"], found["peak_source"], found["bytes_per_pass"]) == (51e9, "measured, 2 cores", 1e9)
    assert found["ceilings"]["no_draft"] == pytest.approx(51)
    assert found["ceilings"]["this_acceptance"] is None
    assert found["limit"] == "memory"
    unmeasured = roofline_json(after_answer(msgspec.structs.replace(MODEL, peak_read=0.0), FULL))
    assert unmeasured["utilization"] is None
    assert unmeasured["note"] == "no peak · run cpuchat probe"


@given(st.text())
def test_a_json_line_is_one_line_without_control_characters(text: str) -> None:
    line = json_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in line)


@pytest.mark.parametrize(
    ("question", "material", "raw", "prompt"),
    [
        ("Why?", "", False, "Why?"),
        ("", "Why?\n", False, "Why?"),
        ("Sum up:", "\n  a\n  b\n\n", False, "Sum up:\n\n  a\n  b"),
        ("", "Once upon ", True, "Once upon "),
        ("", "Once upon\n", True, "Once upon"),
        ("\n", "", True, "\n"),
    ],
)
def test_question_and_material_make_the_prompt(question: str, material: str, raw: bool, prompt: str) -> None:
    assert compose(question, material, raw=raw) == prompt


def test_nothing_is_no_question() -> None:
    with pytest.raises(UsageError, match="no question"):
        compose(" ", "\n\n", raw=False)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_960, "100 kB"), (999_600, "1.0 MB"), (18_100_000, "18.1 MB"),
        (1_500_000_000, "1.5 GB"), (621_000_000_000, "621 GB"), (2_400_000_000_000, "2.4 TB"),
    ],
)  # fmt: skip
def test_sizes(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


class Screen:
    """A real pseudo-terminal whose output can be read back."""

    _END = "\x00end\x00"

    def __init__(self) -> None:
        self._reader, writer = pty.openpty()
        tty.setraw(writer)
        self.stream = os.fdopen(writer, "w", encoding="utf-8")

    def text(self) -> str:
        """All that was written; a terminal hands it over in pieces, so a mark at the end tells when it is there."""
        self.stream.write(self._END)
        self.stream.flush()
        data = b""
        while not data.endswith(self._END.encode()):
            data += os.read(self._reader, 65536)
        return data.decode().removesuffix(self._END)

    def close(self) -> None:
        self.stream.close()
        os.close(self._reader)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch):
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield screen
    screen.close()


def test_escape_characters_of_an_answer_never_reach_the_terminal(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen.stream)
    terminal = Terminal()
    terminal.answer("\x1b]0;owned\x07 hello \x1b")
    terminal.answer("[2J")
    terminal.end_answer()
    assert screen.text() == "␛]0;owned␇ hello ␛[2J\n"


def test_a_pipe_gets_the_answer_cleaned_or_as_it_is_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for raw, got in ((False, "a␛[1m\nb\n"), (True, "a\x1b[1m\r\nb\n")):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        terminal = Terminal(quiet=True, raw=raw)
        for piece in ("a\x1b", "[1m\r", "\nb"):
            terminal.answer(piece)
        terminal.end_answer()
        assert out.getvalue() == got


def test_reasoning_is_dim_on_the_terminals_stderr_and_the_answer_starts_on_a_new_line(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", screen.stream)
    terminal = Terminal()
    terminal.reasoning("hm\x1b")
    terminal.answer("42")
    terminal.end_answer()
    assert out.getvalue() == "42\n"
    assert screen.text() == "\x1b[2mhm␛\x1b[22m\n\n"


def test_no_color_is_respected(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", screen.stream)
    terminal = Terminal()
    terminal.reasoning("hm")
    assert screen.text() == "hm"


def test_progress_is_one_line_that_goes_away(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", screen.stream)
    terminal = Terminal()
    terminal.progress(LoadProgress(phase="reading", done=1, total=2))
    terminal.answer("hi")
    assert screen.text() == "\r\x1b[2Kreading the model 50 %\r\x1b[2K"


def test_no_progress_when_quiet_or_piped(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    Terminal().progress(LoadProgress(phase="reading", done=1, total=2))
    assert err.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", screen.stream)
    Terminal(quiet=True).progress(LoadProgress(phase="reading", done=1, total=2))
    assert screen.text() == ""
