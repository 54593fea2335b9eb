"""Finds out which server answers at an address, by what it reports."""

from __future__ import annotations

from typing import Any

import httpx

from cpuchat.backend.remote import llama_server, lm_studio, ollama, vllm
from cpuchat.backend.remote.adapter import Adapter, ListedModel, listed, name_of
from cpuchat.backend.remote.connection import Connection, Status
from cpuchat.backend.remote.metrics import parse
from cpuchat.errors import CpuchatError, ServerError
from cpuchat.servers import host


async def identify(connection: Connection) -> Adapter:
    """Return the adapter for the server, with its models.

    `owned_by` in the list of models names most servers; one that says something else is asked for what only one of them
    has.

    Raises:
        Status, httpx.HTTPError: it is not reached, or refuses.
        ServerError: it is not an inference server.
    """
    models = await _models(connection)
    owners = {str(entry.get("owned_by")) for entry in listed(models)}
    if "vllm" in owners:
        metrics = await _bytes(connection, "/metrics")
        counters = parse(metrics.decode(errors="replace")) if metrics else None
        return vllm.VLLM(connection, vllm.parse_models(models), counters)
    if "organization_owner" in owners and listed(found := await _object(connection, "/api/v0/models")):
        return lm_studio.LMStudio(connection, lm_studio.parse_models(found))
    if not owners & {"llamacpp", "openai", "cpuchat"}:  # Ollama names the owner of each model's repository
        found = await _object(connection, "/api/version")
        if isinstance(found.get("version"), str) and "models" in await _object(connection, "/api/tags"):
            return ollama.Ollama(connection, await ollama.fetch_models(connection))
    if "openai" not in owners:
        props = await _object(connection, "/props")
        if isinstance(props.get("default_generation_settings"), dict) or "llamacpp" in owners:
            kind = llama_server.CpuchatServe if "cpuchat" in owners else llama_server.LlamaServer
            return kind(connection, llama_server.parse_models(models, props), props)
    names = (name_of(entry) for entry in listed(models))
    return Adapter(connection, tuple(ListedModel(name) for name in names if name))


async def _models(connection: Connection) -> dict[str, Any]:
    """Return the list of models; where the address is already that of the OpenAI routes, `/v1` is left out.

    Raises:
        Status, httpx.HTTPError, ServerError: as `identify`.
    """
    try:
        found = await connection.get(f"{connection.root}/models")
    except Status as status:
        if status.code != 404 or not connection.server.count("/") > 2:
            raise
        found = await connection.get(f"{connection.server}/models")
        connection.root = connection.server
    if not isinstance(found.get("data"), list) and found.get("object") != "list":
        raise ServerError(
            f"{host(connection.server)} is not an OpenAI-compatible server.", "Check the address and the port."
        )
    return found


async def _object(connection: Connection, path: str) -> dict[str, Any]:
    """Return the object at `path`; {} where there is none."""
    try:
        return await connection.get(path)
    except (Status, httpx.HTTPError, CpuchatError):
        return {}


async def _bytes(connection: Connection, path: str) -> bytes:
    try:
        return await connection.get_bytes(path)
    except (Status, httpx.HTTPError, CpuchatError):
        return b""
