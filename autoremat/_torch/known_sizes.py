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

_FACTS = (
    "guards",
    "axioms",
    "divisible",
    "replacements",
    "replacements_slocs",
    "var_to_range",
    "var_to_range_sloc",
)


class KnownSizes:
    """Of one compile, at the moment at which this was made."""

    def __init__(self, env: ShapeEnv) -> None:
        """Keep what is known now; the copies hold no tensor."""
        self._env = env
        self._facts = {name: copy.copy(getattr(env, name)) for name in _FACTS}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Nothing is known but that; what was found out since is known again afterwards.

        Raises:
            RuntimeError: at the end, if something was asked that is no guard: it would be lost.
        """
        env = self._env
        later = {name: getattr(env, name) for name in _FACTS}
        was_frozen, env.frozen = env.frozen, False  # else it would drop what is asked of it
        self._set({name: copy.copy(fact) for name, fact in self._facts.items()})
        try:
            yield
        finally:
            asked = [guard.expr for guard in env.guards]
            env.frozen = was_frozen
            self._set(later)
        known = {guard.expr for guard in env.guards}
        new = next((expression for expression in asked if expression not in known), None)
        if new is not None:
            raise RuntimeError(f"Compiled again, the graph depends on {new}, which is no guard.")

    def _set(self, facts: dict[str, Any]) -> None:
        env = self._env
        for name, fact in facts.items():
            setattr(env, name, fact)
        # What was concluded from other facts is concluded anew.
        env._prev_cache_key = env._get_key()
        env._version_counter += 1
        if hasattr(env, "_replacements_version_counter"):  # since torch 2.13, beside that
            env._replacements_version_counter += 1
