"""Plans that depend on no budget: simple strategies, priced min-cuts, chain plans.

Enters: a problem. Leaves: candidates for all budgets at once, and what budget-specific search
builds on (the chain tables).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoremat_solver.chains.blocks import Blocks, blocks_at, far_reaching, narrow_places
from autoremat_solver.chains.chain import ChainTable
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.front import Candidate, candidate, realised
from autoremat_solver.plans.heuristics import live_across, save_all, simple_recipes
from autoremat_solver.plans.realise import KEEP, Retention, realise
from autoremat_solver.program._pulp import solver_of
from autoremat_solver.program.formulation import Formulation

PRICES = (1e-7, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
SLOTS = 128
COARSE, FINE, COARSEST = 40, 96, 12  # blocks that the step is cut into, at most
TINY = 7
MOST_PLAIN_OPS = 4096
MOST_EXACT_CELLS = 1 << 18
PLANS_PER_TABLE = 24
LARGE = 3000  # operations from which the number of simulations falls as their cost rises


def simple_candidates(indexed: Indexed) -> Iterator[Candidate]:
    """The simple strategies, simulated."""
    for name, saved, retention in simple_recipes(indexed):
        yield candidate(indexed, saved, name, retention)
    if len(indexed.candidates) <= TINY:
        yield from _all_save_sets(indexed)


def _all_save_sets(indexed: Indexed) -> Iterator[Candidate]:
    """Every save set of a problem with a handful of values, with two retentions.

    Many lead to the same schedule: it is simulated once.
    """
    every = Retention(ephemeral=frozenset(indexed.candidates))
    seen: set[tuple[int, ...]] = set()
    for count in range(len(indexed.candidates) + 1):
        for chosen in map(frozenset, itertools.combinations(indexed.candidates, count)):
            for retention in (KEEP, every):
                steps = realise(indexed, chosen, retention)
                if tuple(steps) not in seen:
                    seen.add(tuple(steps))
                    yield realised(indexed, steps, chosen, "every save set", retention)


def priced_save_sets(formulation: Formulation) -> list[frozenset[int]]:
    """The best save set for each price of memory, the lowest price first.

    Without peak rows the program is a min-cut, so the relaxation is integral. Prices are in
    multiples of the total time per total bytes. The first is so low that it only breaks ties:
    that set is the fastest plan.
    """
    indexed = formulation.indexed
    linear = solver_of(formulation)
    base = list(formulation.program.costs)
    per_byte = sum(indexed.time_us) / max(1, sum(indexed.nbytes[v] for v in save_all(indexed)))
    found = []
    for price in PRICES:
        costs = list(base)
        for v, column in formulation.save.items():
            costs[column] += price * per_byte * indexed.nbytes[v]
        linear.set_costs(costs)
        answer = linear.relax()
        if answer is None:
            break
        found.append(formulation.saved_at(answer.values))
    return found


@dataclass(frozen=True)
class ChainPlans:
    """One cutting of the step into blocks, with its tables.

    Attributes:
        name: for the method of the candidates.
        blocks: the chain.
        tables: coarse first; a fine one for small memory may follow.
        is_plain: every block is one operation, all alike: the tables of `table_for` then hold the
            optimum of binomial checkpointing, and no other search finds better.
    """

    name: str
    blocks: Blocks
    tables: list[ChainTable]
    is_plain: bool

    def table_for(self, budget_nbytes: int) -> ChainTable | None:
        """The table that counts this budget's memory without rounding.

        None if that takes too many slots, as it does where sizes have no large common divisor.
        """
        blocks = self.blocks
        unit = _common_unit(blocks)
        nbytes = budget_nbytes - blocks.beside_nbytes
        slots = min(nbytes, blocks.ceiling_nbytes) // unit
        if nbytes < 0 or slots * len(blocks.cuts) > MOST_EXACT_CELLS:
            return None
        return ChainTable(blocks, unit, slots, nbytes - slots * unit)

    def candidates(self, indexed: Indexed) -> Iterator[Candidate]:
        """Plans spread over the memory sizes of the tables."""
        for table in self.tables:
            for memory in _spread(table.distinct_slots(), scaled(PLANS_PER_TABLE, indexed)):
                yield chain_candidate(indexed, table, memory, self.name)
                lean = table.recipe(memory, hold=False)
                yield candidate(indexed, lean.saved, self.name, lean.retention)


def _rounded_table(blocks: Blocks, ceiling_nbytes: int) -> ChainTable:
    """Memory up to the ceiling, in `SLOTS` parts."""
    return ChainTable(blocks, max(1.0, ceiling_nbytes / SLOTS), SLOTS)


def chain_candidate(indexed: Indexed, table: ChainTable, memory: int, name: str) -> Candidate:
    """The plan of a chain table for a memory size in slots."""
    recipe = table.recipe(memory)
    return candidate(indexed, recipe.saved, name, recipe.retention)


def _common_unit(blocks: Blocks) -> int:
    """The largest size of which all that may be stored are multiples."""
    sizes = [n for o in blocks.options for n in o.saved_nbytes]
    return max(1, math.gcd(*blocks.cut_nbytes, *sizes))


def plain_chains(indexed: Indexed) -> Iterator[ChainPlans]:
    """The cutting between all operations, if they are a chain of equal ones.

    A first value that cannot be made again is saved beside the chain; where the one after it
    serves as well, it need not be.
    """
    fixed = frozenset(v for v in indexed.candidates if indexed.forced[v])
    across = live_across(indexed)
    for ambient in dict.fromkeys((fixed, frozenset[int]())):
        places = narrow_places(indexed, ambient, MOST_PLAIN_OPS)
        if not places or len(places) < len(indexed.forward_order) - 2:
            continue
        sizes = {sum(indexed.nbytes[v] for v in across[p] if v not in ambient) for p in places}
        times = {indexed.time_us[op] for op in indexed.forward_order[:-1]}
        if len(sizes) == len(times) == 1:
            yield _chain(indexed, places, ambient, [save_all(indexed)], is_plain=True)


def chain_plans(indexed: Indexed, save_sets: list[frozenset[int]]) -> Iterator[ChainPlans]:
    """Cuttings of the step: fine and coarse, with and without saving far-reaching values."""
    far = far_reaching(indexed, 0.25)
    done: set[tuple[tuple[int, ...], frozenset[int]]] = set()
    for limit, ambient in (
        (COARSE, far),
        (FINE, far),
        (COARSE, frozenset[int]()),
        (COARSEST, far),
    ):
        places = narrow_places(indexed, ambient, limit)
        key = (tuple(places), ambient)
        if not places or key in done:
            continue
        done.add(key)
        everything = save_all(indexed)
        options = [everything, *save_sets] if len(places) <= 64 else [everything, *save_sets[::3]]
        yield _chain(indexed, places, ambient, options)


def _chain(
    indexed: Indexed,
    places: list[int],
    ambient: frozenset[int],
    options: list[frozenset[int]],
    *,
    is_plain: bool = False,
) -> ChainPlans:
    blocks = blocks_at(indexed, places, ambient, options)
    name = f"chain of {len(blocks.cuts)} blocks"
    if is_plain:
        return ChainPlans(name, blocks, [], is_plain)
    tables = [_rounded_table(blocks, blocks.ceiling_nbytes)]
    first = tables[0].smallest_slot()
    if first < SLOTS // 3:
        ceiling = int(tables[0].slot_nbytes * max(2, first) * 3)
        tables.append(_rounded_table(blocks, ceiling))
    return ChainPlans(name, blocks, tables, is_plain)


def single_level_candidates(indexed: Indexed, saved: frozenset[int]) -> Iterator[Candidate]:
    """One copy of each recomputed value, and one per consumer where that takes one operation."""
    yield candidate(indexed, saved, "min-cut", KEEP)
    shallow = frozenset(
        v
        for v in indexed.candidates
        if v not in saved and saved.issuperset(indexed.inputs[indexed.producer[v]])
    )
    if shallow:
        yield candidate(
            indexed, saved, "min-cut, copies per consumer", Retention(ephemeral=shallow)
        )


def scaled(count: int, indexed: Indexed) -> int:
    """How many simulations a problem gets where a small one gets `count`: a third at least."""
    return max(count // 3, min(count, count * LARGE // max(1, len(indexed.phase))))


def _spread(slots: list[int], count: int) -> list[int]:
    """At most `count` of the slots, the smallest ones denser."""
    if len(slots) <= count:
        return slots
    last = len(slots) - 1
    return sorted({slots[round(last * (i / (count - 1)) ** 2)] for i in range(count)})
