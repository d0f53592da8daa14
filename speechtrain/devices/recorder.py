"""Checks a training step against a device that this machine lacks: its operations, values and costs.

The step runs on the CPU with the device's implementations of the blocks, under a dispatch mode that compares
every operation of forward and backward with the device's table (``DeviceFacts.operations``).
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
_BACKWARD_CODE = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_GENERATED = "<"  # Generated code has a file name such as "<string>".
_READS = "reads a value back to the host, which ends the graph"
_DYNAMIC = "gives a shape that depends on data, so every step is compiled"
_MASK_DTYPES = (torch.bool, torch.uint8)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Methods that read a CPU tensor's memory. The dispatcher sees no operation for them.
_MEMORY_READERS = ("tolist", "numpy", "__array__", "cpu", "__dlpack__")
_SELECTING = ("gather", "index", "index_select", "embedding")
_DispatchMode: Any = torch_private.TorchDispatchMode
_COPIES = (Tensor.to, Tensor.cuda)


class Unfit(SpeechtrainError):
    """A step that the device would refuse or compile again. ``source`` is the line that causes it."""

    exit_code = MachineError.exit_code

    def __init__(
        self, source: SourceLine, subject: str, fault: str, forward: SourceLine | None = None
    ) -> None:
        within = f", in the backward of {forward}" if forward is not None and forward != source else ""
        code = f" ({source.code})" if source.code else ""
        super().__init__(f"{source}{code}: {subject} {fault}{within}")
        self.source = source
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
        """The text of the line, at most 80 characters."""
        return linecache.getline(self.file, self.line).strip()[:80]


@dataclass(frozen=True)
class Costs:
    """The costs of the watched steps on a device that runs operation by operation."""

    launches: int = 0  # ATen operations except views
    reads: int = 0  # values that the host waits for
    moved: int = 0  # bytes that the launches read and write
    peak: int = 0  # the most bytes that the tensors made under the recorder have at one time

    def __str__(self) -> str:
        memory = f"{self.moved / 1e9:.2f} GB moved, {self.peak / 2**20:,.0f} MiB at the peak"
        return f"{self.launches:,} launches, {self.reads} reads by the host, {memory}"


class Recorder:
    """Watches the steps that run under it in this thread, including the backward.

    ``with recorder:`` raises ``Unfit`` at the first operation that the table refuses. If the device records
    graphs, these operations also raise it:

    - an operation that reads a value back to the host,
    - an operation with an output whose shape depends on data,
    - an operation with an output of a new shape, after ``with recorder.warm_up():`` has learned the shapes.

    The error names the innermost line outside torch. For an operation of the backward, that is the line of
    the forward that made it.

    ``costs`` are counted since the recorder was made. ``mark_step`` ends a segment. ``segments`` has the
    launches of each segment. ``distinct`` is the number of different segments, each of which is compiled
    once. Segments differ in operations, shapes, constants, or in the tensors that they combine.

    A call that makes a tensor from numbers, without ``device=``, makes it on the host on every device. A
    tensor that is computed from such tensors only is on the host, too, until ``Tensor.to``. The recorder
    takes other host tensors, such as an optimizer's step counter, for tensors of the device. Therefore only
    its checks of forward and backward are valid. Each operation costs some Python code.
    """

    def __init__(self, operations: Operations | None = None) -> None:
        self.operations = operations or Operations(records=True)
        self.costs = Costs()
        self.segments: list[int] = []
        self._segment_hashes = set[int]()  # of the segments that have ended
        self._segment_hash, self._segment_start = 0, 0  # of the open segment, which starts at this launch
        self._storage_numbers = WeakIdKeyDictionary()  # the order in which the open segment uses storages
        self._learned_outputs = set[tuple[str, torch.Size, torch.dtype]]()
        self._sources: dict[int, SourceLine] = {}  # by the number of the operation's autograd node
        self._host_storages = WeakIdKeyDictionary()
        self._storage_sizes = WeakIdKeyDictionary()  # the bytes of each storage made under the recorder
        self._alive_bytes = 0
        self._is_learning = False
        self.is_watching = True
        self.makes_on_host = False  # whether the present call makes a tensor of numbers, without device=
        self._stack = ExitStack()

    @property
    def distinct(self) -> int:
        return len(self._segment_hashes)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Return a context that learns the shapes of a step. Later steps may have only these shapes."""
        self._is_learning = True
        try:
            with self:
                yield
        finally:
            self._is_learning = False

    def __enter__(self) -> Recorder:
        self._sources.clear()
        for name in _MEMORY_READERS:
            self._watch(name)
        self._stack.enter_context(_MethodMode(self))
        self._stack.enter_context(_OperationMode(self))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _watch(self, name: str) -> None:
        """Count the calls of the method ``name`` of tensors as reads by the host."""
        method = getattr(Tensor, name)

        def counting_method(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            if not self.is_on_host(tensor):
                self.count_read(f"Tensor.{name}")
            return method(tensor, *arguments, **keywords)

        self._stack.enter_context(torch_private.tensor_method(name, counting_method))

    def mark_step(self) -> None:
        """End the open segment, as a device's ``mark_step`` does. An empty segment does not count."""
        if self.costs.launches > self._segment_start:
            self.segments.append(self.costs.launches - self._segment_start)
            self._segment_hashes.add(self._segment_hash)
        self._segment_hash, self._segment_start = 0, self.costs.launches
        self._storage_numbers = WeakIdKeyDictionary()

    def move(self, batch: Batch) -> Batch:
        """Copy the batch like ``Device.move``. The error names the field whose values the device refuses."""
        for name, field in {**vars(batch), **batch.extra}.items():
            if isinstance(field, Tensor):
                self._check_value(field, f"the copy of Batch.{name}")
        return batch.to(self.copy_to_device)

    # --- called by the modes --------------------------------------------------------------------------

    def blame(self, operation: str, fault: str) -> Unfit:
        """Return the error for the operation that runs now."""
        source, calls_backward = _caller()
        node = torch_private.backward_node()
        if node is None:
            return Unfit(source, operation, fault)
        forward = self._sources.get(node)
        if calls_backward:  # torch's own code runs the operation, so the line of the forward says more.
            return Unfit(forward or source, f"{operation} of the backward", fault)
        # The line is in a hook, or in the Python code of a ``torch.autograd.Function``.
        return Unfit(source, operation, fault, forward=forward)

    def is_on_host(self, values: Any) -> bool:
        """Return whether there are tensors among ``values``, all of them on the host."""
        storages = [tensor.untyped_storage() for tensor in _tensors(values)]
        return bool(storages) and all(storage in self._host_storages for storage in storages)

    def keep_on_host(self, values: Any) -> None:
        for tensor in _tensors(values):
            self._host_storages[tensor.untyped_storage()] = True

    def copy_to_device(self, tensor: Tensor) -> Tensor:
        """Return the copy of a host tensor on the device."""
        self._check_value(tensor, "the copy to the device")
        with self._unwatched():
            return tensor.clone()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self.is_watching = False
        try:
            yield
        finally:
            self.is_watching = True

    def count_read(self, name: str, fault: str = _READS) -> None:
        """Count a read of a value by the host. Refuse it if the device records graphs."""
        if self.operations.records:
            raise self.blame(name, fault)
        self.costs = replace(self.costs, reads=self.costs.reads + 1)

    def check_operation(self, function: Any, arguments: Any) -> None:
        """Record the line that made an operation. Refuse an operation that the device cannot run."""
        if torch_private.backward_node() is None:
            # Autograd numbers a node right before its operation runs, so the latest number is this node's.
            number = torch_private.next_node_number() - 1
            if number not in self._sources:
                source, _ = _caller()
                self._sources[number] = source
        name = function.__name__
        packet = name.partition(".")[0]
        self._check_reads(function, packet, arguments)
        if function is torch.ops.aten.view.dtype and not self.operations.reinterprets:
            raise self.blame(name, "reinterprets bits, which the device's graphs do not")
        # As in torch, a host tensor without dimensions may be combined with tensors on the device.
        host_tensors = [t for t in _tensors(arguments) if t.dim() > 0 and self.is_on_host(t)]
        if host_tensors and packet not in _INDEXING:  # Indices may be on the host.
            raise self.blame(name, "combines a tensor on the host with one on the device")
        if self.operations.names and packet.rstrip("_") not in self.operations.names:
            raise self.blame(name, "is not in the device's table of operations, so it runs on the CPU")

    def _check_reads(self, function: Any, packet: str, arguments: Any) -> None:
        """Count an operation that the host waits for: for a value, or for a shape that depends on data."""
        name = function.__name__
        if torch.Tag.data_dependent_output in function.tags:
            self.count_read(name)
        elif packet in _INDEXING:
            if any(index.dtype in _MASK_DTYPES for index in _tensors(arguments[1])):
                self.count_read(f"{name} by a mask", _DYNAMIC)
        elif torch.Tag.dynamic_output_shape in function.tags:
            self.count_read(name, _DYNAMIC)

    def count_operation(self, function: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Count an operation. Refuse outputs of new shapes, and of types and values the device lacks."""
        for output in _tensors(outputs):
            self._check_value(output, function.__name__)
            self._check_shape(function, output)
            self._count_memory(output)
        content = [self._hash_part(leaf) for leaf in (*inputs, *outputs)]
        self._segment_hash = hash((self._segment_hash, str(function), *content))
        if not function.is_view and torch.Tag.data_dependent_output not in function.tags:
            moved = self.costs.moved + _bytes(function.__name__, inputs, outputs)
            self.costs = replace(self.costs, launches=self.costs.launches + 1, moved=moved)
            limit = self.operations.largest_graph
            if limit and self.costs.launches - self._segment_start > limit:
                raise self.blame(function.__name__, f"makes a graph of more than {limit:,} operations")

    def _check_shape(self, function: Any, output: Tensor) -> None:
        """In the warm-up, learn the shape of an output. Afterwards, refuse a new one."""
        form = (str(function), output.shape, output.dtype)
        if self._is_learning:
            self._learned_outputs.add(form)
        elif self._learned_outputs and self.operations.records and form not in self._learned_outputs:
            shape = "×".join(str(size) for size in output.shape) or "()"
            raise self.blame(function.__name__, f"has the new shape {shape}, which was not in the warm-up")

    def _hash_part(self, leaf: Any) -> Any:
        """Return the part of a segment's hash for an input or output of an operation.

        A tensor counts by its storage, offset, shape and dtype. The storage counts by a number, because the
        same step uses other memory every time.
        """
        if not isinstance(leaf, Tensor):
            return str(leaf)
        numbers, storage = self._storage_numbers, leaf.untyped_storage()
        if storage not in numbers:
            numbers[storage] = len(numbers)
        return numbers[storage], leaf.storage_offset(), leaf.shape, leaf.dtype

    def _count_memory(self, output: Tensor) -> None:
        storage = output.untyped_storage()
        if storage in self._storage_sizes:
            return
        self._storage_sizes[storage] = size = storage.nbytes()
        self._alive_bytes += size
        weakref.finalize(storage, self._free, size)
        self.costs = replace(self.costs, peak=max(self.costs.peak, self._alive_bytes))

    def _free(self, size: int) -> None:
        self._alive_bytes -= size

    def _check_value(self, tensor: Tensor, subject: str) -> None:
        """Refuse a tensor of a dtype, or with a value, that the device does not have."""
        if tensor.dtype in self.operations.refused_dtypes:
            raise self.blame(subject, f"is of {tensor.dtype}, which the device does not have")
        limit = 2 ** (self.operations.int64_bits - 1)
        if tensor.dtype == torch.int64 and self.operations.int64_bits < 64 and tensor.numel():
            with self._unwatched():
                smallest, largest = int(tensor.min()), int(tensor.max())
            if smallest < -limit or largest >= limit:
                extreme = smallest if smallest < -limit else largest
                bits = f"int64 has {self.operations.int64_bits} bits on the device"
                raise self.blame(subject, f"has the value {extreme}, but {bits}")


class _OperationMode(_DispatchMode):  # type: ignore[misc]
    """Intercepts every operation of forward and backward, below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # promote_types computes a dtype, so the device runs nothing.
        if not self.recorder.is_watching or func is torch.ops.aten.promote_types.default:
            return func(*args, **kwargs)
        inputs = _leaves((args, kwargs))
        if self.recorder.makes_on_host or self.recorder.is_on_host(inputs):
            outputs = func(*args, **kwargs)
            self.recorder.keep_on_host(outputs)
            return outputs
        self.recorder.check_operation(func, args)
        outputs = func(*args, **kwargs)
        self.recorder.count_operation(func, inputs, _leaves(outputs))
        return outputs


class _MethodMode(TorchFunctionMode):
    """Intercepts the calls that make tensors on the host, and the copies of these tensors.

    ``_OperationMode`` cannot do it, because an operation does not show whether the call had ``device=``.
    """

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
        makes_on_host = not _tensors((args, kwargs)) and "device" not in kwargs
        self.recorder.makes_on_host = makes_on_host
        try:
            output = func(*args, **kwargs)
        finally:
            self.recorder.makes_on_host = False
        if func in _COPIES and self.recorder.is_on_host(args[0]) and _names_device(args[1:], kwargs):
            return self.recorder.copy_to_device(output)
        if makes_on_host and isinstance(output, Tensor):
            self.recorder.keep_on_host(output)
        return output


def _leaves(values: Any) -> list[Any]:
    """Return the values in nested tuples, lists and dictionaries."""
    if isinstance(values, dict):
        values = list(values.values())
    if not isinstance(values, tuple | list):
        return [values]
    leaves = []
    for value in values:
        leaves += _leaves(value)
    return leaves


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]


def _bytes(name: str, inputs: list[Any], outputs: list[Any]) -> int:
    """Return the bytes that an operation reads and writes. A selection reads only the selected part."""
    packet = name.partition(".")[0]
    if "empty" in packet:
        return 0
    if packet in _SELECTING:
        selected = sum(tensor.nbytes for tensor in _tensors(outputs))
        indices = [tensor for tensor in _tensors(inputs)[1:] if not tensor.is_floating_point()]
        return 2 * selected + sum(index.nbytes for index in indices)
    sizes = {id(tensor): tensor.nbytes for tensor in _tensors((inputs, outputs))}
    return sum(sizes.values())


def _names_device(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.device | str) for value in (*arguments, *keywords.values()))


def is_of_torch(file: str) -> bool:
    """Return whether a file belongs to torch, or is generated code."""
    return file.startswith((_TORCH, _GENERATED))


def _caller() -> tuple[SourceLine, bool]:
    """Return the innermost line outside torch and this file, and whether that line calls the backward."""
    frame: FrameType | None = inspect.currentframe()
    calls_backward = False
    while frame is not None:
        code: CodeType = frame.f_code
        if code in _BACKWARD_CODE:
            calls_backward = True
        elif not is_of_torch(code.co_filename) and code.co_filename != __file__:
            return SourceLine(code.co_filename, frame.f_lineno), calls_backward
        frame = frame.f_back
    return SourceLine("?", 0), calls_backward
