"""Random small modules: short programs over a handful of tensors.

Each instruction reads one or two of the values made so far, or an input, and appends a new one;
some overwrite memory in place. Every value has `ROWS` rows and `WIDTH` columns in float64.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
ROWS = 32
WORDS = 10

INSTRUCTIONS = (
    # layers, some of them with parameters that other instructions use as well
    "linear",
    "shared",
    "frozen",
    "embedding",
    "tied",
    "convolution",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "rms_norm",
    "batch_norm",
    "normed_weight",
    "recurrent",
    "attention",
    "causal_attention",
    "dropping_attention",
    "masked_attention",
    "routed",
    # one value in
    "tanh",
    "gelu",
    "relu_in_place",
    "softmax",
    "cumsum",
    "sort",
    "max_pool",
    "cast",
    "reduced",
    "own_gradient",
    "no_gradient",
    # random numbers
    "dropout",
    "dropout_in_place",
    "channel_dropout",
    "noise",
    "bernoulli",
    # views
    "transpose",
    "halves",
    "view",
    "expanded",
    "slices",
    "unbound",
    "strided",
    # two values in: branches and skips
    "add",
    "mul",
    "cat",
    "matmul",
    "einsum",
    "where",
    "detached",
    "gather",
    # memory that is overwritten
    "in_place",
    "in_place_view",
    "add_in_place",
    "masked_fill",
    "index_put",
    "two_views",
    "buffer",
    "buffer_first",
    # inputs
    "input",
    "scaled_by_input",
    "written_input",
    # regions
    "checkpointed",
    "long_region",
)

RANDOM = (
    "dropout",
    "dropout_in_place",
    "channel_dropout",
    "noise",
    "bernoulli",
    "dropping_attention",
    "checkpointed",
)

OUTPUTS = ("loss", "held", "two", "view", "input", "twice")


@dataclass(frozen=True)
class Program:
    """What a module computes.

    Attributes:
        instructions: name, and which of the latest values are the first and the second operand.
        output: what is returned beside the loss.
        transposed: whether the second input is not contiguous.
    """

    instructions: tuple[tuple[str, int, int], ...]
    output: str = "held"
    transposed: bool = False


def random_program(seed: int) -> Program:
    """The program of a seed: 3 to 9 instructions."""
    source = random.Random(seed)
    instructions = [
        (source.choice(INSTRUCTIONS), source.randrange(6), source.randrange(6))
        for _ in range(source.randint(3, 9))
    ]
    return Program(tuple(instructions), source.choice(OUTPUTS), source.random() < 0.5)


# Of programs that hypothesis builds instruction by instruction, half are variations of one another.
programs = st.integers(0, 2**62).map(random_program)


class _Cubed(torch.autograd.Function):
    """A function of the user's with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh() ** 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.tanh() ** 2 * (1 - x.tanh() ** 2)


class Machine(nn.Module):
    """Runs a program on `x` and `scale`, which need gradients, `y`, which needs none, and words."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        count = range(len(program.instructions))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in count)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in count)
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in count)
        self.group = nn.GroupNorm(4, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("running", torch.zeros(WIDTH))
        self.double()

    def forward(self, x: Tensor, y: Tensor, words: Tensor, scale: Tensor) -> Any:
        values = [self.linears[0](x)]
        drawn = x.new_zeros(())
        for number, (name, first, second) in enumerate(self.program.instructions):
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            if name in ("input", "written_input"):
                b = y
            if name in ("embedding", "tied"):
                b = words
            if name == "scaled_by_input":
                b = scale
            values.append(getattr(self, name)(number, a, b))
            if name in RANDOM:  # torch.compile leaves out draws that nobody reads; eager does not
                drawn = drawn + values[-1][0, 0]
        loss = drawn + torch.stack([value.sin().mean() for value in values[-3:]]).sum()
        middle = values[len(values) // 2]
        match self.program.output:
            case "loss":
                return (loss,)
            case "held":
                return loss, middle.detach()
            case "two":
                return loss, middle.sin(), {"logits": values[-1] * 2}
            case "view":
                return loss, middle[1:], middle.t()
            case "input":
                return loss, x, y
            case _:
                return loss, middle, middle

    def linear(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.linears[number](a)

    def shared(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.linears[0](a)

    def frozen(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.still(a).sin()

    def embedding(self, number: int, a: Tensor, words: Tensor) -> Tensor:
        return a + self.words(words)

    def tied(self, number: int, a: Tensor, words: Tensor) -> Tensor:
        scores = self.words(words).add(a) @ self.words.weight.t()
        return a * F.cross_entropy(scores, words, reduction="none")[:, None]

    def convolution(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.conv(a.t()[None])[0].t()

    def layer_norm(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.norms[number](a)

    def group_norm(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.group(a)

    def instance_norm(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.instance_norm(a.t()[None])[0].t()

    def rms_norm(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.rms_norm(a, (WIDTH,), self.norms[number].weight, 1e-3)

    def batch_norm(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.batch_norms[number](a)

    def normed_weight(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(a, F.normalize(self.linears[number].weight), self.linears[0].bias)

    def recurrent(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """The same weights in each of three steps."""
        state = b
        for _ in range(3):
            state = torch.tanh(self.linears[number](state) + a)
        return state

    def attention(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.attend(a)

    def causal_attention(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.attend(a, is_causal=True)

    def dropping_attention(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return self.attend(a, dropout_p=0.25)

    def masked_attention(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """Queries from one value, keys and values from the other; row 0 is seen by all."""
        mask = (b @ a.t() > 0).index_fill(1, torch.tensor([0]), True)
        q, k, v = a.tanh()[None, None], b[None, None], b.sin()[None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, 0]

    def attend(self, a: Tensor, **options: Any) -> Tensor:
        """Two heads over two sequences."""
        q, k, v = self.project(a).view(2, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, **options)
        return attended.transpose(1, 2).reshape(ROWS, WIDTH)

    def routed(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """Each row goes to two of four experts."""
        weights, chosen = self.linears[number](a)[:, :4].softmax(-1).topk(2)
        mask = F.one_hot(chosen, 4).to(a) * weights[..., None]
        experts = self.linears[0].weight.view(4, -1)[:, :WIDTH]
        return a + mask.sum(1) @ experts.tanh()

    def tanh(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a)

    def gelu(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.gelu(a)

    def relu_in_place(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.relu(a + 0.5, inplace=True)

    def softmax(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a.softmax(-1) * WIDTH

    def cumsum(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a.cumsum(0) / ROWS

    def sort(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a.sort(-1)[0] + a.amax(-1, keepdim=True)

    def max_pool(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.max_pool1d(a.t()[None], 3, 1, 1)[0].t()

    def cast(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a.float().exp().clamp(max=10).double()

    def reduced(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return (a - a.mean(0)) / (a.var(0) + 1).sqrt()

    def own_gradient(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return _Cubed.apply(a)

    def no_gradient(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            scale = a.tanh().abs().mean(-1, keepdim=True)
        return a * scale

    def dropout(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.dropout(a, 0.25)

    def dropout_in_place(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.dropout(a.cos(), 0.25, inplace=True)

    def channel_dropout(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.dropout1d(a[None], 0.25)[0]

    def noise(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a + 0.1 * torch.rand_like(a)

    def bernoulli(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a * torch.bernoulli(a.detach().sigmoid()) + torch.randn(WIDTH, dtype=a.dtype)

    def transpose(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a.t().contiguous().view(WIDTH, ROWS).t()

    def halves(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        left, right = a.chunk(2, -1)
        return torch.cat([right.sigmoid() * left, right], -1)

    def view(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a.reshape(ROWS, 2, -1).flip(1).reshape(ROWS, WIDTH)

    def expanded(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a[:1].expand(ROWS, WIDTH)

    def slices(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return F.pad(a[2:-2, 1:], (1, 0, 2, 2)) + a[:, :0].sum()

    def unbound(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        parts = a.reshape(ROWS, 4, -1).unbind(1)
        return torch.stack([parts[3], parts[0].sin(), parts[0] + parts[1], parts[2]], 1).flatten(1)

    def strided(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """Each row twice, through overlapping memory."""
        return a.contiguous().as_strided((ROWS // 2, 2, WIDTH), (WIDTH, 0, 1)).flatten(0, 1)

    def add(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def mul(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a * b.sigmoid()

    def cat(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], -1)[:, ::2].contiguous()

    def matmul(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return (a.tanh() @ b.tanh().t()).softmax(-1) @ a

    def einsum(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("ri,ij,rj->rj", a.tanh(), self.linears[number].weight, b)

    def where(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a, b)

    def detached(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a * b.detach().tanh()

    def gather(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return a.gather(0, b.argsort(0)) + b[b[:, 0].argsort()]

    def in_place(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return torch.sin(a).add_(1.0).mul_(0.5)

    def in_place_view(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        copy = torch.sin(a)
        copy[:, ::2].mul_(2.0)
        copy[1:3].add_(b[0])
        return copy

    def add_in_place(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return (2 * a).add_(b)

    def masked_fill(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        copy = a.cos()
        copy.masked_fill_(b > 1, 0.0)
        copy.t()[0].zero_()
        return copy

    def index_put(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        copy = a.clone()
        copy[b[:, 0] > 0] = 0.5
        return copy.index_add_(0, torch.tensor([3, 1, 3]), b[:3])

    def two_views(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """One view is read after the other was written."""
        copy = (a * 0.5).contiguous()
        whole, row = copy.view(-1), copy[1]
        row.add_(b[2])
        return copy + whole.view(ROWS, WIDTH).cos()

    def buffer(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """Read, then updated."""
        result = torch.sin(a + self.running)
        self.running.mul_(0.9).add_(a.detach().mean(0))
        return result

    def buffer_first(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """Updated, then read; the result is not what the gradient needs."""
        self.running.copy_(self.running * 0.5 + b.detach().mean(0))
        return a * self.running.tanh().exp()

    def input(self, number: int, a: Tensor, y: Tensor) -> Tensor:
        return a * y.tanh()

    def scaled_by_input(self, number: int, a: Tensor, scale: Tensor) -> Tensor:
        return a * scale

    def written_input(self, number: int, a: Tensor, y: Tensor) -> Tensor:
        """The caller sees the new contents."""
        result = a * y.sin()
        y.mul_(0.5).add_(a.detach())
        return result

    def checkpointed(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        return checkpoint(self.region, a, number, use_reentrant=False)

    def region(self, a: Tensor, number: int) -> Tensor:
        """What a user would checkpoint."""
        return torch.tanh(F.dropout(torch.tanh(self.linears[number](a)), 0.25))

    def long_region(self, number: int, a: Tensor, b: Tensor) -> Tensor:
        """A chain worth recomputing."""
        for _ in range(3):
            a = a + F.gelu(self.norms[number](a)).sin()
        return a


def batch(program: Program) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the module is called with."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    y = torch.randn(WIDTH, ROWS, dtype=torch.float64, generator=generator).t()
    words = torch.randint(WORDS, (ROWS,), generator=generator)
    scale = torch.randn(WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    return x, y if program.transposed else y.contiguous(), words, scale


def loss_alone(output: tuple[Any, ...]) -> Tensor:
    """The first output; the others are only held."""
    loss: Tensor = output[0]
    return loss
