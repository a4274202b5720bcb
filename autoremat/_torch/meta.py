"""What torch notes on the nodes of its graphs: keys of `meta`, and AOTAutograd's descriptors.

Enters: nodes of graphs that torch has traced. Leaves: what stands in their `meta`, by a name of
ours. Guarantees: a key is written here only; a descriptor that torch renames is an error, not a
mutation that nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    ForwardTokenAOTInput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
)
from torch.utils._pytree import tree_leaves

__all__ = [
    "fake_value",
    "forget_module_name",
    "input_numbers",
    "is_effect_token",
    "keep_in_forward",
    "mark_visible_outputs",
    "materialise",
    "meta_of_copy",
    "module_name",
    "module_stack",
    "move_to_backward",
    "must_stay_in_backward",
    "overwritten_afterwards",
    "recompute_policy",
    "results_of_tangents",
    "set_fake_value",
    "set_recompute_policy",
    "source_lines",
    "traced_by_autograd",
    "traced_in_backward",
]

_BY_AUTOGRAD = "autograd_backward"
_CUSTOM = "custom"
_DESCRIPTOR = "desc"
_MATERIALISED = "inductor_realize_to_strides"
_MODULE_NAME = "module_fqn"  # in what users note: by torchtitan
_MODULES = ("nn_module_stack", "fwd_nn_module_stack")
_PART = "partitioner_tag"
_POLICY = "recompute"
_SOURCE = "stack_trace"
_OF_THE_NODE_ALONE = ("tensor_meta", _DESCRIPTOR)
_VALUE = "val"
_VISIBLE = "user_visible_output_idxs"


def fake_value(node: fx.Node) -> Any:
    """What a node gives, as fake tensors and symbols; None where torch has noted nothing."""
    return node.meta.get(_VALUE)


def set_fake_value(node: fx.Node, value: Any) -> None:
    """Note what a node gives."""
    node.meta[_VALUE] = value


def meta_of_copy(node: fx.Node) -> dict[str, Any]:
    """What is noted on a node and is true of a copy of its value as well."""
    return {key: noted for key, noted in node.meta.items() if key not in _OF_THE_NODE_ALONE}


def recompute_policy(node: fx.Node) -> Any:
    """The `CheckpointPolicy` of a node; None without one."""
    return node.meta.get(_POLICY)


def set_recompute_policy(node: fx.Node, policy: Any) -> None:
    """Give a node a `CheckpointPolicy`, which torch's partitioners follow."""
    node.meta[_POLICY] = policy


def traced_in_backward(node: fx.Node) -> bool:
    """Whether torch takes a node for the backward's."""
    return bool(node.meta.get(_PART) == "is_backward")


def move_to_backward(node: fx.Node) -> None:
    """Let torch take a node for the backward's, where no policy applies."""
    node.meta[_PART] = "is_backward"
    node.meta.pop(_POLICY, None)


def materialise(node: fx.Node) -> None:
    """Let Inductor make a tensor where it stands, instead of where it is first read.

    It lies as the graph says, which Inductor has brought up to date by how its inputs really lie.
    """
    node.meta[_MATERIALISED] = True


def must_stay_in_backward(node: fx.Node) -> None:
    """Let torch take a node for the backward's, whatever it reads."""
    node.meta[_PART] = "must_be_in_backward"


def traced_by_autograd(node: fx.Node) -> bool:
    """Whether a call of `torch.autograd.grad` made a node, in a graph of a whole step."""
    return bool(node.meta.get(_BY_AUTOGRAD, False))


def module_name(node: fx.Node) -> str:
    """The module that a node belongs to, where torchtitan has noted that; else ""."""
    return str(node.meta.get(_CUSTOM, {}).get(_MODULE_NAME, ""))


def forget_module_name(node: fx.Node) -> None:
    """Take that note off a node; other nodes may share what it is noted in."""
    noted = node.meta.get(_CUSTOM, {})
    node.meta[_CUSTOM] = {key: value for key, value in noted.items() if key != _MODULE_NAME}


def keep_in_forward(node: fx.Node) -> None:
    """Let torch take a node for the forward's."""
    node.meta[_PART] = "is_forward"


def mark_visible_outputs(output: fx.Node, positions: Sequence[int]) -> None:
    """Tell Inductor which outputs of a graph the user sees: they keep their strides."""
    output.meta[_VISIBLE] = list(positions)


def module_stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    """The calls of modules in which a node ran, outermost first: path and class, by a key."""
    return next((node.meta[key] for key in _MODULES if node.meta.get(key)), {})


def source_lines(node: fx.Node) -> str:
    """The user's lines behind a node, as Python writes a traceback; "" where there are none."""
    return node.meta.get(_SOURCE) or ""


def is_effect_token(node: fx.Node) -> bool:
    """Whether a placeholder orders effects: AOTAutograd does not count it among the inputs."""
    return isinstance(node.meta.get(_DESCRIPTOR), ForwardTokenAOTInput)


def input_numbers(primals: Sequence[fx.Node]) -> list[int]:
    """Which input of the Dynamo graph each placeholder of a primal stands for.

    Torch may have taken tensor subclasses apart, into several placeholders each.
    """
    noted = [node.meta.get(_DESCRIPTOR) for node in primals]
    if not any(isinstance(found, SubclassGetAttrAOTInput) for found in noted):
        return list(range(len(primals)))
    return [_input_number(found, position) for position, found in enumerate(noted)]


def _input_number(noted: Any, position: int) -> int:
    while isinstance(noted, SubclassGetAttrAOTInput):
        noted = noted.base
    return noted.idx if isinstance(noted, PlainAOTInput) else position


def results_of_tangents(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """By incoming gradient the result of the forward that it is of, where torch has noted it."""
    output = graph.output_node()
    noted = tree_leaves(output.meta.get(_DESCRIPTOR))
    pairs = zip(tree_leaves(output.args), noted, strict=False)
    results = {str(found): node for node, found in pairs if isinstance(node, fx.Node)}
    wanted = {
        node: str(getattr(node.meta.get(_DESCRIPTOR), "output", None))
        for node in graph.find_nodes(op="placeholder")
    }
    return {node: results[name] for node, name in wanted.items() if name in results}


def overwritten_afterwards(graph: fx.Graph) -> set[fx.Node]:
    """Placeholders into which AOTAutograd copies a result once the forward has run."""
    named = {str(node.meta.get(_DESCRIPTOR)): node for node in graph.find_nodes(op="placeholder")}
    noted = tree_leaves(graph.output_node().meta.get(_DESCRIPTOR))
    mutations = (found for found in noted if isinstance(found, InputMutationAOTOutput))
    overwritten = (str(mutation.mutated_input) for mutation in mutations)
    return {named[name] for name in overwritten if name in named}
