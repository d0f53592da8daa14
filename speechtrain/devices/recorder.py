"""What a device would make of a training step: its operations, values and costs, seen on any machine.

The step runs on the CPU with the device's implementations of the blocks, under a dispatch mode that holds
every operation of forward and backward against the device's table (``DeviceFacts.operations``).
"""

from __future__ import annotations

import inspect
import linecache
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from speechtrain import torch_private
from speechtrain.batch import Batch
from speechtrain.devices.base import Operations
from speechtrain.errors import MachineError, SpeechtrainError

_TORCH = str(Path(torch.__file__).parent)
_ROOT = Path(__file__).parents[1]
_BACKWARDS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_READS = "reads a value back to the host, which ends the graph"
_DYNAMIC = "gives a shape that depends on data, so every step is compiled"
_MASKS = (torch.bool, torch.uint8)
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# methods that read a CPU tensor's memory without an operation that the dispatcher sees
_MEMORY = ("tolist", "numpy", "__array__", "cpu", "__dlpack__")
_SELECTING = ("gather", "index", "index_select", "embedding")
_DispatchMode: Any = torch_private.TorchDispatchMode
_COPIES = (Tensor.to, Tensor.cuda)


class Unfit(SpeechtrainError):
    """A step that the device would refuse or compile again; ``place`` is the line that causes it."""

    exit_code = MachineError.exit_code

    def __init__(self, place: SourceLine, what: str, fault: str, forward: SourceLine | None = None) -> None:
        within = f", in the backward of {forward}" if forward is not None and forward != place else ""
        code = f" ({place.code})" if place.code else ""
        super().__init__(f"{place}{code}: {what} {fault}{within}")
        self.place = place
        self.forward = forward


@dataclass(frozen=True)
class SourceLine:
    file: str
    line: int

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
        return f"{shown}:{self.line}"

    @property
    def code(self) -> str:
        """The line's text, at most 80 characters."""
        return linecache.getline(self.file, self.line).strip()[:80]


@dataclass(frozen=True)
class Costs:
    """What the watched steps cost on a device that runs operation by operation."""

    launches: int = 0  # ATen operations that are no views
    reads: int = 0  # values that the host waits for
    moved: int = 0  # bytes that the launches read and write
    peak: int = 0  # most bytes at once, of tensors made under the recorder

    def __str__(self) -> str:
        memory = f"{self.moved / 1e9:.2f} GB moved, {self.peak / 2**20:,.0f} MiB at the peak"
        return f"{self.launches:,} launches, {self.reads} reads by the host, {memory}"


class Recorder:
    """Watches the steps that run under it in this thread, including the backward.

    ``with recorder:`` raises ``Unfit`` at the first operation that the table refuses; if the device records
    graphs, also at one that reads a value back to the host, or has an output whose shape depends on data or
    is new since ``with recorder.warm_up():``, which learns shapes. The line named is the innermost outside
    torch; for an operation of the backward it is the line of the forward that made it.

    ``costs`` are counted since the recorder was made. ``mark_step`` ends a segment; ``segments`` has the
    launches of each, and ``distinct`` the number of those that differ: in operations, shapes, constants, or
    in which tensors they combine. Each of them would be compiled once.

    A tensor made of numbers only, without ``device=``, is on the host on every device, and so is what is
    computed from such tensors until ``Tensor.to``. Other host tensors (an optimizer's step counter) cannot
    be distinguished, so refusals are for forward and backward. Costs some Python for every operation.
    """

    def __init__(self, operations: Operations | None = None) -> None:
        self.operations = operations or Operations(records=True)
        self.costs = Costs()
        self.segments: list[int] = []
        self._graphs = set[int]()
        self._segment, self._first = 0, 0  # the open segment's content as a hash, and its first launch
        self._numbers = WeakIdKeyDictionary()  # of the storages that the open segment has seen
        self._known = set[tuple[str, torch.Size, torch.dtype]]()
        self._places: dict[int, SourceLine] = {}  # of the operations that will have a backward
        self._on_host = WeakIdKeyDictionary()  # storages
        self._sizes = WeakIdKeyDictionary()  # of the storages made under the recorder that are alive
        self._alive = 0
        self._is_learning = False
        self.is_watching = True
        self.makes_on_host = False  # a call that makes a tensor of numbers, without device=
        self._stack = ExitStack()

    @property
    def distinct(self) -> int:
        return len(self._graphs)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """A context that learns the shapes of a step; later steps may have these shapes only."""
        self._is_learning = True
        try:
            with self:
                yield
        finally:
            self._is_learning = False

    def __enter__(self) -> Recorder:
        self._places.clear()
        for name in _MEMORY:
            self._watch(name)
        self._stack.enter_context(_Methods(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _watch(self, name: str) -> None:
        """Count calls of a method of tensors."""
        method = getattr(Tensor, name)

        def watched(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            if not self.is_on_host(tensor):
                self.read(f"Tensor.{name}")
            return method(tensor, *arguments, **keywords)

        self._stack.enter_context(torch_private.tensor_method(name, watched))

    def mark_step(self) -> None:
        """End the open segment, as a device's ``mark_step`` does; an empty one does not count."""
        if self.costs.launches > self._first:
            self.segments.append(self.costs.launches - self._first)
            self._graphs.add(self._segment)
        self._segment, self._first = 0, self.costs.launches
        self._numbers = WeakIdKeyDictionary()

    def move(self, batch: Batch) -> Batch:
        """The batch as ``Device.move`` would copy it; names the field whose values the device refuses."""
        for name, value in {**vars(batch), **batch.extra}.items():
            if isinstance(value, Tensor):
                self._check_value(value, f"the copy of Batch.{name}")
        return batch.to(self.copied)

    # --- what the modes tell --------------------------------------------------------------------------

    def blame(self, operation: str, fault: str) -> Unfit:
        """The error for the operation that runs now."""
        place, is_forward = _caller()
        node = torch_private.backward_node()
        if node is None:
            return Unfit(place, operation, fault)
        made = self._places.get(node)
        if is_forward:  # Python code of a backward, or of a hook
            return Unfit(place, operation, fault, forward=made)
        return Unfit(made or place, f"{operation} of the backward", fault)

    def is_on_host(self, values: Any) -> bool:
        """Whether there are tensors among ``values``, all of them on the host."""
        tensors = [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(tensor.untyped_storage() in self._on_host for tensor in tensors)

    def keep_on_host(self, value: Tensor) -> None:
        self._on_host[value.untyped_storage()] = True

    def copied(self, value: Tensor) -> Tensor:
        """A host tensor's copy on the device."""
        self._check_value(value, "the copy to the device")
        with self._unwatched():
            return value.clone()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self.is_watching = False
        try:
            yield
        finally:
            self.is_watching = True

    def read(self, name: str, fault: str = _READS) -> None:
        """Count a value that the host waits for, or refuse it."""
        if self.operations.records:
            raise self.blame(name, fault)
        self.costs = replace(self.costs, reads=self.costs.reads + 1)

    def before(self, function: Any, arguments: Any) -> None:
        """Record the line that made an operation; refuse one that the device cannot run."""
        if torch_private.backward_node() is None:
            # autograd numbers a node right before its operation runs, so the first number is the node's own
            number = torch_private.next_node_number() - 1
            if number not in self._places:
                self._places[number] = _caller()[0]
        name = function.__name__
        packet = name.partition(".")[0]
        if torch.Tag.data_dependent_output in function.tags:
            self.read(name)
        elif packet in _INDEXED:
            if any(isinstance(t, Tensor) and t.dtype in _MASKS for t in _leaves(arguments[1])):
                self.read(f"{name} by a mask", _DYNAMIC)
        elif torch.Tag.dynamic_output_shape in function.tags:
            self.read(name, _DYNAMIC)
        if function is torch.ops.aten.view.dtype and not self.operations.reinterprets:
            raise self.blame(name, "reinterprets bits, which the device's graphs do not")
        host = [t for t in _leaves(arguments) if isinstance(t, Tensor) and t.dim() and self.is_on_host(t)]
        if host and packet not in _INDEXED:  # which take indices from the host
            raise self.blame(name, "combines a tensor on the host with one on the device")
        if self.operations.known and packet.rstrip("_") not in self.operations.known:
            raise self.blame(name, "is not in the device's table of operations, so it runs on the CPU")

    def after(self, function: Any, given: list[Any], outputs: list[Any]) -> None:
        """Count an operation; learn the shapes of its outputs, or refuse new shapes, types and values."""
        for output in outputs:
            if not isinstance(output, Tensor):
                continue
            self._check_value(output, function.__name__)
            form = (str(function), output.shape, output.dtype)
            if self._is_learning:
                self._known.add(form)
            elif self._known and self.operations.records and form not in self._known:
                shape = "×".join(str(size) for size in output.shape) or "()"
                raise self.blame(
                    function.__name__, f"has the new shape {shape}, which was not in the warm-up"
                )
            self._count_memory(output)
        content = [self._content(leaf) for leaf in (*given, *outputs)]
        self._segment = hash((self._segment, str(function), *content))
        if not function.is_view and torch.Tag.data_dependent_output not in function.tags:
            moved = self.costs.moved + _bytes(function.__name__, given, outputs)
            self.costs = replace(self.costs, launches=self.costs.launches + 1, moved=moved)
            most = self.operations.largest_graph
            if most and self.costs.launches - self._first > most:
                raise self.blame(function.__name__, f"makes a graph of more than {most:,} operations")

    def _content(self, leaf: Any) -> Any:
        """What a segment's hash holds of an argument; of a tensor, its place among those seen."""
        if not isinstance(leaf, Tensor):
            return str(leaf)
        storage = leaf.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = len(self._numbers)
        return self._numbers[storage], leaf.storage_offset(), leaf.shape, leaf.dtype

    def _count_memory(self, output: Tensor) -> None:
        storage = output.untyped_storage()
        if storage in self._sizes:
            return
        self._sizes[storage] = size = storage.nbytes()
        self._alive += size
        weakref.finalize(storage, self._free, size)
        self.costs = replace(self.costs, peak=max(self.costs.peak, self._alive))

    def _free(self, size: int) -> None:
        self._alive -= size

    def _check_value(self, value: Tensor, what: str) -> None:
        """Refuse a tensor of a dtype, or with a value, that the device does not have."""
        if value.dtype in self.operations.refused_dtypes:
            raise self.blame(what, f"is of {value.dtype}, which the device does not have")
        most = 2 ** (self.operations.int64_bits - 1)
        if value.dtype == torch.int64 and self.operations.int64_bits < 64 and value.numel():
            with self._unwatched():
                least, largest = int(value.min()), int(value.max())
            if least < -most or largest >= most:
                extreme = least if least < -most else largest
                held = f"int64 has {self.operations.int64_bits} bits on the device"
                raise self.blame(what, f"has the value {extreme}, but {held}")


class _Operations(_DispatchMode):  # type: ignore[misc]
    """Intercepts every operation of forward and backward, below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.recorder.is_watching or func is torch.ops.aten.promote_types.default:  # of dtypes
            return func(*args, **kwargs)
        given = _leaves((args, kwargs))
        if self.recorder.makes_on_host or self.recorder.is_on_host(given):
            outputs = func(*args, **kwargs)
            for output in _leaves(outputs):
                if isinstance(output, Tensor):
                    self.recorder.keep_on_host(output)
            return outputs
        self.recorder.before(func, args)
        outputs = func(*args, **kwargs)
        self.recorder.after(func, given, _leaves(outputs))
        return outputs


class _Methods(TorchFunctionMode):
    """Intercepts what no operation shows: which tensors are made on the host, and their copies."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        has_tensors = any(isinstance(leaf, Tensor) for leaf in _leaves((args, kwargs)))
        self.recorder.makes_on_host = not has_tensors and "device" not in kwargs
        try:
            output = func(*args, **kwargs)
        finally:
            makes_on_host, self.recorder.makes_on_host = self.recorder.makes_on_host, False
        if func in _COPIES and self.recorder.is_on_host(args[0]) and _names_device(args[1:], kwargs):
            return self.recorder.copied(output)
        if makes_on_host and isinstance(output, Tensor):
            self.recorder.keep_on_host(output)
        return output


def _leaves(values: Any) -> list[Any]:
    """The values in nested tuples, lists and dictionaries."""
    if isinstance(values, dict):
        values = list(values.values())
    if not isinstance(values, tuple | list):
        return [values]
    leaves = []
    for value in values:
        leaves += _leaves(value)
    return leaves


def _bytes(name: str, given: list[Any], outputs: list[Any]) -> int:
    """What an operation reads and writes; of tables, as much as it selects."""
    packet = name.partition(".")[0]
    if "empty" in packet:
        return 0
    read = [leaf for leaf in given if isinstance(leaf, Tensor)]
    written = sum(leaf.nbytes for leaf in outputs if isinstance(leaf, Tensor))
    if packet in _SELECTING:
        return 2 * written + sum(leaf.nbytes for leaf in read[1:] if not leaf.is_floating_point())
    return sum(
        leaf.nbytes
        for leaf in {id(leaf): leaf for leaf in (*read, *outputs) if isinstance(leaf, Tensor)}.values()
    )


def _names_device(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.device | str) for value in (*arguments, *keywords.values()))


def _caller() -> tuple[SourceLine, bool]:
    """The innermost line outside torch and this file, and whether no backward runs between them."""
    frame: FrameType | None = inspect.currentframe()
    is_direct = True
    while frame is not None:
        code: CodeType = frame.f_code
        if code in _BACKWARDS:
            is_direct = False
        elif not code.co_filename.startswith((_TORCH, __file__, "<")):
            return SourceLine(code.co_filename, frame.f_lineno), is_direct
        frame = frame.f_back
    return SourceLine("?", 0), is_direct
