"""A plan written out: every recompute is a node of its own, right where the plan wants it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from autoremat_solver import Plan
from torch import Tensor

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.emit.rewrite import original_name, rewrite
from autoremat.emit.split import PartitionError, partition
from tests.joint_graphs import Analysed, analyse, drawn, leaf, plan, subject_of


def chain(x: Tensor) -> Tensor:
    """X -> sin -> exp -> sin -> sum."""
    return x.sin().exp().sin().sum()


@pytest.fixture(name="chain_of_three")
def _chain_of_three() -> Analysed:
    return analyse(chain, leaf(8))


def test_the_schedule_of_the_chain(chain_of_three: Analysed):
    """The order of the step without recompute: the golden texts below rely on it."""
    assert chain_of_three.schedule == (
        "sin",
        "exp",
        "sin_1",
        "sum_1",
        "cos",
        "backward_begins",
        "mul",
        "mul_1",
        "cos_1",
        "mul_2",
    )


def test_without_repeats_the_order_is_the_plans(chain_of_three: Analysed):
    """The nodes stand as the plan has them.

    forward:  sin -> exp -> sin_1 -> sum_1
    backward: cos(exp) * gradient, * exp, * cos(x)
    """
    analysed = chain_of_three
    written = rewrite(
        analysed.joint,
        analysed.lowered,
        analysed.constraints,
        plan("sin exp sin_1 sum_1 backward_begins cos mul mul_1 cos_1 mul_2"),
    )
    assert drawn(written.module) == [
        "sin = sin(primals_1)",
        "exp = exp(sin)",
        "sin_1 = sin(exp)",
        "sum_1 = sum(sin_1)",
        "cos = cos(exp)",
        "expand = expand(tangents_1, [8])",
        "mul = mul(expand, cos)",
        "detach = detach(exp)",
        "detach_1 = detach(detach)",
        "mul_1 = mul(mul, detach_1)",
        "cos_1 = cos(primals_1)",
        "mul_2 = mul(mul_1, cos_1)",
        "return sum_1, mul_2",
    ]
    assert {node.name for node in written.saved} == {"exp", "primals_1"}


def test_a_repeat_is_a_node_of_its_own(chain_of_three: Analysed):
    """`exp` is freed in the forward; each of its two readers gets its own copy."""
    analysed = chain_of_three
    written = rewrite(
        analysed.joint,
        analysed.lowered,
        analysed.constraints,
        plan("sin exp sin_1 sum_1 backward_begins sin exp cos mul sin exp mul_1 cos_1 mul_2"),
    )
    lines = drawn(written.module)
    assert lines[4:] == [
        "sin_recomputed = sin(primals_1)",
        "exp_recomputed = exp(sin_recomputed)",
        "cos = cos(exp_recomputed)",
        "expand = expand(tangents_1, [8])",
        "mul = mul(expand, cos)",
        "sin_recomputed_1 = sin(primals_1)",
        "exp_recomputed_1 = exp(sin_recomputed_1)",
        "detach = detach(exp_recomputed_1)",
        "detach_1 = detach(detach)",
        "mul_1 = mul(mul, detach_1)",
        "cos_1 = cos(primals_1)",
        "mul_2 = mul(mul_1, cos_1)",
        "return sum_1, mul_2",
    ]
    assert [node.name for node in written.saved] == ["primals_1"]


def test_copies_belong_to_the_backward(chain_of_three: Analysed):
    """They carry torch's tag, their own `meta`, and no checkpoint policy."""
    analysed = chain_of_three
    written = rewrite(
        analysed.joint,
        analysed.lowered,
        analysed.constraints,
        plan("sin exp sin_1 sum_1 backward_begins sin exp cos mul mul_1 cos_1 mul_2"),
    )
    copies = [n for n in written.module.graph.nodes if "_recomputed" in n.name]
    assert len(copies) == 2
    for copy in copies:
        assert copy.meta["partitioner_tag"] == "is_backward"
        assert copy.meta["val"].shape == (8,)
        assert "recompute" not in copy.meta


def test_the_original_graph_is_not_changed(chain_of_three: Analysed):
    """Two plans can be written from one joint graph."""
    analysed = chain_of_three
    before = str(analysed.joint.module.graph)
    rewrite(
        analysed.joint,
        analysed.lowered,
        analysed.constraints,
        plan("sin exp sin_1 sum_1 backward_begins sin exp cos mul mul_1 cos_1 mul_2"),
    )
    assert str(analysed.joint.module.graph) == before


def test_a_schedule_that_reads_what_was_never_made(chain_of_three: Analysed):
    """Refused before anything is written."""
    analysed = chain_of_three
    with pytest.raises(KeyError, match="exp"):
        rewrite(
            analysed.joint,
            analysed.lowered,
            analysed.constraints,
            plan("sin sin_1 exp sum_1 backward_begins cos mul mul_1 cos_1 mul_2"),
        )


def test_views_are_made_again_where_they_are_read():
    """A transpose is no operation of the plan; the backward makes its own, and saves the base."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin().t() @ y).sin().sum()

    analysed = analyse(function, leaf(4, 2), leaf(4, 3))
    views = {n.name for n in analysed.joint.nodes if not analysed.storages.of_node.get(n, ())}
    assert not views & set(analysed.schedule)
    written = rewrite(
        analysed.joint, analysed.lowered, analysed.constraints, Plan.of(analysed.schedule)
    )
    _, backward = partition(written, num_fwd_outputs=1)
    saved = [n for n in backward.graph.find_nodes(op="placeholder") if n.name != "tangents_1"]
    assert all(node.op == "placeholder" and is_base(node) for node in saved)


def test_each_repeat_computes_anew_what_is_computed_on_the_way():
    """What Inductor would inline is a value of nobody: two repeats do not share one.

    `div` is made of `mm` alone; the negation, exponential and sum between are inlined.
    """

    def function(x: Tensor) -> Tensor:
        h = (x @ x).detach()
        return ((h / (1.0 + (-h).exp())) @ x).sin().sum()

    subject = subject_of(function, leaf(4, 4), Setting(compiler="inductor"))
    names = [op.name for op in subject.lowered.problem.ops]
    assert "div" in names
    assert "exp" not in names
    start = names.index("backward_begins") + 1
    twice = Plan.of([*names[:start], "div", *names[start:-1], "div", names[-1]])
    once = Plan.of([*names[:start], "div", *names[start:]])
    made = [
        sum(node.target is torch.ops.aten.exp.default for node in written.module.graph.nodes)
        for written in (
            rewrite(subject.joint, subject.lowered, subject.constraints, p) for p in (once, twice)
        )
    ]
    assert made[1] == made[0] + 1


def test_repeats_that_read_the_same_at_different_depths_share_nothing():
    """One of them reads the exponential, the other the sum that is made of it."""

    def function(x: Tensor) -> Tensor:
        h = (x @ x).detach()
        e = h.neg()
        return ((e * h) @ x).sin().sum() + ((h / (1.0 + e)) @ x).sin().sum()

    subject = subject_of(function, leaf(4, 4), Setting(compiler="inductor"))
    names = [op.name for op in subject.lowered.problem.ops]
    multiplied = next(n for n in names if n.startswith("mul"))
    assert "div" in names
    assert "neg" not in names
    start = names.index("backward_begins") + 1
    repeated = Plan.of([*names[:start], multiplied, "div", *names[start:]])
    written = rewrite(subject.joint, subject.lowered, subject.constraints, repeated)
    again = [n for n in written.module.graph.nodes if n.name.endswith("_recomputed")]
    negated = [
        next(s for s in (*n.all_input_nodes, *n.all_input_nodes[-1].all_input_nodes) if is_neg(s))
        for n in again
    ]
    assert len(set(negated)) == len(again) == 2


@pytest.mark.parametrize("in_order", [True, False])
def test_loops_of_a_backward_that_recomputes_are_marked_where_their_order_is_held(
    chain_of_three: Analysed, monkeypatch: pytest.MonkeyPatch, in_order: bool
):
    """Caches of code, which see no marks, tell the two by the names of what is repeated."""
    marked: list[str] = []
    monkeypatch.setattr(_torch, "materialise", lambda node: marked.append(node.name))
    parts = (chain_of_three.joint, chain_of_three.lowered, chain_of_three.constraints)
    schedule = "sin exp sin_1 sum_1 cos backward_begins mul exp mul_1 cos_1 mul_2"
    nodes = rewrite(*parts, plan(schedule), in_order=in_order).module.graph.nodes
    again = "exp_recomputed" if in_order else "exp_recomputed_where_read"
    assert [n.name for n in nodes if original_name(n.name) != n.name] == [again]
    assert original_name(again) == original_name(f"{again}_1") == "exp"
    assert marked == (["mul", again, "mul_1", "cos_1", "mul_2"] if in_order else [])


def is_neg(node: torch.fx.Node) -> bool:
    """Whether a node is a negation."""
    return node.target is torch.ops.aten.neg.default


@pytest.mark.parametrize("repeats", [False, True], ids=["no repeat", "a repeat"])
def test_a_gradient_summed_late_is_computed_in_its_place(repeats: bool):
    """With a repeat, the sum reads a view of the early product, which Inductor does not fuse.

    sin(x w) w has two gradients for w: mm_2 and, three operations later, mm_5.
    """
    tied = analyse(lambda x, w: x.mm(w).sin().mm(w).sin().sum(), leaf(4, 4), leaf(4, 4))
    again = " sin mm_2" if repeats else " mm_2"
    written = rewrite(
        tied.joint,
        tied.lowered,
        tied.constraints,
        plan(
            "mm sin mm_1 sin_1 sum_1 cos backward_begins mul"
            + again
            + " mm_3 cos_1 mul_1 mm_4 mm_5 add"
        ),
    )
    lines = drawn(written.module)
    total = next(line for line in lines if "= add(" in line)
    assert ("unsqueeze" in total) == repeats
    gradient = written.module.graph.output_node().args[0][-1]
    assert gradient.meta["val"].shape == (4, 4)


def is_base(node: torch.fx.Node) -> bool:
    """Whether a value fills its storage in order."""
    return node.meta["val"].is_contiguous()


def test_random_repeats_run_under_the_saved_state():
    """A repeat draws what the first run drew.

    first run:  state, mask = run_and_save_rng_state(bernoulli)
    repeat:     mask = run_with_rng_state(state, bernoulli)
    """

    def function(x: Tensor) -> Tensor:
        return (x * torch.bernoulli(x.detach())).sin().sum()

    analysed = analyse(function, leaf(8))
    name = next(n for n in analysed.schedule if n.startswith("bernoulli"))
    position = analysed.schedule.index("backward_begins") + 1
    schedule = (*analysed.schedule[:position], name, *analysed.schedule[position:])
    written = rewrite(analysed.joint, analysed.lowered, analysed.constraints, Plan.of(schedule))
    text = "\n".join(drawn(written.module))
    assert "run_and_save_rng_state" in text
    assert "run_with_rng_state" in text
    assert f"{name}_state" in [node.name for node in written.saved]


# --- partition ---------------------------------------------------------------------------------


def test_the_two_modules_follow_the_plan(chain_of_three: Analysed):
    """The forward returns its output and what is saved; the backward holds the copies."""
    analysed = chain_of_three
    written = rewrite(
        analysed.joint,
        analysed.lowered,
        analysed.constraints,
        plan("sin exp sin_1 sum_1 backward_begins sin exp cos mul mul_1 cos_1 mul_2"),
    )
    forward, backward = partition(written, num_fwd_outputs=1)
    assert drawn(forward)[-1] == "return sum_1, primals_1"
    inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert inputs == ["primals_1", "tangents_1"]
    assert sum("_recomputed" in line.split(" = ")[0] for line in drawn(backward)) == 2


def test_a_backward_that_does_more_than_planned_is_a_defect(chain_of_three: Analysed):
    """With a saved value left out, torch would recompute it unasked: that is refused."""
    analysed = chain_of_three
    written = rewrite(
        analysed.joint,
        analysed.lowered,
        analysed.constraints,
        plan("sin exp sin_1 sum_1 backward_begins cos mul mul_1 cos_1 mul_2"),
    )
    kept = tuple(node for node in written.saved if node.name != "exp")
    with pytest.raises(PartitionError, match=r"(sin|exp) runs in the forward and, unplanned"):
        partition(replace(written, saved=kept), num_fwd_outputs=1)


def test_attention_that_the_backward_runs_again_runs_once_in_the_forward():
    """Torch takes it for random and would leave the copy in the forward as well, unread."""
    analysed = analyse(
        lambda x: F.scaled_dot_product_attention(x, x, x).sin().sum(), leaf(1, 1, 8, 8)
    )
    name = "_scaled_dot_product_flash_attention_for_cpu"
    again = " ".join(analysed.schedule).replace("backward_begins", f"backward_begins {name}")
    written = rewrite(analysed.joint, analysed.lowered, analysed.constraints, plan(again))
    forward, backward = partition(written, num_fwd_outputs=1)
    runs = [sum(line.startswith(f"{name} =") for line in drawn(forward))]
    runs += [
        sum(line.startswith(f"{name}_recomputed =") for line in drawn(m))
        for m in (forward, backward)
    ]
    assert runs == [1, 0, 1]


def test_a_lean_backward_is_made_in_the_order_of_its_plan(chain_of_three: Analysed):
    """Each loop where it stands; what recomputes nothing is left to Inductor."""
    marks = []
    for schedule in (
        "sin exp sin_1 sum_1 backward_begins sin exp cos mul mul_1 cos_1 mul_2",
        "sin exp sin_1 sum_1 backward_begins cos mul mul_1 cos_1 mul_2",
    ):
        parts = chain_of_three.joint, chain_of_three.lowered, chain_of_three.constraints
        nodes = rewrite(*parts, plan(schedule)).module.graph.nodes
        marks.append([node.name for node in nodes if "inductor_realize_to_strides" in node.meta])
    lean, full = marks
    assert lean == ["sin_recomputed", "exp_recomputed", "cos", "mul", "mul_1", "cos_1", "mul_2"]
    assert full == []
