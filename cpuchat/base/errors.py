"""Typed errors. Every error that a user can cause says what happened and what to do.

`code` travels over the worker protocol, `exit_code` is what the command line returns.
"""

from __future__ import annotations

from typing import ClassVar

_KINDS: dict[str, type[CpuchatError]] = {}  # by code


class CpuchatError(Exception):
    """Base of all expected failures. `message`: one sentence, what went wrong. `hint`: one sentence, what to do about
    it; may be empty."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, code: str = "", exit_code: int = 0) -> None:
        """Set both for a kind of error; those that it does not name are its base's."""
        super().__init_subclass__()
        cls.code, cls.exit_code = code or cls.code, exit_code or cls.exit_code
        _KINDS.setdefault(cls.code, cls)

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(CpuchatError, code="usage", exit_code=2):
    """Raised when a value given by the user is invalid."""


class SettingsError(UsageError, code="settings"):
    """The settings file holds a wrong key or value; the message names the key."""


class ModelNotFound(CpuchatError, code="model_not_found", exit_code=3):
    """No GGUF file at the given path, repository or name. `wanted`: a name of which no file here is a part."""

    wanted = ""


class ModelDamaged(CpuchatError, code="model_damaged", exit_code=4):
    """Not a GGUF file, truncated, or with an inconsistent header."""


class ModelUnsupported(CpuchatError, code="model_unsupported", exit_code=4):
    """A valid file that this engine cannot run."""


class DoesNotFit(CpuchatError, code="does_not_fit", exit_code=5):
    """Weights, KV cache and buffers need more memory than available; the message has the arithmetic."""


class ContextFull(CpuchatError, code="context_full", exit_code=6):
    """The prompt exceeds the context. `n_tokens` of all of it (0: not counted); `alone`: its last message does too."""

    def __init__(self, message: str, hint: str = "", n_tokens: int = 0, *, alone: bool = False) -> None:
        super().__init__(message, hint)
        self.n_tokens = n_tokens
        self.alone = alone


class TemplateError(CpuchatError, code="template", exit_code=7):
    """The model's chat template failed or used something forbidden."""


class WorkerDied(CpuchatError, code="worker_died", exit_code=8):
    """The worker process crashed or was killed."""


class WorkerStuck(CpuchatError, code="worker_stuck", exit_code=8):
    """The worker process was ended because it did not stop, or took too much memory."""


class EngineMismatch(CpuchatError, code="engine_mismatch", exit_code=9):
    """The installed llama.cpp is not the one this version was written for."""


class GenerationFailed(CpuchatError, code="generation_failed", exit_code=10):
    """llama.cpp rejected a batch or a text; the model stays loaded."""


class ChatsError(CpuchatError, code="chats", exit_code=11):
    """The chats could not be read or written."""


class ChatsDamaged(ChatsError, code="chats_damaged"):
    """The chat database is damaged and could not be salvaged."""


class ChatsTooNew(ChatsError, code="chats_too_new"):
    """The chat database was written by a newer version."""


class ChatsForeign(ChatsError, code="chats_foreign"):
    """The chat database belongs to another program."""


class ChatsChanged(ChatsError, code="chats_changed"):
    """Another instance changed or deleted this chat."""


class ChatNotFound(CpuchatError, code="chat_not_found", exit_code=3):
    """No chat has an id that begins as given, or several have."""


class DraftMismatch(CpuchatError, code="draft_mismatch", exit_code=12):
    """The draft model does not fit the target; the message names the first difference."""


class HubError(CpuchatError, code="hub", exit_code=18):
    """Hugging Face sent an unexpected response."""


class HubOffline(HubError, code="hub_offline"):
    """Hugging Face cannot be reached, or offline mode is on."""


class TooSlow(HubOffline):
    """Hugging Face can be reached, but does not answer in time: a retry would take as long."""


class RateLimited(HubError, code="rate_limited"):
    """Hugging Face asks to wait for longer than cpuchat does by itself."""


class NotOnHub(HubError, code="not_on_hub", exit_code=3):
    """There is no such repository, revision or file, or it is private and the token does not open it."""


class AccessDenied(HubError, code="access_denied", exit_code=19):
    """The repository is gated or private, and there is no token or one without access."""


class DownloadFailed(HubError, code="download_failed", exit_code=15):
    """A download failed for good; the partial file is kept."""


class ChecksumMismatch(DownloadFailed, code="checksum_mismatch"):
    """The downloaded file does not match the published hash and was discarded."""


class DiskFull(CpuchatError, code="disk_full", exit_code=16):
    """There is not enough space on the disk; the message has the sum."""


class QuantizeFailed(CpuchatError, code="quantize_failed", exit_code=17):
    """A model could not be quantized; the partial file was deleted."""


class MeasureFailed(CpuchatError, code="measure_failed", exit_code=13):
    """Nothing could be measured: what was to be measured failed, was stopped, or was too short."""


class Disturbed(MeasureFailed, code="disturbed", exit_code=27):
    """Other programs were using the cores: the figures are too low, and there is no verdict."""


class VocabularyMismatch(CpuchatError, code="vocabulary_mismatch", exit_code=20):
    """Two models with different vocabularies cannot be compared token by token."""


class ServerError(CpuchatError, code="server", exit_code=21):
    """An inference server failed, or sent something else than an answer."""


class ServerUnreachable(ServerError, code="server_unreachable"):
    """There is no connection to the server, or it was lost."""


class ServerBusy(ServerError, code="server_busy"):
    """The server asks to wait for longer than cpuchat does by itself."""


class ServerRefused(ServerError, code="server_refused", exit_code=22):
    """The server wants an API key, or another one."""


class SpeechFailed(CpuchatError, code="speech", exit_code=23):
    """No voice is installed, or it failed; the answer is not affected."""


class GrammarUnmet(CpuchatError, code="grammar_unmet", exit_code=24):
    """The answer does not match the requested schema or grammar."""


class ToolServerFailed(CpuchatError, code="tool_server", exit_code=25):
    """An MCP server cannot be started or used. `reason`: why, without the server's name; by default the message."""

    def __init__(self, message: str, hint: str = "", reason: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason or message


class OutputFailed(CpuchatError, OSError, code="output", exit_code=26):
    """The output cannot be written, for instance to a full disk. Not raised where its reader is gone."""


class Interrupted(CpuchatError, code="interrupted", exit_code=130):
    """The user stopped it."""


class Declined(CpuchatError, code="declined"):
    """The user answered no: nothing was done."""


def from_code(code: str, message: str, hint: str = "") -> CpuchatError:
    """Rebuild the typed error that another process reported."""
    return _KINDS.get(code, CpuchatError)(message, hint)
