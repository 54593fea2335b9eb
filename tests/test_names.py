"""Names in the package: no two public classes share one, and names in docstrings exist."""

from __future__ import annotations

import builtins
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cpuchat"
TEXTS = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
DOCSTRING = re.compile(r'^ *r?"""(.*?)"""', re.MULTILINE | re.DOTALL)
WORD = re.compile(r"[A-Za-z_]\w*")
FOREIGN = {
    *("ParserInline", "WorkerCancelled", "highlight", "question_mark"),  # Textual, markdown-it
    *("find_slot", "is_swa_impl", "n_swa", "ple_n_heads", "result_prompt_progress", "server_slot_stats"),  # llama.cpp
    *("json_schema_to_gbnf", "llama_grammar", "StructInfo_Convert", "_core", "c"),  # llama-cpp-python, msgspec
    *("delete_revisions", "hf_hub_download", "incomplete", "ETAG", "RANDOM"),  # huggingface_hub, its cache
    *("Host", "RateLimit", "cache_control"),  # headers and fields of requests
    *("graph_mtp", "nextn_layer_offset", "t_layer_inp", "t_h_nextn"),  # of llama.cpp's graphs
    *("_ts", "nan", "pp512"),  # parts of names, values
}


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in TEXTS.items():
        for name in re.findall(r"^class ([A-Z]\w*)", text, re.MULTILINE):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_in_docstrings_exist() -> None:
    words = {path: set(WORD.findall(re.sub(r"^ *#.*", "", DOCSTRING.sub("", text), flags=re.MULTILINE)))
             for path, text in TEXTS.items()}  # fmt: skip
    known = {*dir(builtins), *FOREIGN, *set[str]().union(*words.values())}
    modules: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*"):
        known |= {path.stem, *WORD.findall(path.read_text() if path.suffix == ".toml" else "")}
        modules[path.stem] |= words.get(path, set()) | {"json"} | {one.stem for one in path.glob("*")}
    wrong = []
    for path, text in TEXTS.items():
        here = words[path] | FOREIGN
        for name in re.findall(r"`((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\(\))?`", " ".join(DOCSTRING.findall(text))):
            parts = name.split(".")
            missing = [part for part in parts if part not in known]
            missing += [part for owner, part in pairwise(parts)
                        if owner in modules and part not in modules[owner] | here]  # fmt: skip
            if missing:
                wrong.append(f"{path.relative_to(PACKAGE)}: `{name}`")
    assert wrong == []
