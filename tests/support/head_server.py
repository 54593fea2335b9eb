"""A program that is started as llama-server and serves the wheel's, with the head or a draft model in its place.

A trained head of a model this small does not exist. All else is real: the command line, the key, the CPUs, the server,
its speculation and its counts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

_SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.support.head_server import main
main({folder!r}, {draft!r}, {fails!r})
"""
RATES = (1.0, 0.0)
"""Forced acceptance of the first and the second drafted token."""


def install(folder: Path, draft: Path | None = None, *, fails: str = "") -> Path:
    """Write the program into `folder`, to be put on PATH. `draft` drafts in place of the head (None: the head does);
    `fails`: it prints this and ends with status 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "llama-server"
    root = str(Path(__file__).parent.parent.parent)
    program.write_text(
        _SCRIPT.format(python=sys.executable, root=root, folder=str(folder), draft=str(draft or ""), fails=fails)
    )
    program.chmod(0o755)
    return program


def started(folder: Path) -> dict[str, Any]:
    """Return how the program was started last: `arguments` (by option), `cpus`, `pid`, `has_key`."""
    return json.loads((folder / "started.json").read_text())


def main(folder: str, draft: str, fails: str) -> None:
    """Serve until a signal comes."""
    words = sys.argv[1:]
    arguments = {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    key = os.environ.get("LLAMA_API_KEY", "")
    facts = {
        "arguments": arguments,
        "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "pid": os.getpid(),
        "has_key": bool(key) and key not in words,
    }
    (Path(folder) / "started.json").write_text(json.dumps(facts))
    if fails:
        sys.exit(fails)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments["--model"]
    params.hostnames = [arguments["--host"]]
    params.port = int(arguments["--port"])
    params.n_ctx = int(arguments["--ctx-size"])
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = params.endpoint_slots = True
    params.api_keys = [key]
    speculative = params.speculative
    if "--spec-type" in arguments and draft:
        _draft(xllamacpp, speculative, draft)
    elif "--spec-type" in arguments:
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        speculative.draft.mparams.path = arguments["--spec-draft-model"]
        speculative.draft.n_max = int(arguments["--spec-draft-n-max"])
    server = xllamacpp.Server(params)
    sys.stderr.write(f"{server.listening_address}\n")
    signal.pause()


def _draft(xllamacpp: Any, speculative: Any, draft: str) -> None:
    speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    speculative.draft.mparams.path = draft
    speculative.draft.n_max = len(RATES)
    speculative.synth_rates = list(RATES)
