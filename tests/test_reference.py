"""The pages of commands and keys are made from the command line itself and from the key table, and the table of rooms
in CONTRIBUTING.md from the import contracts.

`python -m tests.test_reference` writes them.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cpuchat.cli.main import cli
from cpuchat.tui import keys

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_COMMANDS = """# Commands

`cpuchat` alone opens the app. `--help` after any command lists its options. [Exit codes](#exit-codes) stand at
the end.
"""
_KEYS = """# Keys

The keys of every screen. `F1` shows those of the screen it is opened on; `Ctrl+P` runs any action by its name, also
those without a key. [`keymap.toml`](settings.md#keys) changes them, by the names in the last column.
"""


def _listed(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the paths and short helps of the commands below `command`."""
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        if not below.hidden:
            own = click.Context(below, parent=context, info_name=name)
            yield own.command_path, below.get_short_help_str(200)
            yield from _listed(below, own)


def _examples(command: click.Command) -> Iterator[str]:
    """Yield the lines of the examples in an epilog."""
    lines = (command.epilog or "").replace("\b", "").splitlines()
    yield from (line.strip() for line in lines if line.startswith("  cpuchat") or " | cpuchat" in line)


def commands_page() -> str:
    """Return docs/commands.md; its exit codes stay as they are."""
    *_, codes = (DOCS / "commands.md").read_text(encoding="utf-8").partition("\n## Exit codes\n")
    context = click.Context(cli, info_name="cpuchat")
    rows = [f"| `{path}` | {text} |" for path, text in _listed(cli, context)]
    parts = [_COMMANDS, "| command | does |\n|---|---|\n" + "\n".join(rows) + "\n", "## Examples\n"]
    blocks = ["\n".join(_examples(cli))]
    blocks += ["\n".join(_examples(command)) for name in cli.list_commands(context)
               if (command := cli.get_command(context, name)) is not None]  # fmt: skip
    return "\n".join([*parts, "```", "\n\n".join(filter(None, blocks)), "```\n"]) + "\n## Exit codes\n" + codes


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


def test_the_rooms_are_those_of_the_import_contracts() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"\n\n{rooms()}\n\n" in text, "python -m tests.test_reference writes it."


def test_the_readme_links_to_every_page() -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in sorted(DOCS.glob("*.md")) if f"(docs/{page.name})" not in text] == []
    assert len(text.splitlines()) <= 70


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
    file = ROOT / "CONTRIBUTING.md"
    before, _, rest = file.read_text(encoding="utf-8").partition("| floor | room |")
    file.write_text("\n\n".join([before + rooms(), rest.partition("\n\n")[2]]), encoding="utf-8")
