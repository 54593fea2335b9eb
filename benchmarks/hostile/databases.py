"""The real program on mutated files of chats: it must start, tell in plain words what it found, and show what is sound.

    python benchmarks/hostile/databases.py [--quick] [--count 500] [--seed 1] [--jobs 2]

Each file is a copy of one with 8 chats, changed in one of many ways: values of the wrong type or range in random rows,
tables, indexes and triggers that are altered or missing, wrong version numbers, overwritten bytes and pages, a cut end,
a spoilt log, no file at all. The program runs in a pseudo-terminal until it shows its chats or ends by itself, and is
then left with Ctrl+Q. Failures are: a traceback,
"a bug", the last-resort screen, an exit status that is not 0 or 11, more than 20 s, and a message that the mutation
did not touch but that cannot be read afterwards. That a message was not touched is known for changed rows; for
overwritten bytes the share that was saved is reported instead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pexpect
from common import Row, Target, arguments, machine, report, run_main, say

from cpuchat.base.errors import ChatsError
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.timings import Timings

LIMIT_S = 20.0
CHATS, MESSAGES = 8, 12
QUIT = "\x11"
BAD_WORDS = (b"Traceback", b"This is a bug", b"internal error")
VALUES = (
    "NULL", "1e300", "-1e300", "9e999", "-1", "9223372036854775807", "''", "'x'", "x''", "x'ff00fe'", "x'1b5d35323b'",
    "CAST(x'41ff42' AS TEXT)", "CAST(x'c3' AS TEXT)", "'[' || hex(zeroblob(50000))", "'../../../x'",
    "char(27) || ']52;c;eA==' || char(7)", "zeroblob(3000000)", "'{\"predicted_n\": 1e400}'",
    "printf('%.*c', 90000, '[')",
)  # fmt: skip
COLUMNS = {
    "chats": ("id", "title", "created", "updated", "model", "system_prompt", "version", "sides", "leaf"),
    "messages": (
        "chat_id", "parent", "role", "content", "reasoning", "model", "stop_reason", "timings", "settings",
        "created",
    ),
}  # fmt: skip
SCHEMAS = (
    "DROP INDEX chats_by_time", "DROP TABLE drafts", "ALTER TABLE chats DROP COLUMN title",
    "ALTER TABLE messages DROP COLUMN timings",
    "ALTER TABLE messages RENAME COLUMN model TO models", "ALTER TABLE chats ADD COLUMN more",
    "CREATE TRIGGER t AFTER UPDATE ON messages BEGIN SELECT RAISE(ABORT, 'no'); END", "CREATE VIEW v AS SELECT 1",
    "CREATE TRIGGER t AFTER INSERT ON chats BEGIN DELETE FROM chats; END", "CREATE TABLE other (x)",
    "CREATE UNIQUE INDEX u ON messages (role, chat_id, parent)", "PRAGMA user_version = 0", "PRAGMA user_version = 1",
    "PRAGMA user_version = -7", "PRAGMA user_version = 70000", "PRAGMA application_id = 7",
)  # fmt: skip


@dataclass
class Case:
    """One mutated file. `touched` None: unknown which messages."""

    kind: str
    touched: int | None


@dataclass
class Outcome:
    kind: str
    seconds: float
    fault: str
    kept: float
    """Share of the messages that the mutation did not touch (or, where that is unknown, of all) that can be read."""


def write_original(path: Path) -> list[str]:
    """Returns all messages."""
    store = ChatStore(path)
    texts: list[str] = []
    for number in range(CHATS):
        chat = store.create_chat("model", "Be brief." if number % 2 else "", title=f"Chat {number}")
        for turn in range(MESSAGES):
            text = f"Message {number}.{turn} " * random.Random(number * 99 + turn).randrange(1, 300)
            answer = {
                "reasoning": "Hm. " * 9,
                "model": "model",
                "stop_reason": "end",
                "timings": Timings(predicted_n=9),
            }
            role = "assistant" if turn % 2 else "user"
            store.add_message(chat.id, role, text, **(answer if turn % 2 else {}))
            texts.append(text)
    store.close()
    return texts


def mutate(path: Path, chance: random.Random) -> Case:
    return chance.choice((_row, _row, _row, _schema, _bytes, _page, _header, _cut, _log, _no_file))(path, chance)


def _execute(path: Path, *statements: str) -> int:
    """Returns how many rows the last statement changed."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        for pragma in ("foreign_keys = OFF", "ignore_check_constraints = ON"):
            db.execute(f"PRAGMA {pragma}")
        n_changed = 0
        for statement in statements:
            with contextlib.suppress(sqlite3.Error):  # a constraint: then this file is one that was not changed
                n_changed = db.execute(statement).rowcount
        return max(n_changed, 0)


def _row(path: Path, chance: random.Random) -> Case:
    table = chance.choice(list(COLUMNS))
    column, value = chance.choice(COLUMNS[table]), chance.choice(VALUES)
    share = chance.choice((3, 10, 10, 100))
    which = f"abs(random()) % {share} = 0"
    n = _execute(path, f"UPDATE OR IGNORE {table} SET {column} = {value} WHERE {which}")
    return Case(f"{table}.{column} = {value[:30]}", n if table == "messages" and column in ("content", "role") else 0)


def _schema(path: Path, chance: random.Random) -> Case:
    statement = chance.choice(SCHEMAS)
    _execute(path, statement)
    return Case(statement, 0)


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _bytes(path: Path, chance: random.Random) -> Case:
    for _ in range(n := chance.choice((1, 1, 8, 64))):
        _overwrite(path, chance.randrange(path.stat().st_size), chance.randbytes(1))
    return Case(f"{n} bytes", None)


def _page(path: Path, chance: random.Random) -> Case:
    page = chance.randrange(1, path.stat().st_size // 4096)
    _overwrite(path, page * 4096, chance.choice((bytes(4096), chance.randbytes(4096))))
    return Case("a page", None)


def _header(path: Path, chance: random.Random) -> Case:
    _overwrite(path, chance.randrange(100), chance.randbytes(chance.choice((1, 4))))
    return Case("the header", None)


def _cut(path: Path, chance: random.Random) -> Case:
    size = chance.choice((0, 1, 99, chance.randrange(path.stat().st_size)))
    os.truncate(path, size)
    return Case("cut", None)


def _log(path: Path, chance: random.Random) -> Case:
    side = path.with_name(path.name + chance.choice(("-wal", "-shm")))
    side.write_bytes(chance.randbytes(chance.choice((1, 32, 5000, 100_000))))
    return Case(side.name, 0)


def _no_file(path: Path, chance: random.Random) -> Case:
    path.unlink()
    match chance.randrange(5):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(path.parent / "nowhere" / "chats.db")
        case _:
            path.write_text("no database at all\n" * 999)
    return Case("no file", None)


def open_once(original: Path, texts: list[str], seed: int) -> Outcome:
    """Mutate a copy of one, run the program on it, and look what can be read afterwards."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="cpuchat-db-") as name:
        folder = Path(name)
        path = folder / "data" / "chats.db"
        path.parent.mkdir()
        shutil.copyfile(original, path)
        case = mutate(path, chance)
        started = time.monotonic()
        fault = run_program(folder)
        seconds = time.monotonic() - started
        kept = 1.0
        if not fault and case.kind != "no file":
            kept, fault = _readable(path, texts, case)
        return Outcome(case.kind, seconds, fault, kept)


def _readable(path: Path, texts: list[str], case: Case) -> tuple[float, str]:
    found: set[str] = set()
    for start in (1, 2):  # damage that only a read meets is repaired by the next start
        try:
            with contextlib.closing(ChatStore(path)) as store:
                found = {message.content for chat in store.chats() for message in store.all_messages(chat.id)}
            break
        except ChatsError as error:
            if start == 2:
                return 0.0, f"still damaged after a repair: {error}"
    expected = len(texts) - (case.touched or 0)
    kept = min(1.0, len(found & set(texts)) / expected) if expected else 1.0
    return kept, f"{1 - kept:.1%} of the sound messages are missing" if case.touched is not None and kept < 1 else ""


def run_program(folder: Path) -> str:
    """Start the app, wait for its chats, leave it; "" or what was wrong."""
    places = {f"CPUCHAT_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE")}
    config = folder / "config" / "config.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text('[hardware]\nprobe = false\n[speculation]\ndrafters = "off"\n')  # neither is of interest
    child = pexpect.spawn(
        sys.executable,
        ["-P", "-m", "cpuchat.cli.main"],
        env={**os.environ, **places, "TERM": "xterm-256color", "HOME": str(folder)},
        dimensions=(40, 120),
        timeout=None,
    )
    output = bytearray()
    deadline = time.monotonic() + LIMIT_S
    left = False
    fault = ""
    try:
        while True:
            if time.monotonic() > deadline:
                return "not there after 20 s" if not left else "not gone 20 s after Ctrl+Q"
            try:
                output += child.read_nonblocking(65_536, timeout=0.2)
            except pexpect.TIMEOUT:
                pass
            except pexpect.EOF:
                break
            if not left and (b"Chat " in output or b"no chats yet" in output or b"Today" in output):
                child.send(QUIT)
                left, deadline = True, time.monotonic() + LIMIT_S
        child.close()
        if found := [word.decode() for word in BAD_WORDS if word in output]:
            fault = f"{found[0]}: {bytes(output[-300:])!r}"
        elif child.exitstatus not in (0, 11):
            fault = f"exit status {child.exitstatus}: {bytes(output[-300:])!r}"
        return fault
    finally:
        child.close(force=True)


def measure(count: int, seed: int, jobs: int, each: Callable[[Outcome], None]) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="cpuchat-dbs-") as name, ThreadPoolExecutor(jobs) as pool:
        original = Path(name) / "chats.db"
        texts = write_original(original)
        outcomes: list[Outcome] = []
        for outcome in pool.map(lambda number: open_once(original, texts, seed * 1_000_000 + number), range(count)):
            outcomes.append(outcome)
            each(outcome)
        return outcomes


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=500)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--jobs", type=int, default=2)

    options = arguments(__doc__, own)
    where = machine()
    done = 0

    def each(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if outcome.fault:
            say(f"  {outcome.kind}: {outcome.fault}")
        elif not done % 25:
            say(f"  {done} opened")

    outcomes = measure(10 if options.quick else options.count, options.seed, options.jobs, each)
    rows = [
        Row("files with a fault", "files", [sum(bool(o.fault) for o in outcomes)], target=Target(0, False)),
        Row("start to end, worst", "s", [max(o.seconds for o in outcomes)], target=Target(LIMIT_S, False)),
        Row("messages readable afterwards", "%", [100 * o.kept for o in outcomes if o.kind != "no file"]),
    ]
    remarks = [f"{len(outcomes)} files, seed {options.seed}"]
    remarks += [f"{o.kind}: {o.fault}" for o in outcomes if o.fault][:20]
    report("hostile_databases", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
