"""What a hostile or broken hub can send: each a name, what is asked of it, and what it does then."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.hub_listening import Connection
from tests.support.hub_server import Fault, Gate, HubServer

REPO, NAME = "some/Tiny-GGUF", "tiny-Q8_0.gguf"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MIB = 1 << 20
UP = "../" * 16
OUTSIDE = f"{UP}{'tmp/cpuchat-hostile'}"

Ask = Literal["search", "files", "download"]
Hub = Callable[[HubServer], None]


@dataclass(frozen=True)
class Scenario:
    """`ask`: what the child process does. `tls`: who answers by TLS, the "hub" or where it redirects to, and whether
    the certificate is "trusted" and for that name. `done`: it must succeed in spite of everything."""

    name: str
    ask: Ask
    hub: Hub
    tls: Literal["", "untrusted", "other name", "to http"] = ""
    done: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def _always(file: tuple[str, str], **fault: Any) -> Hub:
    return lambda hub: hub.fault(*file, Fault(times=-1, **fault))


def _search(**fault: Any) -> Hub:
    return _always(("", ""), where="api", **fault)


def _listing(**fault: Any) -> Hub:
    return _always((REPO, ""), where="api", **fault)


def _resolve(**fault: Any) -> Hub:
    return _always((REPO, NAME), where="hub", **fault)


def _content(**fault: Any) -> Hub:
    return _always((REPO, NAME), **fault)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


Head = bytes | Callable[[Connection], bytes]


def _raw(head: Head, pieces: Callable[[], Iterator[bytes]]) -> Callable[[Connection], None]:
    def write(connection: Connection) -> None:
        connection.send_body(head if isinstance(head, bytes) else head(connection))
        for piece in pieces():  # until the client leaves
            connection.send_body(piece)

    return write


def _flood(head: Head, piece: bytes) -> Callable[[Connection], None]:
    def pieces() -> Iterator[bytes]:
        while True:
            yield piece

    return _raw(head, pieces)


def _drip(head: Head, piece: bytes = b"x") -> Callable[[Connection], None]:
    def pieces() -> Iterator[bytes]:
        while True:
            time.sleep(0.25)
            yield piece

    return _raw(head, pieces)


def _bomb(head: Head) -> Callable[[Connection], None]:
    """Gzip without end: a thousand bytes for each that is sent."""

    def pieces() -> Iterator[bytes]:
        packer = zlib.compressobj(wbits=31)
        while True:
            yield packer.compress(b" " * MIB)

    return _raw(head, pieces)


_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_GZIP = _OK + b"Content-Encoding: gzip\r\n\r\n"
_PART = b"HTTP/1.1 206 Part\r\nContent-Range: bytes %s%s/%d\r\n%s\r\n"


def _as_asked(size: int, more: bytes = b"") -> Callable[[Connection], bytes]:
    """The head of the piece of a file of `size` bytes that was asked for."""

    def head(connection: Connection) -> bytes:
        first, dash, last = connection.headers["Range"].removeprefix("bytes=").partition("-")
        return _PART % (f"{first}{dash}".encode(), last.encode() or b"%d" % (size - 1), size, more)

    return head


def _redirect(target: str, status: int = 302) -> dict[str, Any]:
    return {"status": status, "headers": {"Location": target}}


def _searches() -> Iterator[Scenario]:
    def one(name: str, **fault: Any) -> Scenario:
        return Scenario(name, "search", _search(**fault))

    deep = b"[" * 200_000
    escapes = [{"id": "a/\x1b]52;c;eA==\x07\u202eb"}, {"id": REPO, "gguf": {"architecture": "\x1b[2J"}}]
    yield one("gzip bomb without end", raw=_bomb(_GZIP))
    yield one("gzip bomb in a refusal", raw=_bomb(b"HTTP/1.1 503 No\r\nContent-Encoding: gzip\r\n\r\n"))
    yield one("gzip in gzip", page=gzip.compress(gzip.compress(b"[]")), headers={"Content-Encoding": "gzip, gzip"})
    yield one("an encoding that was not offered", page=b"\x8b\x02\x80", headers={"Content-Encoding": "br"})
    yield one("gzip cut short", page=gzip.compress(b"[]" * 999)[:-9], headers={"Content-Encoding": "gzip"})
    yield one("an answer without end", raw=_flood(_OK + b"\r\n[", b" " * MIB))
    yield one("a refusal without end", raw=_flood(b"HTTP/1.1 503 No\r\n\r\n", b"no " * MIB))
    yield one("a redirect without end", raw=_flood(b"HTTP/1.1 302 No\r\nLocation: /x\r\n\r\n", b"no " * MIB))
    yield one("100 Continue without end", raw=_flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"))
    yield one("headers without end", raw=_flood(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 100))
    yield one("a head that drips", raw=_drip(b"HTTP/1.1 200 OK\r\nX-A: "))
    yield one("an answer that drips", raw=_drip(_OK + b"\r\n[", b" "))
    yield one("silence", gate=Gate())
    yield one("no HTTP", raw=_raw(b"SSH-2.0-OpenSSH_9.6\r\n", lambda: iter(())))
    yield one("further pages without end", page=b"[]", headers={"Link": '<http://127.0.0.1:1/x>; rel="next"'})
    yield one("redirect to file:", **_redirect("file:///etc/passwd"))
    yield one("redirect to ftp:", **_redirect("ftp://elsewhere.example/x", 307))
    yield one("redirect in a circle", **_redirect("/api/models?x", 308))
    yield one("redirect to a closed port", **_redirect("http://127.0.0.1:1/x"))
    yield one("redirect to no address", **_redirect("http://[::1"))
    yield one("redirect to no host", **_redirect("https://"))
    yield one("an object where a list should be", page=_json({"id": REPO}))
    yield one("lists 200,000 deep", page=deep)
    yield one("2.6 million empty lists", page=b"[" + b"[]," * 2_600_000 + b"[]]")
    yield one("numbers with 10,000 digits", page=b'[{"id":"some/T","downloads":' + b"9" * 10_000 + b"}]")
    yield one("NaN, infinity, 1e999", page=b'[{"id":"a/b","downloads":NaN,"likes":1e999,"gguf":{"total":-Infinity}}]')
    yield one("bytes that are no text", page=b'[{"id":"\xff\xfe\x00/b"}]')
    yield one("escape sequences in names", page=_json(escapes))
    yield one("half surrogates", page=b'[{"id":"some/T","gguf":{"architecture":"\\ud800"}}]')
    yield one("429, asks to wait for ever", status=429, retry_after="9" * 400)
    yield one("429, an odd date", status=429, retry_after="Fri, 31 Dec 9999 23:59:59 -2359")
    yield one("503 for ever", status=503)
    yield one("a refusal that is a list", raw=_raw(b"HTTP/1.1 500 No\r\n\r\n", lambda: iter([b'["no"]'])))
    yield one("a token in the reason", status=400, headers={"X-Error-Message": "Bearer hf_opens_everything\x1b[2J"})
    yield one("a login page", page=b"<html>Welcome</html>")


def _sibling(name: str, **more: Any) -> dict[str, Any]:
    return {"rfilename": name, "size": 5, "blobId": COMMIT, **more}


def _repo(siblings: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"page": _json({"id": REPO, "sha": COMMIT, "siblings": siblings, **more})}


def _large(sha256: str, size: Any = 5) -> dict[str, Any]:
    return {"lfs": {"sha256": sha256, "size": size, "pointerSize": 1}}


def _replace(hub: HubServer, content: bytes) -> None:
    hub.add(REPO, {NAME: content})


def _listings(size: int) -> Iterator[Scenario]:
    def one(name: str, **fault: Any) -> Scenario:
        return Scenario(name, "files", _listing(**fault))

    tricks = [OUTSIDE, "/tmp/cpuchat-hostile", "C:\\x", "a\0b", "\u202efugg.x", "CON", "x" * 300, "a//b", "~/x"]
    sizes = [-1, 10**30, True, 0.5, "5", [], None]
    hashes = ["../../x", "a" * 63, "A" * 64, "a" * 40, "", "a" * 63 + "/"]
    parts = [_sibling(f"m-{n:05}-of-02000.gguf") for n in range(1, 2001)]
    yield one("80,000 files", **_repo([_sibling(f"{n}.gguf") for n in range(80_000)]))
    yield one("names that lead out", **_repo([_sibling(f"{trick}.gguf") for trick in tricks]))
    yield one("hashes that are paths", **_repo([_sibling(f"{n}.gguf", **_large(one)) for n, one in enumerate(hashes)]))
    yield one("sizes that are none", **_repo([_sibling(f"{n}.gguf", size=size) for n, size in enumerate(sizes)]))
    yield one("a commit that is a path", **_repo([_sibling("a.gguf")], sha=OUTSIDE))
    yield one("the id of something else", **_repo([_sibling("a.gguf")], id="../../etc/passwd"))
    yield one("2,000 parts", **_repo(parts))
    yield one("files that are numbers", **_repo([5, None, []]))  # pyright: ignore[reportArgumentType]
    card = {"license": "\x1b]0;x\x07", "base_model": ["\x1b[2J"] * 9999}
    yield one("a card of escape sequences", **_repo([], cardData=card))
    huge = b"GGUF" + (3).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") * 2 + bytes(1 << 16)
    yield Scenario("a header that claims 2^60 tensors", "files", lambda hub: _replace(hub, huge))
    yield Scenario("a header without ranges and without end", "files", _content(raw=_flood(_OK + b"\r\n", bytes(MIB))))
    yield Scenario("a header that drips", "files", _content(raw=_drip(_as_asked(size))))
    yield Scenario("a header of another range", "files", _content(headers={"Content-Range": "bytes 7-9/10"}))
    packed = _bomb(_as_asked(size, b"Content-Encoding: gzip\r\n"))
    yield Scenario("a header that is compressed", "files", _content(raw=packed))


def _after(calls: int, **fault: Any) -> Hub:
    """Honest for the first `calls` answers of the hub."""

    def begin(hub: HubServer) -> None:
        hub.fault(REPO, NAME, *[Fault(where="hub")] * calls, Fault(where="hub", times=-1, **fault))

    return begin


def _downloads(content: bytes) -> Iterator[Scenario]:
    def one(name: str, hub: Hub, **more: Any) -> Scenario:
        return Scenario(name, "download", hub, **more)

    size = len(content)

    def whole(connection: Connection) -> bytes:
        return _as_asked(size)(connection) + content

    for calls in (0, 1, 2):
        path = {"X-Linked-Etag": f'"{OUTSIDE}"', "ETag": f'"{OUTSIDE}"'}
        other = {"X-Linked-Etag": f'"{"a" * 64}"'}
        commit = {"X-Repo-Commit": OUTSIDE}
        yield one(f"etag is a path from answer {calls + 1} on", _after(calls, headers=path), done=calls > 0)
        yield one(f"another etag from answer {calls + 1} on", _after(calls, headers=other), done=calls > 0)
        yield one(f"commit is a path from answer {calls + 1} on", _after(calls, headers=commit), done=True)
    yield one("a shorter file", _content(content=content[:-1]))
    yield one("a longer file", _content(content=content + b"+"))
    yield one("content behind the end, without end", _content(raw=_flood(whole, bytes(MIB))), done=True)
    yield one("another range", _content(headers={"Content-Range": f"bytes 7-9/{size}"}))
    yield one("a range of an exabyte", _content(headers={"Content-Range": f"bytes 0-{1 << 60}/{1 << 60}"}))
    yield one("compressed on the way", _content(content=gzip.compress(content), headers={"Content-Encoding": "gzip"}))
    yield one("a web page", _content(page=b"<html>"))
    yield one("other content of that length", _content(content=bytes(size)))
    yield one("not modified", _content(status=304))
    yield one("links that are refused", _content(status=403))
    yield one("ranges that are refused", _content(status=416))
    yield one("503 for ever", _content(status=503))
    yield one("429 for ever", _resolve(status=429, retry_after="3"))
    yield one("429, asks to wait for a year", _resolve(status=429, retry_after="31536000"))
    yield one("a byte for each connection", _content(cut_after=1))
    yield one("ends early each time", _content(cut_after=70_000))
    cuts = Fault(cut_after=size // 2), Fault(cut_after=0, times=-1)
    yield one("always cut at the same byte", lambda hub: hub.fault(REPO, NAME, *cuts))
    yield one("silence in the middle", _content(gate=Gate(at=size // 2)))
    yield one("content that drips", _content(raw=_drip(_as_asked(size))))
    yield one("a head that drips", _content(raw=_drip(b"HTTP/1.1 206 Part\r\nX-A: ")))
    yield one("redirect to file:", _resolve(**{"headers": {"Location": "file:///etc/passwd"}}))
    yield one("redirect in a circle", _resolve(headers={"Location": f"/{REPO}/resolve/main/{NAME}"}))
    yield one("redirect to a closed port", _resolve(headers={"Location": "http://127.0.0.1:1/x"}))
    yield one("redirect to a certificate that nobody knows", lambda hub: None, tls="untrusted")
    yield one("redirect to a certificate of another host", lambda hub: None, tls="other name")
    yield one("https redirects to http", lambda hub: None, tls="to http")


def scenarios(content: bytes) -> list[Scenario]:
    """All of them; `content` is that of the honest file."""
    return [*_searches(), *_listings(len(content)), *_downloads(content)]
