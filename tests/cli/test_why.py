"""Tests `cpuchat why` with a real worker."""

from __future__ import annotations

import json

import pytest

from tests.cli.program import PLAIN, run, succeeded

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")


def test_a_table_and_json() -> None:
    done = succeeded("why", "demo-q4", *PLAIN)
    assert ["SETTING", "VALUE", "PROOF"] in [line.split() for line in done.stdout.splitlines()]
    for words in ("Machine: ", "each pinned to one CPU", "in 7 of 7 attention nodes"):
        assert words in done.stdout
    found = json.loads(run("why", "demo-q4", *PLAIN, "--flash-attn", "off", "--json").stdout)
    assert [row["value"] for row in found["settings"] if row["name"] == "flash attention"] == ["off"]
