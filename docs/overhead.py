"""What autoremat costs in a step beside the step's operations: a table in Markdown.

    python docs/overhead.py [--compiler eager] [--layers 24] [--rounds 100]

Enters: nothing; a model whose layers compute next to nothing. Leaves: for the model as a whole and
block by block, processor time of a step of AdamW over that under torch's own backend of the kind
("aot_eager" for "eager"). One step of each in turn; medians; planning is over before the first.
Processor time, as the rest of the machine counts less in it. Nothing is recomputed: the budget does
not bind.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat

WIDTH = 8
BUDGET = "1GB"
WARM_UP_STEPS = 12  # until nothing is planned or looked into any more
TORCHS = {"eager": "aot_eager", "inductor": "inductor"}


class Block(nn.Module):
    """Attention of one head and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Each with what it is given added."""
        q, k, v = self.project(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Net(nn.Module):
    """Blocks and a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """A mean square."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def variants(layers: int, compiler: str) -> dict[str, nn.Module]:
    """The same model under everything that is compared, torch's own first of each kind."""
    model, options = Net(layers), {"budget": BUDGET, "compiler": compiler}
    ours = {"backend": "autoremat", "options": options}
    torchs = {"backend": TORCHS[compiler]}
    found = {name: copy.deepcopy(model) for name in ("torch", "backend", "optimize")}
    found["torch"].compile(**torchs)
    found["backend"].compile(**ours)
    found["optimize"] = autoremat.optimize(found["optimize"], budget=BUDGET, compiler=compiler)
    for name, asked in (("torch, blocks", torchs), ("backend, blocks", ours)):
        found[name] = copy.deepcopy(model)
        for block in found[name].blocks:
            block.compile(**asked)
    return found


def steps_of(model: nn.Module) -> Callable[[], float]:
    """A step that returns the seconds that it has taken of a processor."""
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(1, 4, WIDTH)

    def step() -> float:
        started = time.process_time()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    return step


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="What autoremat costs beside the operations.")
    parser.add_argument("--compiler", choices=TORCHS, default="eager")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {n: steps_of(m) for n, m in variants(args.layers, args.compiler).items()}
    for step in found.values():
        for _ in range(WARM_UP_STEPS):
            step()
    rounds = [{name: step() for name, step in found.items()} for _ in range(args.rounds)]
    print("| way | ms | over torch's |\n|---|---|---|")
    for name in found:
        beside = "torch, blocks" if name.endswith("blocks") else "torch"
        ms = 1e3 * statistics.median(one[name] for one in rounds)
        ratio = statistics.median(one[name] / one[beside] for one in rounds)
        print(f"| {name} | {ms:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
