"""The storages behind tensors, and what an allocator takes for them.

Enters: tensors, or nests of them. Leaves: their storages, identities and bytes. Guarantees: a
storage counts once; nothing is held, and nothing allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autoremat._torch import sparse_parts, storage_identity, tree_leaves

CUDA_ROUNDING = 512


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a nest of containers and dataclasses, which may refer to each other."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    values = [value]
    while values:
        for leaf in tree_leaves(values.pop()):
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
                continue
            is_new = dataclasses.is_dataclass(leaf) and id(leaf) not in seen
            if is_new and not isinstance(leaf, type):
                seen.add(id(leaf))
                names = (field.name for field in dataclasses.fields(leaf))
                values.append([getattr(leaf, name, None) for name in names])
    return found


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor: those of the inner tensors for DTensor and the like.

    What such a tensor is made of may also be no tensor, as the device mesh of a DTensor is.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name, None) for name in names)
        parts = (part for part in inner if isinstance(part, torch.Tensor))
        return [storage for part in parts for storage in storages_of(part)]
    if tensor.layout is torch.sparse_coo:
        return [storage for part in sparse_parts(tensor) for storage in storages_of(part)]
    return [tensor.untyped_storage()] if tensor.layout is torch.strided else []


def storage_identities(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """What tells the storages of tensors apart while they live."""
    return frozenset(storage_identity(s) for tensor in tensors for s in storages_of(tensor))


def storage_sizes(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """Bytes of the distinct storages on a device, by their identities."""
    return {
        storage_identity(storage): rounded_nbytes(storage.nbytes(), device)
        for tensor in tensors
        # A fake tensor's storage claims to be on `meta`, so the tensor is asked for the device.
        if same_device(tensor.device, device)
        for storage in storages_of(tensor)
    }


def storages_nbytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the distinct storages on a device, rounded as its allocator rounds."""
    return sum(storage_sizes(tensors, device).values())


def counted_apart(*groups: Iterable[torch.Tensor], device: torch.device) -> Iterator[int]:
    """Bytes on a device of each group of tensors; a storage counts in the first that holds it."""
    counted: set[int] = set()
    for group in groups:
        sizes = storage_sizes(group, device)
        yield sum(nbytes for storage, nbytes in sizes.items() if storage not in counted)
        counted.update(sizes)


def rounded_nbytes(nbytes: int, device: torch.device) -> int:
    """What the device's allocator takes for a request: a multiple of 512 on CUDA."""
    if device.type != "cuda":
        return nbytes
    return -(-nbytes // CUDA_ROUNDING) * CUDA_ROUNDING


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether the devices are one; a device without an index stands for all of its type."""
    return one.type == other.type and (other.index is None or one.index == other.index)
