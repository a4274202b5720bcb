"""Devices that need not be here: what a table says of a GPU, in place of measurements.

Enters: a name that a user writes, "H100" or "rtx-4090". Leaves: a `DeviceSpec`: memory, and the
ceilings that estimates are made with. Figures are the makers' data sheets (dense, without
sparsity); kernels reach a share of them, which is the same for all devices and states how far an
estimate may be from a measurement: it orders operations well, and seconds badly.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

import torch

# Of a link's rate: an A100 gets 25 of 31.5 GB/s, an H100 56 of 63 [NVBandwidth2024].
LINK_SHARE = 0.8
LINK_LATENCY_US = 10.0
COPY_SHARE = 0.8  # of the data sheet's bandwidth, for large element-wise kernels
PRODUCT_SHARE = 0.6  # of the data sheet's matrix throughput, for large products
# By training steps of Llama-2 7B on both (pytorch.org/blog/maximizing-training-throughput).
_A100_SHARE, _HOPPER_SHARE = 0.7, 0.52
LAUNCH_US = 3.0  # between the ends of two kernels, where the processor has queued both

_GIB = 1 << 30
_KIB, _MIB = 1 << 10, 1 << 20
_NARROW = (torch.bfloat16, torch.float16)
_OLDEST_TF32 = (8, 0)  # at half of the throughput of float16


@dataclass(frozen=True, slots=True)
class Chip:
    """What code is generated for [CUDAGuide], by compute capability, and how much of it there is.

    Attributes:
        capability: major and minor compute capability.
        multiprocessors: how many the product has.
        shared_nbytes: shared memory that a block may opt in to.
        threads: that one multiprocessor holds.
        cache_nbytes: of the second level.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_nbytes: int
    threads: int
    cache_nbytes: int


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A way between a GPU and the memory of its host.

    Attributes:
        name: as its makers write it.
        gbps: 10^9 bytes per second in each direction, by its rate.
    """

    name: str
    gbps: float


LINKS = {
    "pcie3": LinkSpec("PCIe 3.0 x16", 8 * 16 * 128 / 130 / 8),
    "pcie4": LinkSpec("PCIe 4.0 x16", 16 * 16 * 128 / 130 / 8),
    "pcie5": LinkSpec("PCIe 5.0 x16", 32 * 16 * 128 / 130 / 8),
    "nvlink-c2c": LinkSpec("NVLink-C2C", 450),
}
"""By what users write. PCIe: transfers per second [PCISIG2019] on 16 lanes, 128 bits of 130.
NVLink-C2C: half of the 900 GB/s that both directions have together [GraceHopper2022]."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device by its data sheet.

    Attributes:
        name: as its maker writes it.
        memory_nbytes: all that torch reports as its memory, about.
        bandwidth_gbps: of its memory, 10^9 bytes per second.
        narrow_tflops: matrix products in bfloat16 or float16, with tensor cores.
        float32_tflops: matrix products in float32, without TF32, which torch leaves off.
        chip: what code is generated for.
        link: to its host's memory, a key of `LINKS`.
        product_share: of the matrix throughput, what large products reach: clocks fall under load,
            more on some products than on others.
        copy_share: of the bandwidth, what large element-wise kernels reach.
        is_measured: whether bandwidth and throughput are not the data sheet's, but were measured on
            one such device.
    """

    name: str
    memory_nbytes: int
    bandwidth_gbps: float
    narrow_tflops: float
    float32_tflops: float
    chip: Chip
    link: str
    product_share: float = PRODUCT_SHARE
    copy_share: float = COPY_SHARE
    is_measured: bool = False

    @property
    def source(self) -> str:
        """Where its figures are from, in words."""
        return "figures measured on such a GPU" if self.is_measured else "the data sheet"

    @property
    def copy_gbps(self) -> float:
        """What large element-wise kernels read and write."""
        return self.copy_share * self.bandwidth_gbps

    @property
    def launch_us(self) -> float:
        """What each kernel takes beside its work."""
        return LAUNCH_US

    def gflops(self, dtype: torch.dtype, *, is_convolution: bool = False) -> float:
        """The data sheet's throughput of products on a type, in 10^9 FLOPs per second.

        Of float32 it is TF32's where torch takes that, which it does for convolutions unasked.
        """
        if dtype in _NARROW:
            return 1e3 * self.narrow_tflops
        products = torch.get_float32_matmul_precision() != "highest"
        allowed = torch.backends.cudnn.allow_tf32 if is_convolution else products
        if allowed and self.chip.capability >= _OLDEST_TF32:
            return 1e3 * max(self.float32_tflops, self.narrow_tflops / 2)
        return 1e3 * self.float32_tflops


SPECS = (
    DeviceSpec(
        "NVIDIA T4 16GB",
        15 * _GIB,
        320,
        65,
        8.1,
        Chip((7, 5), 40, 64 * _KIB, 1024, 4 * _MIB),
        "pcie3",
    ),
    DeviceSpec(
        "NVIDIA V100 16GB",
        16 * _GIB,
        900,
        125,
        15.7,
        Chip((7, 0), 80, 96 * _KIB, 2048, 6 * _MIB),
        "pcie3",
    ),
    DeviceSpec(
        "NVIDIA V100 32GB",
        32 * _GIB,
        900,
        125,
        15.7,
        Chip((7, 0), 80, 96 * _KIB, 2048, 6 * _MIB),
        "pcie3",
    ),
    DeviceSpec(
        "NVIDIA A10 24GB",
        22 * _GIB,
        600,
        125,
        31.2,
        Chip((8, 6), 72, 99 * _KIB, 1536, 6 * _MIB),
        "pcie4",
    ),
    DeviceSpec(
        "NVIDIA A100 40GB",
        39 * _GIB,
        1555,
        312,
        19.5,
        Chip((8, 0), 108, 163 * _KIB, 2048, 40 * _MIB),
        "pcie4",
        _A100_SHARE,
    ),
    DeviceSpec(
        "NVIDIA A100 80GB",
        79 * _GIB,
        2039,
        312,
        19.5,
        Chip((8, 0), 108, 163 * _KIB, 2048, 40 * _MIB),
        "pcie4",
        _A100_SHARE,
    ),
    DeviceSpec(
        "NVIDIA L4 24GB",
        22 * _GIB,
        300,
        121,
        30.3,
        Chip((8, 9), 58, 99 * _KIB, 1536, 48 * _MIB),
        "pcie4",
    ),
    DeviceSpec(
        "NVIDIA L40S 48GB",
        44 * _GIB,
        864,
        362,
        91.6,
        Chip((8, 9), 142, 99 * _KIB, 1536, 96 * _MIB),
        "pcie4",
    ),
    DeviceSpec(
        "NVIDIA RTX 3090 24GB",
        23 * _GIB,
        936,
        71,
        35.6,
        Chip((8, 6), 82, 99 * _KIB, 1536, 6 * _MIB),
        "pcie4",
    ),
    DeviceSpec(
        "NVIDIA RTX 4090 24GB",
        23 * _GIB,
        1008,
        165,
        82.6,
        Chip((8, 9), 128, 99 * _KIB, 1536, 72 * _MIB),
        "pcie4",
    ),
    DeviceSpec(
        "NVIDIA RTX 5090 32GB",
        31 * _GIB,
        1792,
        210,
        104.8,
        Chip((12, 0), 170, 99 * _KIB, 1536, 96 * _MIB),
        "pcie5",
    ),
    DeviceSpec(
        "NVIDIA H100 80GB",
        79 * _GIB,
        3350,
        989,
        67,
        Chip((9, 0), 132, 227 * _KIB, 2048, 50 * _MIB),
        "pcie5",
        _HOPPER_SHARE,
    ),
    DeviceSpec(
        "NVIDIA H200 141GB",
        139 * _GIB,
        4800,
        989,
        67,
        Chip((9, 0), 132, 227 * _KIB, 2048, 50 * _MIB),
        "pcie5",
        _HOPPER_SHARE,
    ),
    DeviceSpec(
        "NVIDIA B200 180GB",
        178 * _GIB,
        7700,
        2250,
        75,
        Chip((10, 0), 148, 227 * _KIB, 2048, 126 * _MIB),
        "pcie5",
    ),
)
"""Memory is what the driver leaves of the nominal size, rounded down to whole GiB."""


def find_spec(name: str) -> DeviceSpec:
    """The device of the table that a name means: "H100", "a100-40gb", "NVIDIA RTX 4090".

    A name that several sizes share means the one with the most memory.

    Raises:
        ValueError: naming the devices that are known.
    """
    wanted = _words(name)
    found = [spec for spec in SPECS if wanted and wanted <= _words(spec.name)]
    if found:
        return max(found, key=lambda spec: spec.memory_nbytes)
    known = [spec.name.removeprefix("NVIDIA ") for spec in SPECS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    remedy = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f'Device {name!r} is neither "cpu" nor "cuda" nor in the table. {remedy}'
        f"Known: {', '.join(known)}."
    )


def find_link(name: str) -> LinkSpec:
    """The link that a name means: "pcie4", "PCIe 5", "nvlink-c2c".

    Raises:
        ValueError: naming the links that are known.
    """
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    found = {re.sub(r"[^a-z0-9]", "", known): spec for known, spec in LINKS.items()}
    if key not in found:
        raise ValueError(
            f"Link {name!r} is none that is known: {', '.join(LINKS)}, or bytes per second each "
            "way, such as 25e9."
        )
    return found[key]


def _words(name: str) -> frozenset[str]:
    """Parts of a name, in lower case: "RTX4090-24GB" has those of "RTX 4090 24GB"."""
    spaced = re.sub(r"(rtx)(?=[0-9])", r"\1 ", name.lower())
    return frozenset(re.findall(r"[a-z0-9]+", spaced))
