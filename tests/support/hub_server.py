"""A local server that speaks the Hugging Face hub's API closely enough for the real client, with faults on demand.

It listens on two ports: the hub itself (`endpoint`, by IP address) and a content host ("CDN", by the name localhost),
to which files in large file storage are redirected, as the real hub does. Content comes with ETags and byte ranges.
The content host refuses requests that carry an Authorization header, as a signed link does.

    with HubServer() as hub:
        hub.add("owner/repo-GGUF", {"model-Q4_K_M.gguf": content})           # bytes or the Path of a file
        hub.add("meta/closed", {"a.gguf": b"..."}, gated=True)               # TOKEN opens it, STRANGER does not
        hub.fault("owner/repo-GGUF", "model-Q4_K_M.gguf", Fault(cut_after=1000))
        gate = Gate(at=5000)                                                 # a slow server, without any sleep
        hub.fault("owner/repo-GGUF", "model-Q4_K_M.gguf", Fault(gate=gate))
        ...; gate.wait(); ...; gate.open()
        hub.requests, hub.bytes_sent("model-Q4_K_M.gguf"), hub.commit("owner/repo-GGUF")

Faults of a file queue up; each is used for `times` requests (-1: for all that follow). huggingface_hub reads
HF_ENDPOINT, which the fixture `hub_server` sets, when it is imported: code under test in this process must pass it on.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.hub_answers import Answer, Fault, Gate, Request, Where, byte_range, failed
from tests.support.hub_files import Entry, Repository, entry_of, tags
from tests.support.hub_listening import Connection, Listener

__all__ = ["STRANGER", "TOKEN", "Fault", "Gate", "HubServer", "Request"]

TOKEN = "hf_opens_everything"
STRANGER = "hf_opens_nothing"


@dataclass
class _Queued:
    fault: Fault
    left: int


class HubServer:
    """See the module. Use as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._repositories: dict[str, Repository] = {}
        self._faults: dict[tuple[str, str], list[_Queued]] = {}
        self._requests: list[Request] = []
        self._hub = Listener(lambda connection: self._serve(connection, "hub"))
        self._content = Listener(lambda connection: self._serve(connection, "content"))

    def __enter__(self) -> HubServer:
        self._hub.start()
        self._content.start()
        return self

    def __exit__(self, *_: object) -> None:
        for queue in self._faults.values():
            for queued in queue:
                if queued.fault.gate is not None:
                    queued.fault.gate.open()
        self._hub.stop()
        self._content.stop()

    @property
    def endpoint(self) -> str:
        """Return the value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._hub.port}"

    @property
    def content_host(self) -> str:
        """Return where files in large file storage are redirected to."""
        return f"http://localhost:{self._content.port}"

    def add(
        self,
        repo: str,
        files: Mapping[str, bytes | Path],
        *,
        gated: bool = False,
        private: bool = False,
        **facts: Any,
    ) -> str:
        """Add a repository, or another commit with these files, and return the commit, 40 hex digits. `facts` go into
        what the API tells as they are: downloads, likes, lastModified, cardData, gguf, tags."""
        entries = {name: entry_of(content) for name, content in files.items()}
        named = "".join(f"{name} {entry.sha256}\n" for name, entry in sorted(entries.items()))
        commit = hashlib.sha1(f"{repo}\n{named}".encode()).hexdigest()
        with self._lock:
            known = self._repositories.setdefault(repo, Repository(repo, gated, private, facts))
            known.head = commit
            known.commits[commit] = entries
        return commit

    def commit(self, repo: str) -> str:
        """Return the newest commit of a repository."""
        return self._repositories[repo].head

    def etag(self, repo: str, path: str) -> str:
        """Return the name of a file's content in the cache."""
        known = self._repositories[repo]
        return known.commits[known.head][path].sha256

    def fault(self, repo: str, path: str, *faults: Fault) -> None:
        """Queue faults for a file; path "" is the repository's information, repository "" is the search."""
        with self._lock:
            queue = self._faults.setdefault((repo, path), [])
            queue += [_Queued(fault, fault.times) for fault in faults]

    def forget_faults(self) -> None:
        """Remove all faults; answers in progress stay as they are."""
        with self._lock:
            self._faults.clear()

    @property
    def requests(self) -> list[Request]:
        """Return all requests so far, oldest first."""
        with self._lock:
            return list(self._requests)

    def bytes_sent(self, path: str) -> int:
        """Return the bytes of this file sent in all answers together, over all repositories."""
        return sum(request.sent for request in self.requests if request.file == path and request.status in (200, 206))

    # From here on: answering.

    def _serve(self, connection: Connection, host: Literal["hub", "content"]) -> None:
        url = urlsplit(connection.target)
        request = Request(
            host=host,
            method=connection.method,
            path=unquote(url.path),
            query=parse_qs(url.query),
            range=connection.headers.get("Range", ""),
            authorized="Authorization" in connection.headers,
        )
        with self._lock:
            self._requests.append(request)
        answer = Answer(connection, request)
        parts = request.path.strip("/").split("/")
        if host == "content":
            self._serve_content(answer, parts)
        elif parts == ["api", "models"]:
            self._search(answer)
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._information(answer, "/".join(parts[2:4]), parts[4:])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve(answer, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            answer.error(404, "", "Sorry, we can't find the page you are looking for.")

    def _search(self, answer: Answer) -> None:
        query = answer.request.query
        if failed(answer, self._next_fault("", "", "api")):
            return
        words = " ".join(query.get("search", [])).lower().split()
        found = [
            self._facts(repo, query)
            for repo in self._repositories.values()
            if all(word in repo.id.lower() for word in words)
            and set(query.get("filter", [])) <= set(tags(repo))
            and (not repo.private or answer.token == TOKEN)
        ]
        if sort := query.get("sort"):
            found.sort(key=lambda row: row.get(sort[0]) or 0, reverse=True)
        answer.json(found[: int(query.get("limit", ["1000"])[0])])

    def _facts(self, repo: Repository, query: Mapping[str, list[str]]) -> dict[str, Any]:
        files = repo.commits[repo.head]
        row: dict[str, Any] = {
            "_id": hashlib.sha1(repo.id.encode()).hexdigest()[:24],
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.id.split("/")[0],
            "sha": repo.head,
            "gated": "manual" if repo.gated else False,
            "private": repo.private,
            "downloads": 0,
            "likes": 0,
            "lastModified": "2025-11-03T10:00:00.000Z",
            "createdAt": "2025-11-01T10:00:00.000Z",
            "tags": tags(repo),
            "siblings": [entry.sibling(name, False) for name, entry in files.items()],
            **repo.facts,
        }
        expand = query.get("expand")
        return {key: row[key] for key in ("_id", "id", *expand) if key in row} if expand else row

    def _information(self, answer: Answer, repo_id: str, rest: list[str]) -> None:
        """Answer `/api/models/OWNER/REPO`, with `/revision/REV` behind it."""
        answer.request.repo = repo_id
        if failed(answer, self._next_fault(repo_id, "", "api")):
            return
        repo = self._open_repository(answer, repo_id)
        if repo is None:
            return
        revision = rest[1] if len(rest) > 1 else "main"
        files = repo.files(revision)
        if files is None:
            answer.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            with_blobs = answer.request.query.get("blobs", [""])[0].lower() in ("true", "1")
            siblings = [entry.sibling(name, with_blobs) for name, entry in files.items()]
            commit = repo.head if revision == "main" else revision
            answer.json({**self._facts(repo, answer.request.query), "sha": commit, "siblings": siblings})

    def _open_repository(self, answer: Answer, repo_id: str) -> Repository | None:
        """Return the repository, or None after answering that there is none, or none for this token."""
        repo = self._repositories.get(repo_id)
        if answer.token and answer.token not in (TOKEN, STRANGER):
            answer.error(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and answer.token != TOKEN):
            # The hub doesn't tell strangers which of the two it is.
            answer.error(404 if answer.token else 401, "RepoNotFound", "Repository not found")
        else:
            return repo
        return None

    def _resolve(self, answer: Answer, repo_id: str, revision: str, name: str) -> None:
        answer.request.repo, answer.request.file = repo_id, name
        fault = self._next_fault(repo_id, name, "hub")
        if failed(answer, fault):
            return
        repo = self._open_repository(answer, repo_id)
        if repo is None:
            return
        if repo.gated and answer.token != TOKEN:
            where = f"Access to model {repo_id} is restricted"
            answer.error(403 if answer.token else 401, "GatedRepo", f"{where} and you are not in the authorized list.")
            return
        files = repo.files(revision)
        if files is None:
            answer.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        commit = repo.head if revision == "main" else revision
        entry = files.get(name)
        if entry is None:
            answer.error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        facts = {"X-Repo-Commit": commit, "ETag": f'"{entry.sha256}"'}
        place = f"{self.content_host}/{quote(repo_id)}/{commit}/{quote(name)}?signature=valid"
        linked = {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size), "Location": place}
        answer.send(302, {**facts, **linked, **(fault.headers if fault is not None else {})}, b"")

    def _serve_content(self, answer: Answer, parts: list[str]) -> None:
        repo_id, commit, name = "/".join(parts[:2]), parts[2], "/".join(parts[3:])
        answer.request.repo, answer.request.file = repo_id, name
        entry = self._repositories[repo_id].commits[commit][name]
        if answer.request.authorized:
            answer.error(400, "", "Only one auth mechanism allowed")
        else:
            self._send_file(answer, repo_id, name, entry, {"ETag": f'"{entry.sha256}"'})

    def _send_file(self, answer: Answer, repo_id: str, name: str, entry: Entry, headers: dict[str, str]) -> None:
        fault = None if answer.request.method == "HEAD" else self._next_fault(repo_id, name, "content")
        if failed(answer, fault):
            return
        fault = fault or Fault()
        content = entry.content if fault.content is None else fault.content
        size = entry.size if fault.content is None else len(fault.content)
        headers = {**headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        wanted = None if fault.ignore_range else byte_range(answer.request.range, size)
        if wanted is None:
            answer.send_content(200, headers, content, 0, size, fault)
        elif wanted[0] >= wanted[1]:
            answer.send(416, {"Content-Range": f"bytes */{size}"}, b"")
        else:
            headers["Content-Range"] = f"bytes {wanted[0]}-{wanted[1] - 1}/{size}"
            answer.send_content(206, headers, content, *wanted, fault)

    def _next_fault(self, repo: str, path: str, where: Where) -> Fault | None:
        with self._lock:
            for queued in self._faults.get((repo, path), []):
                if queued.fault.where == where and queued.left:
                    queued.left -= 1
                    return queued.fault
        return None
