"""The drafters, one row each: settings, options, colors, legend and help follow from the rows."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

DrafterName = Literal["draft", "suffix"]


class DrafterRow(NamedTuple):
    """A drafter: its `name` in the setting `speculation.drafters`, in figures, and in the legend of drafted text; the
    theme variable for the `color` of the text that it drafted; Textual's style of that text, which tells the drafters
    apart without colors too; and what it drafts, in a few words."""

    name: DrafterName
    color: str
    text_style: str
    help: str


DRAFTERS: Final = (
    DrafterRow("draft", "$text-success", "none", "a smaller model with the same vocabulary"),
    DrafterRow(
        "suffix",
        "$text-warning",
        "italic",
        "follows what is being copied across changes, else continues the last tokens as most often",
    ),
)

DrafterChoice = Literal["auto", "off", "draft", "suffix"]
CHOICES: Final[dict[DrafterChoice, tuple[DrafterName, ...]]] = {
    "auto": ("suffix", "draft"),
    "off": (),
    "draft": ("draft",),
    "suffix": ("suffix",),
}
"""The values of the setting `speculation.drafters`, and the drafters of each. The draft model drafts when suffix
decoding, which costs next to nothing, has nothing worth verifying."""
