"""Checks that llguidance can follow a grammar, within limits that are counted: they are the same on every machine.

llguidance bounds its own work, but its descent into rules within rules ends the process where the stack does, after
some 1,000 levels: that is checked before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line

if TYPE_CHECKING:
    from llguidance import LLParserLimits

LONGEST_FORM: Final = 1 << 20
"""Bytes of a grammar or a JSON schema that are accepted."""
MAX_LEVELS: Final = 100
"""Rules within rules, or parentheses within parentheses."""
FORM_HINT: Final = "Change the schema, or write a grammar."
_LONGEST_REASON: Final = 300


def parser_limits() -> LLParserLimits:
    """Return the limits of one step: some 0.3 s at most."""
    from llguidance import LLParserLimits  # 8 MB, for answers in a form only

    return LLParserLimits(
        step_max_items=50_000, max_lexer_states=50_000, precompute_large_lexemes=False, verbose_errors=False
    )


def check_lark(grammar: str, source: str) -> None:
    """Check a grammar of llguidance, in Lark or as JSON. Raises UsageError: names `source` and the reason."""
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(grammar, limits=parser_limits()):
        raise UsageError(f"{source}: {short_reason(error)}.", FORM_HINT)


def short_reason(error: str) -> str:
    """Return an error of llguidance as part of a sentence."""
    words = error.partition("\n<")[0].replace("<non-verbose/>", "").split()
    return clean_line(" ".join(words))[:_LONGEST_REASON].rstrip(":. ")
