"""The runs of the trainers' page: who trains what, and how it is kept within a budget.

Enters: the name of a case. Leaves: a `Run` of the real trainer, whose steps a `Meter` measures.
Models are small, deep and random, on the CPU, operation by operation.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import trainers_models as models
from torch import Tensor, nn
from trainers_models import BATCH, LENGTH, SAMPLES, Texts, padded

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes, state_of
from autoremat.memory.storage_sizes import storages_nbytes

Take = Callable[[], Any]
Reported = Callable[[], autoremat.Report]

EPOCHS = 2
QUICK = {"compiler": "eager", "verbose": False, "time_limit": 8.0}
RESUMED_AT = 5  # steps, which is an epoch
SHARE = 0.4  # of what the unplanned run holds above what has to be there
OF_CONVOLUTIONS = 0.7  # the same of a model whose gradients and workspaces are most of its peak
CHECKPOINTED = 0.9  # the same of a run whose layers recompute by themselves


@dataclass
class Meter:
    """Measures the steps of a run, from the second step of the optimizer on.

    Attributes:
        others: modules that are there beside the one that is trained.
        peaks: of the steps, in bytes.
        held: what was there before each of them, in bytes.
        seconds: of all steps, the first ones too.
    """

    others: list[nn.Module] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, take: Take, model: nn.Module, batch: Any, optimizer: Any) -> Any:
        """Take a step: a forward and its backward."""
        began, results = time.perf_counter(), list[Any]()
        state = storages_nbytes(state_of([optimizer]), torch.device("cpu"))
        if state:
            tensors = [t for t in _values(batch) if isinstance(t, Tensor)]
            self.held.append(state + resident_nbytes(nn.ModuleList([model, *self.others]), tensors))
            peak = measure_peak(lambda: results.append(take()), device="cpu")
            self.peaks.append(self.held[-1] + peak)
        else:
            results.append(take())
        self.seconds.append(time.perf_counter() - began)
        return results[0]


def _values(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


@dataclass(frozen=True)
class Run:
    """What is optimised, and how it is trained.

    Attributes:
        planned: what `optimize` is called with.
        model: whose weights are compared.
        train: trains it; each of its steps is given to the meter.
        meter: measures them.
        keep: what keeps a budget instead of `optimize`, and gives the report of the run.
        share: of what the run without a plan holds above what has to be there: the budget.
    """

    planned: Any
    model: nn.Module
    train: Callable[[], object]
    meter: Meter
    keep: Callable[[int], Reported] | None = None
    share: float = SHARE

    def under(self, budget_nbytes: int) -> Reported:
        """Keep a budget from now on; what is returned gives the report once it has trained."""
        if self.keep is not None:
            return self.keep(budget_nbytes)
        autoremat.optimize(self.planned, budget_nbytes, **QUICK)
        return lambda: autoremat.report(self.model)


def _metered(trainer: type, meter: Meter) -> type:
    """A Hugging Face trainer whose steps are measured."""

    class Metered(trainer):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, *rest: Any) -> Tensor:
            def take() -> Any:
                return super(Metered, self).training_step(model, inputs, *rest)

            return meter.step(take, self.model, inputs, self.optimizer)

    return Metered


def _arguments(folder: str) -> dict[str, Any]:
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    place = {"output_dir": folder, "use_cpu": True, "dataloader_pin_memory": False, "seed": 1}
    much = {"per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "learning_rate": 1e-3}
    return {**quiet, **place, **much}


def _attached(trainer: Any, model: nn.Module) -> Callable[[int], Reported]:
    """What keeps a budget by `attach`, after the trainer was made."""

    def keep(budget_nbytes: int) -> Reported:
        from autoremat.integrations.transformers import attach

        attach(trainer, budget_nbytes, **QUICK)
        return lambda: autoremat.report(model)

    return keep


def hugging_face(
    make: Callable[[], nn.Module] = models.llama,
    *,
    varies: bool = False,
    is_attached: bool = False,
    share: float = SHARE,
    **arguments: Any,
) -> Run:
    """`transformers.Trainer`, with clipping and a smaller last batch."""
    from transformers import Trainer, TrainingArguments

    model, meter = make(), Meter()
    given = TrainingArguments(**_arguments(tempfile.mkdtemp()) | arguments)
    has_eval = "eval_strategy" in arguments
    trainer = _metered(Trainer, meter)(
        model=model,
        args=given,
        train_dataset=Texts(varies=varies),
        eval_dataset=Texts(9) if has_eval else None,
        data_collator=padded if varies else None,
    )
    keep = _attached(trainer, model) if is_attached else None
    return Run(model, model, trainer.train, meter, keep, share)


def resumed() -> Run:
    """`transformers.Trainer` after an epoch, by a new one with a new model, from its checkpoint.

    Only what the second one does is measured.
    """
    from transformers import Trainer, TrainingArguments

    folder, meter = tempfile.mkdtemp(), Meter()
    saving = {"save_strategy": "steps", "save_steps": RESUMED_AT}
    given = _arguments(folder) | saving | {"lr_scheduler_type": "constant"}

    def trainer(kind: type, model: nn.Module, **arguments: Any) -> Any:
        args = TrainingArguments(**given | arguments)
        return kind(model=model, args=args, train_dataset=Texts())

    model = models.llama()
    kept: list[int] = []

    def train() -> None:
        first = trainer(Trainer, models.llama(), max_steps=RESUMED_AT)
        for budget_nbytes in kept:
            _attached(first, first.model)(budget_nbytes)
        first.train()
        torch.compiler.reset()
        second = trainer(_metered(Trainer, meter), model)
        for budget_nbytes in kept:
            _attached(second, model)(budget_nbytes)
        second.train(resume_from_checkpoint=True)

    def keep(budget_nbytes: int) -> Reported:
        kept.append(budget_nbytes)
        return lambda: autoremat.report(model)

    return Run(model, model, train, meter, keep)


def _small_tiles() -> None:
    """TRL's loss takes 4,096 tokens by 32,768 numbers; so small a model would be nothing beside."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    chunked_logprob.TOKEN_CHUNK_SIZE = utils._CHUNKED_LOGPROB_CHUNK_SIZE = LENGTH


def sft(*, is_attached: bool = False) -> Run:
    """`trl.SFTTrainer`."""
    from datasets import Dataset as Rows
    from trl import SFTConfig, SFTTrainer

    _small_tiles()
    model, meter, drawn = models.llama(), Meter(), random.Random(0)
    rows = [{"text": models.some_words(drawn, 40, LENGTH)} for _ in range(SAMPLES)]
    own = {"max_length": LENGTH, "bf16": False, "gradient_checkpointing": False}
    trainer = _metered(SFTTrainer, meter)(
        model=model,
        args=SFTConfig(**_arguments(tempfile.mkdtemp()), **own),
        train_dataset=Rows.from_list(rows),
        processing_class=models.tokenizer(),
    )
    keep = _attached(trainer, model) if is_attached else None
    return Run(model, model, trainer.train, meter, keep)


def dpo() -> Run:
    """`trl.DPOTrainer`, with the reference in the list that is optimised."""
    from datasets import Dataset as Rows
    from trl import DPOConfig, DPOTrainer

    _small_tiles()
    model, reference, drawn = models.llama(), models.llama().requires_grad_(False), random.Random(0)
    meter = Meter([reference])
    parts = {"prompt": (16, 16), "chosen": (24, 40), "rejected": (24, 40)}
    rows = [
        {k: models.some_words(drawn, *most) for k, most in parts.items()} for _ in range(SAMPLES)
    ]
    own = {"max_length": LENGTH, "bf16": False, "gradient_checkpointing": False}
    trainer = _metered(DPOTrainer, meter)(
        model=model,
        ref_model=reference,
        args=DPOConfig(**_arguments(tempfile.mkdtemp()), **own),
        train_dataset=Rows.from_list(rows),
        processing_class=models.tokenizer(),
    )
    return Run([model, reference], model, trainer.train, meter)


def accelerated(*, is_attached: bool = False) -> Run:
    """A loop of one's own with `accelerate`: two batches are one step, gradients are clipped."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, meter = models.llama(), Meter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train() -> None:
        for batch in (batch for _ in range(EPOCHS) for batch in loader):
            with accelerator.accumulate(model):
                take = lambda batch=batch: accelerator.backward(model(**batch).loss)  # noqa: E731
                meter.step(take, model, batch, optimizer)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    def attached(budget_nbytes: int) -> Reported:
        from autoremat.integrations.accelerate import attach

        attach(accelerator, model, optimizer, budget_nbytes, **QUICK)
        return lambda: autoremat.report(model)

    return Run(model, model, train, meter, attached if is_attached else None)


def loop(
    make: Callable[[], nn.Module],
    draw: Callable[[int, torch.Generator], tuple[Tensor, ...]],
    *,
    micro_steps: int = 1,
    share: float = SHARE,
) -> Run:
    """A loop of one's own with SGD and momentum: some batches are one step, gradients are clipped.

    AdamW would make whole steps of what is rounding, of gradients that are zero but for it, as
    those of a bias before a norm are.
    """
    model, meter = make(), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(EPOCHS):
            for first in range(0, SAMPLES, BATCH):
                yield draw(min(BATCH, SAMPLES - first), generator)

    def take(batch: tuple[Tensor, ...]) -> None:
        result = model(*batch)
        loss = result[-1] if isinstance(result, tuple) else result
        (loss / micro_steps).backward()

    def train() -> None:
        torch.manual_seed(1)
        for number, batch in enumerate(batches(), start=1):
            meter.step(partial(take, batch), model, batch, optimizer)
            if number % micro_steps == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return Run(model, model, train, meter, share=share)


def lightning(*, whole: bool = False, is_late: bool = False) -> Run:
    """`lightning.Trainer`, with the network of the module optimised, or a callback for all."""
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    meter = Meter()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.llama()
            self.budget_nbytes: int | None = None  # of the network, from when it is configured

        def configure_model(self) -> None:
            if self.budget_nbytes is not None:
                autoremat.optimize(self.net, self.budget_nbytes, **QUICK)

        def training_step(self, batch: dict[str, Tensor], _number: int) -> Tensor:
            return self.net(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def optimizer_step(
            self, epoch: int, number: int, optimizer: Any, closure: Any = None
        ) -> None:
            def take() -> None:
                super(Module, self).optimizer_step(epoch, number, optimizer, closure)

            meter.step(take, self.net, self.batch, optimizer)

        def on_train_batch_start(self, batch: dict[str, Tensor], _number: int) -> None:
            self.batch = batch

    module = Module()
    none = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", gradient_clip_val=1.0, **dict.fromkeys(none, False)
    )
    loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH)

    def called_back(budget_nbytes: int) -> Reported:
        from autoremat.integrations.lightning import Autoremat

        callback = Autoremat(budget_nbytes, **QUICK)
        trainer.callbacks.append(callback)
        return callback.report

    def configured(budget_nbytes: int) -> Reported:
        module.budget_nbytes = budget_nbytes
        return lambda: autoremat.report(module.net)

    keep = called_back if whole else configured if is_late else None
    return Run(module.net, module.net, lambda: trainer.fit(module, loader), meter, keep)


def lora_with(prepare: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """LoRA of PEFT, and what else its users call."""

    def make() -> nn.Module:
        model = models.lora()
        prepare(model)
        return model

    return make


def _checkpointed(model: Any) -> None:
    model.enable_input_require_grads()
    name = "activation_checkpointing"  # gradient_checkpointing until transformers 5
    if not hasattr(model, f"{name}_enable"):
        name = "gradient_checkpointing"
    getattr(model, f"{name}_enable")()


CASES: dict[str, Callable[[], Run]] = {
    "transformers Trainer": hugging_face,
    "transformers Trainer, GPT-2, evaluation": lambda: hugging_face(
        models.gpt2, eval_strategy="epoch"
    ),
    "transformers Trainer, two batches a step": lambda: hugging_face(gradient_accumulation_steps=2),
    "transformers Trainer, bf16": lambda: hugging_face(bf16=True),
    "transformers Trainer, label smoothing": lambda: hugging_face(label_smoothing_factor=0.1),
    "transformers Trainer, padded to the longest": lambda: hugging_face(varies=True),
    "PEFT LoRA in transformers' Trainer": lambda: hugging_face(models.lora),
    "PEFT LoRA, inputs require gradients": lambda: hugging_face(
        lora_with(lambda model: model.enable_input_require_grads())
    ),
    "PEFT LoRA, its layers checkpointed": lambda: hugging_face(
        lora_with(_checkpointed), share=CHECKPOINTED
    ),
    "TRL SFTTrainer": sft,
    "TRL DPOTrainer": dpo,
    "accelerate, two batches a step": accelerated,
    "transformers Trainer, attach": lambda: hugging_face(is_attached=True),
    "transformers Trainer, attach, torch_compile=True": lambda: hugging_face(
        is_attached=True, torch_compile=True, torch_compile_backend="aot_eager"
    ),
    "transformers Trainer, attach, resumed": resumed,
    "TRL SFTTrainer, attach": lambda: sft(is_attached=True),
    "accelerate, two batches a step, attach": lambda: accelerated(is_attached=True),
    "Lightning, self.net": lightning,
    "Lightning, configure_model": lambda: lightning(is_late=True),
    "Lightning, the whole module": lambda: lightning(whole=True),
    "a ViT of timm": lambda: loop(models.vision_transformer, models.labelled),
    "a RegNet of torchvision": lambda: loop(
        models.residual_network, models.labelled, share=OF_CONVOLUTIONS
    ),
    "a UNet of diffusers": lambda: loop(models.unet, models.noised),
    "nanoGPT as published, two batches a step": lambda: loop(
        models.nanogpt, models.tokens, micro_steps=2
    ),
}
