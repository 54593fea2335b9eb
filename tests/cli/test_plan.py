"""`cpuchat plan` as a program."""

from __future__ import annotations

import json

from cpuchat.base import paths
from tests.cli.program import run, succeeded


def test_a_model_on_a_machine() -> None:
    done = succeeded("plan", "70b:Q4_K_M", "--on", "9754", "--draft", "llama-3.2-1b-instruct", "--usd-per-hour", "2")
    assert "70B Q4_K_M on EPYC 9754\n" in done.stdout and "GB/s" in done.stdout
    assert "draft model  Llama 3.2 1B Instruct Q4_K_M" in done.stdout
    for label in ("memory", "tok/s", "first token", "ceilings", "draft model", "users", "cost"):
        assert f"\n  {label} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_smallest_model_is_planned_with_its_draft_or_without() -> None:
    done = run("plan", "demo")
    assert done.returncode == 0 and "draft model  cpuchat demo draft 1M" in done.stdout, done.stderr
    assert "draft" not in run("plan", "demo", "--draft", "none").stdout


def test_the_catalog_and_a_model_on_a_machine_of_the_user() -> None:
    folder = paths.user_machines_dir()
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('cpu = "zen3"\ncores = 8\nclock_ghz = 4\nmemory_gb = 64\nmeasured = 40\n')
    done = succeeded("plan", "--on", "mine", "--tok-s", "10")
    assert "Qwen3 30B A3B Instruct 2507" in done.stdout and "\nPlain decoding" in done.stderr
    assert "Llama 3.3 70B Instruct" not in done.stdout
    made = json.loads(run("plan", "8b", "--on", "mine", "--json").stdout)
    assert made["machine"]["name"] == "mine"
    assert 4 < made["tok_s"]["low"] <= made["tok_s"]["value"] <= made["tok_s"]["high"] < 9


def test_a_model_on_all_machines_and_the_machines() -> None:
    done = succeeded("plan", "llama-3.3-70b-instruct:Q4_K_M", "--on", "all")
    assert "USERS: chats" in done.stderr and "EPYC 9655" in done.stdout and "the fastest machine first" in done.stdout
    assert "\nApple M4 Pro, CPU only" in done.stdout and "too large" in done.stdout
    rates = [one["tok_s"]["value"] for one in json.loads(run("plan", "8b", "--on", "all", "--json").stdout)]
    assert rates == sorted(rates, reverse=True) and len(rates) >= 11
    assert "460.8 GB/s, data sheet: 12 × DDR5-4800 × 8 bytes" in run("plan", "--machines").stdout
