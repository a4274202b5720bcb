"""The models that the tests and `docs/benchmarks.py` run: small widths, real depth.

Each function returns a fresh, seeded `Case` whose loss is computed inside the model where that is
natural, so that a training step is one graph. Sizes make activations dominate: the peak of an
eager step above what is resident is at least five times the gradients, and such a step takes about
a second on one thread.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model in train mode, one batch, and the loss of a training step on it."""

    name: str
    model: nn.Module
    inputs: Inputs
    forward: Callable[[nn.Module, Inputs], Any]
    """The model's output on the batch. A training loop's variable holds it during the backward."""
    loss_of: Callable[[Any], Tensor]
    layers: tuple[str, ...]
    """Names of the repeated submodules: what a user would wrap in `torch.utils.checkpoint`."""
    dropout: bool = False
    batch_norm: bool = False
    """Whether gradients have to be judged in float64 (at initialisation float32 is too coarse)."""

    def step(self) -> Tensor:
        """Forward and backward, as a training loop writes them; returns the loss."""
        output = self.forward(self.model, self.inputs)
        loss = self.loss_of(output)
        loss.backward()
        return loss.detach()


def train_gpt() -> ModuleType:
    """The example `examples/train_gpt.py` as a module."""
    name = "autoremat_example_train_gpt"
    if name not in sys.modules:
        path = Path(__file__).parent.parent / "examples" / "train_gpt.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def example_gpt(layers: int = 12, batch: int = 8, dropout: float = 0.0) -> Case:
    """The example GPT: 12 layers, causal attention, tied embeddings."""
    model, inputs = train_gpt().make(layers=layers, batch=batch, dropout=dropout)
    names = tuple(f"blocks.{i}" for i in range(layers))
    return Case("example_gpt", model, inputs, call, itself, names, dropout=dropout > 0)


def gpt2(
    layers: int = 12, batch: int = 4, tokens: int = 256, vocabulary: int = 512, width: int = 128
) -> Case:
    """Hugging Face's GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=tokens,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # else its first loss warns, which breaks the graph
    names = tuple(f"transformer.h.{i}" for i in range(layers))
    inputs = _tokens(vocabulary, batch, tokens)
    return Case("gpt2", model, inputs, call_with_labels, its_loss, names)


def llama(
    layers: int = 12, batch: int = 4, tokens: int = 256, vocabulary: int = 512, width: int = 128
) -> Case:
    """Hugging Face's Llama with grouped-query attention: four heads share two keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    names = tuple(f"model.layers.{i}" for i in range(layers))
    inputs = _tokens(vocabulary, batch, tokens)
    return Case("llama", model, inputs, call_with_labels, its_loss, names)


def bert(layers: int = 12, batch: int = 8, tokens: int = 128) -> Case:
    """Hugging Face's BERT in train mode, dropout 0.1 on hidden states and attention."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=tokens,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = BertForMaskedLM(config).train()
    names = tuple(f"bert.encoder.layer.{i}" for i in range(layers))
    return Case(
        "bert", model, _tokens(512, batch, tokens), call_with_labels, its_loss, names, dropout=True
    )


class Bottleneck(nn.Module):
    """ResNet's block: 1x1, 3x3, 1x1 convolutions with BatchNorm, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to `4 * width` channels."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """Bottleneck blocks 3-4-6-3, as in ResNet-50, a quarter of its width."""

    def __init__(self, width: int = 16, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks, channels = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.blocks = nn.ModuleList(blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of (batch, 3, height, width) against class numbers."""
        x = F.max_pool2d(self.stem(images), 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.classifier(x.mean((2, 3))), labels)


def resnet50(batch: int = 16, size: int = 128, dtype: torch.dtype = torch.float32) -> Case:
    """A ResNet-50 of a quarter of the width, BatchNorm in train mode."""
    torch.manual_seed(0)
    model = ResNet50().to(dtype).train()
    inputs = torch.randn(batch, 3, size, size, dtype=dtype), torch.randint(100, (batch,))
    names = tuple(f"blocks.{i}" for i in range(16))
    return Case("resnet50", model, inputs, call, itself, names, batch_norm=True)


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each with GroupNorm and SiLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(channels, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Five levels down and up; each level's output skips over all deeper ones."""

    def __init__(self, width: int = 16, levels: int = 5) -> None:
        super().__init__()
        widths = [width * 2 ** min(i, 3) for i in range(levels)]
        self.down = nn.ModuleList(
            DoubleConv(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            DoubleConv(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of the network's output against `targets`."""
        x, skips = images, []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1))
        return F.mse_loss(self.head(x), targets)


def unet(batch: int = 8, size: int = 96) -> Case:
    """A UNet with long skip connections."""
    torch.manual_seed(0)
    model = UNet().train()
    inputs = torch.randn(batch, 3, size, size), torch.randn(batch, 3, size, size)
    names = (*(f"down.{i}" for i in range(5)), *(f"up.{i}" for i in range(4)))
    return Case("unet", model, inputs, call, itself, names)


class MLP(nn.Module):
    """A plain chain of `Linear` and `tanh`, in groups of eight layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.groups = nn.Sequential(
            *(
                nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(width, width), nn.Tanh())))
                for _ in range(layers // 8)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the output."""
        return self.groups(x).square().mean()


def mlp(layers: int = 64, width: int = 256, batch: int = 4096) -> Case:
    """64 layers of width 256 on 4,096 rows: 4 MiB per activation, 16 MiB of gradients."""
    torch.manual_seed(0)
    model = MLP(layers, width).train()
    names = tuple(f"groups.{i}" for i in range(layers // 8))
    return Case("mlp", model, (torch.randn(batch, width),), call, itself, names)


CASES: dict[str, Callable[..., Case]] = {
    "example_gpt": example_gpt,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "resnet50": resnet50,
    "unet": unet,
    "mlp": mlp,
}


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The output of a model on positional inputs."""
    return model(*inputs)


def itself(output: Tensor) -> Tensor:
    """The loss of a model that returns it."""
    return output


def call_with_labels(model: nn.Module, inputs: Inputs) -> Any:
    """The output of a Hugging Face model; language models shift the labels themselves."""
    tokens, labels = inputs
    return model(input_ids=tokens, labels=labels)


def its_loss(output: Any) -> Tensor:
    """The loss in a Hugging Face model's output."""
    loss: Tensor = output.loss
    return loss


def _tokens(vocabulary: int, batch: int, tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (batch, tokens), generator=generator)
    labels = torch.randint(vocabulary, (batch, tokens), generator=generator)
    return ids, labels
