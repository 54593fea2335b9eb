"""Lines of lists of models and the like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ListRow:
    """One line. `key` identifies its subject and stays the same while it is listed; "" is a heading (`name`) or a mere
    text (`note`), which cannot be selected.

    `columns` are quantization, size, state and speed, each of fixed width; `note` stands behind the name in their
    place. `tag` stands dimmed right after the name. `strong`: the loaded one. `dim`: not to be used as it is.
    """

    key: str = ""
    mark: str = " "
    name: str = ""
    columns: tuple[str, str, str, str] | None = None
    note: str = ""
    tag: str = ""
    strong: bool = False
    dim: bool = False
