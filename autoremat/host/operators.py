"""The operators of a plan that sends values away: `autoremat::offload` and those that follow it.

Enters: tensors on the CPU and a folder. Leaves: copies in files, and copies of these in memory.
Guarantees: copies each way are made by one thread beside the one that computes, in the order in
which they are asked for; what a copy makes is whole once it is waited for. They mean what the
solver's steps mean:

    host = offload(x, folder)     OFFLOAD: begins a copy of x; x has to stay meanwhile
    sent = offloaded(host, x)     RELEASE: waits for it, and is the copy; x need not stay any longer
    y = reload(sent)              RELOAD: begins a copy back, into new memory
    x = reloaded(y, sent)         the first read: waits for it, and is y
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from autoremat.host.disk import forget_files, like

_library = torch.library.Library("autoremat", "DEF")
for _schema in (
    "offload(Tensor x, str folder) -> Tensor",
    "offloaded(Tensor(a) host, Tensor x) -> Tensor(a)",
    "reload(Tensor host) -> Tensor",
    "reloaded(Tensor(a) x, Tensor host) -> Tensor(a)",
):  # a copy lies as what it is a copy of, however a compiler has laid that out
    _library.define(_schema, tags=torch.Tag.flexible_layout)

_under_way: dict[int, Future[None]] = {}  # copies that nobody waited for, by where they go


@functools.cache
def _engine(way: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"autoremat-{way}")


def _forget() -> None:
    """In a child of this process there are no threads that copy, copies under way, nor files."""
    _engine.cache_clear()
    forget_files()
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _copy(pair: list[Tensor]) -> None:
    """Returns nothing, and holds nothing once it is done: what nobody waits for is not held."""
    source, to = pair.pop(), pair.pop()
    with torch.no_grad():
        to.copy_(source)


def _begin(way: str, to: Tensor, source: Tensor) -> Tensor:
    # By `data`: else autograd, which may save the copy before it is whole, takes it for modified.
    _under_way[to.data_ptr()] = _engine(way).submit(_copy, [to.data, source])
    return to


def _wait(copy: Tensor, source: Tensor) -> Tensor:
    """The copy, once it is there; whoever asks a second time finds that it is."""
    begun = _under_way.pop(copy.data_ptr(), None)
    if begun is not None:
        begun.result()
    return copy


def _offload(x: Tensor, folder: str) -> Tensor:
    return _begin("out", like(x, folder), x)


def _reload(host: Tensor) -> Tensor:
    return _begin("in", torch.empty_strided(host.shape, host.stride(), dtype=host.dtype), host)


def _same(x: Tensor, *_others: object) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


_library.impl("offload", _offload, "CPU")
_library.impl("offloaded", _wait, "CPU")
_library.impl("reload", _reload, "CPU")
_library.impl("reloaded", _wait, "CPU")
for _made in ("offload", "reload"):
    torch.library.register_fake(f"autoremat::{_made}", _same, lib=_library)
for _given in ("offloaded", "reloaded"):
    torch.library.register_fake(f"autoremat::{_given}", lambda copy, source: copy, lib=_library)

OFFLOAD = torch.ops.autoremat.offload.default
OFFLOADED = torch.ops.autoremat.offloaded.default
RELOAD = torch.ops.autoremat.reload.default
RELOADED = torch.ops.autoremat.reloaded.default
COPIES = frozenset({OFFLOAD, OFFLOADED, RELOAD, RELOADED})
"""Each gives what its first argument holds."""
WAITS = frozenset({OFFLOADED, RELOADED})
"""Each is its first argument, and has no memory of its own."""
