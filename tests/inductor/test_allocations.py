"""What a compiled graph asks of the device's allocator, forward and backward together."""

from __future__ import annotations

from autoremat.inductor.allocations import allocations_of
from autoremat.inductor.wrapper import WrapperMemory

# The forward makes 1, which it frees, 2, which crosses, 3, an output, and 4, which nobody names.
FORWARD = WrapperMemory(
    live_nbytes=(),
    returned=((3, 30), (2, 20)),
    events=((1, 10), (2, 20), (1, 0), (3, 30), (4, 40)),
)


def test_both_have_one_numbering():
    """The saved value is freed in the backward; the gradient that comes in is made before it."""
    backward = WrapperMemory(
        live_nbytes=(),
        returned=((2, 50),),
        events=((2, 50), (0, 0), (1, 0)),
        inputs=(0, None, 1),
    )
    found = allocations_of(FORWARD, backward, held={3: 30}, given=[(2, 20), None, (-2, 8)])
    assert found.forward == [[1, 10], [2, 20], [1, 0], [3, 30], [4, 40], [4, 0]]
    (gradient,) = found.gradients
    assert found.backward == [[-2, 8], [gradient, 50], [2, 0], [-2, 0]]
    assert gradient not in {1, 2, 3, 4}


def test_what_the_backward_leaves_is_freed_as_it_ends():
    """An input whose name is not deleted, a gradient that somebody holds, a saved gradient."""
    backward = WrapperMemory(live_nbytes=(), returned=((0, 20),), events=(), inputs=(0,))
    found = allocations_of(FORWARD, backward, held={3: 30, -3: 8}, given=[(2, 20)])
    assert found.gradients == [2]  # what was saved is returned
    assert found.backward == [[-3, 8], [-3, 0]]


def test_without_code_inputs_are_handed_through():
    """As the names of the graph have it."""
    backward = WrapperMemory(live_nbytes=(20,), returned=((2, 20), None))
    found = allocations_of(FORWARD, backward, held={3: 30}, given=[(2, 20)])
    assert found.gradients == [2]
    assert found.backward == []
