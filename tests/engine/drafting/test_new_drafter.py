"""A drafter is a module and a row in `protocol.drafters`; everything else follows from them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pkgutil import resolve_name

from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.speculation.drafters.drafter import Drafter

PROGRAM = """
import json, sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# The table as it is with one row more.
spec = find_spec("cpuchat.protocol.drafters")
head, rows = Path(spec.origin).read_text().split("DRAFTERS: Final = (\\n")
row = '    DrafterRow("toy", "$text-accent", "bold italic", "knows the answer", "tests.support.toy_drafter:Toy"),\\n'
table = sys.modules[spec.name] = ModuleType(spec.name)
exec(compile(f"{head}DRAFTERS: Final = (\\n{row}{rows}", spec.origin, "exec"), table.__dict__)

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import Sampling, TextDelta
from cpuchat.tui.help import figures as explained
from cpuchat.tui.markdown.message_view import legend
from cpuchat.tui.markdown.rows import COMPONENT_CSS, TextStyles
from tests.support.engine_chat import Chat, user
from tests.support.toy_drafter import Toy

chat = Chat()
chat.load(paths.demo_dir() / DEMO_FILES["demo"])
request = {"sampling": Sampling(temperature=0.0), "max_tokens": 40}
question = user("What is a draft model?")
plain = chat.ask(question, **request)
text, said = chat.text, chat.engine._loaded.states.live.history.tokens
Toy.n_prompt = plain.cache_n + plain.prompt_n
Toy.answer = tuple(said[Toy.n_prompt :])
chosen = settings.parse('[speculation]\\ndrafters = "toy"\\ndepth = 3')
figures = chat.ask(question, **request, speculation=chosen.speculation.speculation()).speculation
print(json.dumps({
    "same text": chat.text == text,
    "figures": [(one.name, one.draft_n_accepted > 20) for one in figures.by_drafter],
    "deltas": sorted({event.drafter for event in chat.of(TextDelta)}),
    "by default": settings.Settings().speculation.speculation().drafters,
    "legend": legend((), 80, TextStyles())[0].text,
    "without colors": str(TextStyles().of_drafter("toy")),
    "css": [line.strip() for line in COMPONENT_CSS.splitlines() if "toy" in line],
    "help": "toy knows the answer" in str(explained()),
}))
chat.engine.close()
"""


def test_a_row_and_a_module_make_a_drafter() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "same text": True,
        "figures": [["toy", True]],
        "deltas": ["", "toy"],
        "by default": ["toy", "suffix", "draft"],
        "legend": "proposed by the model, toy, draft, lookup, suffix",
        "without colors": "bold italic",
        "css": ["& > .transcript--drafter-toy { color: $text-accent; text-style: bold italic; }"],
        "help": True,
    }


def test_rows_name_their_drafters() -> None:
    for row in DRAFTERS:
        assert re.fullmatch("[a-z]+", row.name)  # part of a CSS class
        if row.factory:
            drafter = resolve_name(row.factory)
            assert issubclass(drafter, Drafter) and drafter.name == row.name
