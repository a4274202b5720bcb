"""On lean plans the generated code takes what the problem says, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import resident_nbytes
from autoremat.planning.reader import Reader

WIDTH, LENGTH, BATCH, VOCABULARY = 64, 64, 4, 1024
HEADS = 4

pytestmark = [pytest.mark.inductor, pytest.mark.thorough]


class Gated(nn.Module):
    """A gate, an update and the way back, around a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, _bias: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Biased(nn.Module):
    """Attention whose scores are moved by what all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h, (*projections, last) = self.norm(x), self.projections
        q, k, v = (p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in projections)
        found = (q @ k.transpose(2, 3) + bias).softmax(-1) @ v
        return x + last(found.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Equal layers and a head of a real vocabulary."""

    def __init__(self, layer: type[nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, HEADS)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        bias = self.bias((places[:, None] - places).abs()).permute(2, 0, 1).unsqueeze(0)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, bias)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("layer", [Gated, Biased])
def test_every_layer_is_read_as_it_was_modelled(
    layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch
):
    """Nothing is fused, or held for a later use, where that takes more than the plan does."""
    torch.manual_seed(0)
    model, ids = LanguageModel(layer), torch.randint(VOCABULARY, (BATCH, LENGTH))
    resident = resident_nbytes(model, ids)
    shares: dict[str, float] = {}
    known = Reader._choice

    def choice(self: Any, modules: Any, solution: Any, code: Any, **form: bool) -> Any:
        modelled_nbytes = solution.timeline.peak_nbytes - resident
        shares[solution.method] = (code.peaks.nbytes - resident) / modelled_nbytes
        return known(self, modules, solution, code, **form)

    monkeypatch.setattr(Reader, "_choice", choice)
    autoremat.plan(model, ids, budget="min", time_limit=1, verbose=False)
    assert shares["every-layer"] == pytest.approx(1.0, abs=0.03)
