"""Tests benchmarks with the real worker and the demo models: figures, failures, stopping, differences."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import Interrupted, MeasureFailed
from cpuchat.bench.matrix import BenchCell, BenchPrompt, BenchWorkload, Setup, cells_of, load, workloads
from cpuchat.bench.results import (
    REGRESSION,
    Environment,
    Measurement,
    Report,
    Result,
    as_json,
    compare_reports,
    read_report,
    report_of,
)
from cpuchat.bench.run import Bench
from cpuchat.bench.sample import Sample
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.present.bench import diff_lines, notes, summary
from cpuchat.protocol.model_info import EngineInfo
from tests.cli.program import run
from tests.support.terminal import Terminal

pytestmark = pytest.mark.usefixtures("measured_machine")

PROMPTS = [one for one in load() if one.name in ("learn-piano", "water-tank")]
LEAN = ("--threads", "1", "--tg", "8", "--pp", "16")


def bench(*tests: BenchWorkload, **lists: Sequence[str]) -> Bench:
    cells = cells_of(["demo"], tests, Settings(), Library([]), threads=["1"], **lists)
    return Bench(cells, 3, Settings(), prompts=PROMPTS)


def damaged(folder: Path) -> Path:
    (folder / "damaged.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    return folder / "damaged.gguf"


async def report(running: Bench) -> Report:
    await running.run()
    return running.report()


async def test_prompts_plain_and_drafted() -> None:
    found = await report(bench(*workloads(["chat", "maths"], 24), drafters=["draft:4"]))
    assert [(one.cell.test.name, one.cell.drafting) for one in found.results] == [
        ("chat", "off"), ("chat", "draft:4"), ("maths", "off"), ("maths", "draft:4"),
    ]  # fmt: skip
    for one in found.results:
        assert len(one.samples) == 3 and not one.failure
        assert {sample.predicted_n for sample in one.samples} == {24} and one.n_threads == 1
        assert one.rates("decode") and one.rates("prefill") and one.median("ttft_ms") and one.median("bandwidth")
        assert (one.median("memory") or 0) > 1_000_000
    plain, drafted = found.results[:2]
    assert plain.speed_up is None and plain.acceptance is None and plain.same_text is None
    assert drafted.speed_up and drafted.tokens_per_pass and 1 <= drafted.tokens_per_pass <= 5
    assert drafted.acceptance is not None and 0 < drafted.acceptance <= 1
    assert drafted.same_text is not None
    assert {Path(one.path).name for one in found.environment.files} == {
        "cpuchat-demo-8m-q8_0.gguf",
        "cpuchat-demo-draft-1m-q8_0.gguf",
    }


async def test_users_at_once() -> None:
    tests = (*workloads(["chat"], 24, users=[1, 3]), *workloads(["chat"], 1, users=[2]))
    found = await report(bench(*tests, drafters=["off"]))
    one, three, short = found.results
    assert not one.failure and not three.failure and one.median("each") is None
    assert {sample.predicted_n for sample in three.samples} == {72}
    each, together = three.median("each"), three.median("decode")
    assert each and together and three.median("ttft_ms") and not three.rates("prefill")
    assert three.median("bandwidth") is None  # passes over several answers read the weights once
    row = next(line for line in summary(found) if "chat × 3 users" in line)
    assert " each)" in row and "× one user" in row
    assert as_json(found)["results"][1]["each"] == each
    assert short.staggered and as_json(found)["results"][2]["staggered"]  # the first token is the last one too
    assert any("staggered: " in line for line in notes(found)) and not one.staggered


async def test_a_stop_ends_the_answers_of_all_users() -> None:
    running = bench(*workloads(["chat"], 20_000, users=[3]), drafters=["off"])
    measuring = asyncio.create_task(running.run())
    async with asyncio.timeout(120):
        while len(running._backend._running) < 3:
            await asyncio.sleep(0.01)
        await running.stop()
    async with asyncio.timeout(10):
        with pytest.raises(Interrupted):
            await measuring


async def test_random_tokens_at_depths_have_llama_bench_names_whatever_else_cannot_be_loaded(tmp_path: Path) -> None:
    bad = BenchCell(setup=Setup(model=str(damaged(tmp_path))), test=BenchWorkload.random("tg", 8, 0))
    good = bench(*workloads(pp=[32], tg=[8], depth=[0, 64])).cells
    found = await report(Bench([bad, *good], 3, Settings()))
    assert [bool(one.failure) for one in found.results] == [True, False, False, False, False]
    rows = as_json(found)["results"][1:]
    assert [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        (32, 0, 0), (0, 8, 0), (32, 0, 64), (0, 8, 64),
    ]  # fmt: skip
    for row in rows:
        assert row["model_type"] == "llama 7.7M Q8_0"
        assert row["model_size"] > 8_000_000
        assert row["avg_ns"] == pytest.approx(sum(row["samples_ns"]) / 3)
        n = row["n_prompt"] + row["n_gen"]
        for ns, ts in zip(row["samples_ns"], row["samples_ts"], strict=True):
            assert ts == pytest.approx(1e9 * n / ns)


async def test_a_cell_that_fails_does_not_keep_others_from_being_measured(tiny_model: Path) -> None:
    setup = Setup(model=str(tiny_model), threads=1)
    cells = [BenchCell(setup=setup, test=test) for test in workloads(["code", "chat"], 8)]
    # More tokens than any model with a usual vocabulary would have.
    prompts = [
        BenchPrompt(kind="code", name="long", text="~ " * 4000),
        BenchPrompt(kind="chat", name="short", text="hello"),
    ]
    found = await report(Bench(cells, 3, Settings(), prompts=prompts))
    assert [bool(one.failure) for one in found.results] == [True, False]
    assert len(found.results[1].samples) == 3


def test_each_measurement_is_a_line_and_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    arguments = ["bench", "demo", *LEAN, "--rounds", "1000"]
    with closing(Terminal(arguments, columns=100, rows=60, home=tmp_path)) as terminal:
        terminal.wait_until(lambda text: "pp16: " in text and "2 of 2000: " in text, "a line for each measurement")
        terminal.press("ctrl+c")
        terminal.wait_until(lambda text: "engine settings" in text, "the report")
        assert terminal.wait_for_end() == Interrupted.exit_code
        assert int(re.search(r"(\d+) rounds?: median", " ".join(terminal.text.split()))[1]) < 1000


def test_the_command_prints_markdown_and_differences(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    done = run("bench", "demo", "demo-q4", *LEAN)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("| cpuchat-demo-8m-") for line in lines) == 4
    for name in ("kernel", "engine", "model", "engine settings", "load average"):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert "12 of 12: " in done.stderr

    done = run("bench", "demo", *LEAN, "--json")
    old.write_text(done.stdout)
    done = run("bench", "--diff", str(old), str(old))
    assert done.returncode == 0 and "No figure is known to differ" in done.stdout
    content = json.loads(old.read_text())
    for file, rate in ((old, 1000.0), (new, 900.0)):
        for row in content["results"]:
            for sample in row["samples"]:
                sample |= {name: sample[name] and rate for name in ("prefill", "decode")} | {"disturbed": False}
        file.write_text(json.dumps(content))
    done = run("bench", "--diff", str(old), str(new))
    assert done.returncode == REGRESSION and "2 are slower" in done.stdout


def test_nothing_that_can_be_measured(tmp_path: Path) -> None:
    done = run("bench", str(damaged(tmp_path)), *LEAN)
    assert done.returncode == MeasureFailed.exit_code and done.stderr.startswith("cpuchat: ")


def made_report(*rates: float, disturbed: bool = False) -> Report:
    cell = BenchCell(setup=Setup(model="demo.gguf"), test=BenchWorkload.random("tg", 8, 0))
    samples = tuple(Sample(seconds=8 / rate, decode=rate, disturbed=disturbed) for rate in rates)
    environment = Environment(
        date="", cpuchat="", python="", kernel="", cpu="", machine="", memory_bytes=0, memory_modules="",
        engine=EngineInfo(version=""), load=0.0,
    )  # fmt: skip
    return Report(environment=environment, rounds=3, results=(Result(cell=cell, samples=samples),))


def test_differences_need_more_than_the_scatter_of_undisturbed_rounds() -> None:
    def verdict(before: Report, after: Report) -> str:
        (one,) = compare_reports(before, after).differences
        return one.verdict

    before = made_report(100, 101, 102)
    assert verdict(before, made_report(90, 91, 92)) == "slower"
    assert verdict(before, made_report(110, 111, 112)) == "faster"
    assert verdict(before, made_report(90, 91, 92, disturbed=True)) == "noisy"
    assert verdict(made_report(90, 100, 110), made_report(70, 75, 80)) == "noisy"
    assert verdict(made_report(*[100] * 20), made_report(*[99.5] * 20)) == "same"
    nothing = [Sample(seconds=1.0, decode=0.0)] * 3  # of answers of one token
    cell = msgspec.structs.replace(before.results[0], samples=tuple(nothing))
    assert not compare_reports(before, msgspec.structs.replace(before, results=(cell,))).differences


def test_runs_that_leave_something_open_say_what_they_could_show_and_how_many_rounds_show_5_percent() -> None:
    few, gained = [100.0, 102.0, 98.0], [105.0, 107.1, 102.9]
    found = compare_reports(made_report(*few), made_report(*gained))
    assert [one.verdict for one in found.differences] == ["noisy"]
    told, saved = found.resolution, compare_reports(*2 * (made_report(*few),)).resolution
    assert told is not None and saved is not None and saved.rounds == told.rounds
    assert told.smallest == pytest.approx(saved.smallest) and told.smallest > 0.05
    assert told.rounds is not None and 3 < told.rounds < 15
    (line,) = (one for one in diff_lines(found, *2 * (made_report(*few).environment,)) if "Too noisy" in one)
    assert line.endswith(f"to find 5 %, run both with --rounds {told.rounds}.")
    both = (rates * told.rounds for rates in (few, gained))
    more = compare_reports(*(made_report(*rates[: told.rounds]) for rates in both))
    assert more.differences[0].verdict == "faster"
    disturbed = compare_reports(made_report(*few, disturbed=True), made_report(*gained))
    assert disturbed.resolution is None
    (line,) = (one for one in diff_lines(disturbed, *2 * (made_report(*few).environment,)) if "Too noisy" in one)
    assert line.startswith("Too noisy to tell of 1 figure: ") and "other programs" in line and "--rounds" not in line


@pytest.mark.parametrize(("n", "scatter"), [(9, 0.01), (9, 0.02), (9, 0.04), (20, 0.045), (29, 0.045)])
def test_no_fewer_rounds_are_asked_for_than_were_run(n: int, scatter: float) -> None:
    rates = [100 * (1 + scatter * (-1) ** k) for k in range(n)]
    found = compare_reports(made_report(*rates), made_report(*(1.018 * rate for rate in rates)))
    told = found.resolution
    assert told is not None and told.smallest > 0.02
    (line,) = (one for one in diff_lines(found, *2 * (made_report(*rates).environment,)) if "Too noisy" in one)
    assert ("to find 5 %" in line) == (told.smallest > 0.05)
    assert told.rounds is None or told.rounds >= n


def test_answers_of_one_token_are_not_compared_with_plain_ones() -> None:
    plain = BenchCell(setup=Setup(model="demo.gguf"), test=BenchWorkload.random("tg", 8, 0))
    drafted, rates = msgspec.structs.replace(plain, drafters="suffix"), ((10.0, 20.0), (10.0, 0.0))
    measured = [
        Measurement(cell, Sample(seconds=1.0, decode=rate)) for pair in rates
        for cell, rate in zip((plain, drafted), pair, strict=True)
    ]  # fmt: skip
    found = report_of(made_report().environment, 2, (plain, drafted), measured, {}, {})
    assert found.results[1].speed_up == pytest.approx(2.0)


def test_a_report_without_a_measured_bandwidth_says_why_it_has_no_utilization() -> None:
    found = made_report(100, 101)
    measured = msgspec.structs.replace(found, results=(msgspec.structs.replace(found.results[0], peak=50e9),))
    assert any("`cpuchat probe`" in note for note in notes(found)) and not notes(measured)


def test_a_report_is_read_as_it_was_written_and_cells_of_only_one_are_named(tmp_path: Path) -> None:
    found, file = made_report(1.0, 2.0), tmp_path / "found.json"
    file.write_bytes(msgspec.json.encode(as_json(found)))
    assert read_report(file) == found
    other = compare_reports(found, msgspec.structs.replace(found, results=()))
    assert len(other.only_old) == 1 and not other.differences and not other.regressed
