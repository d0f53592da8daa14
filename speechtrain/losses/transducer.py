"""The exact transducer (RNN-T) loss of an additive joint, without its (B, T, U + 1, V) lattice.

Joint, dropout, softmax and loss are one autograd function. It processes the lattice in chunks of cells
and keeps two log-probabilities per cell, of blank and of the next label. The recursion over them gives
every cell's occupancy, the probability that an alignment passes through the cell. Gradients of all inputs
are computed only where the occupancy matters: in a third to a half of the cells at random initialisation,
in a fourteenth after the model has learned an alignment. There the joint is computed again, unless its
logits are in the buffer of a few megabytes that is reused from utterance to utterance.

Shape legend: B utterances, T frames, U labels, P = U + 1 positions, H joint width, V symbols, K durations,
N cells of a chunk. Cell (b, t, u) means: frame t, with u labels already emitted. A path continues by blank,
to (b, t + 1, u), or by the next label, to (b, t, u + 1); the last cell's blank ends the path.

With ``durations`` (TDT), each arc also has a duration d, drawn from a softmax of its own: a label leads to
(b, t + d, u + 1), a blank of d > 0 to (b, t + d, u), and the blank that leads to frame T exactly, after all
labels, ends the path.

On a CPU the result is bit-equal from run to run at a fixed number of threads.
Cells of occupancy below ``skip_below`` add nothing to the gradient; 0 visits all cells, and gradients
then agree with float64 to 1e-6 instead of 3e-6. About ``chunk`` cells are in memory at once, and
``keep`` bytes of logits are stored for the gradients, so that fewer logits are computed twice. Forward
computes the gradients and backward scales them; if the upstream gradients differ between utterances
(those without frames are ignored), backward computes them again.
``static`` computes every cell of the padded lattice twice, in shapes that depend on no data, and reads
nothing back from the device; ``skip_below`` and ``keep`` then have no effect. Without it the work depends
on the data: under ``torch.compile``, call ``torch.compiler.disable(transducer_loss)``, which otherwise
compiles in dozens of pieces, anew for each shape.

Loss: Graves, "Sequence transduction with recurrent neural networks" (2012), sections 2.4 and 2.5.
Yu et al., "FastEmit: low-latency streaming ASR with sequence-level emission regularization" (ICASSP 2021).
Xu et al., "Efficient sequence transduction by jointly predicting tokens and durations" (ICML 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from speechtrain.nn.full_precision import full_precision
from speechtrain.nn.joint import check_durations

_NEVER = -1e30  # log-probability of an arc that does not exist; finite, since inf - inf is NaN


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
    """Negative log-likelihood (B,) of each utterance under ``Linear(dropout(relu(encoder + prediction)))``.

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
    ``dropout`` is the joint's, to the nearest 1/65536 and scaled by the exact keep rate. Pass 0 in
    evaluation. Its mask is a function of ``seed`` (an int, or an int64 tensor on the device), which must
    differ from step to step, and of the cell. It does not depend on which cells are visited.
    ``fastemit`` multiplies the gradient of label arcs by 1 + ``fastemit``. The loss's value is unchanged.
    ``durations``, ascending, make it the loss of TDT: ``weight`` (V + K, H) and ``bias`` (V + K,) have a row
    for each after those of the symbols. ``sigma`` is subtracted from the log-probability of every symbol, so
    paths of few arcs, with long durations, gain. An utterance without a path (too few frames for its labels,
    or a number of them to which no durations add up) has loss 0 and no gradient. ``fastemit`` is then 0.
    An utterance with an impossible label, of a class whose ``bias`` is -inf, has loss +inf and no gradient.
    ``compute_dtype`` is the type of the matmuls: float32, bfloat16 or float64. By default it is float64 for a
    float64 ``encoder``, else float32. Softmax, recursion and sums over cells are always fp32 or wider, and
    autocast has no effect here.
    ``skip_below``, ``chunk``, ``keep`` and ``static`` are settings of cost (see the module).

    Raises ValueError for dtypes, devices, shapes, lengths, labels or rates that cannot be (with ``static``,
    lengths and labels are not read, which would stall a device: an id of V or more is undefined there).
    """
    _check_settings(activation, dropout, fastemit, chunk=chunk, keep=keep)
    durations = check_durations(durations)
    if (fastemit and durations) or not (sigma == 0 or (durations and sigma > 0)):
        raise ValueError(f"fastemit is {fastemit}, sigma {sigma}: one excludes durations, one needs them")
    extra = len(durations)
    _check_tensors(blank, extra, encoder, prediction, weight, bias, labels, encoder_lengths, label_lengths)
    dtype = _product_dtype(compute_dtype, encoder.dtype)
    # an int moves as data, not as a constant: a new constant would compile the graph again at each step
    keys = torch.as_tensor(seed, dtype=torch.int64).reshape(1).view(torch.int32).to(encoder.device)
    integers = labels.long(), encoder_lengths.long(), label_lengths.long()
    given = _Given(encoder, prediction, weight, bias, *integers, keys=keys)
    if not static:
        _check_contents(given, blank, len(bias) - extra)
    chunk = min(chunk, encoder.shape[0] * encoder.shape[1] * prediction.shape[1])
    costs = {"skip_below": skip_below, "chunk": chunk, "keep": keep}
    joint = _Joint(blank, activation, dropout, fastemit, dtype, **costs, durations=durations, sigma=sigma)  # type: ignore[arg-type]
    is_training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    function = _StaticLoss if static else _RaggedLoss
    loss: Tensor = function.apply(*given, joint, is_training)  # type: ignore[no-untyped-call]
    return loss


class _Given(NamedTuple):
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
        raise ValueError(f"activation is {activation!r}; it must be {' or '.join(_ACTIVATIONS)}")
    if not (dropout >= 0 and round(dropout * 65536) < 65536):
        raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")
    if not (fastemit >= 0 and chunk >= 1 and keep >= 0):
        raise ValueError(
            f"fastemit is {fastemit}, chunk {chunk}, keep {keep}; at least 0, 1 and 0 are needed"
        )


def _product_dtype(asked: torch.dtype | None, given: torch.dtype) -> torch.dtype:
    dtype = asked or (torch.float64 if given == torch.float64 else torch.float32)
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"compute_dtype is {dtype}; it must be float32, bfloat16 or float64")
    return dtype


_AXES = {"encoder": "B T H", "prediction": "B U+1 H", "weight": "V H", "bias": "V", "labels": "B U"}
_AXES |= dict.fromkeys(("encoder_lengths", "label_lengths"), "B")


def _check_tensors(blank: int, durations: int, encoder: Any, *others: Any) -> None:
    """Refuse wrong types, devices and shapes; no value is read."""
    sizes: dict[str, int] = {}
    for (name, axes), tensor in zip(_AXES.items(), (encoder, *others), strict=True):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
        dtype, kind = tensor.dtype, "floating-point" if name in _Gradients._fields else "integer"
        is_number = not (dtype.is_complex or dtype == torch.bool)
        if not is_number or dtype.is_floating_point != (kind == "floating-point"):
            raise ValueError(f"{name} is of {dtype}; it must be of {kind} numbers")
        if tensor.device != encoder.device:
            raise ValueError(f"{name} is on {tensor.device}, encoder on {encoder.device}")
        found = tuple(tensor.shape)
        fits = (sizes.setdefault(axis, n) == n for axis, n in zip(axes.split(), found, strict=False))
        if len(found) != len(axes.split()) or not all(fits):
            raise ValueError(f"{name} has shape {found}; it must be ({axes}), where {sizes}")
        sizes["U"] = sizes.get("U+1", 1) - 1
    symbols = sizes["V"] - durations
    if not 0 <= blank < symbols:
        raise ValueError(f"blank is {blank}; it must be the id of a class, 0 to {symbols - 1}")
    if not encoder.numel():
        raise ValueError(f"encoder has shape {tuple(encoder.shape)}, with no utterance, frame or unit")


def _check_contents(given: _Given, blank: int, vocabulary: int) -> None:
    most, longest = given.labels.shape[1], given.encoder.shape[1]
    misfit = (given.frames < 0) | (given.frames > longest) | (given.symbols < 0) | (given.symbols > most)
    if bool(misfit.any()):
        lengths = f"{given.frames.tolist()} and {given.symbols.tolist()}"
        raise ValueError(f"lengths {lengths} do not fit {longest} frames and {most} labels")
    impossible = (given.labels < 0) | (given.labels >= vocabulary) | (given.labels == blank)
    if bool((impossible & (_count(most, given.labels) < given.symbols[:, None])).any()):
        raise ValueError(f"a label is the blank {blank} or outside the vocabulary of {vocabulary}")


@dataclass(frozen=True)
class _Joint:
    """Settings shared by forward and backward."""

    blank: int
    activation: str
    dropout: float
    fastemit: float
    dtype: torch.dtype  # of matrix products
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
        """The number of a draw's 65536 values that drop a unit."""
        return round(self.dropout * 65536)

    @property
    def scale(self) -> float:
        """The scale of kept units, applied to the weight, which has fewer elements."""
        return 65536 / (65536 - self.dropped)

    def parts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of symbols and those of durations."""
        symbols = logits.shape[-1] - len(self.durations)
        return logits[..., :symbols], logits[..., symbols:]

    def slope(self, hidden: Tensor) -> Tensor:
        """The derivative of units by what they were before, but for dropped ones of tanh; overwrites them.

        A comparison that makes a new tensor takes three times as long.
        """
        return hidden.gt_(0) if self.activation == "relu" else hidden.square_().neg_().add_(1)


_ACTIVATIONS = {"relu": torch.relu_, "tanh": torch.tanh_}


class _Posteriors(NamedTuple):
    loss: Tensor  # (B,)
    occupancy: Tensor  # (B, T, P) probability that a path passes through the cell; 0 outside the lattice
    label_share: Tensor  # (B, T, P) fraction of the paths through the cell that continue by its label
    duration_shares: tuple[Tensor, ...] = ()  # (B, T, P) each: fractions that continue by an arc so long


def _differentials(joint: _Joint, posteriors: _Posteriors, arcs: Sequence[Tensor]) -> list[Tensor]:
    """The parts of the gradient over the logits, all (B, T, P): the weight, and those of blank, label and
    each duration. At a cell, this gradient is the weight times (softmax - the fractions of the arcs). Among
    the symbols, the fractions are nonzero at two, blank and label. These elements and the durations' are
    computed in full precision, since the terms cancel."""
    blank, label, *durations = arcs
    share = posteriors.label_share
    # FastEmit counts label arcs 1 + fastemit times, so cells with label arcs have more weight
    emphasis = 1 + joint.fastemit * share
    fields = (
        posteriors.occupancy * emphasis,
        blank.exp() - (1 - share) / emphasis,
        label.exp() - (1 + joint.fastemit) * share / emphasis,
        *(log_p.exp() - one for log_p, one in zip(durations, posteriors.duration_shares, strict=True)),
    )
    return [field.to(joint.wide) for field in fields]


class _Gradients(NamedTuple):
    encoder: Tensor
    prediction: Tensor
    weight: Tensor
    bias: Tensor

    def like(self, given: _Given) -> tuple[Tensor | None, ...]:
        """Cast to the inputs' dtypes, with None for the function's other arguments."""
        return (*(mine.to(theirs.dtype) for mine, theirs in zip(self, given, strict=False)), *[None] * 6)


class _RaggedLoss(torch.autograd.Function):
    """The loss over ragged cells. Forward also computes the gradients, for an upstream gradient of 1 and
    utterance by utterance, while the logits are still in memory. Backward scales them; if the upstream
    gradient differs between utterances, it computes them again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, joint, is_training = arguments
        given = _Given(*tensors)
        with full_precision(given.encoder.device):
            walk = _RaggedWalk(joint, given)
            loss = walk.losses(is_training)
        ctx.joint = joint
        ctx.save_for_backward(*given, *walk.arcs, *(walk.gradients() if is_training else ()))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        given = _Given(*ctx.saved_tensors[:8])
        *arcs, _, _, _, _ = ctx.saved_tensors[8:]
        gradients = ctx.saved_tensors[-4:]
        of_utterances = upstream[given.frames > 0]
        if bool((of_utterances == of_utterances[:1]).all()):
            factor = of_utterances[:1].sum()  # 0 where there is none
            return _Gradients(*(gradient * factor for gradient in gradients)).like(given)
        with full_precision(upstream.device):
            walk = _RaggedWalk(ctx.joint, given)
            walk.arcs = arcs
            everyone = slice(0, len(upstream))
            walk.add_gradients(everyone, walk.posteriors(everyone), upstream)
        return walk.gradients().like(given)


class _StaticLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, joint, _ = arguments
        given = _Given(*tensors)
        with full_precision(given.encoder.device):
            arcs = _StaticWalk(joint, given).log_probabilities()
            posteriors = _posteriors(joint, arcs, given.frames, given.symbols, is_static=True)
            differentials = _differentials(joint, posteriors, arcs)
        ctx.joint = joint
        ctx.save_for_backward(*given, *differentials)
        return posteriors.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        given, differentials = _Given(*ctx.saved_tensors[:8]), ctx.saved_tensors[8:]
        with full_precision(upstream.device):
            gradients = _StaticWalk(ctx.joint, given).gradients(differentials, upstream)
        return gradients.like(given)


# ------------------------------------------------------------------------------- the walk over ragged cells


class _RaggedWalk:
    """Visits the cells within the lengths, for gradients only those that matter, ``chunk`` cells at a time.

    Buffers are reused: page faults of new megabytes cost more than the arithmetic of the softmax.
    """

    def __init__(self, joint: _Joint, given: _Given) -> None:
        self.joint, self.frames, self.symbols = joint, given.frames, given.symbols
        self.shape = _lattice(given)
        self.encoder = given.encoder.to(joint.wide).flatten(0, 1)
        self.prediction = given.prediction.to(joint.wide).flatten(0, 1)
        self.weight = (given.weight.to(joint.wide) * joint.scale).to(joint.dtype)
        self.bias = given.bias.to(joint.dtype)
        self.targets = _targets(given, joint.blank).flatten()
        self.dropout = _dropout(joint, given)
        # log-probabilities (B, T, P) of blank, next label and each duration
        self.arcs = [self.encoder.new_zeros(self.shape) for _ in range(2 + len(joint.durations))]
        self.sums = _Gradients(
            torch.zeros_like(self.encoder),
            torch.zeros_like(self.prediction),
            torch.zeros_like(self.weight, dtype=joint.wide),
            bias=torch.zeros_like(self.bias, dtype=joint.wide),
        )
        outputs, width = given.weight.shape
        self.frame_units = self.encoder.new_empty(joint.chunk, width)
        self.position_units = self.encoder.new_empty(joint.chunk, width)
        self.units, self.of_units = self.weight.new_empty(2, joint.chunk, width)
        self.logits = self.weight.new_empty(joint.chunk, outputs)
        self.normalised = self.encoder.new_empty(joint.chunk, outputs)
        self.wide_logits = self.logits.to(joint.wide)  # this and the next are no copies if dtypes are equal
        self.softmax = self.normalised.to(joint.dtype)
        self.kept = self.logits[:0]
        self.place = torch.full((self.arcs[0].numel(),), -1, device=self.bias.device)  # among the kept

    def losses(self, with_gradients: bool) -> Tensor:
        """Compute the losses (B,) and, if asked, add the gradients for an upstream gradient of 1."""
        losses = self.encoder.new_zeros(self.shape[0])
        if with_gradients:
            room = self.joint.keep // (self.logits.shape[1] * self.logits.itemsize)
            self.kept = self.logits.new_empty(min(room, len(self.place)), self.logits.shape[1])
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
        # written so that NaN cells are visited, and gradient checks find them
        matters = ~(posteriors.occupancy < self.joint.skip_below) & (weight != 0)
        first = rows.start * weight[0].numel()
        of_cell, *of_arcs = (field.flatten() for field in (weight, *arcs))
        local = matters.flatten().nonzero()[:, 0]
        is_kept = self.place[local + first] >= 0
        for chosen in (local[is_kept], local[~is_kept]):
            for here in torch.split(chosen, self.joint.chunk):
                cells = _Cells.at(here + first, *self.shape[1:])
                self._add_cells(cells, of_cell[here], [field[here] for field in of_arcs])

    def gradients(self) -> _Gradients:
        encoder, prediction, weight, bias = self.sums
        batch, frames, positions = self.shape
        shaped = encoder.view(batch, frames, -1), prediction.view(batch, positions, -1)
        return _Gradients(*shaped, weight * self.joint.scale, bias)

    def _groups(self) -> Iterator[slice]:
        """Groups of consecutive utterances whose logits fit the buffer; each group costs one recursion."""
        start = cells = 0
        for row, count in enumerate((self.frames * (self.symbols + 1)).tolist()):
            if row > start and cells + count > len(self.kept):
                yield slice(start, row)
                start, cells = row, 0
            cells += count
        yield slice(start, self.shape[0])

    def _fill_arcs(self, rows: slice) -> None:
        """Compute the log-probabilities of the arcs; store logits while there is room."""
        inside = _inside((len(self.frames[rows]), *self.shape[1:]), self.frames[rows], self.symbols[rows])
        cells = inside.flatten().nonzero()[:, 0] + rows.start * inside[0].numel()
        is_kept = self._is_worth_keeping(_Cells.at(cells, *self.shape[1:]))
        kept = cells[is_kept]
        self.place[kept] = torch.arange(len(kept), device=kept.device)
        for start in range(0, len(kept), self.joint.chunk):
            chunk = kept[start : start + self.joint.chunk]
            self._fill_cells(_Cells.at(chunk, *self.shape[1:]), self.kept[start : start + len(chunk)])
        others = cells[~is_kept]
        # no torch.split, which fails for no cells under the compiler of torch 2.11
        for start in range(0, len(others), self.joint.chunk):
            chunk = others[start : start + self.joint.chunk]
            self._fill_cells(_Cells.at(chunk, *self.shape[1:]), self.logits[: len(chunk)])

    def _fill_cells(self, cells: _Cells, logits: Tensor) -> None:
        torch.addmm(self.bias, self._hidden(cells), self.weight.t(), out=logits)
        if logits.dtype != self.wide_logits.dtype:
            logits = self.wide_logits[: len(logits)].copy_(logits)
        symbols, durations = self.joint.parts(logits)
        log_p = torch.log_softmax(symbols, 1, out=self.joint.parts(self.normalised[: len(logits)])[0])
        label = log_p.gather(1, self.targets[cells.position_row, None])[:, 0]
        found = (log_p[:, self.joint.blank], label, *durations.log_softmax(1).unbind(1))
        for field, values in zip(self.arcs, found, strict=True):
            field.view(-1)[cells.flat] = values

    def _is_worth_keeping(self, cells: _Cells) -> Tensor:
        """Select as many cells as there is room for, those with the most alignments through them.

        This is the order of occupancy if all alignments are equally likely, nearly as at random
        initialisation. Later it is a poor estimate, but then only few cells matter.
        """
        room = len(self.kept)
        if len(cells.flat) <= room:
            return torch.ones_like(cells.flat, dtype=torch.bool)
        frames_left = self.frames[cells.row] - 1 - cells.frame
        symbols_left = self.symbols[cells.row] - cells.position
        before = _log_binomial(cells.frame + cells.position, cells.position)
        after = _log_binomial(frames_left + symbols_left, symbols_left)
        is_kept = torch.zeros_like(cells.flat, dtype=torch.bool)
        is_kept[(before + after).topk(room).indices] = True
        return is_kept

    def _add_cells(self, cells: _Cells, weight: Tensor, of_arcs: list[Tensor]) -> None:
        n, dtype = len(cells.flat), self.joint.dtype
        of_blank, of_label, *of_durations = (field.to(dtype) for field in of_arcs)
        hidden = self._hidden(cells)
        places = self.place[cells.flat]
        logits = self.logits[:n]
        if bool((places >= 0).all()):
            torch.index_select(self.kept, 0, places, out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        gradient = self.softmax[:n]
        symbols, durations = self.joint.parts(gradient)
        torch.softmax(self.joint.parts(logits)[0], 1, out=symbols)
        symbols.scatter_(1, self.targets[cells.position_row, None], of_label[:, None])
        symbols[:, self.joint.blank] = of_blank
        for column, field in enumerate(of_durations):
            durations[:, column] = field
        gradient *= weight[:, None].to(dtype)
        self.sums.bias.add_(gradient.sum(0, dtype=self.joint.wide))
        if self.joint.wide == dtype:
            self.sums.weight.addmm_(gradient.t(), hidden)
        else:
            self.sums.weight.add_(torch.mm(gradient.t(), hidden))
        of_hidden = torch.mm(gradient, self.weight, out=self.of_units[:n])
        slope = self.joint.slope(hidden)
        if self.joint.activation != "relu":  # whose dropped units are 0, as the slope there is
            self.dropout.apply_(slope, cells)
        of_hidden *= slope
        of_hidden = of_hidden.to(self.joint.wide)
        self.sums.encoder.index_add_(0, cells.frame_row, of_hidden)
        self.sums.prediction.index_add_(0, cells.position_row, of_hidden)

    def _hidden(self, cells: _Cells) -> Tensor:
        """Compute the hidden units (N, H) after dropout, not scaled."""
        n = len(cells.flat)
        hidden = torch.index_select(self.encoder, 0, cells.frame_row, out=self.frame_units[:n])
        other = torch.index_select(self.prediction, 0, cells.position_row, out=self.position_units[:n])
        if self.joint.activation == "relu":  # which may follow the rounding to the products' dtype
            hidden = torch.add(hidden, other, out=self.units[:n])
        else:
            hidden += other
        self.dropout.apply_(_ACTIVATIONS[self.joint.activation](hidden), cells)
        return hidden.to(self.joint.dtype)


def _log_binomial(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1.0) - torch.lgamma(k + 1.0) - torch.lgamma(n - k + 1.0)


class _Cells(NamedTuple):
    """Positions of N cells; all fields are (N,)."""

    flat: Tensor  # in the flattened (B, T, P)
    frame_row: Tensor  # in (B * T)
    position_row: Tensor  # in (B * P)
    row: Tensor
    frame: Tensor
    position: Tensor

    @classmethod
    def at(cls, flat: Tensor, frames: int, positions: int) -> _Cells:
        frame_row = flat // positions
        row = frame_row // frames
        position = flat - frame_row * positions
        return cls(flat, frame_row, row * positions + position, row, frame_row - row * frames, position)


# -------------------------------------------------------------------------------- the walk in static shapes


class _StaticWalk:
    """Visits every cell of the padded lattice, a few frames of all utterances at a time.

    It uses only operations that a graph records: no index_add, no in-place write into a slice.
    """

    def __init__(self, joint: _Joint, given: _Given) -> None:
        self.joint, self.frames, self.symbols = joint, given.frames, given.symbols
        self.shape = _lattice(given)
        beyond_frames = _count(self.shape[1], given.frames) >= given.frames[:, None]
        beyond_symbols = _count(self.shape[2], given.symbols) > given.symbols[:, None]
        self.encoder = given.encoder.to(joint.wide).masked_fill(beyond_frames[..., None], 0)
        self.prediction = given.prediction.to(joint.wide).masked_fill(beyond_symbols[..., None], 0)
        self.weight = (given.weight.to(joint.wide) * joint.scale).to(joint.dtype)
        self.bias = given.bias.to(joint.dtype)
        self.targets = _targets(given, joint.blank)
        self.dropout = _dropout(joint, given)

    def log_probabilities(self) -> list[Tensor]:
        """Log-probabilities (B, T, P) of blank, next label and each duration.

        They are arbitrary but finite outside the lattice.
        """
        pieces = []
        for span in self._spans():
            symbols, durations = self.joint.parts(self._logits(self._hidden(span)).to(self.joint.wide))
            log_p = symbols.log_softmax(-1)
            targets = self.targets[:, None, :, None].expand(-1, log_p.shape[1], -1, -1)
            piece = [log_p[..., self.joint.blank], log_p.gather(-1, targets)[..., 0]]
            if self.joint.durations:  # graphs take no empty tensor
                piece += durations.log_softmax(-1).unbind(-1)
            pieces.append(piece)
        return [torch.cat(fields, 1) for fields in zip(*pieces, strict=True)]

    def gradients(self, differentials: Sequence[Tensor], upstream: Tensor) -> _Gradients:
        """Compute the gradients of the inputs for the upstream gradients (B,)."""
        symbol = _count(len(self.weight) - len(self.joint.durations), self.weight)
        is_blank = (symbol == self.joint.blank).to(self.joint.wide)
        is_label = (symbol == self.targets[:, None, :, None]).to(self.joint.wide) * (1 - is_blank)
        is_other = 1 - is_blank - is_label
        of_cell = differentials[0] * upstream[:, None, None]
        encoder, prediction = [], torch.zeros_like(self.prediction)
        weight = torch.zeros_like(self.weight, dtype=self.joint.wide)
        bias = torch.zeros_like(self.bias, dtype=self.joint.wide)
        for span in self._spans():
            hidden = self._hidden(span)
            softmax = self.joint.parts(self._logits(hidden).to(self.joint.wide))[0].softmax(-1)
            of_blank, of_label, *of_durations = (field[:, span, :, None] for field in differentials[1:])
            gradient = softmax * is_other + of_blank * is_blank + of_label * is_label
            if of_durations:
                gradient = torch.cat((gradient, *of_durations), -1)
            gradient = (gradient * of_cell[:, span, :, None]).to(self.joint.dtype)
            bias = bias + gradient.sum((0, 1, 2), dtype=self.joint.wide)
            weight = weight + (gradient.flatten(0, 2).t() @ hidden.flatten(0, 2)).to(self.joint.wide)
            slope = self.joint.slope(hidden)
            if self.joint.activation != "relu":
                slope = self.dropout.applied(slope, span.start)
            of_hidden = (gradient @ self.weight).to(self.joint.wide) * slope
            encoder.append(of_hidden.sum(2))
            prediction = prediction + of_hidden.sum(1)
        return _Gradients(torch.cat(encoder, 1), prediction, weight * self.joint.scale, bias=bias)

    def _spans(self) -> Iterator[slice]:
        batch, frames, positions = self.shape
        step = max(1, self.joint.chunk // (batch * positions))
        return (slice(start, min(start + step, frames)) for start in range(0, frames, step))

    def _hidden(self, span: slice) -> Tensor:
        """Compute the hidden units (B, frames of the span, P, H) after dropout, not scaled."""
        hidden = _ACTIVATIONS[self.joint.activation](self.encoder[:, span, None] + self.prediction[:, None])
        return self.dropout.applied(hidden, span.start).to(self.joint.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


# ------------------------------------------------------------------------------------- used by both walks


def _count(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _inside(shape: tuple[int, int, int], frames: Tensor, symbols: Tensor) -> Tensor:
    """Mask (B, T, P), True where the cell is in its utterance's lattice."""
    frame_is = _count(shape[1], frames) < frames[:, None]
    position_is = _count(shape[2], symbols) <= symbols[:, None]
    return frame_is[:, :, None] & position_is[:, None, :]


def _lattice(given: _Given) -> tuple[int, int, int]:
    """The lattice's shape (B, T, P)."""
    return given.encoder.shape[0], given.encoder.shape[1], given.prediction.shape[1]


def _targets(given: _Given, blank: int) -> Tensor:
    """The next label (B, P) of each position; blank where there is none."""
    padded = F.pad(given.labels, (0, 1))
    beyond = _count(padded.shape[1], given.symbols) >= given.symbols[:, None]
    return padded.masked_fill(beyond, blank).long()


# -------------------------------------------------------------------------------------------------- dropout


def _dropout(joint: _Joint, given: _Given) -> _Dropout | _NoDropout:
    batch, _, width = given.encoder.shape
    return _Dropout(joint, batch, width, keys=given.keys) if joint.dropped else _NoDropout()


class _NoDropout:
    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        pass

    def applied(self, hidden: Tensor, first_frame: int) -> Tensor:
        return hidden


class _Dropout:
    """Drops a unit where its 16-bit draw, a hash of seed, cell and unit, is low; an int32 has two draws.

    The hash is MurmurHash3's finaliser with the multipliers of Wellons' lowbias32. No mask is stored, and
    the result does not depend on the padding or on which other cells are visited.
    """

    def __init__(self, joint: _Joint, batch: int, width: int, keys: Tensor) -> None:
        self.threshold = joint.dropped - 32768
        self.width = width
        low, high = keys[:1], keys[1:]
        self.row_keys = _mix(_mix(_count(batch, keys).int() + high) + low)
        self.word_keys = _mix(_mix(_count((width + 1) // 2, keys).int() + low) + high)
        self.words = keys.new_empty(joint.chunk, len(self.word_keys))
        self.spare = torch.empty_like(self.words) if joint.chunk <= _IN_CACHE else None

    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        """Set dropped units (N, H) to 0."""
        n = len(hidden)
        keys = self._cell_keys(self.row_keys[cells.row], cells.frame, cells.position)
        words = torch.add(keys[:, None], self.word_keys, out=self.words[:n])
        _mix_in_place(words, None if self.spare is None else self.spare[:n])
        hidden *= words.view(torch.int16)[:, : self.width].ge_(self.threshold)

    def applied(self, hidden: Tensor, first_frame: int) -> Tensor:
        """Return units (B, T, P, H) of all utterances from ``first_frame`` on, 0 where dropped."""
        frame, position = _count(hidden.shape[1], hidden), _count(hidden.shape[2], hidden)
        keys = self._cell_keys(self.row_keys[:, None, None], frame[:, None] + first_frame, position)
        words = _mix(keys[..., None] + self.word_keys)
        # both halves as the upper ones of an int32: Gaudi's graphs do not reinterpret bits
        draws = torch.stack((words * 65536, words), -1).flatten(-2)
        return hidden * (draws[..., : self.width] >= self.threshold * 65536)

    def _cell_keys(self, row_keys: Tensor, frame: Tensor, position: Tensor) -> Tensor:
        return _mix(frame.int() * 65536 + position.int() + row_keys)


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
    # by halves: a fifth of the traffic of the other form, which is 1.15 times as fast in a CPU's cache
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
    arcs = [field.clamp(min=_NEVER) for field in arcs]  # A bias of -inf makes a class impossible.
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
    return _Posteriors(  # torch.compile of torch 2.7 does not trace _replace
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
    """Forward-backward recursion by frames: label moves within a frame are one logcumsumexp.

    The recursion is in float64, so differences of cumulative sums keep fp32 precision. The backward
    variable is the forward variable of the lattice turned by 180 degrees; both run in one loop.
    """
    blank, label = blank.double(), label.double()
    batch, most, positions = blank.shape
    frame, position = _count(most, blank), _count(positions, blank)
    turned_frame = (frames[:, None] - 1 - frame).clamp(min=0)
    turned_position = (symbols[:, None] - position).clamp(min=0)
    turned_cell = (turned_frame[:, :, None] * positions + turned_position[:, None, :]).flatten(1)

    def turned(field: Tensor) -> Tensor:
        return field.flatten(1).gather(1, turned_cell).view(batch, most, positions)

    # arcs into each cell: from the previous frame, and from the previous position (no effect at position 0)
    by_blank = torch.stack((F.pad(blank, (0, 0, 1, -1)), turned(blank)))
    by_label = torch.stack((F.pad(label, (1, -1)), turned(label)))
    base = by_label.cumsum(-1)
    start = torch.full_like(base[:, :, :1], -torch.inf)
    start[..., 0] = 0
    # from the sums of a frame, less their base, to those of the next: one addition in each step of the loop
    steps = by_blank - base + torch.cat((torch.zeros_like(start), base[:, :, :-1]), 2)
    row, rows = start[:, :, 0], []
    for t in range(most):
        row = torch.logcumsumexp(row + steps[:, :, t], -1)
        rows.append(row)
    alpha, beta = torch.stack(rows, 2) + base
    beta = turned(beta)

    inside = _inside((batch, most, positions), frames, symbols)
    occupancy = (alpha + beta - beta[:, :1, :1]).exp().masked_fill(~inside, 0)
    leaves_by_label = inside & (position < symbols[:, None])[:, None]
    label_share = (label + F.pad(beta, (-1, 1)) - beta).exp().masked_fill(~leaves_by_label, 0)
    return _Posteriors((-beta[:, 0, 0]).masked_fill(frames == 0, 0), occupancy, label_share)


def _posteriors_by_diagonals(blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> _Posteriors:
    """Forward-backward recursion by diagonals t + u, normalised, since every path crosses each diagonal once.

    Normalised sums stay small, so fp32 is exact enough, and the occupancy is a softmax. Forward and backward
    run in one loop, the backward one over the padded lattice turned by 180 degrees.
    """
    batch, most, positions = blank.shape
    frame, position = _count(most, blank)[:, None], _count(positions, blank)
    last_frame, last_position = frames[:, None, None] - 1, symbols[:, None, None]
    no_label = (frame > last_frame) | (position >= last_position)
    is_last = (frame == last_frame) & (position == last_position)
    no_blank = ((frame >= last_frame) | (position > last_position)) & ~is_last
    blank = _skewed(blank.masked_fill(no_blank, _NEVER), _NEVER)
    label = _skewed(label.masked_fill(no_label, _NEVER), _NEVER)
    ends = _skewed(is_last.to(blank.dtype), 0)
    first = _count(ends.shape[1], ends)[:, None] + position == 0
    begins = first.to(ends.dtype).expand_as(ends)  # a write into a slice would break the recorded graph

    # arcs into each cell from the previous diagonal; a path's first cell has none
    from_blank = F.pad(blank, (0, 0, 1, -1), value=_NEVER) * (1 - begins)
    by_blank = torch.stack((from_blank, blank.flip(1, 2)))
    by_label = torch.stack((F.pad(label, (1, -1, 1, -1), value=_NEVER), label.flip(1, 2)))
    carries = 1 - torch.stack((begins, ends.flip(1, 2)))
    reached = torch.zeros_like(by_blank[:, :, 0])
    blanks, labels, totals, diagonals = [], [], [], []
    for d in range(most + positions - 1):
        one = torch.addcmul(by_blank[:, :, d], carries[:, :, d], reached)
        other = by_label[:, :, d] + F.pad(reached, (1, -1), value=_NEVER)
        total = torch.logaddexp(one, other)
        reached = total.log_softmax(-1)
        blanks.append(one[1])
        labels.append(other[1])
        totals.append(total[1])
        diagonals.append(reached)
    alpha, beta = (torch.stack([diagonal[way] for diagonal in diagonals], 1) for way in (0, 1))

    inside = _inside((batch, most, positions), frames, symbols)
    occupancy = _straight((alpha + beta.flip(1, 2)).softmax(-1), most) * inside
    odds = torch.stack(labels, 1) - torch.stack(blanks, 1)
    label_share = _straight(odds.flip(1, 2).sigmoid(), most) * ~no_label
    mass = ((torch.stack(totals, 1) - beta) * beta.exp()).sum(-1).flip(1)  # removed by normalisation
    beyond = _count(mass.shape[1], mass) > frames[:, None] - 1 + symbols[:, None]
    loss = -mass.masked_fill(beyond, 0).sum(-1)
    return _Posteriors(loss.masked_fill(frames == 0, 0), occupancy, label_share)


def _posteriors_of_durations(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> _Posteriors:
    """Backward recursion by diagonals t + u, then the occupancy forward from the shares that it gave.

    A share is the fraction of the paths through a cell that take an arc, a softmax over the cell's arcs. It
    compares probabilities of near cells only, and occupancies are sums of products of shares, without
    cancellation; so fp32 is exact enough. The arcs (2R) of a cell are blanks that lead 1 to R diagonals on,
    then labels that lead as far; those that do not exist have the share 0.
    """
    batch, most, positions = arcs[0].shape
    reach = joint.durations[-1] + 1
    onward, goes_on = _arcs_of_durations(joint, arcs, frames, symbols)
    window = onward.new_full((batch, reach, positions), _NEVER)  # of the diagonals that follow
    removed, logs = torch.zeros_like(window[:, 0, 0]), list[Tensor]()
    for d in range(len(onward) - 1, -1, -1):
        paths = onward[d] + torch.cat((window, F.pad(window, (-1, 1), value=_NEVER)), 1)
        logs.append(paths.log_softmax(1))
        total = (paths.amax(1) - logs[-1].amax(1)) * goes_on[d]  # logsumexp, which Gaudi has not
        window = torch.cat((total[:, None], window[:, :-1]), 1)
        if d % 4 == 0:  # numbers stay small; at each diagonal it would be a fifth of the operations
            highest = window.amax((1, 2))
            highest = highest * (highest > _NEVER / 2)
            window, removed = window - highest[:, None, None], removed + highest
    loss = -(window[:, 0, 0] + removed)
    has_none = (frames == 0) | (loss > -_NEVER / 2)

    shares = torch.stack(logs[::-1]).exp()  # (diagonals, B, 2R, P)
    begins = (_count(positions, loss) == 0) & ~has_none[:, None]
    pending = F.pad(begins.to(loss.dtype)[:, None], (0, 0, 0, reach - 1))
    occupied = []
    for share in shares.unbind():
        occupied.append(pending[:, 0])
        flow = occupied[-1][:, None] * share
        pending = F.pad(pending[:, 1:], (0, 0, 0, 1)) + flow[:, :reach] + F.pad(flow[:, reach:], (1, -1))

    def straight(field: Tensor) -> Tensor:
        return _straight(field.transpose(0, 1), most)

    occupancy = straight(torch.stack(occupied)) * _inside((batch, most, positions), frames, symbols)
    by_duration = (shares[:, :, reach + d] + (shares[:, :, d - 1] if d else 0) for d in joint.durations)
    return _Posteriors(
        loss.masked_fill(has_none, 0),
        occupancy,
        straight(shares[:, :, reach:].sum(2)),
        tuple(straight(field) for field in by_duration),
    )


def _arcs_of_durations(
    joint: _Joint, arcs: Sequence[Tensor], frames: Tensor, symbols: Tensor
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of all arcs by diagonals (T + P, B, 2R, P), and 0 (T + P, B, P) where a path has
    ended, else 1. The lattice has one frame more, in which paths end."""
    blank, label, *by_duration = arcs
    batch, most, positions = blank.shape
    frames_left, position = (frames[:, None] - _count(most, frames))[..., None], _count(positions, frames)
    no_label, is_complete = (compare(position, symbols[:, None, None]) for compare in (torch.ge, torch.eq))
    never = torch.full_like(blank, _NEVER)
    blanks, labels = [never] * (joint.durations[-1] + 1), [never] * (joint.durations[-1] + 1)
    for d, log_p in zip(joint.durations, by_duration, strict=True):
        log_p = log_p - joint.sigma
        labels[d] = (label + log_p).masked_fill((frames_left <= d) | no_label, _NEVER)
        if d:
            ends_or_stays = (frames_left > d) | ((frames_left == d) & is_complete)
            blanks[d - 1] = (blank + log_p).masked_fill(~ends_or_stays, _NEVER)
    padded = F.pad(torch.stack((*blanks, *labels), 1), (0, 0, 0, 1), value=_NEVER)
    onward = _skewed(padded.flatten(0, 1), _NEVER).view(batch, -1, most + positions, positions)
    is_end = (_count(most + 1, frames)[:, None] == frames[:, None, None]) & is_complete
    goes_on = 1 - _skewed(is_end.to(blank.dtype), 0)
    return onward.permute(2, 0, 1, 3).contiguous(), goes_on.transpose(0, 1)


def _skewed(field: Tensor, fill: float) -> Tensor:
    """Rearrange (B, T, P) to diagonals (B, T + P - 1, P): [d, u] is cell (d - u, u), or ``fill``."""
    batch, frames, positions = field.shape
    padded = F.pad(field.transpose(1, 2), (0, positions), value=fill).flatten(1)
    return padded[:, :-positions].reshape(batch, positions, frames + positions - 1).transpose(1, 2)


def _straight(diagonals: Tensor, frames: int) -> Tensor:
    """The inverse of ``_skewed``."""
    batch, steps, positions = diagonals.shape
    padded = F.pad(diagonals.transpose(1, 2).flatten(1), (0, positions))
    return padded.reshape(batch, positions, steps + 1)[:, :, :frames].transpose(1, 2)
