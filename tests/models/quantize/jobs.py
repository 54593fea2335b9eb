"""Short words for what the tests of quantizing do."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import gguf as reference
import pytest

from cpuchat.base.errors import CpuchatError
from cpuchat.models.quantize.make import QuantizeJob, quantize
from cpuchat.models.quantize.types import quant_type
from tests.support.tiny_gguf import finish


def job(source: Path, out: Path, kind: str = "Q4_K_M", **options: Any) -> QuantizeJob:
    return QuantizeJob(source=source, out=out, type=quant_type(kind), threads=1, **options)


def refused(job: QuantizeJob, kind: type[CpuchatError]) -> CpuchatError:
    """Return the refusal; asserts that nothing new is left in the folder."""
    before = sorted(job.out.parent.iterdir()) if job.out.parent.is_dir() else []
    with pytest.raises(kind) as caught:
        asyncio.run(quantize(job))
    assert before == (sorted(job.out.parent.iterdir()) if job.out.parent.is_dir() else [])
    return caught.value


def children() -> list[int]:
    """Return the processes that this one started."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


def copy(source: Path, target: Path, *, settings: bool = True, every: int = 1, first: int = 0, **numbers: Any) -> Path:
    """Write the tensors `first`, `first + every`, ... of a llama to a new file, with its metadata if wanted. `numbers`
    are `alignment` of the file, or its place in a split model: `no` of `count` files."""
    whole = reference.GGUFReader(source)
    writer = reference.GGUFWriter(target, "llama")
    if "alignment" in numbers:
        writer.add_custom_alignment(numbers["alignment"])
    if "count" in numbers:
        writer.add_uint16("split.no", numbers["no"])
        writer.add_uint16("split.count", numbers["count"])
        writer.add_int32("split.tensors.count", len(whole.tensors))
    for field in whole.fields.values() if settings else ():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == reference.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in whole.tensors[first::every]:
        writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    return target
