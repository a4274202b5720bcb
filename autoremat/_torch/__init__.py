"""Every private torch name that autoremat relies on, in one place.

Enters: torch 2.11 to 2.13. Leaves: the public names of the modules below, as `_torch.NAME`.
Guarantees: a module is imported when one of its names is first asked for, so that whoever only
measures does not import the compilers. `tests/house/test_torch_names.py` has a smoke test for each
name, so that a torch release that moves one says which.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoremat._torch.ambient import *  # noqa: F403
    from autoremat._torch.autograd import *  # noqa: F403
    from autoremat._torch.checkpoints import *  # noqa: F403
    from autoremat._torch.code_cache import *  # noqa: F403
    from autoremat._torch.compiling import *  # noqa: F403
    from autoremat._torch.distributed import *  # noqa: F403
    from autoremat._torch.dynamo import *  # noqa: F403
    from autoremat._torch.gathering import *  # noqa: F403
    from autoremat._torch.generating import *  # noqa: F403
    from autoremat._torch.inductor import *  # noqa: F403
    from autoremat._torch.kernels import *  # noqa: F403
    from autoremat._torch.meta import *  # noqa: F403
    from autoremat._torch.owned import *  # noqa: F403
    from autoremat._torch.profiler import *  # noqa: F403
    from autoremat._torch.running import *  # noqa: F403
    from autoremat._torch.scheduling import *  # noqa: F403
    from autoremat._torch.sizes import *  # noqa: F403
    from autoremat._torch.spreading import *  # noqa: F403
    from autoremat._torch.standing_in import *  # noqa: F403

MODULES = (
    *("running", "sizes", "autograd", "profiler", "owned", "ambient", "checkpoints", "gathering"),
    *("spreading", "meta", "distributed", "compiling", "dynamo", "inductor", "generating"),
    *("scheduling", "kernels", "code_cache", "standing_in"),
)
"""In the order in which a name is looked for: what imports least comes first."""


def __getattr__(name: str) -> Any:
    for module in () if name.startswith("__") else MODULES:
        loaded = import_module(f"{__name__}.{module}")
        if name == module:
            return loaded
        if name in loaded.__all__:
            globals()[name] = getattr(loaded, name)  # found at once from now on
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
