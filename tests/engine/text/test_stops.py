from hypothesis import given
from hypothesis import strategies as st

from cpuchat.engine.text.reasoning import StopMatcher
from tests.engine.text.test_reasoning import chunks

letters = st.text(alphabet="ab<>/\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab<>/\n", max_size=4), max_size=4).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out, hit = "", False
    for piece in pieces:
        text, hit = matcher.feed(piece)
        out += text
        if hit:
            break
    return out + matcher.flush(), hit


def first_complete(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Apply the definition: read letter by letter, stop when the text so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(letters, stop_lists, st.lists(st.integers(0, 30)))
def test_any_chunking_gives_what_the_definition_says(text, stops, cuts):
    assert run(stops, chunks(text, cuts)) == first_complete(text, stops)


def test_holds_back_only_what_could_become_a_stop_string():
    matcher = StopMatcher(("</s>", "User:"))
    assert matcher.feed("a </") == ("a ", False)
    assert matcher.feed("b> Us") == ("</b> ", False)
    assert matcher.feed("er: hello") == ("", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""
