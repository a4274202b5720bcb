"""A GPU that is not here, taken for present: in a process that does nothing else.

Enters: its data sheet. Leaves: a context in which torch traces and Inductor generates for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator

import torch

from autoremat import _torch
from autoremat.cost.device_specs import DeviceSpec
from autoremat.elsewhere.apart import can_fork

DEVICE = torch.device("cuda", 0)
"""Where values seem to be."""

COARSER = (
    "The plan is coarser: its graph is the CPU's, attention included, and its peak is the model's, "
    "not that of generated code."
)


def can_generate_for_gpus() -> bool:
    """Whether code can be generated here for a GPU that is not: triton writes its kernels."""
    return _torch.has_triton_package() and can_fork()


def triton_version() -> str:
    """Of what writes kernels; it decides what they are."""
    return importlib.metadata.version("triton")


def how_planned(spec: DeviceSpec, *, from_code: bool, on_gpu: bool) -> str:
    """What a plan for a GPU that is not here was made from, for a report.

    Args:
        spec: its data sheet.
        from_code: whether generated code was read.
        on_gpu: whether the graph is the GPU's.
    """
    if on_gpu and not from_code:
        return (
            f"{spec.name} is not here. Attention is what torch takes there; the peak is that of a "
            "model of Inductor's code, none of which was generated; times are estimated by "
            f"{spec.source}."
        )
    if not from_code:
        remedy = "" if can_generate_for_gpus() else ' With "autoremat[gpu]" its code can be read.'
        return f"{spec.name} is not here. {COARSER}{remedy}"
    version, triton = "{}.{}".format(*spec.chip.capability), triton_version()
    return (
        f"{spec.name} is not here. Attention is what torch takes there; the peak is read from the "
        f"code that Inductor generates for compute capability {version} (triton {triton}), "
        f"what libraries take by their sources; times are estimated by {spec.source}."
    )


@contextlib.contextmanager
def standing_in(spec: DeviceSpec) -> Iterator[None]:
    """While open, torch takes the GPU for present."""
    chip = spec.chip
    gpu = _torch.AbsentGpu(
        name=spec.name,
        capability=chip.capability,
        multiprocessors=chip.multiprocessors,
        memory_nbytes=spec.memory_nbytes,
        shared_nbytes=chip.shared_nbytes,
        threads=chip.threads,
        cache_nbytes=chip.cache_nbytes,
    )
    with _torch.gpu_standing_in(gpu):
        yield
