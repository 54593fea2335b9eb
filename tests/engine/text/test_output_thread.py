"""Tests the thread that texts are processed on, and that takes steps of other work between them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest

from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import OutputThread, TextStream, ThreadedStream
from cpuchat.protocol.messages import Event, TextDelta
from cpuchat.speculation.drafters.ngrams import NgramIndex


@pytest.fixture
def output_thread() -> Iterator[OutputThread]:
    thread = OutputThread()
    yield thread
    thread.close()


def text_of_an_answer(thread: OutputThread) -> str:
    """Return what a stream on `thread` gives for three tokens, once it has finished."""
    events: list[Event] = []
    inner = TextStream(1, events.append, lambda token: b"%c" % token, ReasoningSplitter(), (), 0.0)
    stream = ThreadedStream(thread, inner)
    for token in b"abc":
        stream.feed(token, float(token))
    stream.finish(200.0, stopped=False)
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_text_does_not_wait_for_other_work(output_thread: OutputThread) -> None:
    output_thread.run(repeat(None))  # never ends, but the thread does
    assert text_of_an_answer(output_thread) == "abc"


def test_other_work_that_fails_leaves_the_thread_alone(
    output_thread: OutputThread, capsys: pytest.CaptureFixture[str]
) -> None:
    output_thread.run(map(lambda n: 1 // n, [1, 0]))  # type: ignore[arg-type]
    while "ZeroDivisionError" not in capsys.readouterr().err:
        assert text_of_an_answer(output_thread) == "abc"
    assert text_of_an_answer(output_thread) == "abc"


def test_the_index_of_the_newest_prompt_is_made(output_thread: OutputThread) -> None:
    """Earlier ones that are not finished are given up; what they share with it is not indexed again."""
    index, text = NgramIndex(), [n * n % 977 for n in range(6000)]
    for length in (6000, 2000, 5000, 1000, 4000):
        output_thread.run(index.set_in_steps([*text[:length], length]))
        assert index.is_filling
    while index.is_filling:
        assert text_of_an_answer(output_thread) == "abc"
    expected = NgramIndex()
    expected.set_text([*text[:4000], 4000])
    assert (index.text, index.previous, index.source) == (expected.text, expected.previous, expected.source)
