"""Tests what needs no model: help, wrong options, missing input."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpuchat.base import paths
from cpuchat.cli.ask import ask
from cpuchat.cli.compare import compare
from cpuchat.cli.main import main
from cpuchat.config import settings
from tests.cli.program import refused, run, run_process
from tests.models.drafts.files import header_file
from tests.support.cores import no_stacks


def test_help_loads_neither_the_interface_nor_the_engine() -> None:
    """`--help` must be there at once, so nothing heavy may come with it."""
    code = (
        "import sys; from cpuchat.cli.main import main; main(['--help']);"
        "heavy = {'textual', 'rich', 'llama_cpp', 'numpy', 'asyncio', 'huggingface_hub', 'jinja2', 'msgspec', 'httpx',"
        " 'starlette', 'uvicorn'};"
        "sys.stderr.write(' '.join(sorted(heavy & set(sys.modules))));"
        "main(['ask', '--help']);"
        "sys.stderr.write(' '.join(sorted({'hibari', 'onnxruntime', 'numpy', 'llama_cpp'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask", "--top-p", "3", "q"], ["--top-p: must be 0 to 1."]),
        (["ask", "--max-tokens", "-1", "q"], ["--max-tokens: must be 0 or more."]),
        (["ask", "--ctx", "5", "q"], ["--ctx: 5 is below the minimum of 256", "0 = automatic"]),
        (["ask", "--threads", "100000", "q"], ["100,000 threads", "CPUs"]),
        (["ask", "--cache-type-v", "q8_0", "--flash-attn", "off", "q"], ["flash attention"]),
        (["ask", "--stop", "", "q"], ["--stop"]),
        (["ask", "--json-schema", "a", "--grammar", "b", "q"], ["exclude each other"]),
        (["ask", "--json-schema", "a", "--stop", "x", "q"], ["--stop cannot be used"]),
        (["ask", "--cores", "few", "q"], ["--cores", "l3:0-3"]),
        (["ask", "--server", "127.0.0.1:80", "q"], ["127.0.0.1:80", "http"]),
        (["ask", "--server", "http://user:secret@host", "q"], ["must not contain a password"]),
        (["ask", "--server", "http://127.0.0.1:9", "--threads", "1", "q"], ["engine.threads"]),
        (["ask", "--raw", "--system", "Be brief.", "q"], ["--system", "--raw"]),
        (["ask", "--temprature", "1", "q"], ["--temprature", "Did you mean --temperature"]),
        (["ask", "--ctx-size", "q"], ["No such option: --ctx-size.", "Did you mean --ctx? See"]),
        (["ask", "--cache-type", "q"], ["Did you mean --cache-type-k or --cache-type-v? See"]),
        (["docs", "serve.md#acess"], ["Did you mean access?"]),
        (["docs", "glosary"], ["Did you mean glossary?"]),
        (["serve", "--parallel", "x"], ["must be a number or auto"]),
        (["completion"], ["Name bash, zsh or fish"]),
        (["bench", "--diff"], ["See cpuchat bench --help."]),
        (["nothing"], ["nothing", "cpuchat --help"]),
        (["chat"], ["chat", "Did you mean cpuchat chats?"]),
        (["help", "nowhere"], ["no line with 'nowhere'", "first-model", "cpuchat --help"]),
        (["demo"], ["cpuchat -m demo"]),
        (["tune", "-m", "demo", "--max"], ["No such option: --max"]),
        pytest.param(["--temperature", "0", "ask", "q"], ["command: cpuchat ask --temperature 0 q"], id="too-early"),
        pytest.param(["chats", "foo"], ["Its commands: list, export, import."], id="no-subcommand"),
        (["chats", "rm", "x"], ["d in the list of chats"]),
        (["chats", "search", "x"], ["cpuchat chats list WORDS"]),
        (["chats", "show", "x"], ["cpuchat chats export ID -o chat.md"]),
        (["pull", "x"], ["Did you mean cpuchat models download?"]),
        (["models", "rm", "demo", "--yes"], ["part of cpuchat"]),
        (["tiny.gguf"], ["cpuchat -m tiny.gguf"]),
        (["-m", "demo", "ask", "Why is it?"], ["cpuchat ask -m demo 'Why is it?'"]),
        pytest.param(["ask", "-"], ["No question"], id="dash"),
        pytest.param(["ask", os.fsdecode(b"caf\xe9")], ["UTF-8"], id="no-text"),
        (["ask", "--file", "gone.txt", "q"], ["Cannot read gone.txt: No such file or directory."]),
        (["ask", "--raw", "--file", "gone.txt", "q"], ["--file cannot be used with --raw"]),
        (["ask", "--allow-tools", "q"], ["--allow-tools without tools"]),
        (["ask", "--tools", "files", "q"], ["There are no MCP servers in"]),
        (["ask", "--raw", "--tools", "files", "q"], ["--tools cannot be used with --raw"]),
        (["bench", "demo", "--threads", "4096", "--tg", "8"], ["threads"]),
        (["bench", "--diff", "none.json"], ["two files"]),
        (["bench", "--diff", "none.json", "new.json"], ["none.json"]),
        (["bench", "--diff", "none.json", "new.json", "--tokens", "128"], ["no option"]),
        (["compare", "demo", "demo,depth=3", "q"], ["Unknown setting 'depth'"]),
        (["compare", "demo", "demo,threads=none", "q"], ["threads"]),
        (["compare", "demo", "demo-q4"], ["No question given"]),
        (["plan", "70b", "--on", "9745"], ["epyc-9754"]),
        (["plan", "--on", "all"], ["needs a MODEL"]),
        (["plan", "70b", "--on", "9754", "--ctx", "1000", "--prompt", "2000"], ["exceed the context"]),
        (["plan", "70b", "--machines"], ["takes only --json"]),
        pytest.param(["ask", "-q", "--verbose", "tar?"], [": cpuchat ask -q -- --verbose 'tar?'\n"], id="no-option"),
        (["compare", "demo", "demo-q4", "-x=5"], [": cpuchat compare -- demo demo-q4 -x=5\n"]),
        (["what", "is", "this"], [": cpuchat ask what is this\n"]),
        (["why", "is", "the", "sky", "blue"], [": cpuchat ask why is the sky blue\n"]),
        ([], ["terminal", "cpuchat ask"]),
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cpuchat: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_user_that_the_system_does_not_know_has_a_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert main(["docs"]) == 0 and "first-model" in capsys.readouterr().out
    assert os.environ["HOME"] == "/"


def test_the_manual_is_found_by_headings_and_words_and_formatted_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (["docs", "Exit codes"], ["help", "exit-codes"], ["docs", "commands.md#exit-codes"]):
        assert main(line) == 0
    once, *others = capsys.readouterr().out.split("## Exit codes\n")[1:]
    assert others == [once, once] and "| 0 | success |" in once
    assert main(["docs", "The machine"]) == 0 and "\n## Limits\n" in capsys.readouterr().out
    assert main(["docs", "wrong", "usage", "settings"]) == 0
    assert "commands#exit-codes  | 2 | wrong usage or settings |\n" in capsys.readouterr().out
    monkeypatch.setattr("cpuchat.cli.docs.is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["docs", "exit-codes"]) == 0
    shown = capsys.readouterr().out
    assert "success" in shown and "|" not in shown


@pytest.mark.parametrize(
    ("wanted", "named"), [("qwen3:8b", "qwen3-8b."), ("Qwen3-8B:Q8_0", "qwen3-8b:q8_0."), ("a/b", "a/b.")]
)
def test_what_is_not_here_is_said_how_to_download(wanted: str, named: str) -> None:
    assert f"cpuchat models download {named}" in run("tune", wanted).stderr


@pytest.mark.parametrize("line", [["tune", "demoo"], ["plan", "demoo"], ["compare", "demo", "demoo", "q"]])
def test_a_model_that_is_not_there_ends_with_3(line: list[str]) -> None:
    done = run(*line)
    assert done.returncode == 3 and "There is no model 'demoo'" in done.stderr and "Did you mean demo" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "question", "options"),
    [
        (["-5", "+", "3?"], "-5 + 3?", {}),
        (["explain", "--verbose", "in", "tar"], "explain --verbose in tar", {}),
        (["--find me"], "--find me", {}),
        (["-qm", "demo", "what", "is", "-q"], "what is -q", {"model": "demo", "quiet": True}),
        (["-mdemo", "--temperature=0", "a", "--stop"], "a --stop", {"model": "demo", "sampling__temperature": 0}),
        (["--no-mlock", "--system", "-x", "--", "--find", "--", "it"], "--find -- it",
         {"engine__mlock": False, "system": "-x"}),
    ],
)  # fmt: skip
def test_all_from_the_first_word_that_is_no_option_is_the_question(
    arguments: list[str], question: str, options: dict[str, Any]
) -> None:
    given = ask.make_context("ask", list(arguments)).params
    assert " ".join(given["question"]) == question
    assert options.items() <= given.items()


def test_where_the_text_begins_and_options_behind_one_that_is_quoted() -> None:
    line = ["a,kv=q8_0", "--rounds", "2", "b", "--system", "s", "-5", "+", "--rounds"]
    given = compare.make_context("compare", line).params
    assert (given["a"], given["b"], given["prompt"]) == ("a,kv=q8_0", "b", ("-5", "+", "--rounds"))
    assert (given["rounds"], given["system"]) == (2, "s")
    given = compare.make_context("compare", ["a", "b", "Why is it?", "--rounds", "2", "--json"]).params
    assert (given["prompt"], given["rounds"], given["as_json"]) == (("Why is it?",), 2, True)
    assert "'no-such' on this machine" in run("ask", "Why?", "-m", "no-such").stderr


def test_an_option_after_the_question_is_said_to_be_part_of_it() -> None:
    done = run("ask", "-m", "no-such", "What does", "--json", "print?")
    assert done.stdout == ""  # no JSON was asked for
    assert "cpuchat: --json is part of the text here: options go before it.\n" in done.stderr
    assert "is part of" not in run("ask", "-m", "no-such", "--", "What does", "--json", "print?").stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("mod", "plain,models"), ("ask --temp", "plain,--temperature"), ("serve demo-q", "plain,demo-q4"),
        ("ask --file notes", "file,notes"), ("ask Why? --no-such ./x", "file,./x"), ("docs gloss", "plain,glossary"),
        ("models quantize demo q6", "plain,Q6_K"), ("chats export ", "file,"), ("--preset x", "file,x"),
        ("models download qwen3-1.", "plain,qwen3-1.7b"), ("ask --cores ", "file,"), ("-m own : q4", "plain,q4_k_m"),
    ],
)  # fmt: skip
def test_tab_completes_commands_options_models_and_files(
    line: str, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for n, kind in ((7, "Q8_0"), (15, "Q4_K_M")):
        header_file(tmp_path / f"own-{kind}.gguf", weights=4096, facts={"general.file_type": n, "general.name": "own"})
    settings.update({"model": {"folders": [str(tmp_path)]}})
    assert "_CPUCHAT_COMPLETE=bash_complete" in run("completion", "bash").stdout
    monkeypatch.setenv("_CPUCHAT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"cpuchat {line}")
    monkeypatch.setenv("COMP_CWORD", str(1 + line.count(" ")))
    assert run().stdout.split() == [found]


def test_input_that_is_no_text_is_refused() -> None:
    told = refused(2, "ask", stdin=b"caf\xe9")
    assert "UTF-8" in told and "byte 4" in told


def broken(work: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line with a bug in place of its commands."""
    code = f"import sys, threading, cpuchat.cli.main as m; m.cli.main = lambda *a, **k: {work}; sys.exit(m.main([]))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def test_a_bug_is_one_line_and_a_traceback_only_on_request() -> None:
    done = broken("1 / 0")
    bug = "cpuchat: Unexpected ZeroDivisionError: division by zero. This is a bug.\n"
    assert (done.returncode, done.stderr) == (1, f"{bug}  Run it again with CPUCHAT_DEBUG=1 for a traceback.\n")
    done = broken("1 / 0", env=os.environ | {"CPUCHAT_DEBUG": "1"})
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_limit_of_threads_is_told_with_what_to_do() -> None:
    """Stacks that find no room are refused as threads beyond a limit are."""
    done = broken("threading.Thread(target=print).start()", preexec_fn=no_stacks)
    assert done.returncode == 1 and "refuses to start another thread" in done.stderr and "ulimit -u" in done.stderr


def test_version_with_a_broken_engine_still_tells_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "llama_cpp"
    broken.mkdir()
    for name in ("__init__", "llama_cpp"):
        (broken / f"{name}.py").write_text("raise ImportError('libllama.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_process("--version")
    assert done.returncode == 9
    assert done.stdout.startswith("cpuchat 0.") and "\nPython 3." in done.stdout
    assert "engine: unavailable" in done.stdout
    assert "libllama.so" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("arguments", [["--help"], ["chats", "list", "--json"], ["ask", "--json"]])
def test_a_full_disk_behind_standard_output_is_said_on_standard_error(arguments: list[str]) -> None:
    """It was called a bug, and with --json nothing was said at all."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cpuchat.cli.main", *arguments],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180,
        )  # fmt: skip
    if arguments[0] == "ask":
        assert (done.returncode, "No question given" in done.stderr) == (2, True)
    else:
        assert done.stderr == (
            "cpuchat: Cannot write the output: No space left on device.\n  Redirect it to another place.\n"
        )
        assert done.returncode == 26


@pytest.mark.parametrize("arguments", [["--plain", "--model"], ["serve", "--port", "0"]])
def test_a_model_whose_path_is_not_utf_8_is_named(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    file.symlink_to(paths.demo_dir() / "cpuchat-demo-8m-q4_k_m.gguf")
    done = run(*arguments, str(file), stdin="hello\n")
    assert "caf?.gguf is not valid UTF-8.\n  Rename the file" in done.stderr
    assert done.returncode == 2
