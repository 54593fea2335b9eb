"""Keeps parsed style sheets, and no widgets that are gone.

Textual parses all sheets again for each screen that brings one of its own; once there are more than 64, for each new
kind of widget, too. It keeps what up to 1,024 widgets had drawn, some 25 MB, because they are keys of a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from textual._styles_cache import StylesCache
from textual.cache import LRUCache
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

_Variables = frozenset[tuple[str, str]]

_MOST = 512
"""Sheets to keep: those of all screens and widgets, in some themes."""
_parse: Callable[..., list[RuleSet]] | None = getattr(Stylesheet, "_parse_rules", None)
_kept: LRUCache[tuple[object, ...], list[RuleSet]] = LRUCache(_MOST)
_themes: dict[_Variables, _Variables] = {}
_last: tuple[dict[str, str], _Variables] = ({}, frozenset())


def keep() -> None:
    """Keep what is parsed from now on, if this version of Textual parses sheets one by one."""
    # The same number without a call of Python: each widget whose styles change has all rules looked up in a set.
    setattr(RuleSet, "__hash__", object.__hash__)  # noqa: B010
    if (colors := getattr(StylesCache.get_inner_outer, "__wrapped__", None)) is not None:
        setattr(StylesCache, "get_inner_outer", classmethod(lru_cache(1024)(colors)))  # noqa: B010
    if _parse is not None:
        setattr(Stylesheet, "_parse_rules", _parse_once)  # noqa: B010


def _parse_once(self: Stylesheet, css: str, **options: Any) -> list[RuleSet]:
    """Return the rules of a sheet, parsed now or for any app before: nothing changes them later."""
    assert _parse is not None
    key = (_values(self._variables), css, *options.items())
    if (rules := _kept.get(key)) is None:
        rules = _kept[key] = _parse(self, css, **options)
    return rules


def _values(variables: dict[str, str]) -> _Variables:
    """Return the variables of a theme as a key: the same object for the same values, which compares fast."""
    global _last
    if _last[0] is not variables:
        values = frozenset(variables.items())
        _last = variables, _themes.setdefault(values, values)
    return _last[1]
