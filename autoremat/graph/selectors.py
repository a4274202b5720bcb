"""What users name with `save=`, `recompute=` and `repeatable=`: modules by pattern, operators.

Enters: texts such as "*.attn.*", "layers.3", "aten.mm", or operators of `torch.ops`. Leaves:
`Selector`s that nodes match, or a `SteeringError` that names what was written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx, nn

from autoremat import _torch
from autoremat.errors import SteeringError
from autoremat.graph.modules import module_calls

Selection = str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None
"""Patterns of module paths, and operators: one, or several."""

KNOWN_NAMESPACES = frozenset(
    {"aten", "prims", "quantized", "inductor", "_inductor_test", "autoremat"}
)
"""Of operators that give the same whenever they run, unless their tags say otherwise."""

_OPERATOR = re.compile(r"(?:torch\.ops\.)?([a-z_]\w*)\.([a-z_]\w*)(?:\.(\w+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Selector:
    """One pattern.

    Attributes:
        keyword: the argument it was given to, "save", "recompute" or "repeatable".
        text: the pattern, or the operator's name.
        is_operator: which of the two it is.
    """

    keyword: str
    text: str
    is_operator: bool

    def matches(self, node: fx.Node) -> bool:
        """Whether a node is of that operator, or ran inside such a module."""
        if self.is_operator:
            name = str(node.target)
            return name == self.text or name.rpartition(".")[0] == self.text
        return any(self.matches_path(call.path) for call in module_calls(node))

    def matches_path(self, path: str) -> bool:
        """Whether a module's path matches; "*.attn.*" matches "layers.0.attn" itself too."""
        forms = (path, f"{path}.", f".{path}", f".{path}.")
        return any(fnmatchcase(form, self.text) for form in forms)

    def __str__(self) -> str:
        """As an argument."""
        return f'{self.keyword}="{self.text}"'


def parse_selectors(keyword: str, given: object) -> tuple[Selector, ...]:
    """What a user gave as one argument: a pattern, an operator, or a sequence of them.

    Raises:
        SteeringError: if it is something else.
    """
    many = given if isinstance(given, (list, tuple)) else (given,)
    if isinstance(given, (set, frozenset)):  # whose order differs between the ranks of a job
        many = sorted(given, key=str)
    return () if given is None else tuple(_selector(keyword, one) for one in many)


def _selector(keyword: str, given: object) -> Selector:
    if isinstance(given, (_torch.OpOverload, _torch.OpOverloadPacket)):
        return Selector(keyword, str(given), is_operator=True)
    if isinstance(given, str) and given.strip():
        operator = _operator_name(given)
        return Selector(keyword, operator or given, is_operator=operator is not None)
    raise SteeringError(
        f'{keyword}= takes patterns of module paths such as "layers.3" or "*.attn.*", and '
        f'operators such as "aten.mm" or torch.ops.aten.mm, not {given!r:.80}.'
    )


def _operator_name(text: str) -> str | None:
    """The operator's full name if torch knows it; None for a module pattern."""
    match = _OPERATOR.fullmatch(text)
    if match is None:
        return None
    found = getattr(getattr(torch.ops, match[1]), match[2], None)
    if match[3] is not None:
        found = getattr(found, match[3], None)
    return None if found is None else str(found)


def is_known_operator(selector: Selector) -> bool:
    """Whether it names an operator of torch's own that does not communicate."""
    return selector.is_operator and selector.text.partition(".")[0] in KNOWN_NAMESPACES


def require_modules(selectors: Iterable[Selector], *models: nn.Module) -> None:
    """Refuse patterns that no module of the models matches.

    Raises:
        SteeringError: naming the pattern and the nearest paths.
    """
    paths = [name for model in models for name, _ in model.named_modules() if name]
    for selector in selectors:
        if not selector.is_operator and not any(map(selector.matches_path, paths)):
            raise no_match(selector, paths)


def no_match(selector: Selector, known: Iterable[str]) -> SteeringError:
    """The error of a pattern that matches nothing."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(selector.text, known, n=4, cutoff=0.4) or known[:4]
    names = ", ".join(f'"{name}"' for name in near)
    hint = f" Near it: {names}." if names else ""
    what = "operator of the model's graph" if selector.is_operator else "module"
    return SteeringError(f"{selector} matches no {what} that makes a value.{hint}")
