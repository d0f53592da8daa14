"""Checks a training step against a device that this machine lacks: its operations, values and costs.

The step runs on the CPU with the device's implementations of the blocks, under a dispatch mode that compares
every operation of forward and backward with the device's table (``operations.py``).
"""

from __future__ import annotations

import inspect
import linecache
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import speechtrain
from speechtrain.batch import Batch
from speechtrain.devices.base import Device
from speechtrain.errors import MachineError, SpeechtrainError
from speechtrain.optim.optimizer_step import Update
from speechtrain.precision import Precision
from tools.rehearsal.operations import Operations

_TORCH = str(Path(torch.__file__).parent)
_ROOT = Path(speechtrain.__file__).parent
_BACKWARD_CODE = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_GENERATED = "<"  # Generated code has a file name such as "<string>".
_READS = "reads a value back to the host, which waits for the device"
_DYNAMIC = "gives a shape that depends on data, so every step is compiled"
_COPIED = "copies from the host to the device, and is no tensor of the batch"
_WAITS = "waits for the device"
_NEW_GRAPH = "makes a new graph: the same shape had another operation or another number before"
# The graph of the optimizer step grows with the number of weights, not with a recording. It is compiled once.
_UPDATE = ("training/", "optim/", "precision.py")
_MASK_DTYPES = (torch.bool, torch.uint8)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
# Methods that read a CPU tensor's memory. The dispatcher sees no operation for them.
_MEMORY_READERS = ("tolist", "numpy", "__array__", "cpu", "__dlpack__")
# Its lengths are numbers of the host, although torch tags it as if it read them.
_WITH_HOST_LENGTHS = ("aten._ctc_loss.default",)
_VIEWS = ("aten._unsafe_view.default",)  # without torch's mark of a view
_SELECTING = ("gather", "index", "index_select", "embedding")
_COPIES = (Tensor.to, Tensor.cuda)
_HOST = "cpu"  # as a text. In the step on the CPU, the ``torch.device`` of this name is the device.
_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


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
    function: str = ""  # its qualified name

    def __str__(self) -> str:
        return f"{self._path}:{self.line}"

    @property
    def _path(self) -> Path:
        path = Path(self.file)
        return path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path

    @property
    def qualified_function(self) -> str:
        """The file and the function, without the line."""
        return f"{self._path}:{self.function}"

    @property
    def code(self) -> str:
        """The text of the line, at most 80 characters."""
        return linecache.getline(self.file, self.line).strip()[:80]


@dataclass
class Costs:
    """The costs of the watched steps on a device that runs operation by operation."""

    launches: int = 0  # ATen operations except views
    reads: int = 0  # values and ends of work that the host waits for
    copies: int = 0  # tensors that are copied from the host to the device, the batch included
    moved: int = 0  # bytes that the launches read and write
    peak: int = 0  # the most bytes that the tensors made under the recorder have at one time

    def __str__(self) -> str:
        memory = f"{self.moved / 1e9:.2f} GB moved, {self.peak / 2**20:,.0f} MiB at the peak"
        crossings = f"{self.reads} reads by the host, {self.copies} copies to the device"
        return f"{self.launches:,} launches, {crossings}, {memory}"


@dataclass(slots=True)
class _Memory:
    """The memory of tensors that share it."""

    is_on_host: bool = False
    is_counted: bool = False  # as made under the recorder
    segment: int = -1  # the latest segment that uses it
    number: int = 0  # its place in the order in which that segment uses memory


class Recorder:
    """Watches the steps that run under it in this thread, including the backward.

    ``with recorder:`` raises ``Unfit`` at the first operation that the table refuses. If the device records
    graphs, these operations also raise it:

    - an operation that reads a value back to the host,
    - an operation with an output whose shape depends on data,
    - after ``with recorder.warm_up():``, an operation that makes another graph than the warm-up: it has
      another shape, number, or input. Only the numbers of ``allow_numbers`` may differ.

    ``crossings`` are the functions that may read values and copy tensors, as ``FILE:FUNCTION``. Each other
    read and copy raises the error. ``move`` may always copy a batch. If the device records graphs, a read
    must come right after ``mark_step``. Without ``crossings``, other devices may read and copy everywhere.

    The error names the innermost line outside torch. For an operation of the backward, that is the line of
    the forward that made it.

    ``costs`` are counted since the recorder was made. ``mark_step`` ends a segment. ``segments`` has the
    launches of each segment. ``distinct`` is the number of different segments, each of which is compiled
    once. Segments differ in operations, shapes, constants, or in the tensors that they combine. The end of
    the context also ends a segment.

    A call that makes a tensor from numbers, without ``device=`` or with ``device="cpu"``, makes it on the
    host on every device. A tensor that is computed from such tensors only is on the host, too, until
    ``Tensor.to``. So are the tensors of ``torch.from_numpy`` and ``keep_on_host``. The recorder takes all
    other tensors for tensors of the device. Each operation costs about 0.1 ms of Python code.
    """

    def __init__(
        self, operations: Operations | None = None, crossings: Collection[str] | None = None
    ) -> None:
        self.operations = operations or Operations(records=True)
        self.crossings = crossings
        self.numbers_change = False
        self.costs = Costs()
        self.segments: list[int] = []
        self._segment_hashes = set[int]()  # of the segments that have ended
        self._segment_hash, self._segment_start = 0, 0  # of the open segment, which starts at this launch
        self._segment, self._used_memories = 0, 0  # the number of the open segment, and of memories in it
        self._learned_graphs = set[int]()  # the hash of each beginning of a segment
        self._learned_outputs = set[tuple[Any, torch.Size, torch.dtype]]()
        self._sources: dict[int, SourceLine] = {}  # by the number of the operation's autograd node
        self._memories = WeakIdKeyDictionary()  # by storage
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
        """Return a context that learns the graphs of a step. Later steps may have only these graphs."""
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
        from_numpy = torch.from_numpy

        def host_tensor(array: Any) -> Any:
            with self._unwatched():
                return self.keep_on_host(from_numpy(array))

        self._stack.enter_context(patch.object(torch, "from_numpy", host_tensor))
        self._stack.enter_context(_MethodMode(self))
        self._stack.enter_context(_OperationMode(self))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()
        self.mark_step()

    def _watch(self, name: str) -> None:
        """Count the calls of the method ``name`` of tensors as reads by the host."""
        method = getattr(Tensor, name)

        def counting_method(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            # With a mode, torch calls the attribute of this name once more.
            if self.is_on_host(tensor) or not self.is_watching:
                return method(tensor, *arguments, **keywords)
            self.count_read(f"Tensor.{name}")
            with self._unwatched():
                value = method(tensor, *arguments, **keywords)
            return self.copy_to_host(value) if isinstance(value, Tensor) else value

        self._stack.enter_context(patch.object(Tensor, name, counting_method))

    def clear(self) -> None:
        """Count the costs from 0 on. No segment may be open."""
        self.costs, self._segment_start = Costs(), 0

    def mark_step(self) -> None:
        """End the open segment, as a device's ``mark_step`` does. An empty segment does not count."""
        if self.costs.launches > self._segment_start:
            self.segments.append(self.costs.launches - self._segment_start)
            self._segment_hashes.add(self._segment_hash)
        self._segment_hash, self._segment_start = 0, self.costs.launches
        self._segment, self._used_memories = self._segment + 1, 0

    def move(self, batch: Batch) -> Batch:
        """Copy the batch like ``Device.move``. The error names the field whose values the device refuses."""
        for name, field in {**vars(batch), **batch.extra}.items():
            if isinstance(field, Tensor):
                self._check_value(field, f"the copy of Batch.{name}")
                self.costs.copies += 1
        with self._unwatched():
            return batch.to(torch.clone)

    def allow_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        """Allow other numbers in each step of ``optimizer``, which are learning rates and bias corrections.

        Gaudi's bridge passes the numbers of these operations as tensors (``scalar_ids`` in ``hpu_op.yaml``).
        """

        def allow(*_: object) -> None:
            self.numbers_change = True

        def refuse(*_: object) -> None:
            self.numbers_change = False

        optimizer.register_step_pre_hook(allow)
        optimizer.register_step_post_hook(refuse)

    # --- called by the modes --------------------------------------------------------------------------

    def blame(self, operation: str, fault: str) -> Unfit:
        """Return the error for the operation that runs now."""
        source, calls_backward = _caller()
        node = _backward_node()
        if node is None:
            return Unfit(source, operation, fault)
        forward = self._sources.get(node)
        if calls_backward:  # torch's own code runs the operation, so the line of the forward says more.
            return Unfit(forward or source, f"{operation} of the backward", fault)
        # The line is in a hook, or in the Python code of a ``torch.autograd.Function``.
        return Unfit(source, operation, fault, forward=forward)

    def is_on_host(self, values: Any) -> bool:
        """Return whether there are tensors among ``values``, all of them on the host."""
        tensors = _tensors((values,))
        return bool(tensors) and all(self._memory(tensor).is_on_host for tensor in tensors)

    def _memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        if storage not in self._memories:
            self._memories[storage] = _Memory()
        memory: _Memory = self._memories[storage]
        return memory

    def keep_on_host(self, values: Any) -> Any:
        """Return ``values``. The tensors among them are on the host from now on."""
        for tensor in _tensors((values,)):
            self._memory(tensor).is_on_host = True
        return values

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """Return the copy of a device tensor on the host."""
        with self._unwatched():
            copy: Tensor = self.keep_on_host(tensor.clone())
        return copy

    def copy_to_device(self, tensor: Tensor, name: str = "Device.tensor") -> Tensor:
        """Return the copy of a host tensor on the device."""
        self._check_value(tensor, "the copy to the device")
        self.count_copy(name)
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
        """Count a read of a value by the host. Refuse it outside ``crossings``, or if it cuts a graph."""
        self.costs.reads += 1
        records = self.operations.records
        cuts_graph = records and self.costs.launches > self._segment_start
        if cuts_graph or not self._is_allowed(is_free=not records):
            raise self.blame(name, fault)

    def count_copy(self, name: str) -> None:
        """Count a copy from the host to the device. Refuse it outside ``crossings``."""
        self.costs.copies += 1
        if not self._is_allowed(is_free=True):
            raise self.blame(name, _COPIED)

    def _is_allowed(self, is_free: bool) -> bool:
        """Return whether the present function is in ``crossings``, or ``is_free`` without them."""
        if self.crossings is None:
            return is_free
        source, _ = _caller()
        return source.qualified_function in self.crossings

    def check_operation(self, function: Any, arguments: Any, keywords: Any) -> None:
        """Record the line that made an operation. Refuse an operation that the device cannot run."""
        if _backward_node() is None:
            # Autograd numbers a node right before its operation runs, so the latest number is this node's.
            number = torch.autograd._get_sequence_nr() - 1
            if number not in self._sources:
                source, _ = _caller()
                self._sources[number] = source
        name = function.__name__
        packet = name.partition(".")[0]
        self._check_reads(function, packet, arguments)
        if function is torch.ops.aten.view.dtype and not self.operations.reinterprets:
            raise self.blame(name, "reinterprets bits, which the device's graphs do not")
        # As in torch, a host tensor without dimensions may be combined with tensors on the device.
        host_tensors = [t for t in _tensors(arguments) if self._memory(t).is_on_host and t.dim() > 0]
        if host_tensors and packet not in (*_INDEXING, "copy_"):
            raise self.blame(name, "combines a tensor on the host with one on the device")
        if packet == "copy_" and self.is_on_host(arguments[0]):
            self.count_read(name)
        elif host_tensors:  # Indices may be on the host.
            self.count_copy(name)
        fault = self.operations.fault(packet.rstrip("_"), arguments, keywords)
        if fault:
            raise self.blame(name, fault)

    def _check_reads(self, function: Any, packet: str, arguments: Any) -> None:
        """Count an operation that the host waits for: for a value, or for a shape that depends on data."""
        name = function.__name__
        if str(function) in _WITH_HOST_LENGTHS:
            return
        if torch.Tag.data_dependent_output in function.tags:
            self.count_read(name)
        elif packet in _INDEXING:
            if any(index.dtype in _MASK_DTYPES for index in _tensors(arguments[1])):
                self.count_read(f"{name} by a mask", _DYNAMIC)
        elif torch.Tag.dynamic_output_shape in function.tags:
            self.count_read(name, _DYNAMIC)

    def count_operation(self, function: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Count an operation. Refuse outputs of new shapes, and of types and values the device lacks."""
        output_tensors = _tensors(outputs)
        for output in output_tensors:
            self._check_value(output, function.__name__)
            self._count_memory(output)
        content = [self._hash_part(leaf) for leaf in (*inputs, *outputs)]
        self._segment_hash = hash((self._segment_hash, function, *content))
        self._check_graph(function, output_tensors)
        is_view = function.is_view or str(function) in _VIEWS
        if not is_view and torch.Tag.data_dependent_output not in function.tags:
            self.costs.launches += 1
            self.costs.moved += _bytes(function.__name__, inputs, outputs)
            limit = self.operations.largest_graph
            if limit and self.costs.launches - self._segment_start > limit:
                error = self.blame(function.__name__, f"makes a graph of more than {limit:,} operations")
                if not error.source.qualified_function.startswith(_UPDATE):
                    raise error

    def _check_graph(self, function: Any, outputs: list[Tensor]) -> None:
        """In the warm-up, learn the open segment and the shapes of outputs. Afterwards, refuse new ones."""
        forms = [(function, output.shape, output.dtype) for output in outputs]
        if self._is_learning:
            self._learned_graphs.add(self._segment_hash)
            self._learned_outputs.update(forms)
        elif self._learned_graphs and self.operations.records:
            for form in forms:
                if form not in self._learned_outputs:
                    shape = "×".join(str(size) for size in form[1]) or "()"
                    fault = f"has the new shape {shape}, which was not in the warm-up"
                    raise self.blame(function.__name__, fault)
            if self._segment_hash not in self._learned_graphs:
                raise self.blame(function.__name__, _NEW_GRAPH)

    def _hash_part(self, leaf: Any) -> Any:
        """Return the part of a segment's hash for an input or output of an operation.

        A tensor counts by its storage, offset, shape and dtype. The storage counts by a number, because the
        same step uses other memory every time.
        """
        if not isinstance(leaf, Tensor):
            is_variable = self.numbers_change and isinstance(leaf, float)
            return "number" if is_variable else str(leaf)
        memory = self._memory(leaf)
        if memory.segment != self._segment:
            memory.segment, memory.number = self._segment, self._used_memories
            self._used_memories += 1
        return memory.number, leaf.storage_offset(), leaf.shape, leaf.dtype

    def _count_memory(self, output: Tensor) -> None:
        memory, storage = self._memory(output), output.untyped_storage()
        if memory.is_counted:
            return
        memory.is_counted, size = True, storage.nbytes()
        self._alive_bytes += size
        weakref.finalize(storage, self._free, size)
        self.costs.peak = max(self.costs.peak, self._alive_bytes)

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


class _OperationMode(TorchDispatchMode):
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
        self.recorder.check_operation(func, args, kwargs)
        outputs = func(*args, **kwargs)
        self.recorder.count_operation(func, inputs, _leaves((outputs,)))
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
        is_device_named = "device" in kwargs and kwargs["device"] != "cpu"
        makes_on_host = not is_device_named and not _tensors((args, kwargs))
        self.recorder.makes_on_host = makes_on_host
        try:
            output = func(*args, **kwargs)
        finally:
            self.recorder.makes_on_host = False
        if func in (*_COPIES, *_CONSTRUCTORS):
            return self._copy(func, output, args, kwargs)
        if makes_on_host and isinstance(output, Tensor):
            self.recorder.keep_on_host(output)
        return output

    def _copy(self, func: Any, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the output of a call that may copy between host and device. Count the copy."""
        recorder, name = self.recorder, f"{func.__name__} with a device"
        source = args[0] if args and isinstance(args[0], Tensor) else None
        names = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.device | str)]
        names_device = bool(names) and _HOST not in names
        if source is not None and recorder.is_on_host(source):
            return recorder.copy_to_device(output, name) if names_device else output
        if source is None and not names_device:
            recorder.keep_on_host(output)
        elif func in _CONSTRUCTORS and (source is None or func is Tensor.new_tensor):
            recorder.count_copy(name)
        elif _HOST in names:
            recorder.count_read(name)
            return recorder.copy_to_host(output)
        return output


def _leaves(values: Any) -> list[Any]:
    """Return the values in nested tuples, lists and dictionaries."""
    if isinstance(values, dict):
        values = list(values.values())
    leaves = []
    for value in values:
        if isinstance(value, tuple | list | dict):
            leaves += _leaves(value)
        else:
            leaves.append(value)
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


def is_of_torch(file: str) -> bool:
    """Return whether a file belongs to torch, or is generated code."""
    return file.startswith((_TORCH, _GENERATED))


class RecordedDevice(Device):
    """``device`` for a trainer whose updates run on the CPU under ``recorder``."""

    name = "cpu"

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self.device, self.recorder = device, recorder

    def update(self, precision: Precision, clip: float) -> Update:
        return self.device.update(precision, clip)

    def open(self, local_rank: int = 0) -> None:
        """Do nothing, because no chip is used."""

    def supports(self, dtype: torch.dtype) -> bool:
        return self.device.supports(dtype)

    def move(self, batch: Batch) -> Batch:
        return self.recorder.move(batch)

    def tensor(self, value: Tensor) -> Tensor:
        return self.recorder.copy_to_device(value)

    def mark_step(self) -> None:
        self.recorder.mark_step()

    def synchronize(self) -> None:
        self.mark_step()
        self.recorder.count_read("Device.synchronize", _WAITS)


def _backward_node() -> int | None:
    """Return the number of the autograd node whose backward runs in this thread, or None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def _caller() -> tuple[SourceLine, bool]:
    """Return the innermost line outside torch and this file, and whether that line calls the backward."""
    frame: FrameType | None = inspect.currentframe()
    calls_backward = False
    while frame is not None:
        code: CodeType = frame.f_code
        if code in _BACKWARD_CODE:
            calls_backward = True
        elif not is_of_torch(code.co_filename) and code.co_filename != __file__:
            return SourceLine(code.co_filename, frame.f_lineno, code.co_qualname), calls_backward
        frame = frame.f_back
    return SourceLine("?", 0), calls_backward
