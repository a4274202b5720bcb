"""Which nodes share a storage, and how many bytes each storage takes.

Enters: a joint graph with fake values. Leaves: `Storages`. A storage is named after the node
that makes it; views, and elements of tuples, belong to the storage that they look into.
Bytes are rounded as the device's allocator rounds (512 on CUDA, none on CPU).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from autoremat import _torch
from autoremat.memory.storage_sizes import rounded_nbytes

_Path = tuple[object, ...]  # where an element stands inside a tuple, list or dict of results

# These make a fresh storage whatever their fake value says: graph passes that copy `meta` leave
# the input's fake value on them.
_ALWAYS_FRESH = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.copy.default}
)

# Their mean or sum is a number in the storage of all that it is one of: what is allocated for the
# elements is made smaller in its shape only.
_NUMBER_IN_WHOLE = frozenset(
    {
        torch.ops.aten.binary_cross_entropy.default,
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.soft_margin_loss.default,
    }
)


@dataclass
class Storages:
    """The storages of a joint graph.

    Attributes:
        of_node: names of the storages that a node's result lives in.
        made_by: names of the storages that a node allocates.
        root: the node that stands for the whole storage: saving it saves the storage. Absent
            for elements of tuples that nobody takes.
        nbytes: bytes of each storage, rounded; 0 on other devices than the planned one.
        fake_nbytes: what the fake values say; `nbytes` is more where they say too little.
        sizes: what `nbytes` is as symbols, where sizes vary, not rounded.
        resident: storages of graph inputs and constants.
    """

    of_node: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    made_by: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    root: dict[str, fx.Node] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    fake_nbytes: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int | torch.SymInt] = field(default_factory=dict)
    resident: set[str] = field(default_factory=set)

    def total_nbytes(self, nodes: Iterable[fx.Node], *, resident: bool = False) -> int:
        """Bytes of the storages behind the nodes, each once; resident ones only if asked for."""
        names = {name for node in nodes for name in self.of_node[node]}
        return sum(self.nbytes[n] for n in names if resident or n not in self.resident)

    def read_by(self, node: fx.Node) -> tuple[str, ...]:
        """Storages that the node reads, resident ones included, each once."""
        return tuple(
            dict.fromkeys(name for source in node.all_input_nodes for name in self.of_node[source])
        )


def find_storages(nodes: Iterable[fx.Node], device: torch.device) -> Storages:
    """The storages of a graph's nodes, counted on one device."""
    storages = Storages()
    keys: dict[str, int | None] = {}
    elements: dict[fx.Node, dict[_Path, str]] = {}
    for node in nodes:
        if node.op == "output":
            continue
        value = _torch.fake_value(node)
        if _torch.is_getitem(node) and node.args[0] in elements:
            _add_element(node, elements, storages)
            continue
        leaves = dict(_tensor_leaves(value))
        names: dict[_Path, str] = {}
        made: list[str] = []
        sources = () if node.op == "placeholder" else storages.read_by(node)
        for path, tensor in leaves.items():
            key = _torch.storage_key(tensor)
            shared = _shared_with(key, keys, sources, made, node, storages)
            name = shared or (
                node.name if path == () else f"{node.name}#{'.'.join(map(str, path))}"
            )
            names[path] = name
            if shared is None:
                made.append(name)
                keys[name] = key
                storages.sizes[name] = _size(tensor, device)
                storages.fake_nbytes[name] = rounded_nbytes(
                    _torch.size_hint(storages.sizes[name]), device
                )
                hidden = _hidden_size(node, tensor, device, storages)
                hidden_nbytes = rounded_nbytes(_torch.size_hint(hidden), device)
                storages.nbytes[name] = max(storages.fake_nbytes[name], hidden_nbytes)
                if hidden_nbytes > storages.fake_nbytes[name]:
                    storages.sizes[name] = hidden
                if path == ():
                    storages.root[name] = node
        storages.of_node[node] = tuple(dict.fromkeys(names.values()))
        storages.made_by[node] = tuple(made)
        if leaves and () not in leaves:
            elements[node] = names
        is_input = node.op == "placeholder" and not _torch.is_tangent(node)
        if is_input or node.op == "get_attr":
            storages.resident.update(storages.of_node[node])
    return storages


def _shared_with(
    key: int | None,
    keys: dict[str, int | None],
    sources: tuple[str, ...],
    made: list[str],
    node: fx.Node,
    storages: Storages,
) -> str | None:
    """The storage among the node's inputs (or other placeholders) that its result looks into."""
    if key is None or node.target in _ALWAYS_FRESH:
        return None
    candidates: Iterable[str] = (*made, *sources)
    if node.op == "placeholder":
        candidates = (*made, *storages.nbytes)
    found = next((name for name in candidates if keys[name] == key), None)
    if found is None and getattr(node.target, "is_view", False):  # of a pass: its fake value is new
        found = next(iter(sources), None)
    return found


def _hidden_size(
    node: fx.Node, result: torch.Tensor, device: torch.device, storages: Storages
) -> int | torch.SymInt:
    """Bytes of a storage that is larger than the fake value of its result says.

    `copy` clones a storage whole, even if it copies into a view of it only.
    """
    if node.target is torch.ops.aten.copy.default:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        return sum(storages.sizes[name] for name in storages.of_node[target])
    if node.target in _NUMBER_IN_WHOLE and result.device.type == device.type and not result.dim():
        inputs = (_torch.fake_value(source) for source in node.all_input_nodes)
        shape = torch.broadcast_shapes(*(value.shape for value in inputs))
        return math.prod(shape) * result.element_size()
    return 0


def _add_element(
    node: fx.Node, elements: dict[fx.Node, dict[_Path, str]], storages: Storages
) -> None:
    container, index = node.args
    assert isinstance(container, fx.Node)
    inside = {
        path[1:]: name for path, name in elements[container].items() if path and path[0] == index
    }
    storages.of_node[node] = tuple(dict.fromkeys(inside.values()))
    storages.made_by[node] = ()
    if () not in inside:
        elements[node] = inside
    elif inside[()] in storages.made_by[container]:
        storages.root.setdefault(inside[()], node)


def _tensor_leaves(value: object, path: _Path = ()) -> Iterable[tuple[_Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensor_leaves(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensor_leaves(item, (*path, key))


def _size(tensor: torch.Tensor, device: torch.device) -> int | torch.SymInt:
    if tensor.device.type != device.type:
        return 0
    try:
        size: int | torch.SymInt = tensor.untyped_storage().nbytes()
        _torch.size_hint(size)
    except (NotImplementedError, RuntimeError):  # sparse: no storage of its own
        size = tensor.numel() * tensor.element_size()
    return size
