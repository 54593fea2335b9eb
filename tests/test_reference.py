"""The pages of commands and keys are made from the command line itself and from the key table, and the table of rooms
in CONTRIBUTING.md from the import contracts.

`python -m tests.test_reference` writes them.
"""

from __future__ import annotations

import ast
import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cpuchat.base.errors import _KINDS
from cpuchat.cli.lazy import LazyGroup
from cpuchat.cli.main import SIGPIPE_STATUS, cli
from cpuchat.measure.peak import ProbeFailed
from cpuchat.tui import keys

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_COMMANDS = """# Commands

Look up a command, its options and examples, as `--help` prints them. `cpuchat` alone opens the app.
[Exit codes](#exit-codes) stand at the end.
"""
_KEYS = """# Keys

The keys of every screen. `F1` shows those of the screen it is opened on; `Ctrl+P` runs any action by its name, also
those without a key. [`keymap.toml`](settings.md#keys) changes them, by the names in the last column.
"""


def _listed(command: click.Command | None, path: str, width: int = 110) -> Iterator[tuple[str, str, str]]:
    """Yield the path of `command` and of those below it, the line of each in `--help`, and its own `--help`."""
    assert command is not None
    command = copy.copy(command)
    vars(command)["_help_option"] = None  # click keeps that of the first context, which another test may have made
    context = click.Context(command, info_name=path, terminal_width=width, help_option_names=["-h", "--help"])
    yield path, "", command.get_help(context)
    if not isinstance(command, LazyGroup):
        return
    for name, (_, _, text) in command.by_name.items():
        (_, _, help), *below = _listed(command.get_command(context, name), f"{path} {name}", width)
        yield from [(f"{path} {name}", text, help), *below]


def commands_page() -> str:
    """Return docs/commands.md; its exit codes stay as they are."""
    *_, codes = (DOCS / "commands.md").read_text(encoding="utf-8").partition("\n## Exit codes\n")
    listed = list(_listed(cli, "cpuchat"))
    rows = [f"| [`{path}`](#{path.replace(' ', '-')}) | {text} |\n" for path, text, _ in listed[1:]]
    helps = [f"\n## {path}\n\n```text\n{help}\n```\n" for path, _, help in listed]
    return "".join([_COMMANDS, "\n| command | does |\n|---|---|\n", *rows, *helps, "\n## Exit codes\n", codes])


def keys_page() -> str:
    """Return docs/keys.md. A line that several screens share appears once."""
    parts = [_KEYS]
    for group in dict.fromkeys(map(keys.heading, keys.KEYS)):
        rows: dict[str, list[str]] = {}
        for key in (one for one in keys.KEYS if keys.heading(one) == group):
            shown = f"`{keys.display_all(key.keys)}`" if key.keys else "palette"
            rows.setdefault(f"| {shown} | {key.help} |", []).append(f"`{key.id}`")
        lines = [f"{row} {', '.join(ids)} |" for row, ids in rows.items()]
        head = f"## {group}\n\n| key | does | in keymap.toml |\n|---|---|---|\n"
        parts.append(head + "\n".join(lines).replace("\\", "\\\\") + "\n")
    return "\n".join(parts)


def rooms() -> str:
    """Return the table of rooms, the highest first: what each holds, by the first paragraph of its docstring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (floors,) = (one["layers"] for one in contracts if one["name"].startswith("floors"))
    rows = ["| floor | room | contents |", "|---|---|---|"]
    for number, floor in zip(range(len(floors) - 1, -1, -1), floors, strict=True):
        for name in floor.split(" | "):
            tree = ast.parse((ROOT / name.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
            text = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
            rows.append(f"| {number} | `{name.partition('.')[2]}/` | {text} |")
    return "\n".join(rows)


PAGES = {"commands.md": commands_page, "keys.md": keys_page}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_program_says(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "python -m tests.test_reference writes it."


def test_help_fits_into_80_columns() -> None:
    too_long = [line for *_, help in _listed(cli, "cpuchat", 80) for line in help.splitlines() if len(line) > 80]
    assert too_long == []


def test_the_exit_codes_are_those_of_the_errors() -> None:
    *_, table = commands_page().partition("## Exit codes")
    codes = {int(line.split()[1]) for line in table.splitlines() if line.startswith("| ") and line.split()[1].isdigit()}
    assert codes == {0, SIGPIPE_STATUS, ProbeFailed.exit_code, *(kind.exit_code for kind in _KINDS.values())}


def test_the_rooms_are_those_of_the_import_contracts() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"\n\n{rooms()}\n\n" in text, "python -m tests.test_reference writes it."


def test_the_index_links_to_every_page() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    assert {page.name for page in DOCS.glob("*.md") if f"({page.name})" not in text} == {"README.md"}


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
    file = ROOT / "CONTRIBUTING.md"
    before, _, rest = file.read_text(encoding="utf-8").partition("| floor | room |")
    file.write_text("\n\n".join([before + rooms(), rest.partition("\n\n")[2]]), encoding="utf-8")
