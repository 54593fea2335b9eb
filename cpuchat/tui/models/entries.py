"""Entries of the models list and their order. Plain data and functions, no widgets."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from cpuchat import paths
from cpuchat.errors import UsageError
from cpuchat.models.catalog import CatalogModel
from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.environment import host as hub_host
from cpuchat.models.hub.repository import FoundRepository
from cpuchat.models.library.model import LocalModel
from cpuchat.models.shortlist import NOTHING, Ranked
from cpuchat.servers import ServerModel, host, is_url

if TYPE_CHECKING:
    from cpuchat.backend.remote.adapter import ListedModel

SEARCH = "search"
"""Key of the search on Hugging Face."""


@dataclass(frozen=True)
class TypedFile:
    """A file that the user typed or pasted."""

    path: Path
    problem: str = ""


@dataclass(frozen=True)
class HubSearch:
    """A search on Hugging Face: to be done, running, or done. `problem` and `hint` when it failed."""

    query: str
    running: bool = False
    found: tuple[FoundRepository, ...] | None = None
    problem: str = ""
    hint: str = ""

    @property
    def is_link(self) -> bool:
        """Return whether it is a link to one repository; `owner/name` (one slash) is searched like other words."""
        return self.query.count("/") > 1


@dataclass(frozen=True)
class ServerEntry:
    """A model on a server, or (`model` None) the server itself: `problem` and `hint` say why its models are not known;
    "" while it is asked. `is_invalid`: what was typed is no address."""

    source: ServerModel
    kind: str = ""
    model: ListedModel | None = None
    problem: str = ""
    hint: str = ""
    is_invalid: bool = False


Subject = LocalModel | Download | CatalogModel | FoundRepository | TypedFile | HubSearch | ServerEntry


@dataclass(frozen=True)
class Entry:
    """One line that can be selected. `key` is the same for the same subject while its figures change."""

    key: str
    subject: Subject


@dataclass(frozen=True)
class Section:
    """Lines under one heading; `note` while there are none."""

    heading: str
    entries: tuple[Entry, ...]
    note: str = ""


@dataclass(frozen=True)
class ModelListState:
    """The state of the models list. `local` None: still being read. `here`: ids of the catalog's models that `local`
    has.
    """

    local: tuple[LocalModel, ...] | None = None
    downloads: tuple[Download, ...] = ()
    catalog: Ranked = NOTHING
    here: frozenset[str] = frozenset()
    search: HubSearch | None = None
    local_problem: str = ""
    on_servers: tuple[ServerEntry, ...] = ()

    def sections(self, text: str) -> list[Section]:
        """Return the sections for the filter text: local models first, then what can be downloaded."""
        if _is_server(text.strip()):
            return [Section("", tuple(self._typed_server(text.strip())))]
        path = typed_path(text)
        if path is not None:
            return [Section("", (Entry("file", TypedFile(path, _problem(path))),))]
        words = text.lower().split()
        sections = [
            Section("on this machine", tuple(self._local(words)), "" if words else self._local_note()),
            *self._on_servers(words),
            Section("downloads", tuple(self._downloads(words))),
            Section("recommended for this machine", tuple(self._catalog(self.catalog.suits, words))),
            Section("catalog", tuple(self._catalog(self.catalog.others, words))),
            Section("too large or too slow for this machine", tuple(self._catalog(self.catalog.unsuitable, words))),
            *self._hub(text.strip(), words),
        ]
        return [section for section in sections if section.entries or section.note]

    def _typed_server(self, text: str) -> Iterator[Entry]:
        try:
            source = ServerModel.of(text)
        except UsageError as error:
            invalid = ServerEntry(ServerModel(text), problem=error.message, hint=error.hint, is_invalid=True)
            yield Entry("server", invalid)
            return
        known = [one for one in self.on_servers if one.source.server == source.server]
        for one in known or [ServerEntry(source)]:
            yield Entry(f"server {one.source}", one)

    def _on_servers(self, words: list[str]) -> list[Section]:
        """Return one section for each server, and one for those whose models are not known."""
        found: dict[str, list[Entry]] = {}
        for one in self.on_servers:
            if _has(words, str(one.source), one.kind):
                heading = f"on {host(one.source.server)} · {one.kind}" if one.model is not None else "on servers"
                found.setdefault(heading, []).append(Entry(f"server {one.source}", one))
        return [Section(heading, tuple(entries)) for heading, entries in found.items()]

    def _local_note(self) -> str:
        if self.local is None:
            return "Reading…"
        return self.local_problem or "no models yet: choose one below, or paste the path of a GGUF file"

    def _local(self, words: list[str]) -> Iterator[Entry]:
        # The cache names the part of a download after the content that it will have.
        arriving = {file.etag for download in self.downloads for file in download.model.files}
        for model in sorted(self.local or (), key=lambda model: (bool(model.damaged), -model.last_used)):
            if model.unfinished is not None and model.path.name.partition(".")[0] in arriving:
                continue  # listed as a download
            if _has(words, model.name, model.quantization, model.repo, model.architecture, str(model.path)):
                yield Entry(f"local {model.path}", model)

    def _downloads(self, words: list[str]) -> Iterator[Entry]:
        for download in self.downloads:
            if download.state != "done" and _has(words, download.model.name, download.repo):
                yield Entry(f"download {download.id}", download)

    def _catalog(self, models: Iterable[CatalogModel], words: list[str]) -> Iterator[Entry]:
        for model in sorted(models, key=lambda model: model.use == "draft"):
            # Models that only draft are offered where drafts are chosen; who searches for one finds it last.
            wanted = model.use != "draft" or words
            names = (model.name, model.family, model.publisher, model.quantization, *model.repos)
            if wanted and model.id not in self.here and _has(words, *names):
                yield Entry(catalog_key(model), model)

    def _hub(self, text: str, words: list[str]) -> Iterator[Section]:
        search = self.search
        if search is not None and search.found:
            found = (Entry(f"hub {one.id}", one) for one in search.found if _has(words, one.id) or text == search.query)
            yield Section(f"on Hugging Face: “{search.query}”", tuple(found))
        if search is not None and search.query == text and not search.found:
            yield Section("on Hugging Face", (Entry(SEARCH, search),))
        elif text and (search is None or search.query != text):
            yield Section("on Hugging Face", (Entry(SEARCH, HubSearch(text)),))


def catalog_key(model: CatalogModel) -> str:
    return f"catalog {model.id}"


def _is_server(text: str) -> bool:
    """Return whether `text` is meant as the address of a server, not as a link to a repository of the hub."""
    if not is_url(text) or host(text) in (hub_host(), "huggingface.co", "www.huggingface.co", "hf.co"):
        return False
    try:
        path = urlparse(text).path.rstrip("/")
    except ValueError:  # "http://[" on the way to "http://[::1]"
        return True
    return path.count("/") < 2 or path.endswith("/v1")


def _has(words: Iterable[str], *texts: str) -> bool:
    haystack = " ".join(texts).lower()
    return all(word in haystack for word in words)


def _problem(path: Path) -> str:
    """Return why `path` is not a file to load, "" when it may be one."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return "a folder: add it to Model folders in the settings"
        return "" if stat.S_ISREG(mode) else "not a regular file"
    except FileNotFoundError:
        return "no such file"
    except ValueError:
        return "a path cannot contain a NUL character"
    except OSError as error:  # a name that is too long, a folder that may not be read
        return (error.strerror or str(error)).lower()


def typed_path(text: str) -> Path | None:
    """Return the file that a typed or pasted text names, or None when it looks like a search.

    Takes what terminals paste when a file is dropped on them: quotes, `file://`, backslash before a space.
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if text.startswith("file://"):
        text = unquote(urlparse(text).path)
    looks_so = text.startswith(("/", "~", "./", "../")) or (text.lower().endswith(".gguf") and os.sep in text)
    if not looks_so or "://" in text:  # links of the hub are searched there
        return None
    return paths.expanded(text.replace("\\ ", " "))
