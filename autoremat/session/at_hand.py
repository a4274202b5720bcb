"""The graph that is being compiled: which of the step's it is, and what it is given.

Enters: what Dynamo hands over, one graph at a time. Leaves: its name, its inputs, the ranges of
their sizes. Guarantees: the names of one step's graphs differ, also where one graph of Dynamo's
is compiled in several parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import CodeType
from typing import Any

from autoremat import _torch
from autoremat.planning.ranges import Ranged
from autoremat.session.call_sizes import Given, ranges_now


class AtHand:
    """One graph after the other.

    Attributes:
        inputs: of the graph at hand; none between two graphs.
        ranges: of the sizes of these.
        absent: of the batch of the call, what is not among these.
        begins_call: whether it begins with the call that somebody makes: nothing of that has run.
    """

    def __init__(self) -> None:
        """None is at hand."""
        self.inputs: Sequence[Any] = ()
        self.ranges: Sequence[Ranged] = ()
        self.absent: Sequence[Given] = ()
        self.begins_call = False
        self._graph: _torch.DynamoGraph | None = None
        self._first_frame = ""  # of the module whose graph this is
        self._first_frames: dict[Hashable, str] = {}
        self._done, self._part = "", 0

    def begin(
        self,
        inputs: Sequence[Any],
        graph: _torch.DynamoGraph,
        *,
        caller: Hashable,
        code: CodeType | None,
    ) -> None:
        """From now on another graph is at hand.

        Args:
            inputs: its inputs, as Dynamo hands them over.
            graph: itself; its inputs have symbols.
            caller: tells the session's modules apart.
            code: of the call, if somebody makes it.
        """
        self._first_frame = self._first_frames.setdefault(caller, _torch.frame_name())
        # Of one Dynamo graph, DistributedDataParallel makes several, one for each bucket.
        self._part = self._part + 1 if self._done == _torch.compile_name() else 0
        self.begins_call = not self._part and code is not None and _torch.code_at_hand() is code
        self.inputs = inputs
        self._graph = graph
        ranges = ranges_now()
        self.ranges, self.absent = ranges.among(inputs, graph.inputs), ranges.absent(inputs)

    def done(self) -> None:
        """It has been compiled."""
        self._done = _torch.compile_name()

    def end(self) -> None:
        """Nothing is held of it any more."""
        self.inputs = self.ranges = self.absent = ()
        self._graph = None

    @property
    def graph(self) -> _torch.DynamoGraph:
        """As Dynamo hands it over; one is at hand."""
        assert self._graph is not None
        return self._graph

    @property
    def name(self) -> str:
        """Of the graph."""
        name = _torch.compile_name()
        return f"{name} part {self._part + 1}" if self._part else name

    @property
    def is_in_first_frame(self) -> bool:
        """Whether its module begins with the frame that it belongs to."""
        return _torch.frame_name() == self._first_frame

    @property
    def is_first(self) -> bool:
        """Whether its module begins with it."""
        return self.is_in_first_frame and not self._part

    def has_seen(self, caller: Hashable) -> bool:
        """Whether any graph of a module was at hand."""
        return caller in self._first_frames
