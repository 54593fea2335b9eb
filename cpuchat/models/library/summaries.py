"""Summarizes model files by their headers; each is read once and cached while the file stays unchanged."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

import msgspec

from cpuchat import paths
from cpuchat.costmodel.work import COST_MODEL
from cpuchat.errors import CpuchatError, ModelDamaged
from cpuchat.files import JsonCache
from cpuchat.models.fingerprint import stat_fingerprint
from cpuchat.models.gguf.header import GGUFHeader, header_from, read_model
from cpuchat.models.gguf.source import FileSource
from cpuchat.models.library.model import HeaderSummary, LocalModel
from cpuchat.models.library.places import INCOMPLETE, Place, model_files
from cpuchat.models.traffic import traffic_of
from cpuchat.models.work import model_work
from cpuchat.text import clean_line

_VERSION = 100 * COST_MODEL + 4
_MAX_ENTRIES = 5_000
_MAX_BYTES = 8 << 20
_MAX_NAME = 200


class _Cached(HeaderSummary, frozen=True, kw_only=True):
    """A summary, and what a check of the file's content found wrong."""

    checksum_error: str | None = None


class SummaryCache:
    """Summaries of the model files of this machine, in `library.json` of the cache folder."""

    def __init__(self, file: Path | None = None) -> None:
        """`file` replaces the one in the cache folder."""
        self._cache = JsonCache(
            file or paths.library_file(), _Cached, version=_VERSION, max_entries=_MAX_ENTRIES, max_bytes=_MAX_BYTES
        )
        self._known: dict[str, _Cached] = {}
        self._new: dict[str, _Cached] = {}

    def refresh(self) -> None:
        """Read what other programs have cached."""
        self._known |= self._cache.read()

    def model(self, place: Place) -> LocalModel | None:
        """Return the model at `place`; None when it is something else, such as the image part of one."""
        if place.is_unfinished:
            return _unfinished(place)
        path = place.path
        parts = model_files(path)
        base = LocalModel(
            path=path,
            name=clean_line(path.stem),
            source=place.source,
            repo=place.repo,
            parts=len(parts),
            projector=place.projector,
        )
        try:
            cached = self._summary(parts)
        except CpuchatError as error:
            size = sum(part.stat().st_size for part in parts if part.is_file())
            return msgspec.structs.replace(base, size=size, damaged=error.message)
        if not cached.name:
            return None
        return msgspec.structs.replace(_with_summary(base, cached), damaged=cached.damaged or cached.checksum_error)

    def _summary(self, parts: list[Path]) -> _Cached:
        """Summarize the files of a model. Raises ModelNotFound or ModelDamaged."""
        try:
            key = stat_fingerprint(parts)
        except OSError as error:
            raise ModelDamaged(_missing(parts, error)) from None
        cached = self._new.get(key) or self._known.get(key)
        if cached is None:
            cached = self._new[key] = _Cached(**msgspec.structs.asdict(summarize(read_model(parts[0]))))
        return cached

    def set_checksum_error(self, parts: list[Path], error: str | None) -> None:
        """Remember what a check of the content found wrong (None: nothing) while the files stay unchanged."""
        with contextlib.suppress(CpuchatError):  # its header is damaged anyway
            cached = msgspec.structs.replace(self._summary(parts), checksum_error=error)
            self._new[stat_fingerprint(parts)] = cached

    def save(self) -> None:
        """Write new entries."""
        if self._new:
            new, self._new = self._new, {}
            self._known |= new
            self._cache.put_all(new)


def _with_summary(model: LocalModel, summary: HeaderSummary) -> LocalModel:
    return msgspec.structs.replace(model, **{name: getattr(summary, name) for name in HeaderSummary.__struct_fields__})


def summarize(header: GGUFHeader) -> HeaderSummary:
    """Summarize a header for a list."""
    if header.is_projector:
        return HeaderSummary()
    traffic = traffic_of(header)
    return HeaderSummary(
        name=header.name[:_MAX_NAME],
        architecture=header.architecture[:_MAX_NAME],
        quantization=header.quantization,
        n_params=header.n_params,
        n_params_active=header.n_params_active,
        n_expert=traffic.n_expert,
        n_expert_used=traffic.n_expert_used,
        n_ctx_train=header.n_ctx_train,
        has_template=bool(header.chat_template),
        size=header.file_size,
        work=msgspec.structs.replace(model_work(header), name="") if header.tensors else None,
        kind="head" if header.is_head else "model",
        damaged=_not_loadable(header),
    )


def _not_loadable(header: GGUFHeader) -> str | None:
    """Return why it can't be loaded; None when it can."""
    if header.is_head:
        return f"{header.path.name} is a draft head and cannot answer by itself."
    return None if header.tensors else f"{header.path.name} contains a vocabulary but no weights."


def _missing(parts: list[Path], error: OSError) -> str:
    """Return why not all of a model's files can be read."""
    if parts[0].is_symlink() and len(parts) == 1 and not parts[0].exists():
        return f"{parts[0].name} is a broken link: its target no longer exists."
    missing = [part.name for part in parts if not part.is_file()]
    if missing and len(parts) > 1:
        return f"{len(missing)} of {len(parts)} parts are missing ({missing[0]})."
    return f"Cannot open {parts[0]}: {error.strerror}."


class _PartialFile(FileSource):
    """The beginning of a file, as if the rest of it were there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.here = self.size
        self.size = 1 << 62

    def __enter__(self) -> Self:
        return self


def _unfinished(place: Place) -> LocalModel | None:
    """Summarize a partial download by its header, if that has arrived. All of it may be here: its name comes last."""
    base = LocalModel(path=place.path, name=place.repo, source=place.source, repo=place.repo, unfinished=-1.0)
    try:
        with _PartialFile(place.path) as source:
            base = msgspec.structs.replace(base, size=source.here, damaged="Partial download.")
            header = header_from(source, place.path)
            here = source.here
    except (CpuchatError, OSError):
        return base
    summary = summarize(header)
    whole = header.data_offset + max((t.offset + t.nbytes for t in header.tensors), default=0)
    if not summary.name:
        return None
    share = min(here / max(whole, 1), 1.0)
    is_whole = share == 1 and not place.path.name.endswith(INCOMPLETE)
    state = "complete, but not linked into a snapshot" if is_whole else f"{100 * share:.0f} % downloaded"
    return msgspec.structs.replace(
        _with_summary(base, summary),
        name=clean_line(header.text("general.name"))[:_MAX_NAME] or place.repo,
        size=here,
        unfinished=share,
        damaged=f"Partial download: {state}.",
    )
