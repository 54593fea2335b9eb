from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest
from textual.app import App
from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

from cpuchat.base import paths
from cpuchat.tui import themes
from cpuchat.tui.themes import ThemeError, known_variables, load_themes, parse_theme

GOOD = 'name = "mine"\n[colors]\nprimary = "#6cb6ff"\n'
_BAD_VARIABLES = (
    'footer-background = "notacolor"', 'block-cursor-text-style = "blod"', 'link-style = "none bold"',
    'link-style = "bold not"', 'scrollbar = "12px"', 'border = "auto 90%"', 'border = "red 190%"',
    'border = "red; color: blue"', 'no-such-thing = "red"',
)  # fmt: skip


def test_packaged_themes_are_all_good() -> None:
    loaded = load_themes([paths.packaged("themes")])
    assert not loaded.problems
    assert set(loaded.themes) == {"cpuchat", "cpuchat-light", "high-contrast", "okabe-ito", "terminal"}
    assert not loaded.themes["cpuchat-light"].dark
    assert loaded.themes["terminal"].ansi


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name = ", "not valid TOML"),
        (GOOD + "[more]\n", "more"),
        ('name = "Mine!"\n[colors]\nprimary = "red"\n', "name"),
        ('name = "mine"\n', "colors.primary"),
        (GOOD + 'success = "notacolour"\n', "colors.success"),
        (GOOD + "success = 3\n", "colors"),
        (GOOD + 'shiny = "red"\n', "colors.shiny"),
        *((f"{GOOD}[variables]\n{line}\n", f"variables.{line.partition(' ')[0]}") for line in _BAD_VARIABLES),
        ('dark = "yes"\n' + GOOD, "dark"),
        ('name = "mine"\ncolors = 3\n', "colors"),
    ],
)
def test_a_bad_theme_is_refused_and_the_key_named(text: str, named: str) -> None:
    with pytest.raises(ThemeError, match=named.replace(".", r"\.")):
        parse_theme(text)


@pytest.mark.parametrize("style", ["none", "underline", "bold italic", "not bold", "dim not strike"])
def test_a_percentage_and_text_styles_are_fine(style: str) -> None:
    theme = parse_theme(GOOD + f'[variables]\ninput-selection-background = "#81a1c1 35%"\nlink-style = "{style}"\n')
    assert theme.variables == {"input-selection-background": "#81a1c1 35%", "link-style": style}


def test_bad_files_are_reported_and_good_ones_kept(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "bad.toml").write_text("name = 3")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.toml").write_text("name = " + "[" * 5000)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("mine", "marked").encode())
    os.mkfifo(tmp_path / "pipe.toml")
    loaded = load_themes([tmp_path, tmp_path / "missing"])
    assert list(loaded.themes) == ["mine", "marked"]
    reasons = {file.stem: reason for file, reason in loaded.problems.items()}
    assert list(reasons) == ["bad", "binary", "deep", "folder", "pipe"]
    assert reasons["pipe"] == reasons["folder"] == "not a regular file"


_VALUES = (
    "red", "#123", "#12345678", "rgb(1,2,3)", "hsl(10,20%,30%)", "red 40%", "bold", "none", "auto", "auto 50%",
    "transparent", "initial", "ansi_blue", "$primary", "12px", "", " ", "red blue", "not bold", "1", "none bold",
    "bold not", "not", "bold bold", "uu overline", "bold  dim", "blink reverse", "b i u", "BOLD", "not none",
)  # fmt: skip


async def test_what_the_check_lets_through_never_stops_the_app() -> None:
    pairs = [(variable, value) for variable in sorted(known_variables()) for value in _VALUES]
    app = App[None]()
    async with app.run_test():
        for number, (variable, value) in enumerate(random.Random(1).sample(pairs, 90)):
            with contextlib.suppress(ThemeError):
                theme = f'name = "t{number}"\n[colors]\nprimary = "#6cb6ff"\n[variables]\n{variable} = "{value}"\n'
                app.register_theme(parse_theme(theme))
                app.theme = f"t{number}"
                assert app.is_running


async def test_the_scrollbars_of_other_themes_are_no_louder_than_ours() -> None:
    for name in ("catppuccin-latte", "dracula"):
        bar = themes.scrollbars(BUILTIN_THEMES[name])
        assert _contrast(bar["scrollbar"], bar["scrollbar-background"]) < 2


def _contrast(one: str, other: str) -> float:
    return themes.contrast(Color.parse(one), Color.parse(other))


@pytest.mark.parametrize(
    ("name", "least"), [("cpuchat", 4.5), ("cpuchat-light", 4.5), ("okabe-ito", 4.5), ("high-contrast", 7.0)]
)
def test_colours_that_carry_text_stand_out(name: str, least: float) -> None:
    theme = load_themes([paths.packaged("themes")]).themes[name]
    assert theme.background
    variables = {**themes.own_variables(theme), **theme.variables}
    for color in (theme.foreground, theme.primary, theme.error, *(variables[name] for name in themes.OWN_VARIABLES)):
        for background in (theme.background, theme.surface, theme.panel):
            assert color and background and _contrast(color, background) >= least, (color, background)
    assert _contrast(variables["block-cursor-foreground"], variables["block-cursor-background"]) >= least


@pytest.mark.parametrize("theme", [theme for theme in BUILTIN_THEMES.values() if not theme.ansi], ids=lambda t: t.name)
def test_hints_and_headings_are_readable_on_every_background(theme: Theme) -> None:
    generated = theme.to_color_system().generate()
    colors = {**themes.own_variables(theme), **theme.variables}
    for background in themes.BACKGROUNDS:
        for name in themes.OWN_VARIABLES:
            ratio = _contrast(colors[name], generated[background])
            assert ratio >= themes.CONTRAST, (name, background, ratio)


_XTERM = {
    "ansi_magenta": (205, 0, 205), "ansi_bright_black": (127, 127, 127),
    "ansi_bright_white": (255, 255, 255), "ansi_blue": (0, 0, 238),
}  # fmt: skip
"""xterm's own colors; `ansi_default` is what the terminal's user reads best."""


@pytest.mark.parametrize("background", ["black", "white"])
def test_the_terminal_theme_is_readable_on_black_and_on_white(background: str) -> None:
    theme = load_themes([paths.packaged("themes")]).themes["terminal"]
    colors = {**themes.own_variables(theme), **theme.variables}
    text = [colors[name] for name in themes.OWN_VARIABLES]
    for color in text:  # WCAG's 4.5, rounded: magenta has 4.48 on black
        assert color == "ansi_default" or _contrast(f"rgb{_XTERM[color]}", background) >= 4.45, color
    for color in (colors["border"], colors["border-blurred"]):
        assert color == "ansi_default" or _contrast(f"rgb{_XTERM[color]}", background) >= 3.0, color
    cursor = [f"rgb{_XTERM[colors[f'block-cursor-{part}']]}" for part in ("foreground", "background")]
    assert _contrast(*cursor) >= themes.CONTRAST
