"""Random small models of the sweep over forms of a training step.

Enters: a source of random numbers and how the layers are arranged. Leaves: a model that reads
tokens and gives scores, or the loss where it is given labels. Its activations are several times
its parameters, and no layer takes more than milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS = 64
LONGEST = 384

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


# --- layers: each adds to what it reads, sequences of vectors ----------------------------------


class Attention(nn.Module):
    """Torch's fused attention, two heads."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.is_causal = random.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all positions, or to the earlier ones."""
        batch, length, width = x.shape
        heads = self.project(self.norm(x)).view(batch, length, 3, 2, width // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return x + self.out(attended.transpose(1, 2).reshape(batch, length, width))


class MaskedAttention(nn.Module):
    """Attention written out, with a mask that is cut to the length."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.scale = random.uniform(0.5, 1.0) / width
        self.register_buffer("later", torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the earlier positions."""
        length = x.shape[1]
        q, k, v = self.project(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(
            self.later[:length, :length], float("-inf")
        )
        return x + scores.softmax(-1) @ v


class Perceptron(nn.Module):
    """Two linear layers, the inner one wider; perhaps with dropout."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        inner = random.choice((2, 4)) * width
        self.norm = nn.LayerNorm(width) if random.random() < 0.7 else nn.Identity()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation = ACTIVATIONS[random.choice(list(ACTIVATIONS))]
        self.dropout = random.choice((0.0, 0.0, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Act on each position by itself."""
        inner = F.dropout(self.activation(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(inner)


class Gated(nn.Module):
    """A product of two linear layers."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.both, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Act on each position by itself."""
        gate, value = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Convolution(nn.Module):
    """A convolution along the sequence, and batch norm."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.activation = ACTIVATIONS[random.choice(list(ACTIVATIONS))]

    def forward(self, x: Tensor) -> Tensor:
        """Mix neighbours."""
        return x + self.activation(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Squeeze(nn.Module):
    """Every position scaled by what the mean of all says."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift."""
        mean = x.mean(1, keepdim=True)
        return x + torch.sigmoid(self.scale(mean)) * torch.tanh(self.shift(x))


class Recurrent(nn.Module):
    """An LSTM, which Dynamo does not trace."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Read from the first position to the last."""
        return x + self.lstm(x)[0]


LAYERS = (Attention, MaskedAttention, Perceptron, Perceptron, Gated, Convolution, Squeeze)


# --- how layers are arranged -------------------------------------------------------------------


class Straight(nn.Module):
    """One layer after the other, in one graph."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = layer(x)
        return x


@torch.compiler.disable
def _in_eager_mode() -> None:
    """What Dynamo does not look into: its caller is compiled in two parts."""


class Broken(Straight):
    """A graph break behind every second layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number % 2:
                _in_eager_mode()
        return x


class Repeated(Straight):
    """A graph break behind every layer: where the layers are equal, one graph runs n times."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = layer(x)
            _in_eager_mode()
        return x


class _BreaksInside(nn.Module):
    """A layer that Dynamo cannot take into its caller's graph."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer in two graphs."""
        x = torch.tanh(self.layer(x))
        _in_eager_mode()
        return x + F.gelu(x)


class EagerLoop(Straight):
    """Layers with a break inside and operations between, which Dynamo leaves to eager mode."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__([_BreaksInside(layer) for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = torch.sin(layer(torch.cos(x)))
        return x


class Checkpointed(Straight):
    """Every layer but the first in a region of `torch.utils.checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class ByHand(nn.Module):
    """A layer in a checkpoint, as people write them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer, and again in the backward."""
        return checkpoint(self.layer, x, use_reentrant=False)


ARRANGEMENTS = {
    "straight": Straight,
    "breaks": Broken,
    "repeated": Repeated,
    "eager loop": EagerLoop,
    "checkpointed": Checkpointed,
}


# --- whole models ------------------------------------------------------------------------------


class Model(nn.Module):
    """Embedding, layers and scores of words; the loss where labels are given."""

    def __init__(self, width: int, body: nn.Module, random: Random) -> None:
        super().__init__()
        self.embedding, self.head = self.stem(width), nn.Linear(width, WORDS)
        self.has_positions = random.random() < 0.7
        if self.has_positions:
            self.positions = nn.Parameter(torch.randn(LONGEST, width) * 0.1)
        self.body, self.norm = body, nn.LayerNorm(width)

    def stem(self, width: int) -> nn.Module:
        """What reads the input."""
        return nn.Embedding(WORDS, width)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Tensor:
        """Scores, or the mean cross entropy."""
        x = self.embedding(words)
        if self.has_positions:
            x = x + self.positions[: x.shape[1]]
        scores = self.head(self.norm(self.body(x)))
        if labels is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Critic(Model):
    """A model that reads scores in place of words."""

    def stem(self, width: int) -> nn.Module:
        """What reads the input."""
        return nn.Linear(WORDS, width)


@dataclass(frozen=True)
class Design:
    """What a random model looks like.

    Attributes:
        seed: of its layers, their parameters included.
        arrangement: a name of `ARRANGEMENTS`.
        most_layers: it has between three layers and so many.
        wider: by this much, so that a GPU has something to do.
        device: where its parameters are.
    """

    seed: str
    arrangement: str
    most_layers: int
    wider: int = 1
    device: str = "cpu"

    def build(self, kind: type[Model] = Model) -> Model:
        """The model in train mode, the same each time."""
        random = Random(self.seed)
        torch.manual_seed(random.randrange(2**31))
        width = self.wider * random.choice((16, 32, 48))
        body = ARRANGEMENTS[self.arrangement](self._layers(width, random))
        return kind(width, body, random).to(self.device).train()

    def _layers(self, width: int, random: Random) -> list[nn.Module]:
        count = random.randint(3, self.most_layers)
        if self.arrangement == "repeated" or random.random() < 0.3:
            kinds = [random.choice(LAYERS)] * count
        else:
            kinds = [random.choice(LAYERS) for _ in range(count)]
            if random.random() < 0.1:
                kinds[count // 2] = Recurrent
        alike = random.randrange(2**31)  # layers of one kind are built alike, as blocks are
        layers: list[nn.Module] = [kind(width, Random(alike)) for kind in kinds]
        if self.arrangement == "straight" and random.random() < 0.2:
            layers[-1] = layers[0]  # two layers share their parameters
        return layers
