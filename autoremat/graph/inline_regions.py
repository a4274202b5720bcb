"""Regions that several layers share, written out where they are called.

Enters: a Dynamo graph. Leaves: the same graph without `torch.compiler.nested_compile_region`
calls: each is replaced by a copy of the region's operations. Guarantees: the graph computes what
it did. A region is compiled once for all of its calls, so one plan would have to serve them all,
and none of its values could be chosen apart; written out, they are values like any other.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx

from autoremat import _torch


def write_out_regions(module: fx.GraphModule) -> None:
    """Replace every call of a shared region, in higher-order operators' bodies as well."""
    changed = False
    for body in (*_bodies(module), module):
        calls = body.graph.find_nodes(op="call_function", target=_torch.invoke_subgraph)
        for call in calls:
            if all(_torch.is_getitem(user) for user in call.users):
                _write_out(call, body)
                changed = True
        if calls:
            body.graph.lint()
            body.recompile()
    if changed:
        module.delete_all_unused_submodules()


def _bodies(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Graphs inside a graph, innermost first."""
    found = [m for m in module.modules() if isinstance(m, fx.GraphModule) and m is not module]
    return found[::-1]


def _write_out(call: fx.Node, owner: fx.GraphModule) -> None:
    region, _identifier, *operands = call.args
    assert isinstance(region, fx.Node)
    body = attrgetter(str(region.target))(owner)
    inputs = body.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    with call.graph.inserting_before(call):
        for node in body.graph.find_nodes(op="get_attr"):
            copies[node] = _constant(node, body, owner, call)
        results: Any = call.graph.graph_copy(body.graph, copies)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        call.graph.erase_node(user)
    call.graph.erase_node(call)
    if not region.users:
        region.graph.erase_node(region)


def _constant(node: fx.Node, body: fx.GraphModule, owner: fx.GraphModule, call: fx.Node) -> fx.Node:
    """What the region keeps beside its graph, kept by the graph that calls it."""
    name = f"{call.name}_{node.name}"
    setattr(owner, name, attrgetter(str(node.target))(body))
    copy = call.graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy
