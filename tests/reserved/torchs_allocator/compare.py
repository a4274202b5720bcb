"""The emulator beside torch's own allocator, which runs here on a device that is none.

    pip download --no-deps torch==2.13.0 nvidia-cuda-runtime==13.0.* nvidia-cuda-crt==13.0.*
    python -m tests.reserved.torchs_allocator.compare DOWNLOADS --seeds 25

DOWNLOADS holds a torch wheel that is built for CUDA, and the two wheels with CUDA's headers (write
`torch===2.13.0` where a CPU build would be found first). `libc10_cuda.so` of that wheel is torch's
allocator; `device.c` is the CUDA runtime below it. Each random case has to be answered alike, line
by line. With --record, a few answers of torch's are written to `recorded.json`, which
`test_recorded.py` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path

from tests.reserved.traces import EACH, RECORDED_SEEDS, SETTINGS, STEPS, Case

HERE = Path(__file__).parent
RECORDED = HERE.parent / "recorded.json"
_PARTS = ("torch/lib/libc10.so", "torch/lib/libc10_cuda.so")
_HEADERS = ("torch/include/c10/", "torch/include/torch/headeronly/", "nvidia/cu13/include/")


def build(wheels: Path, folder: Path) -> tuple[Path, str]:
    """Build `ask` against the allocator of a wheel; the program, and torch's version."""
    version = ""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(folder, [n for n in names if n in _PARTS or n.startswith(_HEADERS)])
        version = wheel.name.split("-")[1] if wheel.name.startswith("torch-") else version
    library = folder / "torch/lib"
    symbols = _run("nm", "-D", "--undefined-only", library / "libc10_cuda.so")
    asked = set(re.findall(r"(\w+)@libcudart", symbols))
    source = (HERE / "device.c").read_text()
    others = sorted(name for name in asked if not re.search(rf"\b{name}\(", source))
    empty = (
        f'int {name}_(void) {{ return 0; }} __asm__(".globl {name}\\n.set {name}, {name}_");'
        for name in others
    )
    (folder / "device.c").write_text("\n".join((source, *empty)))
    (folder / "versions").write_text("libcudart.so.13 { global: *; };")
    headers = ("-I", folder / "nvidia/cu13/include", "-I", folder / "torch/include")
    runtime = library / "libcudart.so.13"
    shared = ("-shared", "-fPIC", "-Wl,-soname,libcudart.so.13")
    versions = f"-Wl,--version-script={folder / 'versions'}"
    _run("gcc", "-w", *shared, versions, *headers, folder / "device.c", "-o", runtime)
    program = folder / "ask"
    libraries = ("-L", library, "-lc10_cuda", "-lc10", "-l:libcudart.so.13")
    path = (f"-Wl,-rpath,{library}", "-Wl,--allow-shlib-undefined")
    _run(
        "g++",
        "-w",
        "-O1",
        "-std=c++20",
        *headers,
        HERE / "ask.cpp",
        "-o",
        program,
        *libraries,
        *path,
    )
    return program, version


def answers(program: Path, case: Case) -> list[str]:
    """What torch's allocator says after each line."""
    environment = dict(os.environ, DEVICE_NBYTES=str(case.device_nbytes))
    environment |= {"PYTORCH_ALLOC_CONF": case.setting} if case.setting else {}
    text = "\n".join(case.lines)
    return _run(program, given=text, environment=environment).splitlines()


def _run(*command: object, given: str = "", environment: dict[str, str] | None = None) -> str:
    arguments = [str(part) for part in command]
    done = subprocess.run(
        arguments, input=given, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{arguments[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def record(program: Path, version: str) -> None:
    """Write some answers of torch's down; another version has to give the same."""
    chosen = [(setting, seed) for setting in SETTINGS for seed in RECORDED_SEEDS]
    cases = [
        [setting, seed, answers(program, Case.random(setting, seed, STEPS))[EACH - 1 :: EACH]]
        for setting, seed in chosen
    ]
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"torch": [], "cases": cases}
    if known["cases"] != cases:
        raise SystemExit(f"torch {version} answers otherwise than {known['torch']}.")
    versions = json.dumps(sorted({*known["torch"], version}))
    rows = ",\n".join(map(json.dumps, cases))
    RECORDED.write_text(f'{{"torch": {versions}, "cases": [\n{rows}\n]}}\n')


def main() -> None:
    """Compare, tell, and record."""
    parser = argparse.ArgumentParser(description="The emulator beside torch's own allocator.")
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program, version = build(given.wheels, Path(folder))
        lines = full = 0
        for setting in SETTINGS:
            for seed in range(given.seeds):
                theirs = _compared(program, version, Case.random(setting, seed))
                lines += len(theirs)
                full += sum(line.startswith("oom") for line in theirs)
        print(
            f"torch {version}: {lines:,} requests under {len(SETTINGS)} settings, {full:,} of them "
            "without room: all answered alike."
        )
        if given.record:
            record(program, version)


def _compared(program: Path, version: str, case: Case) -> list[str]:
    ours, theirs = case.answers(), answers(program, case)
    for line, mine, other in zip(case.lines, ours, theirs, strict=True):
        if mine != other:
            where = f"{case.setting or 'defaults'}, {line!r}"
            raise SystemExit(f"{where}: torch {version} says {other!r}, the emulator {mine!r}.")
    return theirs


if __name__ == "__main__":
    main()
