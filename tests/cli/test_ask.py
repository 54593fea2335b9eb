"""Tests `cpuchat ask` with the real worker: streams, figures, JSON, exit codes, Ctrl+C, a killed worker."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

import psutil
import pytest

from cpuchat.config import settings
from tests.cli.program import HANG_GUARD, PLAIN, refused, run, start
from tests.support.edited_gguf import edited
from tests.support.stores import ollama
from tests.support.tiny_gguf import byte_symbols, vocabulary

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")


def ask(model: Path, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `ask` without drafting, so that nothing is measured first."""
    return run("ask", "--model", str(model), *PLAIN, "--max-tokens", "16", "--seed", "1", *arguments, stdin=stdin)


@cache
def asked(model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `ask` once for all tests that look at the same answer."""
    return ask(model, *arguments)


def ask_json(model: Path, *arguments: str) -> dict:
    done = asked(model, "--json", *arguments)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    return json.loads(done.stdout)


def test_a_model_of_ollama_goes_by_its_name(tiny_model: Path, tmp_path: Path) -> None:
    done = ask(ollama(tmp_path, "tiny:latest", tiny_model), "--json", "Hello")
    assert json.loads(done.stdout)["model"] == "tiny:latest" and "sha256" not in done.stdout + done.stderr


def test_the_answer_is_on_stdout_its_figures_on_stderr_and_json_has_both(tiny_model: Path) -> None:
    done = asked(tiny_model, "Hello")
    assert done.returncode == 0, done.stderr
    assert settings.load().model.last == str(tiny_model)  # which `ask` without a model, `serve` and the app take next
    assert done.stdout.strip() and done.stdout.endswith("\n") and "tok/s" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("16 tokens · ") and "first token" in last and "new, 0 cached)" in last
    assert last.endswith(" · token limit reached") and "\x1b" not in done.stderr
    result = ask_json(tiny_model, "Hello")
    assert list(result) == ["text", "reasoning", "stop_reason", "model", "seed", "timings", "roofline"]
    assert result["text"].strip() == done.stdout.strip()
    assert (result["stop_reason"], result["model"], result["seed"]) == ("max_tokens", "tiny", 1)
    timings, read = result["timings"], result["roofline"]
    assert (timings["predicted_n"], timings["cache_n"]) == (16, 0) and "draft_n" not in timings
    assert timings["predicted_per_second"] == pytest.approx(1e3 * 15 / timings["predicted_ms"])
    assert timings["prompt_per_second"] == pytest.approx(1e3 * timings["prompt_n"] / timings["prompt_ms"])
    assert read["bandwidth"] == pytest.approx(read["bytes_per_pass"] * timings["predicted_per_second"])


def test_seed_raw_prompt_and_stop_text(tiny_model: Path) -> None:
    hot = ("--temperature", "1.5", "--top-k", "0", "Hello")
    drawn = ask_json(tiny_model, "--seed", "-1", *hot)
    assert drawn["seed"] >= 0
    assert ask_json(tiny_model, "--seed", str(drawn["seed"]), *hot)["text"] == drawn["text"]
    assert ask_json(tiny_model, "--raw", "xyz")["timings"]["prompt_n"] == len("xyz")  # without the template
    chat = ask_json(tiny_model, "Hello")
    system = ask_json(tiny_model, "--system", "Be brief.", "Hello")
    assert len("Hello") < chat["timings"]["prompt_n"] < system["timings"]["prompt_n"]
    text, stop = chat["text"], chat["text"][4:6]
    stopped = ask_json(tiny_model, "--stop", "\x01never", "--stop", stop, "Hello")
    assert (stopped["stop_reason"], stopped["text"]) == ("stop_string", text[: text.index(stop)])


def test_a_model_that_is_damaged_is_an_error_that_json_has_on_stdout(tiny_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:-5000])
    done = ask(cut, "Hello")
    assert (done.returncode, done.stdout) == (4, "") and done.stderr.startswith("cpuchat: ")
    done = ask(cut, "--json", "Hello")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], set(error)) == (4, "model_damaged", {"code", "message", "hint"})


def test_a_context_too_large_for_memory(slow_model: Path) -> None:
    done = ask(slow_model, "--ctx", "16777216", "--cache-type-k", "f32", "--cache-type-v", "f32", "Hello")
    assert done.returncode == 5, done.stderr
    assert "GB" in done.stderr or "GiB" in done.stderr


def test_a_context_that_is_too_short(tiny_model: Path) -> None:
    done = ask(tiny_model, "--ctx", "256", stdin="xyz " * 500)
    assert done.returncode == 6
    assert "context" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    done = ask(tiny_model, "--ctx", "256", "--max-tokens", "0", "Hello")
    assert done.returncode == 0
    assert "context full" in done.stderr and "--ctx" in done.stderr


def _first_words(process: subprocess.Popen[bytes]) -> bytes:
    return process.stdout.read(1)


def _worker(process: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the worker process once it has started."""
    while True:
        assert process.poll() is None
        for child in psutil.Process(process.pid).children():
            if "cpuchat.worker" in child.cmdline():
                return child


def test_a_reader_that_goes_away_ends_it_quietly(slow_model: Path) -> None:
    process = start("ask", "--model", str(slow_model), *PLAIN, "Hello")
    _first_words(process)
    worker = _worker(process)
    everyone = [worker, *worker.children(recursive=True)]
    process.stdout.close()
    assert process.wait(HANG_GUARD) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert not psutil.wait_procs(everyone, timeout=HANG_GUARD)[1]


def test_a_killed_worker_is_one_message_and_exit_code_8(slow_model: Path) -> None:
    process = start("ask", "--model", str(slow_model), *PLAIN, "Hello")
    begin = _first_words(process)
    worker = _worker(process)
    helpers = worker.children(recursive=True)
    worker.kill()
    out, err = process.communicate(timeout=HANG_GUARD)
    assert process.returncode == 8
    assert (begin + out).strip()
    message = err.decode()
    assert message.startswith("cpuchat: The inference worker crashed")
    assert "killed" in message
    assert not psutil.wait_procs(helpers, timeout=HANG_GUARD)[1]


@pytest.fixture(scope="module")
def escaping_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that writes an escape character instead of l, and BEL instead of a dash."""
    tokens = vocabulary()
    for letter, byte in (("l", 0x1B), ("-", 0x07)):
        other = byte_symbols()[byte]
        one, two = tokens.index(letter), tokens.index(other)
        tokens[one], tokens[two] = other, letter
    return edited(tiny_model, tmp_path_factory.mktemp("models") / "esc.gguf", {"tokenizer.ggml.tokens": tokens})


def test_escape_characters_do_not_pass_through_a_pipe_and_quiet_leaves_stderr_empty(escaping_model: Path) -> None:
    several = ("--max-tokens", "32", "Hello")
    done = ask(escaping_model, "--quiet", *several)
    assert (done.returncode, done.stderr) == (0, "")
    cleaned = done.stdout
    assert "␛" in cleaned or "␇" in cleaned
    assert not set("\x1b\x07") & set(cleaned)
    text = ask_json(escaping_model, *several)["text"]
    assert text.replace("\x1b", "␛").replace("\x07", "␇") == cleaned.removesuffix("\n")


def test_files_are_sent_before_the_question_if_they_are_text(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("one\ntwo\nthree\n")

    def n_tokens(*arguments: str) -> int:
        timings = ask_json(tiny_model, *arguments, "Hello")["timings"]
        return timings["prompt_n"] + timings["cache_n"]

    assert n_tokens() < n_tokens("--file", f"{file}:2") < n_tokens("--file", str(file), "--file", f"{file}:2")
    file.write_bytes(b"\x89PNG\r\n\x1a\n")
    assert "notes.md is not UTF-8 text." in refused(2, "ask", "--file", str(file), "Hello")
