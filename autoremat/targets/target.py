"""A model and one batch, from `path/to/file.py:function` or `package.module:function`.

Enters: the text that a user writes on the command line. Leaves: a `Target`. Guarantees: what does
not fit is refused before anything is planned, with what was found and what is accepted;
`sys.path` is afterwards as it was. The user's code runs: a target is trusted as a script is.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

_FORMS = "path/to/file.py:function or package.module:function"
_RESULTS = (
    "(model, inputs) or (model, inputs, loss_fn), where inputs is a tensor, a tuple of tensors "
    "(positional) or a dict of them (keywords)"
)
_TAKEN = ("model", "loss_fn", "seed")  # parameters of `autoremat.verify` itself
_MESSAGE_LENGTH = 300


class TargetError(ValueError):
    """A target that cannot be used; the message says what was found and what would do."""


@dataclass(frozen=True)
class Target:
    """What one training step needs.

    Attributes:
        model: in train mode.
        inputs: the batch's positional part.
        keywords: its keyword part.
        loss_fn: from the model's output to the loss, one number with a gradient.
        name: as the user wrote it.
    """

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    keywords: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_fn: Callable[[Any], Any] | None = None
    name: str = ""

    @property
    def on_meta(self) -> bool:
        """Whether the model has no weights."""
        return any(p.device.type == "meta" for p in self.model.parameters())

    def loss(self, output: Any) -> torch.Tensor:
        """The loss of an output: by `loss_fn`, or the output itself, or its `loss`.

        Raises:
            TargetError: if that is not one number that depends on a parameter.
        """
        if self.loss_fn is not None:
            return self._checked(self.loss_fn(output), "loss_fn returned")
        if isinstance(output, torch.Tensor):
            return self._checked(output, "The model returned")
        return self._checked(getattr(output, "loss", None), f"{_kind(output)} has as its loss")

    def _checked(self, loss: object, what: str) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TargetError(
                f"{self.name}: {what} {_described(loss)}, but a step needs a loss of one number. "
                "Return (model, inputs, loss_fn), where loss_fn(output) is a scalar tensor, or let "
                "the model return its loss or an output with .loss."
            )
        if not loss.requires_grad:
            raise TargetError(
                f"{self.name}: {what} a loss that needs no gradient: no parameter reaches it, or "
                "it was detached. Call requires_grad_() on what is to be trained."
            )
        return loss


def load_target(text: str, **sizes: int) -> Target:
    """Import the function, call it, and check what it returns.

    Args:
        text: `path/to/file.py:function` or `package.module:function`.
        sizes: what the function is called with; nothing, as a rule.

    Raises:
        TargetError: naming what is wrong; an exception of the user's own code is its cause.
    """
    with _imported(text) as (module, function):
        try:
            result = function(**sizes)
        except (Exception, SystemExit) as error:
            raise TargetError(_raised(f"{text} raised", error, module.__file__)) from error
    return _target(text, result)


def takes(text: str, size: str) -> bool:
    """Whether a target's function has a parameter of that name.

    Raises:
        TargetError: if there is no such function.
    """
    with _imported(text) as (_, function), suppress(TypeError, ValueError):
        return size in inspect.signature(function).parameters
    return False


@contextmanager
def _imported(text: str) -> Iterator[tuple[ModuleType, Callable[..., object]]]:
    """The module and the function, while its folder is the first in which modules are found."""
    place, colon, name = text.strip().rpartition(":")
    if not (colon and place and name):
        raise TargetError(f"Target {text!r} names no function. Write it as {_FORMS}.")
    path = Path(place) if place.endswith(".py") or "/" in place or "\\" in place else None
    folder = Path.cwd() if path is None else path.resolve().parent
    with _first_on_path(folder):
        module = _named_module(place) if path is None else _module_of_file(path)
        yield module, _function(module, name, place)


# --- import --------------------------------------------------------------------------------------


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported, as a script of that folder imports them."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        found = "is a directory" if path.is_dir() else f"does not exist in {Path.cwd()}"
        raise TargetError(f"The file {path} {found}. Write the target as {_FORMS}.")
    if path.suffix != ".py":
        raise TargetError(f"The file {path} is not a .py file. Write the target as {_FORMS}.")
    # In a package of its own, made for the folder: the file's name cannot hide a module that is
    # loaded already, and `from .sibling import x` works beside `import sibling`.
    package = ModuleType(f"autoremat_target_{zlib.crc32(bytes(path.resolve().parent)):08x}")
    package.__path__ = [str(path.resolve().parent)]
    sys.modules.setdefault(package.__name__, package)
    name = f"{package.__name__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None, "every .py file has one"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TargetError(_raised(f"{path} cannot be imported:", error, str(path))) from error
    return module


def _named_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise TargetError(
                f"There is no module {missing!r}, neither installed nor in {Path.cwd()}. "
                f"Write the target as {_FORMS}."
            ) from error
        if not name.replace(".", "").isidentifier() or name.startswith("."):
            raise TargetError(f"{name!r} names no module. Write the target as {_FORMS}.") from error
        raise TargetError(_raised(f"{name} cannot be imported:", error, None)) from error


def _function(module: ModuleType, name: str, place: str) -> Callable[..., object]:
    found = getattr(module, name, None)
    if found is None:
        functions = [n for n, thing in vars(module).items() if inspect.isfunction(thing)]
        near = difflib.get_close_matches(name, functions) or functions[:5]
        remedy = f"Did you mean {' or '.join(near)}?" if near else "It defines no function."
        raise TargetError(f"{place} has no function {name!r}. {remedy}")
    if not callable(found):
        raise TargetError(
            f"{name!r} in {place} is {_described(found)}, not a function. Name a function that "
            f"returns {_RESULTS}."
        )
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # some builtins have none
        parameters = {}.values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise TargetError(
            f"{name!r} in {place} needs arguments ({', '.join(needed)}), but it is called without "
            "any. Give them defaults, or name a function that calls it."
        )
    return found


def _raised(what: str, error: BaseException, file: str | None) -> str:
    """The error's last line, and where: the deepest line of the user's own file if there is one."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and not frame.filename.startswith("<frozen importlib")
        ]
        own = [f for f in frames if file and Path(f.filename).resolve() == Path(file).resolve()]
        last = (own or frames)[-1:]
        where = "".join(f"{frame.filename}:{frame.lineno}" for frame in last)
    return f"{what} {last_line(error)}{f' (at {where})' if where else ''}."


def last_line(error: BaseException) -> str:
    """Kind and message of an error, as a traceback ends, on one line."""
    text = " ".join("".join(traceback.format_exception_only(error)[-1:]).split())
    return text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]}..."


# --- check ---------------------------------------------------------------------------------------


def _target(text: str, result: object) -> Target:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise TargetError(f"{text} returned {_described(result)}. Return {_RESULTS}.")
    model, inputs, loss_fn = (*result, None)[:3]
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{text} returned as its model {_described(model)}, which is not an nn.Module. "
            f"Return {_RESULTS}."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise TargetError(
            f"{text} returned as its loss_fn {_described(loss_fn)}, which cannot be called. "
            "Return a function from the model's output to a scalar tensor."
        )
    positional, keywords = _inputs(text, inputs)
    if not model.training:
        raise TargetError(
            f"{text}: the model is in eval mode, where nothing is planned. Call .train() on it "
            "before it is returned."
        )
    _require_one_device(text, model, [*enumerate(positional), *keywords.items()])
    return Target(model, positional, keywords, loss_fn, text)


def _inputs(
    text: str, inputs: object
) -> tuple[tuple[torch.Tensor, ...], Mapping[str, torch.Tensor]]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    items: list[tuple[object, object]]
    if isinstance(inputs, Mapping):
        items = list(inputs.items())
    elif isinstance(inputs, tuple):
        items = list(enumerate(inputs))
    else:
        raise TargetError(f"{text} returned as inputs {_described(inputs)}. Return {_RESULTS}.")
    for key, value in items:
        if not isinstance(value, torch.Tensor):
            raise TargetError(
                f"{text}: input {key!r} is {_described(value)}, not a tensor. Return {_RESULTS}."
            )
        if isinstance(inputs, Mapping) and (not isinstance(key, str) or key in _TAKEN):
            raise TargetError(
                f"{text}: input {key!r} cannot be passed by this keyword. Return the inputs as a "
                f"tuple; no keyword may be one of {', '.join(_TAKEN)}."
            )
    tensors = {key: value for key, value in items if isinstance(value, torch.Tensor)}
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in tensors.items()}
    return tuple(tensors.values()), {}


def _require_one_device(
    text: str, model: nn.Module, inputs: Sequence[tuple[int | str, torch.Tensor]]
) -> None:
    home = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    for key, tensor in inputs:
        if home is not None and tensor.device != home:
            raise TargetError(
                f"{text}: input {key!r} is on {tensor.device}, but the model is on {home}. Move "
                f"the input with .to({str(home)!r}), or the model."
            )


def _described(thing: object) -> str:
    """What something is, in a few words."""
    if isinstance(thing, torch.Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, tuple | list):
        return f"a {type(thing).__name__} of {len(thing)}"
    return "None" if thing is None else _kind(thing)


def _kind(thing: object) -> str:
    name = type(thing).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
