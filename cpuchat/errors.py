"""Typed errors. Every error that a user can cause says what happened and what to do.

`code` travels over the worker protocol, `exit_code` is what the command line returns.
"""

from __future__ import annotations

from typing import ClassVar


class CpuchatError(Exception):
    """Base of all expected failures.

    Args:
        message: one sentence, what went wrong.
        hint: one sentence, what to do about it; may be empty.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(CpuchatError):
    """Raised when a value given by the user is invalid."""

    code = "usage"
    exit_code = 2


class AmbiguousGrammar(UsageError):
    """A grammar is too large, or can read one text in more ways than llama.cpp can follow."""

    code = "ambiguous_grammar"


class SettingsError(UsageError):
    """The settings file holds a wrong key or value; the message names the key."""

    code = "settings"


class ModelNotFound(CpuchatError):
    """No GGUF file at the given path, repository or name."""

    code = "model_not_found"
    exit_code = 3


class ModelDamaged(CpuchatError):
    """Not a GGUF file, truncated, or with an inconsistent header."""

    code = "model_damaged"
    exit_code = 4


class ModelUnsupported(CpuchatError):
    """A valid file that this engine cannot run."""

    code = "model_unsupported"
    exit_code = 4


class DoesNotFit(CpuchatError):
    """Weights, KV cache and buffers need more memory than available; the message has the arithmetic."""

    code = "does_not_fit"
    exit_code = 5


class ContextFull(CpuchatError):
    """The prompt is longer than the context. `n_tokens`: of all of it, 0 if not counted. `alone`: the last message does
    not fit even without the ones before it.
    """

    code = "context_full"
    exit_code = 6

    def __init__(self, message: str, hint: str = "", n_tokens: int = 0, *, alone: bool = False) -> None:
        super().__init__(message, hint)
        self.n_tokens = n_tokens
        self.alone = alone


class TemplateError(CpuchatError):
    """The model's chat template failed or used something forbidden."""

    code = "template"
    exit_code = 7


class WorkerDied(CpuchatError):
    """The worker process crashed or was killed."""

    code = "worker_died"
    exit_code = 8


class WorkerStuck(CpuchatError):
    """The worker process was ended because it did not stop, or took too much memory."""

    code = "worker_stuck"
    exit_code = 8


class EngineMismatch(CpuchatError):
    """The installed llama.cpp is not the one this version was written for."""

    code = "engine_mismatch"
    exit_code = 9


class GenerationFailed(CpuchatError):
    """llama.cpp rejected a batch or a text; the model stays loaded."""

    code = "generation_failed"
    exit_code = 10


class ChatsError(CpuchatError):
    """The chats could not be read or written."""

    code = "chats"
    exit_code = 11


class ChatsDamaged(ChatsError):
    """The chat database is damaged and could not be salvaged."""

    code = "chats_damaged"


class ChatsTooNew(ChatsError):
    """The chat database was written by a newer version."""

    code = "chats_too_new"


class ChatsForeign(ChatsError):
    """The chat database belongs to another program."""

    code = "chats_foreign"


class ChatsChanged(ChatsError):
    """Another instance changed or deleted this chat."""

    code = "chats_changed"


class ChatNotFound(CpuchatError):
    """No chat has an id that begins as given, or several have."""

    code = "chat_not_found"
    exit_code = 3


class DraftMismatch(CpuchatError):
    """The draft model does not fit the target; the message names the first difference."""

    code = "draft_mismatch"
    exit_code = 12


class CatalogError(UsageError):
    """A catalog of models holds a wrong key or value; the message names the file and the key."""

    code = "catalog"


class HubError(CpuchatError):
    """Hugging Face sent an unexpected response."""

    code = "hub"
    exit_code = 18


class HubOffline(HubError):
    """Hugging Face cannot be reached, or offline mode is on."""

    code = "hub_offline"


class TooSlow(HubOffline):
    """Hugging Face can be reached, but does not answer in time: a retry would take as long."""


class RateLimited(HubError):
    """Hugging Face asks to wait for longer than cpuchat does by itself."""

    code = "rate_limited"


class NotOnHub(HubError):
    """There is no such repository, revision or file, or it is private and the token does not open it."""

    code = "not_on_hub"
    exit_code = 3


class AccessDenied(HubError):
    """The repository is gated or private, and there is no token or one without access."""

    code = "access_denied"
    exit_code = 19


class DownloadFailed(HubError):
    """A download failed for good; the partial file is kept."""

    code = "download_failed"
    exit_code = 15


class ChecksumMismatch(DownloadFailed):
    """The downloaded file does not match the published hash and was discarded."""

    code = "checksum_mismatch"


class DiskFull(CpuchatError):
    """There is not enough space on the disk; the message has the sum."""

    code = "disk_full"
    exit_code = 16


class QuantizeFailed(CpuchatError):
    """A model could not be quantized; the partial file was deleted."""

    code = "quantize_failed"
    exit_code = 17


class MeasureFailed(CpuchatError):
    """Nothing could be measured: what was to be measured failed, was stopped, or was too short."""

    code = "measure_failed"
    exit_code = 13


class VocabularyMismatch(CpuchatError):
    """Two models with different vocabularies cannot be compared token by token."""

    code = "vocabulary_mismatch"
    exit_code = 20


class ServerError(CpuchatError):
    """An inference server failed, or sent something else than an answer."""

    code = "server"
    exit_code = 21


class ServerUnreachable(ServerError):
    """There is no connection to the server, or it was lost."""

    code = "server_unreachable"


class ServerBusy(ServerError):
    """The server asks to wait for longer than cpuchat does by itself."""

    code = "server_busy"


class ServerRefused(ServerError):
    """The server wants an API key, or another one."""

    code = "server_refused"
    exit_code = 22


class EngineMissing(CpuchatError):
    """A program of llama.cpp is not installed that a draft head or RPC workers need."""

    code = "engine_missing"
    exit_code = 9


class SpeechFailed(CpuchatError):
    """No voice is installed, or it failed; the answer is not affected."""

    code = "speech"
    exit_code = 23


class GrammarUnmet(CpuchatError):
    """The answer does not match the requested schema or grammar."""

    code = "grammar_unmet"
    exit_code = 24


class ToolServerFailed(CpuchatError):
    """An MCP server cannot be started or used. `reason`: why, without the server's name; by default the message."""

    code = "tool_server"
    exit_code = 25

    def __init__(self, message: str, hint: str = "", reason: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason or message


class OutputFailed(CpuchatError, OSError):
    """The output cannot be written, for instance to a full disk. Not raised where its reader is gone."""

    code = "output"
    exit_code = 26


class Interrupted(CpuchatError):
    """The user stopped it."""

    code = "interrupted"
    exit_code = 130


def _subclasses(base: type[CpuchatError]) -> list[type[CpuchatError]]:
    return [base, *(c for s in base.__subclasses__() for c in _subclasses(s))]


def from_code(code: str, message: str, hint: str = "") -> CpuchatError:
    """Rebuild the typed error that another process reported."""
    for kind in _subclasses(CpuchatError):
        if kind.code == code:
            return kind(message, hint)
    return CpuchatError(message, hint)
