"""Lets the cursor of Textual's text fields take a grapheme cluster, such as a flag, as one character."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual._cells import cell_width_to_column_index
from textual._wrap import compute_wrap_offsets
from textual.document import _wrapped_document as wrapped
from textual.document._document import Location, Selection
from textual.widgets import Input, TextArea

from cpuchat.base.text import cluster_edge, clusters

# Combining marks of words that are written with them: Latin, Hebrew, Arabic, Indic, Thai, Lao, Burmese, Khmer.
_LETTERS = r"\w\u0300-\u036f\u0591-\u05c7\u064b-\u0670\u0900-\u0963\u0966-\u0dff\u0e31-\u0ece\u1000-\u109f\u1780-\u17dd"
WORD_EDGES = re.compile(rf"(?<=[^{_LETTERS}])(?=[{_LETTERS}])|(?<=[{_LETTERS}])(?=[^{_LETTERS}])")
_select_in_area, _delete, _select, _replace, _value = (
    TextArea._validate_selection, TextArea._delete_via_keyboard, Input.validate_selection, Input.replace, Input._value
)  # fmt: skip
_column = wrapped.WrappedDocument.get_target_document_column


class _Line(Text):
    """A line of which clusters are styled whole: a terminal would draw the parts of one side by side."""

    def stylize(self, style: Any, start: int = 0, end: int | None = None) -> None:
        end = end if end is None else cluster_edge(self.plain, min(end, len(self.plain)), True)
        super().stylize(style, start, end)


def _edge(area: TextArea, location: Location, forward: bool = False) -> Location:
    row, column = location
    if not 0 <= row < area.document.line_count:  # behind the last line, as deleting that one whole names it
        return location
    return row, cluster_edge(area.document.get_line(row), column, forward)


def _selected_in_area(self: TextArea, selection: Selection) -> Selection:
    start, end = _select_in_area(self, selection)
    forward = end > self.selection.end  # the way that the cursor goes
    return Selection(_edge(self, start, forward), _edge(self, end, forward))


def _selected(self: Input, selection: Any) -> Any:
    start, end = _select(self, selection)
    forward = end > self.selection.end
    return type(selection)(cluster_edge(self.value, start, forward), cluster_edge(self.value, end, forward))


def _replace_whole(self: Input, text: str, start: int, end: int) -> None:
    start, end = sorted((max(0, start), min(len(self.value), end)))
    _replace(self, text, cluster_edge(self.value, start), cluster_edge(self.value, end, True))


def _one_for_each(line: str) -> str:
    """Return a character for each cluster of `line`, as wide."""
    found = (line[start:end] for start, end in pairwise(clusters(line)))
    return "".join(one if len(one) == 1 else "字" if cell_len(one) > 1 else "a" for one in found)


def _wrap_offsets(text: str, width: int, tab_size: int, fold: bool = True, **precomputed: Any) -> list[int]:
    if text.isascii():
        return compute_wrap_offsets(text, width, tab_size, fold, **precomputed)
    return [clusters(text)[at] for at in compute_wrap_offsets(_one_for_each(text), width, tab_size, fold)]


def _area_delete(self: TextArea, start: Location, end: Location) -> Any:
    return _delete(self, _edge(self, min(start, end)), _edge(self, max(start, end), True))


def _target_column(self: wrapped.WrappedDocument, line_index: int, x_offset: int, y_offset: int) -> int:
    return cluster_edge(self.document.get_line(line_index), _column(self, line_index, x_offset, y_offset))


def _column_index(line: str, cell_width: int, tab_width: int) -> int:
    return clusters(line)[cell_width_to_column_index(_one_for_each(line), cell_width, tab_width)]


def _line(text: str) -> Text:
    return _Line(text, overflow="ignore", end="", no_wrap=True)


def install() -> None:
    """Replace what moves, deletes, wraps and draws by code points."""
    for owner, name, function in (
        (TextArea, "_validate_selection", _selected_in_area), (TextArea, "_delete_via_keyboard", _area_delete),
        (TextArea, "get_line", lambda self, at: _line(self.document.get_line(at))),
        (Input, "validate_selection", _selected), (Input, "replace", _replace_whole),
        (Input, "_value", property(lambda self: _line(_value.__get__(self).plain))),
        (wrapped.WrappedDocument, "get_target_document_column", _target_column),
        (wrapped, "compute_wrap_offsets", _wrap_offsets), (wrapped, "cell_width_to_column_index", _column_index),
    ):  # fmt: skip
        setattr(owner, name, function)
