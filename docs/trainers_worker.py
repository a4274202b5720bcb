"""One trainer's whole run in a process of its own, without a plan and under a budget.

Enters: the name of a case. Leaves: a row: the highest measured step, the budget, and what else is
told of the run. Weights after it are compared bit for bit with those of the run without a plan.
The trainers are the real ones; models are small, deep and random, on the CPU, operation by
operation.
"""

from __future__ import annotations

import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes, state_of
from autoremat.memory.storage_sizes import storages_nbytes

Row = dict[str, Any]
Take = Callable[[], Any]

LAYERS, WIDTH, VOCABULARY, LENGTH, BATCH = 8, 64, 256, 64, 8
SAMPLES = 52  # the last batch is half a one
SHARE = 0.4  # of what the unplanned run holds above four times its parameters: what AdamW leaves
FIRST_STEPS = 4  # the second optimizer step begins behind them, also with two batches for each


@dataclass
class Meter:
    """Measures the steps of a run, but for the first ones and those of sizes that are new."""

    others: list[nn.Module] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set)
    _number: int = 0

    def step(self, take: Take, model: nn.Module, batch: Any, optimizer: Any) -> Any:
        """Take a step, measured or not."""
        self._number += 1
        tensors = [t for t in _values(batch) if isinstance(t, Tensor)]
        has_gradients = any(p.grad is not None for p in model.parameters())
        kind = (len(tensors[0]), has_gradients)
        is_new, _ = kind not in self._seen, self._seen.add(kind)
        if is_new or self._number <= FIRST_STEPS:
            return take()
        held = resident_nbytes(nn.ModuleList([model, *self.others]), tensors)
        held += storages_nbytes(state_of([optimizer]), torch.device("cpu"))
        results: list[Any] = []
        self.peaks.append(held + measure_peak(lambda: results.append(take()), device="cpu"))
        return results[0]


def _values(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


# --- models and data ---------------------------------------------------------------------------


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


# --- trainers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What is optimised, and how it is trained.

    Attributes:
        planned: what `optimize` is called with.
        model: whose weights are compared.
        train: trains it; each of its steps is given to the meter.
        meter: measures them.
        keep: what keeps a budget instead of `optimize`, and gives the report of the run.
    """

    planned: Any
    model: nn.Module
    train: Callable[[], object]
    meter: Meter
    keep: Callable[[int], Callable[[], autoremat.Report]] | None = None

    def under(self, budget_nbytes: int) -> Callable[[], autoremat.Report]:
        """Keep a budget from now on; what is returned gives the report once it has trained."""
        if self.keep is not None:
            return self.keep(budget_nbytes)
        autoremat.optimize(self.planned, budget_nbytes, compiler="eager", verbose=False)
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
    much = {"per_device_train_batch_size": BATCH, "num_train_epochs": 3, "learning_rate": 1e-3}
    return {**quiet, **place, **much}


def _attached(trainer: Any, model: nn.Module) -> Callable[[int], Callable[[], autoremat.Report]]:
    """What keeps a budget by `attach`, after the trainer was made."""

    def keep(budget_nbytes: int) -> Callable[[], autoremat.Report]:
        from autoremat.integrations.transformers import attach

        attach(trainer, budget_nbytes, compiler="eager", verbose=False)
        return lambda: autoremat.report(model)

    return keep


def hugging_face(
    make: Callable[[], nn.Module] = llama,
    *,
    varies: bool = False,
    is_attached: bool = False,
    **arguments: Any,
) -> Run:
    """`transformers.Trainer`, with clipping and a smaller last batch."""
    from transformers import Trainer, TrainingArguments

    model, meter = make(), Meter()
    given = TrainingArguments(**_arguments(tempfile.mkdtemp()), **arguments)
    has_eval = "eval_strategy" in arguments
    trainer = _metered(Trainer, meter)(
        model=model,
        args=given,
        train_dataset=Texts(varies=varies),
        eval_dataset=Texts(9) if has_eval else None,
        data_collator=padded if varies else None,
    )
    keep = _attached(trainer, model) if is_attached else None
    return Run(model, model, trainer.train, meter, keep)


def lora() -> nn.Module:
    """A Llama of which PEFT trains a few small products."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {w: n for n, w in enumerate([*special, *(f"w{n}" for n in range(VOCABULARY - 4))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _some_words(drawn: random.Random, least: int, most: int) -> str:
    count = drawn.randint(least, most)
    return " ".join(f"w{drawn.randrange(VOCABULARY - 4)}" for _ in range(count))


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
    model, meter, drawn = llama(), Meter(), random.Random(0)
    rows = [{"text": _some_words(drawn, 40, LENGTH)} for _ in range(SAMPLES)]
    own = {"max_length": LENGTH, "bf16": False, "gradient_checkpointing": False}
    trainer = _metered(SFTTrainer, meter)(
        model=model,
        args=SFTConfig(**_arguments(tempfile.mkdtemp()), **own),
        train_dataset=Rows.from_list(rows),
        processing_class=_tokenizer(),
    )
    keep = _attached(trainer, model) if is_attached else None
    return Run(model, model, trainer.train, meter, keep)


def dpo() -> Run:
    """`trl.DPOTrainer`, with the reference in the list that is optimised."""
    from datasets import Dataset as Rows
    from trl import DPOConfig, DPOTrainer

    _small_tiles()
    model, reference, drawn = llama(), llama().requires_grad_(False), random.Random(0)
    meter = Meter([reference])
    parts = {"prompt": (16, 16), "chosen": (24, 40), "rejected": (24, 40)}
    rows = [{k: _some_words(drawn, *most) for k, most in parts.items()} for _ in range(SAMPLES)]
    own = {"max_length": LENGTH, "bf16": False, "gradient_checkpointing": False}
    trainer = _metered(DPOTrainer, meter)(
        model=model,
        ref_model=reference,
        args=DPOConfig(**_arguments(tempfile.mkdtemp()), **own),
        train_dataset=Rows.from_list(rows),
        processing_class=_tokenizer(),
    )
    return Run([model, reference], model, trainer.train, meter)


def accelerated(*, is_attached: bool = False) -> Run:
    """A loop of one's own with `accelerate`: two batches are one step, gradients are clipped."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, meter = llama(), Meter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train() -> None:
        for batch in (batch for _ in range(3) for batch in loader):
            with accelerator.accumulate(model):
                take = lambda batch=batch: accelerator.backward(model(**batch).loss)  # noqa: E731
                meter.step(take, model, batch, optimizer)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    def attached(budget_nbytes: int) -> Callable[[], autoremat.Report]:
        from autoremat.integrations.accelerate import attach

        attach(accelerator, model, optimizer, budget_nbytes, compiler="eager", verbose=False)
        return lambda: autoremat.report(model)

    return Run(model, model, train, meter, attached if is_attached else None)


def lightning(*, whole: bool = False) -> Run:
    """`lightning.Trainer`, with the network of the module optimised, or a callback for all."""
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    meter = Meter()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

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
        max_epochs=3, accelerator="cpu", gradient_clip_val=1.0, **dict.fromkeys(none, False)
    )
    loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH)

    def called_back(budget_nbytes: int) -> Callable[[], autoremat.Report]:
        from autoremat.integrations.lightning import Autoremat

        callback = Autoremat(budget_nbytes, compiler="eager", verbose=False)
        trainer.callbacks.append(callback)
        return callback.report

    keep = called_back if whole else None
    return Run(module.net, module.net, lambda: trainer.fit(module, loader), meter, keep)


CASES: dict[str, Callable[[], Run]] = {
    "transformers Trainer": hugging_face,
    "transformers Trainer, GPT-2, evaluation": lambda: hugging_face(gpt2, eval_strategy="epoch"),
    "transformers Trainer, two batches a step": lambda: hugging_face(gradient_accumulation_steps=2),
    "transformers Trainer, bf16": lambda: hugging_face(bf16=True),
    "transformers Trainer, label smoothing": lambda: hugging_face(label_smoothing_factor=0.1),
    "transformers Trainer, padded to the longest": lambda: hugging_face(varies=True),
    "PEFT LoRA in transformers' Trainer": lambda: hugging_face(lora),
    "TRL SFTTrainer": sft,
    "TRL DPOTrainer": dpo,
    "accelerate, two batches a step": accelerated,
    "transformers Trainer, attach": lambda: hugging_face(is_attached=True),
    "TRL SFTTrainer, attach": lambda: sft(is_attached=True),
    "accelerate, two batches a step, attach": lambda: accelerated(is_attached=True),
    "Lightning, self.net": lightning,
    "Lightning, the whole module": lambda: lightning(whole=True),
}


def row_of(name: str) -> Row:
    """Train twice, without a plan and with one."""
    torch.set_num_threads(1)
    plain = CASES[name]()
    plain.train()
    unplanned = max(plain.meter.peaks)
    modules = [plain.model, *plain.meter.others]
    copies = [4, *(1 for _ in plain.meter.others)]  # parameters, gradients, two of AdamW's state
    sizes = [sum(p.nbytes for p in module.parameters()) for module in modules]
    floor = sum(n * size for n, size in zip(copies, sizes, strict=True))
    budget = int(floor + SHARE * (unplanned - floor))
    torch.compiler.reset()
    run = CASES[name]()
    report_of_run = run.under(budget)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train()
    report = report_of_run()
    pairs = zip(plain.model.state_dict().values(), run.model.state_dict().values(), strict=True)
    compiles = next(f.text for f in report.facts if f.name == "Compiles")
    return {
        "budget_nbytes": budget,
        "unplanned_nbytes": unplanned,
        "peak_nbytes": max(run.meter.peaks),
        "predicted_nbytes": report.predicted_peak_nbytes,
        "measured_steps": len(run.meter.peaks),
        "compiles": compiles,
        "weights_differ": max(float((a - b).abs().max()) for a, b in pairs),
        "over_told": sum(issubclass(w.category, autoremat.OverBudgetWarning) for w in told),
        "fallbacks": [fallback.code for fallback in report.fallbacks],
    }
