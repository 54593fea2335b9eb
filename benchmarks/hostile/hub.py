"""A hub that is hostile or broken, against the real client in processes of its own.

    python benchmarks/hostile/hub.py [--quick] [--only WORDS] [--jobs N]

Each scenario starts the command line (`models search`, `models files`) or the process of a download, with the default
patience and a token, in empty folders of its own, against a local server that does the scenario. What must not happen:
a traceback; 20 seconds without a word (a download that waits for its next try says so every second, and is ended after
that); a file outside of the caches; over 1 GB of memory; content that does not have its hash; the token at another host
than the hub. Exit status 1 when one of these did. The memory told is never less than that of this script, which starts
the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
from common import machine, save, say, table
from hostile.hub_scenarios import NAME, REPO, Scenario, scenarios

from cpuchat.models.downloads.state import Download, Order
from cpuchat.models.hub.repository import HubFile, RepoModel
from tests.models.hub.model_files import write_model_file
from tests.support.hub_listening import Connection, Listener
from tests.support.hub_server import TOKEN, Fault, HubServer

HANG_S, MAX_MB = 20.0, 1000
_WAITED_S = 30.0
_PROGRESS = 1 << 16
_PYTHON = [sys.executable, "-P", "-m"]
_COMMANDS = {"search": ["models", "search", "tiny"], "files": ["models", "files", REPO]}


@dataclass
class Outcome:
    """`faults`: what must not happen and did."""

    said: str
    seconds: float
    quiet: float
    megabytes: float
    faults: list[str] = field(default_factory=list)


class Place:
    """Empty folders for one scenario, deep enough that what climbs out of them is still seen."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.inner = base.joinpath(*("deep" for _ in range(6)))
        self.caches = (self.inner / "hf", self.inner / "cpuchat")
        for name in ("home", "tmp", "cwd"):
            (self.inner / name).mkdir(parents=True)

    def environment(self, endpoint: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        folders = {f"CPUCHAT_{kind}_DIR": str(self.caches[1] / kind) for kind in ("CONFIG", "DATA", "CACHE")}
        own = {"HOME": str(self.inner / "home"), "TMPDIR": str(self.inner / "tmp"), "HF_HOME": str(self.caches[0])}
        told = {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1,localhost"}
        return {**kept, **folders, **own, **told, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def strays(self) -> list[Path]:
        """Files that lie anywhere but in the caches."""
        files = (path for path in self.base.rglob("*") if path.is_symlink() or path.is_file())
        found = [path for path in files if not any(path.is_relative_to(cache) for cache in self.caches)]
        outside = Path(tempfile.gettempdir(), "cpuchat-hostile")
        return found + ([outside] if outside.exists() else [])


class Server:
    """The hub of one scenario; with TLS where that is part of it."""

    def __init__(self, scenario: Scenario, model: Path, certificates: Path) -> None:
        self.hub = HubServer()
        self.environment: dict[str, str] = {}
        self.commit = self.hub.add(REPO, {NAME: model})
        self.etag = self.hub.etag(REPO, NAME)
        self._elsewhere: Listener | None = None
        self.endpoint = self.hub.endpoint
        if scenario.tls == "to http":
            _with_tls(self.hub._hub, certificates / "localhost")
            self.endpoint = f"https://localhost:{self.hub._hub.port}"
        elif scenario.tls:
            name = "elsewhere" if scenario.tls == "other name" else "localhost"
            self._elsewhere = Listener(_nothing)
            _with_tls(self._elsewhere, certificates / name)
            place = f"https://localhost:{self._elsewhere.port}/x"
            self.hub.fault(REPO, NAME, Fault(where="hub", headers={"Location": place}, times=-1))
        if scenario.tls in ("to http", "other name"):
            name = "localhost" if scenario.tls == "to http" else "elsewhere"
            self.environment["SSL_CERT_FILE"] = str(certificates / f"{name}.pem")
        scenario.hub(self.hub)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.hub:
            if self._elsewhere is not None:
                self._elsewhere.start()
            try:
                yield
            finally:
                if self._elsewhere is not None:
                    self._elsewhere.stop()


def _nothing(connection: Connection) -> None:
    connection.send_head(404, {"Content-Length": "0"})


def _with_tls(listener: Listener, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{certificate}.pem", f"{certificate}.key")
    listener.socket = context.wrap_socket(listener.socket, server_side=True, do_handshake_on_connect=False)


def make_certificate(folder: Path, name: str, host: str) -> None:
    """Signed by itself, for a day."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={host}"]
    command += ["-addext", f"subjectAltName=DNS:{host}"]
    command += ["-keyout", f"{folder / name}.key", "-out", f"{folder / name}.pem"]
    subprocess.run(command, check=True, capture_output=True)


class Watched:
    """A process and what it says, line by line, with the longest time that it said nothing."""

    def __init__(self, command: list[str], place: Place, environment: dict[str, str], order: bytes = b"") -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        stdin = subprocess.PIPE if order else subprocess.DEVNULL
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": self._errors}
        self.process = subprocess.Popen(command, cwd=place.inner / "cwd", env=environment, **pipes)
        self.began = self.last = time.monotonic()
        self.quiet = 0.0
        self.megabytes = 0.0
        if order and self.process.stdin is not None:
            self.process.stdin.write(order + b"\n")
            self.process.stdin.flush()

    def lines(self) -> Iterator[bytes]:
        """Until it ends, or has said nothing for too long."""
        stream = self.process.stdout
        assert stream is not None
        rest = b""
        while time.monotonic() - self.last < HANG_S:
            if not select.select([stream], [], [], 0.5)[0]:
                continue
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                break
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
        self.heard()

    def heard(self) -> None:
        """It said something that a user sees."""
        now = time.monotonic()
        self.quiet, self.last = max(self.quiet, now - self.last), now

    def end(self) -> int:
        """Ends it if it runs. Its exit status."""
        stopper = threading.Timer(10.0, lambda: self.process.send_signal(signal.SIGKILL))
        if self.quiet >= HANG_S:
            self.process.kill()
        stopper.start()
        if self.process.stdin is not None:
            self.process.stdin.close()
        _, status, usage = os.wait4(self.process.pid, 0)
        stopper.cancel()
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.megabytes = usage.ru_maxrss / 1024
        return self.process.returncode

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")


def ask(scenario: Scenario, place: Place, environment: dict[str, str]) -> tuple[Watched, str]:
    """The command line; what it said at its end."""
    watched = Watched([*_PYTHON, "cpuchat.cli.main", *_COMMANDS[scenario.ask]], place, environment)
    said = b"\n".join(watched.lines()).decode(errors="replace")
    status = watched.end()
    errors = watched.errors().strip()
    lines = (errors or said).splitlines() or [""]
    fault = next((line for line in lines if line.startswith("!")), lines[0])  # of one model, below the list
    return watched, f"exit {status}: {fault}"


def fetch(place: Place, server: Server, size: int, environment: dict[str, str]) -> tuple[Watched, Download | None]:
    """The process of a download; its last report. One that waits for its next try is ended after a while."""
    file = HubFile(path=NAME, size=size, sha256=server.etag)
    cache = place.caches[0] / "hub"
    model = RepoModel(name=NAME, files=(file,))
    order = Order(repo=REPO, revision=server.commit, model=model, cache=str(cache), newest_at=time.time())
    command = [*_PYTHON, "cpuchat.models.downloads.child"]
    watched = Watched(
        command, place, {**environment, "HF_HUB_DISABLE_XET": "1"}, msgspec.json.encode(Download(order=order))
    )
    last: Download | None = None
    for line in watched.lines():
        told = msgspec.json.decode(line, type=Download)
        is_news = last is None or told.state != last.state or told.done >= last.done + _PROGRESS
        if is_news or told.state in ("waiting", "checking"):
            watched.heard()
            last = told
        if told.state == "waiting" and time.monotonic() - watched.began > _WAITED_S:
            break
    watched.end()
    return watched, last


def run(scenario: Scenario, model: Path, certificates: Path) -> Outcome:
    """Everything about one scenario."""
    content = model.read_bytes()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        place = Place(Path(folder))
        server = Server(scenario, model, certificates)
        environment = {**place.environment(server.endpoint), **server.environment, **scenario.env}
        with server.running():
            if scenario.ask == "download":
                watched, last = fetch(place, server, len(content), environment)
                said = f"{last.state}: {last.message or Path(last.path).name} {last.hint}" if last else "nothing"
            else:
                watched, said = ask(scenario, place, environment)
                last = None
        faults = ["a hang"] if watched.quiet >= HANG_S else []
        texts = [watched.errors(), said, *(path.read_text(errors="replace") for path in place.caches[1].rglob("*.log"))]
        faults += ["a traceback"] if any("Traceback" in text for text in texts) else []
        faults += ["the token"] if any(TOKEN in text for text in texts) else []
        faults += ["a control character"] if not all(line.isprintable() for line in said.splitlines()) else []
        faults += [f"outside: {path}" for path in place.strays()]
        faults += ["too much memory"] if watched.megabytes > MAX_MB else []
        if not (server.hub.requests or scenario.tls):
            faults.append("the server was never asked")
        if any(request.authorized and request.host == "content" for request in server.hub.requests):
            faults.append("the token at another host")
        faults += _wrong_contents(scenario, place, server, content, last)
        return Outcome(said, time.monotonic() - watched.began, watched.quiet, watched.megabytes, faults)


def _wrong_contents(
    scenario: Scenario, place: Place, server: Server, content: bytes, last: Download | None
) -> list[str]:
    if scenario.ask != "download":
        return []
    repo = place.caches[0] / "hub" / f"models--{REPO.replace('/', '--')}"
    found = [path for folder in ("blobs", "snapshots") for path in (repo / folder).rglob("*") if path.is_file()]
    whole = [path for path in found if not path.name.endswith(".incomplete")]
    faults = [f"unchecked: {path.name}" for path in whole if path.read_bytes() != content]
    faults += [f"a strange name: {path.name}" for path in whole if path.name not in (NAME, server.etag)]
    is_done = last is not None and last.state == "done"
    return faults + (["not what must come of it"] if is_done != scenario.done else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="every fifth scenario")
    parser.add_argument("--only", default="", help="those with these words in their name")
    parser.add_argument("--jobs", type=int, default=3, help="scenarios at the same time")
    options = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory(prefix="hostile-files-") as folder:
        model = write_model_file(Path(folder) / NAME, n_values=1 << 18)
        if shutil.which("openssl") is None:
            sys.exit("not measured: openssl is needed to make certificates")
        make_certificate(Path(folder), "localhost", "localhost")
        make_certificate(Path(folder), "elsewhere", "elsewhere.example")
        chosen = [one for one in scenarios(model.read_bytes()) if options.only in one.name]
        chosen = chosen[:: 5 if options.quick else 1]
        with ThreadPoolExecutor(options.jobs) as pool:
            jobs = [(one, pool.submit(run, one, model, Path(folder))) for one in chosen]
            outcomes = [(one, _told(one, job.result())) for one, job in jobs]
    rows = [_row(one, outcome) for one, outcome in outcomes]
    bad = [one.name for one, outcome in outcomes if outcome.faults]
    print(f"\nhostile hub - {where}\n")
    print(table(rows, ("asked for", "scenario", "faults", "silent s", "MB", "what the user is told")))
    most = max(outcome.megabytes for _, outcome in outcomes)
    longest = max(outcome.quiet for _, outcome in outcomes)
    print(f"- {len(rows)} scenarios, {len(bad)} with faults; at most {most:.0f} MB, {longest:.1f} s without a word")
    if not (options.quick or options.only):
        save("hostile-hub", where, {"scenarios": rows, "faulty": bad, "most_mb": most, "longest_s": longest})
    sys.exit(1 if bad else 0)


def _row(scenario: Scenario, outcome: Outcome) -> tuple[str, ...]:
    faults = ", ".join(outcome.faults) or "–"
    figures = f"{outcome.quiet:.1f}", f"{outcome.megabytes:.0f}"
    return scenario.ask, scenario.name, faults, *figures, outcome.said[:110].replace("|", "/")


def _told(scenario: Scenario, outcome: Outcome) -> Outcome:
    say(f"{scenario.ask} {scenario.name}: {', '.join(outcome.faults) or 'ok'} ({outcome.seconds:.1f} s)")
    return outcome


if __name__ == "__main__":
    main()
