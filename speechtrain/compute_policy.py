"""Compute policy: the settings of a run that depend on device and precision.

A block is a module of the model with several implementations. They have equal results and parameters, but use
different operations. The policy chooses the implementation of each block.
"""

from __future__ import annotations

import copy
import os
import statistics
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cache, update_wrapper
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from speechtrain import torch_private
from speechtrain.precision import NAMES

# A policy replaces the reference if its time is at most 90 % of the reference's time.
_MAX_RELATIVE_TIME = 0.9
_MIN_ROUNDS, _MAX_ROUNDS = 3, 5  # Each round times every policy once.
_MAX_SECONDS = 20.0  # After this time, rounds beyond the minimum are omitted.

Compiler = str | Callable[..., Any]
"""A backend of ``torch.compile``: its name or its function. It is empty without compilation."""
# Graphs of one function for each shape: training and evaluation, the widths of the LSTMs, and a last part.
_GRAPHS_OF_A_SHAPE = 16
_STEPS_OF_A_GRAPH = 80  # XLA compiled an LSTM of 136,000 operations, all frames in one graph, for minutes.
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class ComputePolicy:
    """Dtypes, kernels and sizes of one run. The defaults are for fp32 on devices that run operations eagerly.

    Each rank resolves the policy once. It is logged and stored in ``RUN/device.json``.
    """

    autocast_dtype: torch.dtype | None = None  # dtype of matmuls and convolutions. None: no autocast
    # dtype of matmuls in the blocks that cast their inputs themselves: LSTM loop and transducer joint
    product_dtype: torch.dtype = torch.float32
    fp32_matmul: str = "highest"  # torch's setting for fp32 matmuls in the whole process
    static_shapes: bool = False  # true: no shape depends on data, and the host reads nothing within a step
    lstm: str = "fused"  # fused (torch's kernel) | layers (torch's kernel for each layer) | loop over frames
    attention: str = "sdpa"  # sdpa (torch's kernel) | slices (basic operations)
    dropout: str = "words"  # words (16 random bits for each unit, fast on a CPU) | torch (its operation)
    conv: str = "matmul"  # matmul of strided views | conv1d | conv2d
    spectrum: str = "fft"  # fft | matmul (for a device without FFT) | conv (also without strided views)
    ctc: str = "torch"  # torch (its kernel) | static (a recursion in static shapes) | vendor (ctc_kernel)
    # ragged (lattice cells within each row's lengths) | static (all cells, with padding)
    transducer: str = "ragged"
    lattice_cells: int = 1024  # largest number of the transducer's lattice cells in memory at once
    logit_bytes: int = 32 * 2**20  # bytes of logits that the transducer loss stores for its gradients
    feature_frames: int = 256  # frames of a spectrogram at once (256 fit into a CPU's cache). 0: all
    lstm_segment: int = 0  # frames of an LSTM encoder in one lazy graph. 0: all
    # Fields with compare=False are not stored, and policies that differ only in them are equal.
    compiler: Compiler = field(default="", compare=False)
    # function that ends a lazy graph
    mark_step: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    # the vendor's CTC loss, with the arguments of torch's ``ctc_loss`` in the same order
    ctc_kernel: Callable[..., Tensor] | None = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> ComputePolicy:
        # A policy does not change, and a copied device would have no chip.
        return self

    @property
    def is_lazy(self) -> bool:
        """Whether the device records a graph until ``mark_step``."""
        return self.static_shapes and not self.compiler

    def fixed_width(self, largest: int) -> int | None:
        """Return ``largest``, the largest width of a table, or None if the width may depend on the data."""
        return largest if self.static_shapes else None

    def lengths_on_host(self, lengths: Tensor, padded: int) -> list[int]:
        """Return the lengths (B,) of rows. With static shapes, the host reads nothing: each is ``padded``."""
        if self.static_shapes:
            return [padded] * len(lengths)
        numbers: list[int] = lengths.tolist()
        return numbers

    def tensors_for_search(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of a search for texts.

        With static shapes they are copies on the host, because the number of steps of a search and the shapes
        of its results depend on the data.
        """
        if self.static_shapes:
            return tuple(tensor.cpu() for tensor in tensors)
        return tensors

    def module_for_search(self, module: _Module) -> _Module:
        """Return a module of a search. With static shapes it is a copy on the host, with torch's kernels."""
        if self.static_shapes:
            module = copy.deepcopy(module).cpu()
            apply_policy(module, PLAIN)
        return module

    def autocast(self, device: str) -> AbstractContextManager[object]:
        """Return the autocast context for forward passes. ``device`` is a device type of torch."""
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)

    def record(self) -> dict[str, Any]:
        """Return the stored fields as values for a JSON file."""
        record = {}
        for name in _STORED_FIELDS:
            setting = getattr(self, name)
            record[name] = str(setting) if isinstance(setting, torch.dtype) else setting
        return record

    def describe(self) -> str:
        """Return the precision and the kernels that differ from the defaults, such as ``bf16 lstm=loop``."""
        defaults = PLAIN.record()
        words = [NAMES[self.autocast_dtype or torch.float32]]
        for name, setting in self.record().items():
            if setting != defaults[name] and not name.endswith("_dtype"):
                words.append(f"{name}={setting}")
        return " ".join(words)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ComputePolicy | None:
        """Return the policy of ``record``, or None if the record is damaged or from another release."""
        if not isinstance(record, Mapping) or record.keys() != set(_STORED_FIELDS):
            return None
        settings: dict[str, Any] = dict(record)
        for name, setting in record.items():
            if not _is_valid(name, setting):
                return None
            if name.endswith("_dtype"):
                settings[name] = _DTYPES[setting]
        return cls(**settings)


_STORED_FIELDS = tuple(policy_field.name for policy_field in fields(ComputePolicy) if policy_field.compare)
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)} | {None: None}
_ALLOWED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "autocast_dtype": tuple(_DTYPES),
    "product_dtype": (str(torch.float32), str(torch.bfloat16)),
    "fp32_matmul": ("highest", "high", "medium"),
    "static_shapes": (False, True),
    "lstm": ("fused", "layers", "loop"),
    "attention": ("sdpa", "slices"),
    "dropout": ("words", "torch"),
    "conv": ("conv1d", "conv2d", "matmul"),
    "spectrum": ("fft", "matmul", "conv"),
    "ctc": ("torch", "static", "vendor"),
    "transducer": ("ragged", "static"),
}
"""The allowed values of each field. Fields that are not listed are sizes."""


def _is_valid(name: str, setting: Any) -> bool:
    """Return whether a JSON file may contain ``setting`` for the field ``name``."""
    if name in _ALLOWED_SETTINGS:
        return setting in _ALLOWED_SETTINGS[name]
    return type(setting) is int and setting >= 0


PLAIN = ComputePolicy()

STATIC = ComputePolicy(
    static_shapes=True,
    lstm="loop",
    attention="slices",
    dropout="torch",
    conv="conv2d",
    spectrum="conv",
    ctc="static",
    transducer="static",
    feature_frames=0,
)
"""The policy of devices that record graphs, which cannot have varying shapes, an FFT, strided views or reads
by the host."""


class PolicyAware(ABC):
    """A block with several implementations. Its checkpoints do not depend on the implementation."""

    @abstractmethod
    def apply_policy(self, policy: ComputePolicy) -> None:
        """Use the implementation that ``policy`` selects."""


class TorchSettings(NamedTuple):
    """The settings of torch in this process that a run changes."""

    threads: int
    fp32_matmul: str
    cudnn_tf32: bool

    @classmethod
    def current(cls) -> TorchSettings:
        _ignore_advice()
        precision = torch.get_float32_matmul_precision()
        return cls(torch.get_num_threads(), precision, torch.backends.cudnn.allow_tf32)

    def apply(self) -> None:
        current = self.current()
        if self.threads != current.threads:
            torch.set_num_threads(self.threads)
        if self[1:] != current[1:]:
            set_fp32_matmul(self.fp32_matmul)
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32


@contextmanager
def unchanged_torch() -> Iterator[None]:
    """Return a context whose end restores torch's settings and the state of the host's generator."""
    settings = TorchSettings.current()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        settings.apply()


def set_fp32_matmul(precision: str) -> None:
    """Set the precision of fp32 matmuls (``highest``, ``high`` or ``medium``) and of cuDNN."""
    _ignore_advice()
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


@cache
def _ignore_advice() -> None:
    """Hide the warning of torch 2.9, which comes once. It recommends settings that torch 2.7 lacks."""
    with warnings.catch_warnings(action="ignore"):
        bool(torch.backends.cudnn.allow_tf32)


def apply_policy(module: nn.Module, policy: ComputePolicy) -> None:
    """Apply ``policy`` to this process, to ``module`` and to every block in it that is ``PolicyAware``."""
    set_fp32_matmul(policy.fp32_matmul)
    for block in module.modules():
        if isinstance(block, PolicyAware):
            block.apply_policy(policy)


class GraphFunction(Generic[_Arguments, _Result]):
    """A function that a compiling device with static shapes computes as one graph. Elsewhere it is plain.

    A recursion calls it for one part of its steps after the other, so the size of a graph does not grow with
    the recording. Arguments that are not tensors are constants of the graph.
    """

    compiler: ClassVar[Compiler] = ""  # of this process, which ``compile_module`` sets

    def __init__(self, function: Callable[_Arguments, _Result]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._compiled: dict[Compiler, Callable[_Arguments, _Result]] = {}

    def __call__(self, *arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        compiler = self.compiler
        if not compiler:
            return self._function(*arguments, **keywords)
        if compiler not in self._compiled:
            self._compiled[compiler] = torch.compile(
                self._function, backend=compiler, dynamic=False, fullgraph=True
            )
        return self._compiled[compiler](*arguments, **keywords)


def equal_parts(steps: int) -> tuple[int, int]:
    """Return the number and the length of the parts of a recursion of ``steps`` steps.

    A part has up to 80 steps, whose graph has less than 1,000 operations. All parts have the same length, so
    one graph serves all. The last part may have some steps of padding.
    """
    count = -(-steps // _STEPS_OF_A_GRAPH)
    return count, -(-steps // count)


def compile_module(module: nn.Module, policy: ComputePolicy, shapes: int) -> None:
    """Compile ``module`` in place for ``shapes`` shapes of training, if ``policy`` has a compiler.

    With static shapes, the ``graph_units`` of the module are compiled, or the whole module if it lists none.
    The recursions in the remaining code are graph functions. Otherwise each layer in the ``ModuleList``
    attributes that a submodule lists in ``shard_units`` is compiled. If no submodule lists layers, the whole
    module is compiled except its ``losses``.
    """
    if not policy.compiler:
        return
    # Training and evaluation each compile every shape. Beyond the limit, torch would run new shapes eagerly.
    config = torch_private.dynamo_config
    config.recompile_limit = max(config.recompile_limit, 2 * shapes)
    if policy.static_shapes:
        limit = _GRAPHS_OF_A_SHAPE * shapes
        config.recompile_limit = max(config.recompile_limit, limit)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)
        GraphFunction.compiler = policy.compiler
        _compile_units(module, policy.compiler)
        return
    parts = _shard_layers(module)
    if not parts and hasattr(module, "losses"):
        # The losses read lengths, which would break the graph.
        module.losses = torch.compiler.disable(module.losses)  # type: ignore[no-untyped-call]
    for part in parts or [module]:
        part.compile(backend=policy.compiler, dynamic=False)


def _compile_units(module: nn.Module, compiler: Compiler) -> None:
    """Compile the methods and submodules of ``module`` that it lists in ``graph_units``, or all of it."""
    names = getattr(module, "graph_units", None)
    if names is None:
        module.compile(backend=compiler, dynamic=False)
        return
    for name in names:
        unit = getattr(module, name)
        if isinstance(unit, nn.Module):
            _compile_units(unit, compiler)
        else:
            setattr(module, name, torch.compile(unit, backend=compiler, dynamic=False))


def _shard_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers in each ``ModuleList`` that a submodule lists in ``shard_units``."""
    layers: list[nn.Module] = []
    for submodule in module.modules():
        for name in getattr(submodule, "shard_units", ()):
            unit = submodule.get_submodule(name)
            if isinstance(unit, nn.ModuleList):
                layers += unit
    return layers


def fastest_policy(
    candidates: Sequence[ComputePolicy], seconds_of: Callable[[ComputePolicy], float]
) -> tuple[ComputePolicy, list[float]]:
    """Return the fastest policy, and the median seconds per step of each of ``candidates``.

    The first candidate is the reference. Another policy is returned only if its median is at most 90 % of the
    reference's median. ``seconds_of`` executes one step of a policy and returns its seconds. The timings are
    interleaved, because the machine's load varies. The first step of each policy is a warm-up, whose time is
    ignored.
    """
    for candidate in candidates:
        seconds_of(candidate)
    timings: list[list[float]] = [[] for _ in candidates]
    total = 0.0
    for number in range(_MAX_ROUNDS):
        if number >= _MIN_ROUNDS and total >= _MAX_SECONDS:
            break
        for times, candidate in zip(timings, candidates, strict=True):
            times.append(seconds_of(candidate))
            total += times[-1]
    medians = [statistics.median(times) for times in timings]
    fastest_median = min(medians)
    if fastest_median <= _MAX_RELATIVE_TIME * medians[0]:
        return candidates[medians.index(fastest_median)], medians
    return candidates[0], medians


def scale_scalar(scalar: Tensor, factor: float) -> Tensor:
    """Return ``scalar`` () times a number, in the dtype of ``scalar``."""
    return scalar * torch.full_like(scalar, factor)  # A lazy tensor times a Python number would be fp64.


def usable_cpus() -> set[int]:
    """Return the CPUs that this process may use: its affinity mask on Linux, else all CPUs.

    Control groups reduce the mask.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    count = os.cpu_count() or 1
    return set(range(count))
