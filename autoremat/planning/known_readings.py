"""Generated code is read once for each way to split a graph: by any search, rank or process.

Enters: a stated graph, and a forward and backward of it. Leaves: a `Reading`. Guarantees: those of
`found_before`; modules that differ in any operation are read apart.
"""

from __future__ import annotations

import functools

from torch import fx

from autoremat.inductor import reading
from autoremat.inductor.reading import Reading
from autoremat.planning.found_before import answer
from autoremat.planning.identity import in_words
from autoremat.problem.subject import Subject


def read_once(subject: Subject, forward: fx.GraphModule, backward: fx.GraphModule) -> Reading:
    """What the code takes that Inductor generates for two modules."""
    question = "\n".join((in_words(subject), str(forward.graph), str(backward.graph)))
    read = functools.partial(reading.read_code, subject, forward, backward)
    return answer(question, Reading, read, subject.device)
