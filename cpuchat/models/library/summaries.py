"""What a model file is, read from its header once and kept while the file stays as it is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal, Self

import msgspec

from cpuchat import paths
from cpuchat.errors import CpuchatError, ModelDamaged
from cpuchat.files import JsonCache
from cpuchat.models.fingerprint import stat_fingerprint
from cpuchat.models.gguf.header import GGUFHeader, header_from, read_model
from cpuchat.models.gguf.source import FileSource
from cpuchat.models.library.model import LocalModel
from cpuchat.models.library.places import INCOMPLETE, Place, model_files
from cpuchat.models.traffic import traffic_of
from cpuchat.telemetry.traffic import pass_bytes
from cpuchat.text import clean_line

_VERSION = 2
"""Of `Facts`; a file of another one is not read."""
_MOST = 5_000
_MAX_BYTES = 4 << 20
_MAX_NAME = 200


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """As `LocalModel` has them; `name` "": no language model. `judged` is what a check of the content found wrong."""

    name: str = ""
    architecture: str = ""
    quantization: str = ""
    n_params: int = 0
    n_params_active: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ctx_train: int = 0
    has_template: bool = False
    size: int = 0
    weights_per_token: int = 0
    kind: Literal["model", "head"] = "model"
    damaged: str | None = None
    judged: str | None = None

    def of(self, model: LocalModel) -> LocalModel:
        """`model` with all this."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "judged"}
        return msgspec.structs.replace(model, **values | {"damaged": self.damaged or self.judged})


class FactsCache:
    """Facts of the model files of this machine, in `library.json` of the cache folder."""

    def __init__(self, file: Path | None = None) -> None:
        """`file` replaces the one in the cache folder."""
        self._cache = JsonCache(
            file or paths.library_file(), Facts, version=_VERSION, max_entries=_MOST, max_bytes=_MAX_BYTES
        )
        self._known: dict[str, Facts] = {}
        self._new: dict[str, Facts] = {}

    def refresh(self) -> None:
        """Learn what other programs found out."""
        self._known |= self._cache.read()

    def model(self, place: Place) -> LocalModel | None:
        """The model at `place`; None when it is something else, such as the image part of one."""
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
            facts = self._facts(parts)
        except CpuchatError as error:
            return msgspec.structs.replace(base, size=_size(parts), damaged=error.message)
        if not facts.name:
            return None
        return facts.of(base)

    def _facts(self, parts: list[Path]) -> Facts:
        """Raises ModelNotFound or ModelDamaged."""
        try:
            key = stat_fingerprint(parts)
        except OSError as error:
            raise ModelDamaged(_missing(parts, error)) from None
        facts = self._new.get(key) or self._known.get(key)
        if facts is None:
            facts = self._new[key] = facts_of(read_model(parts[0]))
        return facts

    def judge(self, parts: list[Path], damaged: str | None) -> None:
        """Remember what a check of the content found wrong (None: nothing) while the files stay as they are."""
        with contextlib.suppress(CpuchatError):  # its header is damaged anyway
            self._new[stat_fingerprint(parts)] = msgspec.structs.replace(self._facts(parts), judged=damaged)

    def save(self) -> None:
        """Write what is new."""
        if self._new:
            new, self._new = self._new, {}
            self._known |= new
            self._cache.put_all(new)


def facts_of(header: GGUFHeader) -> Facts:
    """What a header says that is worth a line in a list."""
    if header.is_projector:
        return Facts()
    traffic = traffic_of(header)
    weights = msgspec.structs.replace(traffic, kv=(), state=0)
    return Facts(
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
        weights_per_token=round(pass_bytes(weights, 1, 0)),
        kind="head" if header.is_head else "model",
        damaged=_why_not(header),
    )


def _why_not(header: GGUFHeader) -> str | None:
    """Why it can't be loaded; None when it can."""
    if header.is_head:
        return f"{header.path.name} is a draft head of a model and cannot answer by itself."
    return None if header.tensors else f"{header.path.name} holds a vocabulary but no weights."


def _missing(parts: list[Path], error: OSError) -> str:
    """Why not all of a model's files are there."""
    if parts[0].is_symlink() and len(parts) == 1 and not parts[0].exists():
        return f"{parts[0].name} is a link to a file that is gone."
    missing = [part.name for part in parts if not part.is_file()]
    if missing and len(parts) > 1:
        return f"{len(missing)} of {len(parts)} parts are missing ({missing[0]})."
    return f"Cannot open {parts[0]}: {error.strerror}."


def _size(parts: list[Path]) -> int:
    return sum(part.stat().st_size for part in parts if part.is_file())


class _Beginning(FileSource):
    """The beginning of a file, as if the rest of it were there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.here = self.size
        self.size = 1 << 62

    def __enter__(self) -> Self:
        return self


def _unfinished(place: Place) -> LocalModel | None:
    """A download that was not finished: what its header says, if that arrived. All of it may be here: its name is
    what comes last."""
    base = LocalModel(path=place.path, name=place.repo, source=place.source, repo=place.repo, unfinished=-1.0)
    try:
        with _Beginning(place.path) as source:
            base = msgspec.structs.replace(base, size=source.here, damaged="The download is not finished.")
            header = header_from(source, place.path)
            here = source.here
    except (CpuchatError, OSError):
        return base
    facts = facts_of(header)
    whole = header.data_offset + max((t.offset + t.nbytes for t in header.tensors), default=0)
    if not facts.name:
        return None
    share = min(here / max(whole, 1), 1.0)
    is_whole = share == 1 and not place.path.name.endswith(INCOMPLETE)
    state = "all of it is here, but has no name" if is_whole else f"{100 * share:.0f} % is here"
    return msgspec.structs.replace(
        facts.of(base),
        name=clean_line(header.text("general.name"))[:_MAX_NAME] or place.repo,
        size=here,
        unfinished=share,
        damaged=f"The download is not finished: {state}.",
    )
