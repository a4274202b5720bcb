"""Where a model and its batch come from, as a value that another process can be given. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

HF = "hf:"  # what a target begins with that is a configuration of transformers


@dataclass(frozen=True)
class TargetArguments:
    """Where model and batch come from.

    Attributes:
        text: `file.py:function`, `module:function` or `hf:CONFIG.json`.
        batch: of an hf target.
        seq: tokens of an hf target.
        dtype: of an hf target's parameters; None for the configuration's.
    """

    text: str
    batch: int = 1
    seq: int = 512
    dtype: str | None = None

    @property
    def is_hf(self) -> bool:
        """Whether the text names a configuration, for which the sizes count."""
        return self.text.startswith(HF)

    def to_text(self) -> str:
        """All of it in one text, for another process: `hf:config.json?batch=8&seq=1024`."""
        if not self.is_hf:
            return self.text
        sizes = {"batch": self.batch, "seq": self.seq} | (
            {"dtype": self.dtype} if self.dtype else {}
        )
        return f"{self.text}?{urlencode(sizes)}"

    @classmethod
    def from_text(cls, text: str) -> TargetArguments:
        """What `to_text` wrote, or a target without sizes."""
        place, mark, query = text.partition("?")
        if not (mark and place.startswith(HF)):
            return cls(text)
        given = dict(parse_qsl(query))
        return cls(place, int(given["batch"]), int(given["seq"]), given.get("dtype"))
