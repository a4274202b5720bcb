"""Of which block of a model a graph is, and how many blocks are like it.

Enters: the arguments that a graph runs with, and the modules that its step trains. Leaves: what
the block has in common with others that may run the same graph, and how many there are. Guarantees:
holds no module and no tensor; the number is that of the modules as they are now.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from autoremat.session.members import kind_of


class _Block(NamedTuple):
    """What blocks have in common that run one graph.

    Attributes:
        kind: of the smallest module that has all parameters which the graph reads.
        names: of these parameters, in it.
    """

    kind: Hashable
    names: frozenset[str]


class _Counted(NamedTuple):
    """How many blocks of a kind there were.

    Attributes:
        by_root: in each of the trained modules that has any; what several share, in the first.
        around: modules that have some among their parts.
        looks: children of each of these then.
    """

    by_root: Mapping[int, int]
    around: Sequence[weakref.ref[nn.Module]]
    looks: Sequence[Sequence[int]]


@dataclass(eq=False)
class Blocks:
    """Of the modules that one session's steps train.

    Attributes:
        modules: those that are there now, parts of others left out.
        kinds: by graph that has run, its block; None if nobody knows.
    """

    modules: Callable[[], Sequence[nn.Module]]
    kinds: dict[str, Hashable | None]
    _counts: dict[_Block, _Counted] = field(default_factory=dict)
    _read: Mapping[int, Set[Hashable]] | None = None  # see `_parts_read`
    _owners: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    _ran: set[int] = field(default_factory=set)  # modules, in the step that is there
    _together: list[set[int]] = field(default_factory=list)  # modules, as steps have run them

    def call_begins(self, *, goes_on: bool) -> None:
        """Modules that run now are of another step than those before, unless that goes on."""
        if not goes_on:
            self._ran.clear()

    def note_run(self, graph: str, args: Sequence[Any]) -> None:
        """A graph runs with these arguments: its module is of the step that is there."""
        if graph not in self.kinds:
            self.kinds[graph] = self.block_of(args)
            self._counts.clear()
            self._read = None
        count = len(self.modules())
        if count < 2 or any(len(group) >= count for group in self._together):
            return
        root = self._root_of(args)
        if root is None or root in self._ran:
            return
        self._ran.add(root)
        near = [group for group in self._together if not group.isdisjoint(self._ran)]
        self._together = [group for group in self._together if group not in near]
        self._together.append(self._ran.union(*near))

    def _root_of(self, args: Iterable[Any]) -> int | None:
        """The module whose parameters are among these."""
        first = next((a for a in args if isinstance(a, nn.Parameter) and a.requires_grad), None)
        if first is None:
            return None
        reference, root = self._owners.get(id(first), (None, 0))
        if reference is None or reference() is not first:
            pairs = ((p, id(m)) for m in self.modules() for p in m.parameters())
            known = {key: owner for key, owner in self._owners.items() if owner[0]() is not None}
            self._owners = known | {id(p): (weakref.ref(p), root) for p, root in pairs}
            reference, root = self._owners.get(id(first), (None, 0))
        return None if reference is None else root

    def block_of(self, args: Iterable[Any]) -> Hashable | None:
        """What a graph that runs with these arguments is of; None if no module has what it reads.

        It may be all of one.
        """
        read = {id(a) for a in args if isinstance(a, nn.Parameter) and a.requires_grad}
        found = next((m for m in self.modules() if read <= _parameters(m).keys()), None)
        if found is None or not read:
            return None
        inner: nn.Module | None = found
        while inner is not None:
            found = inner
            inner = next((m for m in found.children() if read <= _parameters(m).keys()), None)
        names = _parameters(found)
        return _Block(kind_of(found), frozenset(names[key] for key in read))

    def has_alike(self, module: nn.Module) -> bool:
        """Whether a graph has run that a module would run, which is a part of ours."""
        kinds = {block.kind for block in self.kinds.values() if isinstance(block, _Block)}
        is_ours = any(part is module for root in self.modules() for part in root.modules())
        return is_ours and any(_is_of(module, kind) for kind in kinds)

    def count(self, block: Hashable) -> int:
        """How many blocks are alike that may run in one step; 0 if nobody knows.

        That is all of them, but for parts of blocks whose graphs read what these would: they run
        within those. It is those of one module where each that has any runs by itself.
        """
        if not isinstance(block, _Block):
            return 0
        found = self._counted(block).by_root
        groups = [group & found.keys() for group in self._together]
        are_apart = sum(map(len, groups)) == len(found) and max(map(len, groups), default=0) == 1
        return max(found.values()) if are_apart else sum(found.values())

    def _counted(self, block: _Block) -> _Counted:
        roots = self.modules()
        known = self._counts.get(block)
        if known is None or known.looks != _looks(roots, known.around):
            by_root: dict[int, int] = {}
            around: list[nn.Module] = []
            if self._read is None or known is not None:
                self._read = self._parts_read()
            read = self._read
            seen: set[int] = set()
            for root in roots:
                found = _those_in(root, block.kind, seen, around)
                count = sum(not read.get(id(module), set()) - {block.kind} for module in found)
                by_root |= {id(root): count} if count else {}
            references = list(map(weakref.ref, around))
            known = _Counted(by_root, references, _looks(roots, references))
            self._counts[block] = known
        return known

    def _parts_read(self) -> Mapping[int, Set[Hashable]]:
        """By module, the kinds of blocks around it that read all that it has to be trained."""
        names: defaultdict[Hashable, list[frozenset[str]]] = defaultdict(list)
        for block in set(self.kinds.values()):
            if isinstance(block, _Block):
                names[block.kind].append(block.names)
        found: defaultdict[int, set[Hashable]] = defaultdict(set)
        types = {kind[0] for kind in names if isinstance(kind, tuple)}
        modules = (m for root in self.modules() for m in root.modules() if type(m) in types)
        for module in modules:
            kind = kind_of(module)
            for prefix, part in module.named_modules() if kind in names else ():
                trained = _trained_names(part, prefix)
                if part is not module and any(read >= trained for read in names[kind]):
                    found[id(part)].add(kind)
        return found


def _those_in(
    module: nn.Module, kind: Hashable, seen: set[int], around: list[nn.Module]
) -> list[nn.Module]:
    """The parts of a module, itself included, that are of a kind and not `seen` yet.

    What has some of them is added to those that are `around` them.
    """
    if id(module) in seen:
        return []
    seen.add(id(module))
    inner = [part for child in module.children() for part in _those_in(child, kind, seen, around)]
    if inner:
        around.append(module)
    return [*inner, module] if _is_of(module, kind) else inner


def _looks(roots: Sequence[nn.Module], around: Sequence[weakref.ref[nn.Module]]) -> list[list[int]]:
    """What tells that modules have other parts than before, without a look at all of these."""
    living = (reference() for reference in around)
    return [
        list(map(id, roots)),
        *([] if one is None else list(map(id, one.children())) for one in living),
    ]


def _trained_names(module: nn.Module, prefix: str) -> set[str]:
    return {n for n, p in module.named_parameters(prefix) if p.requires_grad}


def _parameters(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _is_of(module: nn.Module, kind: Hashable) -> bool:
    assert isinstance(kind, tuple)
    return type(module) is kind[0] and kind_of(module) == kind
