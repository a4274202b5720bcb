"""Branching: the columns of the interval program are 0 or 1 in the point of every plan.

Enters: a `Relaxation` and its optimum. Leaves: a bound. A leaf of the tree has some
columns fixed; every plan lies in one of the leaves, so the least of their bounds holds for all. The
leaf that bounds least is split in two at the column that promises to raise both halves most, by
what such columns raised so far. Counted: same program, same tree.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.program._highs import Fixed, Relaxation, Relaxed

TRIED = 6  # columns of a leaf that are split to see what they raise
KNOWN = 2  # splits after which a column's promise is believed
WHOLE = 1e-5  # a column this close to 0 or 1 is not split
MOST_RAISED = 0.05  # of the bound, that one split counts for
LESS = 0.1  # what the better half counts for, beside the worse one


@dataclass(order=True)
class _Leaf:
    """A part of all points."""

    bound: float
    number: int
    fixed: Fixed = field(compare=False)
    answer: Relaxed = field(compare=False)


class Tree:
    """Leaves that hold every plan.

    Args:
        relaxation: the program.
        root: its optimum.
        enough: bounds above it are not raised further.
    """

    def __init__(self, relaxation: Relaxation, root: Relaxed, enough: float) -> None:
        """One leaf, with nothing fixed."""
        self._relaxation, self._enough = relaxation, enough
        self._number = 0
        self._leaves = [_Leaf(root.bound, 0, {}, root)]
        self._closed = math.inf
        self._raised = np.zeros((2, len(root.values)))
        self._splits = np.zeros((2, len(root.values)))

    def grow(self) -> float:
        """Split until the work is spent, or the bound is enough; the bound."""
        while self._leaves and self._leaves[0].bound < self._closed:
            if self._relaxation.work <= 0:
                break
            self._split(heapq.heappop(self._leaves))
        least = self._leaves[0].bound if self._leaves else math.inf
        return min(least, self._closed)

    def _split(self, leaf: _Leaf) -> None:
        halves = self._best_halves(leaf)
        for half in halves or ():
            self._add(leaf, half)
        if halves is None:
            self._closed = min(self._closed, leaf.bound)

    def _add(self, above: _Leaf, half: tuple[Fixed, Relaxed]) -> None:
        fixed, answer = half
        bound = max(above.bound, answer.bound)
        if not answer.solved or bound >= self._enough:
            self._closed = min(self._closed, bound)
            return
        self._number += 1
        heapq.heappush(self._leaves, _Leaf(bound, self._number, fixed, answer))

    def _best_halves(self, leaf: _Leaf) -> list[tuple[Fixed, Relaxed]] | None:
        """The halves of the column that raises both most; None if there is no column, or work."""
        best: tuple[float, list[tuple[Fixed, Relaxed]]] | None = None
        for column in self._promising(leaf):
            halves = []
            for side in (0, 1):
                fixed = {**leaf.fixed, column: float(side)}
                halves.append((fixed, self._relaxation.run(fixed, leaf.answer.basis)))
            if self._relaxation.work <= 0:
                break
            raised = self._note(leaf, column, [answer.bound for _, answer in halves])
            score = min(raised) + LESS * max(raised)
            if best is None or score > best[0]:
                best = score, halves
        return None if best is None else best[1]

    def _note(self, leaf: _Leaf, column: int, bounds: list[float]) -> list[float]:
        """By how much each half is above the leaf, from now on expected of the column."""
        at = leaf.answer.values[column]
        most = MOST_RAISED * abs(leaf.bound)
        raised = [min(max(0.0, bound - leaf.bound), most) for bound in bounds]
        self._raised[:, column] += raised[0] / at, raised[1] / (1 - at)
        self._splits[:, column] += 1
        return raised

    def _promising(self, leaf: _Leaf) -> list[int]:
        """The column that promises most, and the best ones of which little is known."""
        x = np.array(leaf.answer.values)
        broken = np.flatnonzero(np.minimum(x, 1 - x) > WHOLE)
        promise = self._promise()[:, broken] * (x[broken], 1 - x[broken])
        score = promise.min(axis=0) + LESS * promise.max(axis=0)
        best: list[int] = broken[np.argsort(-score, kind="stable")].tolist()
        unknown = [column for column in best if self._splits[0, column] < KNOWN]
        return list(dict.fromkeys([*best[:1], *unknown[:TRIED]]))

    def _promise(self) -> NDArray[np.float64]:
        """Per side and column, what a whole step raises; the mean where nothing is known."""
        total = self._splits.sum()
        if not total:
            return 1.0 + np.broadcast_to(self._relaxation.costs, self._raised.shape)
        mean = self._raised.sum() / total
        return np.where(self._splits > 0, self._raised / np.maximum(self._splits, 1), mean)
