"""Models and a machine that do not depend on where the tests run: for pictures of the models screen."""

from __future__ import annotations

import time
from pathlib import Path

from cpuchat.base.errors import ModelDamaged
from cpuchat.config.settings import Settings
from cpuchat.models.catalog import Catalog, CatalogModel
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from cpuchat.models.machine import Machine
from cpuchat.tui.models.reader import ModelsReader
from tests.support.big_headers import big_header
from tests.support.costs import reading
from tests.support.scripted_backend import MODEL

GB = 1_000_000_000
MACHINE = Machine(
    available=int(21.4 * GB), total=32 * GB, peak=51.2e9, peak_source="measured with 8 cores",
    profile=reading(0.78 * 51.2e9), source="probe of 8 cores", probed=True,
)  # fmt: skip

LOCAL = [
    LocalModel(path=Path("/models/qwen2.5-0.5b-instruct-q4_k_m.gguf"), name="Qwen2.5-0.5B-Instruct", source="folder",
               architecture="qwen2", quantization="Q4_K_M", n_params=494_032_768, size=397_808_192, n_ctx_train=32768,
               has_template=True),
    LocalModel(path=Path(MODEL.path), name=MODEL.name, source="huggingface",
               repo="bartowski/Qwen2.5-1.5B-Instruct-GGUF", architecture="qwen2", quantization="Q8_0",
               n_params=MODEL.n_params, size=MODEL.size, n_ctx_train=32768, has_template=True,
               last_used=time.time(), measured_tok_s=31.2, drafted_tok_s=44.9),
    LocalModel(path=Path("/ollama/blobs/sha256-1"), name=MODEL.name, source="ollama", alias="qwen2.5:1.5b-instruct",
               architecture="qwen2", quantization="Q4_K_M", n_params=MODEL.n_params, size=986_048_768,
               n_ctx_train=32768, has_template=True),
    LocalModel(path=Path("/models/broken.gguf"), name="broken", source="folder",
               damaged="broken.gguf is cut short: 12 of 4,000 bytes of its header are there."),
    LocalModel(path=Path("/models/llama-3.1-70b-q4_k_m.gguf"), name="Llama 3.1 70B Instruct", source="folder",
               architecture="llama", quantization="Q4_K_M", n_params=70_553_706_496, size=42_520_398_432,
               n_ctx_train=131072, has_template=True),
    LocalModel(path=Path("/models/qwen3-30b-a3b-q4_k_m.gguf"), name="Qwen3-30B-A3B", source="folder",
               architecture="qwen3moe", quantization="Q4_K_M", n_params=30_532_122_624, n_params_active=3_345_000_000,
               n_expert=128, n_expert_used=8, size=18_556_686_912, n_ctx_train=40960,
               has_template=True),
]  # fmt: skip

CATALOG = Catalog(
    (
        CatalogModel(id="qwen2.5-7b", name="Qwen2.5 7B Instruct", family="Qwen2.5", publisher="Alibaba", year=2024,
                     params=7.6, context=131072, repos=("bartowski/Qwen2.5-7B-Instruct-GGUF",),
                     sizes={"Q4_K_M": 4.68, "Q8_0": 8.1},
                     drafts=("qwen2.5-0.5b",), license="apache-2.0", verified=("repo", "Q4_K_M")),
        CatalogModel(id="qwen2.5-0.5b", name="Qwen2.5 0.5B Instruct", family="Qwen2.5", year=2024, params=0.49,
                     context=32768, repos=("bartowski/Qwen2.5-0.5B-Instruct-GGUF",),
                     sizes={"Q4_K_M": 0.398, "Q8_0": 0.531}, no_draft="small"),
        CatalogModel(id="qwen2.5-72b", name="Qwen2.5 72B Instruct", family="Qwen2.5", year=2024, params=72.7,
                     context=131072, repos=("bartowski/Qwen2.5-72B-Instruct-GGUF",), sizes={"Q4_K_M": 47.4},
                     drafts=("qwen2.5-0.5b",)),
        CatalogModel(id="qwen3-draft", name="Qwen3 Draft 0.75B", family="Qwen3", params=0.75, use="draft",
                     repos=("someone/Qwen3-DRAFT-GGUF",), sizes={"Q8_0": 0.8}),
        CatalogModel(id="gpt-oss-20b", name="gpt-oss 20B", family="gpt-oss", year=2025, params=20.9, active_params=3.6,
                     context=131072, repos=("ggml-org/gpt-oss-20b-GGUF",), sizes={"MXFP4": 12.1},
                     no_draft="experts", verified=("repo", "MXFP4")),
    )
)  # fmt: skip


class ShelfReader(ModelsReader):
    """The models of `LOCAL` on `MACHINE`, with headers of models of those shapes."""

    def local_models(self) -> list[LocalModel]:
        return list(LOCAL)

    def catalog(self) -> Catalog:
        return CATALOG

    def machine(self) -> Machine:
        return MACHINE

    def header(self, path: Path) -> GGUFHeader:
        shape = next((shape for shape in ("0.5b", "1.5b", "70b", "30b-a3b") if shape in path.name), "")
        if not shape:
            raise ModelDamaged(f"{path.name} is cut short.")
        quantization = "Q8_0" if "q8_0" in path.name else "Q4_K_M"
        return big_header(shape, quantization)


def shelf_reader(cache: Path) -> ShelfReader:
    """Return a reader with the scripted backend's model loaded, and an empty Hugging Face cache in `cache`."""
    return ShelfReader(Library((), cache=cache), Settings(), MODEL)
