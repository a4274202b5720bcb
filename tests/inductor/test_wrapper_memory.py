"""Live bytes of a generated wrapper, read from its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoremat.inductor import hook
from autoremat.inductor.hook import generate
from autoremat.inductor.wrapper import Buffers, Layout, WrapperError, read_wrapper

CPU = torch.device("cpu")


def buffers(
    inputs: Sequence[int] = (),
    *,
    values: Sequence[int | None] | None = None,
    results: Mapping[str, Sequence[int]] | None = None,
    library: Mapping[str, tuple[int, int]] | None = None,
    rounded_to: int = 1,
    shared: Mapping[int, int] | None = None,
    device_type: str = "cpu",
    layouts: Sequence[Layout | None] | None = None,
) -> Buffers:
    """What the text does not say; `library` is looked up by a part of the call's text."""
    known = library or {}
    return Buffers(
        input_nbytes=inputs,
        input_values=values or [None] * len(inputs),
        result_nbytes=results or {},
        library_nbytes=lambda text: next((v for k, v in known.items() if k in text), None),
        round_nbytes=lambda nbytes: -(-nbytes // rounded_to) * rounded_to,
        device_type=device_type,
        shared_inputs=shared or {},
        input_layouts=layouts or [None] * len(inputs),
    )


def wrapper(*lines: str) -> str:
    """A module with a `call` function of these lines."""
    return "def call(args):\n" + "".join(f"    {line}\n" for line in lines)


def live(given: Buffers, *lines: str) -> tuple[int, ...]:
    """Live bytes after each line."""
    return read_wrapper(wrapper(*lines), given).live_nbytes


def test_allocations_and_deletes():
    """A buffer lives from its allocation to its `del`."""
    assert live(
        buffers(),
        "buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)",
        "buf1 = empty_strided_cpu((4,), (1,), torch.float64)",
        "del buf0",
        "del buf1",
    ) == (128, 160, 32, 0)


def test_inputs_in_one_storage_are_freed_with_the_last_of_them():
    """So query, key and value are saved that one product has made."""
    assert live(
        buffers((96, 8, 96), shared={2: 0}),
        "query, mask, key = args",
        "del query",
        "del mask",
        "del key",
    ) == (104, 104, 96, 0)


def test_a_renamed_buffer_is_the_same_buffer():
    """Reuse: the old name goes, the bytes stay."""
    assert live(
        buffers(),
        "buf0 = empty_strided_cpu((8,), (1,), torch.float32)",
        "buf1 = buf0; del buf0  # reuse",
        "buf2 = reinterpret_tensor(buf1, (4, 2), (2, 1), 0); del buf1  # reuse",
        "del buf2",
    ) == (32, 32, 32, 32, 32, 0)


def test_a_view_keeps_its_base_alive():
    """Deleting the base's name frees nothing while a view has one."""
    assert live(
        buffers(),
        "buf0 = empty_strided_cpu((8,), (1,), torch.float32)",
        "view = reinterpret_tensor(buf0, (2, 4), (4, 1), 0)",
        "del buf0",
        "del view",
    ) == (32, 32, 32, 0)


@pytest.mark.parametrize("left", ["primals_1, primals_2", "[primals_1, primals_2]"])
def test_inputs_that_the_call_owns_are_live_at_the_start(left: str):
    """Those of others count as nothing."""
    curve = live(
        buffers([100, 0]), f"{left} = args", "args.clear()", "del primals_1", "del primals_2"
    )
    assert curve == (100, 100, 0, 0)


def test_one_input_only():
    """A tuple of one name."""
    assert live(buffers([7]), "primals_1, = args", "del primals_1") == (7, 0)


def test_symbols_are_numbers():
    """Sizes are evaluated from symbolic inputs and expressions over them."""
    assert live(
        buffers([0, 0], values=[3, None]),
        "s0, primals_1 = args",
        "u0 = 2*s0",
        "buf0 = empty_strided_cpu((s0, u0), (u0, 1), torch.float32)",
    ) == (0, 0, 72)


def test_gaps_between_rows_count():
    """A buffer is as long as its last element is far."""
    assert live(buffers(), "buf0 = empty_strided_cpu((2, 3), (16, 1), torch.float32)") == (76,)


def test_buffers_without_elements_take_nothing():
    """Whatever their strides."""
    assert live(buffers(), "buf0 = empty_strided_cpu((0, 8), (8, 1), torch.float32)") == (0,)


def test_requests_are_rounded():
    """As the device's allocator does."""
    given = buffers(rounded_to=512, device_type="cuda")
    assert live(given, "buf0 = empty_strided_cuda((3,), (1,), torch.float32)") == (512,)


def test_buffers_on_other_devices_do_not_count():
    """A CPU scalar in a CUDA wrapper."""
    given = buffers(device_type="cuda")
    assert live(given, "buf0 = empty_strided_cpu((3,), (1,), torch.float32)") == (0,)


def test_results_of_a_library_call():
    """Each element has its own bytes and its own life."""
    assert live(
        buffers(results={"buf0": [64, 8]}),
        "buf0 = torch.ops.aten.native_layer_norm.default(primals_1)",
        "buf1 = buf0[0]",
        "buf2 = buf0[1]",
        "del buf0",
        "del buf1",
        "del buf2",
    ) == (72, 72, 72, 72, 8, 0)


def test_what_a_library_call_takes_inside():
    """Live only while it runs: at 50 bytes in all with results of 10, 40 are inside."""
    assert live(
        buffers(results={"buf0": [10]}, library={"convolution": (50, 10)}),
        "buf0 = extern_kernels.convolution(primals_1)",
        "del buf0",
    ) == (50, 0)


def test_a_result_in_a_larger_storage():
    """A library may return a view of more than it shows."""
    assert live(
        buffers(results={"buf0": [10]}, library={"attention": (32, 32)}),
        "buf0 = torch.ops.aten.attention(primals_1)",
        "del buf0",
    ) == (32, 0)


def test_a_library_call_into_a_given_buffer():
    """Its scratch counts for the moment of the call."""
    assert live(
        buffers(library={"mm": (16, 0)}),
        "buf0 = empty_strided_cpu((2,), (1,), torch.float32)",
        "extern_kernels.mm(primals_1, primals_2, out=buf0)",
        "del buf0",
    ) == (8, 24, 0)


def test_the_results_of_the_wrapper():
    """Storages that several results share have one number; None is no tensor."""
    found = read_wrapper(
        wrapper(
            "buf0 = empty_strided_cpu((2,), (1,), torch.float32)",
            "buf1 = empty_strided_cpu((4,), (1,), torch.float32)",
            "return (buf0, reinterpret_tensor(buf0, (1,), (1,), 0), None, buf1, )",
        ),
        buffers(),
    )
    assert [result and result[1] for result in found.returned] == [8, 8, None, 16]
    assert found.returned[0] == found.returned[1]
    assert found.returned_nbytes == 24


def test_the_peak():
    """The highest point of the curve."""
    found = read_wrapper(
        wrapper(
            "buf0 = empty_strided_cpu((2,), (1,), torch.float32)",
            "buf1 = empty_strided_cpu((4,), (1,), torch.float32)",
            "del buf1",
        ),
        buffers(),
    )
    assert found.peak_nbytes == 24
    assert found.live_nbytes == (8, 24, 8)


def test_statements_inside_a_device_guard():
    """`with torch.cuda._DeviceGuard(0):` is looked into."""
    assert live(
        buffers(),
        "with guard(0):",
        "    buf0 = empty_strided_cpu((2,), (1,), torch.float32)",
        "    del buf0",
    ) == (8, 0)


def test_symbols_that_are_an_inputs_sizes_or_strides():
    """So they are where no argument is the number itself."""
    assert live(
        buffers([0], layouts=[((2, 3), (5, 1))]),
        "primals_1, = args",
        "primals_1_size = primals_1.size()",
        "s77 = primals_1_size[1]",
        "primals_1_stride = primals_1.stride()",
        "s53 = primals_1_stride[0]",
        "buf0 = empty_strided_cpu((s77, s53), (s53, 1), torch.float32)",
    ) == (0, 0, 0, 0, 0, 60)


@pytest.mark.inductor
def test_generated_code_whose_symbols_are_sizes_of_its_inputs():
    """As where two numbers of a step turn out to be one: the other of them is no argument then."""

    def product(x: Tensor) -> tuple[Tensor]:
        y = torch.sin(x)
        return (torch.mm(y, torch.permute(y, (1, 0))),)

    module = make_fx(product, tracing_mode="symbolic")(torch.randn(6, 5))
    generated = generate(module, is_backward=False, owned={}, num_visible_outputs=0, device=CPU)
    assert "x_1.size()" in generated.source
    sine_nbytes, product_nbytes = 6 * 5 * 4, 6 * 6 * 4
    assert generated.memory.peak_nbytes == sine_nbytes + product_nbytes
    assert generated.memory.returned_nbytes == product_nbytes


def test_a_source_without_a_call_function():
    """Not a wrapper."""
    with pytest.raises(WrapperError, match="no function `call`"):
        read_wrapper("x = 1", buffers())


def test_a_size_that_cannot_be_evaluated():
    """The message shows it."""
    with pytest.raises(WrapperError, match=r"\(u7,\)"):
        live(buffers(), "buf0 = empty_strided_cpu((u7,), (1,), torch.float32)")


def test_a_result_of_unknown_size():
    """The message names it."""
    with pytest.raises(WrapperError, match="'buf9'"):
        live(buffers(), "buf9 = torch.ops.aten.mystery(primals_1)")


def test_the_events_of_an_allocator():
    """Allocations, frees, and what a library takes for itself; reuse is none, nor are inputs."""
    found = read_wrapper(
        wrapper(
            "primals_1, s0, primals_2 = args",
            "buf0 = empty_strided_cpu((2,), (1,), torch.float32)",
            "buf1 = buf0; del buf0  # reuse",
            "extern_kernels.mm(primals_1, primals_2, out=buf1)",
            "del primals_1",
            "return (buf1, )",
        ),
        buffers([40, 0, 0], values=[None, 5, None], library={"mm": (16, 0)}),
    )
    first, _, second = found.inputs
    made, taken = found.returned[0][0], max(number for number, _ in found.events)
    assert len({first, second, made, taken}) == 4
    assert found.events == ((made, 8), (taken, 16), (taken, 0), (first, 0))


def test_buffers_are_told_apart_from_what_libraries_allocate():
    """Memory that is new costs time: of a library's call it was measured with the call."""
    read = read_wrapper(
        wrapper(
            "buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)",
            "buf1 = torch.ops.aten.cumsum.default(buf0, 0)",
            "buf2 = buf0; del buf0  # reuse",
            "buf3 = empty_strided_cpu((4,), (1,), torch.float64)",
        ),
        buffers(results={"buf1": [128]}),
    )
    assert read.buffers_nbytes == (128, 32)


def test_memory_that_is_new_is_in_the_time(monkeypatch: pytest.MonkeyPatch):
    """Beside the calls that write it."""
    square = make_fx(lambda x: ((x @ x).cos() @ x,), tracing_mode="fake")(torch.ones(8, 8))

    def taken_us() -> float:
        generated = generate(square, is_backward=False, owned={}, num_visible_outputs=0, device=CPU)
        assert generated.time_us is not None
        return generated.time_us

    without_us = taken_us()
    monkeypatch.setattr(hook, "fresh_us", lambda buffers_nbytes, device: 1e6 * sum(buffers_nbytes))
    assert taken_us() - without_us == pytest.approx(1e6 * 2 * 256)
