"""Tests the shipped demo pair, run in llama.cpp itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.evaluate import Drafting, ask, speculate
from demo.llama import Engine

pytestmark = pytest.mark.full

FOLDER = Path(__file__).resolve().parents[2] / "cpuchat" / "models" / "demo"
TARGETS = ("cpuchat-demo-8m-q8_0.gguf", "cpuchat-demo-8m-q4_k_m.gguf")
DRAFT = "cpuchat-demo-draft-1m-q8_0.gguf"


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Engine:
    return Engine(FOLDER / request.param)


def test_the_files_are_at_most_20_megabytes() -> None:
    assert sum((FOLDER / name).stat().st_size for name in (*TARGETS, DRAFT)) <= 20_000_000


def test_it_answers_and_ends(target: Engine) -> None:
    assert "Esc" in ask(target, "How do I stop an answer?")
    assert ask(target, "what is 3 plus 4") == "3 plus 4 is 7."


def test_a_follow_up_goes_on_with_the_topic(target: Engine) -> None:
    first = ask(target, "What is speculative decoding?")
    more = ask(target, "What is speculative decoding?", first, "tell me more")
    assert more
    assert more != first


def test_the_draft_guesses_most_tokens_and_changes_nothing(target: Engine) -> None:
    draft = Engine(FOLDER / DRAFT)
    prompt = target.prompt([{"role": "user", "content": "How do I stop an answer?"}])
    count = Drafting()
    assert speculate(target, draft, prompt, count) == target.greedy(prompt, 160)
    assert count.acceptance > 0.5


def test_the_template_is_chatml(target: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert target.prompt(messages) == target.tokenize(text, special=True)
