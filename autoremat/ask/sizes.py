"""Which sizes of a model's inputs vary, as users say it: words, or an input and its dimensions.

Enters: `sizes=` as it was given, and the arguments of a call. Leaves: by tensor and dimension, the
`Extent` that it may have. Guarantees: what is said of an input by its name comes before what is
said of all; nothing here knows a graph.

Two ways to say it, since there are two kinds of users. Most have one or two sizes that all inputs
share, the batch and the sequence, and each of their inputs has these in the same dimensions: a word
is enough, `{"batch": (1, 32), "sequence": (128, 4096)}`. All else (images, a table beside the
tokens, a decoder's own length) has no word that everybody would understand the same: there an input
is named as the model's `forward` or the batch's dict names it, `{"images": {2: (224, 384)}}`. Who
has `dynamic_shapes` for `torch.export` has said it already, and gives these.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

WORDS = {"batch": 0, "sequence": 1}  # and the dimension of every input that each of them means
SEEN = "seen"
ON_LARGER = ("raise", "plan")

_EXAMPLES = (
    'Accepted: {"batch": (1, 32), "sequence": (128, 4096)}, which are the first two dimensions of '
    'every input; {"images": {2: (224, 384)}}, an input by its name and a dimension of it; '
    '{"images": {2: torch.export.Dim("height", min=224, max=384)}}, as torch.export takes it; or '
    '"seen".'
)
_WRITTEN = re.compile(r"(\w+?)(?:\.(\d+))?=(\d+):(\d+)")


@dataclass(frozen=True)
class Extent:
    """What a dimension may be.

    Attributes:
        name: "sequence", or "images.size(2)".
        low: the smallest that was said.
        high: the largest.
    """

    name: str
    low: int
    high: int


class Varying(NamedTuple):
    """A dimension of a tensor that a call is given.

    Attributes:
        tensor: the tensor.
        dimension: its number, from 0 on.
        name: of the size; sizes of one name have one range.
        low: the smallest that was said; 1 where none was.
        high: the largest, or None where it is not known yet.
    """

    tensor: torch.Tensor
    dimension: int
    name: str
    low: int
    high: int | None

    @property
    def size(self) -> int:
        """What it is in the call."""
        return int(self.tensor.shape[self.dimension])


@dataclass(frozen=True)
class Sizes:
    """What was said of the sizes that vary.

    Attributes:
        words: by dimension, the extent that it has in every input.
        inputs: the name of an input, a dimension of it, and its extent.
        is_seen: whether ranges are those of what was seen, rounded up.
        on_larger: "raise" or "plan".
    """

    words: tuple[tuple[int, Extent], ...] = ()
    inputs: tuple[tuple[str, int, Extent], ...] = ()
    is_seen: bool = False
    on_larger: str = "raise"

    @property
    def given(self) -> bool:
        """Whether anything was said."""
        return bool(self.words or self.inputs or self.is_seen)

    def asked(self) -> str:
        """In words, to be compared."""
        return repr(self) if self.given else "None"

    def among(
        self, forward: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> list[Varying]:
        """The dimensions that vary of what a call is given.

        Args:
            forward: the method of the model's, without the model itself.
            args: of the call.
            keywords: of the call.

        Raises:
            ValueError: if an input that was named has not so many dimensions.
        """
        found: dict[tuple[int, int], Varying] = {}
        for number, (names, tensor) in enumerate(_named(forward, args, keywords)):
            for dimension, extent in self._of(names, tensor):
                key = (id(tensor), dimension)
                found.setdefault(
                    key, Varying(tensor, dimension, extent.name, extent.low, extent.high)
                )
            for dimension in range(tensor.dim()) if self.is_seen else ():
                name = f"{names[-1] if names else number}.size({dimension})"
                found[id(tensor), dimension] = Varying(tensor, dimension, name, 1, None)
        return list(found.values())

    def unmet(
        self, forward: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> str | None:
        """The name of an input that a call does not have; None if it has all."""
        names = {name for names, _ in _named(forward, args, keywords) for name in names}
        names |= _taken_by(forward).names  # what forward may take is no name by mistake
        return next((name for name, _, _ in self.inputs if name not in names), None)

    def _of(self, names: tuple[str, ...], tensor: torch.Tensor) -> Iterator[tuple[int, Extent]]:
        for name, dimension, extent in self.inputs:
            if name in names:
                if not -tensor.dim() <= dimension < tensor.dim():
                    raise ValueError(
                        f"sizes= names dimension {dimension} of {name}, which has {tensor.dim()}."
                    )
                yield dimension % tensor.dim(), extent
        for dimension, extent in self.words:
            if dimension < tensor.dim():
                yield dimension, extent


def parse_sizes(given: object, on_larger: str = "raise") -> Sizes:
    """What a user wrote.

    Raises:
        ValueError: for what means nothing, naming it.
    """
    if on_larger not in ON_LARGER:
        raise ValueError(f'on_larger is "raise" or "plan", not {on_larger!r}.')
    if given is None:
        if on_larger != "raise":
            raise ValueError(f"on_larger={on_larger!r} is of sizes=, which is not given.")
        return Sizes()
    if given == SEEN:
        return Sizes(is_seen=True, on_larger="plan")
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"sizes={given!r} says no size that varies. {_EXAMPLES}")
    words: list[tuple[int, Extent]] = []
    inputs: list[tuple[str, int, Extent]] = []
    for name, said in given.items():
        if not isinstance(name, str):
            raise ValueError(f"sizes= names {name!r}, which is no name of an input. {_EXAMPLES}")
        if name in WORDS and not isinstance(said, Mapping) and not _are_dimensions(said):
            words.append((WORDS[name], _extent(name, said)))
        else:
            inputs += _of_input(name, said)
    return Sizes(tuple(words), tuple(inputs), on_larger=on_larger)


def sizes_argument(text: str) -> dict[str, Any]:
    """What a command line says: `batch=1:32,sequence=128:4096,images.2=224:384`.

    Raises:
        ValueError: if it says something else.
    """
    found: dict[str, Any] = {}
    for said in text.split(","):
        match = _WRITTEN.fullmatch(said.strip())
        if match is None:
            raise ValueError(
                f"{said.strip()!r} is no size and its range: write batch=1:32, sequence=128:4096, "
                "or an input and a dimension of it, images.2=224:384, with commas between."
            )
        name, dimension, low, high = match.groups()
        if dimension is None:
            found[name] = (int(low), int(high))
        else:
            found.setdefault(name, {})[int(dimension)] = (int(low), int(high))
    return found


def _are_dimensions(said: object) -> bool:
    """Whether a tuple has what `torch.export` takes for each dimension, not a range."""
    row = said if isinstance(said, (tuple, list)) else ()
    return any(one is None or _is_dimension(one) for one in row)


def _is_dimension(said: object) -> bool:
    """Whether it is a `torch.export.Dim`, one derived of it, or a hint such as `Dim.AUTO`."""
    return not isinstance(said, Mapping) and hasattr(said, "min") and hasattr(said, "max")


def _of_input(name: str, said: Any) -> Iterator[tuple[str, int, Extent]]:
    """The dimensions of an input that vary, or of those in a dict that it is."""
    if said is None:
        return
    if _are_dimensions(said):
        said = dict(enumerate(said))
    if not isinstance(said, Mapping):
        raise ValueError(
            f"sizes= says {name!r} without a dimension: only {' and '.join(WORDS)} mean one in "
            f"every input. {_EXAMPLES}"
        )
    for dimension, pair in said.items():
        if isinstance(dimension, str) and (isinstance(pair, Mapping) or _are_dimensions(pair)):
            yield from _of_input(dimension, pair)
            continue
        if isinstance(dimension, bool) or not isinstance(dimension, int):
            raise ValueError(
                f"sizes= names {dimension!r} of {name}: a dimension is a number, as in "
                f"{name}.size(1). {_EXAMPLES}"
            )
        if pair is None or getattr(getattr(pair, "type", None), "name", "") == "STATIC":
            continue
        yield name, dimension, _extent(f"{name}.size({dimension})", pair)


def _extent(name: str, pair: Any) -> Extent:
    if _is_dimension(pair):
        # One name of a dimension is one size, whichever inputs have it.
        name = getattr(pair, "__name__", name)
        pair = (max(1, int(pair.min or 1)), _most(name, pair.max))
    numbers = tuple(pair) if isinstance(pair, (tuple, list)) else ()
    are_numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
    if len(numbers) != 2 or not are_numbers or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(
            f"sizes= says {pair!r} of {name}: a range is its smallest and its largest size, from 1 "
            f"on. {_EXAMPLES}"
        )
    return Extent(name, *numbers)


def _most(name: str, most: object) -> int:
    """The largest size of a dimension of `torch.export`.

    Raises:
        ValueError: if it has none: a plan is for one.
    """
    if isinstance(most, int):
        return most
    raise ValueError(
        f"sizes= says nothing of how large {name} becomes: a plan is made for the largest size. "
        f'Give the dimension a maximum: torch.export.Dim("{name}", max=4096).'
    )


def rounded_up(size: int) -> int:
    """The next power of two: sizes up to any number come to few ranges."""
    return 1 << max(0, size - 1).bit_length()


def _named(
    forward: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors that a call is given, each with the names that it goes by."""
    for name, value in _by_parameter(forward, args, keywords):
        yield from _tensors(value, (name,) if name else ())


def _by_parameter(
    forward: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    positional = _taken_by(forward).positional
    for number, value in enumerate(args):
        yield positional[number] if number < len(positional) else "", value
    yield from keywords.items()


class _Taken(NamedTuple):
    """Names of what a model's forward takes."""

    positional: tuple[str, ...] = ()  # those of *args have none
    names: frozenset[str] = frozenset()


_taken: WeakKeyDictionary[FunctionType, _Taken] = WeakKeyDictionary()  # each call of a model asks


def _taken_by(forward: Callable[..., Any]) -> _Taken:
    function = getattr(forward, "__func__", None)  # a method is new each time
    if not isinstance(function, FunctionType):
        return _asked(forward)
    if function not in _taken:
        _taken[function] = _asked(forward)
    return _taken[function]


def _asked(forward: Callable[..., Any]) -> _Taken:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return _Taken()
    one = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = tuple(p.name for p in parameters if p.kind in one)
    return _Taken(positional, frozenset(p.name for p in parameters))


def _tensors(value: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield names, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, (*names, key) if isinstance(key, str) else names)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner, names)
