"""The question: which operations one training step runs, on which values, at what cost.

Enters: sizes in bytes and times in microseconds, per operation. Leaves: a `Problem` that is
consistent (unique names, known references, no cycle, no negative size) or a `ProblemError`
that names the culprit. Frozen: every other module reads it, none changes it.

A value is one storage: views of it are not values of their own. The order of `Problem.ops` is
the order in which the step runs without recompute. It is a valid topological order. What the step
runs several times, like equal blocks of a model, may be stated once, as a `Region`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import Any

SCHEMA = "autoremat.problem/1"
LARGEST_NBYTES = 1 << 60  # all sizes together: sums of them have to fit 64 bits


class ProblemError(ValueError):
    """A problem that contradicts itself. The message names the operation or value at fault."""


class Phase(StrEnum):
    """When an operation may run for the first time.

    FORWARD operations must run before the first BACKWARD one: the user's outputs need them.
    EITHER operations are needed by the backward only and need no gradient (masks, statistics,
    casts): they may run in the forward, if their result is saved, or in the backward.
    ANY operations belong to a graph without phases, in which all of them are ANY: each runs at
    least once, in any order in which every read finds its value, and as often as the plan wants.
    """

    FORWARD = "forward"
    EITHER = "either"
    BACKWARD = "backward"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Value:
    """One storage.

    Attributes:
        name: unique among the values.
        nbytes: size, rounded as the device's allocator rounds.
        must_save: if the backward reads it, it must be the instance that the forward made.
        must_recompute: no instance made in the forward may be read by the backward.
    """

    name: str
    nbytes: int
    must_save: bool = False
    must_recompute: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        name: unique among the operations.
        inputs: values it reads; they are live while it runs.
        outputs: values it makes, all of them at each run; a value has one producer.
        time_us: duration of one run.
        workspace_nbytes: bytes live only while it runs, inputs and outputs not counted.
        phase: when it may run first; BACKWARD operations run exactly once.
        recomputable: whether it may run more than once.
        overwrites: inputs in whose memory it may leave its results. Where a plan needs the instance
            of one no more, and the results have room for it, it is not there beside them; of
            several, the largest.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time_us: float
    workspace_nbytes: int = 0
    phase: Phase = Phase.FORWARD
    recomputable: bool = True
    overwrites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """Operations that the step runs several times and the problem states once.

    The step runs those before the first BACKWARD operation in the runs 1 to `count` one after the
    other, and those from there on in the runs `count` to 1. Each run has values of its own and
    holds what its backward reads; outside, the values of the run that came last are read.

    Attributes:
        name: unique among the regions.
        ops: names of its operations; they stand together in the forward, and in the backward.
        count: how many runs there are.
        carried: pairs of a value made outside and one made in the region: the first run reads the
            one from outside, and every later run in its place what the run before it has made.
    """

    name: str
    ops: tuple[str, ...]
    count: int
    carried: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the host's memory and back: one copy engine each way, beside the computing.

    Each engine takes one copy after the other, in the order in which they are asked for.

    Attributes:
        out_nbytes_per_us: bandwidth to the host, while the other way is busy too.
        in_nbytes_per_us: bandwidth from the host.
        latency_us: what each copy takes beside that.
        is_pinned: whether the host's memory is page-locked: such allocators hand out powers of two.
        ask_us: what computing takes for a copy: to ask for it, and to find that it has been made.
        slowdown: of the time of a copy, what computing loses beside it, where the two share a core
            or memory. It is charged where a copy begins: a wait for that copy may hide it.
    """

    out_nbytes_per_us: float
    in_nbytes_per_us: float
    latency_us: float = 0.0
    is_pinned: bool = False
    ask_us: float = 0.0
    slowdown: float = 0.0

    def on_host_nbytes(self, nbytes: int) -> int:
        """What a value of so many bytes takes on the host."""
        return 1 << (nbytes - 1).bit_length() if self.is_pinned and nbytes else nbytes

    def out_us(self, nbytes: int) -> float:
        """How long so many bytes take to the host."""
        return self.latency_us + nbytes / self.out_nbytes_per_us

    def in_us(self, nbytes: int) -> float:
        """How long so many bytes take back."""
        return self.latency_us + nbytes / self.in_nbytes_per_us

    def computing_us(self, copy_us: float) -> float:
        """What a copy that takes so long costs computing."""
        return self.ask_us + self.slowdown * copy_us


@dataclass(frozen=True)
class Problem:
    """One training step.

    Attributes:
        values: all storages that operations make. Parameters and inputs are resident, no values.
        ops: all operations, in the order of a step without recompute.
        outputs: values that stay live from their first making to the end of the step
            (user outputs, gradients, tangents).
        resident_nbytes: bytes that are live all the time.
        regions: what runs more than once.
        link: the way to the host's memory; None where no value can leave the device.

    Raises:
        ProblemError: on construction, if the parts contradict each other.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...] = ()
    resident_nbytes: int = 0
    regions: tuple[Region, ...] = ()
    link: Link | None = None

    def __post_init__(self) -> None:
        """Check that the parts agree."""
        _check_sizes(self)
        _check_references(self)
        _check_order(self)
        _check_regions(self)

    @cached_property
    def value_by_name(self) -> dict[str, Value]:
        """The values by their names."""
        return {value.name: value for value in self.values}

    @cached_property
    def op_by_name(self) -> dict[str, Op]:
        """The operations by their names."""
        return {op.name: op for op in self.ops}

    @cached_property
    def producer_of(self) -> dict[str, Op]:
        """The operation that makes each value."""
        return {name: op for op in self.ops for name in op.outputs}

    def taken_nbytes(self, op: Op, ended: Collection[str]) -> int:
        """What an operation writes over if these values end with it: the largest that has room."""
        room_nbytes = sum(self.value_by_name[name].nbytes for name in op.outputs)
        sizes = (self.value_by_name[name].nbytes for name in op.overwrites if name in ended)
        return max((nbytes for nbytes in sizes if nbytes <= room_nbytes), default=0)

    def first_backward(self, ops: Sequence[str]) -> int:
        """Index of the first BACKWARD operation of these; how many they are if there is none."""
        backward = (i for i, op in enumerate(ops) if self.op_by_name[op].phase is Phase.BACKWARD)
        return next(backward, len(ops))

    def in_runs(self, ops: Sequence[str]) -> Iterator[tuple[int, int]]:
        """What the whole step makes of operations in this order: an index and a run, 0 outside.

        Raises:
            ProblemError: if others stand between the operations of a region.
        """
        region_of = {name: region for region in self.regions for name in region.ops}
        start = self.first_backward(ops)
        for part, direction in ((range(start), 1), (range(start, len(ops)), -1)):
            seen: set[str] = set()
            for region, group in groupby(part, lambda i: region_of.get(ops[i])):
                members = list(group)
                if region is not None and region.name in seen:
                    raise ProblemError(
                        f"Operation {ops[members[0]]!r} stands apart from the others of the region "
                        f"{region.name!r}: they run together in the forward, and in the backward."
                    )
                runs = [0] if region is None else range(1, region.count + 1)[::direction]
                seen.update([] if region is None else [region.name])
                yield from ((i, run) for run in runs for i in members)

    def to_json(self) -> str:
        """This problem as JSON text; `from_json` gives an equal one back."""
        return json.dumps({"schema": SCHEMA, **self.as_data()}, indent=1)

    def as_data(self) -> dict[str, Any]:
        """This problem as plain values, without a link or `overwrites` where there is none."""
        data = asdict(self)
        for op in data["ops"]:
            if not op["overwrites"]:
                del op["overwrites"]
        if self.link is None:
            del data["link"]
        return data

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """The problem that `to_json` wrote.

        Raises:
            ProblemError: if the text is no JSON, not of this schema, or contradicts itself.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProblemError(f"The text is not JSON ({error}). Is the file complete?") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ProblemError(f"Expected a JSON object with schema {SCHEMA!r}, found {found!r}.")
        try:
            return cls(
                values=tuple(_value_from_json(value) for value in data["values"]),
                ops=tuple(_op_from_json(op) for op in data["ops"]),
                outputs=tuple(data["outputs"]),
                resident_nbytes=data["resident_nbytes"],
                regions=tuple(_region_from_json(region) for region in data.get("regions", ())),
                link=Link(**data["link"]) if "link" in data else None,
            )
        except ProblemError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProblemError(f"The problem's JSON lacks or mistypes a field: {error}.") from error


def _value_from_json(data: dict[str, Any]) -> Value:
    """A value; older versions of this schema also state a time for saving it, which is 0."""
    return Value(**{name: field for name, field in data.items() if name != "save_us" or field})


def _region_from_json(data: dict[str, Any]) -> Region:
    carried = tuple((given, made) for given, made in data["carried"])
    return Region(data["name"], tuple(data["ops"]), data["count"], carried)


def _op_from_json(data: dict[str, Any]) -> Op:
    fields = dict(data)
    fields["inputs"] = tuple(fields["inputs"])
    fields["outputs"] = tuple(fields["outputs"])
    fields["overwrites"] = tuple(fields.get("overwrites", ()))
    try:
        fields["phase"] = Phase(fields["phase"])
    except ValueError as error:
        raise ProblemError(f"Operation {fields.get('name')!r}: {error}.") from error
    return Op(**fields)


def _check_sizes(problem: Problem) -> None:
    if problem.link is not None:
        _check_link(problem.link)
    if problem.resident_nbytes < 0:
        raise ProblemError(f"resident_nbytes is {problem.resident_nbytes}: it cannot be negative.")
    for value in problem.values:
        if value.nbytes < 0:
            raise ProblemError(f"Value {value.name!r} has nbytes={value.nbytes}: negative.")
        if value.must_save and value.must_recompute:
            raise ProblemError(f"Value {value.name!r} must be saved and recomputed: drop one.")
    for op in problem.ops:
        if op.workspace_nbytes < 0 or not math.isfinite(op.time_us) or op.time_us < 0:
            raise ProblemError(
                f"Operation {op.name!r} has time_us={op.time_us}, workspace_nbytes="
                f"{op.workspace_nbytes}: both must be finite and not negative."
            )
    total_nbytes = problem.resident_nbytes + sum(value.nbytes for value in problem.values)
    total_nbytes += sum(op.workspace_nbytes for op in problem.ops)
    if total_nbytes > LARGEST_NBYTES:
        raise ProblemError(
            f"All sizes together are {total_nbytes} bytes, more than can be counted: at most "
            f"{LARGEST_NBYTES}. Are they given in bytes?"
        )


def _check_link(link: Link) -> None:
    for name in ("out_nbytes_per_us", "in_nbytes_per_us"):
        speed = getattr(link, name)
        if not (math.isfinite(speed) and speed > 0):
            raise ProblemError(f"The link has {name}={speed}: it must be finite and above 0.")
    for name in ("latency_us", "ask_us", "slowdown"):
        cost = getattr(link, name)
        if not (math.isfinite(cost) and cost >= 0):
            raise ProblemError(f"The link has {name}={cost}: it must be finite, not negative.")
    if not isinstance(link.is_pinned, bool):
        raise ProblemError(f"The link has is_pinned={link.is_pinned!r}: it is true or false.")


def _check_references(problem: Problem) -> None:
    for kind, names in (
        ("Value", [value.name for value in problem.values]),
        ("Operation", [op.name for op in problem.ops]),
        ("Output of two operations:", [name for op in problem.ops for name in op.outputs]),
    ):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise ProblemError(f"{kind} {name!r} appears twice: names must be unique.")
            seen.add(name)
    known = {value.name for value in problem.values}
    made = {name for op in problem.ops for name in op.outputs}
    for op in problem.ops:
        for name in (*op.inputs, *op.outputs):
            if name not in known:
                raise ProblemError(f"Operation {op.name!r} names the unknown value {name!r}.")
        if len(set(op.overwrites)) < len(op.overwrites):
            raise ProblemError(f"Operation {op.name!r} overwrites a value twice: {op.overwrites}.")
        for name in op.overwrites:
            if name not in op.inputs or op.phase is Phase.ANY:
                raise ProblemError(
                    f"Operation {op.name!r} overwrites {name!r}: it has to read that, and to have "
                    "a phase."
                )
    for name in problem.outputs:
        if name not in known:
            raise ProblemError(f"The outputs name the unknown value {name!r}.")
    for name in known - made:
        raise ProblemError(f"No operation makes value {name!r}.")


def _check_order(problem: Problem) -> None:
    made: set[str] = set()
    in_backward = False
    phases = {op.phase for op in problem.ops}
    if Phase.ANY in phases and len(phases) > 1:
        culprit = next(op for op in problem.ops if op.phase is not problem.ops[0].phase)
        raise ProblemError(
            f"Operation {culprit.name!r} has phase {culprit.phase.value!r} beside others of phase "
            f"{problem.ops[0].phase.value!r}: give every operation a phase, or none."
        )
    for op in problem.ops:
        if op.phase is Phase.BACKWARD:
            in_backward = True
        elif op.phase is Phase.FORWARD and in_backward:
            raise ProblemError(f"Forward operation {op.name!r} stands after a backward one.")
        for name in op.inputs:
            if name not in made:
                raise ProblemError(
                    f"Operation {op.name!r} reads {name!r} before it is made: the operations "
                    "form a cycle or are not in topological order."
                )
            producer_phase = problem.producer_of[name].phase
            if op.phase is not Phase.BACKWARD and producer_phase is Phase.BACKWARD:
                raise ProblemError(
                    f"Operation {op.name!r} ({op.phase}) reads {name!r}, made in the backward."
                )
            if op.phase is Phase.FORWARD and producer_phase is Phase.EITHER:
                raise ProblemError(
                    f"Forward operation {op.name!r} needs {name!r}, so its producer "
                    f"{problem.producer_of[name].name!r} must be a forward operation too."
                )
        made.update(op.outputs)


def _check_regions(problem: Problem) -> None:
    seen: set[str] = set()
    for region in problem.regions:
        if isinstance(region.count, bool) or not isinstance(region.count, int) or region.count < 1:
            raise ProblemError(
                f"Region {region.name!r} has count={region.count!r}: give 1 or more."
            )
        for name in (region.name, *region.ops):
            if name in seen:
                raise ProblemError(f"Region or operation {name!r} appears in the regions twice.")
            seen.add(name)
        for name in region.ops:
            if name not in problem.op_by_name:
                raise ProblemError(f"Region {region.name!r} names the unknown operation {name!r}.")
        inside = {name for op in region.ops for name in problem.op_by_name[op].outputs}
        for given, made in region.carried:
            if given in inside or given not in problem.value_by_name or made not in inside:
                raise ProblemError(
                    f"Region {region.name!r} carries ({given!r}, {made!r}): give a value made "
                    "outside, and the one of the region that takes its place."
                )
    if problem.regions:
        list(problem.in_runs([op.name for op in problem.ops]))
