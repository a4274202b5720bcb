"""Private names of AOTAutograd's cache, whose key says nothing of what is known of a plan.

Enters: a compile. Leaves: which forward and backward the cache had for it; or which were stored
for it, as late as that may be. Guarantees: what nobody takes responsibility for is not stored.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["CodeCache", "asking_code_cache", "code_can_be_cached"]

_NAMESPACES = ("aten", "prims", "prim")  # of torch's own operators


class CodeCache:
    """What one compile has asked of the cache.

    Attributes:
        asked: how often.
        found: names what it had, question included; "" if nothing.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.asked = 0
        self.found = ""
        self._is_open = True
        self._waiting: list[tuple[Callable[[], None], str]] = []
        self._note: Callable[[str], None] | None = None

    def forget(self) -> None:
        """Throw away what was found on this machine."""
        key = self.found.partition(" ")[0]
        shutil.rmtree(AOTAutogradCache._get_tmp_dir_for_key(key), ignore_errors=True)

    def close(self, note: Callable[[str], None] | None) -> None:
        """The compile is over.

        Args:
            note: called with the name of what is stored for it; without it, nothing is.
        """
        self._is_open, self._note = False, note
        for store, name in self._waiting:
            self._store(store, name)
        self._waiting.clear()

    def _store(self, store: Callable[[], None], name: str) -> None:
        if self._is_open:
            self._waiting.append((store, name))
        elif self._note is not None and name:
            store()
            self._note(name)


_asking: ContextVar[CodeCache | None] = ContextVar("asking code cache", default=None)
_by_key: dict[str, CodeCache] = {}  # the latest compile that asked for each key


def code_can_be_cached(module: fx.GraphModule) -> bool:
    """Whether the cache is on, stores forward and backward by themselves, and its key tells all.

    What a graph of Dynamo's computes is not told of operators that are not torch's own: their
    autograd formulas and their fakes are code of others.
    """
    is_on = config.enable_autograd_cache and not autograd_cache.should_bundle_autograd_cache()
    bodies = (body for body in module.modules() if isinstance(body, fx.GraphModule))
    targets = (node.target for body in bodies for node in body.graph.nodes)
    return bool(is_on) and all(map(_is_torchs_own, targets))


def _is_torchs_own(target: Any) -> bool:
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] in _NAMESPACES
    return not isinstance(target, OpOverload) or target.namespace in _NAMESPACES


@contextlib.contextmanager
def asking_code_cache() -> Iterator[CodeCache]:
    """Tell what the compile within asks of the cache; `close` it afterwards."""
    _install()
    found = CodeCache()
    token = _asking.set(found)
    try:
        yield found
    except BaseException:
        found.close(None)
        raise
    finally:
        _asking.reset(token)


@functools.cache
def _install() -> None:
    """Let the cache tell; for the rest of the process."""
    find, load, save = (
        AOTAutogradCache._lookup,
        AOTAutogradCache.try_load,
        AOTAutogradCache.save,
    )

    @functools.wraps(find)
    def _lookup(key: str, *rest: Any, **keywords: Any) -> Any:
        result, asking = find(key, *rest, **keywords), _asking.get()
        if asking is not None:
            asking.asked += 1
            asking.found = "" if result is None else _name(key, result[0])
            _by_key[key] = asking
        return result

    @functools.wraps(load)
    def try_load(*given: Any, **keywords: Any) -> Any:
        result, asking = load(*given, **keywords), _asking.get()
        compiled = result[0] if isinstance(result, tuple) else result
        if asking is not None and compiled is None:  # also where only an entry was found
            asking.found = ""
        return result

    @functools.wraps(save)
    def _save(key: str, entry: Any, *rest: Any, **keywords: Any) -> None:
        asking = _by_key.get(key)
        if asking is None:
            save(key, entry, *rest, **keywords)
        else:
            asking._store(lambda: save(key, entry, *rest, **keywords), _name(key, entry))

    AOTAutogradCache._lookup = staticmethod(_lookup)  # type: ignore[method-assign]
    AOTAutogradCache.try_load = staticmethod(try_load)  # type: ignore[method-assign]
    AOTAutogradCache.save = staticmethod(_save)  # type: ignore[method-assign]


def _name(key: str, entry: Any) -> str:
    """Of an entry: its key, and Inductor's of its forward and backward; "" if it has none."""
    parts = [part for part in (entry.compiled_fw, entry.compiled_bw) if part is not None]
    found = [getattr(part, "fx_graph_cache_info", ("",))[0] for part in parts]
    return " ".join([key, *found]) if all(found) else ""
