"""A joint graph as the machine of another device would have it.

Enters: a joint graph on fake tensors of the CPU. Leaves: a copy of it whose values seem to be on
the device. Guarantees: names, order and operators are those of the graph; sizes, strides and who
shares memory with whom are what the operators say for that device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.graph.joint_graph import copy_module

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def moved_to(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a joint graph on another device, from its inputs on."""
    copied = copy_module(module)
    for node in list(copied.graph.nodes):
        if node.op == "get_attr":
            _move_constant(copied, node, device)
        elif node.op == "placeholder":
            value = _torch.tree_map(lambda v: _placed(v, device), _torch.fake_value(node))
            _torch.set_fake_value(node, value)
        elif node.op == "call_function":
            node.args = _torch.tree_map(lambda v: _on(v, device), node.args)
            node.kwargs = _torch.tree_map(lambda v: _on(v, device), node.kwargs)
            _torch.set_fake_value(node, _computed(node, device))
    return copied


def _move_constant(module: fx.GraphModule, node: fx.Node, device: torch.device) -> None:
    """A buffer of its sizes there, in place of a constant; numbers stay as they are.

    What is in it decides no plan, and a copy would be folded: made, on a device that is not here.
    """
    value = _torch.fake_value(node)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return
    given: dict[str, Any] = {"dtype": value.dtype, "device": device, "pin_memory": False}
    with module.graph.inserting_before(node):
        there = module.graph.call_function(aten.empty.memory_format, (list(value.shape),), given)
    there.meta.update(_torch.meta_of_copy(node))
    _torch.set_fake_value(there, _placed(value, device))
    node.replace_all_uses_with(there)
    module.graph.erase_node(node)


def _on(value: Any, device: torch.device) -> Any:
    return device if isinstance(value, torch.device) else value


def _placed(value: Any, device: torch.device) -> Any:
    """A fake tensor of the same sizes; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with _torch.fake_mode_of(value):
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device
        ).requires_grad_(value.requires_grad)


def _computed(node: fx.Node, device: torch.device) -> Any:
    """What the node's operator makes of its inputs there."""
    before = _torch.fake_value(node)
    modes = [_torch.fake_mode_of(v) for v in _torch.tensor_leaves(before)]
    if not modes:
        return before
    if node.target in _CONVOLUTIONS:  # how they lie is asked of a build without CUDA
        return _torch.tree_map(lambda v: _placed(v, device), before)
    args, kwargs = fx.map_arg((node.args, node.kwargs), _torch.fake_value)
    try:
        with modes[0], torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # what has no fake there: a value of its own, of the sizes that it had
        return _torch.tree_map(lambda v: _placed(v, device), before)
