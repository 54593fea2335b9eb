"""Tests benchmarks with the real worker and the demo models: figures, the journal, kill -9 in the middle,
differences."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cpuchat.base.errors import Interrupted, MeasureFailed, UsageError
from cpuchat.base.paths import bench_dir
from cpuchat.bench.matrix import BenchCell, BenchPrompt, BenchWorkload, Kind, Setup, cells_of, load, read_matrix
from cpuchat.bench.results import REGRESSION, Journal, Report, as_json, compare_reports, read_report, report_of
from cpuchat.bench.run import Bench
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.present.bench import markdown
from tests.cli.program import run, start
from tests.support.terminal import Terminal

PROMPTS = [one for one in load() if one.name in ("learn-piano", "water-tank")]
LEAN = ("--threads", "1", "--tg", "8", "--pp", "16")


@pytest.fixture(autouse=True)
def on_a_measured_machine(measured_machine: None) -> None:
    """Avoid the bandwidth measurement: every test here may load models."""


def bench(
    tmp_path: Path, *, file: Path | None = None, tell: Callable[[], None] = lambda: None, **values: object
) -> Bench:
    matrix = read_matrix({"models": ["demo"], "threads": ["1"], **values})
    cells = cells_of(matrix, Settings(), Library([]))
    return Bench(cells, matrix.rounds, Settings(), folder=tmp_path, file=file, prompts=PROMPTS, tell=tell)


async def report(running: Bench) -> Report:
    await running.run()
    return report_of(running.journal, running.failed)


async def test_prompts_plain_and_drafted(tmp_path: Path) -> None:
    found = await report(bench(tmp_path, prompts=["chat", "maths"], tokens="24", drafters=["draft:4"]))
    assert [(one.test, one.drafters) for one in found.results] == [
        ("chat", "off"), ("chat", "draft:4"), ("maths", "off"), ("maths", "draft:4"),
    ]  # fmt: skip
    for one in found.results:
        assert len(one.samples_ts) == 3 and not one.short and not one.failure
        assert one.n_gen == 24 and one.n_prompt > 10 and one.n_threads == 1
        assert one.decode_ts and one.prefill_ts and one.ttft_ms
        assert one.memory_bytes and one.memory_bytes > 1_000_000
        assert one.bandwidth
    plain, drafted = found.results[:2]
    assert plain.speed_up is None and plain.acceptance is None and plain.same_text is None
    assert drafted.speed_up and drafted.tokens_per_pass and 1 <= drafted.tokens_per_pass <= 5
    assert drafted.acceptance is not None and 0 < drafted.acceptance <= 1
    assert drafted.same_text is not None
    assert {Path(one.path).name for one in found.environment.files} == {
        "cpuchat-demo-8m-q8_0.gguf",
        "cpuchat-demo-draft-1m-q8_0.gguf",
    }


async def test_answers_read_aloud_beside_those_that_are_not(tmp_path: Path) -> None:
    found = await report(bench(tmp_path, prompts=["chat"], tokens="24", drafters=["off"], speech="true"))
    silent, spoken = found.results
    assert (silent.speech, spoken.speech) == (False, True)
    assert silent.first_audio_ms is None and silent.real_time_factor is None and silent.speech_memory_bytes is None
    assert spoken.first_audio_ms and spoken.ttft_ms and spoken.first_audio_ms > spoken.ttft_ms
    assert spoken.real_time_factor and spoken.speech_memory_bytes and spoken.speech_memory_bytes > 50e6
    assert spoken.speed_up and spoken.same_text
    table = "\n".join(markdown(found))
    assert "chat + speech" in table and "first audio" in table and "real-time factor" in table
    same = compare_reports(found, found)
    assert {one.old.speech for one in same.differences} == {False, True} and not same.only_old


async def test_random_tokens_at_depths_have_llama_bench_names(tmp_path: Path) -> None:
    found = await report(bench(tmp_path, pp=["32"], tg=["8"], depth=["0", "64"]))
    rows = as_json(found, 2.0)["results"]
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (32, 0, 0), (0, 8, 0), (32, 0, 64), (0, 8, 64),
    ]  # fmt: skip
    for row, result in zip(rows, found.results, strict=True):
        assert row["model_type"] == "llama 7.7M Q8_0" and row["type_k"] == "f16" and row["flash_attn"] == -1
        assert row["model_size"] > 8_000_000 and row["build_commit"] and row["cpu_info"]
        assert row["avg_ns"] == pytest.approx(sum(row["samples_ns"]) / 3)
        n = row["n_prompt"] + row["n_gen"]
        for ns, ts in zip(row["samples_ns"], row["samples_ts"], strict=True):
            assert ts == pytest.approx(1e9 * n / ns)
        if result.decode_ts:
            assert row["cost_per_million_tokens"] == pytest.approx(2.0 / 3600 / result.decode_ts * 1e6)
        else:
            assert row["cost_per_million_tokens"] is None


async def test_a_setup_that_cannot_be_loaded_does_not_keep_others_from_being_measured(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\0" * 64)
    good = bench(tmp_path, tg=["8"]).cells
    bad = [BenchCell(setup=Setup(model=str(damaged)), test=BenchWorkload.random("tg", 8, 0))]
    running = Bench([*bad, *good], 3, Settings(), folder=tmp_path)
    found = await report(running)
    assert [bool(one.failure) for one in found.results] == [True, False]
    assert found.results[1].decode_ts


async def test_a_cell_that_fails_does_not_keep_others_from_being_measured(tmp_path: Path, tiny_model: Path) -> None:
    setup = Setup(model=str(tiny_model), threads=1)
    kinds: tuple[Kind, ...] = ("code", "chat")
    cells = [BenchCell(setup=setup, test=BenchWorkload.of_prompts(kind, 8)) for kind in kinds]
    # More tokens than any model with a usual vocabulary would have.
    prompts = [
        BenchPrompt(kind="code", name="long", text="~ " * 4000),
        BenchPrompt(kind="chat", name="short", text="hello"),
    ]
    found = await report(Bench(cells, 3, Settings(), folder=tmp_path, prompts=prompts))
    assert [bool(one.failure) for one in found.results] == [True, False]
    assert len(found.results[1].samples_ts) == 3


async def test_stop_keeps_what_was_measured(tmp_path: Path) -> None:
    stopping: list[asyncio.Task[None]] = []

    def stop_soon() -> None:
        if running.journal.measurements and not stopping:
            stopping.append(asyncio.ensure_future(running.stop()))

    running = bench(tmp_path, file=tmp_path / "journal", tell=stop_soon, pp=["16"], tg=["8"], rounds="20")
    with pytest.raises(Interrupted):
        await running.run()
    assert 0 < len(Journal(tmp_path / "journal").measurements) < 40


def test_killed_and_resumed(tmp_path: Path) -> None:
    """kill -9 in the middle: the same command measures only what is missing."""
    file = tmp_path / "journal.jsonl"
    command = ("bench", "demo", *LEAN, "--rounds", "40", "-o", str(file), "--json")
    process = start(*command)
    assert process.stderr is not None
    for _ in range(5):
        assert process.stderr.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    before = Journal(file).measurements
    assert 5 <= len(before) < 80
    with file.open("ab") as torn:
        torn.write(b'{"type":"Measurement","cell":0,"rou')
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert f"Resuming: {len(before)} of 80" in done.stderr
    after = Journal(file)
    assert after.finished and len(after.measurements) == 80
    assert {key: after.measurements[key] for key in before} == before
    assert all(len(row["samples_ts"]) == 40 for row in json.loads(done.stdout)["results"])
    again = run(*command)  # nothing is left to measure
    assert again.returncode == 0 and json.loads(again.stdout) == json.loads(done.stdout)


def test_ctrl_c_stops_and_the_same_command_resumes() -> None:
    process = start("bench", "demo", *LEAN, "--rounds", "200")
    assert process.stderr is not None and process.stdout is not None
    assert process.stderr.readline()
    process.send_signal(signal.SIGINT)
    told = process.stderr.read().decode()
    assert process.wait() == Interrupted.exit_code and "The same command resumes." in told
    assert not process.stdout.read()
    (file,) = bench_dir().glob("*.jsonl")
    assert 0 < len(Journal(file).measurements) < 400
    process.stdout.close()
    process.stderr.close()


def test_the_command_prints_markdown_csv_plots_and_differences(tmp_path: Path) -> None:
    svg, old, journal = tmp_path / "plots.svg", tmp_path / "old.json", tmp_path / "journal"
    command = ("bench", "demo", "demo-q4", *LEAN, "-o", str(journal))
    done = run(*command, "--svg", str(svg), "--price-per-hour", "0.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("| cpuchat-demo-8m-") for line in lines) == 4
    assert any(line.startswith("| model ") and "per 1M tokens" in line for line in lines)
    for name in ("kernel", "engine", "model", "engine settings", "load average"):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert "12 of 12: " in done.stderr
    root = ElementTree.parse(svg).getroot()
    texts = {node.text for node in root.iter() if node.text}
    assert {"Decode, tok/s", "Prefill, tok/s"} <= texts
    assert any("demo-8m-q4_k_m" in (text or "") for text in texts)

    done = run(*command, "--csv")  # everything is in the journal
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == 2 * [("16", "0"), ("0", "8")]

    done = run(*command, "--json")
    old.write_text(done.stdout)
    done = run("bench", "--diff", str(old), str(old))
    assert done.returncode == 0 and "No difference exceeds the spread" in done.stdout
    # a machine that was a thousand times as fast
    content = json.loads(old.read_text())
    content["results"] = content["results"][:2]
    for row in content["results"]:
        for name in ("samples_ts", "prefill_samples_ts"):
            row[name] = [1000 * max(row[name])] * 3 if row[name] else []
    old.write_text(json.dumps(content))
    done = run("bench", "--diff", str(old))  # measured again
    assert done.returncode == REGRESSION and "2 are slower" in done.stdout

    done = run("bench", "demo-q4", *LEAN, "-o", str(journal))
    assert done.returncode == UsageError.exit_code and "another benchmark" in done.stderr
    assert run("bench", "demo-q4", *LEAN, "-o", str(journal), "--fresh").returncode == 0


def test_a_file_that_is_no_journal_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my notes\n")
    done = run("bench", "demo", *LEAN, "-o", str(file))
    assert done.returncode == UsageError.exit_code and "not a benchmark's journal" in done.stderr
    assert file.read_text() == "my notes\n"
    assert not bench_dir().exists()


def test_nothing_that_can_be_measured(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\0" * 64)
    done = run("bench", str(damaged), *LEAN)
    assert done.returncode == MeasureFailed.exit_code and done.stderr.startswith("cpuchat: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--rounds", "1"),
        ("demo", "--drafters", "fast"),
        ("--diff", "none.json"),
        ("demo", "--threads", "4096", "--tg", "8"),
        ("demo", "--matrix", "none.toml"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = run("bench", *arguments)
    assert done.returncode == UsageError.exit_code and not done.stdout


def test_one_format_at_a_time() -> None:
    done = run("bench", "demo", "--csv", "--json")
    assert done.returncode == UsageError.exit_code and json.loads(done.stdout)["error"]["code"] == "usage"


async def test_differences_need_more_than_the_spread(tmp_path: Path) -> None:
    import msgspec

    found = await report(bench(tmp_path, tg=["8"]))

    def with_rates(*rates: float) -> Report:
        result = msgspec.structs.replace(found.results[0], samples_ts=rates)
        return msgspec.structs.replace(found, results=(result,))

    def verdict(before: tuple[float, ...], after: tuple[float, ...]) -> str:
        (one,) = compare_reports(with_rates(*before), with_rates(*after)).differences
        return one.verdict

    assert verdict((100, 101, 102), (95, 96, 97)) == "slower"
    assert verdict((100, 101, 102), (105, 106, 107)) == "faster"
    assert verdict((90, 100, 110), (80, 85, 90)) == "same"  # the spread is 20 %
    assert verdict((100, 100, 100), (99, 99, 99)) == "same"  # under 2 %
    file = tmp_path / "found.json"
    file.write_text(json.dumps(as_json(found, None)))
    assert read_report(file) == found
    other = compare_reports(found, msgspec.structs.replace(found, results=()))
    assert len(other.only_old) == 1 and not other.differences and not other.regressed


def test_a_table_grows_on_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal(["bench", "demo", *LEAN, "--rounds", "60"], columns=100, rows=12, home=tmp_path)
    try:
        text = terminal.wait_until(lambda text: "tok/s" in text and " left · " in text, "a table over its progress")
        lines = text.splitlines()
        bar = next(number for number, line in enumerate(lines) if line.startswith("["))
        assert lines[0].startswith("test") and any(line.startswith("pp16") for line in lines[1:bar])
        terminal.press("ctrl+c")
        assert terminal.wait_for_end() == Interrupted.exit_code
    finally:
        terminal.close()
