"""Every reason to fall back: its code, what it means, and what the user can do.

Enters: a code and the facts of the case. Leaves: the `FallbackWarning` that says them. Guarantees:
a code never changes meaning; every sentence ends with a remedy; docs/fallbacks.md is this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoremat.errors import FallbackWarning

_TORCHS_OWN = "{graph} runs under torch's own partitioner."
_A_DEFECT = (
    "Its results are right, its peak is not promised. This is a defect of autoremat: please report "
    "it with the traceback that strict=True gives."
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something runs without a plan.

    Attributes:
        code: its stable name; 1xx are about a graph or a call, 2xx about a model as a whole.
        fact: what happened, with the facts of the case in braces.
        remedy: what the user can do.
    """

    code: str
    fact: str
    remedy: str


# AR104 has had a meaning that no step reached: it stays unused.
REASONS = {
    reason.code: reason
    for reason in (
        Reason("AR101", f"{_TORCHS_OWN} Planning failed: {{error}}.", _A_DEFECT),
        Reason(
            "AR102",
            f"{_TORCHS_OWN} Its inputs are on several devices ({{devices}}).",
            "Move all that the model reads to one device, or optimize the parts on each by itself.",
        ),
        Reason(
            "AR103",
            f"{_TORCHS_OWN} It is the body of a region that several layers share.",
            "Take torch.compiler.nested_compile_region off the layer to have it planned.",
        ),
        Reason(
            "AR105",
            "The model runs in eager mode. Dynamo found no graph in it that needs a gradient: its "
            "forward is not compiled (torch.compiler.disable, a backward hook on a module, "
            "torch.utils.checkpoint around what it cannot trace, hooks on saved tensors inside it, "
            "such as save_on_cpu, or code that it skips), or the call reached no parameter.",
            "TORCH_LOGS=graph_breaks names the line that Dynamo stops at: move what it cannot "
            "trace out of the model's forward, or optimize a submodule that it can.",
        ),
        Reason(
            "AR106",
            f"{_TORCHS_OWN} The plan, written out, is not the step that was planned: {{error}}",
            _A_DEFECT,
        ),
        Reason(
            "AR107",
            f"{_TORCHS_OWN} Inductor could not compile the planned graph: {{error}}.",
            'Try compiler="eager", which plans the same without Inductor. If the model compiles '
            "under plain torch.compile, this is a defect of autoremat: please report it.",
        ),
        Reason(
            "AR108",
            "The rest of the step is not planned: code between two graphs reads what a tensor "
            "holds ({operation}), which plan() does not know.",
            "Take that code out of the model's forward, or plan on real data with optimize().",
        ),
        Reason(
            "AR109",
            "The layers of type {kind} run in eager mode, because Dynamo does not trace recurrent "
            "layers. What stands before and behind them is planned; what they save for the "
            "backward counts, and where no plan keeps the budget beside it, those run again "
            "that can.",
            "Give the rest of the model what it needs: the budget covers the whole step. "
            "torch._dynamo.config.allow_rnn = True plans them as well, written out step by step, "
            "which compiles slowly and rounds differently.",
        ),
        Reason(
            "AR110",
            "The model runs in eager mode while there is a hook on all modules "
            "(torch.nn.modules.module.register_module_forward_hook and the like) of a kind that "
            "there was none of when a step was compiled: compiled code would leave it out.",
            "Add the hook before the first training step, or to single modules: those are "
            "compiled in whenever they come.",
        ),
        Reason(
            "AR111",
            "{graph} is not run: it has no plan, and under torch's own partitioner its backward "
            "would draw other random numbers than its forward ({node}).",
            'Try the other compiler ("eager" or "inductor"). This is a defect of autoremat or of '
            "torch: please report it.",
        ),
        Reason(
            "AR112",
            "The model runs in eager mode inside a transform of torch.func (grad, vmap, jvp and "
            "the like), where Dynamo compiles nothing.",
            "Take gradients with backward() or torch.autograd.grad, or move the transform into the "
            "forward of the module that is optimised: such steps are planned.",
        ),
        Reason(
            "AR113",
            "A backward ran through a call of the model in eval mode: such calls run unchanged, "
            "and their peak is not promised.",
            "Call model.train() before training steps; single layers that are to stay in eval mode "
            "can be put back by their own eval().",
        ),
        Reason(
            "AR114",
            "An optimizer has stepped the parameters of {kind}, and nothing of it was planned: no "
            "training call of the model has come to its plan. Where a framework calls another "
            "method (Lightning calls training_step) or a part of the model, or model.compile() came"
            " after optimize, that runs as it is.",
            "Optimize the module that is called, such as self.net of a LightningModule, and compile"
            " it no more.",
        ),
        Reason(
            "AR115",
            "What a step holds beside its planned graphs could not be found out: {error}. Its "
            "results are right, and it may be above its budget without a warning.",
            "This is a defect of autoremat: please report it with the traceback that strict=True "
            "gives.",
        ),
        Reason(
            "AR116",
            "{graph} keeps the plan that it has: by another one it could not be compiled: {error}.",
            "The step runs as before, and a warning says so if it is above its budget. This is a "
            "defect of autoremat: please report it.",
        ),
        Reason(
            "AR117",
            "Memory ran out in a first call under the budget {budget}. It was taken again under "
            "the leanest plan, whose predicted peak is {peak}; so are all calls from now on.",
            'Give a budget that leaves what others on the device take: "auto" is what is free when '
            "the first call is planned, less a reserve.",
        ),
        Reason(
            "AR118",
            "What was copied from an optimised {kind} is a plain model: {why}.",
            "Call autoremat.optimize on the copy; a plan that save_plan has stored can be its own, "
            "too.",
        ),
        Reason(
            "AR119",
            "{name} was said to be from {low} to {high}, and this plan is for {how}: the model's "
            "own code makes another graph of other sizes{line}. Each gets a plan of its own.",
            "Take the size's number out of that line (a comparison, a Python loop, int(...)), or "
            "give the range that it allows.",
        ),
        Reason(
            "AR120",
            "The model runs op by op from now on. Inductor could not compile a graph by its plan, "
            "and torch's own partition of it would be above the budget, or fails as well: "
            "{error}.",
            'compiler="eager" asks for that from the start. If the model compiles under plain '
            "torch.compile, this is a defect of autoremat: please report it.",
        ),
        Reason(
            "AR201",
            "No parameter of the model needs a gradient, so there is no backward to plan: the "
            "model runs unchanged.",
            "Call requires_grad_() on what is to be trained.",
        ),
        Reason(
            "AR202",
            "The model is on several devices ({devices}): it runs unchanged.",
            "Optimize the parts on one device each, or move the model to one.",
        ),
        Reason(
            "AR203",
            "The model is in eval mode: it runs unchanged.",
            "Call model.train() before the training step; it is planned then.",
        ),
    )
}


def in_words(code: str, **facts: object) -> tuple[str, str]:
    """Fact and remedy of a code.

    Raises:
        KeyError: for a code that is not in the table, or a fact that is missing.
    """
    reason = REASONS[code]
    return reason.fact.format(**facts), reason.remedy


def fallback(code: str, **facts: object) -> FallbackWarning:
    """The warning of a code; raises as `in_words`."""
    return FallbackWarning(code, " ".join(in_words(code, **facts)))


class Unplannable(Exception):
    """A graph that is left to torch's own partitioner, with the code of the reason."""

    def __init__(self, code: str, **facts: Any) -> None:
        """A code of `REASONS`, and the facts that its sentence names."""
        super().__init__(code)
        self.code = code
        self.facts = facts
