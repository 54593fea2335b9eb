"""Names the microarchitecture of a CPU by the numbers in Linux: arch/x86/kernel/cpu/amd.c, arch/x86/include/asm/
intel-family.h, arch/arm64/include/asm/cputype.h. A virtual machine hides its name ("AMD EPYC"), but not these.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Microarchitecture(NamedTuple):
    """`flags`: those of /proc/cpuinfo on which speed depends and that every such CPU has."""

    name: str = ""
    flags: frozenset[str] = frozenset()


AVX2: Final = frozenset({"avx2", "fma"})
_AVX512 = AVX2 | {"avx512f"}
_VNNI = _AVX512 | {"avx512_vnni"}
_AMX = _VNNI | {"avx512_bf16", "amx_int8"}
_NONE = frozenset[str]()
# Families, and models as they are written in the kernel.
_X86: Final = {
    ("AuthenticAMD", 0x17): {"Zen": (AVX2, "00-2f 50-5f"), "Zen 2": (AVX2, "30-4f 60-7f 90-91 a0-af")},
    ("AuthenticAMD", 0x19): {
        "Zen 3": (AVX2, "00-0f 20-5f"), "Zen 4": (_VNNI, "10-1f 60-9f"), "Zen 4c": (_VNNI, "a0-af"),
    },
    ("AuthenticAMD", 0x1A): {
        "Zen 5": (_VNNI, "00-0f 20-2f 40-4f 60-7f"), "Zen 5c": (_VNNI, "10-1f"), "Zen 6": (_VNNI, "50-5f 80-af c0-cf"),
    },
    ("GenuineIntel", 6): {
        "Sandy Bridge": (_NONE, "2a 2d"), "Ivy Bridge": (_NONE, "3a 3e"), "Haswell": (AVX2, "3c 3f 45-46"),
        "Broadwell": (AVX2, "3d 47 4f 56"), "Skylake": (AVX2, "4e 5e 8e 9e a5-a6"),
        "Skylake-SP or Cascade Lake": (_AVX512, "55"), "Ice Lake": (_VNNI, "6a 6c 7d-7e"),
        "Tiger Lake": (_VNNI, "8c-8d"), "Rocket Lake": (_VNNI, "a7"),
        "Alder Lake": (AVX2, "97 9a be"), "Raptor Lake": (AVX2, "b7 ba bf"), "Meteor Lake": (AVX2, "aa ac"),
        "Arrow Lake": (AVX2, "b5 c5-c6"), "Lunar Lake": (AVX2, "bd"), "Panther Lake": (AVX2, "cc"),
        "Sapphire Rapids": (_AMX, "8f"), "Emerald Rapids": (_AMX, "cf"), "Granite Rapids": (_AMX, "ad-ae"),
        "Sierra Forest": (AVX2, "af"), "Clearwater Forest": (AVX2, "dd"),
    },
}  # fmt: skip
# Implementers, and parts.
_ARM: Final = {
    ("0x41", 0xD03): "Cortex-A53", ("0x41", 0xD05): "Cortex-A55", ("0x41", 0xD08): "Cortex-A72",
    ("0x41", 0xD0B): "Cortex-A76", ("0x41", 0xD41): "Cortex-A78", ("0x41", 0xD44): "Cortex-X1",
    ("0x41", 0xD81): "Cortex-A720", ("0x41", 0xD0C): "Neoverse N1", ("0x41", 0xD40): "Neoverse V1",
    ("0x41", 0xD49): "Neoverse N2", ("0x41", 0xD4F): "Neoverse V2", ("0x41", 0xD84): "Neoverse V3",
    ("0x41", 0xD8E): "Neoverse N3", ("0x46", 0x001): "A64FX", ("0x48", 0xD01): "TaiShan v110", ("0x51", 1): "Oryon",
    ("0x70", 0x662): "FTC662", ("0x70", 0x663): "FTC663", ("0xc0", 0xAC3): "AmpereOne", ("0xc0", 0xAC4): "AmpereOne",
}  # fmt: skip


def microarchitecture(
    vendor: str, family: int | None, model: int | None, flags: frozenset[str] = _NONE
) -> Microarchitecture:
    """Return that of a CPU; without a name where it is none of these. Of Arm, `vendor` is the implementer and `model`
    the part. `flags` of /proc/cpuinfo: a virtual machine may have the number of a model without AMX, and AMX."""
    if name := _ARM.get((vendor, model or 0)):
        return Microarchitecture(name)
    for name, (always, models) in _X86.get((vendor, family or 0), {}).items():
        ranges = (part.partition("-") for part in models.split())
        is_it = any(int(first, 16) <= (model or 0) <= int(last or first, 16) for first, _, last in ranges)
        if is_it and ("amx_int8" in always or "amx_int8" not in flags):
            return Microarchitecture(name, always)
    return Microarchitecture("Sapphire Rapids or later", _AMX) if "amx_int8" in flags else Microarchitecture()
