"""Contents of tensors that follow from sizes alone, for a step whose tensors have none.

Enters: operators on fake tensors. Leaves: the contents of positions, of default masks and of what
is computed from them, to code that asks for them in an `if`. Guarantees: what depends on a
parameter, on the batch or on chance has no contents, and asking for them is the error that it was.

Models ask such things before they decide what to compute. transformers looks whether positions are
consecutive, and makes no mask if they are; of a tensor that is fake it does not ask, and makes one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autoremat import _torch
from autoremat.memory.storage_sizes import storage_identities

LARGEST_NUMEL = 1 << 18  # of a tensor whose contents are kept: masks and positions, not activations

_ASK = frozenset([torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default])
_MADE = frozenset(
    ["arange", "eye", "full", "ones", "scalar_tensor", "tril_indices", "triu_indices", "zeros"]
)
_MADE_LIKE = frozenset(
    ["full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"]
)


class KnownContents(_torch.TorchDispatchMode):
    """Follows contents while operators run on fake tensors."""

    def __init__(self) -> None:
        """Of nothing yet."""
        super().__init__()
        self._real: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()

    def __contains__(self, tensor: object) -> bool:
        """Whether a tensor's contents are known."""
        return tensor in self._real

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator, answer it if it asks for contents, and follow them."""
        given = (args, kwargs or {})
        if func in _ASK and self._knows(given):
            return self._really(func, given)
        result = func(*args, **given[1])
        if not isinstance(func, _torch.OpOverload) or _torch.is_mutable(func):
            self._forget(_torch.tensor_leaves(given))
        elif func.namespace == "aten":  # another's may do whatever it likes
            self._follow(func, given, result)
        return result

    def _follow(self, operator: Any, given: tuple[tuple, dict], result: Any) -> None:
        made = _torch.tensor_leaves(result)
        is_small = bool(made) and all(tensor.numel() <= LARGEST_NUMEL for tensor in made)
        if not is_small or not self._has_contents(operator, given):
            return
        with contextlib.suppress(Exception):  # what cannot be computed here is not known
            found = _torch.tensor_leaves(self._really(operator, given))
            pairs = zip(made, found, strict=True)
            self._real.update((one, real) for one, real in pairs if _is_alike(one, real))

    def _has_contents(self, operator: Any, given: tuple[tuple, dict]) -> bool:
        """Whether what an operator returns follows from what is known."""
        name = str(operator).split(".")[1]
        is_drawn = torch.Tag.nondeterministic_seeded in operator.tags or "empty" in name
        return name in _MADE | _MADE_LIKE or (not is_drawn and self._knows(given))

    def _knows(self, given: tuple[tuple, dict]) -> bool:
        tensors = _torch.tensor_leaves(given)
        return bool(tensors) and all(tensor in self for tensor in tensors)

    def _really(self, operator: Any, given: tuple[tuple, dict]) -> Any:
        with _torch.real_execution():
            args, kwargs = _torch.tree_map(self._stands_for, given)
            return operator(*args, **kwargs)

    def _stands_for(self, value: Any) -> Any:
        """What is given to an operator that really runs, on the CPU."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if value in self:
            return self._real[value]
        # Of what is made like another one the layout is asked, and the type.
        if value.numel() <= LARGEST_NUMEL:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return torch.empty((), dtype=value.dtype).expand(value.shape)

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        written = storage_identities(tensors)
        stale = [
            known for known in self._real if not written.isdisjoint(storage_identities([known]))
        ]
        for tensor in stale:
            del self._real[tensor]


def _is_alike(one: torch.Tensor, real: torch.Tensor) -> bool:
    """Whether a fake and a real tensor lie alike."""
    found, wanted = ((t.shape, t.stride(), t.dtype) for t in (real, one))
    return found == wanted


@contextlib.contextmanager
def contents_followed() -> Iterator[KnownContents]:
    """Operators inside are followed, and libraries may ask for what is known."""
    known = KnownContents()
    with _asked_by_transformers(known), known:
        yield known


@contextlib.contextmanager
def _asked_by_transformers(known: KnownContents) -> Iterator[None]:
    """For transformers a tensor is fake only if its contents are not known."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    is_fake: Callable[[Any], bool] | None = getattr(library, "is_fake_tensor", None)
    if is_fake is None:
        yield
        return
    library.is_fake_tensor = lambda tensor: tensor not in known and is_fake(tensor)
    try:
        yield
    finally:
        library.is_fake_tensor = is_fake
