from __future__ import annotations

import pytest

from cpuchat.models.downloads.state import Download
from cpuchat.present import downloads
from tests.support.downloads import download, model

QWEN = model("Q4_K_M", 4_683_073_504)


def test_the_quantization_is_told_once() -> None:
    assert downloads.name(QWEN) == "Qwen2.5-7B-Instruct"
    assert downloads.download_title(QWEN) == "Qwen2.5-7B-Instruct Q4_K_M"
    assert downloads.download_title(model("Q4_K_M", 1, name="\x1b[31mred")) == "␛[31mred Q4_K_M"


@pytest.mark.parametrize(
    ("size", "share", "amount"),
    [
        (4_683_073_504, 0.0, "0.0/4.7 GB"),
        (4_683_073_504, 0.61, "2.9/4.7 GB"),
        (4_683_073_504, 1.0, "4.7/4.7 GB"),
        (15_237_853_184, 0.05, " 0.8/15.2 GB"),
        (621_000_000_000, 0.1, " 62/621 GB"),
        (474_400, 0.5, "237/474 kB"),
        (1_000, 1.0, "1.0/1.0 kB"),
        (0, 0.0, "0/0 B"),
    ],
)
def test_what_is_here_of_how_much(size: int, share: float, amount: str) -> None:
    assert downloads.amount(download(model("Q4_K_M", size), share)) == amount


def test_time_left() -> None:
    left = [downloads.left(seconds).strip() for seconds in (None, 0, 99, 100, 5950, 6000, 356_399, 356_400)]
    assert left == ["", "0 s left", "99 s left", "2 min left", "99 min left", "1.7 h left", "99.0 h left", "days left"]


def test_columns_keep_their_width() -> None:
    for state in ("queued", "running", "waiting", "checking", "paused", "done", "failed"):
        for seconds in (None, 3.0, 4000.0, 99_999.0):
            shown = download(QWEN, 0.3, state=state, speed=3.1e6, seconds_left=seconds, retry_in=120, attempt=12)
            assert len(downloads.state(shown)) == downloads.STATE
    assert {len(downloads.percent(download(QWEN, share))) for share in (0, 0.099, 0.1, 0.999, 1)} == {5}
    assert {len(downloads.download_speed(value)) for value in (0, 1, 999, 38.1e6, 1.2e9)} == {downloads.SPEED}


def test_the_bar_shows_what_is_downloaded_then_what_is_verified() -> None:
    assert [downloads.percent(download(QWEN, share)) for share in (0.9999, 1.0)] == [" 99 %", "100 %"]
    checking = download(QWEN, 1.0, state="checking", checked=QWEN.size // 4)
    assert downloads.share(checking) == pytest.approx(0.25)
    assert "Verifying" in downloads.state(checking)


def test_details_have_problem_and_hint_and_nothing_steers_the_terminal() -> None:
    failed: Download = download(QWEN, 0.2, state="failed", message="The hub said\x1b[2J no.", hint="Ask again.")
    told = dict(downloads.download_details(failed))
    assert told["problem"] == "The hub said␛[2J no. Ask again."
    assert told["state"].startswith("failed; 937 MB of 4.7 GB")
    assert "path" not in told
    parts = dict(downloads.download_details(download(model("F16", 15_000_000_000, parts=4))))
    assert parts["file"] == "Qwen2.5-7B-Instruct-F16-00001-of-00004.gguf and 3 more parts"
