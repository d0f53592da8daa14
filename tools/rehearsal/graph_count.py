"""Counts the graphs of a task that ``torch.compile`` compiles, without the device that they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import CompileContext

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, GraphFunction, compile_module
from speechtrain.errors import MachineError, one_line
from speechtrain.task import Task


@dataclass(eq=False)
class GraphCounter:
    """A backend of ``torch.compile`` that counts graphs and runs their operations one by one."""

    functions: set[int] = field(default_factory=set)  # the numbers of the functions that were compiled
    # the number of operations of each forward or backward graph, without views
    sizes: list[int] = field(default_factory=list)
    dynamic: int = 0  # graphs with an input whose shape is a variable

    def __call__(self, module: nn.Module, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.functions.add(CompileContext.current_compile_id().frame_id)
        backend = aot_autograd(fw_compiler=self._count, bw_compiler=self._count)
        compiled: Callable[..., Any] = backend(module, inputs)
        return compiled

    def _count(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        operations = 0
        for node in module.graph.nodes:
            # Views, and Python functions such as getitem, which have no attribute ``is_view``, do not count.
            if node.op == "call_function" and getattr(node.target, "is_view", True) is False:
                operations += 1
        self.sizes.append(operations)
        if any(_is_dynamic(value) for value in inputs):
            self.dynamic += 1
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed


def _is_dynamic(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return any(isinstance(size, torch.SymInt) for size in sizes)


@dataclass(frozen=True)
class GraphCount:
    """The graphs of the training and evaluation steps of some shapes."""

    shapes: int
    functions: int
    graphs: int  # each forward and each backward counts
    largest: int  # operations
    dynamic: int  # graphs of a dynamic shape
    repeated: int  # graphs that were compiled when the steps ran a second time in the same shapes
    breaks: tuple[str, ...]  # the reasons of graph breaks

    def __str__(self) -> str:
        line = f"{self.graphs} graphs of {self.functions} functions for {self.shapes} shapes"
        return f"{line}, of up to {self.largest:,} operations"

    def check(self, largest: int) -> None:
        """Raise MachineError unless all graphs are static and whole, with at most ``largest`` operations."""
        if self.breaks:
            raise MachineError(f"{self}. torch.compile breaks a graph: {one_line(self.breaks[0], 300)}")
        if self.dynamic or self.repeated:
            causes = f"{self.dynamic} have a dynamic shape, {self.repeated} are of a shape that was known"
            raise MachineError(f"{self}. {causes}, so steps are compiled again")
        if self.largest > largest:
            raise MachineError(f"{self}. The device compiles at most {largest:,}")


def count_graphs(task: Task, policy: ComputePolicy, batches: Sequence[Batch]) -> GraphCount:
    """Compile ``task`` in place, and count the graphs of its training and evaluation steps on the CPU.

    The caller has already applied ``policy`` to the task. The prepared ``batches`` differ in shape. All of
    them are trained on and evaluated, and then all of them again, in which no graph should be compiled.
    """
    counter = GraphCounter()
    breaks = counters["graph_break"]
    breaks.clear()
    with _graph_function_compiler_restored():
        compile_module(task, replace(policy, compiler=counter), len(batches))
        graphs = 0
        for is_first in (True, False):
            for batch in batches:
                _run_steps(task, policy, batch)
            if is_first:
                graphs = len(counter.sizes)
    return GraphCount(
        shapes=len(batches),
        functions=len(counter.functions),
        graphs=graphs,
        largest=max(counter.sizes, default=0),
        dynamic=counter.dynamic,
        repeated=len(counter.sizes) - graphs,
        breaks=tuple(map(str, breaks)),
    )


def _run_steps(task: Task, policy: ComputePolicy, batch: Batch) -> None:
    with policy.autocast("cpu"):
        loss = task.train()(batch).total
    torch.autograd.backward(loss)
    with torch.no_grad(), policy.autocast("cpu"):
        task.eval()(batch)


@contextmanager
def _graph_function_compiler_restored() -> Iterator[None]:
    """Set ``GraphFunction.compiler`` back at the end, because ``compile_module`` changes it."""
    compiler = GraphFunction.compiler
    try:
        yield
    finally:
        GraphFunction.compiler = compiler
