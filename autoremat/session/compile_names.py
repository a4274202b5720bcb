"""What the compile that runs now is called.

Enters: Dynamo's account of the frame that it compiles. Leaves: names of frames and of their
compiles. Guarantees: a recompile of a frame has the frame's name, and a name of its own.
"""

from __future__ import annotations

from autoremat import _torch


def frame_name() -> str:
    """The Dynamo frame that is being compiled: a recompile of it has the same name."""
    compile_id = _torch.CompileContext.current_compile_id()
    return f"graph {compile_id.frame_id if compile_id is not None else 0}"


def compile_name() -> str:
    """The compile of the frame: a recompile has another name."""
    number = compile_number()
    return f"{frame_name()}/{number}" if number else frame_name()


def compile_number() -> int:
    """How often the frame was compiled before."""
    compile_id = _torch.CompileContext.current_compile_id()
    return int(compile_id.frame_compile_id or 0) if compile_id is not None else 0
