"""Regenerate `torchtitan.md`: torchtitan's Llama debug model under our memory policy and its own.

    pip install torchtitan==0.3.0 triton
    python docs/torchtitan_page.py

Traces the step as the graph trainer does, applies its passes for dead code, for the memory policy
and for recompute, and runs the graph on the CPU: peaks in bytes, and gradients beside those of the
graph without recompute. Then the main trainer's blocks, by `torchtitan_blocks.py`. The trainers
themselves need a GPU, and the graph trainer a nightly build of torch.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan_blocks as blocks
from page_tables import percent, table
from torch import Tensor, nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.experiments.graph_trainer import memory_policy
from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
from torchtitan.experiments.graph_trainer.llama3 import model_registry
from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
from torchtitan.experiments.graph_trainer.passes import (
    canonicalize_graph_pass,
    eliminate_dead_code_pass,
)
from torchtitan.experiments.graph_trainer.selective_activation_remat import (
    selective_activation_remat_pass,
)
from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

import autoremat
import autoremat.torchtitan
from autoremat import _torch

PAGE = Path(__file__).with_name("torchtitan.md")
BATCH, LENGTH, VOCABULARY = 4, 512, 2048
SHARES = (75, 50, 35, 25)
REPEATS = 5
MIB = 2**20
Policy = Callable[[torch.fx.GraphModule], object]
Row = dict[str, Any]

TEXT = """\
# torchtitan

Two ways to use autoremat there: a memory policy for its graph trainer, and, in its main trainer,
the backend for its compiled blocks.

## A memory policy for the graph trainer

```
import autoremat.torchtitan

autoremat.torchtitan.register("40GB", beside_nbytes=optimizer_nbytes)
```

before the trainer is built, and `--compile.memory_policy autoremat`. The policy reads the graph of
the whole step (forward, loss, backward), measures its operations, and tags each operation of the
forward as one to save or one to recompute; torchtitan's pass for recompute does the rest. The
budget is for everything that the step holds: the graph's inputs (parameters, buffers, batch),
what the graph makes, and `beside_nbytes`, which the graph does not show: the optimizer's state.

That pass repeats each operation once, before the first operation of the backward that needs it, so
the plan is one of this kind: `optimize`, which may repeat operations several times and later, gets
further below. It cannot repeat random draws, nor anything that the backward of the loss reads;
these are saved. Where no plan of this kind fits, `InfeasibleBudget` says what does.

Ranks of a job with equal graphs get equal tags: what one of them has found is taken by all. What
the graph gathers of parameters, and what else it communicates, is kept unless it is marked, as in
`register("40GB", repeatable="_c10d_functional.all_gather_into_tensor")`; then it is the plan's
choice, for each gather, to keep it or to gather again.

Other graphs of whole steps go the same way: `autoremat.torchtitan.tag(module, budget)` tags any
that `make_fx` traced with `torch.autograd.grad` in it and whose backward is marked
([recipe](recipes/torchtitan.md)), for torch's own `remat_using_tags_for_fwd_loss_bwd_graph` as
well.

### Measured

"""


def build() -> nn.Module:
    """The debug model on the CPU."""
    torch.manual_seed(0)
    model_spec = model_registry("debugmodel", attn_backend="sdpa")
    with torch.device("meta"):
        model: nn.Module = model_spec.model.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=None)
    annotate_module_fqns(model)
    return model.train()


class Step:
    """One training step, traced anew for each policy."""

    def __init__(self) -> None:
        self.model = build()
        tokens, labels = torch.randint(VOCABULARY, (2, BATCH, LENGTH))
        self._inputs = (tokens, labels, torch.tensor(float(labels.numel())), {})
        self._step = make_fwd_bwd_step(self.model, CrossEntropyLoss.Config().build())

    @property
    def resident_nbytes(self) -> int:
        """Parameters, buffers and the batch."""
        tensors = (*self.model.parameters(), *self.model.buffers(), *self._inputs[:3])
        return sum(tensor.nbytes for tensor in tensors)

    def traced(self, policy: Policy) -> Any:
        """The step as a graph, with what a policy makes of it."""
        traced = minimal_fx_tracer(self._step, module=self.model)(*self._inputs)
        for clean in (eliminate_dead_code_pass, canonicalize_graph_pass):
            traced.gm = clean(traced.gm, traced.example_inputs) or traced.gm
        policy(traced.gm)
        selective_activation_remat_pass(traced.gm)
        traced.gm.recompile()
        return traced

    def row(self, name: str, traced: Any, reference: list[Tensor] | None) -> Row:
        """What a traced step takes, in bytes and beside others in time, and whether it is right."""

        def run() -> list[Tensor]:
            found: list[Tensor] = _torch.tree_leaves(
                run_traced(traced, module=self.model)(*self._inputs)
            )
            return found

        results = run()
        same = reference is None or all(map(torch.equal, reference, results))
        peak_nbytes = self.resident_nbytes + autoremat.measure_peak(run)
        return {"name": name, "peak": peak_nbytes, "same": same, "results": results, "run": run}


def name_repaired(policy: str) -> Policy:
    """A policy of torchtitan's; under torch 2.13 its pass would find no backward of the blocks."""

    def tag(module: torch.fx.GraphModule) -> object:
        autoremat.torchtitan.show_backward_of_blocks(module.graph)
        return memory_policy.MEMORY_POLICY_REGISTRY[policy](module, config=None)

    return tag


def within(budget_nbytes: int, name: str) -> Policy:
    """Our policy, through torchtitan's registry."""
    autoremat.torchtitan.register(budget_nbytes, name=name)
    config = SimpleNamespace(compile=SimpleNamespace(memory_policy=name))
    return lambda module: memory_policy.tag_with_memory_policy_pass(module, config=config)


def rows() -> list[Row]:
    """One for each policy."""
    step = Step()
    whole = step.row("nothing recomputed", step.traced(lambda module: None), None)
    found = [whole, step.row("`full`", step.traced(name_repaired("full")), whole["results"])]
    for share in SHARES:
        budget = step.resident_nbytes + share * (whole["peak"] - step.resident_nbytes) // 100
        traced = step.traced(within(budget, f"autoremat_{share}"))
        found.append(step.row(f"autoremat, {share} %", traced, whole["results"]))
        found[-1]["budget"] = budget
    return timed(found)


def timed(found: list[Row]) -> list[Row]:
    """The rows with their times beside the first one's, taken in turn."""
    seconds: list[list[float]] = [[] for _ in found]
    for _ in range(REPEATS):
        for row, taken in zip(found, seconds, strict=True):
            began = time.process_time()
            row["run"]()
            taken.append(time.process_time() - began)
    medians = [statistics.median(taken) for taken in seconds]
    return [{**r, "ratio": m / medians[0]} for r, m in zip(found, medians, strict=True)]


RECIPE = """
## Blocks of the main trainer

The main trainer compiles each block with a backend that it knows by name, under FSDP2 or not. The
budget then comes from the environment:

```
export AUTOREMAT_BUDGET=40GB
torchrun ... -m torchtitan.train ... --compile.enable --compile.backend autoremat
```

Set its own activation checkpointing to `none`: a block that is checkpointed has nothing left to
plan. All blocks of the process share the budget, and so do other graphs compiled with this backend
and no options: the first step is planned lean, the second for what the first has shown. Each kind
of block has at most two plans, whatever the number of layers. Dynamo is not asked again, so its
limit of recompiles does not matter. Under FSDP2 the shards of all blocks count, and what is
gathered while one runs. There a budget that cannot be met is a warning: a rank that raised would
leave the others waiting.

### Measured

"""

BLOCKS_FOOT = """
What the trainer's `parallelize_llama` calls: `apply_compile`, then `apply_fsdp_to_decoder`, here on
{world} processes on the CPU that talk through gloo, under Inductor and with AdamW; the worst rank,
from the sixth step on. Batch {batch} x {length}, float32; the budget is for the whole step.
**Gradients**: the largest difference to those of the first row, relative to the largest. The model
is the graph trainer's, with `sdpa` attention, which the main trainer's own builder refuses; its
other kinds were not tried on a CPU. Its loop (`torchtitan.train`) was not run.
"""

FOOT = """
Llama debug model with `sdpa` attention, batch {batch} x {length}, float32, on the CPU, one thread;
budgets are shares of what the step takes above its inputs, which count in all peaks. Times are
medians of {repeats} interleaved runs, beside the step without recompute. {versions}; regenerate
with `python docs/torchtitan_page.py`.

With torch 2.13, sums of gradients carry the name of the loss, and the pass of torchtitan 0.3.0
repeats nothing before the last node of that name: its own policies then save all. Our policy takes
these names off; the row of `full`, which recomputes whole blocks, is with that repair. `default`
and `eager` tag random operators, which attention on the CPU counts as, and are refused there.

Not run: the trainer itself (it needs CUDA and a nightly build of torch), FlexAttention,
SimpleFSDP itself; gathers in a graph of two ranks are in the tests.
"""


def page(found: list[Row], of_blocks: list[Row]) -> str:
    """The whole page."""
    whole = found[0]["peak"]
    columns: dict[str, Callable[[Row], str]] = {
        "policy": lambda r: str(r["name"]),
        **_peak_columns(whole),
        "time": lambda r: f"{r['ratio']:.2f}",
        "gradients": lambda r: "equal to the last bit" if r["same"] else "DIFFERENT",
    }
    names = ("torch", "torchtitan")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    versions = f"{versions}, python {platform.python_version()}"
    facts = {"batch": BATCH, "length": LENGTH, "repeats": REPEATS, "versions": versions}
    graphs = TEXT + table(columns, found) + FOOT.format(**facts)
    return graphs + RECIPE + _blocks_table(of_blocks)


def _peak_columns(whole_nbytes: int) -> dict[str, Callable[[Row], str]]:
    return {
        "budget MiB": lambda r: f"{r['budget'] / MIB:.1f}" if r.get("budget") else "",
        "measured peak MiB": lambda r: f"{r['peak'] / MIB:.1f}",
        "of the whole": lambda r: percent(100 * r["peak"] / whole_nbytes, 1),
        "of the budget": lambda r: (
            percent(100 * r["peak"] / r["budget"], 1) if r.get("budget") else ""
        ),
    }


def _blocks_table(of_blocks: list[Row]) -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "blocks": lambda r: str(r["name"]),
        **_peak_columns(of_blocks[0]["peak"]),
        "predicted": lambda r: (
            f"{r['predicted'] / r['peak']:.3f} of measured" if "predicted" in r else ""
        ),
        "gradients": lambda r: f"{r['error']:.0e}",
    }
    facts = {"world": blocks.WORLD, "batch": blocks.BATCH, "length": blocks.LENGTH}
    return table(columns, of_blocks) + BLOCKS_FOOT.format(**facts)


def main() -> None:
    """Measure, and write the page."""
    torch.set_num_threads(1)
    PAGE.write_text(page(rows(), blocks.rows()))


if __name__ == "__main__":
    main()
