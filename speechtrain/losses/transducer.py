"""The exact transducer (RNN-T) loss of an additive joint, without its (B, T, U + 1, V) lattice.

Legend: B utterances, T frames, U labels, P = U + 1 positions, H joint width, V symbols (the labels and the
blank), K durations, R reach (the longest duration plus 1), D diagonals, N cells of a chunk.

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
Xu et al., "Efficient sequence transduction by jointly predicting tokens and durations" (ICML 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from speechtrain.compute_policy import GraphFunction, equal_parts
from speechtrain.nn.full_precision import full_precision
from speechtrain.nn.joint import check_durations

_NEVER = -1e30  # Log-probability of an arc that does not exist. It is finite because inf - inf is NaN.


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
    - An utterance with an impossible label, whose ``bias`` is -inf, has the loss +inf and no gradient.

    Raises ValueError for impossible dtypes, devices, shapes, lengths, labels or rates. With ``static``,
    lengths and labels are not checked, because a read would stall a device. The loss is then undefined for an
    id of V or more.
    """
    _check_settings(activation, dropout, fastemit, chunk, keep)
    durations = _check_durations(durations, fastemit, sigma)
    tensors = (encoder, prediction, weight, bias, labels, encoder_lengths, label_lengths)
    _check_tensors(blank, len(durations), *tensors)
    dtype = _matmul_dtype(compute_dtype, encoder.dtype)
    joint = _Joint(blank, activation, dropout, fastemit, dtype, skip_below, chunk, keep, durations, sigma)
    return _losses(joint, tensors, seed, static)


def _losses(joint: _Joint, tensors: tuple[Tensor, ...], seed: int | Tensor, static: bool) -> Tensor:
    """Return the losses (B,) of ``tensors``, which are in the order of ``transducer_loss``."""
    encoder, prediction, weight, bias, *targets = tensors
    seed_halves = torch.zeros(2, dtype=torch.int32, device=encoder.device)
    if joint.dropout:
        seed_halves = _seed_halves(seed, encoder.device)
    labels, frames, symbols = (tensor.long() for tensor in targets)
    inputs = _Inputs(encoder, prediction, weight, bias, labels, frames, symbols, seed_halves=seed_halves)
    if not static:
        _check_values(inputs, joint.blank, len(bias) - len(joint.durations))
    joint = replace(joint, chunk=min(joint.chunk, math.prod(_lattice_shape(inputs))))
    is_training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    function = _StaticLoss if static else _RaggedLoss
    loss: Tensor = function.apply(*inputs, joint, is_training)  # type: ignore[no-untyped-call]
    return loss


def _seed_halves(seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the seed as two int32 (2,) on the device. As a constant, it would make another graph each step.

    An int is copied, and the host waits for this copy.
    """
    halves = torch.as_tensor(seed)
    if halves.dtype != torch.int32:
        halves = halves.long().reshape(1).view(torch.int32)
    return halves.reshape(2).to(device)


class _Inputs(NamedTuple):
    """The tensor arguments of the autograd functions."""

    encoder: Tensor  # (B, T, H)
    prediction: Tensor  # (B, P, H)
    weight: Tensor  # (V + K, H)
    bias: Tensor  # (V + K,)
    labels: Tensor  # (B, U)
    frames: Tensor  # (B,) the number of frames of each utterance
    symbols: Tensor  # (B,) the number of labels of each utterance
    seed_halves: Tensor  # (2,) int32, the lower and the upper half of the seed


def _check_settings(activation: str, dropout: float, fastemit: float, chunk: int, keep: int) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}. It must be {' or '.join(_ACTIVATIONS)}")
    if not (dropout >= 0 and round(dropout * 65536) < 65536):
        raise ValueError(f"dropout is {dropout}. It must be at least 0 and below 1")
    if not (fastemit >= 0 and chunk >= 1 and keep >= 0):
        raise ValueError(
            f"fastemit is {fastemit}, chunk {chunk}, keep {keep}. They must be at least 0, 1 and 0"
        )


def _check_durations(durations: Sequence[int], fastemit: float, sigma: float) -> tuple[int, ...]:
    """Return the durations. Raises ValueError if they do not fit ``fastemit`` and ``sigma``."""
    durations = check_durations(durations)
    is_valid_sigma = sigma == 0 or (durations and sigma > 0)
    if (fastemit and durations) or not is_valid_sigma:
        raise ValueError(f"fastemit is {fastemit}, sigma {sigma}: one excludes durations, one needs them")
    return durations


def _matmul_dtype(compute_dtype: torch.dtype | None, encoder_dtype: torch.dtype) -> torch.dtype:
    """Return the type of the matmuls. Raises ValueError for another type."""
    if compute_dtype is None:
        return torch.float64 if encoder_dtype == torch.float64 else torch.float32
    if compute_dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"compute_dtype is {compute_dtype}. It must be float32, bfloat16 or float64")
    return compute_dtype


# The axes of each tensor of ``transducer_loss``, in the order of its parameters.
_AXES = {"encoder": "B T H", "prediction": "B U+1 H", "weight": "V H", "bias": "V", "labels": "B U"}
_AXES |= {"encoder_lengths": "B", "label_lengths": "B"}


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
    symbols = sizes["V"] - durations
    if not 0 <= blank < symbols:
        raise ValueError(f"blank is {blank}. It must be the id of a class, 0 to {symbols - 1}")
    if not encoder.numel():
        raise ValueError(f"encoder has shape {tuple(encoder.shape)}, with no utterance, frame or unit")


def _check_type(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}. It must be a tensor")
    dtype = tensor.dtype
    kind = "floating-point" if name in _Gradients._fields else "integer"
    is_number = not (dtype.is_complex or dtype == torch.bool)
    if not is_number or dtype.is_floating_point != (kind == "floating-point"):
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


def _check_values(inputs: _Inputs, blank: int, vocabulary: int) -> None:
    """Raise ValueError for lengths and labels that are out of range. ``vocabulary`` is V."""
    labels, frames, symbols = inputs.labels, inputs.frames, inputs.symbols
    max_labels, max_frames = labels.shape[1], inputs.encoder.shape[1]
    is_misfit = (frames < 0) | (frames > max_frames) | (symbols < 0) | (symbols > max_labels)
    is_invalid = (labels < 0) | (labels >= vocabulary) | (labels == blank)
    is_within_length = _indices(max_labels, labels) < symbols[:, None]
    has_fault = is_misfit.any() | (is_invalid & is_within_length).any()
    if not bool(has_fault):  # On a GPU, the host waits for each read, so this is one.
        return
    if bool(is_misfit.any()):
        lengths = f"{frames.tolist()} and {symbols.tolist()}"
        raise ValueError(f"lengths {lengths} do not fit {max_frames} frames and {max_labels} labels")
    raise ValueError(f"a label is the blank {blank} or outside the vocabulary of {vocabulary}")


@dataclass(frozen=True)
class _Joint:
    """The settings of ``transducer_loss``, which forward and backward share."""

    blank: int
    activation: str
    dropout: float
    fastemit: float
    dtype: torch.dtype  # the type of matmuls
    skip_below: float  # occupancy
    chunk: int  # cells
    keep: int  # bytes
    durations: tuple[int, ...] = ()  # frames
    sigma: float = 0.0

    @property
    def wide(self) -> torch.dtype:
        """The type of softmaxes and sums, which is fp32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def dropped_values(self) -> int:
        """The number of values that drop a unit, of the 65536 possible values of a 16-bit draw."""
        return round(self.dropout * 65536)

    @property
    def scale(self) -> float:
        """The factor of the units that are not dropped. It multiplies the weight, which is smaller."""
        return 65536 / (65536 - self.dropped_values)

    def split_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (…, V) of symbols and the logits (…, K) of durations, from logits (…, V + K)."""
        symbols = logits.shape[-1] - len(self.durations)
        return logits[..., :symbols], logits[..., symbols:]

    def slope_(self, hidden: Tensor) -> Tensor:
        """Overwrite hidden units by the slope of the activation, computed from its output.

        A dropped unit of tanh is 0, and gets the slope 1. The caller must set this slope to 0. The operations
        are in place, because a new tensor takes three times as long.
        """
        if self.activation == "relu":
            return hidden.gt_(0)
        return hidden.square_().neg_().add_(1)


_ACTIVATIONS = {"relu": torch.relu_, "tanh": torch.tanh_}


class _Posteriors(NamedTuple):
    """The loss, and the posterior probabilities of cells and arcs if the labels are known.

    The share of an arc is the fraction of the paths through its cell that continue by the arc, from 0 to 1.
    """

    loss: Tensor  # (B,)
    occupancy: Tensor  # (B, T, P) probability that a path passes through the cell, 0 outside the lattice
    label_share: Tensor  # (B, T, P) the share of the next label
    duration_shares: tuple[Tensor, ...] = ()  # for each duration: (B, T, P) the share of arcs that have it


def _differentials(joint: _Joint, posteriors: _Posteriors, arcs: Sequence[Tensor]) -> list[Tensor]:
    """Return the factors of each cell's gradient over its logits, each (B, T, P).

    The first one is the weight of the cell. The others are the differences of softmax and share for blank,
    next label and each duration. The gradient over a logit is the weight times its difference. The share of
    all other symbols is 0, so their difference is their softmax.

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration. The differences are
    computed in full precision, because their terms cancel.
    """
    blank, label, *durations = arcs
    share = posteriors.label_share
    # FastEmit counts label arcs 1 + fastemit times, so cells with label arcs have more weight.
    emphasis = 1 + joint.fastemit * share
    fields = [
        posteriors.occupancy * emphasis,
        blank.exp() - (1 - share) / emphasis,
        label.exp() - (1 + joint.fastemit) * share / emphasis,
    ]
    for log_p, duration_share in zip(durations, posteriors.duration_shares, strict=True):
        fields.append(log_p.exp() - duration_share)
    return [field.to(joint.wide) for field in fields]


class _Gradients(NamedTuple):
    """The gradients of the first four of ``_Inputs``."""

    encoder: Tensor
    prediction: Tensor
    weight: Tensor
    bias: Tensor

    def for_inputs(self, inputs: _Inputs) -> tuple[Tensor | None, ...]:
        """Return the result of an autograd function's backward: the gradients in the types of ``inputs``.

        The function's other six arguments have no gradient.
        """
        gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(self, inputs, strict=False)]
        return (*gradients, None, None, None, None, None, None)


class _RaggedLoss(torch.autograd.Function):
    """The loss over the cells within the lengths of each utterance.

    Forward also computes the gradients, for an upstream gradient of 1, while the logits are still in memory.
    Backward scales them. If the upstream gradient differs between utterances, backward computes them again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, joint, is_training = arguments
        inputs = _Inputs(*tensors)
        with full_precision(inputs.encoder.device):
            walk = _RaggedWalk(joint, inputs)
            loss = walk.losses(is_training)
        gradients = walk.gradients() if is_training else ()
        ctx.joint = joint
        ctx.save_for_backward(*inputs, *walk.arcs, *gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # ``forward`` has saved the 8 inputs, then the arcs, then the 4 gradients.
        inputs = _Inputs(*ctx.saved_tensors[:8])
        arcs, gradients = ctx.saved_tensors[8:-4], ctx.saved_tensors[-4:]
        has_frames = inputs.frames > 0
        factor = upstream.index_select(0, has_frames.long().argmax(0, keepdim=True))
        is_same_factor = bool(((upstream == factor) | ~has_frames).all())
        if is_same_factor:
            return _Gradients(*(gradient * factor for gradient in gradients)).for_inputs(inputs)
        with full_precision(upstream.device):
            walk = _RaggedWalk(ctx.joint, inputs)
            walk.arcs = list(arcs)
            all_rows = slice(0, len(upstream))
            walk.add_gradients(all_rows, walk.posteriors(all_rows), upstream)
        return walk.gradients().for_inputs(inputs)


class _StaticLoss(torch.autograd.Function):
    """The loss over all cells of the padded lattice. Forward stores the differentials for backward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, joint, _ = arguments
        inputs = _Inputs(*tensors)
        with full_precision(inputs.encoder.device):
            arcs = _StaticWalk(joint, inputs).log_probabilities()
            posteriors = _posteriors(joint, arcs, inputs.frames, inputs.symbols, is_static=True)
            differentials = _differentials(joint, posteriors, arcs)
        ctx.joint = joint
        ctx.save_for_backward(*inputs, *differentials)
        return posteriors.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, differentials = _Inputs(*ctx.saved_tensors[:8]), ctx.saved_tensors[8:]
        with full_precision(upstream.device):
            gradients = _StaticWalk(ctx.joint, inputs).gradients(differentials, upstream)
        return gradients.for_inputs(inputs)


class _Walk:
    """Computes the joint in the cells of the lattice, forward and backward."""

    def __init__(self, joint: _Joint, inputs: _Inputs) -> None:
        self.joint, self.frames, self.symbols = joint, inputs.frames, inputs.symbols
        self.shape = _lattice_shape(inputs)
        self.weight = (inputs.weight.to(joint.wide) * joint.scale).to(joint.dtype)
        self.bias = inputs.bias.to(joint.dtype)
        self.dropout = _dropout(joint, inputs)


# ------------------------------------------------------------------------------- the walk over ragged cells


class _RaggedWalk(_Walk):
    """Visits the cells within the lengths, ``chunk`` at a time. Gradients visit only cells that matter.

    A cell is an index of the flattened lattice (B · T · P). Utterances are ``rows`` here, which is a slice
    of B.
    """

    def __init__(self, joint: _Joint, inputs: _Inputs) -> None:
        super().__init__(joint, inputs)
        self.encoder = inputs.encoder.to(joint.wide).flatten(0, 1)  # (B · T, H)
        self.prediction = inputs.prediction.to(joint.wide).flatten(0, 1)  # (B · P, H)
        self.targets = _targets(inputs, joint.blank).flatten()  # (B · P,)
        # log-probabilities (B, T, P) of blank, next label and each duration
        self.arcs = [self.encoder.new_zeros(self.shape) for _ in range(2 + len(joint.durations))]
        inputs_of_gradients = (self.encoder, self.prediction, self.weight, self.bias)
        self.sums = _Gradients(*(torch.zeros_like(x, dtype=joint.wide) for x in inputs_of_gradients))
        self.buffers = _Buffers(joint, inputs.weight)
        self.stored_logits = self.buffers.logits[:0]
        self.stores_all = False  # whether the logits of all cells of the present group are stored
        # the row of each cell in ``stored_logits``, or -1
        self.stored_row = torch.full((self.arcs[0].numel(),), -1, device=self.bias.device)

    def losses(self, with_gradients: bool) -> Tensor:
        """Return the losses (B,). If asked, also add the gradients for an upstream gradient of 1."""
        losses = self.encoder.new_zeros(self.shape[0])
        if with_gradients:
            logits = self.buffers.logits
            capacity = self.joint.keep // (logits.shape[1] * logits.itemsize)
            self.stored_logits = logits.new_empty(min(capacity, len(self.stored_row)), logits.shape[1])
        for rows in self._groups():
            self._fill_arcs(rows)
            posteriors = self.posteriors(rows)
            losses[rows] = posteriors.loss.to(losses.dtype)
            if with_gradients:
                self.add_gradients(rows, posteriors, torch.ones_like(losses))
        return losses

    def posteriors(self, rows: slice) -> _Posteriors:
        """Return the posteriors of the utterances ``rows``, whose arcs must be computed."""
        symbols = self.symbols[rows]
        arcs = [field[rows] for field in self.arcs]
        return _posteriors(self.joint, arcs, self.frames[rows], symbols, is_static=False)

    def add_gradients(self, rows: slice, posteriors: _Posteriors, upstream: Tensor) -> None:
        """Add the gradients of the utterances ``rows`` for the upstream gradients (B,)."""
        weight, *arcs = _differentials(self.joint, posteriors, [field[rows] for field in self.arcs])
        weight = weight * upstream[rows, None, None]
        # The comparison is negated so that NaN cells are visited, and gradient checks detect them.
        matters = ~(posteriors.occupancy < self.joint.skip_below) & (weight != 0)
        first_cell = rows.start * weight[0].numel()
        weights, *differences = (field.flatten() for field in (weight, *arcs))
        local_cells = matters.flatten().nonzero()[:, 0]  # counted from ``first_cell``
        subsets = {True: local_cells}  # by whether the logits of the cells are stored
        if not self.stores_all:
            has_row = self.stored_row[local_cells + first_cell] >= 0
            subsets = {True: local_cells[has_row], False: local_cells[~has_row]}
        for is_stored, subset in subsets.items():
            for _, chunk in self._chunks(subset):
                cells = self._cell_indices(chunk + first_cell)
                chunk_differences = [field[chunk] for field in differences]
                self._add_cell_gradients(cells, is_stored, weights[chunk], chunk_differences)

    def gradients(self) -> _Gradients:
        """Return the sums of the gradients, in the shapes of the inputs."""
        encoder, prediction, weight, bias = self.sums
        batch, frames, positions = self.shape
        encoder = encoder.view(batch, frames, -1)
        prediction = prediction.view(batch, positions, -1)
        return _Gradients(encoder, prediction, weight * self.joint.scale, bias)

    def _groups(self) -> Iterator[slice]:
        """Yield groups of consecutive utterances. Each group costs one recursion.

        The logits of a group fit the buffer, unless it is a single long utterance.
        """
        start = cells = 0
        cell_counts = self.frames * (self.symbols + 1)
        for row, row_cells in enumerate(cell_counts.tolist()):
            if row > start and cells + row_cells > len(self.stored_logits):
                yield slice(start, row)
                start, cells = row, 0
            cells += row_cells
        yield slice(start, self.shape[0])

    def _fill_arcs(self, rows: slice) -> None:
        """Compute the log-probabilities of the arcs, and store the logits that fit the buffer."""
        inside = _inside((len(self.frames[rows]), *self.shape[1:]), self.frames[rows], self.symbols[rows])
        cells = inside.flatten().nonzero()[:, 0] + rows.start * inside[0].numel()
        self.stores_all = len(cells) <= len(self.stored_logits)
        stored_cells, other_cells = cells, cells[:0]
        if not self.stores_all:
            is_stored = self._is_worth_storing(self._cell_indices(cells))
            stored_cells, other_cells = cells[is_stored], cells[~is_stored]
        self.stored_row[stored_cells] = torch.arange(len(stored_cells), device=stored_cells.device)
        for start, chunk in self._chunks(stored_cells):
            self._fill_cells(chunk, self.stored_logits[start : start + len(chunk)])
        for _, chunk in self._chunks(other_cells):
            self._fill_cells(chunk, self.buffers.logits[: len(chunk)])

    def _chunks(self, cells: Tensor) -> list[tuple[int, Tensor]]:
        """Return the chunks of ``cells`` (·,), each with the index of its first cell in ``cells``."""
        # torch.split is not used, because it fails for no cells under the compiler of torch 2.11.
        size = self.joint.chunk
        return [(start, cells[start : start + size]) for start in range(0, len(cells), size)]

    def _cell_indices(self, cells: Tensor) -> _Cells:
        return _Cells.from_flat(cells, *self.shape[1:])

    def _fill_cells(self, flat: Tensor, logits: Tensor) -> None:
        """Compute the logits and the arcs of the cells ``flat`` (N,). Write them to ``logits`` (N, V + K)."""
        cells = self._cell_indices(flat)
        buffers = self.buffers
        torch.addmm(self.bias, self._hidden(cells), self.weight.t(), out=logits)
        if logits.dtype != buffers.wide_logits.dtype:
            logits = buffers.wide_logits[: len(logits)].copy_(logits)
        symbol_logits, duration_logits = self.joint.split_logits(logits)
        log_p_buffer, _ = self.joint.split_logits(buffers.normalised[: len(logits)])
        log_p = torch.log_softmax(symbol_logits, 1, out=log_p_buffer)
        label = log_p.gather(1, self.targets[cells.position_row, None])[:, 0]
        arcs = (log_p[:, self.joint.blank], label, *duration_logits.log_softmax(1).unbind(1))
        for field, arc in zip(self.arcs, arcs, strict=True):
            field.view(-1)[cells.flat] = arc

    def _is_worth_storing(self, cells: _Cells) -> Tensor:
        """Return whether to store the logits (N,) of each cell. As many as fit the buffer are stored.

        The cells with the most paths through them are chosen. If all paths were equally likely, this would be
        the order of occupancy, and at random initialisation they nearly are. Later the order is a poor
        estimate, but then only few cells matter.
        """
        capacity = len(self.stored_logits)
        frames_left = self.frames[cells.row] - 1 - cells.frame
        symbols_left = self.symbols[cells.row] - cells.position
        # The number of paths is the number of ways to the cell times the number of ways from the cell on.
        log_ways_to = _log_binomial(cells.frame + cells.position, cells.position)
        log_ways_on = _log_binomial(frames_left + symbols_left, symbols_left)
        is_stored = torch.zeros_like(cells.flat, dtype=torch.bool)
        is_stored[(log_ways_to + log_ways_on).topk(capacity).indices] = True
        return is_stored

    def _add_cell_gradients(
        self, cells: _Cells, is_stored: bool, weight: Tensor, differences: list[Tensor]
    ) -> None:
        """Add the gradients of N cells to the sums.

        ``weight`` (N,) and ``differences``, each (N,), are the results of ``_differentials`` for the cells.
        """
        hidden = self._hidden(cells)
        symbol_logits, _ = self.joint.split_logits(self._logits(cells, hidden, is_stored))
        gradient = self._logit_gradient(cells, symbol_logits, weight, differences)
        wide = self.joint.wide
        self.sums.bias.add_(gradient.sum(0, dtype=wide))
        if wide == self.joint.dtype:
            self.sums.weight.addmm_(gradient.t(), hidden)
        else:
            self.sums.weight.add_(torch.mm(gradient.t(), hidden))
        unit_gradient = torch.mm(gradient, self.weight, out=self.buffers.unit_gradients[: len(hidden)])
        slope = self.joint.slope_(hidden)
        if self.joint.activation != "relu":  # Dropped units of relu have the slope 0 already.
            self.dropout.apply_(slope, cells)
        unit_gradient *= slope
        unit_gradient = unit_gradient.to(wide)
        self.sums.encoder.index_add_(0, cells.frame_row, unit_gradient)
        self.sums.prediction.index_add_(0, cells.position_row, unit_gradient)

    def _logit_gradient(
        self, cells: _Cells, symbol_logits: Tensor, weight: Tensor, differences: list[Tensor]
    ) -> Tensor:
        """Return the gradient (N, V + K) over the logits. ``symbol_logits`` is (N, V)."""
        dtype = self.joint.dtype
        blank, label, *durations = (field.to(dtype) for field in differences)
        gradient = self.buffers.softmax[: len(symbol_logits)]
        symbol_gradient, duration_gradient = self.joint.split_logits(gradient)
        torch.softmax(symbol_logits, 1, out=symbol_gradient)
        symbol_gradient.scatter_(1, self.targets[cells.position_row, None], label[:, None])
        symbol_gradient[:, self.joint.blank] = blank
        for column, difference in enumerate(durations):
            duration_gradient[:, column] = difference
        gradient *= weight[:, None].to(dtype)
        return gradient

    def _logits(self, cells: _Cells, hidden: Tensor, is_stored: bool) -> Tensor:
        """Return the logits (N, V + K) of cells, from ``stored_logits`` if they are stored there."""
        logits = self.buffers.logits[: len(hidden)]
        if is_stored:
            # A cell outside the lattice has no row. It is visited only if its weight is NaN.
            rows = self.stored_row[cells.flat].clamp(min=0)
            return torch.index_select(self.stored_logits, 0, rows, out=logits)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=logits)

    def _hidden(self, cells: _Cells) -> Tensor:
        """Return the hidden units (N, H) after dropout. The weight contains the scale of dropout."""
        count = len(cells.flat)
        buffers = self.buffers
        hidden = torch.index_select(self.encoder, 0, cells.frame_row, out=buffers.frame_units[:count])
        position_units = buffers.position_units[:count]
        torch.index_select(self.prediction, 0, cells.position_row, out=position_units)
        if self.joint.activation == "relu":
            # The sum is rounded to the matmuls' type at once, because relu gives the same result after it.
            hidden = torch.add(hidden, position_units, out=buffers.units[:count])
        else:
            hidden += position_units
        self.dropout.apply_(_ACTIVATIONS[self.joint.activation](hidden), cells)
        return hidden.to(self.joint.dtype)


class _Buffers:
    """Tensors for the N cells of a chunk, with one row for each cell.

    All chunks use them, because the page faults of new memory cost more than the arithmetic of the softmax.
    """

    def __init__(self, joint: _Joint, weight: Tensor) -> None:
        outputs, width = weight.shape
        self.frame_units = weight.new_empty(joint.chunk, width, dtype=joint.wide)
        self.position_units = weight.new_empty(joint.chunk, width, dtype=joint.wide)
        self.units, self.unit_gradients = weight.new_empty(2, joint.chunk, width, dtype=joint.dtype)
        self.logits = weight.new_empty(joint.chunk, outputs, dtype=joint.dtype)
        self.normalised = weight.new_empty(joint.chunk, outputs, dtype=joint.wide)
        # If the dtypes are equal, these two tensors share the memory of the two tensors above.
        self.wide_logits = self.logits.to(joint.wide)
        self.softmax = self.normalised.to(joint.dtype)


def _log_binomial(n: Tensor, k: Tensor) -> Tensor:
    """Return the logarithm of the number of ways to choose k of n objects."""
    return torch.lgamma(n + 1.0) - torch.lgamma(k + 1.0) - torch.lgamma(n - k + 1.0)


class _Cells(NamedTuple):
    """The indices of N cells. All fields are (N,)."""

    flat: Tensor  # the index in the flattened (B, T, P)
    frame_row: Tensor  # the index in the flattened (B, T)
    position_row: Tensor  # the index in the flattened (B, P)
    row: Tensor  # the utterance
    frame: Tensor
    position: Tensor

    @classmethod
    def from_flat(cls, flat: Tensor, frames: int, positions: int) -> _Cells:
        """Return the indices of cells ``flat`` (N,) in a lattice with T ``frames`` and P ``positions``."""
        frame_row = flat // positions
        row = frame_row // frames
        frame = frame_row - row * frames
        position = flat - frame_row * positions
        return cls(flat, frame_row, row * positions + position, row, frame, position)


# -------------------------------------------------------------------------------- the walk in static shapes


class _StaticWalk(_Walk):
    """Visits every cell of the padded lattice. A span is a slice of frames, which all utterances share.

    A device can record its operations in a graph, because it avoids index_add and writes into slices.
    """

    def __init__(self, joint: _Joint, inputs: _Inputs) -> None:
        super().__init__(joint, inputs)
        # Values beyond the lengths may be NaN. An utterance has one position more than labels.
        beyond_frames = _indices(self.shape[1], inputs.frames) >= inputs.frames[:, None]
        beyond_positions = _indices(self.shape[2], inputs.symbols) > inputs.symbols[:, None]
        self.encoder = inputs.encoder.to(joint.wide).masked_fill(beyond_frames[..., None], 0)
        self.prediction = inputs.prediction.to(joint.wide).masked_fill(beyond_positions[..., None], 0)
        self.targets = _targets(inputs, joint.blank)
        # The numbers of frames are data. As constants they would make each span another graph.
        self.frame = _indices(self.shape[1], self.encoder)

    def log_probabilities(self) -> list[Tensor]:
        """Return the log-probabilities of blank, next label and each duration, each (B, T, P).

        Outside the lattice of an utterance they are arbitrary but finite.
        """
        spans = [_span_arcs(self, self.encoder[:, span], self.frame[span]) for span in self._spans()]
        return [torch.cat(fields, 1) for fields in zip(*spans, strict=True)]

    def arcs(self, hidden: Tensor) -> list[Tensor]:
        """Return the log-probabilities (B, t, P) of the arcs of t frames with the ``hidden`` units."""
        symbol_logits, duration_logits = self._logits(hidden)
        log_p = symbol_logits.log_softmax(-1)
        targets = self.targets[:, None, :, None].expand(-1, log_p.shape[1], -1, -1)
        arcs = [log_p[..., self.joint.blank], log_p.gather(-1, targets)[..., 0]]
        if self.joint.durations:  # Graphs cannot contain the empty tensor that would be here without.
            arcs += duration_logits.log_softmax(-1).unbind(-1)
        return arcs

    def gradients(self, differentials: Sequence[Tensor], upstream: Tensor) -> _Gradients:
        """Return the gradients of the inputs for the upstream gradients (B,).

        ``differentials`` are the results of ``_differentials``.
        """
        wide = self.joint.wide
        masks = self._symbol_masks()
        fields = [differentials[0] * upstream[:, None, None], *differentials[1:]]
        encoder, prediction = [], torch.zeros_like(self.prediction)
        weight = torch.zeros_like(self.weight, dtype=wide)
        bias = torch.zeros_like(self.bias, dtype=wide)
        for span in self._spans():
            span_fields = [field[:, span, :, None] for field in fields]
            span_sums = _span_gradients(self, self.encoder[:, span], self.frame[span], masks, span_fields)
            encoder.append(span_sums.encoder)
            prediction = prediction + span_sums.prediction
            weight = weight + span_sums.weight
            bias = bias + span_sums.bias
        return _Gradients(torch.cat(encoder, 1), prediction, weight * self.joint.scale, bias=bias)

    def part_of_gradients(
        self, hidden: Tensor, frame: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]
    ) -> _Gradients:
        """Return the sums of the gradients over the cells of frames (t,). The weight's is not scaled."""
        wide = self.joint.wide
        gradient = self._logit_gradient(hidden, masks, fields)
        bias = gradient.sum((0, 1, 2), dtype=wide)
        weight = gradient.flatten(0, 2).t() @ hidden.flatten(0, 2)
        slope = self.joint.slope_(hidden)
        if self.joint.activation != "relu":  # Dropped units of relu have the slope 0 already.
            slope = self.dropout.applied(slope, frame)
        unit_gradient = (gradient @ self.weight).to(wide) * slope
        return _Gradients(unit_gradient.sum(2), unit_gradient.sum(1), weight.to(wide), bias=bias)

    def _symbol_masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return masks, 1 or 0, of the blank (V,), the next label (B, 1, P, V) and all other symbols."""
        wide = self.joint.wide
        symbol = _indices(len(self.weight) - len(self.joint.durations), self.weight)
        is_blank = (symbol == self.joint.blank).to(wide)
        is_label = (symbol == self.targets[:, None, :, None]).to(wide) * (1 - is_blank)
        return is_blank, is_label, 1 - is_blank - is_label

    def _logit_gradient(self, hidden: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]) -> Tensor:
        """Return the gradient (B, frames of the span, P, V + K) over the logits.

        ``fields`` are the results of ``_differentials`` for the cells of the span, with an axis for symbols.
        """
        is_blank, is_label, is_other = masks
        symbol_logits, _ = self._logits(hidden)
        cell_weight, blank, label, *durations = fields
        gradient = symbol_logits.softmax(-1) * is_other + blank * is_blank + label * is_label
        if durations:
            gradient = torch.cat((gradient, *durations), -1)
        return (gradient * cell_weight).to(self.joint.dtype)

    def _spans(self) -> Iterator[slice]:
        """Return slices of frames with about ``chunk`` cells of all utterances together."""
        batch, frames, positions = self.shape
        step = max(1, self.joint.chunk // (batch * positions))
        return (slice(start, min(start + step, frames)) for start in range(0, frames, step))

    def hidden(self, encoder: Tensor, frame: Tensor) -> Tensor:
        """Return the hidden units (B, t, P, H) of the frames (t,) after dropout.

        The weight contains the scale of dropout.
        """
        sums = encoder[:, :, None] + self.prediction[:, None]
        hidden = _ACTIVATIONS[self.joint.activation](sums)
        return self.dropout.applied(hidden, frame).to(self.joint.dtype)

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of symbols (…, V) and of durations (…, K) for hidden units (…, H)."""
        logits = F.linear(hidden, self.weight, self.bias)
        return self.joint.split_logits(logits.to(self.joint.wide))


@GraphFunction
def _span_arcs(walk: _StaticWalk, encoder: Tensor, frame: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, t, P) of the arcs of the frames (t,)."""
    return walk.arcs(walk.hidden(encoder, frame))


@GraphFunction
def _span_gradients(
    walk: _StaticWalk, encoder: Tensor, frame: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]
) -> _Gradients:
    """Return the sums of the gradients over the cells of the frames (t,)."""
    return walk.part_of_gradients(walk.hidden(encoder, frame), frame, masks, fields)


# ------------------------------------------------------------------------------------- used by both walks


def _indices(size: int, like: Tensor) -> Tensor:
    """Return 0 to ``size`` − 1 on the device of ``like``."""
    return torch.arange(size, device=like.device)


def _inside(shape: tuple[int, int, int], frames: Tensor, symbols: Tensor) -> Tensor:
    """Return a mask of ``shape`` (B, T, P), True for the cells in the lattice of their utterance."""
    is_frame_inside = _indices(shape[1], frames) < frames[:, None]
    is_position_inside = _indices(shape[2], symbols) <= symbols[:, None]
    return is_frame_inside[:, :, None] & is_position_inside[:, None, :]


def _lattice_shape(inputs: _Inputs) -> tuple[int, int, int]:
    """Return the lattice's shape (B, T, P)."""
    return inputs.encoder.shape[0], inputs.encoder.shape[1], inputs.prediction.shape[1]


def _targets(inputs: _Inputs, blank: int) -> Tensor:
    """Return the next label (B, P) of each position, or blank after the last label."""
    padded = F.pad(inputs.labels, (0, 1))
    beyond = _indices(padded.shape[1], inputs.symbols) >= inputs.symbols[:, None]
    return padded.masked_fill(beyond, blank).long()


# -------------------------------------------------------------------------------------------------- dropout


def _dropout(joint: _Joint, inputs: _Inputs) -> _Dropout | _NoDropout:
    batch, _, width = inputs.encoder.shape
    if not joint.dropped_values:
        return _NoDropout()
    return _Dropout(joint, batch, width, seed_halves=inputs.seed_halves)


class _NoDropout:
    """The null object of ``_Dropout``."""

    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        pass

    def applied(self, hidden: Tensor, frame: Tensor) -> Tensor:
        return hidden


class _Dropout:
    """Sets a unit to 0 if its draw is below a threshold. A draw is a hash of seed, cell and unit.

    A draw has 16 bits. A word is an int32, which has the draws of two units. The hash is MurmurHash3's
    finaliser with the multipliers of Wellons' lowbias32. No mask is stored, and the result does not depend on
    the padding or on which other cells are visited.

    A product of two int32 must wrap, which means that it keeps its lower 32 bits. CPUs and CUDA do so.
    Gaudi's documentation does not say it, so ``benchmarks/first_contact.py`` compares a product there.
    """

    def __init__(self, joint: _Joint, batch: int, width: int, seed_halves: Tensor) -> None:
        self.threshold = joint.dropped_values - 32768  # Draws are read as int16, from −32768 on.
        self.width = width
        low, high = seed_halves[:1], seed_halves[1:]
        row = _indices(batch, seed_halves).int()
        word = _indices((width + 1) // 2, seed_halves).int()
        self.row_keys = _mix(_mix(row + high) + low)  # (B,)
        self.word_keys = _mix(_mix(word + low) + high)  # (words of a cell,)
        self.words = seed_halves.new_empty(joint.chunk, len(self.word_keys))
        # Hashing with a second buffer is 1.15 times as fast if both buffers fit a CPU's cache. Otherwise its
        # memory traffic, which is five times as high, makes it slower.
        self.shifted_words = torch.empty_like(self.words) if joint.chunk <= _MOST_CELLS_IN_CACHE else None

    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        """Set the dropped ones of the units ``hidden`` (N, H) to 0."""
        count = len(hidden)
        keys = self._cell_keys(self.row_keys[cells.row], cells.frame, cells.position)
        words = torch.add(keys[:, None], self.word_keys, out=self.words[:count])
        shifted_words = None
        if self.shifted_words is not None:
            shifted_words = self.shifted_words[:count]
        _mix_in_place(words, shifted_words)
        draws = words.view(torch.int16)[:, : self.width]
        hidden *= draws.ge_(self.threshold)

    def applied(self, hidden: Tensor, frame: Tensor) -> Tensor:
        """Return the units ``hidden`` (B, t, P, H) of the frames (t,), with 0 for the dropped ones."""
        position = _indices(hidden.shape[2], hidden)
        keys = self._cell_keys(self.row_keys[:, None, None], frame[:, None], position)
        words = _mix(keys[..., None] + self.word_keys)
        # Gaudi's graphs cannot read an int32 as two int16. So each draw becomes the upper half of an int32,
        # which is compared with the threshold times 65536.
        draws = torch.stack((words * 65536, words), -1).flatten(-2)
        return hidden * (draws[..., : self.width] >= self.threshold * 65536)

    def _cell_keys(self, row_keys: Tensor, frame: Tensor, position: Tensor) -> Tensor:
        """Return a hash of each cell. The three tensors are broadcast."""
        cell = frame.int() * 65536 + position.int()
        return _mix(cell + row_keys)


_MOST_CELLS_IN_CACHE = 16384  # With more cells in a chunk, the words do not fit a CPU's cache.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # 2**32 is subtracted to write the second one as int32.


def _mix(word: Tensor) -> Tensor:
    """Return a hash of each int32 (MurmurHash3's finaliser)."""
    for multiplier in _MULTIPLIERS:
        word = _fold(word) * multiplier
    return _fold(word)


def _fold(word: Tensor) -> Tensor:
    """Return ``word ^ (word >>> 16)``, where ``>>>`` fills with zeros."""
    return word ^ (torch.bitwise_right_shift(word, 16) & 0xFFFF)


def _mix_in_place(word: Tensor, shifted_word: Tensor | None) -> None:
    """Compute ``_mix`` in place, in a third of the time. ``shifted_word`` is a buffer of the same shape."""
    for multiplier in _MULTIPLIERS:
        _fold_in_place(word, shifted_word)
        word *= multiplier
    _fold_in_place(word, shifted_word)


def _fold_in_place(word: Tensor, shifted_word: Tensor | None) -> None:
    """Compute ``_fold`` in place. Without the buffer ``shifted_word``, the upper half is read in place."""
    if shifted_word is None:
        halves = word.view(torch.int16)
        halves[..., ::2] ^= halves[..., 1::2]  # In little-endian order, the lower half is the first one.
        return
    torch.bitwise_right_shift(word, 16, out=shifted_word)
    shifted_word &= 0xFFFF
    word ^= shifted_word


# ----------------------------------------------------------------------------------------------- recursions


def _posteriors(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor, is_static: bool
) -> _Posteriors:
    """Return the posteriors of utterances with these numbers of ``frames`` (B,) and ``symbols`` (B,).

    ``arcs`` are the log-probabilities (B, T, P) of blank, next label and each duration. An utterance with an
    impossible label has the loss +inf, and an occupancy of 0, so that it has no gradient.
    """
    # The log-probability of an impossible class, whose bias is -inf, becomes finite.
    arcs = [field.clamp(min=_NEVER) for field in arcs]
    if joint.durations:
        if not is_static:
            arcs = [field.double() for field in arcs]
        posteriors = _posteriors_of_durations(joint, arcs, frames, symbols)
        is_impossible = _has_impossible_label(arcs[1], frames, symbols)
    else:
        recursion = _posteriors_by_diagonals if is_static else _posteriors_by_rows
        posteriors = recursion(arcs[0], arcs[1], frames, symbols)
        is_impossible = posteriors.loss > -_NEVER / 2
    is_impossible_cell = is_impossible[:, None, None]
    return _Posteriors(  # torch.compile of torch 2.7 does not trace _replace.
        loss=posteriors.loss.masked_fill(is_impossible, torch.inf),
        occupancy=posteriors.occupancy.masked_fill(is_impossible_cell, 0),
        label_share=posteriors.label_share.masked_fill(is_impossible_cell, 0),
        duration_shares=posteriors.duration_shares,
    )


def _has_impossible_label(label: Tensor, frames: Tensor, symbols: Tensor) -> Tensor:
    """Return whether each utterance (B,) has a label that is impossible in all of its frames.

    ``label`` (B, T, P) is the log-probability of the next label.
    """
    _, length, positions = label.shape
    has_frame = (_indices(length, frames) < frames[:, None])[..., None]
    has_label = _indices(positions, symbols) < symbols[:, None]
    highest = label.masked_fill(~has_frame, _NEVER).amax(1)
    return ((highest <= _NEVER) & has_label).any(1) & (frames > 0)


def _posteriors_by_rows(blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> _Posteriors:
    """Return the posteriors, by a recursion over the rows (frames) of the lattice.

    All label arcs within a frame are one logcumsumexp. The recursion is in float64, so differences of
    cumulative sums still have the precision of fp32. The backward variable beta is the forward variable alpha
    of the lattice turned by 180 degrees, so one loop computes both.
    """
    blank, label = blank.double(), label.double()
    batch, length, positions = blank.shape
    turned_cells = _turned_cells(length, positions, frames, symbols)
    alpha, turned_beta = _forward_by_rows(*_arcs_into_rows(blank, label, turned_cells))
    beta = _turned(turned_beta, turned_cells)

    inside = _inside((batch, length, positions), frames, symbols)
    log_likelihood = beta[:, 0, 0]
    log_occupancy = alpha + beta - beta[:, :1, :1]
    has_label = _indices(positions, blank) < symbols[:, None]
    has_label_arc = inside & has_label[:, None]
    next_beta = F.pad(beta, (-1, 1))  # of the next position
    log_share = label + next_beta - beta
    return _Posteriors(
        loss=(-log_likelihood).masked_fill(frames == 0, 0),
        occupancy=log_occupancy.exp().masked_fill(~inside, 0),
        label_share=log_share.exp().masked_fill(~has_label_arc, 0),
    )


def _arcs_into_rows(blank: Tensor, label: Tensor, turned_cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the blank arc and of the label arc into each cell.

    Each is (2, B, T, P), for the lattice and for the turned lattice. A blank leads from the previous frame,
    and a label from the previous position. The value for a label into position 0 has no effect.
    """
    by_blank = torch.stack((F.pad(blank, (0, 0, 1, -1)), _turned(blank, turned_cells)))
    by_label = torch.stack((F.pad(label, (1, -1)), _turned(label, turned_cells)))
    return by_blank, by_label


def _turned_cells(length: int, positions: int, frames: Tensor, symbols: Tensor) -> Tensor:
    """Return for each cell the flat index (B, T · P) of its image in the lattice turned by 180 degrees."""
    turned_frame = (frames[:, None] - 1 - _indices(length, frames)).clamp(min=0)
    turned_position = (symbols[:, None] - _indices(positions, symbols)).clamp(min=0)
    return (turned_frame[:, :, None] * positions + turned_position[:, None, :]).flatten(1)


def _turned(field: Tensor, turned_cells: Tensor) -> Tensor:
    """Return the values (B, T, P) of the lattice turned by 180 degrees."""
    return field.flatten(1).gather(1, turned_cells).view(field.shape)


def _forward_by_rows(by_blank: Tensor, by_label: Tensor) -> Tensor:
    """Return the forward variables (2, B, T, P) from the results of ``_arcs_into_rows``.

    The base of a cell is the log-probability of all labels in its frame up to the cell. In a frame, the
    forward variable less the base is the logcumsumexp, over positions, of the paths that enter the frame.
    """
    base = by_label.cumsum(-1)
    start = torch.full_like(base[:, :, :1], -torch.inf)
    start[..., 0] = 0
    previous_base = torch.cat((torch.zeros_like(start), base[:, :, :-1]), 2)
    # A row has the forward variables of a frame less their base. The change of base is a part of each step,
    # so that an iteration has only one addition.
    steps = by_blank - base + previous_base
    row, rows = start[:, :, 0], []
    for t in range(by_blank.shape[2]):
        row = torch.logcumsumexp(row + steps[:, :, t], -1)
        rows.append(row)
    return torch.stack(rows, 2) + base


def _posteriors_by_diagonals(blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> _Posteriors:
    """Return the posteriors, by a recursion over the diagonals d = t + u of the lattice.

    A path crosses each diagonal once, so the variables of a diagonal can be normalised. They then stay small,
    so fp32 is exact enough, and the occupancy is a softmax. One loop computes the forward variable alpha, and
    the backward variable beta, which is the forward variable of the padded lattice turned by 180 degrees.
    """
    batch, length, positions = blank.shape
    no_blank, no_label, is_last = _arc_masks(length, positions, frames, symbols)
    blank = _skewed(blank.masked_fill(no_blank, _NEVER), _NEVER)
    label = _skewed(label.masked_fill(no_label, _NEVER), _NEVER)
    arcs = _arcs_into_diagonals(blank, label, _skewed(is_last.to(blank.dtype), 0))
    alpha, beta, totals, log_odds = _normalised_diagonals(*arcs)

    inside = _inside((batch, length, positions), frames, symbols)
    log_occupancy = alpha + beta.flip(1, 2)
    occupancy = _straight(log_occupancy.softmax(-1), length) * inside
    label_share = _straight(log_odds.flip(1, 2).sigmoid(), length) * ~no_label
    last_diagonal = frames[:, None] - 1 + symbols[:, None]
    loss = _loss_of_diagonals(totals, beta, last_diagonal)
    return _Posteriors(loss.masked_fill(frames == 0, 0), occupancy, label_share)


def _loss_of_diagonals(totals: Tensor, beta: Tensor, last_diagonal: Tensor) -> Tensor:
    """Return the loss (B,): minus the sum of all logarithms that the normalisation has subtracted.

    ``totals`` and ``beta`` (B, D, P) are the variables before and after normalisation. Their difference is
    equal in all cells of a diagonal, so its mean with the weights exp(``beta``), whose sum is 1, is the
    logarithm. Diagonals after ``last_diagonal`` (B, 1) are padding.
    """
    subtracted = ((totals - beta) * beta.exp()).sum(-1).flip(1)
    is_padding = _indices(subtracted.shape[1], subtracted) > last_diagonal
    return -subtracted.masked_fill(is_padding, 0).sum(-1)


def _arc_masks(length: int, positions: int, frames: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks (B, T, P): cells without a blank arc, cells without a label arc, and the last cells."""
    frame, position = _indices(length, frames)[:, None], _indices(positions, symbols)
    last_frame, last_position = frames[:, None, None] - 1, symbols[:, None, None]
    is_last = (frame == last_frame) & (position == last_position)
    no_blank = ((frame >= last_frame) | (position > last_position)) & ~is_last
    no_label = (frame > last_frame) | (position >= last_position)
    return no_blank, no_label, is_last


def _arcs_into_diagonals(blank: Tensor, label: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arcs into each cell from the previous diagonal, for the lattice and the turned lattice.

    ``blank`` and ``label`` (B, D, P) are the log-probabilities of the arcs from each cell. ``ends`` (B, D, P)
    is 1 for the last cells, else 0. The results are (2, B, D, P): the log-probabilities of the blank arc and
    of the label arc, and a factor of the variables of the previous diagonal. The factor is 0 for the first
    cell of a path, which no arc leads to, and else 1.
    """
    diagonal, position = _indices(ends.shape[1], ends), _indices(ends.shape[2], ends)
    is_first = diagonal[:, None] + position == 0
    begins = is_first.to(ends.dtype).expand_as(ends)  # A write into a slice would break the recorded graph.
    from_blank = F.pad(blank, (0, 0, 1, -1), value=_NEVER) * (1 - begins)
    by_blank = torch.stack((from_blank, blank.flip(1, 2)))
    by_label = torch.stack((F.pad(label, (1, -1, 1, -1), value=_NEVER), label.flip(1, 2)))
    return by_blank, by_label, 1 - torch.stack((begins, ends.flip(1, 2)))


def _normalised_diagonals(
    by_blank: Tensor, by_label: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the recursion over the results of ``_arcs_into_diagonals``.

    Returns four tensors (B, D, P). The first two are the variables of the lattice and of the turned lattice,
    normalised over each diagonal. The others are, for the turned lattice, the variables before normalisation
    and the log-odds of label against blank.
    """
    diagonal = torch.zeros_like(by_blank[:, :, 0])
    arcs = [by_blank, by_label, factors]
    steps = by_blank.shape[2]
    count, size = equal_parts(steps)
    if count * size > steps:
        arcs = [F.pad(field, (0, 0, 0, count * size - steps)) for field in arcs]
    parts = []
    for start in range(0, steps, size):
        blank, label, factor = (field[:, :, start : start + size] for field in arcs)
        *part, diagonal = _diagonals_part(blank, label, factor, diagonal)
        parts.append(part)
    alpha, beta, totals, log_odds = (torch.cat(part, 1)[:, :steps] for part in zip(*parts, strict=True))
    return alpha, beta, totals, log_odds


@GraphFunction
def _diagonals_part(
    by_blank: Tensor, by_label: Tensor, factors: Tensor, diagonal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of ``_normalised_diagonals`` for d diagonals (B, d, P), and the last (2, B, P)."""
    columns = []
    for d in range(by_blank.shape[2]):
        paths_by_blank = torch.addcmul(by_blank[:, :, d], factors[:, :, d], diagonal)
        paths_by_label = by_label[:, :, d] + F.pad(diagonal, (1, -1), value=_NEVER)
        total = torch.logaddexp(paths_by_blank, paths_by_label)
        diagonal = total.log_softmax(-1)
        columns.append((diagonal[0], diagonal[1], total[1], paths_by_label[1], paths_by_blank[1]))
    alpha, beta, totals, labels, blanks = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    return alpha, beta, totals, labels - blanks, diagonal


def _posteriors_of_durations(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> _Posteriors:
    """Return the posteriors with durations.

    A recursion over the diagonals d = t + u, from the last one back, computes the shares of arcs. From the
    shares, a recursion over the diagonals from the first one on computes the occupancy.

    The share of an arc is a softmax over the arcs of its cell, which compares only near cells. Occupancies
    are sums of products of shares, without cancellation. So fp32 is exact enough.

    A cell has 2R arcs: first the blanks that lead 1 to R diagonals on, then the labels that lead 1 to R
    diagonals on. Arcs that do not exist have the share 0. A blank of duration d leads d diagonals on, and a
    label of duration d leads d + 1 diagonals on.
    """
    batch, length, positions = arcs[0].shape
    reach = joint.durations[-1] + 1
    onward, continues = _arcs_of_durations(joint, arcs, frames, symbols)
    loss, shares = _shares_backward(onward, continues, reach)
    has_no_path = (frames == 0) | (loss > -_NEVER / 2)
    begins = (_indices(positions, loss) == 0) & ~has_no_path[:, None]
    diagonal_occupancy = _occupancy_forward(shares, begins.to(loss.dtype), reach)

    inside = _inside((batch, length, positions), frames, symbols)
    occupancy = _lattice_field(diagonal_occupancy, length) * inside
    label_share = _lattice_field(shares[:, :, reach:].sum(2), length)
    duration_shares = _duration_shares(joint.durations, shares, length)
    return _Posteriors(loss.masked_fill(has_no_path, 0), occupancy, label_share, duration_shares)


def _arcs_of_durations(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (T + P, B, 2R, P) of all arcs by diagonals, and which cells continue.

    The second tensor (T + P, B, P) is 0 for the cells in which paths end, else 1. These cells are in an
    additional frame of the lattice, after the last frame of the utterance.
    """
    batch, length, positions = arcs[0].shape
    label_counts = symbols[:, None, None]
    cell_arcs = _cell_arcs(joint, arcs, frames, label_counts)
    padded = F.pad(torch.stack(cell_arcs, 1), (0, 0, 0, 1), value=_NEVER)
    onward = _skewed(padded.flatten(0, 1), _NEVER).view(batch, -1, length + positions, positions)
    is_end_frame = _indices(length + 1, frames)[:, None] == frames[:, None, None]
    is_end = is_end_frame & (_indices(positions, frames) == label_counts)
    continues = 1 - _skewed(is_end.to(arcs[0].dtype), 0)
    return onward.permute(2, 0, 1, 3).contiguous(), continues.transpose(0, 1)


def _cell_arcs(joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, label_counts: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, T, P) of each of a cell's 2R arcs: the blanks, then the labels."""
    blank, label, *durations = arcs
    frames_left = (frames[:, None] - _indices(blank.shape[1], frames))[..., None]
    position = _indices(blank.shape[2], frames)
    no_label, is_after_labels = position >= label_counts, position == label_counts
    reach = joint.durations[-1] + 1
    no_arc = torch.full_like(blank, _NEVER)
    blanks, labels = [no_arc] * reach, [no_arc] * reach
    for d, log_p in zip(joint.durations, durations, strict=True):
        log_p = log_p - joint.sigma
        labels[d] = (label + log_p).masked_fill((frames_left <= d) | no_label, _NEVER)
        if d:  # A blank without duration does not exist.
            ends_path = (frames_left == d) & is_after_labels
            is_arc = (frames_left > d) | ends_path
            blanks[d - 1] = (blank + log_p).masked_fill(~is_arc, _NEVER)
    return blanks + labels


def _shares_backward(onward: Tensor, continues: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return the loss (B,) and the shares (T + P, B, 2R, P) from the results of ``_arcs_of_durations``."""
    batch, _, positions = onward.shape[1:]
    # The backward variables (B, R, P) of the R diagonals after the present one, less ``subtracted`` (B,).
    window = onward.new_full((batch, reach, positions), _NEVER)
    subtracted, log_shares = torch.zeros_like(window[:, 0, 0]), list[Tensor]()
    for d in range(len(onward) - 1, -1, -1):
        log_share, beta = _diagonal_shares(onward[d], window)
        log_shares.append(log_share)
        beta = beta * continues[d]  # A path that has ended has the log-probability 0.
        window = torch.cat((beta[:, None], window[:, :-1]), 1)
        # Doing this for each diagonal would be a fifth of all operations.
        if d % 4 == 0:
            window, subtracted = _lower(window, subtracted)
    log_likelihood = window[:, 0, 0] + subtracted
    return -log_likelihood, torch.stack(log_shares[::-1]).exp()


def _diagonal_shares(onward: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-shares (B, 2R, P) of the arcs of a diagonal, and its backward variables (B, P).

    ``onward`` (B, 2R, P) are the log-probabilities of the arcs. ``window`` (B, R, P) are the backward
    variables of the diagonals that the arcs lead to. A label leads to the next position.
    """
    paths = onward + torch.cat((window, F.pad(window, (-1, 1), value=_NEVER)), 1)
    log_share = paths.log_softmax(1)
    return log_share, paths.amax(1) - log_share.amax(1)  # The difference is logsumexp, which Gaudi lacks.


def _lower(window: Tensor, subtracted: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the highest number of each row from ``window`` (B, R, P), and add it to ``subtracted`` (B,).

    So the numbers stay small.
    """
    highest = window.amax((1, 2))
    highest = highest * (highest > _NEVER / 2)  # A row without a path stays.
    return window - highest[:, None, None], subtracted + highest


def _occupancy_forward(shares: Tensor, begins: Tensor, reach: int) -> Tensor:
    """Return the occupancy (T + P, B, P) of the cells by diagonals.

    ``begins`` (B, P) is the probability that a path begins in a cell of the first diagonal.
    """
    # The occupancy (B, R, P) of the present diagonal and of the R − 1 diagonals after it, as far as arcs from
    # earlier diagonals lead there.
    window = F.pad(begins[:, None], (0, 0, 0, reach - 1))
    diagonals = []
    for share in shares.unbind():
        diagonal = window[:, 0]
        diagonals.append(diagonal)
        flow = diagonal[:, None] * share
        window = F.pad(window[:, 1:], (0, 0, 0, 1)) + flow[:, :reach] + F.pad(flow[:, reach:], (1, -1))
    return torch.stack(diagonals)


def _duration_shares(durations: tuple[int, ...], shares: Tensor, frames: int) -> tuple[Tensor, ...]:
    """Return for each duration the share (B, T, P) of the blank and of the label that have it."""
    reach = durations[-1] + 1
    fields = []
    for d in durations:
        share = shares[:, :, reach + d]  # of the label
        if d:
            share = share + shares[:, :, d - 1]  # of the blank
        fields.append(_lattice_field(share, frames))
    return tuple(fields)


def _lattice_field(diagonals: Tensor, frames: int) -> Tensor:
    """Return values of diagonals (T + P, B, P) as values of the lattice (B, T, P)."""
    return _straight(diagonals.transpose(0, 1), frames)


def _skewed(field: Tensor, fill: float) -> Tensor:
    """Return values of the lattice (B, T, P) by diagonals (B, T + P - 1, P).

    Element [d, u] is the value of cell (d - u, u), or ``fill`` outside the lattice.
    """
    batch, frames, positions = field.shape
    padded = F.pad(field.transpose(1, 2), (0, positions), value=fill).flatten(1)
    return padded[:, :-positions].reshape(batch, positions, frames + positions - 1).transpose(1, 2)


def _straight(diagonals: Tensor, frames: int) -> Tensor:
    """Return values of diagonals (B, D, P) as values of the lattice (B, T, P). It inverts ``_skewed``."""
    batch, steps, positions = diagonals.shape
    padded = F.pad(diagonals.transpose(1, 2).flatten(1), (0, positions))
    return padded.reshape(batch, positions, steps + 1)[:, :, :frames].transpose(1, 2)
