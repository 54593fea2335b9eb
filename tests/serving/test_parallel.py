"""Tests a server that writes several answers at once: each has its own text, its own end and its own figures."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.program import run
from tests.serving.test_cancel import CHAT, first_text, forever
from tests.support.serving import Server, chat, server


@pytest.fixture(scope="module")
def several(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(endless_model, tmp_path_factory.mktemp("served"), "--parallel", "3", ctx=2048) as running:
        yield running


@contextlib.contextmanager
def writing(running: Server, n: int) -> Iterator[list[Iterator[str]]]:
    """Yield the lines of streams without an end that have all begun."""
    with contextlib.ExitStack() as stack:
        found = list[Iterator[str]]()
        for number in range(n):
            response = stack.enter_context(running.http.stream("POST", CHAT, json=forever(f"Hello {number}")))
            found.append(response.iter_lines())
            assert first_text(found[-1])
        yield found


def errors(lines: Iterator[str]) -> list[str]:
    return [json.loads(line[6:])["error"]["code"] for line in lines if line.startswith('data: {"error"')]


def test_answers_run_beside_each_other_and_one_that_is_cut_ends_no_other(several: Server) -> None:
    assert several.metric("slots") == 3
    assert several.http.get("/v1/models").json()["data"][0]["meta"]["parallel"] == 3
    with writing(several, 1) as lines:
        with writing(several, 1):
            several.wait_for(running=2)
            assert several.post(chat("Hi", max_tokens=8)).json()["usage"]["completion_tokens"] == 8
        several.wait_for(running=1)
        assert first_text(lines[0])
    several.wait_for(running=0)
    log = (several.folder / "stderr.txt").read_text()
    assert "3 answers at once, each with 2,048 tokens of context" in log and "3 at once" in log


def test_speeds_of_all_slots_are_told(several: Server) -> None:
    with writing(several, 2) as lines:
        for one in lines:
            for _ in range(3):
                first_text(one)
        rates = [several.metric("slot_decode_tokens_per_second", slot=str(slot)) for slot in range(2)]
        assert all(rates) and several.metric("read_bandwidth_bytes_per_second") is None
    several.wait_for(running=0)


def test_the_text_of_each_is_what_it_is_alone(tiny_model: Path, tmp_path: Path) -> None:
    with server(tiny_model, tmp_path, "--parallel", "4") as running:
        bodies = [chat(f"Tell me about {topic}. " * 9, max_tokens=32) for topic in ("cats", "dogs", "the sea", "tea")]
        alone = [running.post({**body, "cache_salt": "alone"}).json()["choices"][0]["message"] for body in bodies]
        with ThreadPoolExecutor(4) as threads:
            answers = [*threads.map(lambda body: running.post({**body, "cache_salt": "beside"}).json(), bodies)]
        assert [answer["choices"][0]["message"] for answer in answers] == alone
        several = running.post({**bodies[0], "n": 4, "temperature": 1.0, "seed": 5}).json()["choices"]
        assert len({one["message"]["content"] for one in several}) == 4


def test_a_worker_that_dies_is_told_to_each_and_its_model_loaded_once(several: Server) -> None:
    loads = several.metric("model_loads_total") or 0
    with writing(several, 3) as lines:
        several.worker.kill()
        assert [errors(one) for one in lines] == [["worker_died"]] * 3
    with ThreadPoolExecutor(3) as threads:
        again = [*threads.map(lambda _: several.post(chat("Hi", max_tokens=4)).status_code, range(3))]
    assert again == [200] * 3 and several.metric("model_loads_total") == loads + 1


def test_a_signal_ends_each(endless_model: Path, tmp_path: Path) -> None:
    with server(endless_model, tmp_path, "--parallel", "2", ctx=2048) as running, writing(running, 2) as lines:
        running.process.send_signal(signal.SIGTERM)
        assert [errors(one) for one in lines] == [["shutting_down"]] * 2
        assert running.process.wait(180) == 0


def test_a_number_of_answers_that_cannot_be_is_refused(tiny_model: Path) -> None:
    done = run("serve", str(tiny_model), "--parallel", "99")
    assert done.returncode == 2 and "--parallel" in done.stderr
