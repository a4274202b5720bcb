"""What a compile knows of its symbolic sizes, as it was at one moment.

Enters: the `ShapeEnv` of a compile. Leaves: a context in which it knows what it knew then: tracing
leaves out what is known to do nothing, a slice that ends beyond any size, so a graph that is traced
again with more known than before is another graph.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["KnownSizes"]

# What `ShapeEnv` concludes from. Deferred assertions and hints are of the graph, and stay.
_BY_SYMBOL = ("replacements", "replacements_slocs", "var_to_range", "var_to_range_sloc")
_FACTS = ("guards", "axioms", "divisible", *_BY_SYMBOL)

Facts = dict[str, Any]


class KnownSizes:
    """Of one compile, at the moment at which this was made."""

    def __init__(self, env: ShapeEnv) -> None:
        """Keep what is known now; the copies hold no tensor."""
        self._env = env
        self._facts = {name: copy.copy(fact) for name, fact in self._now.items()}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Of the sizes that there were, nothing is known but that; afterwards all is, as before.

        Raises:
            RuntimeError: at the end, if something was asked that is no guard, nor follows from
                those that there are: it would be lost.
        """
        env, later = self._env, self._now
        was_frozen, env.frozen = env.frozen, False  # else it would drop what is asked of it
        self._set(_with_others(self._facts, later))
        try:
            yield
        finally:
            within = self._now
            env.frozen = was_frozen
            self._set(_with_others(later, within))
        known = {guard.expr for guard in env.guards}
        for guard in within["guards"]:
            if guard.expr not in known and not env._maybe_evaluate_static(guard.expr):
                raise RuntimeError(
                    f"Compiled again, the graph depends on {guard.expr}, which is no guard."
                )

    @property
    def _now(self) -> Facts:
        return {name: getattr(self._env, name) for name in _FACTS}

    def _set(self, facts: Facts) -> None:
        env = self._env
        for name, fact in facts.items():
            setattr(env, name, fact)
        # What was concluded from other facts is concluded anew.
        env._prev_cache_key = env._get_key()
        env._version_counter += 1
        env._resimplify_floor_div_axioms = True
        if hasattr(env, "_replacements_version_counter"):  # since torch 2.13, beside that
            env._replacements_version_counter += 1


def _with_others(facts: Facts, more: Facts) -> Facts:
    """Copies of facts, with what others say of symbols that these do not know."""
    known = facts["var_to_range"]
    found = {name: copy.copy(fact) for name, fact in facts.items()}
    for name in _BY_SYMBOL:
        found[name].update((key, fact) for key, fact in more[name].items() if key not in known)
    return found
