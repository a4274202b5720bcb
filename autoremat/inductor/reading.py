"""Peak and time of two modules as Inductor compiles them.

Enters: a graph, its shell and storages, and a forward and backward of it. Leaves: a `Reading`.
Guarantees: it is of the code that Inductor generates; in the peak, what crosses from the forward
and what stands around the graph is included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from torch import fx

from autoremat import _torch
from autoremat.inductor.allocations import allocations_of
from autoremat.inductor.hook import Generated, generate
from autoremat.problem.subject import Peaks, Subject
from autoremat.progress import during
from autoremat.reserved.step import GraphEvents


@dataclass(frozen=True)
class Reading:
    """What the code takes that Inductor generates for a plan.

    Attributes:
        peak_nbytes: resident bytes included.
        needed_nbytes: that, or more; as of `planning.choice.Choice`.
        time_us: of all its kernels, those of loops estimated; None if not all are known.
        asked_text: on CUDA the `Allocations`, as JSON; else "".
    """

    peak_nbytes: int
    needed_nbytes: int
    time_us: float | None
    asked_text: str = ""

    @property
    def asked(self) -> GraphEvents | None:
        """What is asked of a GPU's allocator; None elsewhere."""
        return GraphEvents.of(*json.loads(self.asked_text)) if self.asked_text else None

    @property
    def peaks(self) -> Peaks:
        """Both peaks."""
        return Peaks(self.peak_nbytes, self.needed_nbytes)


@dataclass(frozen=True)
class Code:
    """What Inductor generates for two modules, and what crosses from one to the other.

    Attributes:
        forward: of the forward module.
        backward: of the backward module.
        held: by their numbers, bytes of storages that live until the step's end: those of the
            forward's outputs, and below zero gradients that come in and that somebody holds.
        owned: inputs that the backward frees after their last use, by name: a storage of the
            forward's, or one below zero for a gradient that comes in, and its bytes.
    """

    forward: Generated
    backward: Generated
    held: Mapping[int, int]
    owned: Mapping[str, tuple[int, int]]


@during("read")
def read_code(subject: Subject, forward: fx.GraphModule, backward: fx.GraphModule) -> Reading:
    """What the code takes that Inductor generates for two modules, at the subject's sizes."""
    with _torch.sizes_as(subject.sizes):
        return reading_of(subject, backward, code_of(subject, forward, backward))


def code_of(subject: Subject, forward: fx.GraphModule, backward: fx.GraphModule) -> Code:
    """The code that Inductor generates for two modules."""
    joint, shell, storages = subject.joint, subject.lowered.shell, subject.lowered.storages
    first = generate(
        forward,
        is_backward=False,
        owned={},
        num_visible_outputs=joint.num_fwd_outputs,
        device=subject.device,
        static={node.name for node in joint.static_inputs},
        elsewhere=subject.elsewhere,
    )
    results = _torch.arg_tree_leaves(*forward.graph.output_node().args)
    returned = first.memory.returned
    held = dict(found for found in returned[: joint.num_fwd_outputs] if found is not None)
    owned = {
        node.name: found
        for node, found in zip(results, returned, strict=True)
        if isinstance(node, fx.Node) and found is not None and found[0] not in held
    }
    for node in joint.tangents:
        for name in storages.of_node[node]:
            key = -2 - len(owned) - len(held)  # a storage of its own
            if name in shell.held:
                held[key] = storages.nbytes[name]
            else:
                owned[node.name] = (key, storages.nbytes[name])
    gradients = _torch.arg_tree_leaves(*backward.graph.output_node().args)
    second = generate(
        backward,
        is_backward=True,
        owned=owned,
        num_visible_outputs=len(gradients) if _torch.backward_results_are_visible() else 0,
        device=subject.device,
        strides=first.strides,
        donated=_torch.donated_inputs(forward, backward, num_fwd_outputs=joint.num_fwd_outputs),
        elsewhere=subject.elsewhere,
    )
    return Code(first, second, held, owned)


def reading_of(subject: Subject, backward: fx.GraphModule, code: Code) -> Reading:
    """What a forward's and this backward's code take."""
    shell, first, second = subject.lowered.shell, code.forward, code.backward
    held, owned = code.held, code.owned
    held_nbytes = sum(held.values()) + shell.later_gradients_nbytes
    after = held_nbytes + second.memory.returned_nbytes + shell.optimizer_nbytes
    crossing_nbytes = held_nbytes + sum(dict(owned.values()).values())
    peak_nbytes = max(
        first.memory.peak_nbytes,
        crossing_nbytes + shell.layout_nbytes,
        held_nbytes + second.memory.peak_nbytes,
        after,
    )
    needed_nbytes = max(peak_nbytes, crossing_nbytes + shell.free_nbytes)
    resident = shell.resident_nbytes
    peaks = (resident + peak_nbytes, resident + needed_nbytes)
    asked_text = ""
    if subject.device.type == "cuda":  # whose allocator reserves more than it gives
        given = [owned.get(node.name) for node in backward.graph.find_nodes(op="placeholder")]
        asked = allocations_of(first.memory, second.memory, held=held, given=given)
        asked_text = json.dumps(astuple(asked), separators=(",", ":"))
    return Reading(*peaks, _time_us(first, second), asked_text)


def _time_us(first: Generated, second: Generated) -> float | None:
    if first.time_us is None or second.time_us is None:
        return None
    return first.time_us + second.time_us
