"""Models of published training steps, without weights: what `published_steps.py` plans.

Enters: sizes. Leaves: modules on the meta device whose forward returns the loss. They have the
layers of the models that were measured, in plain torch, but for BERT and the diffusion UNet, which
are the libraries'; what their layers do is what costs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification


class _Attention(nn.Module):
    """Causal attention in one kernel, or full attention by products and a softmax."""

    def __init__(
        self, width: int, heads: int, groups: int, *, bias: bool, rotary: bool, fused: bool
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.rotary, self.fused = rotary, fused
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.size, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, cosines: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(x).view(batch, tokens, self.heads + 2 * self.groups, self.size)
        q, k, v = parts.transpose(1, 2).split([self.heads, self.groups, self.groups], dim=1)
        if self.rotary and cosines is not None:
            q, k = _rotated(q, cosines), _rotated(k, cosines)
        if self.groups < self.heads:
            k = k.repeat_interleave(self.heads // self.groups, dim=1)
            v = v.repeat_interleave(self.heads // self.groups, dim=1)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = ((q * self.size**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def _rotated(x: Tensor, cosines: Tensor) -> Tensor:
    """Rotary positions: halves of a head turned against each other, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cosines
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


class _Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    """A layer: attention and an MLP on the normalised residual stream."""

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        hidden: int,
        *,
        llama: bool,
        bias: bool,
        fused: bool = True,
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = _Attention(width, heads, groups, bias=bias, rotary=llama, fused=fused)
        self.mlp: nn.Module = (
            _Gated(width, hidden)
            if llama
            else nn.Sequential(
                nn.Linear(width, hidden, bias=bias),
                nn.GELU(),
                nn.Linear(hidden, width, bias=bias),
            )
        )

    def forward(self, x: Tensor, cosines: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), cosines)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """GPT (learnt positions, GELU, tied head) or Llama (rotary, gated, RMS norms, own head)."""

    def __init__(
        self,
        layers: int,
        *,
        width: int,
        heads: int,
        vocabulary: int,
        tokens: int,
        hidden: int = 0,
        groups: int = 0,
        llama: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        hidden, groups = hidden or 4 * width, groups or heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = None if llama else nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            _Block(width, heads, groups, hidden, llama=llama, bias=bias) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width) if llama else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if not llama:
            self.head.weight = self.embedding.weight
        self.register_buffer("cosines", torch.empty(2, tokens, width // heads // 2))
        self.llama = llama

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of (batch, tokens) of ids."""
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, self.cosines)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class VisionTransformer(nn.Module):
    """ViT on squares of 16 by 16 pixels of an image of 224 by 224; its attention is not fused."""

    def __init__(self, layers: int, *, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 197, width))
        self.blocks = nn.ModuleList(
            _Block(width, heads, heads, 4 * width, llama=False, bias=True, fused=False)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """The loss of (batch, 3, 224, 224) of pixels."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), targets)


class Bert(nn.Module):
    """BERT-large of transformers with a classifier; its attention is products and a softmax."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = BertConfig(
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=4096,
            num_hidden_layers=layers,
            attn_implementation="eager",
        )
        self.model = BertForSequenceClassification(config)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of (batch, tokens) of ids; of targets, the first of each text is its class."""
        return self.model(ids, labels=targets.view(len(ids), -1)[:, 0]).loss


class DiffusionUnet(nn.Module):
    """The UNet of Stable Diffusion 2, and the loss of the noise that it finds."""

    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        self.unet = UNet2DConditionModel(
            cross_attention_dim=1024,
            attention_head_dim=(5, 10, 20, 20),
            use_linear_projection=True,
        )
        self.register_buffer("text", torch.empty(77, 1024))

    def forward(self, latents: Tensor, times: Tensor) -> Tensor:
        """The loss of (batch, 4, height, width) of latents at (batch,) of time steps."""
        text = self.text.expand(len(latents), -1, -1)
        noise = self.unet(latents, times, text).sample
        return F.mse_loss(noise, latents)


class ResNet50(nn.Module):
    """Bottlenecks of three convolutions, each with a batch norm, in four stages."""

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        width = 64
        for number, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if number and not block else 1
                stages.append(_Bottleneck(width, 64 << number, stride))
                width = 256 << number
        self.stem = _convolution(3, 64, 7, stride=2)
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(2048, 1000)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """The loss of (batch, 3, 224, 224) of pixels."""
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        return F.cross_entropy(self.head(self.stages(x).mean(dim=(2, 3))), targets)


class _Bottleneck(nn.Module):
    def __init__(self, width: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.first, self.last = _convolution(width, narrow, 1), _convolution(narrow, 4 * narrow, 1)
        self.middle = _convolution(narrow, narrow, 3, stride=stride)
        is_same = width == 4 * narrow and stride == 1
        self.short = nn.Identity() if is_same else _convolution(width, 4 * narrow, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        found = self.last(F.relu(self.middle(F.relu(self.first(x)))))
        return F.relu(found + self.short(x))


def _convolution(width: int, to: int, size: int, *, stride: int = 1) -> nn.Module:
    layer = nn.Conv2d(width, to, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(to))
