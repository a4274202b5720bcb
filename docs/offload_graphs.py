"""The problems that `offload_links.py` plans: steps on an H100 that is not here.

Started in a process of its own as `python docs/offload_graphs.py NAME FOLDER`. Enters: the name of
a step. Leaves: `NAME.json`, the solver's problem. The architectures are those of the solver's ten
graphs (`solver_graphs.py`), in sizes that people train, in bfloat16, on the meta device; times are
by the data sheet, for code of Inductor. No code is generated: live bytes are the model's of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "solver"))

import torch
from autoremat_solver import Problem
from published_models import Bert, DiffusionUnet, LanguageModel, ResNet50, VisionTransformer
from torch import Tensor, nn

from autoremat.ask.options import Offline
from autoremat.offline import OfflineStep, asked, planned_session

DEVICE = "H100"
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sized:
    """A model on the meta device, and sizes of its batch.

    Attributes:
        made: makes it.
        batch: makes its inputs.
        about: sizes, in words.
    """

    made: Callable[[], nn.Module]
    batch: Callable[[], Inputs]
    about: str


class Mixtral(nn.Module):
    """Transformers' Mixtral, whose experts each take the tokens that are sent to them."""

    def __init__(self, layers: int) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        config = MixtralConfig(num_hidden_layers=layers, use_cache=False)
        self.model = MixtralForCausalLM(config)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of (batch, tokens) of ids."""
        return self.model(input_ids=ids, labels=targets).loss


class T5(nn.Module):
    """Transformers' T5-small."""

    def __init__(self, layers: int) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        config = T5Config(num_layers=layers, use_cache=False, decoder_start_token_id=0)
        self.model = T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of (batch, tokens) of ids, and as many to be made of them."""
        return self.model(input_ids=ids, labels=targets).loss


def tokens(batch: int, length: int) -> Inputs:
    """Ids, and what they are to become."""
    return torch.empty(batch, length, dtype=torch.int64), torch.empty(
        batch, length, dtype=torch.int64
    )


def images(batch: int) -> Inputs:
    """Pixels, and classes."""
    pixels = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16)
    return pixels, torch.empty(batch, dtype=torch.int64)


def latents(batch: int, side: int) -> Inputs:
    """Latent images, and times."""
    noisy = torch.empty(batch, 4, side, side, dtype=torch.bfloat16)
    return noisy, torch.empty(batch, dtype=torch.int64)


def _gpt(layers: int, width: int, heads: int) -> Callable[[], nn.Module]:
    return partial(LanguageModel, layers, width=width, heads=heads, vocabulary=50304, tokens=1024)


def _llama(
    layers: int, width: int, hidden: int, tokens: int, *, heads: int = 32, vocabulary: int = 128256
) -> Callable[[], nn.Module]:
    sizes = {"width": width, "heads": heads, "groups": 8, "hidden": hidden, "tokens": tokens}
    return partial(LanguageModel, layers, **sizes, vocabulary=vocabulary, llama=True, bias=False)


SIZED = {
    "gpt2_12": Sized(_gpt(12, 768, 12), partial(tokens, 32, 1024), "GPT-2, 32 x 1,024 tokens"),
    "gpt2_48": Sized(_gpt(48, 1600, 25), partial(tokens, 8, 1024), "GPT-2 XL, 8 x 1,024 tokens"),
    "llama_16": Sized(
        _llama(16, 2048, 8192, 4096), partial(tokens, 4, 4096), "Llama-3.2 1B, 4 x 4,096 tokens"
    ),
    "llama_32": Sized(
        _llama(32, 4096, 14336, 8192), partial(tokens, 1, 8192), "Llama-3 8B, 1 x 8,192 tokens"
    ),
    "bert_24": Sized(partial(Bert, 24), partial(tokens, 32, 512), "BERT-large, 32 x 512 tokens"),
    "resnet_50": Sized(ResNet50, partial(images, 256), "ResNet-50, 256 images of 224 x 224"),
    "unet": Sized(DiffusionUnet, partial(latents, 16, 64), "Stable Diffusion 2's, 16 of 512 x 512"),
    "vit_12": Sized(
        partial(VisionTransformer, 12, width=768, heads=12),
        partial(images, 128),
        "ViT-B/16, 128 images of 224 x 224",
    ),
    "mixtral_2": Sized(
        partial(Mixtral, 2),
        partial(tokens, 4, 2048),
        "two layers of Mixtral 8x7B, 4 x 2,048 tokens",
    ),
    "t5_6_6": Sized(partial(T5, 6), partial(tokens, 32, 512), "T5-small, 32 x 512 tokens"),
}

# Of what others publish: Qwen3-14B, and 24 layers as wide as Qwen3-0.6B, without its vocabulary.
PUBLISHED = {
    "qwen3_40": Sized(
        _llama(40, 5120, 17408, 3328, heads=40, vocabulary=151936),
        partial(tokens, 4, 3328),
        "Qwen3 14B, 4 x 3,328 tokens",
    ),
    "qwen3_24": Sized(
        _llama(24, 1024, 3072, 32768, heads=16, vocabulary=1024),
        partial(tokens, 1, 32768),
        "24 layers of Qwen3 0.6B, 1 x 32,768 tokens",
    ),
}


def problem_of(sized: Sized) -> Problem:
    """The problem of the largest graph of a step."""
    with torch.device("meta"):
        model, batch = sized.made().to(torch.bfloat16).train(), sized.batch()
    home, options = asked(model, DEVICE, None, budget="1000TB", time_limit=1.0, verbose=False)
    step = OfflineStep(model, (batch, {}), None, home, Offline())
    session = planned_session(options.without_reading(), step)
    problems = [
        part.planned.subject.lowered.problem for part in session.steps.graphs.parts.values()
    ]
    return max(problems, key=lambda problem: len(problem.ops))


def main() -> None:
    """State the step that the command line names."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(problem_of({**SIZED, **PUBLISHED}[name]).to_json())


if __name__ == "__main__":
    main()
