"""How settings name CPUs, NUMA nodes and sockets."""

from __future__ import annotations

from typing import Annotated

import msgspec

# Numbers of four digits at most: a range is spelled out when it is used.
_LIST = r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*"
_PLACES = rf"((l3|node|socket):)?{_LIST}"
Cores = Annotated[str, msgspec.Meta(pattern=rf"^(auto|all|\d{{1,4}}/l3|{_PLACES})$")]
DraftCores = Annotated[str, msgspec.Meta(pattern=rf"^(auto|shared|{_PLACES})$")]
SpeechCores = Annotated[str, msgspec.Meta(pattern=rf"^(auto|{_LIST})$")]
MemoryPolicy = Annotated[
    str, msgspec.Meta(pattern=rf"^(auto|local|(interleave|weighted)(:{_LIST})?|(bind|preferred):{_LIST})$")
]

# For values whose rule msgspec can only show as a regular expression.
WANTED = {
    "engine.cores": "must be auto, all, a list of CPUs such as 0-7, l3:0-3, node:0, socket:0, or 4/l3",
    "engine.memory": "must be auto, local, interleave, weighted, bind:0 or preferred:0 (with node numbers)",
    "speech.cores": "must be auto or a list of CPUs such as 6,7",
    "speculation.draft_cores": "must be auto, shared, a list of CPUs such as 4-7 or 2,3, l3:0, node:0 or socket:0",
}


def check_ranges(name: str, words: str) -> None:
    """Reject a range such as 7-4, in a list of CPUs or of places ("l3:3-0"), with ValueError."""
    for part in words.rpartition(":")[2].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and last.isdigit() and int(last) < int(first):
            raise ValueError(f"{name}: the range {part} is reversed")
