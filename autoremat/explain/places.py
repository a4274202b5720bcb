"""Where a node of a graph comes from, in the user's words.

Enters: a node. Leaves: the line of the user's code, and the operator's name.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath

import torch
from torch import fx

from autoremat import _torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_CODE, _OWN_CODE = (
    f"{folder}{os.sep}"
    for folder in (PurePath(torch.__file__).parent, PurePath(__file__).parents[1])
)


def source_of(node: fx.Node) -> str:
    """The user's line that a node comes from, as "model.py:88"; "" where it is not known.

    Within torch's own modules Dynamo keeps no lines: for a bare nn.Sequential there is none but
    the one of ours that calls it.
    """
    found = _FRAME.findall(_torch.source_lines(node))
    frames = [frame for frame in found if not frame[0].startswith(_OWN_CODE)]
    for path, line in reversed(frames):
        if not path.startswith(_TORCH_CODE):
            return f"{PurePath(path).name}:{line}"
    return f"{PurePath(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def op_name(node: fx.Node) -> str:
    """The operator that a node applies, without its namespace."""
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return target.name().split("::")[-1]
    return getattr(target, "__name__", str(target))
