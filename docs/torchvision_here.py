"""torchvision beside a torch that its operators in C++ were not built for, as builds for CPUs are.

    python docs/torchvision_here.py SCRIPT

Enters: an installed torchvision. Leaves: it imported, or a script run that imports it. Guarantees:
where its operators are there, nothing is done. Without them its import fails, as it registers what
some of them do on fake tensors whether that is there or not; models and transforms use none.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> None:
    """Import it.

    Raises:
        ImportError: if it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of images that it will not read
        try:
            import torchvision
        except RuntimeError:
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", _SIGNATURE)
            import torchvision  # noqa: F401


if __name__ == "__main__":
    import_torchvision()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
