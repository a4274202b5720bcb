"""The forms that a training step takes in practice, each in a few lines.

Enters: what is trained, and batches. Leaves: gradients in the parameters, and updated parameters
where there is an optimizer. Every form goes through the public interface only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from steps_models import WORDS, ByHand, Critic, Design, Model
from torch import Tensor, nn

import autoremat

MICRO_BATCHES = 3


@dataclass(frozen=True)
class Size:
    """Of a batch."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


Batch = tuple[Tensor, Tensor]  # words, and what they should become


def batch_of(size: Size, device: str = "cpu") -> Batch:
    """Random words, the same each time."""
    generator = torch.Generator().manual_seed(size.batch * 1000 + size.length)
    shape = (size.batch, size.length)
    words, labels = (torch.randint(WORDS, shape, generator=generator) for _ in range(2))
    return words.to(device), labels.to(device)


@dataclass
class Training:
    """Models and their optimizers, if there are any."""

    models: list[Model]
    optimizers: list[torch.optim.Optimizer]

    @property
    def model(self) -> Model:
        """The first of the models."""
        return self.models[0]

    @property
    def whole(self) -> nn.ModuleList:
        """All models as one module."""
        return nn.ModuleList(self.models)

    def forget_gradients(self, *, set_to_none: bool = True) -> None:
        """As optimizers do before a step."""
        for model in self.models:
            model.zero_grad(set_to_none=set_to_none)

    def update(self) -> None:
        """The optimizers' steps."""
        for optimizer in self.optimizers:
            optimizer.step()


Take = Callable[[Training, Batch], None]
Sizes = Callable[[Random], list[Size]]
Optimize = Callable[["Subject", Training], None]


@dataclass(frozen=True)
class Subject:
    """What a planned training is given.

    Attributes:
        budget_nbytes: of the whole step.
        compiler: "eager" or "inductor".
        time_limit_s: of a solve, in seconds.
        through: "optimize", or "backend" for `torch.compile(backend="autoremat")`.
    """

    budget_nbytes: int
    compiler: str
    time_limit_s: float
    through: str

    @property
    def options(self) -> dict[str, object]:
        """A mapping of its own for each call: models that share one share the budget."""
        return {
            "budget": self.budget_nbytes,
            "compiler": self.compiler,
            "time_limit": self.time_limit_s,
            "verbose": False,
        }

    def optimize(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Plan one module in place."""
        if self.through == "backend":
            module.compile(backend="autoremat", options=self.options)
        else:
            autoremat.optimize(module, optimizer=optimizer, **self.options)


# --- steps -------------------------------------------------------------------------------------


def _usual(training: Training, batch: Batch) -> None:
    training.forget_gradients()
    training.model(*batch).backward()
    training.update()


def _loss_outside(training: Training, batch: Batch) -> None:
    training.forget_gradients()
    words, labels = batch
    scores = training.model(words).float().flatten(0, 1)
    F.cross_entropy(scores, labels.flatten(), label_smoothing=0.1).backward()


def _two_calls(training: Training, batch: Batch) -> None:
    training.forget_gradients()
    first, second = batch
    model = training.model
    (model(first) - model(second)).square().mean().backward()


def _two_towers(training: Training, batch: Batch) -> None:
    training.forget_gradients()
    first, second = batch
    one, other = training.models
    (one(first) - other(second)).square().mean().backward()


def _adversaries(training: Training, batch: Batch) -> None:
    maker, critic = training.models
    words, labels = batch
    critic.zero_grad()
    real = F.one_hot(labels, WORDS).float()
    made = maker(words).softmax(-1)
    (critic(made.detach()).mean() - critic(real).mean()).backward()
    training.optimizers[1].step()
    maker.zero_grad()
    (-critic(maker(words).softmax(-1)).mean()).backward()
    training.optimizers[0].step()


def _micro_batches(training: Training, batch: Batch) -> None:
    training.forget_gradients()
    for _ in range(MICRO_BATCHES):
        (training.model(*batch) / MICRO_BATCHES).backward()


def _kept_gradients(training: Training, batch: Batch) -> None:
    training.forget_gradients(set_to_none=False)
    for _ in range(MICRO_BATCHES):
        (training.model(*batch) / MICRO_BATCHES).backward()


def _pipeline(training: Training, batch: Batch) -> None:
    training.forget_gradients()
    losses = [training.model(*batch) for _ in range(MICRO_BATCHES)]
    while losses:
        losses.pop(0).backward()


def _without_gradients_between(training: Training, batch: Batch) -> None:
    with torch.no_grad():
        training.model(*batch)
    _usual(training, batch)


def _evaluation_between(training: Training, batch: Batch) -> None:
    training.model.eval()
    with torch.no_grad():
        training.model(*batch)
    training.model.train()
    _usual(training, batch)


def _dropped(training: Training, batch: Batch) -> None:
    training.model(*batch)
    _usual(training, batch)


def _kept(training: Training, batch: Batch) -> None:
    held = training.model(*batch)
    _usual(training, batch)
    del held


def _two_backwards(training: Training, batch: Batch) -> None:
    training.forget_gradients()
    loss = training.model(*batch)
    loss.backward(retain_graph=True)
    loss.backward()


# --- sizes: of one step after the other --------------------------------------------------------


def _constant(random: Random) -> list[Size]:
    return [random.choice((Size(8, 128), Size(4, 256), Size(16, 64)))] * 2


def _grown_batch(random: Random) -> list[Size]:
    length = random.choice((96, 128, 192))
    return [Size(batch, length) for batch in range(1, 9)]


def _shuffled_batch(random: Random) -> list[Size]:
    sizes = _grown_batch(random)
    return random.sample(sizes, len(sizes))


def _alternating_batch(random: Random) -> list[Size]:
    sizes = _grown_batch(random)
    return [size for pair in zip(sizes[4:], sizes[3::-1], strict=True) for size in pair]


def _grown_length(random: Random) -> list[Size]:
    batch = random.choice((2, 3, 4))
    return [Size(batch, length) for length in (64, 128, 160, 256, 384)]


def _shuffled_length(random: Random) -> list[Size]:
    sizes = _grown_length(random)
    return random.sample(sizes, len(sizes))


# --- what is optimised -------------------------------------------------------------------------


def _whole(subject: Subject, training: Training) -> None:
    for model in training.models:
        subject.optimize(model)


def _with_optimizers(subject: Subject, training: Training) -> None:
    for model, optimizer in zip(training.models, training.optimizers, strict=True):
        subject.optimize(model, optimizer)


def _each_block(subject: Subject, training: Training) -> None:
    for block in dict.fromkeys(training.model.body.layers):
        subject.optimize(block)


def _each_block_of_one_mapping(subject: Subject, training: Training) -> None:
    options = subject.options
    for block in dict.fromkeys(training.model.body.layers):
        block.compile(backend="autoremat", options=options)


@dataclass(frozen=True)
class Form:
    """A form of a training step.

    Attributes:
        name: short, for tables and the command line.
        sentence: what the step does.
        take: takes it.
        arrangement: of the models' layers.
        sizes: of the batches, one step after the other.
        kinds: of the models.
        optimizer: "" without one, "late" if it is made after planning was asked for, else "passed".
        optimize: asks for planning.
        through: what it can go through, as `Subject.through`.
    """

    name: str
    sentence: str
    take: Take = _usual
    arrangement: str = "straight"
    sizes: Sizes = _constant
    kinds: tuple[type[Model], ...] = (Model,)
    optimizer: str = ""
    optimize: Optimize = _whole
    through: tuple[str, ...] = ("optimize", "optimize", "backend")

    def plain(self, designs: list[Design]) -> Training:
        """A training without a plan."""
        models = [d.build(kind) for d, kind in zip(designs, self.kinds, strict=True)]
        return Training(models, list(self._optimizers(models)))

    def by_hand(self, designs: list[Design]) -> Training:
        """A training with a checkpoint around each layer."""
        training = self.plain(designs)
        for model in training.models:
            layers: nn.ModuleList = model.body.layers
            around = {layer: ByHand(layer) for layer in layers}
            model.body.layers = nn.ModuleList(around[layer] for layer in layers)
        return training

    def planned(self, designs: list[Design], subject: Subject) -> Training:
        """The same training, optimised; nothing is planned yet."""
        training = self.plain(designs)
        if self.optimizer == "late":
            training.optimizers.clear()
        self.optimize(subject, training)
        if self.optimizer == "late":
            training.optimizers += self._optimizers(training.models)
        return training

    def _optimizers(self, models: list[Model]) -> Iterator[torch.optim.Optimizer]:
        if self.optimizer:
            yield from (torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models)


OURS = ("optimize",)  # what the backend has no counterpart of

FORMS = {
    form.name: form
    for form in (
        Form("plain", "One forward and one backward, the loss inside the model."),
        Form("grown batch", "Batches of 1, 2, 3, ... 8.", sizes=_grown_batch),
        Form("shuffled batch", "Batches of 1 to 8 in random order.", sizes=_shuffled_batch),
        Form("batch in turn", "Large and small batches in turn.", sizes=_alternating_batch),
        Form("grown length", "Sequences of 64 to 384, ever longer.", sizes=_grown_length),
        Form("shuffled length", "The same in random order.", sizes=_shuffled_length),
        Form("n runs", "One graph runs for every layer.", arrangement="repeated"),
        Form(
            "each block",
            "Every layer optimised alone, each with all of the budget.",
            optimize=_each_block,
        ),
        Form(
            "blocks of one mapping",
            "Every layer compiled alone, with one mapping of options.",
            optimize=_each_block_of_one_mapping,
            through=("backend",),
        ),
        Form(
            "two calls",
            "Two calls of one model before one backward.",
            _two_calls,
        ),
        Form(
            "two towers",
            "Two models before one backward, each with all of the budget.",
            _two_towers,
            kinds=(Model, Model),
        ),
        Form(
            "adversaries",
            "Two models that are trained in turn, one through the other.",
            _adversaries,
            kinds=(Model, Critic),
            optimizer="passed",
            optimize=_with_optimizers,
        ),
        Form(
            "micro-batches",
            "Three backwards add up; no gradient exists before.",
            _micro_batches,
        ),
        Form(
            "kept gradients",
            "Three backwards add to gradients that are never set to None.",
            _kept_gradients,
        ),
        Form(
            "pipeline",
            "Three forwards, then their three backwards.",
            _pipeline,
        ),
        Form("graph breaks", "A graph break behind every second layer.", arrangement="breaks"),
        Form(
            "eager loop",
            "Dynamo leaves the loop over the layers to eager mode.",
            arrangement="eager loop",
        ),
        Form("loss outside", "Scores leave the model; the loss is eager code.", _loss_outside),
        Form(
            "late optimizer", "AdamW, made after `optimize` and not passed to it.", optimizer="late"
        ),
        Form(
            "passed optimizer",
            "AdamW, passed to `optimize`.",
            optimizer="passed",
            optimize=_with_optimizers,
            through=OURS,
        ),
        Form(
            "no_grad between",
            "A call under `no_grad` before each step.",
            _without_gradients_between,
        ),
        Form(
            "eval between",
            "A call in eval mode under `no_grad` before each step.",
            _evaluation_between,
        ),
        Form("dropped output", "A forward before each step, whose output is dropped.", _dropped),
        Form(
            "kept output", "A forward before each step, whose output is kept until its end.", _kept
        ),
        Form(
            "checkpointed",
            "All layers but the first in regions of `torch.utils.checkpoint`.",
            arrangement="checkpointed",
        ),
        Form(
            "two backwards", "A backward that retains the graph, and another one.", _two_backwards
        ),
    )
}
