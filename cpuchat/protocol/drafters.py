"""The drafters, one row each: settings, options, colors, legend, help and the order of asking follow from the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple


class DrafterRow(NamedTuple):
    """A drafter.

    Attributes:
        name: in the setting `speculation.drafters`, in figures, and in the legend of drafted text.
        color: theme variable for the text that it drafted.
        text_style: Textual's style of that text, which tells the drafters apart without colors too.
        help: what it drafts, in a few words.
        factory: "module:class" of a drafter that costs next to nothing, made from the `NgramIndex` of the chat; "" for
            the draft model, which is loaded beside the target. A string, because only the worker imports drafters.
        is_default: part of the settings "auto" and "free".
    """

    name: str
    color: str
    text_style: str
    help: str
    factory: str = ""
    is_default: bool = True


DRAFTERS: Final = (
    DrafterRow("draft", "$text-success", "none", "a smaller model with the same vocabulary"),
    DrafterRow(
        "lookup",
        "$text-primary",
        "underline",
        "copies what followed the last occurrence of the last n-gram",
        "cpuchat.speculation.drafters.ngrams:PromptLookup",
        is_default=False,
    ),
    DrafterRow(
        "suffix",
        "$text-warning",
        "italic",
        "follows what is being copied across changes, else continues the last tokens as most often",
        "cpuchat.speculation.drafters.suffix:SuffixDecoding",
    ),
)
"""Free drafters are asked in the order of a request; the draft model drafts when they have nothing worth verifying."""

CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "auto": (
        *(row.name for row in DRAFTERS if row.factory and row.is_default),
        *(row.name for row in DRAFTERS if not row.factory and row.is_default),
    ),
    "off": (),
    **{row.name: (row.name,) for row in DRAFTERS},
    "free": tuple(row.name for row in DRAFTERS if row.factory and row.is_default),
}
"""The values of the setting `speculation.drafters`, and the drafters of each."""

if TYPE_CHECKING:
    DrafterName = str
    DrafterChoice = str
else:
    DrafterName = Literal[tuple(row.name for row in DRAFTERS)]
    DrafterChoice = Literal[tuple(CHOICES)]
