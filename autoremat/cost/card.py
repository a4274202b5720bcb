"""A device as it was measured: what `autoremat doctor --gpu` exports, and plans read elsewhere.

Enters: a device at hand, or a file that was exported on one. Leaves: a `Card`; of a GPU, the
`DeviceSpec` that plans are made with where that GPU is not. Guarantees: a file that is damaged,
foreign or of another version is refused by what is wrong with it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from autoremat.cost.cache import CostCache
from autoremat.cost.ceilings import ceilings_of
from autoremat.cost.device_specs import PRODUCT_SHARE, Chip, DeviceSpec, find_spec
from autoremat.cost.estimates import NOMINAL_CEILINGS
from autoremat.cost.machine import device_title, free_nbytes, quiet_execution
from autoremat.reporting.fields import ReportError, check_fields
from autoremat.units import format_nbytes

SCHEMA = "autoremat.gpu/1"
_NAME, _VERSION = SCHEMA.split("/")
_MOST = 10**15  # of any figure: a million GB of memory
_AGAIN = "Export it again: autoremat doctor --gpu --out FILE."
_MOST_NBYTES = 1 << 20  # of a file: a larger one is none of ours
_KIB = 1 << 10
# By major compute capability: most cards of it have that one.
_LINKS = {7: "pcie3", 8: "pcie4"}
_NEWER_LINK = "pcie5"
_NEEDED = (
    *("memory_nbytes", "capability_major", "multiprocessors", "threads", "shared_nbytes"),
    *("copy_gbps", "float16_gflops", "float32_gflops"),
)


@dataclass(frozen=True, slots=True)
class Card:
    """One device: what it says of itself, and the fastest it was seen to go.

    Attributes:
        name: as its driver writes it.
        kind: "cuda" or "cpu"; of a CPU, what follows up to `memory_bus_bits` is 0.
        memory_nbytes: all that torch reports as its memory.
        capability_major: compute capability.
        capability_minor: the same.
        multiprocessors: how many it has.
        threads: that one multiprocessor holds.
        warp_size: threads that go together.
        shared_nbytes: shared memory that a block may opt in to.
        cache_nbytes: of the second level.
        clock_mhz: of the multiprocessors, at most; 0 where torch does not say.
        memory_clock_mhz: of the memory, at most; likewise.
        memory_bus_bits: of the memory; likewise.
        copy_gbps: bytes read plus written per second by a large copy, in 10^9.
        launch_us: of the smallest operator, called from Python.
        bfloat16_gflops: of a large product, 10^9 FLOPs per second.
        float16_gflops: the same in float16.
        float32_gflops: the same in float32, as `torch.get_float32_matmul_precision()` has it.
        torch_version: what measured.
    """

    name: str
    kind: str
    memory_nbytes: int
    capability_major: int
    capability_minor: int
    multiprocessors: int
    threads: int
    warp_size: int
    shared_nbytes: int
    cache_nbytes: int
    clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int
    copy_gbps: float
    launch_us: float
    bfloat16_gflops: float
    float16_gflops: float
    float32_gflops: float
    torch_version: str

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type.

        Raises:
            ReportError: naming the field.
        """
        check_fields(self)

    def spec(self) -> DeviceSpec:
        """What plans for this GPU are made with, where it is not.

        Large copies and products reach what was measured; attention and convolutions are scaled
        from these as on the cards of the table.

        Raises:
            ValueError: if it is no GPU, or lacks a figure.
        """
        if self.kind != "cuda":
            raise ValueError(
                f"{self.name} is no GPU (kind {self.kind!r}): export the file on the GPU to plan "
                "for, by `autoremat doctor --gpu --out FILE`."
            )
        figures = {name: n for name, n in asdict(self).items() if not isinstance(n, str)}
        for name, figure in figures.items():
            if name in _NEEDED and not figure:
                raise ValueError(f"{name} of {self.name} is 0, and a plan needs it. {_AGAIN}")
            if figure > _MOST:
                raise ValueError(f"{name} of {self.name} is more than any GPU has. {_AGAIN}")
        narrow_gflops = max(self.bfloat16_gflops, self.float16_gflops)
        return DeviceSpec(
            name=self.name,
            memory_nbytes=self.memory_nbytes,
            bandwidth_gbps=self.copy_gbps,
            narrow_tflops=narrow_gflops / 1e3 / PRODUCT_SHARE,
            float32_tflops=self.float32_gflops / 1e3 / PRODUCT_SHARE,
            chip=Chip(
                (self.capability_major, self.capability_minor),
                *(self.multiprocessors, self.shared_nbytes, self.threads, self.cache_nbytes),
            ),
            link=_LINKS.get(self.capability_major, _NEWER_LINK),
            copy_share=1.0,
            is_measured=True,
        )


def spec_named(name: str) -> DeviceSpec:
    """The GPU that a user means: by a name of the table, or by an exported file, "card.json".

    Raises:
        ValueError: for an unknown name, and a file that is no description of a GPU.
    """
    if not name.lower().endswith(".json"):
        return find_spec(name)
    try:
        return read_card(Path(name)).spec()
    except ValueError as error:
        raise ValueError(f"Device {name!r}: {error}") from error


# --- measured ------------------------------------------------------------------------------------


def measure_card(device: torch.device, *, cache_path: Path | None = None) -> Card:
    """What a device at hand is, and its ceilings: those that estimates here are made with.

    They are measured once and kept, as all costs are.

    Args:
        device: "cuda" or "cpu".
        cache_path: the SQLite file; the user's cache directory if not given.

    Raises:
        MemoryError: if they cannot be measured now.
    """
    with CostCache.open(cache_path) as cache, quiet_execution([device]):
        bfloat16, float16, float32 = (
            ceilings_of(device, dtype, cache)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        )
    if NOMINAL_CEILINGS[device.type] in (bfloat16, float16, float32):
        raise MemoryError(
            f"What {device_title(device)} reaches cannot be measured: of its memory only "
            f"{format_nbytes(free_nbytes(device))} are free, and 1 GB is needed. End what else "
            "runs on it."
        )
    return Card(
        name=device_title(device),
        kind=device.type,
        **_said_by(device),
        copy_gbps=float32.copy_gbps,
        launch_us=float32.launch_us,
        bfloat16_gflops=bfloat16.matmul_gflops,
        float16_gflops=float16.matmul_gflops,
        float32_gflops=float32.matmul_gflops,
        torch_version=str(torch.__version__),
    )


def _said_by(device: torch.device) -> dict[str, int]:
    """What the driver says; releases of torch differ in how much of it they pass on."""
    if device.type != "cuda":
        names = [field.name for field in fields(Card) if field.type == "int"]
        return dict.fromkeys(names, 0)
    found = torch.cuda.get_device_properties(device)
    # A block may take all but the kibibyte that the system keeps of a multiprocessor's.
    shared_nbytes = found.shared_memory_per_multiprocessor - _KIB
    return {
        "memory_nbytes": found.total_memory,
        "capability_major": found.major,
        "capability_minor": found.minor,
        "multiprocessors": found.multi_processor_count,
        "threads": found.max_threads_per_multi_processor,
        "warp_size": found.warp_size,
        "shared_nbytes": getattr(found, "shared_memory_per_block_optin", shared_nbytes),
        "cache_nbytes": found.L2_cache_size,
        "clock_mhz": getattr(found, "clock_rate", 0) // 1000,
        "memory_clock_mhz": getattr(found, "memory_clock_rate", 0) // 1000,
        "memory_bus_bits": getattr(found, "memory_bus_width", 0),
    }


# --- in a file -----------------------------------------------------------------------------------


def card_document(card: Card, **beside: Any) -> dict[str, Any]:
    """What an exported file says: its schema, the card, and what else is told beside."""
    return {"schema": SCHEMA, "card": asdict(card), **beside}


def read_card(path: Path) -> Card:
    """The card of an exported file.

    Raises:
        ValueError: if it cannot be read, is no JSON, foreign, of another version, or its figures
            are none.
    """
    document = _parsed(path)
    _check_schema(document.get("schema"))
    said = document.get("card")
    names = {field.name for field in fields(Card)}
    if not isinstance(said, dict) or said.keys() != names:
        given = said.keys() if isinstance(said, dict) else set[str]()
        what = ", ".join(sorted(names ^ given)) or "all of it"
        raise ValueError(f'its "card" lacks, or has beside, {what:.300}. Was it edited? {_AGAIN}')
    try:
        return Card(**said)
    except ReportError as error:
        raise ValueError(f"{error} {_AGAIN}") from error


def _parsed(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_NBYTES:
            raise ValueError(f"{path.stat().st_size} bytes are no exported card. {_AGAIN}")
        document = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_refuse)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"the file cannot be read: {reason}. {_AGAIN}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the file is not JSON ({error}). Is it complete? {_AGAIN}") from error
    if not isinstance(document, dict):
        raise ValueError(f"a JSON {type(document).__name__} is no exported card. {_AGAIN}")
    return document


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no figure. {_AGAIN}")


def _check_schema(schema: object) -> None:
    if schema == SCHEMA:
        return
    other = re.fullmatch(rf"{re.escape(_NAME)}/([0-9]{{1,9}})", str(schema))
    if other is None:
        raise ValueError(f"expected schema {SCHEMA!r}, found {schema!r:.80}. {_AGAIN}")
    if int(other[1]) > int(_VERSION):
        raise ValueError(f"schema {schema!r} is of a newer autoremat: update this one to read it.")
    raise ValueError(f"schema {schema!r} is of an older autoremat. {_AGAIN}")
