from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuchat.engine.text.reasoning import FORMATS, MARKER_TOKENS, Format, ReasoningSplitter


def run(pieces: list[str], prompt_tail: str = "", template: str = "") -> tuple[str, str]:
    """Return (reasoning, answer)."""
    splitter = ReasoningSplitter(prompt_tail, template)
    out = {"reasoning": "", "answer": ""}
    for part in (*map(splitter.feed, pieces), splitter.flush()):
        for channel, text in part:
            out[channel] += text
    return out["reasoning"], out["answer"]


APRIEL = "{%- set reasoning_prompt='... the following format: [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE].' -%}"
FUNCTIONARY = "{{ '>>>all\\n' + message['content'] }}{% if add_generation_prompt %}{{ '>>>' }}{% endif %}"


def chunks(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(at)]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nhm\n</think>\n\nHi", "hm\n", "Hi"),
        ("\n<think>hm</think>Hi", "hm", "Hi"),
        ("<think>hm</think> \n\n    code", "hm", "    code"),
        ("<think>hm</think>  Hi", "hm", "Hi"),
        ("<think>never closed", "never closed", ""),
        ("<reasoning>a</reasoning>b", "a", "b"),
        ("[THINK]a[/THINK]b", "a", "b"),
        ("<seed:think>a</seed:think>b", "a", "b"),
        ("◁think▷a◁/think▷b", "a", "b"),
        ("<|channel>thought\na\n<channel|>b", "a\n", "b"),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "a", "b"),
        ("<|START_RESPONSE|>b<|END_RESPONSE|>", "", "b"),
        ("<|begin_of_thought|>\na<|end_of_thought|>\n\n<|begin_of_solution|>\nb\n<|end_of_solution|>\n", "a", "b\n"),
        ("<|think|>a<|end|><|begin|>assistant<|content|>b<|end|>", "a", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>", "a", "b"),
        ("<|channel|>final<|message|>b", "", "b"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
            "<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|>"
            "<|start|>assistant<|channel|>final<|message|>d",
            "ac",
            "bd",
        ),
        ("<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>", "a", "b"),
        ("<think:opensource>\na\n</think:opensource>b", "a\n", "b"),
        (" to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", "a", "b"),
        (" to=user<|message|>b<|eot|>", "", "b"),
        (
            " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b"
            "<|eom|><|start|>assistant to=self<|message|>c<|eom|><|start|>assistant to=user<|message|>d",
            "ac",
            "bd",
        ),
        ("<think>a</think>\n<think>b</think>\nc", "ab", "c"),
        ("<think>a</think>b\n<think>c</think>\nd", "ac", "b\nd"),
        ("</think>\n\nHi", "", "Hi"),
    ],
)
def test_formats(text, reasoning, answer):
    assert run([text]) == (reasoning, answer)


@pytest.mark.parametrize(
    "text",
    [
        "The <think> tag opens reasoning and </think> closes it.",
        "Write `<think>`:\n<think>\nx\n</think>\n",
        "```\n<think>\n```\n",
        "Hello <|end|> there",
        "  indented from the start",
        "<thin ice",
        "<think",
        "\n\n",
    ],
)
def test_text_about_markers_stays_text(text):
    assert run([text]) == ("", text)


def test_quoted_markers_of_a_thinking_model_stay_text():
    answer = "Use `<think>`:\n```xml\n<think>\nx\n</think>\n```\ndone, and <think> here"
    assert run(["<think>a</think>", answer]) == ("a", answer)
    harmony = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>"
    assert run([harmony, "it ends with <|end|> and <|return|>, you know"]) == (
        "a",
        "it ends with <|end|> and <|return|>, you know",
    )


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "answer"),
    [
        ("<|im_start|>assistant\n<think>\n", "a\n</think>\n\nb", "a\n", "b"),
        ("<|im_start|>assistant\n<think>\n", "<think>\na</think>b", "a", "b"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "b", "", "b"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "\n\nb", "", "b"),
        ("<|turn>model\n<|channel>thought\n<channel|>", "b", "", "b"),
        ("<|start|>assistant", "<|channel|>analysis<|message|>a<|end|>", "a", ""),
        ("<|start|>assistant<|channel|>analysis<|message|>", "a<|end|><|start|>assistant", "a", ""),
        ("Here are my reasoning steps:\n", "a\n[BEGIN FINAL RESPONSE]\nb\n[END FINAL RESPONSE]", "a\n", "b\n"),
        ("assistant\n", "Here are my reasoning steps:\na", "", "Here are my reasoning steps:\na"),
        ("<|start|>assistant", " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b", "a", "b"),
        ("<｜hy_Assistant:opensource｜><think:opensource></think:opensource>", "b", "", "b"),
        ("user asked about <think> tags. Assistant:", " b", "", " b"),
    ],
)
def test_the_prompt_decides_where_the_answer_starts(tail, text, reasoning, answer):
    assert run([text], tail) == (reasoning, answer)


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "answer"),
    [
        (APRIEL, "Here are my reasoning steps:\na\n[BEGIN FINAL RESPONSE]\nb\n[END FINAL RESPONSE]\n", "a\n", "b\n"),
        (APRIEL, "[BEGIN FINAL RESPONSE]\nb\n[END FINAL RESPONSE]", "", "b\n"),
        (APRIEL, "Here are my steps:\na", "", "Here are my steps:\na"),
        (FUNCTIONARY, "all\nb", "", "b"),
        (FUNCTIONARY, "all of it\nb", "", "all of it\nb"),
        ("", "all\nb", "", "all\nb"),
    ],
)
def test_prose_is_a_marker_only_for_models_whose_template_has_it(template, text, reasoning, answer):
    assert run([text], template=template) == (reasoning, answer)


def test_plain_text_is_passed_on_at_once():
    splitter = ReasoningSplitter()
    assert splitter.feed("Hello") == [("answer", "Hello")]
    assert splitter.feed(" <") == [("answer", " <")]
    splitter = ReasoningSplitter("<think>")
    assert splitter.feed("so </th") == [("reasoning", "so ")]
    assert splitter.feed("is") == [("reasoning", "</this")]


parts = sorted(
    {m for f in FORMATS for m in (*f.openings, *f.closings, *f.before_answer, *f.after_answer, *f.reopening)}
)
texts = st.lists(
    st.one_of(st.sampled_from(parts), st.sampled_from(["<think>", "</think>", "```\n", "\n", " ", "a", "b\n", "<|"])),
    max_size=14,
).map("".join)
tails = st.sampled_from(["", "<think>\n", "<think></think>", "<|start|>assistant", "<|think|>", "<|START_THINKING|>"])


@settings(max_examples=30, deadline=None)
@given(texts, tails, st.sampled_from(["", APRIEL, FUNCTIONARY]), st.lists(st.integers(0, 1000), max_size=12))
def test_any_chunking_gives_the_same(text, tail, template, cuts):
    whole = run([text], tail, template)
    assert run(chunks(text, cuts), tail, template) == whole
    assert run(list(text), tail, template) == whole


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="<[◁"), max_size=60), st.sampled_from(FORMATS))
def test_nothing_is_lost(text, kind):
    assert run([text]) == ("", text)
    if not kind.hint:
        reasoning, answer = run([kind.openings[0] + text + kind.closings[0] + "end"])
        assert reasoning.strip() == text.strip()
        assert answer == "end"


def test_marker_tokens_are_whole_tokens():
    assert {"<think>", "</think>", "[THINK]", "<|channel|>", "<|message|>", "<|end|>", "◁/think▷"} <= MARKER_TOKENS
    assert "analysis" not in MARKER_TOKENS


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.openings], ids=lambda kind: kind.openings[0])
@pytest.mark.parametrize("opened", [False, True])
def test_an_answer_is_written_as_it_was_and_goes_on(kind: Format, opened: bool) -> None:
    tail, template = kind.openings[0] if opened else "", kind.openings[0] + kind.hint
    for reasoning, content in (("a\n", "b"), ("a", ""), ("", "b")):
        written = ReasoningSplitter(tail, template).written(reasoning, content)
        assert run([written], tail, template) == (reasoning, content)
        splitter = ReasoningSplitter(tail, template)
        splitter.resume(written)
        assert [*splitter.feed(" c"), *splitter.flush()] == [("answer" if content else "reasoning", " c")]
