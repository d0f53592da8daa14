"""The exact transducer (RNN-T) loss of an additive joint, without its (B, T, U + 1, V) lattice.

Joint, dropout, softmax and loss are one autograd function. It processes the lattice in chunks of cells
and keeps two log-probabilities per cell, of blank and of the next label. The recursion over them gives
every cell's occupancy, the probability that an alignment passes through the cell. Gradients of all inputs
are computed only in cells whose occupancy matters: in a third to a half of the cells at random
initialisation, in a fourteenth after the model has learned an alignment. In these cells the joint is
computed again, unless its logits are in the buffer of a few megabytes that is reused for each utterance.

Shape legend: B utterances, T frames, U labels, P = U + 1 positions, H joint width, V symbols, K durations,
N cells of a chunk. Cell (b, t, u) means: frame t, with u labels already emitted. A path continues by blank,
to (b, t + 1, u), or by the next label, to (b, t, u + 1). The last cell's blank ends the path.

With ``durations`` (TDT), each arc also has a duration d, which has a softmax over the durations. A label
leads to (b, t + d, u + 1), a blank of d > 0 to (b, t + d, u). The blank that leads to frame T exactly, after
all labels, ends the path.

On a CPU the result is bit-equal from run to run at a fixed number of threads.
Cells of occupancy below ``skip_below`` add nothing to the gradient. With 0, all cells are visited, and
gradients agree with float64 to 1e-6 instead of 3e-6. About ``chunk`` cells are in memory at once, and
``keep`` bytes of logits are stored for the gradients, so that fewer logits are computed twice. Forward
computes the gradients and backward scales them. If the upstream gradients differ between utterances that
have frames, backward computes the gradients again.
``static`` computes every cell of the padded lattice twice, in shapes that depend on no data, and reads
nothing back from the device. ``skip_below`` and ``keep`` then have no effect. Without ``static`` the work
depends on the data. Under ``torch.compile``, call ``torch.compiler.disable(transducer_loss)``, because the
function otherwise compiles in dozens of pieces, anew for each shape.

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

    ``activation`` is ``relu`` (MLPerf, NeMo) or ``tanh`` (Graves, ESPnet, icefall).
    ``encoder`` (B, T, H) and ``prediction`` (B, U + 1, H) are the joint's two projections before their sum,
    ``weight`` (V, H) and ``bias`` (V,) its output layer, all of any floating-point dtype. A layer without
    bias passes zeros. ``labels`` (B, U) are the targets without blanks, ids below V, and ``encoder_lengths``
    (B,) and ``label_lengths`` (B,) count frames and labels, all of any integer dtype. Every tensor is on one
    device, with any strides. Values beyond the lengths are never read, so they may be NaN, and labels -1.
    The result is in nats, not divided by any length. Most recipes call its ``.mean()`` the loss. An
    utterance without frames (a padding row) has loss 0 and no gradient. The result is fp32 (float64 for a
    float64 ``compute_dtype``) and is differentiable once.

    ``blank`` is the blank's id, from 0 to V - 1.
    ``dropout`` is the joint's dropout rate, rounded to a multiple of 1/65536. Kept units are divided by the
    exact keep rate. Pass 0 in evaluation. The mask is a function of ``seed`` (an int, or an int64 tensor on
    the device), which must differ from step to step, and of the cell. It does not depend on which cells are
    visited.
    ``fastemit`` multiplies the gradient of label arcs by 1 + ``fastemit``. The loss's value is unchanged.
    ``durations``, ascending, select the TDT loss: ``weight`` (V + K, H) and ``bias`` (V + K,) have a row for
    each duration after the rows of the symbols. ``sigma`` is subtracted from the log-probability of every
    symbol, so paths of few arcs, with long durations, gain. An utterance without a path has loss 0 and no
    gradient: it has too few frames for its labels, or no durations add up to its frames. ``fastemit`` must
    be 0 with durations.
    An utterance with an impossible label, whose ``bias`` is -inf, has loss +inf and no gradient.
    ``compute_dtype`` is the type of the matmuls: float32, bfloat16 or float64. By default it is float64 for a
    float64 ``encoder``, else float32. Softmax, recursion and sums over cells are always fp32 or wider, and
    autocast has no effect here.
    ``skip_below``, ``chunk``, ``keep`` and ``static`` set the cost (see the module).

    Raises ValueError for impossible dtypes, devices, shapes, lengths, labels or rates. With ``static``,
    lengths and labels are not checked, because a read would stall a device. An id of V or more is then
    undefined.
    """
    _check_settings(activation, dropout, fastemit, chunk, keep)
    durations = _check_durations(durations, fastemit, sigma)
    tensors = (encoder, prediction, weight, bias, labels, encoder_lengths, label_lengths)
    _check_tensors(blank, len(durations), *tensors)
    dtype = _matmul_dtype(compute_dtype, encoder.dtype)
    joint = _Joint(blank, activation, dropout, fastemit, dtype, skip_below, chunk, keep, durations, sigma)
    return _losses(joint, tensors, seed, static)


def _losses(joint: _Joint, tensors: tuple[Tensor, ...], seed: int | Tensor, static: bool) -> Tensor:
    encoder, prediction, weight, bias, *targets = tensors
    # The seed moves as data. As a constant it would compile the graph again at each step.
    keys = torch.as_tensor(seed, dtype=torch.int64).reshape(1).view(torch.int32).to(encoder.device)
    labels, frames, symbols = (tensor.long() for tensor in targets)
    inputs = _Inputs(encoder, prediction, weight, bias, labels, frames, symbols, keys=keys)
    if not static:
        _check_contents(inputs, joint.blank, len(bias) - len(joint.durations))
    joint = replace(joint, chunk=min(joint.chunk, math.prod(_lattice(inputs))))
    is_training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    function = _StaticLoss if static else _RaggedLoss
    loss: Tensor = function.apply(*inputs, joint, is_training)  # type: ignore[no-untyped-call]
    return loss


class _Inputs(NamedTuple):
    """The tensor arguments of the autograd functions."""

    encoder: Tensor  # (B, T, H)
    prediction: Tensor  # (B, P, H)
    weight: Tensor  # (V + K, H)
    bias: Tensor  # (V + K,)
    labels: Tensor  # (B, U)
    frames: Tensor  # (B,)
    symbols: Tensor  # (B,)
    keys: Tensor  # (2,) int32, the halves of the seed


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
    durations = check_durations(durations)
    if (fastemit and durations) or not (sigma == 0 or (durations and sigma > 0)):
        raise ValueError(f"fastemit is {fastemit}, sigma {sigma}: one excludes durations, one needs them")
    return durations


def _matmul_dtype(compute_dtype: torch.dtype | None, encoder_dtype: torch.dtype) -> torch.dtype:
    if compute_dtype is None:
        return torch.float64 if encoder_dtype == torch.float64 else torch.float32
    if compute_dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"compute_dtype is {compute_dtype}. It must be float32, bfloat16 or float64")
    return compute_dtype


_AXES = {"encoder": "B T H", "prediction": "B U+1 H", "weight": "V H", "bias": "V", "labels": "B U"}
_AXES |= dict.fromkeys(("encoder_lengths", "label_lengths"), "B")


def _check_tensors(blank: int, durations: int, *tensors: Any) -> None:
    """Refuse wrong types, devices and shapes, without a read of the numbers."""
    encoder = tensors[0]
    sizes: dict[str, int] = {}
    for (name, axes), tensor in zip(_AXES.items(), tensors, strict=True):
        _check_type(name, tensor)
        if tensor.device != encoder.device:
            raise ValueError(f"{name} is on {tensor.device}, encoder on {encoder.device}")
        _check_shape(name, tuple(tensor.shape), axes, sizes)
        sizes["U"] = sizes.get("U+1", 1) - 1
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
    """Refuse a shape whose axes differ from ``sizes``, and add the sizes of new axes."""
    axis_names = axes.split()
    fits = len(shape) == len(axis_names)
    for axis, size in zip(axis_names, shape, strict=False):
        fits = fits and sizes.setdefault(axis, size) == size
    if not fits:
        raise ValueError(f"{name} has shape {shape}. It must be ({axes}), where {sizes}")


def _check_contents(inputs: _Inputs, blank: int, vocabulary: int) -> None:
    labels, frames, symbols = inputs.labels, inputs.frames, inputs.symbols
    max_labels, max_frames = labels.shape[1], inputs.encoder.shape[1]
    misfits = (frames < 0) | (frames > max_frames) | (symbols < 0) | (symbols > max_labels)
    if bool(misfits.any()):
        lengths = f"{frames.tolist()} and {symbols.tolist()}"
        raise ValueError(f"lengths {lengths} do not fit {max_frames} frames and {max_labels} labels")
    is_impossible = (labels < 0) | (labels >= vocabulary) | (labels == blank)
    counts = _count(max_labels, labels) < symbols[:, None]
    if bool((is_impossible & counts).any()):
        raise ValueError(f"a label is the blank {blank} or outside the vocabulary of {vocabulary}")


@dataclass(frozen=True)
class _Joint:
    """Settings that forward and backward share."""

    blank: int
    activation: str
    dropout: float
    fastemit: float
    dtype: torch.dtype  # of matmuls
    skip_below: float
    chunk: int  # cells
    keep: int  # bytes
    durations: tuple[int, ...] = ()
    sigma: float = 0.0

    @property
    def wide(self) -> torch.dtype:
        """The dtype of softmaxes and sums."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def dropped(self) -> int:
        """The number of a draw's 65536 possible values that drop a unit."""
        return round(self.dropout * 65536)

    @property
    def scale(self) -> float:
        """The scale of kept units, applied to the weight, which has fewer elements."""
        return 65536 / (65536 - self.dropped)

    def parts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of symbols and the logits of durations."""
        symbols = logits.shape[-1] - len(self.durations)
        return logits[..., :symbols], logits[..., symbols:]

    def slope(self, hidden: Tensor) -> Tensor:
        """Overwrite units with the activation's derivative at their inputs. Dropped units of tanh are wrong.

        A comparison that makes a new tensor takes three times as long.
        """
        return hidden.gt_(0) if self.activation == "relu" else hidden.square_().neg_().add_(1)


_ACTIVATIONS = {"relu": torch.relu_, "tanh": torch.tanh_}


class _Posteriors(NamedTuple):
    """The loss, and the posterior probabilities of cells and arcs given the labels."""

    loss: Tensor  # (B,)
    occupancy: Tensor  # (B, T, P) probability that a path passes through the cell, 0 outside the lattice
    label_share: Tensor  # (B, T, P) fraction of the paths through the cell that continue by its label
    duration_shares: tuple[Tensor, ...] = ()  # (B, T, P) for each duration: fraction of its arcs


def _differentials(joint: _Joint, posteriors: _Posteriors, arcs: Sequence[Tensor]) -> list[Tensor]:
    """Return the cell's weight and the differences softmax - fraction of blank, label and each duration.

    Each is (B, T, P). A cell's gradient over its logits is the weight times these differences. Among the
    symbols, only blank and label have a nonzero fraction. Their differences and the durations' are computed
    in full precision, because the terms cancel.
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
    for log_p, fraction in zip(durations, posteriors.duration_shares, strict=True):
        fields.append(log_p.exp() - fraction)
    return [field.to(joint.wide) for field in fields]


class _Gradients(NamedTuple):
    encoder: Tensor
    prediction: Tensor
    weight: Tensor
    bias: Tensor

    def like(self, inputs: _Inputs) -> tuple[Tensor | None, ...]:
        """Cast to the inputs' dtypes, with None for the function's other arguments."""
        gradients = [gradient.to(tensor.dtype) for gradient, tensor in zip(self, inputs, strict=False)]
        return (*gradients, *[None] * 6)


class _RaggedLoss(torch.autograd.Function):
    """The loss over ragged cells.

    Forward also computes the gradients, for an upstream gradient of 1 and utterance by utterance, while the
    logits are still in memory. Backward scales them. If the upstream gradient differs between utterances,
    backward computes them again.
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
        inputs = _Inputs(*ctx.saved_tensors[:8])
        *arcs, _, _, _, _ = ctx.saved_tensors[8:]
        gradients = ctx.saved_tensors[-4:]
        factors = upstream[inputs.frames > 0]
        if bool((factors == factors[:1]).all()):
            factor = factors[:1].sum()  # 0 if no utterance has frames
            return _Gradients(*(gradient * factor for gradient in gradients)).like(inputs)
        with full_precision(upstream.device):
            walk = _RaggedWalk(ctx.joint, inputs)
            walk.arcs = arcs
            all_rows = slice(0, len(upstream))
            walk.add_gradients(all_rows, walk.posteriors(all_rows), upstream)
        return walk.gradients().like(inputs)


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
        return gradients.like(inputs)


class _Walk:
    """The parts that both walks share."""

    def __init__(self, joint: _Joint, inputs: _Inputs) -> None:
        self.joint, self.frames, self.symbols = joint, inputs.frames, inputs.symbols
        self.shape = _lattice(inputs)
        self.weight = (inputs.weight.to(joint.wide) * joint.scale).to(joint.dtype)
        self.bias = inputs.bias.to(joint.dtype)
        self.dropout = _dropout(joint, inputs)


# ------------------------------------------------------------------------------- the walk over ragged cells


class _RaggedWalk(_Walk):
    """Visits the cells within the lengths, ``chunk`` at a time. Gradients visit only cells that matter."""

    def __init__(self, joint: _Joint, inputs: _Inputs) -> None:
        super().__init__(joint, inputs)
        self.encoder = inputs.encoder.to(joint.wide).flatten(0, 1)
        self.prediction = inputs.prediction.to(joint.wide).flatten(0, 1)
        self.targets = _targets(inputs, joint.blank).flatten()
        # log-probabilities (B, T, P) of blank, next label and each duration
        self.arcs = [self.encoder.new_zeros(self.shape) for _ in range(2 + len(joint.durations))]
        inputs_of_gradients = (self.encoder, self.prediction, self.weight, self.bias)
        self.sums = _Gradients(*(torch.zeros_like(x, dtype=joint.wide) for x in inputs_of_gradients))
        self.buffers = _Buffers(joint, inputs.weight)
        self.stored_logits = self.buffers.logits[:0]
        # the row of each cell in ``stored_logits``, or -1
        self.stored_row = torch.full((self.arcs[0].numel(),), -1, device=self.bias.device)

    def losses(self, with_gradients: bool) -> Tensor:
        """Compute the losses (B,) and, if asked, add the gradients for an upstream gradient of 1."""
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
        symbols = self.symbols[rows]
        arcs = [field[rows] for field in self.arcs]
        return _posteriors(self.joint, arcs, self.frames[rows], symbols, is_static=False)

    def add_gradients(self, rows: slice, posteriors: _Posteriors, upstream: Tensor) -> None:
        """Add the gradients of the utterances ``rows`` for the upstream gradients (B,)."""
        weight, *arcs = _differentials(self.joint, posteriors, [field[rows] for field in self.arcs])
        weight = weight * upstream[rows, None, None]
        # The comparison is negated so that NaN cells are visited, and gradient checks detect them.
        matters = ~(posteriors.occupancy < self.joint.skip_below) & (weight != 0)
        offset = rows.start * weight[0].numel()
        weights, *differences = (field.flatten() for field in (weight, *arcs))
        local_cells = matters.flatten().nonzero()[:, 0]
        is_stored = self.stored_row[local_cells + offset] >= 0
        for subset in (local_cells[is_stored], local_cells[~is_stored]):
            for chunk in torch.split(subset, self.joint.chunk):
                cells = self._cells(chunk + offset)
                self._add_cells(cells, weights[chunk], [field[chunk] for field in differences])

    def gradients(self) -> _Gradients:
        encoder, prediction, weight, bias = self.sums
        batch, frames, positions = self.shape
        encoder = encoder.view(batch, frames, -1)
        prediction = prediction.view(batch, positions, -1)
        return _Gradients(encoder, prediction, weight * self.joint.scale, bias)

    def _groups(self) -> Iterator[slice]:
        """Yield groups of consecutive utterances whose logits fit the buffer. Each costs one recursion."""
        start = cells = 0
        cell_counts = self.frames * (self.symbols + 1)
        for row, count in enumerate(cell_counts.tolist()):
            if row > start and cells + count > len(self.stored_logits):
                yield slice(start, row)
                start, cells = row, 0
            cells += count
        yield slice(start, self.shape[0])

    def _fill_arcs(self, rows: slice) -> None:
        """Compute the log-probabilities of the arcs, and store the logits that fit the buffer."""
        inside = _inside((len(self.frames[rows]), *self.shape[1:]), self.frames[rows], self.symbols[rows])
        cells = inside.flatten().nonzero()[:, 0] + rows.start * inside[0].numel()
        is_stored = self._is_worth_storing(self._cells(cells))
        stored = cells[is_stored]
        self.stored_row[stored] = torch.arange(len(stored), device=stored.device)
        for start, chunk in self._chunks(stored):
            self._fill_cells(chunk, self.stored_logits[start : start + len(chunk)])
        for _, chunk in self._chunks(cells[~is_stored]):
            self._fill_cells(chunk, self.buffers.logits[: len(chunk)])

    def _chunks(self, cells: Tensor) -> list[tuple[int, Tensor]]:
        """Return each chunk of the cells (N,) with its start."""
        # torch.split is not used, because it fails for no cells under the compiler of torch 2.11.
        size = self.joint.chunk
        return [(start, cells[start : start + size]) for start in range(0, len(cells), size)]

    def _cells(self, flat: Tensor) -> _Cells:
        return _Cells.from_flat(flat, *self.shape[1:])

    def _fill_cells(self, flat: Tensor, logits: Tensor) -> None:
        """Write the logits (N, V + K), and the arcs of the cells ``flat`` (N,)."""
        cells = self._cells(flat)
        buffers = self.buffers
        torch.addmm(self.bias, self._hidden(cells), self.weight.t(), out=logits)
        if logits.dtype != buffers.wide_logits.dtype:
            logits = buffers.wide_logits[: len(logits)].copy_(logits)
        symbols, durations = self.joint.parts(logits)
        normalised, _ = self.joint.parts(buffers.normalised[: len(logits)])
        log_p = torch.log_softmax(symbols, 1, out=normalised)
        label = log_p.gather(1, self.targets[cells.position_row, None])[:, 0]
        arcs = (log_p[:, self.joint.blank], label, *durations.log_softmax(1).unbind(1))
        for field, arc in zip(self.arcs, arcs, strict=True):
            field.view(-1)[cells.flat] = arc

    def _is_worth_storing(self, cells: _Cells) -> Tensor:
        """Select the cells (N,) with the most alignments through them, as many as fit the buffer.

        This is the order of occupancy if all alignments are equally likely, nearly as at random
        initialisation. Later it is a poor estimate, but then only few cells matter.
        """
        capacity = len(self.stored_logits)
        if len(cells.flat) <= capacity:
            return torch.ones_like(cells.flat, dtype=torch.bool)
        frames_left = self.frames[cells.row] - 1 - cells.frame
        symbols_left = self.symbols[cells.row] - cells.position
        before = _log_binomial(cells.frame + cells.position, cells.position)
        after = _log_binomial(frames_left + symbols_left, symbols_left)
        is_stored = torch.zeros_like(cells.flat, dtype=torch.bool)
        is_stored[(before + after).topk(capacity).indices] = True
        return is_stored

    def _add_cells(self, cells: _Cells, weight: Tensor, differences: list[Tensor]) -> None:
        """Add the gradients of N cells, from their weight (N,) and differences (see ``_differentials``)."""
        hidden = self._hidden(cells)
        gradient = self._logit_gradient(cells, hidden, weight, differences)
        wide = self.joint.wide
        self.sums.bias.add_(gradient.sum(0, dtype=wide))
        if wide == self.joint.dtype:
            self.sums.weight.addmm_(gradient.t(), hidden)
        else:
            self.sums.weight.add_(torch.mm(gradient.t(), hidden))
        unit_gradient = torch.mm(gradient, self.weight, out=self.buffers.unit_gradients[: len(hidden)])
        slope = self.joint.slope(hidden)
        if self.joint.activation != "relu":  # The dropped units of relu are 0, and their slope is 0.
            self.dropout.apply_(slope, cells)
        unit_gradient *= slope
        unit_gradient = unit_gradient.to(wide)
        self.sums.encoder.index_add_(0, cells.frame_row, unit_gradient)
        self.sums.prediction.index_add_(0, cells.position_row, unit_gradient)

    def _logit_gradient(
        self, cells: _Cells, hidden: Tensor, weight: Tensor, differences: list[Tensor]
    ) -> Tensor:
        """Return the gradient over the logits (N, V + K)."""
        dtype = self.joint.dtype
        logits = self._logits(cells, hidden)
        blank, label, *by_duration = (field.to(dtype) for field in differences)
        gradient = self.buffers.softmax[: len(hidden)]
        symbols, durations = self.joint.parts(gradient)
        torch.softmax(self.joint.parts(logits)[0], 1, out=symbols)
        symbols.scatter_(1, self.targets[cells.position_row, None], label[:, None])
        symbols[:, self.joint.blank] = blank
        for column, field in enumerate(by_duration):
            durations[:, column] = field
        gradient *= weight[:, None].to(dtype)
        return gradient

    def _logits(self, cells: _Cells, hidden: Tensor) -> Tensor:
        """Return the logits (N, V + K), from ``stored_logits`` if all N cells have a row there."""
        logits = self.buffers.logits[: len(hidden)]
        rows = self.stored_row[cells.flat]
        if bool((rows >= 0).all()):
            return torch.index_select(self.stored_logits, 0, rows, out=logits)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=logits)

    def _hidden(self, cells: _Cells) -> Tensor:
        """Compute the hidden units (N, H) after dropout, not scaled."""
        n = len(cells.flat)
        buffers = self.buffers
        hidden = torch.index_select(self.encoder, 0, cells.frame_row, out=buffers.frame_units[:n])
        position_units = buffers.position_units[:n]
        torch.index_select(self.prediction, 0, cells.position_row, out=position_units)
        if self.joint.activation == "relu":  # relu may follow the rounding to the matmuls' dtype.
            hidden = torch.add(hidden, position_units, out=buffers.units[:n])
        else:
            hidden += position_units
        self.dropout.apply_(_ACTIVATIONS[self.joint.activation](hidden), cells)
        return hidden.to(self.joint.dtype)


class _Buffers:
    """Tensors for the N cells of a chunk, with one row for each cell.

    Every chunk reuses them, because page faults of new megabytes cost more than the softmax's arithmetic.
    """

    def __init__(self, joint: _Joint, weight: Tensor) -> None:
        outputs, width = weight.shape
        self.frame_units = weight.new_empty(joint.chunk, width, dtype=joint.wide)
        self.position_units = weight.new_empty(joint.chunk, width, dtype=joint.wide)
        self.units, self.unit_gradients = weight.new_empty(2, joint.chunk, width, dtype=joint.dtype)
        self.logits = weight.new_empty(joint.chunk, outputs, dtype=joint.dtype)
        self.normalised = weight.new_empty(joint.chunk, outputs, dtype=joint.wide)
        # If the dtypes are equal, these share the memory of the two tensors above.
        self.wide_logits = self.logits.to(joint.wide)
        self.softmax = self.normalised.to(joint.dtype)


def _log_binomial(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1.0) - torch.lgamma(k + 1.0) - torch.lgamma(n - k + 1.0)


class _Cells(NamedTuple):
    """Positions of N cells. All fields are (N,)."""

    flat: Tensor  # in the flattened (B, T, P)
    frame_row: Tensor  # in (B * T)
    position_row: Tensor  # in (B * P)
    row: Tensor
    frame: Tensor
    position: Tensor

    @classmethod
    def from_flat(cls, flat: Tensor, frames: int, positions: int) -> _Cells:
        frame_row = flat // positions
        row = frame_row // frames
        position = flat - frame_row * positions
        return cls(flat, frame_row, row * positions + position, row, frame_row - row * frames, position)


# -------------------------------------------------------------------------------- the walk in static shapes


class _StaticWalk(_Walk):
    """Visits every cell of the padded lattice, a few frames of all utterances at a time.

    Its operations can be recorded in a graph: no index_add, no in-place write into a slice.
    """

    def __init__(self, joint: _Joint, inputs: _Inputs) -> None:
        super().__init__(joint, inputs)
        # A row uses as many frames as it has, but one position more than symbols: the one before the first.
        beyond_frames = _count(self.shape[1], inputs.frames) >= inputs.frames[:, None]
        beyond_symbols = _count(self.shape[2], inputs.symbols) > inputs.symbols[:, None]
        self.encoder = inputs.encoder.to(joint.wide).masked_fill(beyond_frames[..., None], 0)
        self.prediction = inputs.prediction.to(joint.wide).masked_fill(beyond_symbols[..., None], 0)
        self.targets = _targets(inputs, joint.blank)
        # The numbers of frames are data. As constants they would make each span another graph.
        self.frame = _count(self.shape[1], self.encoder)

    def log_probabilities(self) -> list[Tensor]:
        """Log-probabilities (B, T, P) of blank, next label and each duration.

        They are arbitrary but finite outside the lattice.
        """
        pieces = [_span_arcs(self, self.encoder[:, span], self.frame[span]) for span in self._spans()]
        return [torch.cat(fields, 1) for fields in zip(*pieces, strict=True)]

    def arcs(self, hidden: Tensor) -> list[Tensor]:
        """Return the log-probabilities (B, t, P) of the arcs of t frames with the ``hidden`` units."""
        symbols, durations = self._parts(hidden)
        log_p = symbols.log_softmax(-1)
        targets = self.targets[:, None, :, None].expand(-1, log_p.shape[1], -1, -1)
        arcs = [log_p[..., self.joint.blank], log_p.gather(-1, targets)[..., 0]]
        if self.joint.durations:  # Graphs accept no empty tensor.
            arcs += durations.log_softmax(-1).unbind(-1)
        return arcs

    def gradients(self, differentials: Sequence[Tensor], upstream: Tensor) -> _Gradients:
        """Compute the gradients of the inputs for the upstream gradients (B,)."""
        wide = self.joint.wide
        masks = self._symbol_masks()
        fields = [differentials[0] * upstream[:, None, None], *differentials[1:]]
        encoder, prediction = [], torch.zeros_like(self.prediction)
        weight = torch.zeros_like(self.weight, dtype=wide)
        bias = torch.zeros_like(self.bias, dtype=wide)
        for span in self._spans():
            span_fields = [field[:, span, :, None] for field in fields]
            part = _span_gradients(self, self.encoder[:, span], self.frame[span], masks, span_fields)
            encoder.append(part.encoder)
            prediction = prediction + part.prediction
            weight = weight + part.weight
            bias = bias + part.bias
        return _Gradients(torch.cat(encoder, 1), prediction, weight * self.joint.scale, bias=bias)

    def part_of_gradients(
        self, hidden: Tensor, frame: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]
    ) -> _Gradients:
        """Compute the part of some frames (t,) in the gradients. The weight's gradient is not scaled."""
        wide = self.joint.wide
        gradient = self._logit_gradient(hidden, masks, fields)
        bias = gradient.sum((0, 1, 2), dtype=wide)
        weight = gradient.flatten(0, 2).t() @ hidden.flatten(0, 2)
        slope = self.joint.slope(hidden)
        if self.joint.activation != "relu":
            slope = self.dropout.applied(slope, frame)
        unit_gradient = (gradient @ self.weight).to(wide) * slope
        return _Gradients(unit_gradient.sum(2), unit_gradient.sum(1), weight.to(wide), bias=bias)

    def _symbol_masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return 1 for the blank (V,), the next label (B, 1, P, V) and the remaining symbols, else 0."""
        wide = self.joint.wide
        symbol = _count(len(self.weight) - len(self.joint.durations), self.weight)
        is_blank = (symbol == self.joint.blank).to(wide)
        is_label = (symbol == self.targets[:, None, :, None]).to(wide) * (1 - is_blank)
        return is_blank, is_label, 1 - is_blank - is_label

    def _logit_gradient(self, hidden: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]) -> Tensor:
        """Return the gradient over the logits (B, frames of the span, P, V + K).

        ``fields`` are the weight of the cells and the differences (see ``_differentials``).
        """
        is_blank, is_label, is_remaining = masks
        softmax = self._parts(hidden)[0].softmax(-1)
        cell_weight, blank, label, *durations = fields
        gradient = softmax * is_remaining + blank * is_blank + label * is_label
        if durations:
            gradient = torch.cat((gradient, *durations), -1)
        return (gradient * cell_weight).to(self.joint.dtype)

    def _spans(self) -> Iterator[slice]:
        batch, frames, positions = self.shape
        step = max(1, self.joint.chunk // (batch * positions))
        return (slice(start, min(start + step, frames)) for start in range(0, frames, step))

    def hidden(self, encoder: Tensor, frame: Tensor) -> Tensor:
        """Compute the hidden units (B, t, P, H) of the frames (t,) after dropout, not scaled."""
        hidden = _ACTIVATIONS[self.joint.activation](encoder[:, :, None] + self.prediction[:, None])
        return self.dropout.applied(hidden, frame).to(self.joint.dtype)

    def _parts(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of symbols and the logits of durations."""
        logits = F.linear(hidden, self.weight, self.bias)
        return self.joint.parts(logits.to(self.joint.wide))


@GraphFunction
def _span_arcs(walk: _StaticWalk, encoder: Tensor, frame: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, t, P) of the arcs of the frames (t,)."""
    return walk.arcs(walk.hidden(encoder, frame))


@GraphFunction
def _span_gradients(
    walk: _StaticWalk, encoder: Tensor, frame: Tensor, masks: tuple[Tensor, ...], fields: Sequence[Tensor]
) -> _Gradients:
    """Return the part of the frames (t,) in the gradients."""
    return walk.part_of_gradients(walk.hidden(encoder, frame), frame, masks, fields)


# ------------------------------------------------------------------------------------- used by both walks


def _count(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _inside(shape: tuple[int, int, int], frames: Tensor, symbols: Tensor) -> Tensor:
    """Return a mask (B, T, P), True for the cells in their utterance's lattice."""
    frame_is_inside = _count(shape[1], frames) < frames[:, None]
    position_is_inside = _count(shape[2], symbols) <= symbols[:, None]
    return frame_is_inside[:, :, None] & position_is_inside[:, None, :]


def _lattice(inputs: _Inputs) -> tuple[int, int, int]:
    """Return the lattice's shape (B, T, P)."""
    return inputs.encoder.shape[0], inputs.encoder.shape[1], inputs.prediction.shape[1]


def _targets(inputs: _Inputs, blank: int) -> Tensor:
    """Return the next label (B, P) of each position, or blank after the last label."""
    padded = F.pad(inputs.labels, (0, 1))
    beyond = _count(padded.shape[1], inputs.symbols) >= inputs.symbols[:, None]
    return padded.masked_fill(beyond, blank).long()


# -------------------------------------------------------------------------------------------------- dropout


def _dropout(joint: _Joint, inputs: _Inputs) -> _Dropout | _NoDropout:
    batch, _, width = inputs.encoder.shape
    return _Dropout(joint, batch, width, keys=inputs.keys) if joint.dropped else _NoDropout()


class _NoDropout:
    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        pass

    def applied(self, hidden: Tensor, frame: Tensor) -> Tensor:
        return hidden


class _Dropout:
    """Drops a unit if its 16-bit draw, a hash of seed, cell and unit, is low. An int32 has two draws.

    The hash is MurmurHash3's finaliser with the multipliers of Wellons' lowbias32. No mask is stored, and
    the result does not depend on the padding or on which other cells are visited.
    """

    def __init__(self, joint: _Joint, batch: int, width: int, keys: Tensor) -> None:
        self.threshold = joint.dropped - 32768
        self.width = width
        low, high = keys[:1], keys[1:]
        row = _count(batch, keys).int()
        word = _count((width + 1) // 2, keys).int()
        self.row_keys = _mix(_mix(row + high) + low)
        self.word_keys = _mix(_mix(word + low) + high)
        self.words = keys.new_empty(joint.chunk, len(self.word_keys))
        self.spare = torch.empty_like(self.words) if joint.chunk <= _IN_CACHE else None

    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        """Set dropped units (N, H) to 0."""
        n = len(hidden)
        keys = self._cell_keys(self.row_keys[cells.row], cells.frame, cells.position)
        words = torch.add(keys[:, None], self.word_keys, out=self.words[:n])
        spare = None if self.spare is None else self.spare[:n]
        _mix_in_place(words, spare)
        hidden *= words.view(torch.int16)[:, : self.width].ge_(self.threshold)

    def applied(self, hidden: Tensor, frame: Tensor) -> Tensor:
        """Return the units (B, t, P, H) of the frames (t,), with 0 for dropped units."""
        position = _count(hidden.shape[2], hidden)
        keys = self._cell_keys(self.row_keys[:, None, None], frame[:, None], position)
        words = _mix(keys[..., None] + self.word_keys)
        # Both halves become the upper half of an int32, because Gaudi's graphs do not reinterpret bits.
        draws = torch.stack((words * 65536, words), -1).flatten(-2)
        return hidden * (draws[..., : self.width] >= self.threshold * 65536)

    def _cell_keys(self, row_keys: Tensor, frame: Tensor, position: Tensor) -> Tensor:
        cell = frame.int() * 65536 + position.int()
        return _mix(cell + row_keys)


_IN_CACHE = 16384  # cells of a chunk
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # the second as int32


def _mix(word: Tensor) -> Tensor:
    """Hash each int32 (MurmurHash3's finaliser)."""
    for multiplier in _MULTIPLIERS:
        word = _fold(word) * multiplier
    return _fold(word)


def _fold(word: Tensor) -> Tensor:
    """Compute ``word ^ (word >>> 16)``."""
    return word ^ (torch.bitwise_right_shift(word, 16) & 0xFFFF)


def _mix_in_place(word: Tensor, spare: Tensor | None) -> None:
    """Compute ``_mix`` in place, in a third of the time."""
    for multiplier in _MULTIPLIERS:
        _fold_in_place(word, spare)
        word *= multiplier
    _fold_in_place(word, spare)


def _fold_in_place(word: Tensor, spare: Tensor | None) -> None:
    # Halves need a fifth of the traffic of ``spare``, which is 1.15 times as fast in a CPU's cache.
    if spare is None:
        halves = word.view(torch.int16)
        halves[..., ::2] ^= halves[..., 1::2]  # little-endian
        return
    torch.bitwise_right_shift(word, 16, out=spare)
    spare &= 0xFFFF
    word ^= spare


# ----------------------------------------------------------------------------------------------- recursions


def _posteriors(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor, is_static: bool
) -> _Posteriors:
    """Compute the posteriors. An utterance with an impossible label has loss +inf and no gradient."""
    # A bias of -inf makes a class impossible.
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
    is_outside = is_impossible[:, None, None]
    return _Posteriors(  # torch.compile of torch 2.7 does not trace _replace.
        loss=posteriors.loss.masked_fill(is_impossible, torch.inf),
        occupancy=posteriors.occupancy.masked_fill(is_outside, 0),
        label_share=posteriors.label_share.masked_fill(is_outside, 0),
        duration_shares=posteriors.duration_shares,
    )


def _has_impossible_label(label: Tensor, frames: Tensor, symbols: Tensor) -> Tensor:
    """Return which utterances (B,) have a label that is impossible in each of their frames."""
    _, longest, positions = label.shape
    has_frame = (_count(longest, frames) < frames[:, None])[..., None]
    has_label = _count(positions, symbols) < symbols[:, None]
    likeliest = label.masked_fill(~has_frame, _NEVER).amax(1)
    return ((likeliest <= _NEVER) & has_label).any(1) & (frames > 0)


def _posteriors_by_rows(blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> _Posteriors:
    """Compute the posteriors by frames. The label arcs within a frame are one logcumsumexp.

    The recursion is in float64, so differences of cumulative sums keep fp32 precision. The backward
    variable is the forward variable of the lattice turned by 180 degrees. Both run in one loop.
    """
    blank, label = blank.double(), label.double()
    batch, length, positions = blank.shape
    turned_cells = _turned_cells(length, positions, frames, symbols)
    alpha, turned_beta = _forward_by_rows(*_arcs_into_rows(blank, label, turned_cells))
    beta = _turned(turned_beta, turned_cells)

    inside = _inside((batch, length, positions), frames, symbols)
    log_occupancy = alpha + beta - beta[:, :1, :1]
    has_label = _count(positions, blank) < symbols[:, None]
    leaves_by_label = inside & has_label[:, None]
    log_share = label + F.pad(beta, (-1, 1)) - beta
    loss = -beta[:, 0, 0]
    return _Posteriors(
        loss.masked_fill(frames == 0, 0),
        occupancy=log_occupancy.exp().masked_fill(~inside, 0),
        label_share=log_share.exp().masked_fill(~leaves_by_label, 0),
    )


def _arcs_into_rows(blank: Tensor, label: Tensor, turned_cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arcs (2, B, T, P) into each cell by blank and by label, forward and backward.

    They lead from the previous frame, and from the previous position, which has no effect at position 0.
    """
    by_blank = torch.stack((F.pad(blank, (0, 0, 1, -1)), _turned(blank, turned_cells)))
    by_label = torch.stack((F.pad(label, (1, -1)), _turned(label, turned_cells)))
    return by_blank, by_label


def _turned_cells(length: int, positions: int, frames: Tensor, symbols: Tensor) -> Tensor:
    """Return the flat index (B, T * P) of each cell's image if the lattice turns by 180 degrees."""
    turned_frame = (frames[:, None] - 1 - _count(length, frames)).clamp(min=0)
    turned_position = (symbols[:, None] - _count(positions, symbols)).clamp(min=0)
    return (turned_frame[:, :, None] * positions + turned_position[:, None, :]).flatten(1)


def _turned(field: Tensor, turned_cells: Tensor) -> Tensor:
    return field.flatten(1).gather(1, turned_cells).view(field.shape)


def _forward_by_rows(by_blank: Tensor, by_label: Tensor) -> Tensor:
    """Return the forward variables (2, B, T, P) for the log-probabilities of the arcs into each cell."""
    base = by_label.cumsum(-1)
    start = torch.full_like(base[:, :, :1], -torch.inf)
    start[..., 0] = 0
    # A row is the variables of a frame less their base. Each step of the loop then has one addition.
    steps = by_blank - base + torch.cat((torch.zeros_like(start), base[:, :, :-1]), 2)
    row, rows = start[:, :, 0], []
    for t in range(by_blank.shape[2]):
        row = torch.logcumsumexp(row + steps[:, :, t], -1)
        rows.append(row)
    return torch.stack(rows, 2) + base


def _posteriors_by_diagonals(blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> _Posteriors:
    """Compute the posteriors by diagonals t + u, normalised, because a path crosses each diagonal once.

    Normalised sums stay small, so fp32 is exact enough, and the occupancy is a softmax. Forward and backward
    run in one loop, the backward recursion over the padded lattice turned by 180 degrees.
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
    loss = _removed_loss(totals, beta, frames[:, None] - 1 + symbols[:, None])
    return _Posteriors(loss.masked_fill(frames == 0, 0), occupancy, label_share)


def _removed_loss(totals: Tensor, beta: Tensor, last_diagonal: Tensor) -> Tensor:
    """Return the loss (B,): minus the sum of the masses that the normalisation removes up to the last one."""
    mass = (totals - beta) * beta.exp()
    mass = mass.sum(-1).flip(1)
    is_beyond = _count(mass.shape[1], mass) > last_diagonal
    return -mass.masked_fill(is_beyond, 0).sum(-1)


def _arc_masks(length: int, positions: int, frames: Tensor, symbols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks (B, T, P) of the cells without a blank arc, without a label arc, and of the last cells."""
    frame, position = _count(length, frames)[:, None], _count(positions, symbols)
    last_frame, last_position = frames[:, None, None] - 1, symbols[:, None, None]
    is_last = (frame == last_frame) & (position == last_position)
    no_blank = ((frame >= last_frame) | (position > last_position)) & ~is_last
    no_label = (frame > last_frame) | (position >= last_position)
    return no_blank, no_label, is_last


def _arcs_into_diagonals(blank: Tensor, label: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arcs into each cell from the previous diagonal, forward and backward.

    ``blank`` and ``label`` are log-probabilities (B, D, P), and ``ends`` is 1 for the last cells. The arcs by
    blank and by label are (2, B, D, P). The third tensor is 0 for a path's first cell, which no arc leads to.
    """
    diagonal, position = _count(ends.shape[1], ends), _count(ends.shape[2], ends)
    is_first = diagonal[:, None] + position == 0
    begins = is_first.to(ends.dtype).expand_as(ends)  # A write into a slice would break the recorded graph.
    from_blank = F.pad(blank, (0, 0, 1, -1), value=_NEVER) * (1 - begins)
    by_blank = torch.stack((from_blank, blank.flip(1, 2)))
    by_label = torch.stack((F.pad(label, (1, -1, 1, -1), value=_NEVER), label.flip(1, 2)))
    return by_blank, by_label, 1 - torch.stack((begins, ends.flip(1, 2)))


def _normalised_diagonals(
    by_blank: Tensor, by_label: Tensor, carries: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the recursion over arcs (2, B, D, P).

    Returns four tensors (B, D, P): forward and backward variables, normalised over each diagonal, and for the
    backward recursion the variables before normalisation and the log-odds of label against blank.
    """
    diagonal = torch.zeros_like(by_blank[:, :, 0])
    arcs = [by_blank, by_label, carries]
    steps = by_blank.shape[2]
    count, size = equal_parts(steps)
    if count * size > steps:
        arcs = [F.pad(field, (0, 0, 0, count * size - steps)) for field in arcs]
    parts = []
    for start in range(0, steps, size):
        blank, label, carry = (field[:, :, start : start + size] for field in arcs)
        *part, diagonal = _diagonals_part(blank, label, carry, diagonal)
        parts.append(part)
    alpha, beta, totals, log_odds = (torch.cat(part, 1)[:, :steps] for part in zip(*parts, strict=True))
    return alpha, beta, totals, log_odds


@GraphFunction
def _diagonals_part(
    by_blank: Tensor, by_label: Tensor, carries: Tensor, diagonal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of ``_normalised_diagonals`` for d diagonals (B, d, P), and the last (2, B, P)."""
    columns = []
    for d in range(by_blank.shape[2]):
        paths_by_blank = torch.addcmul(by_blank[:, :, d], carries[:, :, d], diagonal)
        paths_by_label = by_label[:, :, d] + F.pad(diagonal, (1, -1), value=_NEVER)
        total = torch.logaddexp(paths_by_blank, paths_by_label)
        diagonal = total.log_softmax(-1)
        columns.append((diagonal[0], diagonal[1], total[1], paths_by_label[1], paths_by_blank[1]))
    alpha, beta, totals, labels, blanks = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    return alpha, beta, totals, labels - blanks, diagonal


def _posteriors_of_durations(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> _Posteriors:
    """Compute the shares of arcs by diagonals t + u backward, then the occupancy forward from the shares.

    A share is the fraction of the paths through a cell that take an arc, a softmax over the cell's arcs. It
    compares probabilities of near cells only, and occupancies are sums of products of shares, without
    cancellation. So fp32 is exact enough. The arcs (2R) of a cell are blanks that lead 1 to R diagonals on,
    then labels that lead as far. Arcs that do not exist have the share 0.
    """
    batch, length, positions = arcs[0].shape
    reach = joint.durations[-1] + 1
    onward, goes_on = _arcs_of_durations(joint, arcs, frames, symbols)
    loss, shares = _shares_backward(onward, goes_on, reach)
    has_no_path = (frames == 0) | (loss > -_NEVER / 2)
    begins = (_count(positions, loss) == 0) & ~has_no_path[:, None]
    occupied = _occupancy_forward(shares, begins.to(loss.dtype), reach)

    occupancy = _lattice_field(occupied, length) * _inside((batch, length, positions), frames, symbols)
    label_share = _lattice_field(shares[:, :, reach:].sum(2), length)
    duration_shares = _duration_shares(joint.durations, shares, length)
    return _Posteriors(loss.masked_fill(has_no_path, 0), occupancy, label_share, duration_shares)


def _lattice_field(diagonals: Tensor, frames: int) -> Tensor:
    """Rearrange diagonals (T + P, B, P) to the lattice (B, T, P)."""
    return _straight(diagonals.transpose(0, 1), frames)


def _duration_shares(durations: tuple[int, ...], shares: Tensor, frames: int) -> tuple[Tensor, ...]:
    """Return the share (B, T, P) of the arcs of each duration."""
    reach = durations[-1] + 1
    fields = []
    for d in durations:
        share = shares[:, :, reach + d]
        if d:
            share = share + shares[:, :, d - 1]
        fields.append(_lattice_field(share, frames))
    return tuple(fields)


def _shares_backward(onward: Tensor, goes_on: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return the loss (B,) and the shares (T + P, B, 2R, P) from the results of ``_arcs_of_durations``."""
    batch, _, positions = onward.shape[1:]
    window = onward.new_full((batch, reach, positions), _NEVER)  # the diagonals that follow
    removed, log_shares = torch.zeros_like(window[:, 0, 0]), list[Tensor]()
    for d in range(len(onward) - 1, -1, -1):
        log_share, total = _diagonal_shares(onward[d], window)
        log_shares.append(log_share)
        window = torch.cat(((total * goes_on[d])[:, None], window[:, :-1]), 1)
        # At each diagonal, this would be a fifth of the operations.
        if d % 4 == 0:
            window, removed = _lowered(window, removed)
    loss = -(window[:, 0, 0] + removed)
    return loss, torch.stack(log_shares[::-1]).exp()


def _lowered(window: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's highest number from the window (B, R, P) to ``removed`` (B,), to keep numbers small."""
    highest = window.amax((1, 2))
    highest = highest * (highest > _NEVER / 2)
    return window - highest[:, None, None], removed + highest


def _diagonal_shares(onward: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-shares (B, 2R, P) of the arcs of a diagonal, and the log-sums (B, P) of their paths."""
    paths = onward + torch.cat((window, F.pad(window, (-1, 1), value=_NEVER)), 1)
    log_share = paths.log_softmax(1)
    return log_share, paths.amax(1) - log_share.amax(1)  # The difference is logsumexp, which Gaudi lacks.


def _occupancy_forward(shares: Tensor, begins: Tensor, reach: int) -> Tensor:
    """Return the occupancy (T + P, B, P) of paths that begin with the probabilities ``begins`` (B, P)."""
    pending = F.pad(begins[:, None], (0, 0, 0, reach - 1))
    diagonals = []
    for share in shares.unbind():
        diagonal = pending[:, 0]
        diagonals.append(diagonal)
        flow = diagonal[:, None] * share
        pending = F.pad(pending[:, 1:], (0, 0, 0, 1)) + flow[:, :reach] + F.pad(flow[:, reach:], (1, -1))
    return torch.stack(diagonals)


def _arcs_of_durations(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all arcs by diagonals (T + P, B, 2R, P), and which paths continue.

    The second tensor (T + P, B, P) is 0 if a path has ended, else 1. The lattice has an additional frame, in
    which paths end.
    """
    batch, length, positions = arcs[0].shape
    label_counts = symbols[:, None, None]
    cell_arcs = _cell_arcs(joint, arcs, frames, label_counts)
    padded = F.pad(torch.stack(cell_arcs, 1), (0, 0, 0, 1), value=_NEVER)
    onward = _skewed(padded.flatten(0, 1), _NEVER).view(batch, -1, length + positions, positions)
    is_past_frames = _count(length + 1, frames)[:, None] == frames[:, None, None]
    is_end = is_past_frames & (_count(positions, frames) == label_counts)
    goes_on = 1 - _skewed(is_end.to(arcs[0].dtype), 0)
    return onward.permute(2, 0, 1, 3).contiguous(), goes_on.transpose(0, 1)


def _cell_arcs(joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, label_counts: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, T, P) of a cell's 2R arcs: the blanks, then the labels."""
    blank, label, *by_duration = arcs
    frames_left = (frames[:, None] - _count(blank.shape[1], frames))[..., None]
    position = _count(blank.shape[2], frames)
    no_label, is_complete = position >= label_counts, position == label_counts
    reach = joint.durations[-1] + 1
    never = torch.full_like(blank, _NEVER)
    blanks, labels = [never] * reach, [never] * reach
    for d, log_p in zip(joint.durations, by_duration, strict=True):
        log_p = log_p - joint.sigma
        labels[d] = (label + log_p).masked_fill((frames_left <= d) | no_label, _NEVER)
        if d:
            ends_or_stays = (frames_left > d) | ((frames_left == d) & is_complete)
            blanks[d - 1] = (blank + log_p).masked_fill(~ends_or_stays, _NEVER)
    return blanks + labels


def _skewed(field: Tensor, fill: float) -> Tensor:
    """Rearrange (B, T, P) to diagonals (B, T + P - 1, P): [d, u] is cell (d - u, u), or ``fill``."""
    batch, frames, positions = field.shape
    padded = F.pad(field.transpose(1, 2), (0, positions), value=fill).flatten(1)
    return padded[:, :-positions].reshape(batch, positions, frames + positions - 1).transpose(1, 2)


def _straight(diagonals: Tensor, frames: int) -> Tensor:
    """Invert ``_skewed``."""
    batch, steps, positions = diagonals.shape
    padded = F.pad(diagonals.transpose(1, 2).flatten(1), (0, positions))
    return padded.reshape(batch, positions, steps + 1)[:, :, :frames].transpose(1, 2)
