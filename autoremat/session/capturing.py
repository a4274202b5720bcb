"""A session's graphs, captured and split by whoever is given.

Enters: a Dynamo graph and who splits its joint graph. Leaves: what runs in its place. Guarantees:
a graph is captured in the same way each time: when it is planned, by another plan, to be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.elsewhere.attention import with_attention_of
from autoremat.emit.op_by_op import compile_eager
from autoremat.emit.torch_split import Modules, split_as_torch
from autoremat.graph.devices import devices_of
from autoremat.graph.inline_regions import write_out_regions
from autoremat.inductor.hook import Partitioner, compile_with_partition

Executor = Callable[..., Any]


class Capturing:
    """Under one user's options."""

    def __init__(self, options: Options, *, runs: bool) -> None:
        """For graphs that run, or that are only planned."""
        self._setting, self._config = options.setting, options.inductor
        self._is_op_by_op = self._setting.compiler == "eager"
        self._runs_kernels = runs and not self._is_op_by_op

    def compile(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        partitioner: Partitioner,
        *,
        executor: Executor | None = None,
        question: str = "",
    ) -> Callable[..., Any]:
        """A Dynamo graph, with its joint graph split by whoever is given.

        Args:
            module: the Dynamo graph.
            example_inputs: its inputs.
            partitioner: splits the joint graph.
            executor: compiles forward and backward, if not what the options ask for.
            question: as for `compile_with_partition`.
        """
        if executor is None and not self._runs_kernels:
            executor = compile_eager
        write_out_regions(module)
        if self._setting.stands_in and self._setting.spec is not None:
            with_attention_of(module, self._setting.spec.chip.capability)
        if self._is_op_by_op:
            backend = _torch.aot_autograd(
                fw_compiler=executor,
                bw_compiler=executor,
                partition_fn=partitioner.partition,
                keep_inference_input_mutations=True,
            )
            return backend(module, example_inputs)
        return compile_with_partition(
            module,
            example_inputs,
            partitioner=partitioner,
            config=self._config,
            executor=executor,
            question=question,
        )

    def split_as_torch(
        self, module: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int, *, graph: str
    ) -> Modules:
        """Torch's own split, safe from reading overwritten inputs and from drawing again."""
        replays_seeds = not self._is_op_by_op and all(
            self._setting.replays(device).seeds for device in devices_of(module)
        )
        return split_as_torch(
            module,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            op_by_op=self._is_op_by_op,
            replays_seeds=replays_seeds,
            graph=graph,
        )
