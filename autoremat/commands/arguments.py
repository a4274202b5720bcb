"""What the command line was given, as values: what commands share. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

HF = "hf:"  # what a target begins with that is a configuration of transformers


class Refusal(Exception):
    """Input that cannot be used; the message says what is wrong and what to do."""


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


@dataclass(frozen=True)
class PlanArguments:
    """What to plan for.

    Attributes:
        budget: as the user wrote it; None for a curve.
        device: as the user wrote it; None for the model's own.
        optimizer: name of a class of `torch.optim`, or None.
        compiler: "inductor" or "eager".
        time_limit: seconds for the solver.
        points: of the curve.
    """

    budget: str | None
    device: str | None
    optimizer: str | None
    compiler: str
    time_limit: float
    points: int

    def check(self) -> None:
        """Refuse what no command can use.

        Raises:
            Refusal: if the limit is no finite number of seconds.
        """
        if not 0 <= self.time_limit < float("inf"):
            raise Refusal(f"The time limit is {self.time_limit}: give a finite number of seconds.")
        if self.points == 1:
            raise Refusal("A curve has two ends: give --curve 0 or at least 2.")


def outputs_asked(**paths: Path | None) -> dict[str, Path]:
    """The files that were asked for, by format."""
    return {name: path for name, path in paths.items() if path is not None}
