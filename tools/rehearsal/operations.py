"""The operations and types of devices, from the source of their vendors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speechtrain.devices.base import Device

Check = Callable[[Sequence[Any], Mapping[str, Any]], str]
"""Returns why a call with these arguments and keywords runs on the CPU, or an empty text."""


@dataclass(frozen=True)
class Operations:
    """The operations and types of a device. Eager devices have the defaults."""

    # ATen's names of the supported operations, without overload and final underscore. Empty means all.
    names: frozenset[str] = frozenset()
    checks: Mapping[str, Check] = field(default_factory=dict)  # for the names with conditions
    refused_dtypes: tuple[torch.dtype, ...] = ()
    int64_bits: int = 64  # the bits in which the device really computes int64
    reinterprets: bool = True  # whether Tensor.view(dtype) works
    largest_graph: int = 0  # the maximum number of operations in a graph, 0 for no limit
    # Whether the device records operations in graphs. A graph ends if the host reads a value, or if a shape
    # depends on data.
    records: bool = False

    def fault(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
        """Return why the call of the operation ``name`` runs on the CPU, or an empty text."""
        if self.names and name not in self.names:
            return "is not in the device's table of operations, so it runs on the CPU"
        check = self.checks.get(name)
        reason = check(arguments, keywords) if check else ""
        return f"runs on the CPU, because {reason}" if reason else ""


# The operations of the bridge's list that training may use (scripts/ops_list/ops.hpu and hpu_op.yaml of
# release 1.19), and the operations that torch decomposes into these before they reach a device. The
# operations on lists (_foreach_…) and _cdist_forward are in a later hpu_op.yaml, at commit 0007c866 of
# github.com/HabanaAI/gaudi-pytorch-bridge. It is the latest public state that was found on 2026-11-26, and
# it names no release.
_OPERATIONS = """
abs acos add addbmm addcdiv addcmul addmm addmv alias all amax amin aminmax any arange argmax argmin
as_strided asin atan atan2 avg_pool2d avg_pool2d_backward baddbmm bernoulli binary_cross_entropy_with_logits
bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm cat ceil clamp
clamp_max clamp_min clone constant_pad_nd convolution convolution_backward copy copysign cos cosh
count_nonzero cumprod cumsum detach diagonal diagonal_backward div dot elu elu_backward embedding
embedding_dense_backward empty empty_like empty_strided eq erf erfc erfinv exp exp2 expand expm1 exponential
eye fill flip floor floor_divide fmod frac full full_like gather ge gelu gelu_backward glu glu_backward gt
hardtanh hardtanh_backward index index_add index_copy index_fill index_put index_select isfinite isinf isnan
kthvalue le leaky_relu leaky_relu_backward lerp lift_fresh linalg_vector_norm linear linear_backward
linspace log log10 log1p log2 logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or
logical_xor lt masked_fill masked_scatter matmul max max_pool2d_with_indices
max_pool2d_with_indices_backward maximum mean median min minimum mm mse_loss mse_loss_backward mul multinomial
mv nan_to_num native_batch_norm native_batch_norm_backward native_dropout native_dropout_backward
native_layer_norm native_layer_norm_backward ne neg new_empty new_empty_strided new_full new_ones new_zeros
nll_loss_backward nll_loss_forward norm normal one_hot ones ones_like permute poisson pow prod rand
rand_like randint randint_like randn randn_like random randperm reciprocal reflection_pad1d
reflection_pad1d_backward relu remainder repeat replication_pad1d replication_pad1d_backward roll round
rsqrt rsub scalar_tensor scatter scatter_add scatter_reduce searchsorted select select_backward sgn sigmoid
sigmoid_backward sign silu silu_backward sin sinh slice slice_backward smooth_l1_loss
smooth_l1_loss_backward softplus softplus_backward sort split split_with_sizes sqrt squeeze stack std
std_mean sub sum t take tan tanh tanh_backward threshold threshold_backward topk trace transpose tril triu
trunc unbind uniform unsqueeze var var_mean view view_as where xlogy zero zeros zeros_like _log_softmax
_log_softmax_backward_data _logcumsumexp _native_batch_norm_legit _reshape_alias _softmax
_softmax_backward_data _to_copy _unsafe_view _weight_norm_interface
_cdist_forward _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_div _foreach_mul _foreach_sqrt
_foreach_sub
"""


# The dtypes and conditions are from that commit: ``dtypes`` of Gaudi 2 and 3 for operations without an
# ``op_validator``, and the functions that ``fallback_check`` names. The entry of ``mul`` is left out, because
# torch computes isfinite on a CPU by a product of booleans.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "embedding": (*_FLOATS, torch.int32, torch.int16, torch.int8, torch.uint8),
    "native_batch_norm": _FLOATS,
    "native_layer_norm": _FLOATS,
    "native_layer_norm_backward": _FLOATS,
}


def _dtype_check(dtypes: tuple[torch.dtype, ...]) -> Check:
    def check(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
        dtype = arguments[0].dtype
        return "" if dtype in dtypes else f"it is of {dtype}"

    return check


def _embedding_fault(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    if True in arguments[3:]:  # scale_grad_by_freq and sparse
        return "scale_grad_by_freq or sparse is set"
    return _dtype_check(_DTYPES["embedding"])(arguments, keywords)


def _sort_fault(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    values, dim = arguments[0], keywords.get("dim", -1)
    if not keywords.get("stable") or (dim % values.dim() and values.shape[dim] <= 37):
        return ""
    return "it is stable, and sorts dimension 0 or more than 37 elements"


def _where_fault(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    dtype = arguments[0].dtype
    return "" if dtype == torch.bool else f"the condition is of {dtype}"


_CHECKS = {name: _dtype_check(dtypes) for name, dtypes in _DTYPES.items()}
_CHECKS |= {"embedding": _embedding_fault, "sort": _sort_fault, "where": _where_fault}

GAUDI = Operations(
    names=frozenset(_OPERATIONS.split()),
    checks=_CHECKS,
    refused_dtypes=(torch.float64, torch.complex64, torch.complex128),
    int64_bits=32,  # the copy of a larger number raises. PT_ENABLE_INT64_SUPPORT excludes lazy mode
    reinterprets=False,  # the lowering of view(dtype) keeps the old type and sizes
    largest_graph=5000,  # XLA compiled a graph of 136,000 for minutes, Synapse was not measured
    records=True,
)


def operations_of(device: Device) -> Operations:
    """Return the table of a device. A device without a table has all operations."""
    if device.name == "hpu":
        return GAUDI
    return Operations(records=device.static_shapes)
