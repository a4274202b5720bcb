"""Models and data of the trainers' page: small, deep and random.

Enters: nothing. Leaves: the same models and the same samples at each call.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision_here import import_torchvision

LAYERS, WIDTH, VOCABULARY, LENGTH, BATCH = 8, 64, 256, 64, 8
SAMPLES = 36  # the last batch is half a one
IMAGES, CLASSES = 32, 10
NANOGPT = "NANOGPT"  # names a checkout of github.com/karpathy/nanoGPT


def llama() -> nn.Module:
    """A Llama that returns its loss, if it is given labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 172, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, use_cache=False)).train()


def gpt2() -> nn.Module:
    """A GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "vocab_size": VOCABULARY}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **ids, **none, use_cache=False)).train()


def lora() -> nn.Module:
    """A Llama of which PEFT trains a few small products."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


class Classified(nn.Module):
    """A model that returns logits, and its loss."""

    def __init__(self, model: nn.Module) -> None:
        """Of a model in training mode."""
        super().__init__()
        self.model = model.train()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.model(images), labels, label_smoothing=0.1)


class Denoised(nn.Module):
    """A UNet that predicts noise, and its loss."""

    def __init__(self, unet: nn.Module) -> None:
        """Of a UNet of diffusers."""
        super().__init__()
        self.unet = unet.train()

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """The loss."""
        return F.mse_loss(self.unet(noisy, times).sample, noise)


def vision_transformer() -> nn.Module:
    """Of timm."""
    import_torchvision()
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": IMAGES, "patch_size": 4, "embed_dim": WIDTH, "depth": LAYERS}
    return Classified(
        timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, num_heads=4, **sizes)
    )


def residual_network() -> nn.Module:
    """Of torchvision: a RegNet, bottlenecks as a ResNet has them, with few channels."""
    import_torchvision()
    from torchvision.models.regnet import BlockParams, RegNet

    torch.manual_seed(0)
    blocks = BlockParams.from_init_params(depth=LAYERS, w_0=16, w_a=8.0, w_m=2.0, group_width=8)
    return Classified(RegNet(blocks, num_classes=CLASSES, stem_width=16))


def unet() -> nn.Module:
    """Of diffusers, on two levels, with attention on the lower one."""
    import diffusers

    torch.manual_seed(0)
    return Denoised(
        diffusers.UNet2DModel(
            sample_size=IMAGES,
            block_out_channels=(16, 32),
            layers_per_block=2,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )


def nanogpt() -> nn.Module:
    """Of nanoGPT's own `model.py`, as it was published.

    Raises:
        FileNotFoundError: if nobody says where it is.
    """
    folder = os.environ.get(NANOGPT)
    if folder is None or not (Path(folder) / "model.py").is_file():
        raise FileNotFoundError(f"Set {NANOGPT} to a checkout of github.com/karpathy/nanoGPT.")
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    sizes = {"n_layer": LAYERS, "n_head": 4, "n_embd": WIDTH, "vocab_size": VOCABULARY}
    return GPT(GPTConfig(block_size=LENGTH, dropout=0.1, bias=False, **sizes)).train()


# --- data ----------------------------------------------------------------------------------------


class Texts(Dataset[dict[str, Tensor]]):
    """Random ids, of one length or of several."""

    def __init__(self, count: int = SAMPLES, *, varies: bool = False) -> None:
        """The same each time."""
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator).tolist()
        self._texts = [
            torch.randint(3, VOCABULARY, (n if varies else LENGTH,), generator=generator)
            for n in lengths
        ]

    def __len__(self) -> int:
        """How many."""
        return len(self._texts)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """One, which is its own label."""
        return {"input_ids": self._texts[number], "labels": self._texts[number]}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest text."""
    texts = [sample["input_ids"] for sample in samples]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def tokens(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Ids, and those that follow."""
    ids = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def labelled(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Images and classes."""
    images = torch.randn(count, 3, IMAGES, IMAGES, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def noised(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """What the loop of diffusers makes of images: noise of a time of the scheduler's, added."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()
    images, noise = torch.randn(2, count, 3, IMAGES, IMAGES, generator=generator)
    times = torch.randint(scheduler.config.num_train_timesteps, (count,), generator=generator)
    return scheduler.add_noise(images, noise, times), times, noise


def tokenizer() -> Any:
    """One word, one id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {w: n for n, w in enumerate([*special, *(f"w{n}" for n in range(VOCABULARY - 4))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def some_words(drawn: random.Random, least: int, most: int) -> str:
    """Between two numbers of them."""
    count = drawn.randint(least, most)
    return " ".join(f"w{drawn.randrange(VOCABULARY - 4)}" for _ in range(count))
