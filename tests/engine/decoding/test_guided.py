"""Tests answers that must match a grammar, and reasoning within a budget, with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuchat.base import paths
from cpuchat.base.errors import GrammarUnmet, UsageError
from cpuchat.engine.decoding.guided import CallGuide
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.text.reasoning import MARKER_TOKENS, ReasoningSplitter
from cpuchat.grammar.schema import schema_grammar
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import Failed, GenerationFinished, LoadOptions, Sampling, Speculation, TextDelta, Tool
from cpuchat.tools.call_format import GENERIC, CallFormat
from tests.engine.conftest import Load
from tests.support.edited_gguf import edited, sentences
from tests.support.engine_chat import Chat, user
from tests.support.guided import Guided
from tests.support.pairs import OPTIONS, Talker, Wandering
from tests.support.tiny_gguf import CHATML, vocabulary, write_tiny_gguf

PERSON = schema_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 12},
            "kind": {"enum": ["é", "日本"]},
            "scores": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 40}, "maxItems": 3},
        },
        "required": ["name", "kind", "scores"],
    },
    "person.json",
)
_AT = {"type": "object", "properties": {"at": {"enum": ["it"]}}, "required": ["at"], "additionalProperties": False}
LOOK = Tool(name="look", parameters=_AT)
GREEDY = Sampling(temperature=0.0)
CHANNELS = ("reasoning", "answer")
THINK, THOUGHT, END = (vocabulary().index(text) for text in ("<think>", "</think>", "<|im_end|>"))
ENDS = (END, vocabulary().index("<|endoftext|>"))


def assert_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "kind", "scores"]
    assert 2 <= len(person["name"]) <= 12 and person["kind"] in ("é", "日本")
    assert len(person["scores"]) <= 3 and all(1 <= score <= 40 for score in person["scores"])


def test_an_answer_has_the_form_whatever_the_model_would_write(chat: Chat, tiny_model: Path) -> None:
    """A model of random weights, which would never end or write an é."""
    chat.load(tiny_model)
    for sampling in (GREEDY, Sampling(seed=3, temperature=1.5), Sampling(seed=4, top_k=0, repeat_penalty=1.3)):
        chat.ask(user("Who?"), grammar=PERSON, sampling=sampling, max_tokens=0)
        assert_person(chat.text)
        finished = chat.of(GenerationFinished)[0]
        assert finished.stop_reason == "end" and finished.matches_grammar
    chat.ask(user("Who?"), grammar=PERSON, max_tokens=9)
    assert chat.stop_reason == "max_tokens" and not chat.of(GenerationFinished)[0].matches_grammar
    assert chat.text.startswith("{")
    chat.ask(user("Who?"), grammar='root ::= "ab" "c"*', max_tokens=2)
    assert chat.of(GenerationFinished)[0].matches_grammar  # cut off where it may end
    chat.ask(user("Who?"))
    assert not chat.text.startswith("{")


def test_what_cannot_be_answered_under_a_grammar(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"grammar": 'root ::= root "a"'}, GrammarUnmet.code),
        ({"grammar": 'root ::= x{0,2000} "."\nx ::= [ -~]{0,2000} | root', "max_tokens": 0}, GrammarUnmet.code),
        ({"grammar": "root ::= ["}, UsageError.code),
        ({"grammar": PERSON, "stop": ("x",)}, UsageError.code),
    )
    for fields, code in cases:
        chat.request(messages=(user("Who?"),), **fields)
        failed = chat.events[-1]
        assert isinstance(failed, Failed) and failed.code == code


def test_drafts_do_not_change_the_answer(load: Load) -> None:
    """The demo pair, and free drafters, with drafts of every length, most of which the grammar rejects."""
    sampling = Sampling(seed=6)
    options = LoadOptions(n_ctx=512, n_batch=64, n_ubatch=64)
    target = load(paths.demo_dir() / DEMO_FILES["demo"], options)
    talker = Talker(target, load(paths.demo_dir() / DEMO_FILES["demo-draft"], options, threads=target.pool))
    prompt = target.vocab.tokenize_prompt(b"<|im_start|>user\nName a model.<|im_end|>\n<|im_start|>assistant\n")
    plain = talker.say(prompt, sampling=sampling, max_tokens=90, grammar=PERSON)
    assert_person(plain.text)
    for seed in range(2):
        drafted = talker.decide(Wandering(seed)).say(
            prompt, Speculation(drafters=("draft", "suffix")), sampling=sampling, max_tokens=90, grammar=PERSON
        )
        assert drafted.tokens == plain.tokens and drafted.reason == plain.reason and drafted.held == plain.held
        assert drafted.figures is not None and drafted.figures.draft_n


@pytest.fixture
def sampler(load: Load, tiny_model: Path) -> Callable[..., Guided]:
    """Make samplers for the vocabulary of a model whose template may know `<think>`."""
    model = load(tiny_model, OPTIONS, visible_markers=tuple(sorted(MARKER_TOKENS)))

    def _sampler(
        grammar: str = "",
        sampling: Sampling = GREEDY,
        tail: str = "",
        budget: int | None = None,
        tools: Sequence[Tool] = (),
    ) -> Guided:
        guide = CallGuide(model.vocab, GENERIC, tools) if tools else None
        one = Guided(sampling, model.vocab, grammar, budget, guide)
        one.reasoning.begin(ReasoningSplitter(tail))
        return one

    return _sampler


def row(*likely: int) -> np.ndarray:
    """Return logits that put these tokens first, in this order."""
    logits = np.linspace(-1, -2, len(vocabulary()), dtype=np.float32)
    logits[list(likely)] = range(len(likely), 0, -1)
    return logits


def take(sampler: Guided, *likely: int) -> int:
    token = sampler.sample(row(*likely))
    sampler.accept(token)
    return token


@pytest.mark.parametrize("tail", ["<think>\n", ""], ids=["opened by the template", "opened by the model"])
def test_reasoning_comes_before_the_grammar(sampler: Callable[..., Guided], tail: str) -> None:
    one = sampler('root ::= "yes" | "no"', tail=tail)
    if not tail:
        assert take(one, THINK) == THINK
    for character in "hm, {":
        assert take(one, ord(character)) == ord(character)
    assert not one.grammar.is_met
    assert take(one, THOUGHT) == THOUGHT
    assert take(one, ord("\n")) == ord("\n")
    assert take(one, END, ord("x"), ord("n")) == ord("n")
    assert take(one, THINK, ord("\n"), ord("e"), ord("o")) == ord("o")
    assert one.grammar.is_met
    assert one.sample(row(ord("x"))) in ENDS


def test_without_reasoning_the_grammar_begins_at_once(sampler: Callable[..., Guided]) -> None:
    one = sampler('root ::= "\\n"? "<t"')
    assert take(one, ord("x"), ord(" "), ord("\n")) == ord("\n")
    assert take(one, END, THINK, ord("t"), ord("<")) == ord("<")
    assert take(one, ord("t")) == ord("t")
    assert one.grammar.is_met


def test_calls_match_a_grammar_from_where_they_begin(sampler: Callable[..., Guided]) -> None:
    one = sampler(tail="<think>", tools=[LOOK])
    for character in "<tool_call>@":  # reasoning about calls
        assert take(one, ord(character)) == ord(character)
    assert take(one, THOUGHT) == THOUGHT
    for character in "\n\n@ <tool\n<tool_call>":
        assert take(one, ord(character)) == ord(character)
    written, wanted = "", '\n{"name":"look", "arguments": {"at": "it"}}\n</tool_call>'
    while len(written) < len(wanted):  # of what is certain, the usual tokens are taken
        token = take(one, ord("@"), END, ord(wanted[len(written)]))
        written += vocabulary()[token].replace("Ġ", " ").replace("Ċ", "\n")
    assert written == wanted
    assert one.sample(row(ord("@"), END)) == END
    assert one.grammar.is_met


_FORMS = {
    "tag": (GENERIC, "I look.\n<tool_call>\n", "</tool_call>"),
    "object": (CallFormat(shape="object"), "", ""),
    "name": (CallFormat(shape="json", opening="<look>", middle=": "), "", ""),
}


@pytest.fixture(params=["gpt-2", "llama-2", "no space"])
def vocab(request: pytest.FixtureRequest, load: Load, tiny_model: Path, tmp_path: Path) -> Vocab:
    """Return a vocabulary of each kind; those of SentencePiece put a space before a text, or within its first token."""
    out = tmp_path / "model.gguf"
    if request.param == "gpt-2":
        return load(edited(tiny_model, out, {"tokenizer.ggml.pre": request.param}), OPTIONS).vocab
    changes = {"tokenizer.ggml.add_space_prefix": request.param == "llama-2"}
    return load(sentences(tiny_model, out, changes, ["{", "▁{", ">{"]), OPTIONS).vocab


@pytest.mark.parametrize("form", _FORMS)
def test_calls_match_a_grammar_in_every_kind_of_vocabulary(vocab: Vocab, form: str) -> None:
    style, before, after = _FORMS[form]
    guide = CallGuide(vocab, style, [LOOK])
    name = '<look>look: {"at":' if form == "name" else '{"name": "look", "arguments": {"at":'
    grammar = None
    for token in vocab.tokenize(f"{before}{name}".encode(), add_special=False):
        if grammar is not None:
            assert grammar.allows(token)
            grammar.accept(token)
        grammar = grammar or guide.follow(token)
    rest = vocab.spell(('"it"}' + ("}" if form != "name" else "") + after).encode())
    for token in rest:
        assert not grammar.allows(vocab.spell(b"@")[0]) and grammar.allows(token)
        grammar.accept(token)
    assert grammar.is_complete()


def test_the_answer_may_begin_in_the_token_that_ends_the_reasoning(vocab: Vocab) -> None:
    one = Guided(GREEDY, vocab, 'root ::= "{" "x"')
    one.reasoning.begin(ReasoningSplitter("<think>"))
    end = next((token for token in range(vocab.n_tokens) if vocab.piece(token) == b">{"), None)
    ahead = "hm</think" if end is not None else "hm</think>{"
    for character in ahead:
        one.accept(*vocab.spell(character.encode()))
    if end is not None:
        one.accept(end)
    assert not one.grammar.is_met
    one.accept(*vocab.spell(b"x"))
    assert one.grammar.is_met


CLOSING = [ord("\n"), THOUGHT, ord("\n"), ord("\n")]


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("tail", ["<think>\n", ""], ids=["opened by the template", "opened by the model"])
def test_reasoning_ends_with_its_budget(sampler: Callable[..., Guided], tail: str, budget: int) -> None:
    one = sampler('root ::= "yes"', tail=tail, budget=budget)
    said = [] if tail else [take(one, THINK)]
    said += [take(one, ord("h")) for _ in range(budget - len(said))]
    assert [take(one, ord("x")) for _ in CLOSING] == CLOSING
    assert take(one, ord("x")) == ord("y")


def test_reasoning_in_tags_of_several_tokens_ends_too(sampler: Callable[..., Guided]) -> None:
    """Tags that are no tokens of their own, and that the template does not write."""
    for budget in (4, None):
        one = sampler(budget=budget)
        for character in "\n<thinking>hm":
            assert take(one, ord(character)) == ord(character)
        one.reasoning.end() if budget is None else None
        assert take(one, ord("h")) == ord("h")
        closing = ["Ċ", "<", "/", "th", "in", "k", "in", "g", ">", "Ċ", "Ċ"]
        assert [vocabulary()[take(one, ord("x"))] for _ in closing] == closing
        assert [take(one, ord(character)) for character in "x<thinking>"] == [*map(ord, "x<thinking>")]


def test_a_model_that_ends_in_its_reasoning_answers_all_the_same(sampler: Callable[..., Guided]) -> None:
    one = sampler('root ::= "yes"', tail="<think>")
    assert [take(one, END) for _ in CLOSING] == CLOSING
    assert take(one, END) == ord("y")


def test_reasoning_ends_when_the_user_wants_the_answer(sampler: Callable[..., Guided]) -> None:
    one = sampler(tail="<think>")
    assert take(one, ord("h")) == ord("h")
    one.reasoning.end()
    assert take(one, ord("h")) == ord("h")
    assert [take(one, ord("x")) for _ in CLOSING] == CLOSING
    assert take(one, ord("x")) == ord("x")
    assert one.grammar.is_met


def test_an_answer_after_limited_reasoning(chat: Chat, tmp_path: Path) -> None:
    """A model that would reason without an end."""
    chat.load(
        write_tiny_gguf(tmp_path / "thinker.gguf", template=CHATML.replace("assistant\n", "assistant\n<think>\n"))
    )

    def said(**fields: object) -> tuple[str, str]:
        chat.ask(user("Why?"), **{"sampling": GREEDY, "max_tokens": 40, **fields})
        texts = {channel: "".join(d.text for d in chat.of(TextDelta) if d.channel == channel) for channel in CHANNELS}
        return texts["reasoning"], texts["answer"]

    endless, nothing = said()
    assert endless and not nothing
    reasoning, answer = said(reasoning_budget=12)
    assert endless.strip().startswith(reasoning.strip()) and reasoning and answer
    drafted = said(reasoning_budget=12, speculation=Speculation(drafters=("suffix",), depth=4))
    assert drafted == (reasoning, answer)
    assert said(reasoning=False)[0].strip() == ""
    chat.react = lambda event: chat.engine.end_reasoning(event.request_id) if isinstance(event, TextDelta) else None
    assert said(max_tokens=400)[1]
