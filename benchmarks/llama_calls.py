"""llama.cpp's own reading of answers with calls of tools (llama_calls.cpp), for templates.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from build_llama import ROOT, installed_version, libraries
from common import HERE, MeasureError, say

SOURCE = ROOT / f"llama_cpp_python-{installed_version()}" / "vendor" / "llama.cpp"
_PROGRAM = ROOT / "llama_calls"
_CODE = HERE / "llama_calls.cpp"


class Reference:
    """llama.cpp's parser, in a process."""

    def __init__(self) -> None:
        built = libraries()
        if not _PROGRAM.is_file() or _PROGRAM.stat().st_mtime < _CODE.stat().st_mtime:
            _compile(built)
        self._process = subprocess.Popen(
            [_PROGRAM], cwd=SOURCE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Return the reply. Raises MeasureError when llama.cpp cannot use the template."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline() or '{"error": "crashed"}')
        if "error" in reply:
            raise MeasureError(f"{question['template']}: {reply['error']}")
        return reply

    def tested(self) -> dict[str, list[dict[str, Any]]]:
        """Return the answers of llama.cpp's own tests, as questions, by template."""
        done = subprocess.run([_PROGRAM, "tests"], cwd=SOURCE, capture_output=True, text=True, check=True)
        found: dict[str, list[dict[str, Any]]] = {}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                question = json.loads(line)
                found.setdefault(Path(question["template"]).stem, []).append(question)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _compile(built: Path) -> None:
    say("compiling llama_calls.cpp, a minute")
    tests = (SOURCE / "tests/test-chat.cpp").read_text(encoding="utf-8")
    begin = "    void run() {\n"
    if tests.count(begin) != 1:
        raise MeasureError("llama.cpp's tests/test-chat.cpp has changed: see where its tests run")
    recorded = ROOT / "test-chat-recorded.cpp"
    recorded.write_text(tests.replace(begin, f"{begin}        record(tester_.template_path(), tc_); return;\n"))
    parts = "tests", "common", "include", "ggml/include", "vendor", "tools/server", "tools/mtmd"
    folders = (ROOT, *(SOURCE / one for one in parts))
    names = ("llama-server-impl", "llama-common", "llama", "ggml", "ggml-cpu", "ggml-base")
    command = ["c++", "-std=c++17", "-O0", "-w", str(_CODE), "-o", str(_PROGRAM)]
    command += [f"-I{folder}" for folder in folders]
    command += [f"-L{built}", f"-Wl,-rpath,{built}", *(f"-l{name}" for name in names)]
    subprocess.run(command, check=True)
