"""The exact transducer (RNN-T) loss of an additive joint, without its (B, T, U + 1, V) lattice.

Legend: B utterances, T frames, U labels, P = U + 1 positions, H joint width, V symbols (the labels and the
blank), K durations, R reach (the longest duration plus 1), D diagonals, N cells of a chunk, t frames of a
part of the lattice.

The forms: ``RaggedJoint`` computes the cells within the lengths of each utterance, and is the default.
``StaticJoint`` computes all cells of the padded lattice. Both compute the log-probabilities of the arcs, from
these the loss and the occupancies (``transducer_recursion``), and then the gradients of the inputs.

The lattice has a cell for each frame t and each position u, the number of labels before the cell. An arc
leads from a cell to another: the blank from (t, u) to (t + 1, u), the next label from (t, u) to (t, u + 1). A
path is a sequence of arcs from cell (0, 0) to the blank of the last cell. The loss is minus the logarithm of
the sum of the probabilities of all paths. With ``durations`` (TDT), an arc also has a duration d, and the
durations have a softmax of their own. A label then leads to (t + d, u + 1), and a blank to (t + d, u), for
d > 0. A path ends with the blank that leads exactly to frame T after all labels.

Algorithm: joint, dropout, softmax and loss are one autograd function. It processes the lattice in chunks of
cells and stores two log-probabilities for each cell, of the blank and of the next label. The recursion over
them gives the occupancy of each cell, which is the probability that a path passes through it. Gradients of
all inputs are computed only in cells whose occupancy matters: in a third to a half of the cells at random
initialisation, and in a fourteenth after the model has learned an alignment. In these cells the joint is
computed again, unless its logits are in a buffer of a few megabytes, which each group of utterances uses
again.

Cost:

- ``skip_below``: cells of lower occupancy add nothing to the gradient. With 0, all cells are visited, and
  gradients agree with float64 to 1e-6 instead of 3e-6.
- ``chunk``: about this number of cells is in memory at once.
- ``keep``: this number of bytes of logits is stored for the gradients, so that fewer logits are computed
  twice.
- ``static``: every cell of the padded lattice is computed twice, in shapes that do not depend on data. The
  host reads nothing from the device. ``skip_below`` and ``keep`` then have no effect.

Forward computes the gradients and backward scales them. If the upstream gradients differ between utterances
that have frames, backward computes the gradients again. On a CPU the result is bit-equal from run to run at a
fixed number of threads. Under ``torch.compile``, call ``torch.compiler.disable(transducer_loss)``. Otherwise
the function compiles in dozens of pieces, anew for each shape.

Loss: Graves, "Sequence transduction with recurrent neural networks" (2012), sections 2.4 and 2.5.
Yu et al., "FastEmit: low-latency streaming ASR with sequence-level emission regularization" (ICASSP 2021).
Kang et al., "Delay-penalized transducer for low-latency streaming ASR" (ICASSP 2023).
Xu et al., "Efficient sequence transduction by jointly predicting tokens and durations" (ICML 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from speechtrain.losses.transducer_joint import ACTIVATIONS, gradient_factors
from speechtrain.losses.transducer_lattice import Gradients, Inputs, Settings, indices, lattice_shape
from speechtrain.losses.transducer_ragged import RaggedJoint
from speechtrain.losses.transducer_static import StaticJoint
from speechtrain.nn.full_precision import full_precision
from speechtrain.nn.joint import check_durations


def transducer_loss(
    encoder: Tensor,
    prediction: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    encoder_lengths: Tensor,
    label_lengths: Tensor,
    *,
    blank: int,
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    fastemit: float = 0.0,
    delay_penalty: float = 0.0,
    durations: Sequence[int] = (),
    sigma: float = 0.0,
    compute_dtype: torch.dtype | None = None,
    skip_below: float = 1e-6,
    chunk: int = 1024,
    keep: int = 32 * 2**20,
    static: bool = False,
) -> Tensor:
    """Return the negative log-likelihood (B,) under ``Linear(dropout(activation(encoder + prediction)))``.

    The result is in nats and is not divided by any length. Most recipes call its ``.mean()`` the loss. It is
    fp32, or float64 for a float64 ``compute_dtype``, and is differentiable once.

    Tensors, all on one device and with any strides. Values beyond the lengths are never read, so they may be
    NaN, and labels may be -1:

    - ``encoder`` (B, T, H) and ``prediction`` (B, U + 1, H) are the joint's two projections before their sum.
    - ``weight`` (V, H) and ``bias`` (V,) are the joint's output layer. Pass zeros for a layer without bias.
    - ``labels`` (B, U) are the targets without blanks, with ids below V.
    - ``encoder_lengths`` (B,) and ``label_lengths`` (B,) are the numbers of frames and of labels.

    Settings:

    - ``blank`` is the id of the blank, from 0 to V - 1.
    - ``activation`` is ``relu`` (MLPerf, NeMo) or ``tanh`` (Graves, ESPnet, icefall).
    - ``dropout`` is the joint's dropout rate, rounded to a multiple of 1/65536. The other units are divided
      by the exact rate at which they remain. Pass 0 in evaluation. The mask is a function of the cell and of
      ``seed``, which must differ from step to step. It is an int, which is copied to the device, an int64
      tensor, or its two int32 halves (2,) with the lower half first.
    - ``fastemit`` multiplies the gradient of label arcs by 1 + ``fastemit``. The value of the loss does not
      change. With durations it must be 0.
    - ``delay_penalty`` times (T - 1) / 2 - t is added to the log-probability of each label in frame t of T
      frames, so paths with early labels are favoured. The loss contains it, and may then be negative.
      ``fastemit`` multiplies the gradient of this loss. Pass 0 in evaluation.
    - ``durations``, in frames and ascending, select the TDT loss. ``weight`` (V + K, H) and ``bias``
      (V + K,) then have a row for each duration after the rows of the symbols.
    - ``sigma`` is subtracted from the log-probability of every symbol of the TDT loss, which favours paths of
      few arcs with long durations.
    - ``compute_dtype`` is the type of the matmuls: float32, bfloat16 or float64. By default it is float64 for
      a float64 ``encoder``, else float32. Softmax, recursion and sums over cells are always fp32 or wider,
      and autocast has no effect here.
    - ``skip_below``, ``chunk``, ``keep`` and ``static`` decide the cost, as the module explains.

    Special cases:

    - An utterance without frames, which is a padding row, has the loss 0 and no gradient.
    - With durations, an utterance without a path has the loss 0 and no gradient. It has too few frames for
      its labels, or no sum of durations equals its number of frames.
    - A class whose ``bias`` is -inf is impossible. An utterance that has paths, each of which needs an
      impossible label, blank or duration, has the loss +inf and no gradient.

    Raises ValueError for impossible dtypes, devices, shapes, lengths, labels or rates. With ``static``,
    lengths and labels are not checked, because a read would stall a device. The loss is then undefined for an
    id of V or more.
    """
    _check_settings(activation, dropout, fastemit, delay_penalty, chunk, keep)
    durations = _check_durations(durations, fastemit, sigma)
    tensors = (encoder, prediction, weight, bias, labels, encoder_lengths, label_lengths)
    _check_tensors(blank, len(durations), *tensors)
    dtype = _matmul_dtype(compute_dtype, encoder.dtype)
    settings = Settings(
        blank=blank,
        activation=activation,
        dropout=dropout,
        fastemit=fastemit,
        dtype=dtype,
        skip_below=skip_below,
        chunk=chunk,
        keep=keep,
        durations=durations,
        sigma=sigma,
        delay_penalty=delay_penalty,
    )
    return _losses(settings, tensors, seed, static)


def _losses(settings: Settings, tensors: tuple[Tensor, ...], seed: int | Tensor, static: bool) -> Tensor:
    """Return the losses (B,) of ``tensors``, which are in the order of ``transducer_loss``."""
    encoder, prediction, weight, bias, *targets = tensors
    seed_halves = torch.zeros(2, dtype=torch.int32, device=encoder.device)
    if settings.dropout:
        seed_halves = _seed_halves(seed, encoder.device)
    labels, frame_counts, label_counts = (tensor.long() for tensor in targets)
    inputs = Inputs(
        encoder=encoder,
        prediction=prediction,
        weight=weight,
        bias=bias,
        labels=labels,
        frame_counts=frame_counts,
        label_counts=label_counts,
        seed_halves=seed_halves,
    )
    if not static:
        _check_values(inputs, settings.blank, vocabulary=len(bias) - len(settings.durations))
    cells_of_batch = math.prod(lattice_shape(inputs))
    settings = replace(settings, chunk=min(settings.chunk, cells_of_batch))
    is_training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    function = _StaticLoss if static else _RaggedLoss
    loss: Tensor = function.apply(*inputs, settings, is_training)  # type: ignore[no-untyped-call]
    return loss


def _seed_halves(seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the seed as two int32 (2,) on the device. As a constant, it would make another graph each step.

    An int is copied, and the host waits for this copy.
    """
    halves = torch.as_tensor(seed)
    if halves.dtype != torch.int32:
        halves = halves.long().reshape(1).view(torch.int32)
    return halves.reshape(2).to(device)


def _check_settings(
    activation: str, dropout: float, fastemit: float, delay_penalty: float, chunk: int, keep: int
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}. It must be {' or '.join(ACTIVATIONS)}")
    if not (dropout >= 0 and round(dropout * 65536) < 65536):
        raise ValueError(f"dropout is {dropout}. It must be at least 0 and below 1")
    if not (fastemit >= 0 and delay_penalty >= 0 and chunk >= 1 and keep >= 0):
        raise ValueError(
            f"fastemit is {fastemit}, delay_penalty {delay_penalty}, chunk {chunk}, keep {keep}. "
            "They must be at least 0, 0, 1 and 0"
        )


def _check_durations(durations: Sequence[int], fastemit: float, sigma: float) -> tuple[int, ...]:
    """Return the durations. Raises ValueError if they do not fit ``fastemit`` and ``sigma``."""
    durations = check_durations(durations)
    is_valid_sigma = sigma == 0 or (durations and sigma > 0)
    if (fastemit and durations) or not is_valid_sigma:
        raise ValueError(
            f"fastemit is {fastemit}, sigma {sigma}. With durations fastemit must be 0 and sigma at least 0, "
            "without durations sigma must be 0"
        )
    return durations


def _matmul_dtype(compute_dtype: torch.dtype | None, encoder_dtype: torch.dtype) -> torch.dtype:
    """Return the type of the matmuls. Raises ValueError for a type in which they cannot be computed."""
    if compute_dtype is None:
        return torch.float64 if encoder_dtype == torch.float64 else torch.float32
    if compute_dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"compute_dtype is {compute_dtype}. It must be float32, bfloat16 or float64")
    return compute_dtype


# The axes of each tensor of ``transducer_loss``, in the order of its parameters.
_AXES = {
    "encoder": "B T H",
    "prediction": "B U+1 H",
    "weight": "V H",
    "bias": "V",
    "labels": "B U",
    "encoder_lengths": "B",
    "label_lengths": "B",
}
_FLOATING_POINT = ("encoder", "prediction", "weight", "bias")  # The other tensors have integers.


def _check_tensors(blank: int, durations: int, *tensors: Any) -> None:
    """Raise ValueError for wrong types, devices and shapes, without a read of the values.

    ``durations`` is the number of durations, whose rows are part of the axis V here.
    """
    encoder = tensors[0]
    sizes: dict[str, int] = {}  # the size of each axis, from the first tensor that has the axis
    for (name, axes), tensor in zip(_AXES.items(), tensors, strict=True):
        _check_type(name, tensor)
        if tensor.device != encoder.device:
            raise ValueError(f"{name} is on {tensor.device}, encoder on {encoder.device}")
        _check_shape(name, tuple(tensor.shape), axes, sizes)
        if "U+1" in sizes:
            sizes["U"] = sizes["U+1"] - 1
    vocabulary = sizes["V"] - durations
    if not 0 <= blank < vocabulary:
        raise ValueError(f"blank is {blank}. It must be the id of a class, 0 to {vocabulary - 1}")
    if not encoder.numel():
        raise ValueError(f"encoder has shape {tuple(encoder.shape)}, with no utterance, frame or unit")


def _check_type(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}. It must be a tensor")
    dtype = tensor.dtype
    if name in _FLOATING_POINT:
        kind, is_valid = "floating-point", dtype.is_floating_point
    else:
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        kind, is_valid = "integer", is_integer
    if not is_valid:
        raise ValueError(f"{name} is of {dtype}. It must be of {kind} numbers")


def _check_shape(name: str, shape: tuple[int, ...], axes: str, sizes: dict[str, int]) -> None:
    """Raise ValueError for a shape that differs from ``sizes``. Add the sizes of new axes to ``sizes``."""
    axis_names = axes.split()
    fits = len(shape) == len(axis_names)
    for axis, size in zip(axis_names, shape, strict=False):
        axis_size = sizes.setdefault(axis, size)
        fits = fits and axis_size == size
    if not fits:
        raise ValueError(f"{name} has shape {shape}. It must be ({axes}), where {sizes}")


def _check_values(inputs: Inputs, blank: int, vocabulary: int) -> None:
    """Raise ValueError for lengths and labels that are out of range. ``vocabulary`` is V."""
    labels, frame_counts, label_counts = inputs.labels, inputs.frame_counts, inputs.label_counts
    max_labels, max_frames = labels.shape[1], inputs.encoder.shape[1]
    is_frame_misfit = (frame_counts < 0) | (frame_counts > max_frames)
    is_label_misfit = (label_counts < 0) | (label_counts > max_labels)
    is_misfit = is_frame_misfit | is_label_misfit
    is_invalid = (labels < 0) | (labels >= vocabulary) | (labels == blank)
    is_within_length = indices(max_labels, labels) < label_counts[:, None]
    has_fault = is_misfit.any() | (is_invalid & is_within_length).any()
    if not bool(has_fault):  # On a GPU, the host waits for each read, so valid inputs need only this one.
        return
    if bool(is_misfit.any()):
        lengths = f"{frame_counts.tolist()} and {label_counts.tolist()}"
        raise ValueError(f"lengths {lengths} do not fit {max_frames} frames and {max_labels} labels")
    raise ValueError(f"a label is the blank {blank} or outside the vocabulary of {vocabulary}")


class _RaggedLoss(torch.autograd.Function):
    """The loss over the cells within the lengths of each utterance.

    Forward also computes the gradients, for an upstream gradient of 1, while the logits are still in memory.
    Backward scales them. If the upstream gradient differs between utterances, backward computes them again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, settings, is_training = arguments
        inputs = Inputs(*tensors)
        with full_precision(inputs.encoder.device):
            joint = RaggedJoint(settings, inputs)
            loss = joint.losses(is_training)
        gradients = joint.gradients() if is_training else ()
        ctx.settings = settings
        ctx.save_for_backward(*inputs, *joint.arcs, *gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # ``forward`` has saved the 8 inputs, then the arcs, then the 4 gradients.
        inputs = Inputs(*ctx.saved_tensors[:8])
        arcs, gradients = ctx.saved_tensors[8:-4], ctx.saved_tensors[-4:]
        has_frames = inputs.frame_counts > 0
        first_with_frames = has_frames.long().argmax(0, keepdim=True)
        factor = upstream.index_select(0, first_with_frames)
        is_same_factor = bool(((upstream == factor) | ~has_frames).all())
        if is_same_factor:
            scaled_gradients = Gradients(*(gradient * factor for gradient in gradients))
            return scaled_gradients.for_inputs(inputs)
        with full_precision(upstream.device):
            joint = RaggedJoint(ctx.settings, inputs)
            joint.arcs = list(arcs)
            batch = slice(0, len(upstream))
            joint.add_gradients(batch, joint.posteriors(batch), upstream)
        return joint.gradients().for_inputs(inputs)


class _StaticLoss(torch.autograd.Function):
    """The loss over all cells of the padded lattice. Forward stores the gradient factors for backward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, settings, _ = arguments
        inputs = Inputs(*tensors)
        with full_precision(inputs.encoder.device):
            joint = StaticJoint(settings, inputs)
            arcs = joint.log_probabilities()
            posteriors = joint.posteriors(arcs)
            factors = gradient_factors(settings, posteriors, arcs)
        ctx.settings = settings
        ctx.save_for_backward(*inputs, *factors)
        return posteriors.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # ``forward`` has saved the 8 inputs, then the factors.
        inputs, factors = Inputs(*ctx.saved_tensors[:8]), ctx.saved_tensors[8:]
        with full_precision(upstream.device):
            gradients = StaticJoint(ctx.settings, inputs).gradients(factors, upstream)
        return gradients.for_inputs(inputs)
