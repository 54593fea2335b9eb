"""What a user reads about a setting: the part of its declaration that its type does not tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Stands in the `Annotated` type of a setting; `config.settings.DECLARED` collects them.

    Attributes:
        label: name of its field in the settings form; "": it is not in the form.
        about: one line of help that names the neutral value.
        is_basic: it is on the form's first tab, not on that of its section.
        takes_effect: "load" or "start" (of a model, of the app) if it waits for that; "": the next answer.
        is_option: commands that take its section have an option for it, with `label` and `about` as its help.
        option: flag on the command line; "": its name with hyphens.
        metavar: stands for the value in `--help`; "": as its type."""

    label: str = ""
    about: str = ""
    is_basic: bool = False
    takes_effect: str = ""
    is_option: bool = False
    option: str = ""
    metavar: str = ""
