"""Whether memory goes where a policy says, on a machine of two NUMA nodes that QEMU makes up.

    apt-get install qemu-system-x86 busybox-static cpio e2fsprogs
    apt-get download linux-image-VERSION-cloud-amd64 && dpkg -x linux-image-*.deb benchmarks/work/kernel
    python benchmarks/numa.py [--kernel vmlinuz] [--modules FOLDER]

A Linux of its own boots without hardware virtualization, with two CPUs, one on each node, and a disk that holds this
Python and cpuchat. There numa_guest.py starts a program through cpuchat's launcher under every policy, maps or reads a
file of 128 MiB, and reads back on which nodes it is. QEMU emulates the places, not the speed: nothing is timed.
Weighted interleaving needs a kernel of 6.9 or newer in the virtual machine.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, WORK, MeasureError, arguments, machine, run_main, save, table
from numa_guest import FILE, MARK

FILE_BYTES = 128 << 20
DISK_BYTES = 768 << 20
NODE_MEGABYTES = 768
SECONDS = 900
TOLERANCE = 0.05
LEFT_OUT = ("test", "tests", "site-packages", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3", "config-*")

INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox insmod /virtio_blk.ko
/bin/busybox mount -t ext4 /dev/vda /disk || /bin/busybox echo '{mark}{{"error": "the disk cannot be mounted"}}'
/bin/busybox mount -t proc proc /disk/proc
/bin/busybox mount -t sysfs sys /disk/sys
/bin/busybox mount -t devtmpfs dev /disk/dev
export PYTHONPATH=/ PYTHONDONTWRITEBYTECODE=1
exec /bin/busybox switch_root /disk {python} /numa_guest.py
"""


def program(name: str, package: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise MeasureError(f"{name} is not there: apt-get install {package}")
    return path


def find_kernel(options: argparse.Namespace) -> tuple[Path, Path]:
    """The kernel, and the one module that it needs for its disk (empty path: it is built in)."""
    if options.kernel:
        kernel = Path(options.kernel)
        folders = [Path(options.modules)] if options.modules else []
    else:
        found = [file for folder in (WORK / "kernel/boot", Path("/boot")) for file in sorted(folder.glob("vmlinuz-*"))]
        if not found:
            raise MeasureError(f"no kernel to boot: see the first lines of {Path(__file__).name}")
        kernel = found[0]
        folders = [kernel.parents[1] / "lib/modules" / kernel.name.removeprefix("vmlinuz-")]
    modules = [file for folder in folders for file in folder.rglob("virtio_blk.ko*")]
    return kernel, modules[0] if modules else Path()


def libraries(files: list[Path]) -> set[Path]:
    """Shared libraries that the files need, the loader too."""
    told = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True).stdout
    return {Path(path) for path in re.findall(r"(?:=> |^\s)(/\S+) \(0x", told, re.MULTILINE)}


def build_disk(folder: Path, mke2fs: str) -> tuple[Path, str]:
    """An ext4 image with this Python, cpuchat and the file; and the path of the Python in it."""
    tree = folder / "tree"
    python = Path(os.path.realpath(sys.executable))
    stdlib = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, tree / stdlib.relative_to("/"), ignore=shutil.ignore_patterns(*LEFT_OUT))
    extensions = [*stdlib.glob("lib-dynload/_ctypes.*"), *stdlib.glob("lib-dynload/mmap.*")]
    for file in [python, *libraries([python, *extensions])]:
        target = tree / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copytree(HERE.parent / "cpuchat", tree / "cpuchat", ignore=shutil.ignore_patterns("tui", "themes"))
    shutil.copy(HERE / "numa_guest.py", tree)
    for name in ("proc", "sys", "dev", "tmp"):
        (tree / name).mkdir(exist_ok=True)
    with (tree / FILE.relative_to("/")).open("wb") as file:
        for _ in range(FILE_BYTES >> 20):
            file.write(os.urandom(1 << 20))
    image = folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run([mke2fs, "-q", "-t", "ext4", "-d", str(tree), str(image)], check=True)
    return image, str(python)


def build_start(folder: Path, module: Path, python: str) -> Path:
    """The initial file system: a shell, the module, and the way to the disk."""
    tree = folder / "start"
    for name in ("bin", "proc", "dev", "disk"):
        (tree / name).mkdir(parents=True)
    shutil.copy(program("busybox", "busybox-static"), tree / "bin/busybox")
    content = module.read_bytes() if module.name else b""
    (tree / "virtio_blk.ko").write_bytes(lzma.decompress(content) if module.suffix == ".xz" else content)
    (tree / "init").write_text(INIT.format(mark=MARK, python=python))
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    cpio = [program("cpio", "cpio"), "--quiet", "-o", "-H", "newc"]
    archive = subprocess.run(cpio, cwd=tree, input=names.encode(), capture_output=True, check=True).stdout
    (folder / "start.cpio").write_bytes(archive)
    return folder / "start.cpio"


def boot(qemu: str, kernel: Path, start: Path, disk: Path) -> list[dict[str, Any]]:
    """Everything that the guest said, in order."""
    command = [
        *(qemu, "-accel", "tcg", "-machine", "q35", "-cpu", "max", "-smp", "2", "-m", str(2 * NODE_MEGABYTES)),
        *("-object", f"memory-backend-ram,id=a,size={NODE_MEGABYTES}M"),
        *("-object", f"memory-backend-ram,id=b,size={NODE_MEGABYTES}M"),
        *("-numa", "node,nodeid=0,cpus=0,memdev=a", "-numa", "node,nodeid=1,cpus=1,memdev=b"),
        *("-numa", "dist,src=0,dst=1,val=20", "-net", "none", "-nographic", "-no-reboot"),
        *("-drive", f"file={disk},format=raw,if=virtio", "-kernel", str(kernel), "-initrd", str(start)),
        *("-append", "console=ttyS0 quiet panic=-1"),
    ]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"the virtual machine did not end in {SECONDS} s: {_end(error.stdout)}") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    said = [json.loads(line.partition(MARK)[2]) for line in lines if MARK in line]
    wrong = [entry["error"] for entry in said if "error" in entry]
    if wrong or not any("finished" in entry for entry in said):
        raise MeasureError(f"{wrong or 'the virtual machine ended early'}: {_end(done.stdout)} {_end(done.stderr)}")
    return said


def _end(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")[-1500:]


def words(nodes: dict[str, float]) -> str:
    return " · ".join(f"N{node} {part * 100:.1f} %" for node, part in nodes.items())


def off(wanted: dict[str, float], found: dict[str, float]) -> float:
    return max(abs(found.get(node, 0.0) - part) for node, part in wanted.items())


def main() -> None:
    options = arguments(
        __doc__,
        lambda parser: parser.add_argument("--kernel", help="the vmlinuz to boot"),
        lambda parser: parser.add_argument("--modules", help="its folder below lib/modules"),
    )
    if platform.machine() != "x86_64":
        raise MeasureError("the virtual machine is an x86 one and runs this machine's Python")
    qemu = program("qemu-system-x86_64", "qemu-system-x86")
    mke2fs = program("mke2fs", "e2fsprogs")
    kernel, module = find_kernel(options)
    where = machine()
    with tempfile.TemporaryDirectory(prefix="cpuchat-numa-") as name:
        disk, python = build_disk(Path(name), mke2fs)
        said = boot(qemu, kernel, build_start(Path(name), module, python), disk)
    cases = [{**entry, "off": off(entry["wanted"], entry["shares"])} for entry in said if "case" in entry]
    rest = [entry for entry in said if "case" not in entry and "finished" not in entry]
    rows = [
        [
            *(case["case"], case["load"], words(case["wanted"]), words(case["shares"])),
            "yes" if case["off"] <= TOLERANCE else "NO",
        ]
        for case in cases
    ]
    print(f"\nnuma - two nodes by {Path(qemu).name}, Linux {rest[0]['kernel']}, on {where}\n")
    print(table(rows, ("policy", "weights", "wanted", "found", f"within {TOLERANCE * 100:.0f} points")))
    for entry in rest:
        print(f"- {json.dumps(entry, ensure_ascii=False)}")
    for case in cases:
        if case.get("note"):
            print(f"- {case['case']}: {case['note']}")
    if not options.quick:
        save("numa", where, {"guest": rest[0], "cases": cases, "notes": rest[1:]})


if __name__ == "__main__":
    run_main(main)
