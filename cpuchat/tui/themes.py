"""Themes: TOML files, checked before Textual sees them.

A theme file holds `name`, `dark`, optionally `ansi` (the terminal's own colors), `[colors]` (the fields of a Textual
theme) and `[variables]` (style variables; `now` and `limit` are ours). Textual ends the whole app on a bad color or a
color where a text style belongs, so every value is checked here and a bad file is skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from textual.color import Color, ColorParseError
from textual.theme import BUILTIN_THEMES, Theme

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared

AUTO = "auto"
"""In the settings: the default, or what suits the terminal better."""
DEFAULT_THEME = "cpuchat"
LIGHT_THEME = "cpuchat-light"
"""In place of the default on a light background."""
FOR_16_COLORS = "terminal"
"""In place of the default on terminals with 16 colors, the nearest of which would not be readable. It is made for
dark and light backgrounds."""

# Used by our style sheets. A theme that does not set them gets these, made readable on its backgrounds.
OWN_VARIABLES = {
    "now": "#6bd9a8", "limit": "#e8b45a", "hint": "#9aa5b1", "heading": "#6cb6ff", "problem": "#f07178",
}  # fmt: skip
BACKGROUNDS = ("background", "surface", "panel")
"""Colors of a theme that text stands on."""
CONTRAST = 4.5
"""Least contrast of text (WCAG 2.2, 1.4.3)."""

_COLORS = frozenset(
    {"primary", "secondary", "accent", "warning", "error", "success", "foreground", "background", "surface", "panel",
     "boost"}
)  # fmt: skip
_PERCENT = re.compile(r"(?P<color>\S+)\s+(?P<percent>\d{1,3})%")
# `auto` and `initial` are not for themes to set, so variables that Textual fills with them take a plain color too.
_STYLE_VARIABLES = frozenset({"link-style", "link-style-hover"})
_STYLE = r"(?:not )?(?:bold|dim|italic|underline|reverse|strike)"
_STYLES = re.compile(rf"none|{_STYLE}(?: {_STYLE})*")  # Textual takes "none" among others too, and Rich fails on it
_MAX_FILE = 64 << 10


class ThemeError(ValueError):
    """A theme file that cannot be used; the message names the key."""


class _ThemeFile(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9_-]{0,39}$")]
    dark: bool = True
    ansi: bool = False
    colors: dict[str, str] = {}
    variables: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class LoadedThemes:
    """Themes by name (a user's file replaces a packaged one), and why files were skipped."""

    themes: dict[str, Theme]
    problems: dict[Path, str]


@functools.cache
def known_variables() -> dict[str, str]:
    """Return the variables that a theme may set, each with its kind: "color" or "style"."""
    generated = Theme("probe", primary="#808080").to_color_system().generate()
    shades = ("-lighten-", "-darken-")
    names = {n for n in generated if n not in _COLORS and not any(s in n for s in shades)} | OWN_VARIABLES.keys()
    return {n: "style" if n.endswith("-text-style") or n in _STYLE_VARIABLES else "color" for n in sorted(names)}


def own_variables(theme: Theme) -> dict[str, str]:
    """Return `OWN_VARIABLES` for `theme`, each with at least `CONTRAST` on all its `BACKGROUNDS`."""
    if theme.ansi:  # the terminal's own colors, which are not known
        return dict.fromkeys(OWN_VARIABLES, "ansi_default")
    generated = {name: Color.parse(value) for name, value in theme.to_color_system().generate().items()
                 if name in _COLORS}  # fmt: skip
    backgrounds, foreground = [generated[name] for name in BACKGROUNDS], generated["foreground"]
    colors = {
        "now": Color.parse(OWN_VARIABLES["now"]),
        "limit": Color.parse(OWN_VARIABLES["limit"]),
        "hint": generated["background"].blend(foreground, 0.6),
        "heading": generated["accent"],
        "problem": generated["error"],
    }
    return {name: readable(color, foreground, backgrounds).hex6 for name, color in colors.items()}


def scrollbars(theme: Theme) -> dict[str, str]:
    """Return the colors of scrollbars in a theme that sets none: Textual's are those of its buttons."""
    generated = theme.to_color_system().generate()
    if theme.ansi:
        return {}
    background, foreground = Color.parse(generated["background"]), Color.parse(generated["foreground"])
    shades = {"scrollbar": 0.2, "scrollbar-hover": 0.35, "scrollbar-active": 0.5, "scrollbar-corner-color": 0.0}
    shades |= {f"scrollbar-background{state}": 0.0 for state in ("", "-hover", "-active")}
    return {name: background.blend(foreground, share).hex6 for name, share in shades.items()}


def readable(color: Color, foreground: Color, backgrounds: Sequence[Color]) -> Color:
    """Mix `color` with as much of `foreground`, then of black or white, as it needs for `CONTRAST` on `backgrounds`."""

    def min_contrast(mixed: Color) -> float:
        return min(contrast(mixed, background) for background in backgrounds)

    extreme = max(Color.parse("black"), Color.parse("white"), key=min_contrast)
    steps = [color.blend(foreground, step / 20) for step in range(20)]
    steps += [foreground.blend(extreme, step / 20) for step in range(21)]
    return next((mixed for mixed in steps if min_contrast(mixed) >= CONTRAST), extreme)


def contrast(one: Color, other: Color) -> float:
    """Return the contrast ratio, 1 to 21 (WCAG 2.2, relative luminance)."""

    def luminance(color: Color) -> float:
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def parse_theme(text: str) -> Theme:
    """Read one theme. Raises ThemeError: not TOML, an unknown key, or a value that Textual would stumble over."""
    try:
        file = msgspec.convert(toml.loads(text), prepared(_ThemeFile))
    except msgspec.ValidationError as error:
        raise ThemeError(str(error).replace("$.", "")) from None
    except ValueError as error:
        raise ThemeError(f"not valid TOML: {error}") from None
    name, dark, colors, variables = file.name, file.dark, file.colors, file.variables
    for key, value in colors.items():
        if key not in _COLORS:
            raise ThemeError(f"colors.{key}: unknown; choose from {', '.join(sorted(_COLORS))}")
        _check_color(f"colors.{key}", value)
    kinds = known_variables()
    for key, value in variables.items():
        kind = kinds.get(key)
        if kind is None:
            raise ThemeError(f"variables.{key}: unknown")
        if kind == "color":
            _check_color(f"variables.{key}", value, percent=key not in OWN_VARIABLES)
        elif not _STYLES.fullmatch(value):
            raise ThemeError(f'variables.{key}: {value!r} is not a text style (try "bold italic" or "none")')
    if file.ansi:
        # An ANSI theme needs colors that only Textual's own pair brings along.
        base = BUILTIN_THEMES["ansi-dark" if dark else "ansi-light"]
        return dataclasses.replace(base, name=name, dark=dark, variables={**base.variables, **variables}, **colors)
    if "primary" not in colors:
        raise ThemeError("colors.primary: missing")
    return dataclasses.replace(Theme(name, colors["primary"], dark=dark, variables=variables), **colors)


def load_themes(folders: Iterable[Path] | None = None) -> LoadedThemes:
    """Read every `*.toml` of the folders (packaged, then the user's); never raises for a file."""
    if folders is None:
        folders = (paths.packaged("themes"), paths.user_themes_dir())
    themes: dict[str, Theme] = {}
    problems: dict[Path, str] = {}
    for folder in folders:
        try:
            files = sorted(folder.glob("*.toml"))
        except OSError:
            continue
        for file in files:
            try:
                theme = parse_theme(paths.read_text(file, _MAX_FILE))
            except OSError as error:
                problems[file] = error.strerror or str(error)
            except (ThemeError, UnicodeDecodeError) as error:
                problems[file] = str(error)
            else:
                themes[theme.name] = theme
    return LoadedThemes(themes, problems)


def _check_color(key: str, value: str, percent: bool = False) -> None:
    match = _PERCENT.fullmatch(value.strip()) if percent else None
    if match and int(match["percent"]) > 100:
        raise ThemeError(f"{key}: {match['percent']}% is above 100%")
    # Style sheets also take "auto" and names with odd characters in them; themes get one plain color.
    if re.search(r"[;{}$!/*\n\\]", value) or value.strip() != value:
        raise ThemeError(f"{key}: {value!r} is not a color")
    try:
        color = Color.parse(match["color"] if match else value)
    except ColorParseError:
        raise ThemeError(f'{key}: {value!r} is not a color (try "#6cb6ff")') from None
    if color.auto:
        raise ThemeError(f"{key}: {value!r} is not a color")
