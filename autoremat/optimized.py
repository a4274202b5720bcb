"""What runs when an optimised module is called.

Enters: a module, and the `Training` that plans its steps. Leaves: its calls, compiled in training
and as they were otherwise. Guarantees: a deep copy of the module is planned as the module is, from
its own first training call on; who pickles the module is told that the plan stays behind.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from autoremat import _torch
from autoremat.backend import module_call
from autoremat.call_stack import users_level
from autoremat.errors import FallbackError
from autoremat.fallbacks import fallback
from autoremat.memory.storage_sizes import tensors_in
from autoremat.planning.sizes import MANY_COMPILES
from autoremat.session.call_sizes import CallSizes
from autoremat.session.eager_recurrent import eager_recurrent_layers
from autoremat.session.op_by_op import NotCompiled, let_go
from autoremat.session.retake import Before
from autoremat.session.session import Session
from autoremat.session.stand_ins import own_forward
from autoremat.session.torch_layers import traced_torch_layers
from autoremat.session.training import Shared, Training
from autoremat.units import format_nbytes

_NOT_AGAIN = (
    "autoremat: part of this call has {}, so it was not taken again under a leaner plan. "
    'budget="min" begins with the leanest one.'
)

_OPTIMISED_BEFORE = (
    "autoremat: {} was optimised before, and stays as it was asked for then: options of "
    'torch.compile(..., backend="autoremat") around it are not heeded for it. Leave one of the two '
    "out."
)

# Where an optimised part of an optimised model is one with the whole.
_is_own_compile: ContextVar[bool] = ContextVar("is_own_compile", default=False)


_HELD = "_autoremat_call"

OptimizeAlike = Callable[[nn.Module], None]

_taking_over = threading.RLock()

_calls: WeakSet[OptimizedCall] = WeakSet()


class Call:
    """What runs when a module is called, and what becomes of it where the module is copied."""

    def __init__(self, model: nn.Module, optimize_alike: OptimizeAlike) -> None:
        """Let it run when the module is called.

        Args:
            model: the module.
            optimize_alike: optimises another module as this one was.
        """
        self.model = weakref.ref(model)
        self._optimize_alike = optimize_alike
        self._is_pickle_told = False
        # Of what a module holds, it leaves its compiled call out where it is copied.
        vars(model)[_HELD] = self
        _torch.set_compiled_call(model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the model."""
        raise NotImplementedError

    def _model(self) -> nn.Module:
        model = self.model()
        assert model is not None, "a call comes from the module itself"
        return model

    @property
    def _is_in_use(self) -> bool:
        """Whether it runs when its module is called, and is not merely held by another one."""
        model = self.model()
        return model is not None and _torch.compiled_call(model) is self

    def __deepcopy__(self, memo: dict[int, Any]) -> Call:
        """The call of the module's copy, which has been made by now and gets what it holds.

        Where another module is copied, which holds what this one does, nothing comes of it.
        """
        copied = memo.get(id(self.model()))
        if not isinstance(copied, nn.Module) or not self._is_in_use:
            return self
        return CopiedCall(copied, self._optimize_alike, self._copies())

    def _copies(self) -> WeakSet[nn.Module]:
        """Copies that are not trained, as a moving average: steps hold them as well."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """None, which is read where there is no autoremat."""
        if self._is_in_use and not self._is_pickle_told:
            self._is_pickle_told = True
            why = "it was pickled, and plans stay in their process"
            _tell_of_plain_copy(type(self._model()), why)
        return type(None), ()


class CopiedCall(Call):
    """The call of a deep copy that has not been trained yet: its first training call plans it."""

    def __init__(
        self, model: nn.Module, optimize_alike: OptimizeAlike, held: WeakSet[nn.Module]
    ) -> None:
        """Let it run when the copy is called.

        Args:
            model: the copy.
            optimize_alike: as of `Call`.
            held: what counts as held beside the steps of the module that it is a copy of.
        """
        super().__init__(model, optimize_alike)
        self._held = held
        held.add(model)

    def give_way(self) -> None:
        """Let the copy's own call run again: it has a budget of its own from now on."""
        model = self._model()
        self._held.discard(model)
        _torch.set_compiled_call(model, None)
        vars(model).pop(_HELD, None)

    @torch.compiler.disable(recursive=False)  # within an outer torch.compile, a graph of its own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the copy, under a plan if it trains."""
        model = self._model()
        is_part = _is_own_compile.get() and _torch.takes_what_is_called()
        is_plain = is_part or _torch.in_functional_transform()
        if is_plain or not (torch.is_grad_enabled() and self.trains):
            return _torch.own_call(model)(*args, **kwargs)
        self.take_over()
        return model(*args, **kwargs)

    def _copies(self) -> WeakSet[nn.Module]:
        return self._held

    @property
    def trains(self) -> bool:
        """Whether it is called in training, where gradients are on."""
        return self._model().training and is_trainable(self._model())

    def take_over(self) -> None:
        """Optimise the copy as the module was that it is of; leave it plain where that cannot be.

        Raises:
            FallbackError: if that is to be strict, and it cannot be planned.
        """
        model = self._model()
        with _taking_over:
            if not self._is_in_use:  # another thread was first
                return
            self.give_way()
            try:
                self._optimize_alike(model)
            except FallbackError:  # which the next call raises as well
                CopiedCall(model, self._optimize_alike, self._held)
                raise
            except ValueError as error:
                _tell_of_plain_copy(type(model), str(error).rstrip("."))


def _tell_of_plain_copy(kind: type[nn.Module], why: str) -> None:
    warnings.warn(fallback("AR118", kind=kind.__name__, why=why), stacklevel=users_level())


@functools.cache
def keep_plans_in_outer_compiles() -> None:
    """Let Dynamo stop at optimised modules; once, and not before there are any."""
    _torch.stop_at(_is_planned_apart)


def _is_planned_apart(module: nn.Module) -> bool:
    """Whether a module that a compile has come to has a plan of its own."""
    call = _torch.compiled_call(module)
    if isinstance(call, CopiedCall):
        return call.trains and not _is_own_compile.get()
    if not isinstance(call, OptimizedCall):
        return False
    if _is_own_compile.get():
        call.training.is_within_another = True
        return False
    return True


def is_trainable(model: nn.Module) -> bool:
    """Whether any parameter needs a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())


def _nothing() -> None:
    """Nobody wants to know."""


class OptimizedCall(Call):
    """The compiled call of one module, under the plans of all that share its budget.

    Attributes:
        training: plans it.
        before_training_call: called before each training call, which has its batch by then.
    """

    def __init__(self, model: nn.Module, training: Training, optimize_alike: OptimizeAlike) -> None:
        """Prepare to compile the model's call; nothing is compiled yet."""
        super().__init__(model, optimize_alike)
        self.training = training
        self.before_training_call: Callable[[], object] = _nothing
        self._forward = own_forward(type(model))
        self._is_frozen = not is_trainable(model)
        self._shared: dict[Session, Shared] = {}  # with modules that are alike
        self._sizes = CallSizes(training.asked.sizes)
        self._is_asked_again = self._is_told_of_it = False  # by a backend of ours around it
        _calls.add(self)

    def _copies(self) -> WeakSet[nn.Module]:
        return self.training.copies()

    @property
    def session(self) -> Session:
        """The session of the latest training call."""
        return self.training.session

    @property
    def has_run(self) -> bool:
        """Whether there is anything to tell: what was planned, or why nothing was."""
        return self.session.steps.is_planned or bool(self.session.told.fallbacks)

    @torch.compiler.disable(recursive=False)  # within an outer torch.compile, a graph of its own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the model: compiled in training, as it is otherwise."""
        model = self._model()
        if _is_own_compile.get() and _torch.takes_what_is_called():  # after a graph break within it
            self.training.is_within_another = True
            return _torch.own_call(model)(*args, **kwargs)
        if not torch.is_grad_enabled():
            with self.session.steps.meanwhile.during_inference(id(self), (args, kwargs)):
                output = _torch.own_call(model)(*args, **kwargs)
                self.training.members.note_held(output)
                self.session.steps.audit.made.note(output)
            return output
        if self._is_frozen and not is_trainable(model):
            return _torch.own_call(model)(*args, **kwargs)
        if not model.training:
            return self._watched(_torch.own_call(model)(*args, **kwargs))
        self._is_asked_again = _torch.backend_around() == "autoremat"
        return self._planned(model, args, kwargs)

    def _watched(self, output: Any) -> Any:
        """What a call in eval mode returned; a backward through it is told of."""
        made = (tensor.grad_fn for tensor in tensors_in(output))
        node = next((node for node in made if node is not None), None)
        if node is not None:
            session = self.session
            node.register_prehook(lambda _: session.told.fall_back("AR113"))
            self._note_eager(session, output)
        return output

    @torch.compiler.disable  # nor is what stands around the compiled call of ours traced
    def _planned(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _torch.in_functional_transform():
            self.session.told.fall_back("AR112")
            return _torch.own_call(model)(*args, **kwargs)
        if self._global_hooks_came_later():
            self.session.told.fall_back("AR110")
            output = _torch.own_call(model)(*args, **kwargs)
            self._note_eager(self.session, output)
            return output
        if self._is_asked_again and not self._is_told_of_it:
            self._is_told_of_it = True
            told = _OPTIMISED_BEFORE.format(type(model).__name__)
            warnings.warn(told, stacklevel=users_level())
        self.before_training_call()
        with self._sizes.of(model.forward, args, kwargs):
            try:
                return self._within(model, args, kwargs)
            except NotCompiled as error:  # noted: the step that begins now is planned op by op
                let_go(error)
            return self._within(model, args, kwargs)

    def _within(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose sizes are within their ranges."""
        with self.training.planning:
            if own_forward(type(model)) is not self._forward:  # Dynamo has no guard for that
                self._forward = own_forward(type(model))
                self.training.start_anew()
            lockstep = self.training.meet_ranks(model)
            session = self.training.begin((args, kwargs), id(self))
            is_first = session not in self._shared
            if is_first or not self._is_planned(session):  # others wait meanwhile for the plan
                with lockstep.beginning(session):
                    return self._first_run(session, args, kwargs)
        return self._run(session, args, kwargs)

    def _first_run(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that compiles; where memory runs out, it is taken once more, as lean as can be."""
        model, options = self._model(), session.steps.options
        before = Before([*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))])
        try:
            return self._run(session, args, kwargs)
        except torch.OutOfMemoryError as error:
            if options.budget.is_least or options.setting.strict:
                raise
            if options.setting.steering.repeatable and self.training.has_ranks:
                raise  # its plan says what is communicated again: it has to be that of all ranks
            if before.obstacle:
                error.add_note(_NOT_AGAIN.format(before.obstacle))
                raise
        before.restore_random()
        budget_nbytes = session.steps.budget_nbytes
        leanest = self.training.begin_leanest()
        leanest.before_run = session.before_run  # other ranks may still wait for this one
        try:
            output = self._run(leanest, args, kwargs)
        finally:
            leanest.before_run = None
        peak = format_nbytes(leanest.steps.peak_nbytes)
        leanest.told.fall_back("AR117", budget=format_nbytes(budget_nbytes), peak=peak)
        return output

    def _run(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _is_own_compile.set(True)
        try:
            with (
                _torch.compiling_steps(2 * MANY_COMPILES * self.training.members.count),
                eager_recurrent_layers(self._model(), session.steps),
                traced_torch_layers(),
            ):
                output = self._shared_in(session).compiled(self._model(), *args, **kwargs)
        finally:
            _is_own_compile.reset(token)
        self._tell_if_nothing_was_planned(session)
        if self._is_planned(session):
            session.steps.note_end(tensors_in(output))
        else:
            self._note_eager(session, output)
        return output

    def _shared_in(self, session: Session) -> Shared:
        if session not in self._shared:
            known = self._shared.items()
            self._shared = {s: shared for s, shared in known if self.training.runs(s)}
            self._shared[session] = self.training.shared(session, self._model(), module_call)
        return self._shared[session]

    def _is_planned(self, session: Session) -> bool:
        """Whether any graph of this module was, or of one alike."""
        return session.has_compiled(self._shared_in(session).kind) and session.steps.is_planned

    def _global_hooks_came_later(self) -> bool:
        """Whether all modules have hooks that code compiled earlier does not run.

        Dynamo guards such hooks where there are some, and not where there are none.
        """
        present = _torch.kinds_of_global_hooks()
        absent = self.training.compiled_without
        if any(present[kind] for kind in absent):
            return True
        absent.update(kind for kind in present if not present[kind])
        return False

    def _note_eager(self, session: Session, output: Any) -> None:
        device = next(self._model().parameters()).device
        session.steps.note_eager_call(tensors_in(output), device)

    def _tell_if_nothing_was_planned(self, session: Session) -> None:
        told = {fallback.code for fallback in session.told.fallbacks}
        if self._is_planned(session) or told - {"AR109"}:  # which says that the rest is planned
            return
        if is_trainable(self._model()):
            session.told.fall_back("AR105")


def call_with_part(model: nn.Module) -> OptimizedCall:
    """What runs a module: its own call, or of the optimised modules around it or in it the one.

    Its own says nothing where it has run as a part of another's plan.

    Raises:
        ValueError: if neither it nor any of those was optimised, or several were, which it names.
    """
    own = _torch.compiled_call(model)
    if isinstance(own, OptimizedCall) and (own.has_run or not own.training.is_within_another):
        return own
    found = [] if isinstance(own, CopiedCall) else _relatives(model)
    found = [call for call in found if call.has_run] or found
    if len({id(call.training) for call in found}) > 1:
        raise ValueError(
            f"{type(model).__name__} has no plan of its own, and several modules around it or in "
            f"it have, each under its own budget: {_listed(model, found)}. Ask for one of them."
        )
    return found[0] if found else optimized_call(model)


def _relatives(model: nn.Module) -> list[OptimizedCall]:
    """Calls of optimised modules that hold this one, or that it holds."""
    parts = set(model.modules())
    others = [(call, call.model()) for call in list(_calls) if call._is_in_use]
    return [
        call
        for call, other in others
        if other is not None and other is not model
        if other in parts or any(part is model for part in other.modules())
    ]


def _listed(model: nn.Module, calls: Sequence[OptimizedCall]) -> str:
    """Modules around another one or in it, in words: of each its class, and where it is."""
    paths = {id(part): path for path, part in model.named_modules()}
    found = ((type(call._model()).__name__, paths.get(id(call._model()))) for call in calls)
    return ", ".join(sorted(f"{k} (`{path}`)" if path else f"{k} around it" for k, path in found))


def optimized_call(model: nn.Module) -> OptimizedCall:
    """What runs when an optimised model is called.

    Raises:
        ValueError: if the model was not optimised; it names what was, around it or in it.
    """
    call = _torch.compiled_call(model)
    if isinstance(call, OptimizedCall):
        return call
    if isinstance(call, CopiedCall):
        raise ValueError("Nothing is planned yet: that happens at the first training call.")
    if call is None and (found := _relatives(model)):
        raise ValueError(
            f"{type(model).__name__} was not optimised itself. What was, and is to be asked for: "
            f"{_listed(model, found)}."
        )
    if call is None:
        raise ValueError("The model was not optimised: call autoremat.optimize(model, budget).")
    raise ValueError(
        f"{type(model).__name__} is compiled, but no planned graph is known that reads its "
        "parameters. It has run in no training step, nor has a part of its model that is like it, "
        "or Module.compile does nothing for it, as for all classes of torch's own (nn.Sequential): "
        "use torch.compile(module, ...) or autoremat.optimize."
    )


def call_of_one(model: nn.Module, what: str) -> OptimizedCall:
    """What runs when a module is called that has a budget of its own.

    Args:
        model: the module.
        what: wants to know, "a stored plan is of".

    Raises:
        ValueError: if it was not optimised, or shares its budget.
    """
    call = optimized_call(model)
    count = len(call.training.members.modules)
    if count > 1:
        raise ValueError(
            f"{type(model).__name__} shares its budget with others ({count} modules): {what} "
            "one module. Put them into one that returns the loss, and optimize that."
        )
    return call
