"""What kernels take on a GPU by its data sheet."""

from __future__ import annotations

import ast

import pytest
import torch

from autoremat._torch import Loop
from autoremat.cost.calls import Call, TensorSpec
from autoremat.cost.device_specs import find_spec
from autoremat.cost.gpu_times import call_us, estimate_nodes, gpu_loops_us
from autoremat.cost.work import fused_attention, product
from autoremat.cost.wrapper_calls import call_in_wrapper, library_nodes
from tests.joint_graphs import capture, leaf

aten = torch.ops.aten
H100, A100 = find_spec("H100"), find_spec("A100 80GB")
GPU = torch.device("cuda", 0)


def spec(*shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    """A contiguous tensor on the GPU."""
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, GPU)


def call(target, *args, out: tuple[TensorSpec, ...] = ()) -> Call:
    """An operator on such tensors."""
    return Call(target, args, {}, out, (), GPU)


def mm(rows: int, depth: int, columns: int) -> Call:
    factors = spec(rows, depth), spec(depth, columns)
    return call(aten.mm.default, *factors, out=(spec(rows, columns),))


def attention(tokens: int, *, causal: bool, batch: int = 2) -> Call:
    query = spec(batch, 32, tokens, 128)
    flash = aten._scaled_dot_product_flash_attention.default
    return call(flash, query, query, query, 0.0, causal, out=(query,))


def test_a_large_product_reaches_its_share():
    """2 n^3 FLOPs at no more than the share of the data sheet, and not much less."""
    floor_us = 2 * 8192**3 / (H100.product_share * H100.narrow_tflops * 1e6)
    assert floor_us <= call_us(mm(8192, 8192, 8192), H100) <= 1.1 * floor_us


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one():
    """109 tiles on 108 multiprocessors take longer for each FLOP than 108."""
    full, one_more = (call_us(mm(tiles * 256, 4096, 128), A100) for tiles in (108, 109))
    assert one_more > 1.2 * full


def test_a_product_of_few_tiles_is_split():
    """A gradient of weights is small and deep: it takes nowhere near one wave of tiles."""
    deep = mm(768, 65536, 768)
    assert call_us(deep, A100) < 2 * 2 * 768 * 65536 * 768 / (A100.gflops(torch.bfloat16) * 1e3)


def test_attention_is_priced_by_its_flops():
    """At 16,384 tokens 4 n^2 d of each head, twice as long again for twice the tokens."""
    found = fused_attention(attention(16384, causal=False))
    assert found is not None
    assert found.flops == 4 * 2 * 32 * 16384**2 * 128
    long_us, short_us = (call_us(attention(n, causal=False), A100) for n in (32768, 16384))
    assert long_us == pytest.approx(4 * short_us, rel=0.02)


def test_causal_attention_skips_half():
    """All but the blocks on the diagonal."""
    causal_us, full_us = (call_us(attention(16384, causal=c), A100) for c in (True, False))
    assert causal_us == pytest.approx(full_us / 2, rel=0.02)


def test_the_backward_of_attention_makes_the_scores_again():
    """Five products where the forward has two."""
    query = spec(2, 32, 4096, 128)
    sums = spec(2, 32, 4096, dtype=torch.float32)
    tensors = (query, query, query, query, query, sums)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    made = call(backward, *tensors, None, None, 4096, 4096, 0.0, True, sums, sums)
    found, forward = fused_attention(made), fused_attention(attention(4096, causal=True))
    assert found is not None
    assert found.is_backward
    assert forward is not None
    assert found.flops == pytest.approx(2.5 * forward.flops)


def test_a_lookup_reads_the_rows_that_it_takes():
    """Not the table: an embedding of few tokens takes as long, however many words there are."""
    ids, taken = spec(8, 128, dtype=torch.int64), spec(8, 128, 768)
    small, large = (
        call_us(call(aten.embedding.default, spec(words, 768), ids, out=(taken,)), A100)
        for words in (1000, 1_000_000)
    )
    assert small == large


def test_float32_is_slower_without_tf32(monkeypatch: pytest.MonkeyPatch):
    """Torch takes TF32 for products if it is told to, for convolutions unless it is told not to."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert A100.gflops(torch.float32) == 19_500
    assert A100.gflops(torch.float32, is_convolution=True) == 156_000
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert A100.gflops(torch.float32) == 156_000
    assert find_spec("V100").gflops(torch.float32) == 15_700


def test_a_loop_reads_what_inlined_nodes_read():
    """Narrow values that are cast on the way are read as narrow values."""
    joint = capture(lambda x: (x.double() * 2).sum(), leaf(512, 512)).prepared()
    total = next(node for node in joint.nodes if node.target is aten.sum.default)
    wide = estimate_nodes([total], A100)[total]
    behind = frozenset(n for n in joint.nodes if n.op == "call_function" and n is not total)
    narrow = estimate_nodes([total], A100, behind)[total]
    saved_us = 4 * 512 * 512 / (A100.copy_gbps * 1e3)
    assert wide.time_us - narrow.time_us == pytest.approx(saved_us, rel=0.01)


def test_loops_of_code_move_their_bytes():
    """Each with its launch."""
    loops = [Loop(1_000_000, {}), Loop(2_000_000, {"add": 10})]
    expected_us = 2 * A100.launch_us + 3e6 / (A100.copy_gbps * 1e3)
    assert gpu_loops_us(loops, A100) == pytest.approx(expected_us)


WRAPPER = """
def call(args):
    extern_kernels.mm(reinterpret_tensor(buf0, (64, 32), (32, 1), 0), arg0, out=buf1)
    buf2 = torch.ops.aten.sort.stable(buf1, stable=True, dim=0)
    buf3 = torch.ops.mine.unknown.default(buf1)
    buf4 = extern_kernels.bmm(arg1, arg1, out=buf5)
"""


def test_calls_of_a_wrapper_are_read_as_data():
    """Views by their sizes, results where they are written or as the operator says."""
    layouts = {"buf0": spec(2, 32, 32), "arg0": spec(32, 16), "buf1": spec(64, 16)}
    layouts |= {"arg1": spec(4, 8, 8), "buf5": spec(4, 8, 8)}
    found = [call_in_wrapper(n, layouts.get) for n in library_nodes(ast.parse(WRAPPER))]
    known = [one for one in found if one is not None]
    assert len(known) == len(found) - 1
    products = [size for one in known if (size := product(one)) is not None]
    assert {size.flops for size in products} == {2 * 64 * 32 * 16, 2 * 4 * 8 * 8 * 8}
    (ordered,) = (one for one in known if "sort" in str(one.target))
    assert [result.shape for result in ordered.outputs] == [(64, 16), (64, 16)]
