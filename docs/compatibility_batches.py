"""Batches for the architectures of `compatibility_zoo.py`.

Enters: nothing. Leaves: keyword inputs of a model, random and the same each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 128
BATCH, TOKENS = 2, 64
IMAGE, CLASSES = 32, 3
SAMPLES, MELS = 8000, 16


class Batch:
    """Random inputs, the same each time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def causal(self) -> dict[str, Any]:
        """Tokens that are their own labels; the model shifts them."""
        ids = self._ids()
        return {"input_ids": ids, "labels": ids.clone()}

    def masked(self) -> dict[str, Any]:
        """Tokens with an attention mask, the end of the second row padded."""
        mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
        mask[1, -8:] = 0
        return {"input_ids": self._ids(), "attention_mask": mask, "labels": self._ids()}

    def boxes(self) -> dict[str, Any]:
        """Tokens and where on the page they are."""
        corner = self._integers(100, BATCH, TOKENS, 2)
        return {**self.masked(), "bbox": torch.cat([corner, corner + 20], dim=-1)}

    def translation(self) -> dict[str, Any]:
        """A source text and a target text; the model shifts the target."""
        return {**self.masked(), "labels": self._ids(TOKENS // 2)}

    def images(self) -> dict[str, Any]:
        """Images and their classes."""
        return {"pixel_values": self._image(), "labels": self._integers(CLASSES, BATCH)}

    def segments(self) -> dict[str, Any]:
        """Images and a class for each of their pixels."""
        return {
            "pixel_values": self._image(),
            "labels": self._integers(CLASSES, BATCH, IMAGE, IMAGE),
        }

    def video(self) -> dict[str, Any]:
        """Four frames and a class."""
        return {
            "pixel_values": self._normal(BATCH, 4, 3, IMAGE, IMAGE),
            "labels": self._integers(CLASSES, BATCH),
        }

    def waves(self) -> dict[str, Any]:
        """Sound and its class."""
        return {
            "input_values": self._normal(BATCH, SAMPLES),
            "labels": self._integers(CLASSES, BATCH),
        }

    def speech(self) -> dict[str, Any]:
        """Sound and its transcript."""
        return {
            "input_values": self._normal(BATCH, SAMPLES),
            "labels": 1 + self._integers(VOCABULARY - 1, BATCH, 6),
        }

    def spectrogram(self) -> dict[str, Any]:
        """A spectrogram and its class."""
        return {
            "input_values": self._normal(BATCH, TOKENS, MELS),
            "labels": self._integers(CLASSES, BATCH),
        }

    def mels(self) -> dict[str, Any]:
        """A spectrogram, twice as long as the encoder's states, and its transcript."""
        return {
            "input_features": self._normal(BATCH, MELS, 2 * TOKENS),
            "labels": self._ids(TOKENS // 2),
        }

    def captions(self) -> dict[str, Any]:
        """Images and texts that belong together."""
        return {
            "input_ids": self._ids(TOKENS // 4),
            "pixel_values": self._image(),
            "return_loss": True,
        }

    def captioning(self) -> dict[str, Any]:
        """Images and the text to write for them."""
        ids = self._ids(TOKENS // 4)
        return {"input_ids": ids, "pixel_values": self._image(), "labels": ids.clone()}

    def questions(self) -> dict[str, Any]:
        """Images, texts and scores of answers."""
        return {
            "input_ids": self._ids(TOKENS // 4),
            "pixel_values": self._image(),
            "labels": self._normal(BATCH, CLASSES).sigmoid(),
        }

    def image_in_text(self) -> dict[str, Any]:
        """A text in which the last token, repeated, stands for an image's patches."""
        ids = self._ids() % (VOCABULARY - 1)
        ids[:, 4 : 4 + (IMAGE // 8) ** 2] = VOCABULARY - 1
        return {"input_ids": ids, "pixel_values": self._image(), "labels": ids.clone()}

    def unmasked(self) -> dict[str, Any]:
        """Tokens and labels of their own."""
        return {"input_ids": self._ids(), "labels": self._ids()}

    def unlabelled_images(self) -> dict[str, Any]:
        """Images only."""
        return {"pixel_values": self._image()}

    def frames(self) -> dict[str, Any]:
        """Four frames and a class, by V-JEPA's name."""
        video = self.video()
        return {"pixel_values_videos": video["pixel_values"], "labels": video["labels"]}

    def objects(self) -> dict[str, Any]:
        """Images, and two boxes with classes for each."""
        found = [
            {
                "class_labels": self._integers(CLASSES, 2),
                "boxes": 0.25 + self._normal(2, 4).sigmoid() / 2,
            }
            for _ in range(BATCH)
        ]
        return {"pixel_values": self._image(), "labels": found}

    def masks(self) -> dict[str, Any]:
        """Images, and two masks with classes for each."""
        return {
            "pixel_values": self._image(),
            "mask_labels": [self._integers(2, 2, IMAGE, IMAGE).float() for _ in range(BATCH)],
            "class_labels": [self._integers(CLASSES, 2) for _ in range(BATCH)],
        }

    def points(self) -> dict[str, Any]:
        """Images and a point of what to cut out."""
        return {
            "pixel_values": self._image(),
            "input_points": self._integers(IMAGE, BATCH, 1, 1, 2).float(),
        }

    def filter_banks(self) -> dict[str, Any]:
        """A spectrogram, frame by frame, and its transcript."""
        return {
            "input_features": self._normal(BATCH, TOKENS, MELS),
            "labels": 1 + self._integers(VOCABULARY - 1, BATCH, 6),
        }

    def dictation(self) -> dict[str, Any]:
        """Sound and its transcript, token by token."""
        return {"input_values": self._normal(BATCH, SAMPLES), "labels": self._ids(TOKENS // 4)}

    def recording(self) -> dict[str, Any]:
        """Sound alone, with its channel."""
        return {"input_values": self._normal(BATCH, 1, SAMPLES // 8)}

    def packed_captions(self) -> dict[str, Any]:
        """Images as rows of patches, and texts that belong to them."""
        side = IMAGE // 8
        return {
            "input_ids": self._ids(TOKENS // 4),
            "pixel_values": self._normal(BATCH, side**2, 3 * 8 * 8),
            "pixel_attention_mask": torch.ones(BATCH, side**2, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[side, side]] * BATCH),
            "return_loss": True,
        }

    def typed_image_in_text(self) -> dict[str, Any]:
        """An image in a text, and which tokens are to be learned."""
        batch = self.image_in_text()
        types = torch.zeros_like(batch["input_ids"])
        types[:, TOKENS // 2 :] = 1
        return {
            **batch,
            "attention_mask": torch.ones_like(types),
            "token_type_ids": types,
        }

    def images_in_text(self) -> dict[str, Any]:
        """A list of one image in a text, four of its patches to a token."""
        batch = self.image_in_text()
        ids = batch["input_ids"] % (VOCABULARY - 1)
        ids[:, 4 : 4 + (IMAGE // 8) ** 2 // 4] = VOCABULARY - 1
        pixels = batch["pixel_values"][:, None]
        return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}

    def packed_image_in_text(self) -> dict[str, Any]:
        """A text with an image, whose patches of all texts are rows of one matrix."""
        side = IMAGE // 8
        ids = self._ids() % (VOCABULARY - 1)
        ids[:, 4 : 4 + side**2 // 4] = VOCABULARY - 1
        return {
            "input_ids": ids,
            "pixel_values": self._normal(BATCH * side**2, 3 * 2 * 8 * 8),
            "image_grid_thw": torch.tensor([[1, side, side]] * BATCH),
            "mm_token_type_ids": (ids == VOCABULARY - 1).long(),
            "labels": ids.clone(),
        }

    def series(self) -> dict[str, Any]:
        """Two channels over time, and what follows."""
        return {
            "past_values": self._normal(BATCH, 64, 2),
            "future_values": self._normal(BATCH, 16, 2),
        }

    def histories(self) -> dict[str, Any]:
        """Series of one channel, how often they are measured, and what follows."""
        return {
            "past_values": list(self._normal(BATCH, 64)),
            "freq": [0] * BATCH,
            "future_values": self._normal(BATCH, 16),
        }

    def _ids(self, tokens: int = TOKENS) -> Tensor:
        return 3 + self._integers(VOCABULARY - 3, BATCH, tokens)  # 0 to 2 are special

    def _image(self) -> Tensor:
        return self._normal(BATCH, 3, IMAGE, IMAGE)

    def _integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self._generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)
