"""Generated code is read once for each way to split a graph: by any search, rank or process.

Enters: a stated graph, and a forward and backward of it. Leaves: a `Reading`. Guarantees: those of
`found_before`; modules that differ in any operation are read apart.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from autoremat import _torch
from autoremat.inductor import reading
from autoremat.inductor.reading import Reading
from autoremat.planning.found_before import answer
from autoremat.planning.identity import in_words
from autoremat.problem.subject import Subject


def read_once(subject: Subject, forward: fx.GraphModule, backward: fx.GraphModule) -> Reading:
    """What the code takes that Inductor generates for two modules."""
    question = "\n".join((in_words(subject), _text(forward), _text(backward)))
    read = functools.partial(reading.read_code, subject, forward, backward)
    return answer(question, Reading, read, subject.device)


def _text(module: fx.GraphModule) -> str:
    """Its operations, those of its bodies, and how its inputs lie."""
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    values = map(_torch.fake_value, module.graph.find_nodes(op="placeholder"))
    strides = [value.stride() for value in values if isinstance(value, torch.Tensor)]
    return "\n".join((*map(str, graphs), str(strides)))
