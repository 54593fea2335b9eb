"""Tests presets: their file, and what they set for a run."""

from __future__ import annotations

import pytest

from cpuchat.base.errors import SettingsError, UsageError
from cpuchat.cli.options import laid_over, with_preset
from cpuchat.config.presets import find_preset
from cpuchat.config.settings import Settings, with_changes
from tests.support.presets import write_presets

FILE = """\
# For pull requests
["Code review"]
system_prompt = "Be strict."
model = "demo"
reasoning = "off"
sampling = { temperature = 0.2 }

[story]
sampling = { temperature = 1.2, top_k = 0 } # lively
"""


def test_what_a_preset_sets_replaces_the_settings() -> None:
    write_presets(FILE)
    chosen = Settings()
    chosen.chat.system_prompt, chosen.sampling.seed = "Be brief.", 7
    review, story = (with_changes(chosen, find_preset(name).changes) for name in ("Code review", "story"))
    assert (review.chat.system_prompt, review.chat.reasoning, review.sampling.temperature) == ("Be strict.", "off", 0.2)
    assert (story.chat.system_prompt, story.chat.reasoning, story.sampling.top_k) == ("Be brief.", "auto", 0)
    assert review.sampling.seed == 7 and chosen.sampling.temperature is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\ntemperature = 1", "a: object contains unknown field `temperature`"),
        ("[a]\nsampling = { temperature = 11 }", "a.sampling.temperature: must be 0 to 10"),
        ("a = 1", "a: not a table"),
        ("[a", "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, said: str) -> None:
    write_presets(text)
    with pytest.raises(SettingsError, match=r"presets\.toml") as caught:
        find_preset("a")
    assert said in caught.value.message


def test_options_of_the_command_line_count_before_the_preset() -> None:
    write_presets(FILE)
    base, model = with_preset("Code review", None, None)
    assert model == "demo" and base is not None and base.chat.system_prompt == "Be strict."
    assert laid_over({"sampling__temperature": 0.9, "preset": "Code review"}, base).sampling.temperature == 0.9
    assert with_preset("Code review", "mine.gguf", None)[1] == "mine.gguf"
    assert with_preset("Code review", None, "http://127.0.0.1:1")[1] is None
    assert with_preset("", None, None) == (None, None)
    with pytest.raises(UsageError, match="no preset 'x'") as caught:
        with_preset("x", None, None)
    assert caught.value.hint == "Available: Code review, story."
