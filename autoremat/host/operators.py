"""The operators of a plan that sends values away: `autoremat::offload` and those that follow it.

Enters: tensors, and the folder of a disk, or "" for the memory of the machine. Leaves: copies
there, and copies of these on the device. Guarantees: copies each way are made one after the other,
beside what computes, in the order in which they are asked for; what a copy makes is whole once it
is waited for. They mean what the solver's steps mean:

    host = offload(x, folder)     OFFLOAD: begins a copy of x; x has to stay meanwhile
    sent = offloaded(host, x)     RELEASE: waits for it, and is the copy; x need not stay any longer
    y = reload(sent, device)      RELOAD: begins a copy back, into new memory
    x = reloaded(y, sent)         the first read: waits for it, and is y

Of a GPU it is the stream that computes which waits, not the process.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from autoremat import _torch
from autoremat.host import streams, threads
from autoremat.host.disk import forget_files, like
from autoremat.host.pinned import pinned_like

_library = torch.library.Library("autoremat", "DEF")
for _schema in (
    "offload(Tensor x, str folder) -> Tensor",
    "offloaded(Tensor(a) host, Tensor x) -> Tensor(a)",
    "reload(Tensor host, Device device) -> Tensor",
    "reloaded(Tensor(a) x, Tensor host) -> Tensor(a)",
):  # a copy lies as what it is a copy of, however a compiler has laid that out
    _library.define(_schema, tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe))

_under_way: dict[int, threads.Copy | streams.Copy] = {}  # nobody waited yet, by where they go


def _forget() -> None:
    """In a child of this process there are no threads that copy, copies under way, nor files."""
    threads.forget()
    forget_files()
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _begin(way: str, to: Tensor, source: Tensor) -> Tensor:
    """Begin a copy "out" or "in"."""
    # By `data`: else autograd, which may save the copy before it is whole, takes it for modified.
    on_gpu = to.is_cuda or source.is_cuda
    begin = streams.begin if on_gpu else threads.begin
    copy = begin(way, to.data, source)
    if way == "out" and _torch.saved_are_hooked():
        copy.finish()  # a hook may read what is saved at once, and give back something else
    else:
        _under_way[to.data_ptr()] = copy
    return to


def _wait(copy: Tensor, _source: Tensor) -> Tensor:
    """The copy, once it is there; whoever asks a second time finds that it is."""
    begun = _under_way.pop(copy.data_ptr(), None)
    if begun is not None:
        begun.wait()
    return copy


def _offload(x: Tensor, folder: str) -> Tensor:
    return _begin("out", like(x, folder) if folder else pinned_like(x), x)


def _reload(host: Tensor, device: torch.device) -> Tensor:
    to = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return _begin("in", to, host)


def _fake_offload(x: Tensor, _folder: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _fake_reload(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


for _device in ("CPU", "CUDA"):  # that of a tensor among the arguments
    _library.impl("offload", _offload, _device)
    _library.impl("offloaded", _wait, _device)
    _library.impl("reload", _reload, _device)
    _library.impl("reloaded", _wait, _device)
torch.library.register_fake("autoremat::offload", _fake_offload, lib=_library)
torch.library.register_fake("autoremat::reload", _fake_reload, lib=_library)
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
