"""Compute policy: what device and precision decide for a run's blocks, and the usable CPUs.

The implementations of a block have equal results and parameters, but use different operations.
"""

from __future__ import annotations

import os
import statistics
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain import torch_private

_MARGIN = 0.9  # another policy than the reference is used at 90 % of its time or less
_ROUNDS = (3, 5)  # fewest and most timings of a policy
_SECONDS = 20.0  # once all timings together took so long, each policy is timed the fewest times only


@dataclass(frozen=True)
class ComputePolicy:
    """Types, kernels and sizes of one run. Eager devices in fp32 have the defaults.

    It is resolved once in each rank, logged, and kept in ``RUN/device.json``.
    """

    autocast_dtype: torch.dtype | None = None  # of products and convolutions; None: no autocast
    product_dtype: torch.dtype = (
        torch.float32
    )  # in blocks that cast themselves: LSTM loop, transducer's joint
    fp32_matmul: str = "highest"  # torch's setting for fp32 products
    static_shapes: bool = False  # no shape depends on data, and the host reads nothing within a step
    lstm: str = "fused"  # torch's own, or that layer by layer, or a loop over frames
    attention: str = "sdpa"  # torch's own, or basic operations on slices
    conv: str = "matmul"  # over strided views, or torch's conv1d or conv2d
    spectrum: str = "fft"  # matmul for a device without FFT, conv for one that also lacks strided views
    ctc: str = "torch"  # torch's own, a recursion in static shapes, or the vendor's kernel
    transducer: str = "ragged"  # the loss visits the lattice's cells that matter, or all of them: static
    lattice_cells: int = 1024  # most cells of the transducer's lattice in memory at once
    logit_bytes: int = 32 * 2**20  # bytes of logits that the transducer loss keeps for its gradients
    feature_frames: int = 256  # frames of a spectrogram at once: 256 fit into a CPU's cache; 0: all
    lstm_segment: int = 0  # frames that an LSTM encoder computes between two ends of a graph; 0: all
    compiler: str = field(default="", compare=False)  # the backend of torch.compile, if it compiles
    mark_step: Callable[[], None] = field(
        default=lambda: None, compare=False, repr=False
    )  # ends a lazy graph
    # the vendor's CTC loss, which takes torch's arguments of ``ctc_loss`` in their order
    ctc_kernel: Callable[..., Tensor] | None = field(default=None, compare=False, repr=False)

    def autocast(self, device: str) -> AbstractContextManager[object]:
        """The context for forward passes on the torch device type ``device``."""
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)

    def record(self) -> dict[str, Any]:
        """The policy as plain values, for a JSON file."""
        values = {name: getattr(self, name) for name in _RECORDED}
        return {name: str(v) if isinstance(v, torch.dtype) else v for name, v in values.items()}

    def describe(self) -> str:
        """The differences from the defaults, as ``name=value`` words, or ``plain`` without any."""
        mine, plain = self.record(), PLAIN.record()
        changed = [f"{name}={mine[name]}" for name in mine if mine[name] != plain[name]]
        return " ".join(changed).replace("torch.", "") or "plain"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ComputePolicy | None:
        """The policy of ``record``, or None for a record of another release, or a damaged one."""
        if not isinstance(record, Mapping) or record.keys() != set(_RECORDED):
            return None
        values: dict[str, Any] = dict(record)
        for name, value in record.items():
            known = _KNOWN.get(name)
            if value not in known if known else type(value) is not int or value < 0:
                return None
            if name.endswith("_dtype"):
                values[name] = _DTYPES[value]
        return cls(**values)


_RECORDED = tuple(f.name for f in fields(ComputePolicy) if f.compare)
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)} | {None: None}
_KNOWN: dict[str, tuple[Any, ...]] = {
    "autocast_dtype": tuple(_DTYPES),
    "product_dtype": tuple(_DTYPES)[:2],
    "fp32_matmul": ("highest", "high", "medium"),
    "static_shapes": (False, True),
    "lstm": ("fused", "layers", "loop"),
    "attention": ("sdpa", "slices"),
    "conv": ("conv1d", "conv2d", "matmul"),
    "spectrum": ("fft", "matmul", "conv"),
    "ctc": ("torch", "static", "vendor"),
    "transducer": ("ragged", "static"),
}
"""The values of each field that is not a size."""

PLAIN = ComputePolicy()

STATIC = ComputePolicy(
    static_shapes=True,
    lstm="loop",
    attention="slices",
    conv="conv2d",
    spectrum="conv",
    ctc="static",
    transducer="static",
    feature_frames=0,
)
"""For devices that record graphs: fixed shapes, no FFT, no strided view, no read by the host."""


class PolicyAware(ABC):
    """A block with several implementations. Checkpoints do not depend on the choice."""

    @abstractmethod
    def apply_policy(self, policy: ComputePolicy) -> None:
        """Use the implementation that ``policy`` selects."""


def set_fp32_matmul(precision: str) -> None:
    """Set the precision of fp32 products (``highest``, ``high`` or ``medium``) and of cuDNN."""
    with warnings.catch_warnings():
        # torch 2.9 recommends settings that torch 2.7 lacks.
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"


def apply_policy(module: nn.Module, policy: ComputePolicy) -> None:
    """Apply ``policy`` to this process, to ``module`` and to every block in it that is ``PolicyAware``."""
    set_fp32_matmul(policy.fp32_matmul)
    for block in module.modules():
        if isinstance(block, PolicyAware):
            block.apply_policy(policy)


def compile_module(module: nn.Module, policy: ComputePolicy, shapes: int) -> None:
    """Compile ``module`` in place for ``shapes`` shapes of training, if ``policy`` has a compiler.

    Static shapes make the whole module one graph. Otherwise these are compiled: the members of each
    ``ModuleList`` that a part names in ``shard_units``, or without any the module except its ``losses``.
    """
    if not policy.compiler:
        return
    # Training and evaluation each compile every shape. Torch would run others than the first few eagerly.
    config = torch_private.dynamo_config
    config.recompile_limit = max(config.recompile_limit, 2 * shapes)
    parts: list[nn.Module] = []
    if not policy.static_shapes:
        parts = _repeated(module)
        if not parts and hasattr(module, "losses"):
            # They read lengths, which would break the graph.
            module.losses = torch.compiler.disable(module.losses)  # type: ignore[no-untyped-call]
    for part in parts or [module]:
        part.compile(backend=policy.compiler, dynamic=False)


def _repeated(module: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for owner in module.modules():
        for name in getattr(owner, "shard_units", ()):
            unit = owner.get_submodule(name)
            if isinstance(unit, nn.ModuleList):
                layers += unit
    return layers


def fastest(
    candidates: Sequence[ComputePolicy], seconds_of: Callable[[ComputePolicy], float]
) -> tuple[ComputePolicy, list[float]]:
    """The policy to use, and the median seconds of each of ``candidates``; the first is the reference.

    Another policy is used only if its median is at most 90 % of the reference's. ``seconds_of`` times one
    step. The timings are interleaved, because the machine's load varies. The first timing of each policy
    is a warm-up and does not count.
    """
    for candidate in candidates:
        seconds_of(candidate)
    taken: list[list[float]] = [[] for _ in candidates]
    fewest, most = _ROUNDS
    while len(taken[0]) < fewest or (len(taken[0]) < most and sum(map(sum, taken)) < _SECONDS):
        for times, candidate in zip(taken, candidates, strict=True):
            times.append(seconds_of(candidate))
    medians = [statistics.median(times) for times in taken]
    best = min(medians)
    chosen = medians.index(best) if best <= _MARGIN * medians[0] else 0
    return candidates[chosen], medians


def scaled(scalar: Tensor, factor: float) -> Tensor:
    """Multiply a scalar tensor () by a number in the tensor's dtype; lazy tensors would return fp64."""
    return scalar * torch.full_like(scalar, factor)


def usable_cpus() -> set[int]:
    """The CPUs that this process may use: its affinity mask (Linux; cgroups reduce it), else all CPUs."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
