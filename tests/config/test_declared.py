"""A setting is declared once: form, command line, config.toml, worker and documentation follow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpuchat.config.settings import DECLARED
from cpuchat.tui.widgets.setting_rows import Field

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
_HEAD = "| key | default | values | what it does | option |\n|---|---|---|---|---|\n"

# Declares one more option of the engine before anything else is imported, and prints where it arrives.
_PROGRAM = """
import contextlib, io, json, sys
from typing import Annotated
from msgspec import Meta
from cpuchat.base.setting import Setting
from cpuchat.protocol import options

class Extended(options.EngineOptions, kw_only=True):
    turbo_mode: Annotated[int, Meta(ge=0, le=9), Setting("Turbo", "0 = off", is_option=True)] = 4

options.EngineOptions = Extended

from cpuchat.base.errors import SettingsError
from cpuchat.cli.main import main
from cpuchat.cli.options import given_options, laid_over
from cpuchat.config import settings
from cpuchat.protocol.messages import LoadModel, decode_command, encode, HEADER_SIZE
from cpuchat.tui.chat.commands import needs_reload
from cpuchat.tui.settings import fields
from cpuchat.tui.widgets.setting_rows import Field

help = io.StringIO()
with contextlib.redirect_stdout(help), contextlib.suppress(SystemExit):
    main(["ask", "--help"])
default = settings.Settings()
saved = settings.update({"engine": {"turbo_mode": 7}})
command = LoadModel(path="m.gguf", cpus=(0,), options=settings.load().load_options("draft.gguf"))
try:
    settings.parse("[engine]\\nturbo_mode = 10\\n")
    refused = ""
except SettingsError as error:
    refused = str(error)
print(json.dumps({
    "form": [one.label for one in fields("Engine") if one.key == "engine.turbo_mode"],
    "limits": Field.of("engine.turbo_mode").limits,
    "help": " ".join(help.getvalue().split()),
    "option": laid_over({"engine__turbo_mode": 2}).load_options().turbo_mode,
    "source": given_options({"engine__turbo_mode": 2}),
    "file": settings.paths.settings_file().read_text(),
    "refused": refused,
    "default": default.load_options().turbo_mode,
    "worker": decode_command(encode(command)[HEADER_SIZE:]).options.turbo_mode,
    "reload": needs_reload(default, saved),
}))
"""


@pytest.mark.slow
def test_one_declaration_reaches_form_command_line_file_and_worker(tmp_path: Path) -> None:
    variables = os.environ | {"CPUCHAT_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=variables, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    arrived = json.loads(done.stdout)
    assert arrived["form"] == ["Turbo"] and arrived["limits"] == "0 to 9"
    assert "--turbo-mode N Turbo: 0 = off (0 to 9)." in arrived["help"]
    assert arrived["option"] == 2 and arrived["source"] == {"engine.turbo_mode": "--turbo-mode"}
    assert arrived["file"] == "[engine]\nturbo_mode = 7\n"
    assert "engine.turbo_mode: must be 0 to 9" in arrived["refused"]
    assert arrived["default"] == 4 and arrived["worker"] == 7
    assert arrived["reload"] is True


def settings_table() -> str:
    """Return the table of docs/settings.md, one line for each setting that a user may choose."""
    lines: list[str] = []
    for key, one in DECLARED.items():
        if one.words.about:
            field = Field.of(key)
            is_switch = field.kind == "switch"
            values = "true, false" if is_switch else field.limits or ", ".join(field.choices)
            default = str(one.default).lower() if is_switch else field.default_shown
            about = f"{one.words.label}: {field.about}" if one.words.label else field.about
            option = f"`{one.option}`" if one.words.is_option else ""
            cells = (f"`{key}`", default, values, about, option)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return _HEAD + "".join(lines)


def test_the_documentation_lists_all_settings() -> None:
    """`python -m tests.config.test_declared` writes the table."""
    assert settings_table() in DOCUMENT.read_text(encoding="utf-8")


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(_HEAD)
    rows = rest.splitlines(keepends=True)
    after = next((at for at, line in enumerate(rows) if not line.startswith("|")), len(rows))
    DOCUMENT.write_text(before + settings_table() + "".join(rows[after:]), encoding="utf-8")
