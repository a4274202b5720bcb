"""Costs of operators: priced by shape, measured once, cached."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import autoremat
from autoremat import kept
from autoremat.cost import calls as cost
from autoremat.cost import ceilings, work
from autoremat.cost import made_up_inputs as sample
from autoremat.cost import op_times as profile
from autoremat.cost.cache import CostCache, Measured
from autoremat.cost.estimates import NOMINAL_CEILINGS
from autoremat.cost.op_times import OpCost, profile_nodes
from autoremat.cost.timings import ROUNDS
from autoremat.memory.meter import measure_peak

aten = torch.ops.aten


class Trace:
    """A graph written by hand: each call computes its `meta["val"]` on fake tensors."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        """A placeholder of that shape."""
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def call(self, target, *args, **kwargs) -> fx.Node:
        """A call of an operator on earlier nodes."""
        node = self.graph.call_function(target, args, kwargs)
        real_args, real_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*real_args, **real_kwargs)
        return node


@pytest.fixture
def trace() -> Trace:
    """An empty graph."""
    return Trace()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache file of the test's own."""
    return tmp_path / "costs.sqlite3"


def price(node: fx.Node, cache: Path, **options) -> OpCost:
    """The cost of one node."""
    return profile_nodes([node], cache_path=cache, **options)[node]


@pytest.fixture
def timed_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose time is taken, one entry for each round of runs."""
    seen: list[str] = []
    original = profile.call_time_us

    def spy(call, inputs):
        seen.append(str(call.target))
        return original(call, inputs)

    monkeypatch.setattr(profile, "call_time_us", spy)
    return seen


def test_a_matrix_product_costs_its_flops_and_bytes(trace, cache):
    """2 m k n FLOPs; both factors read and the product written."""
    node = trace.call(aten.mm.default, trace.tensor(64, 32), trace.tensor(32, 16))
    found, call = price(node, cache), cost.call_of(node)
    assert found.measured
    assert found.time_us > 0
    assert work.flop_count(call) == 2 * 64 * 32 * 16
    assert work.bytes_moved(call) == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert found.workspace_nbytes == 0


def test_views_and_element_access_are_free(trace, cache):
    """Nothing runs for a view, a getitem or arithmetic on sizes."""
    import operator

    x = trace.tensor(8, 8)
    pair = trace.call(aten.split.Tensor, x, 4)
    nodes = [
        trace.call(aten.view.default, x, [64]),
        trace.call(aten._unsafe_view.default, x, [64]),
        trace.call(operator.getitem, pair, 0),
        trace.call(operator.mul, 3, 4),
        pair,
    ]
    costs = profile_nodes(nodes, cache_path=cache)
    assert all(costs[node] == cost.FREE for node in nodes)


def test_an_operator_of_unknown_results_still_costs(trace, cache):
    """A node without `meta["val"]` is a real operator and never free."""
    node = trace.graph.call_function(aten.sin.default, (trace.tensor(64),))
    assert price(node, cache).time_us > 0


def test_a_broadcast_input_counts_its_distinct_elements(trace):
    """An expanded tensor is read from the few elements that exist."""
    wide = trace.call(aten.expand.default, trace.tensor(1, 100), [50, 100])
    call = cost.call_of(trace.call(aten.neg.default, wide))
    assert work.bytes_moved(call) == 4 * (100 + 50 * 100)


class Timer:
    """A clock under load: the times of a call's rounds by its first size, the last one for good."""

    def __init__(self, **taken_us: list[float]) -> None:
        """Times by "mm64" and the like."""
        self.taken_us = taken_us
        self.rounds: list[str] = []

    def __call__(self, call, inputs) -> float:
        """The next time of this call."""
        name = f"{call.target._opname}{inputs.args[0].shape[0]}"
        self.rounds.append(name)
        times = self.taken_us.get(name, [1.0])
        return times.pop(0) if len(times) > 1 else times[0]


def products(trace: Trace) -> list[fx.Node]:
    """Two matrix products of nearly the same size."""
    return [
        trace.call(aten.mm.default, trace.tensor(rows, 64), trace.tensor(64, 64))
        for rows in (64, 65)
    ]


def timed_by(timer: Timer, monkeypatch: pytest.MonkeyPatch, nodes: list[fx.Node], cache: Path):
    """The costs of nodes under a timer."""
    monkeypatch.setattr(profile, "call_time_us", timer)
    monkeypatch.setattr(profile, "_PAUSES_S", 4 * (0.0,))
    costs = profile_nodes(nodes, cache_path=cache)
    return [costs[node] for node in nodes]


def test_equal_calls_are_measured_once(trace, cache, monkeypatch):
    """Three calls of two kinds take two measurements, and none when asked again."""
    x, y = trace.tensor(8, 8), trace.tensor(4, 4)
    nodes = [trace.call(aten.sin.default, v) for v in (x, x, y)]
    timer = Timer()
    first = timed_by(timer, monkeypatch, nodes, cache)
    assert len(timer.rounds) == 2 * ROUNDS
    timer.rounds.clear()
    assert timed_by(timer, monkeypatch, nodes, cache) == first
    assert not timer.rounds


def test_a_time_that_load_has_spoilt_is_taken_again(trace, cache, monkeypatch):
    """The first rounds of one of two equal products fall into a burst; the cache never sees it."""
    burst = [140.0, *[139.0] * (ROUNDS - 1)]
    nodes, timer = products(trace), Timer(mm64=[10.0], mm65=[*burst, 10.5])
    costs = timed_by(timer, monkeypatch, nodes, cache)
    assert [cost.time_us for cost in costs] == [10.0, 10.5]
    assert not any(cost.is_doubtful for cost in costs)
    assert timer.rounds.count("mm64") == ROUNDS
    with CostCache.open(cache) as opened:
        kept = opened.read([profile.call_key(cost.call_of(node)) for node in nodes], Measured)
    assert sorted(found.time_us for found in kept.values()) == [10.0, 10.5]


def test_a_known_time_shows_that_a_new_one_is_spoilt(trace, cache, monkeypatch):
    """The other product was measured in an earlier run."""
    one, other = products(trace)
    timed_by(Timer(mm64=[10.0]), monkeypatch, [one], cache)
    timer = Timer(mm65=[*[140.0] * ROUNDS, 10.5])
    assert [c.time_us for c in timed_by(timer, monkeypatch, [one, other], cache)] == [10.0, 10.5]
    assert "mm64" not in timer.rounds


def test_a_product_that_is_slow_each_time_is_believed(trace, cache, monkeypatch):
    """An odd layout may well take 14 times as long: two more rounds are enough to see it."""
    timer = Timer(mm64=[10.0], mm65=[140.0])
    costs = timed_by(timer, monkeypatch, products(trace), cache)
    assert [cost.time_us for cost in costs] == [10.0, 140.0]
    assert not any(cost.is_doubtful for cost in costs)
    assert timer.rounds.count("mm65") == ROUNDS + 2


def test_times_that_never_agree_are_not_kept_and_are_named(trace, cache, monkeypatch):
    """The quietest round counts for this plan; the next run measures again."""
    spoilt = [4.0**turn for turn in range(5, -5, -1)]
    node = trace.call(aten.sin.default, trace.tensor(64))
    (found,) = timed_by(Timer(sin64=list(spoilt)), monkeypatch, [node], cache)
    assert found.is_doubtful
    assert found.measured
    assert found.time_us == spoilt[ROUNDS + len(profile._PAUSES_S) - 1]
    with CostCache.open(cache) as opened:
        assert not opened.read([profile.call_key(cost.call_of(node))], Measured)
    (again,) = timed_by(Timer(sin64=[2.0]), monkeypatch, [node], cache)
    assert again.time_us == 2.0
    assert not again.is_doubtful


def test_the_ceilings_are_the_fastest_that_was_seen(monkeypatch):
    """A round under load does not lower them."""
    timer = Timer(clone1=[9.0, 3.0, 8.0], mm768=[500.0, 100.0, 400.0])
    monkeypatch.setattr(ceilings, "call_time_us", timer)
    found = ceilings.measure_ceilings(torch.device("cpu"), torch.float32)
    assert found.launch_us == 3.0
    assert found.matmul_gflops == 2 * 768**3 / 100.0 / 1e3


@pytest.mark.thorough
def test_measuring_the_ceilings_takes_little_memory():
    """It happens inside the user's training process."""
    device = torch.device("cpu")
    peak = measure_peak(lambda: ceilings.measure_ceilings(device, torch.float32), device="cpu")
    assert peak <= 17 << 20


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((4, 4), (4, 1)), ((4, 4), (1, 4))),
        (((4, 4), (4, 1)), ((8, 2), (2, 1))),
    ],
)
def test_shape_and_stride_tell_calls_apart(trace, one, other):
    """Layout decides the kernel, so it is part of the key."""
    keys = set()
    for shape, stride in (one, other):
        node = trace.tensor(*shape)
        with trace.mode:
            node.meta["val"] = torch.empty_strided(shape, stride)
        keys.add(profile.call_key(cost.call_of(trace.call(aten.sin.default, node))))
    assert len(keys) == 2


def test_ranks_share_figures(trace):
    """The index of a device among equal ones is no part of the key."""
    keys = {
        profile.call_key(cost.call_of(trace.call(aten.sin.default, trace.tensor(4, device=device))))
        for device in ("cuda:0", "cuda:1")
    }
    assert len(keys) == 1


def test_profiling_leaves_the_random_stream_alone(trace, cache):
    """The next random number is the one that would have come without profiling."""
    nodes = [
        trace.call(aten.bernoulli.default, trace.tensor(64)),
        trace.call(aten.rand.default, [9]),
    ]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    costs = profile_nodes(nodes, cache_path=cache)
    assert all(costs[node].measured for node in nodes)
    assert torch.equal(torch.rand(4), expected)


def test_operators_really_run_inside_a_fake_mode(trace, cache):
    """A backend may be called with a fake mode active; figures are still measured."""
    node = trace.call(aten.sin.default, trace.tensor(64, 64))
    with trace.mode:
        found = price(node, cache)
    assert found.measured


def test_an_in_place_operator_is_priced_on_its_own_inputs(trace, cache):
    """`copy_` owns no output but moves bytes."""
    found = price(trace.call(aten.copy_.default, trace.tensor(256), trace.tensor(256)), cache)
    assert found.measured
    assert found.time_us > 0
    assert found.workspace_nbytes == 0


INDEXED = {
    "embedding": lambda t: t.call(
        aten.embedding.default, t.tensor(50, 8), t.tensor(4, 6, dtype=torch.int64)
    ),
    "embedding_backward": lambda t: t.call(
        aten.embedding_dense_backward.default,
        t.tensor(24, 8),
        t.tensor(24, dtype=torch.int64),
        50,
        -1,
        False,
    ),
    "gather": lambda t: t.call(
        aten.gather.default, t.tensor(4, 9), 1, t.tensor(4, 1, dtype=torch.int64)
    ),
    "index": lambda t: t.call(aten.index.Tensor, t.tensor(30, 4), [t.tensor(7, dtype=torch.int64)]),
    "index_put": lambda t: t.call(
        aten.index_put.default,
        t.tensor(30, 4),
        [t.tensor(7, dtype=torch.int64)],
        t.tensor(7, 4),
        True,
    ),
    "scatter": lambda t: t.call(
        aten.scatter.value, t.tensor(4, 9), 1, t.tensor(4, 1, dtype=torch.int64), 1.0
    ),
    "nll_loss": lambda t: t.call(
        aten.nll_loss_forward.default,
        t.tensor(6, 11),
        t.tensor(6, dtype=torch.int64),
        None,
        1,
        -100,
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_operators_that_index_get_valid_indices(trace, cache, name):
    """Made-up indices and targets are within range, and spread over it."""
    node = INDEXED[name](trace)
    assert price(node, cache).measured
    assert sample.index_bound(cost.call_of(node)) > 1


def test_made_up_inputs_have_the_layout_of_the_real_ones(trace):
    """Shape, stride and dtype are those of the fake tensor."""
    node = trace.tensor(3, 5)
    with trace.mode:
        node.meta["val"] = torch.empty_strided((3, 5), (1, 4), dtype=torch.bfloat16)
    inputs = sample.draw_inputs(cost.call_of(trace.call(aten.sin.default, node)))
    (drawn,) = inputs.args
    assert drawn.shape == (3, 5)
    assert drawn.stride() == (1, 4)
    assert drawn.dtype == torch.bfloat16
    assert drawn.isfinite().all()


WORKSPACES = {
    "sort": (lambda x: aten.sort.default(x), [(64, 4096)]),
    "softmax_backward": (
        lambda g, y: aten._softmax_backward_data(g, y, 1, torch.float32),
        2 * [(64, 512)],
    ),
    "conv_backward": (
        lambda g, x, w: aten.convolution_backward.default(
            g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        ),
        [(2, 8, 16, 16), (2, 4, 16, 16), (8, 4, 3, 3)],
    ),
    "attention": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v),
        3 * [(2, 4, 128, 32)],
    ),
    "safe_softmax": (lambda x: aten._safe_softmax.default(x, 1), [(64, 512)]),
    "dropout": (lambda x: aten.native_dropout.default(x, 0.5, True), [(64, 512)]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORKSPACES)
def test_workspace_and_outputs_add_up_to_the_measured_peak(trace, cache, name):
    """What the plan charges for an operator is what the allocator sees when it runs alone."""
    function, shapes = WORKSPACES[name]
    tensors = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        function(*tensors)
        peak = measure_peak(lambda: function(*tensors), device="cpu")
    recorded = fx.symbolic_trace(function).graph.nodes
    template = next(node for node in recorded if node.op == "call_function")
    names = {n: trace.tensor(*s) for n, s in zip(_placeholders(template), shapes, strict=True)}
    target = template.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    args = fx.node.map_arg(template.args, lambda n: names[n])
    node = trace.call(target, *args)
    charged = sum(cost.call_of(node).fresh_nbytes)
    assert price(node, cache).workspace_nbytes + charged == peak


def _placeholders(node: fx.Node) -> list[fx.Node]:
    return node.graph.find_nodes(op="placeholder")


def test_an_operator_with_scratch_memory_has_a_workspace(trace, cache):
    """Sorting keeps an index buffer that is neither input nor output."""
    found = price(trace.call(aten.sort.default, trace.tensor(64, 4096)), cache)
    assert found.workspace_nbytes > 0


def test_what_refuses_made_up_inputs_is_estimated(trace, cache, monkeypatch):
    """An operator that raises is priced by the roofline and says so."""

    def refuse(call, inputs):
        raise RuntimeError("not on these inputs")

    node = trace.call(aten.sin.default, trace.tensor(512, 512))
    monkeypatch.setattr(profile, "call_time_us", refuse)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *_: NOMINAL_CEILINGS["cpu"])
    found = price(node, cache)
    assert not found.measured
    assert found.time_us > 1
    assert work.bytes_moved(cost.call_of(node)) == 2 * 4 * 512 * 512


def test_what_does_not_fit_into_memory_is_estimated(trace, cache, timed_calls):
    """A call whose operands exceed a third of free memory is never run."""
    node = trace.call(aten.sin.default, trace.tensor(1 << 40))
    found = price(node, cache)
    assert str(aten.sin.default) not in timed_calls
    assert not found.measured
    assert found.time_us > 1e6


def test_custom_operators_are_never_run(trace, cache):
    """Nobody knows what a custom operator does to the world, so it is estimated."""
    ran: list[bool] = []

    @torch.library.custom_op("autoremat_test::touch", mutates_args=())
    def touch(x: torch.Tensor) -> torch.Tensor:
        ran.append(True)
        return x + 1

    touch.register_fake(torch.empty_like)
    node = trace.call(torch.ops.autoremat_test.touch.default, trace.tensor(64))
    found = price(node, cache)
    assert not ran
    assert not found.measured
    assert found.time_us > 0


def test_a_device_that_is_not_there_is_estimated(trace, cache):
    """Planning for an absent GPU works, at nominal ceilings."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    x = trace.tensor(1024, 1024, device="cuda")
    found = price(trace.call(aten.mm.default, x, x), cache)
    assert not found.measured
    assert found.time_us > NOMINAL_CEILINGS["cuda"].launch_us


def test_progress_ends_at_the_total(trace, cache):
    """The callback counts up to the number of measurements."""
    seen: list[tuple[int, int]] = []
    node = trace.call(aten.sin.default, trace.tensor(64))
    price(node, cache, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (ROUNDS, ROUNDS)


def test_a_running_profiler_neither_sees_nor_hinders_what_is_measured(trace, cache, tmp_path):
    """Times and workspaces are found as without one; the user's session has only the user's own."""
    x = trace.tensor(2, 2, 64, 16)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    node = trace.call(attention, x, x, x)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as session:
        torch.ones(8).cos()
        found = price(node, cache)
    assert found.measured
    assert found.workspace_nbytes > 0
    assert found.workspace_nbytes == price(node, tmp_path / "without").workspace_nbytes
    names = {event.name for event in session.events()}
    assert "aten::cos" in names
    assert not any("attention" in name or "workspace" in name for name in names)


def test_a_profiler_that_warms_up_goes_on_after_what_is_measured(trace, cache):
    """Of which torch tells nobody: ended by another session, it would end the process."""
    x = trace.tensor(2, 2, 64, 16)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    node = trace.call(attention, x, x, x)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, schedule=schedule) as session:
        assert price(node, cache).workspace_nbytes > 0
        with pytest.raises(RuntimeError, match="another torch profiler"):
            autoremat.measure_peak(lambda: None, device="cpu")
        session.step()
        torch.ones(8).cos()
    assert "aten::cos" in {event.name for event in session.events()}


def test_symbolic_sizes_stand_for_their_hints(cache):
    """A graph traced with dynamic shapes is priced at the sizes it was traced with."""
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda x: torch.mm(x, x.t()), tracing_mode="symbolic")(torch.randn(24, 8))
    (node,) = [n for n in traced.graph.nodes if n.target is aten.mm.default]
    assert price(node, cache).measured
    assert work.flop_count(cost.call_of(node)) == 2 * 24 * 8 * 24


def test_a_damaged_cache_is_begun_anew(cache):
    """Garbage in the file is replaced, not reported to the user."""
    cache.write_bytes(b"this is no database" * 500)
    with CostCache.open(cache) as opened:
        opened.write({"key": Measured(1.5, 7, 5)})
    with CostCache.open(cache) as opened:
        assert opened.read(["key", "other"], Measured) == {"key": Measured(1.5, 7, 5)}


def test_a_place_that_cannot_be_written_is_replaced_by_memory(tmp_path, monkeypatch):
    """One warning, then everything works for as long as the process lives."""
    monkeypatch.setattr(kept, "_warned", False)
    (tmp_path / "file").write_text("")
    below_a_file = tmp_path / "file" / "costs.sqlite3"
    with pytest.warns(UserWarning, match="cannot be kept"):
        opened = CostCache.open(below_a_file)
    with opened:
        opened.write({"key": Measured(1.0, 1, 1)})
        assert opened.read(["key"], Measured) == {"key": Measured(1.0, 1, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = CostCache.open(below_a_file)
    with again:
        assert again.read(["key"], Measured) == {"key": Measured(1.0, 1, 1)}


def test_what_another_process_stored_first_counts(trace, cache, monkeypatch):
    """Two ranks that measure the same calls at once plan with the same times."""
    node = trace.call(aten.sin.default, trace.tensor(64, 64))
    original = CostCache.write

    def overtaken(self, figures):
        other = {key: replace(found, time_us=12345.0) for key, found in figures.items()}
        original(self, other)
        original(self, figures)

    monkeypatch.setattr(CostCache, "write", overtaken)
    assert price(node, cache).time_us == 12345.0


def test_the_first_figure_stored_stays(cache):
    """Two processes that measured the same call end up with one answer."""
    with CostCache.open(cache) as one, CostCache.open(cache) as two:
        one.write({"key": Measured(1.0, 1, 1)})
        two.write({"key": Measured(2.0, 2, 2)})
        assert two.read(["key"], Measured) == {"key": Measured(1.0, 1, 1)}


def test_processes_share_the_cache(cache):
    """Several processes that open and write at once lose nothing."""
    script = (
        "import sqlite3, sys, pathlib, autoremat.cost.cache as c\n"
        "path, who = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "for i in range(30):\n"
        "    with c.CostCache.open(path) as cache:\n"
        "        cache.write({f'{who}-{i}': c.Measured(1.0, i, i)})\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(cache)]
    root = Path(profile.__file__).parents[1]
    workers = [subprocess.Popen([*command, str(who)], cwd=root) for who in range(2)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    with sqlite3.connect(cache) as connection:
        assert connection.execute("SELECT count(*) FROM found").fetchone() == (60,)
    connection.close()


@pytest.mark.parametrize("library", ["efficient", "cudnn"])
def test_seeds_lie_where_a_gradient_reads_them(trace: Trace, library: str) -> None:
    """One library reads them on the host, whatever a traced graph says: else the process ends."""
    q, k, v, out, gradient = (trace.tensor(1, 2, 8, 16, device="meta") for _ in range(5))
    sums = trace.tensor(1, 2, 8, device="meta")
    seed, offset = (trace.tensor(dtype=torch.int64, device="meta") for _ in range(2))
    if library == "efficient":
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        args = (gradient, q, k, v, None, out, sums, seed, offset, 0.1, [True, True, True, False])
    else:
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        args = (gradient, q, k, v, out, sums, seed, offset, None, None, None, 8, 8, 0.1, False)
    specs = fx.node.map_arg(args, lambda node: cost.tensor_spec(node.meta["val"]))
    call = cost.Call(backward, tuple(specs), {}, (), ())
    found = sample.draw_inputs(call).args
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    on_host = {value.dtype for value in tensors if value.device.type == "cpu"}
    assert on_host == ({torch.int64} if library == "efficient" else set())
