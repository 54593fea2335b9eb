"""Tests a server that writes several answers at once: each has its own text, its own end and its own figures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving.test_cancel import CHAT, errors, first_text, forever, sent, writing
from tests.support.serving import Server, chat, server


@pytest.fixture(scope="module")
def several(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(endless_model, tmp_path_factory.mktemp("served"), "--parallel", "3", ctx=2048) as running:
        yield running


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


def test_a_client_learns_nothing_of_what_another_lane_holds(several: Server) -> None:
    prompt = "the inner line " * 60

    def cached(salt: str) -> int:
        usage = several.post(chat(prompt, max_tokens=2, cache_salt=salt)).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    with several.http.stream("POST", CHAT, json={**forever(prompt), "cache_salt": "ann"}) as response:
        assert first_text(response.iter_lines())
        assert cached("bob") == 0 and cached("ann") > 500
    several.wait_for(running=0)


def test_a_prompt_longer_than_a_lane_and_an_answer_that_fills_one_leave_the_others_alone(several: Server) -> None:
    with writing(several, 1) as lines:
        assert several.post(chat("too long " * 400)).json()["error"]["code"] == "context_length_exceeded"
        [choice] = several.post(chat("the inner line " * 140, max_tokens=-1)).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert several.metric("requests_running") == 1 and first_text(lines[0])
    several.wait_for(running=0)


def test_requests_that_are_cut_in_quick_succession_leave_no_slot_in_use(several: Server) -> None:
    for number in range(30):
        with sent(several, chat(f"{number} " + "the inner line " * 40, max_tokens=-1, n=1 + number % 3)):
            several.metric("slots")  # as long as an answer of the server takes
    several.wait_for(running=0, waiting=0)
    assert several.post(chat("Hi", max_tokens=2)).status_code == 200


def test_tokens_are_counted_as_their_clients_count_them_also_of_answers_that_are_cut(several: Server) -> None:
    before = several.metric("predicted_tokens_total") or 0

    def read(number: int) -> int:
        told = 0
        body = chat(f"{number} Hello", max_tokens=40, stream=True)
        with several.http.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            while told < (40, 9)[number % 2]:
                told += len(first_text(lines))
            if not number % 2:
                assert not [line for line in lines if '"content":"c' in line]
        return told

    with ThreadPoolExecutor(3) as threads:
        told = sum(threads.map(read, range(6)))
    several.wait_for(running=0)
    counted = (several.metric("predicted_tokens_total") or 0) - before
    assert told <= counted <= 6 * 40 and counted < told + 60  # what was on its way to those that left


def test_a_worker_that_dies_is_told_to_each_and_its_model_loaded_once(several: Server) -> None:
    loads = several.metric("model_loads_total") or 0
    with writing(several, 3) as lines:
        several.worker.kill()
        assert [errors(one) for one in lines] == [["worker_died"]] * 3
    assert "killed by SIGKILL" in (several.folder / "stderr.txt").read_text()
    with ThreadPoolExecutor(3) as threads:
        again = [*threads.map(lambda _: several.post(chat("Hi", max_tokens=4)).status_code, range(3))]
    assert again == [200] * 3 and several.metric("model_loads_total") == loads + 1
