"""Train a small GPT on text that ships with Python, in half the memory it needs otherwise.

    python examples/train_gpt.py [--steps 200] [--budget 150MiB] [--compiler eager] [--device cuda]

The model is plain torch: 12 layers, causal attention, tied embeddings, bytes as tokens. The text
is the Python language reference, which every CPython carries (`pydoc_data.topics`). Without
`--budget`, one plain eager step is measured first and the budget is half of its peak.
"""

from __future__ import annotations

import argparse
import copy
import time
from pydoc_data import topics  # type: ignore[import-untyped]

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat

VOCABULARY = 256  # bytes
CONTEXT = 256  # tokens per sequence
MIB = 2**20


class Attention(nn.Module):
    """Causal self-attention over `heads` heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """One layer: attention, then an MLP with GELU, both on the normalised residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A byte-level language model whose forward returns its loss."""

    def __init__(
        self, layers: int = 12, width: int = 128, heads: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, of (batch, tokens) against targets."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def corpus() -> Tensor:
    """The Python language reference as a tensor of byte values, about 0.5 MB of prose."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(text.encode()), dtype=torch.long)


def sample(data: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `batch` random windows of the text, and the same windows one byte later."""
    starts = torch.randint(len(data) - CONTEXT, (batch, 1), generator=generator)
    window = data[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def make(
    *, batch: int = 8, layers: int = 12, width: int = 128, dropout: float = 0.0, seed: int = 0
) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Return (model, inputs) for tools: `model(*inputs)` is the loss of a training step."""
    torch.manual_seed(seed)
    model = GPT(layers=layers, width=width, dropout=dropout)
    inputs = sample(corpus(), batch, torch.Generator().manual_seed(seed))
    return model, inputs


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as used for training and for measuring."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def train_step(
    model: nn.Module, inputs: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
) -> Tensor:
    """One whole step: gradients are freed, computed anew and applied."""
    optimizer.zero_grad(set_to_none=True)
    loss: Tensor = model(*inputs)
    loss.backward()
    optimizer.step()
    return loss.detach()


def peak_of_step(
    model: nn.Module, inputs: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
) -> int:
    """Measured peak in bytes of one training step, everything it holds included.

    Runs one real step. The optimizer's state must exist already, so that it counts as resident.
    """
    optimizer.zero_grad(set_to_none=True)
    resident = autoremat.resident_nbytes(model, inputs, optimizer)
    device = inputs[0].device
    return resident + autoremat.measure_peak(
        lambda: train_step(model, inputs, optimizer), device=device
    )


def peak_without_budget(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> int:
    """Measured peak in bytes of a plain eager step, on a copy: the model is left untouched."""
    twin = copy.deepcopy(model)
    optimizer = new_optimizer(twin)
    train_step(twin, inputs, optimizer)  # creates the optimizer's state
    return peak_of_step(twin, inputs, optimizer)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--budget", help='"150MiB", "80%%", bytes; default: half of eager\'s peak')
    parser.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Measure, plan, train, and print the measured peak beside the budget."""
    args = arguments()
    model, inputs = make(batch=args.batch, dropout=args.dropout, seed=args.seed)
    model.to(args.device)
    inputs = tuple(x.to(args.device) for x in inputs)
    data = corpus()
    generator = torch.Generator().manual_seed(args.seed)

    eager_peak = peak_without_budget(model, inputs)
    given = args.budget or eager_peak // 2
    budget = int(given) if isinstance(given, str) and given.isdigit() else given
    print(f"eager step: peak {eager_peak / MIB:.1f} MiB", flush=True)

    optimizer = new_optimizer(model)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=50)
    autoremat.optimize(model, budget=budget, optimizer=optimizer, compiler=args.compiler)
    losses, ends = [], []
    for step in range(args.steps + 1):
        batch = tuple(x.to(args.device) for x in sample(data, args.batch, generator))
        losses.append(train_step(model, batch, optimizer).item())
        warm_up.step()
        ends.append(time.perf_counter())
        if step > 0 and (step % 20 == 0 or step == args.steps):  # step 0 plans and compiles
            window = min(20, step)
            loss = sum(losses[-window:]) / window
            speed = window * batch[0].numel() / (ends[-1] - ends[-1 - window])
            print(f"step {step:4d}  loss {loss:.3f}  {speed:,.0f} tokens/s", flush=True)

    peak = peak_of_step(model, inputs, optimizer)
    report = autoremat.report(model)
    print(report.summary())
    print(
        f"measured peak {peak / MIB:.1f} MiB, budget {report.budget_nbytes / MIB:.1f} MiB, "
        f"eager {eager_peak / MIB:.1f} MiB"
    )


if __name__ == "__main__":
    main()
