"""The real program on 300 generated configurations: settings, themes, keymaps and catalogs that are mutated, odd, huge
or no files at all.

    .venv/bin/python benchmarks/hostile/configs.py [--first 0] [--count 300]

Every configuration has a number and is the same in every run. It is opened by `models list`, by `doctor`, or by the app
in a pseudo-terminal, which is quit as soon as it waits for a message. Asserted: no traceback, no "This is a bug", at
most 20 s, at most 1 GB, and no file outside of the program's own folders.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pexpect

MAX_SECONDS = 20.0
MAX_BYTES = 1 << 30
FATAL = re.compile(rb"Traceback|This is a bug|internal error", re.IGNORECASE)
PROGRAM = [sys.executable, "-P", "-m", "cpuchat.cli.main"]
OWN = ("config", "data", "cache")

SETTINGS = """\
# comment
[model]
last = ""
folders = ["/nowhere", "~/models"]
[engine]
threads = 0
cores = "auto"
memory = "auto"
ctx = 0
batch = 512
flash_attn = "auto"
cache_type_k = "f16"
load_mode = "mmap"
mlock = false
poll = 50
saved_kv_gb = 2.0
[speculation]
drafters = "auto"
draft_model = ""
depth = 0
[hardware]
probe = false
counters = false
[sampling]
temperature = 0.7
top_k = 40
top_p = 0.95
seed = -1
[chat]
system_prompt = "Be brief."
max_tokens = 0
[ui]
theme = "cpuchat"
telemetry = true
"""
THEME = """\
name = "mine"
dark = true
[colors]
primary = "#6cb6ff"
background = "#101418"
[variables]
block-cursor-text-style = "bold"
footer-background = "#202020 50%"
now = "#6bd9a8"
"""
CATALOG = """\
[[model]]
id = "mine"
name = "Mine 1B"
family = "Mine"
params = 1.0
context = 4096
repos = ["someone/mine-GGUF"]
[model.sizes]
Q4_K_M = 0.7
"""
KEYMAP = """\
[chat]
new = "ctrl+b"
settings = "f2,ctrl+e"
compare = ""
[app]
help = "ctrl+h"
"""
FILES = {"config.toml": SETTINGS, "themes/mine.toml": THEME, "keymap.toml": KEYMAP, "catalog.toml": CATALOG}

ODD = (
    "1", "-1", "0", "inf", "-inf", "nan", "1e308", "9" * 400, "9" * 5000, "true", '""', '"~"', '"~nobody/x"', '"~x"',
    '"\\u0000"', '"\\u001b]52;c;eA==\\u0007"', '"[/b][@click=app.quit]"', '"\\u202e"', '"/dev/zero"', '"/"', '"\\n"',
    '"' + "x" * 300 + '"', '"/' + "x/" * 3000 + '"', "[]", "[[]]", '["~nobody/x", "a\\u0000b"]', "{}", "{a = {b = 1}}",
    "1979-05-27", "07:32:00", "0x_1", "[" * 2000 + "]" * 2000, "{a=" * 500 + "1" + "}" * 500, '"auto"', '"7-4"',
    '"l3:99"', '"node:9999"', '"demo"', '["/proc"]', "'''\nlines\n'''", "99999999999999999999", "-9223372036854775809",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration: which file is how, and what opens it."""

    number: int
    file: str
    kind: str
    opener: str


@dataclass(frozen=True)
class Outcome:
    case: Case
    seconds: float
    memory: int
    status: str
    problem: str = ""


def mutated(text: str, draw: random.Random) -> bytes:
    """A few bytes changed, left out, doubled or cut off."""
    data = bytearray(text.encode())
    for _ in range(draw.randint(1, 12)):
        at = draw.randrange(len(data))
        match draw.randrange(5):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + draw.randint(1, 40)]
            case 3:
                data[at:at] = draw.choice((b"[", b"]", b'"', b"=", b"\\", b"\0", b"\xff", b"'''", b"[[", b".", b"\r"))
            case _:
                del data[max(1, len(data) - draw.randint(1, 30)) :]
    return bytes(data)


def odd(text: str, draw: random.Random) -> bytes:
    """Values of other types and sizes, in up to three keys."""
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line]
    for number in draw.sample(keys, draw.randint(1, 3)):
        lines[number] = f"{lines[number].partition(' = ')[0]} = {draw.choice(ODD)}"
    return "\n".join(lines).encode(errors="surrogatepass")


def encoded(text: str, draw: random.Random) -> bytes:
    return draw.choice((
        b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16"), text.encode("utf-32"), b"", b"\0" * 4096,
        text.replace("\n", "\r\n").encode(), text.replace("\n", "\r").encode(), b"\xff\xfe" + text.encode(),
        text.encode() + b"\xc3", b"#" + bytes(range(256)),
    ))  # fmt: skip


def nested(text: str, draw: random.Random) -> bytes:
    depth = draw.choice((200, 1_000, 5_000, 50_000))
    return draw.choice((
        f"x = {'[' * depth}{']' * depth}", f"x = {'{a=' * depth}1{'}' * depth}", f"[{'.'.join('a' * depth)}]\nb = 1",
        f"{'.'.join('a' * depth)} = 1", "[" * depth, f"{text}\n[model.{'.'.join('a' * depth)}]",
    )).encode()  # fmt: skip


def huge(text: str, draw: random.Random) -> bytes:
    return draw.choice((
        text + "#" * (8 << 20), text + "\n" + "\n".join(f"key{n} = {n}" for n in range(40_000)),
        text + f'\n[x]\ny = "{"z" * 900_000}"', "\n" * (2 << 20), text + "\n".join(f"[t{n}]" for n in range(30_000)),
    )).encode()  # fmt: skip


def content(write: Callable[[str, random.Random], bytes]) -> Callable[[Path, str, random.Random], object]:
    return lambda file, text, draw: file.write_bytes(write(text, draw))


def special(file: Path, text: str, draw: random.Random) -> None:
    """Something else in the place of the file."""
    match draw.randrange(7):
        case 0:
            os.mkfifo(file)
        case 1:
            with socket.socket(socket.AF_UNIX) as listener:
                here = Path.cwd()
                os.chdir(file.parent)  # the path of a socket is short
                try:
                    listener.bind(file.name)
                finally:
                    os.chdir(here)
        case 2:
            file.mkdir()
        case 3:
            file.symlink_to("/dev/zero")
        case 4:
            file.symlink_to(file.name)
        case 5:
            file.symlink_to("nowhere")
        case _:
            file.write_text(text)
            file.chmod(0)


KINDS = {"mutated": content(mutated), "odd": content(odd), "encoded": content(encoded), "nested": content(nested),
         "huge": content(huge), "special": special}  # fmt: skip
_SHARES = ("mutated", "odd", "odd", "mutated", "encoded", "nested", "special", "odd", "special", "huge")


def cases(first: int, count: int) -> list[Case]:
    """Settings in two of five; the app opens one in three, and every theme and keymap, which only it reads."""
    found = []
    for number in range(first, first + count):
        file = ("config.toml", "themes/mine.toml", "config.toml", "keymap.toml", "catalog.toml")[number % 5]
        in_app = file in ("themes/mine.toml", "keymap.toml") or number % 3 == 0
        opener = "app" if in_app else "doctor" if number % 8 == 2 else "models list"
        found.append(Case(number, file, _SHARES[(number // 5) % len(_SHARES)], opener))
    return found


def run(case: Case, folder: Path) -> Outcome:
    """Make the configuration in `folder` and open it."""
    config, outside = folder / "config", folder / "home"
    (config / "themes").mkdir(parents=True)
    outside.mkdir()
    draw = random.Random(case.number)
    KINDS[case.kind](config / case.file, FILES[case.file], draw)
    if case.file != "config.toml":
        (config / "config.toml").write_text(SETTINGS.replace('"cpuchat"', '"mine"'))
    places = {f"CPUCHAT_{name.upper()}_DIR": str(folder / name) for name in OWN}
    environment = {**os.environ, **places, "HOME": str(outside), "HF_HOME": str(folder / "cache" / "hf"),
                   "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", "COLUMNS": "120"}  # fmt: skip
    began = time.monotonic()
    open_it = _in_terminal if case.opener == "app" else _in_pipe
    status, memory, output, hung = open_it(case.opener.split(), environment, outside)
    seconds = time.monotonic() - began
    strays = [str(path.relative_to(folder)) for path in outside.rglob("*")]
    strays += [path.name for path in folder.iterdir() if path.name not in (*OWN, "home")]
    problem = ""
    if hung or seconds > MAX_SECONDS:
        problem = "hang"
    elif match := FATAL.search(output):
        problem = f"said {match[0].decode()!r}"
    elif memory > MAX_BYTES:
        problem = "memory"
    elif strays:
        problem = f"wrote {strays[0]}"
    return Outcome(case, seconds, memory, status, problem)


def _in_pipe(arguments: list[str], environment: dict[str, str], cwd: Path) -> tuple[str, int, bytes, bool]:
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=cwd
        )
        hung = False
        try:
            child.wait(MAX_SECONDS)
        except subprocess.TimeoutExpired:
            hung = True
            child.kill()
            child.wait()
        output.seek(0)
        return f"exit {child.returncode}", _peak(), output.read(), hung


def _in_terminal(arguments: list[str], environment: dict[str, str], cwd: Path) -> tuple[str, int, bytes, bool]:
    """Start the app without a model to load, and quit as soon as it waits for a message."""
    child = pexpect.spawn(PROGRAM[0], PROGRAM[1:], env=environment, cwd=str(cwd), dimensions=(40, 120), timeout=None)
    output, hung, asked = b"", False, False
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        try:
            output += child.read_nonblocking(1 << 16, timeout=max(0.1, deadline - time.monotonic()))
        except pexpect.EOF:
            break
        except pexpect.TIMEOUT:
            hung = True
            break
        if time.monotonic() > deadline:
            hung = True
            break
        if not asked and b"Message" in output:
            asked = True
            child.send("\x11")
    child.close(force=True)
    status = f"exit {child.exitstatus}" if child.exitstatus is not None else f"signal {child.signalstatus}"
    return f"{status}{'' if asked else ', not started'}", _peak(), output, hung


def _peak() -> int:
    """Bytes that the largest child so far has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    chosen = parser.parse_args()
    outcomes: list[Outcome] = []
    for case in cases(chosen.first, chosen.count):
        with tempfile.TemporaryDirectory(prefix="configs-") as folder:
            outcome = run(case, Path(folder))
        outcomes.append(outcome)
        if outcome.problem:
            print(f"{case.number}: {case.file}, {case.kind}, {case.opener}: {outcome.problem} ({outcome.status})",
                  flush=True)  # fmt: skip
    print(f"\n{'file':<18} {'kind':<9} {'cases':>5} {'failed':>6} {'slowest':>8}  ends")
    for file in FILES:
        for kind in KINDS:
            some = [one for one in outcomes if (one.case.file, one.case.kind) == (file, kind)]
            if some:
                ends = ", ".join(f"{count} × {end}" for end, count in Counter(one.status for one in some).most_common())
                failed = sum(bool(one.problem) for one in some)
                slowest = max(one.seconds for one in some)
                print(f"{file:<18} {kind:<9} {len(some):>5} {failed:>6} {slowest:>6.1f} s  {ends}")
    failed = [one for one in outcomes if one.problem]
    largest = max((one.memory for one in outcomes), default=0)
    print(f"\n{len(outcomes)} configurations, {len(failed)} failed, at most {largest / 1e6:.0f} MB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
