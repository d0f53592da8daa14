"""The exact transducer (RNN-T) loss of a ReLU joint, without its (B, T, U + 1, V) lattice.

Joint, dropout, softmax and loss are one autograd function. Forward walks the lattice in chunks of
cells and keeps two log-probabilities a cell, of blank and of the next label. The recursion over
those gives every cell's occupancy, the probability that an alignment passes through it. Backward
computes the joint again where the occupancy matters, a third of the cells at random initialisation
and a fourteenth once an alignment has formed, and forms the gradients of all inputs there.

Shape legend: B utterances, T frames, U labels, P = U + 1 positions, H joint width, V symbols, N cells
of a chunk. Cell (b, t, u) means: frame t, with u labels already emitted. A path leaves it by blank, to
(b, t + 1, u), or by its next label, to (b, t, u + 1); the last cell's blank ends the path.

Loss: Graves, "Sequence transduction with recurrent neural networks" (2012), sections 2.4 and 2.5.
FastEmit: Yu et al., "FastEmit: low-latency streaming ASR with sequence-level emission
regularization" (ICASSP 2021).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    fastemit: float = 0.0,
    compute_dtype: torch.dtype = torch.float32,
    skip_below: float = 1e-6,
    chunk: int = 1024,
    static: bool = False,
) -> Tensor:
    """Negative log-likelihood (B,) of each utterance under ``Linear(dropout(relu(encoder + prediction)))``.

    ``encoder`` (B, T, H) and ``prediction`` (B, U + 1, H) are the joint's two projections, ``weight``
    (V, H) and ``bias`` (V,) its output layer, ``labels`` (B, U) the targets. What lies beyond the lengths
    is never looked at, NaN included. An utterance of no frames (a filler row) has loss 0 and no gradient.
    The result is fp32 (float64 for a float64 ``compute_dtype``) and can be differentiated once.

    ``dropout`` is the joint's, to the nearest 1/65536 and scaled by the exact keep rate; pass 0 in
    evaluation. Its mask is ``joint_dropout_mask``: a function of ``seed`` (an int, or an int64 tensor on
    the device) and of the cell, whichever cells are visited.
    ``fastemit`` counts the gradient of label arcs 1 + ``fastemit`` times; the loss's value stays.
    ``compute_dtype`` is that of the matrix products: float32, bfloat16 or float64. Softmax, recursion and
    sums over cells are at least fp32 whatever it is, and autocast has no say here. On a CPU without
    bfloat16 instructions, where such products are several times slower, bfloat16 means float32.

    On a CPU the result is the same to the bit from run to run at a fixed number of threads.

    Cells of occupancy under ``skip_below`` add nothing to the gradient; 0 visits all, and gradients then
    agree with float64 to 1e-6 instead of 3e-6. About ``chunk`` cells are in memory at once.
    ``static`` computes every cell of the padded lattice in shapes that depend on no data and reads
    nothing back from the device; ``skip_below`` has no effect there.

    Raises ValueError for shapes, lengths, labels or rates that cannot be (where ``static``, lengths and
    labels are not checked: reading them would stall a device).
    """
    if not (dropout >= 0 and round(dropout * 65536) < 65536):
        raise ValueError(f"dropout is {dropout}; it is at least 0 and less than 1")
    if fastemit < 0 or chunk < 1:
        raise ValueError(f"fastemit is {fastemit} and chunk {chunk}; they are at least 0 and at least 1")
    # an int moves as data, not as a constant of the graph: a constant would compile it anew at each step
    keys = torch.as_tensor(seed, dtype=torch.int64).reshape(1).view(torch.int32).to(encoder.device)
    given = _Given(encoder, prediction, weight, bias, labels, encoder_lengths, label_lengths, keys)
    _check_shapes(given)
    if not static:
        _check_contents(given, blank)
    chunk = min(chunk, encoder.shape[0] * encoder.shape[1] * prediction.shape[1])
    joint = _Joint(blank, dropout, fastemit, _product_dtype(compute_dtype, encoder), skip_below, chunk)
    walk = _StaticWalk if static else _RaggedWalk
    loss: Tensor = _TransducerLoss.apply(*given, joint, walk)  # type: ignore[no-untyped-call]
    return loss


def joint_dropout_mask(
    batch: int, frames: int, positions: int, hidden: int, *, rate: float, seed: int
) -> tuple[Tensor, float]:
    """The mask (B, T, P, H) of ``transducer_loss``, True where kept, and the scale of what is kept.

    Held whole, unlike there: for tests and small lattices."""
    joint = _Joint(0, rate, 0.0, torch.float32, 0.0, 1)
    drop = _Dropout(joint, batch, hidden, torch.tensor([seed]).view(torch.int32))
    return drop.applied(torch.ones(batch, frames, positions, hidden), 0) > 0, joint.scale


def transducer_loss_bytes(
    batch: int, frames: int, positions: int, hidden: int, vocabulary: int, *, chunk: int = 1024
) -> int:
    """Predicted peak bytes of an fp32 forward and backward beyond the inputs (bfloat16 needs less)."""
    gradients = 4 * (batch * (frames + positions) * hidden + 2 * vocabulary * hidden)
    weight = 4 * vocabulary * hidden
    recursion = 176 * batch * frames * positions  # float64, both directions; gone when the gradients come
    fields = 20 * batch * frames * positions
    cells = 4 * chunk * (4 * hidden + 2 * vocabulary)
    return weight + fields + cells + max(recursion, gradients)


class _Given(NamedTuple):
    encoder: Tensor  # (B, T, H)
    prediction: Tensor  # (B, P, H)
    weight: Tensor  # (V, H)
    bias: Tensor  # (V,)
    labels: Tensor  # (B, U)
    frames: Tensor  # (B,)
    symbols: Tensor  # (B,)
    keys: Tensor  # (2,) int32, the halves of the seed


def _check_shapes(given: _Given) -> None:
    batch, frames, hidden = given.encoder.shape
    if not (batch and frames):
        raise ValueError(f"encoder has shape {tuple(given.encoder.shape)}: no utterance or no frame")
    positions, vocabulary = given.labels.shape[1] + 1, len(given.bias)
    expected = [(batch, positions, hidden), (vocabulary, hidden), (batch, positions - 1), (batch,), (batch,)]
    shapes = [tuple(x.shape) for x in (given.prediction, given.weight, *given[4:7])]
    if shapes != expected:
        raise ValueError(f"prediction, weight, labels, lengths have shapes {shapes}, expected {expected}")


def _check_contents(given: _Given, blank: int) -> None:
    most, longest, vocabulary = given.labels.shape[1], given.encoder.shape[1], len(given.bias)
    misfit = (given.frames < 0) | (given.frames > longest) | (given.symbols < 0) | (given.symbols > most)
    if bool(misfit.any()):
        lengths = f"{given.frames.tolist()} and {given.symbols.tolist()}"
        raise ValueError(f"lengths {lengths} do not fit {longest} frames and {most} labels")
    impossible = (given.labels < 0) | (given.labels >= vocabulary) | (given.labels == blank)
    if bool((impossible & (_count(most, given.labels) < given.symbols[:, None])).any()):
        raise ValueError(f"a label is the blank {blank} or outside the vocabulary of {vocabulary}")


def _product_dtype(requested: torch.dtype, tensor: Tensor) -> torch.dtype:
    if requested not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"compute_dtype is {requested}; it is float32, bfloat16 or float64")
    # torch 2.13 without AVX512: 3 to 80 times the time of fp32, by layout of the operands
    lacking = tensor.is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if requested == torch.bfloat16 and lacking else requested


@dataclass(frozen=True)
class _Joint:
    """What forward and backward must agree on."""

    blank: int
    dropout: float
    fastemit: float
    dtype: torch.dtype  # of matrix products
    skip_below: float
    chunk: int

    @property
    def wide(self) -> torch.dtype:
        """Of softmaxes and sums."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def dropped(self) -> int:
        """How many of a draw's 65536 values drop a unit."""
        return round(self.dropout * 65536)

    @property
    def scale(self) -> float:
        """Of kept units. It multiplies the weight instead, which has fewer elements."""
        return 65536 / (65536 - self.dropped)


class _Posteriors(NamedTuple):
    loss: Tensor  # (B,)
    occupancy: Tensor  # (B, T, P) probability that a path passes through the cell; 0 outside the lattice
    label_share: Tensor  # (B, T, P) of the paths through the cell, the share that leaves by its label


class _TransducerLoss(torch.autograd.Function):
    """Of ``_Given``, a ``_Joint`` and the class of the walk."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, joint, walk_type = arguments
        given = _Given(*tensors)
        with _without_autocast(given.encoder):
            walk: _Walk = walk_type(joint, given)
            blank, label = walk.log_probabilities()
            loss, occupancy, label_share = walk.posteriors(blank, label)
            # FastEmit counts label arcs 1 + fastemit times, so a cell that paths leave by them weighs more
            weight = 1 + joint.fastemit * label_share
            fields = (
                occupancy * weight,
                blank.exp() - (1 - label_share) / weight,
                label.exp() - (1 + joint.fastemit) * label_share / weight,
            )
        ctx.save_for_backward(*given, *(field.to(joint.wide) for field in fields))
        ctx.joint, ctx.walk_type = joint, walk_type
        return loss.to(joint.wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, occupancy, blank_gradient, label_gradient = ctx.saved_tensors
        with _without_autocast(upstream):
            walk: _Walk = ctx.walk_type(ctx.joint, _Given(*tensors))
            gradients = walk.gradients(occupancy, blank_gradient, label_gradient, upstream[:, None, None])
        cast = [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, tensors, strict=False)]
        return (*cast, *[None] * 6)


def _without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class _Walk(ABC):
    """A way through the lattice's cells."""

    @abstractmethod
    def log_probabilities(self) -> tuple[Tensor, Tensor]:
        """Of blank and of the next label, (B, T, P) each; arbitrary but finite outside the lattice."""

    @abstractmethod
    def posteriors(self, blank: Tensor, label: Tensor) -> _Posteriors:
        """The sum over all alignments, and what each cell contributes to it."""

    @abstractmethod
    def gradients(
        self, occupancy: Tensor, blank_gradient: Tensor, label_gradient: Tensor, upstream: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of encoder, prediction, weight and bias.

        A cell's gradient over its logits is its occupancy times (softmax - the shares of its arcs);
        ``blank_gradient`` and ``label_gradient`` (B, T, P) are the two elements where that is not the
        softmax itself, computed in full precision since they cancel.
        """


# ------------------------------------------------------------------------------- the walk over ragged cells


class _RaggedWalk(_Walk):
    """Visits the cells within the lengths, and in backward those that matter, as lists of at most ``chunk``.

    Buffers are reused: fresh megabytes cost more in page faults than the softmax costs in arithmetic.
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
        vocabulary, width = given.weight.shape
        self.frame_units = self.encoder.new_empty(joint.chunk, width)
        self.position_units = self.encoder.new_empty(joint.chunk, width)
        self.logits = self.weight.new_empty(joint.chunk, vocabulary)

    def log_probabilities(self) -> tuple[Tensor, Tensor]:
        blank = self.encoder.new_zeros(self.shape).flatten()
        label = torch.zeros_like(blank)
        wide = self.logits.to(self.joint.wide)  # the same memory where products are wide
        normalised = torch.empty_like(wide)
        for cells in self._chunks(_inside(self.shape, self.frames, self.symbols).flatten()):
            n = len(cells.flat)
            logits = self._logits(self._hidden(cells))
            if logits.dtype != wide.dtype:
                logits = wide[:n].copy_(logits)
            log_p = torch.log_softmax(logits, 1, out=normalised[:n])
            blank[cells.flat] = log_p[:, self.joint.blank]
            label[cells.flat] = log_p.gather(1, self.targets[cells.position_row, None])[:, 0]
        return blank.view(self.shape), label.view(self.shape)

    def posteriors(self, blank: Tensor, label: Tensor) -> _Posteriors:
        return _posteriors_by_rows(blank, label, self.frames, self.symbols)

    def gradients(
        self, occupancy: Tensor, blank_gradient: Tensor, label_gradient: Tensor, upstream: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        encoder, prediction = torch.zeros_like(self.encoder), torch.zeros_like(self.prediction)
        weight = torch.zeros_like(self.weight, dtype=self.joint.wide)
        bias = torch.zeros_like(self.bias, dtype=self.joint.wide)
        softmax = torch.empty_like(self.logits)
        units = self.weight.new_empty(self.joint.chunk, weight.shape[1])
        scale = (occupancy * upstream).flatten()
        blank_gradient, label_gradient = blank_gradient.flatten(), label_gradient.flatten()
        # spelled so that a NaN is visited, and seen by who checks gradients
        matters = ~(occupancy.flatten() < self.joint.skip_below) & (scale != 0)
        for cells in self._chunks(matters):
            n = len(cells.flat)
            hidden = self._hidden(cells)
            gradient = torch.softmax(self._logits(hidden), 1, out=softmax[:n])
            of_label = label_gradient[cells.flat, None].to(self.joint.dtype)
            gradient.scatter_(1, self.targets[cells.position_row, None], of_label)
            gradient[:, self.joint.blank] = blank_gradient[cells.flat].to(self.joint.dtype)
            gradient *= scale[cells.flat, None].to(self.joint.dtype)
            bias += gradient.sum(0, dtype=self.joint.wide)
            _add_product(weight, gradient.t(), hidden)
            of_hidden = torch.mm(gradient, self.weight, out=units[:n])
            of_hidden *= hidden.gt_(0)  # what passed the ReLU and was not dropped
            of_hidden = of_hidden.to(self.joint.wide)
            encoder.index_add_(0, cells.frame_row, of_hidden)
            prediction.index_add_(0, cells.position_row, of_hidden)
        batch, frames, positions = self.shape
        encoder, prediction = encoder.view(batch, frames, -1), prediction.view(batch, positions, -1)
        return encoder, prediction, weight * self.joint.scale, bias

    def _chunks(self, chosen: Tensor) -> Iterator[_Cells]:
        for flat in torch.split(chosen.nonzero()[:, 0], self.joint.chunk):
            yield _Cells.at(flat, *self.shape[1:])

    def _hidden(self, cells: _Cells) -> Tensor:
        """ReLU units (N, H) after dropout, not scaled."""
        n = len(cells.flat)
        hidden = torch.index_select(self.encoder, 0, cells.frame_row, out=self.frame_units[:n])
        hidden += torch.index_select(self.prediction, 0, cells.position_row, out=self.position_units[:n])
        self.dropout.apply_(hidden.relu_(), cells)
        return hidden.to(self.joint.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        return torch.addmm(self.bias, hidden, self.weight.t(), out=self.logits[: len(hidden)])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right)


class _Cells(NamedTuple):
    """N cells by where they lie; all (N,)."""

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


# --------------------------------------------------------------------------------- the walk in fixed shapes


class _StaticWalk(_Walk):
    """Visits every cell of the padded lattice, a few frames of all utterances at a time.

    Only operations that the rehearsal device records in one graph: no index_add, where, xor or shift.
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

    def log_probabilities(self) -> tuple[Tensor, Tensor]:
        pieces = []
        for span in self._spans():
            log_p = self._logits(self._hidden(span)).to(self.joint.wide).log_softmax(-1)
            targets = self.targets[:, None, :, None].expand(-1, log_p.shape[1], -1, -1)
            pieces.append((log_p[..., self.joint.blank], log_p.gather(-1, targets)[..., 0]))
        blank, label = zip(*pieces, strict=True)
        return torch.cat(blank, 1), torch.cat(label, 1)

    def posteriors(self, blank: Tensor, label: Tensor) -> _Posteriors:
        return _posteriors_by_diagonals(blank, label, self.frames, self.symbols)

    def gradients(
        self, occupancy: Tensor, blank_gradient: Tensor, label_gradient: Tensor, upstream: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        symbol = torch.arange(len(self.weight), device=self.weight.device)
        is_blank = (symbol == self.joint.blank).to(self.joint.wide)
        is_label = (symbol == self.targets[:, None, :, None]).to(self.joint.wide) * (1 - is_blank)
        is_other = 1 - is_blank - is_label
        scale = occupancy * upstream
        encoder, prediction = [], torch.zeros_like(self.prediction)
        weight = torch.zeros_like(self.weight, dtype=self.joint.wide)
        bias = torch.zeros_like(self.bias, dtype=self.joint.wide)
        for span in self._spans():
            hidden = self._hidden(span)
            softmax = self._logits(hidden).to(self.joint.wide).softmax(-1)
            of_blank, of_label = blank_gradient[:, span, :, None], label_gradient[:, span, :, None]
            gradient = softmax * is_other + of_blank * is_blank + of_label * is_label
            gradient = (gradient * scale[:, span, :, None]).to(self.joint.dtype)
            bias = bias + gradient.sum((0, 1, 2), dtype=self.joint.wide)
            product = gradient.flatten(0, 2).t() @ hidden.flatten(0, 2)
            weight = weight + product.to(self.joint.wide)
            of_hidden = (gradient @ self.weight).to(self.joint.wide) * (hidden > 0)
            encoder.append(of_hidden.sum(2))
            prediction = prediction + of_hidden.sum(1)
        return torch.cat(encoder, 1), prediction, weight * self.joint.scale, bias

    def _spans(self) -> Iterator[slice]:
        batch, frames, positions = self.shape
        step = max(1, self.joint.chunk // (batch * positions))
        return (slice(start, min(start + step, frames)) for start in range(0, frames, step))

    def _hidden(self, span: slice) -> Tensor:
        """ReLU units (B, frames of the span, P, H) after dropout, not scaled."""
        hidden = (self.encoder[:, span, None] + self.prediction[:, None]).relu()
        return self.dropout.applied(hidden, span.start).to(self.joint.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


# -------------------------------------------------------------------------------------- what both walks use


def _count(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _inside(shape: tuple[int, int, int], frames: Tensor, symbols: Tensor) -> Tensor:
    """(B, T, P), True where the cell is part of its utterance's lattice."""
    frame_is = _count(shape[1], frames) < frames[:, None]
    position_is = _count(shape[2], symbols) <= symbols[:, None]
    return frame_is[:, :, None] & position_is[:, None, :]


def _lattice(given: _Given) -> tuple[int, int, int]:
    """(B, T, P)."""
    return given.encoder.shape[0], given.encoder.shape[1], given.prediction.shape[1]


def _targets(given: _Given, blank: int) -> Tensor:
    """(B, P), the label that leaves each position; blank where there is none."""
    padded = F.pad(given.labels, (0, 1))
    beyond = _count(padded.shape[1], given.symbols) >= given.symbols[:, None]
    return padded.masked_fill(beyond, blank).long()


# -------------------------------------------------------------------------------------------------- dropout


def _dropout(joint: _Joint, given: _Given) -> _Dropout | _NoDropout:
    batch, _, width = given.encoder.shape
    return _Dropout(joint, batch, width, given.keys) if joint.dropped else _NoDropout()


class _NoDropout:
    """Drops nothing."""

    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        pass

    def applied(self, hidden: Tensor, first_frame: int) -> Tensor:
        return hidden


class _Dropout:
    """Drops a unit where its draw of 16 bits, a hash of seed, cell and unit, is low; two draws a word.

    The hash has the form of MurmurHash3's finaliser with the multipliers of Wellons' lowbias32. Nothing
    is stored and nothing depends on the padding or on which other cells are visited.
    """

    def __init__(self, joint: _Joint, batch: int, width: int, keys: Tensor) -> None:
        self.threshold = joint.dropped - 32768
        self.width = width
        low, high = keys[:1], keys[1:]
        self.row_keys = _mix(_mix(_count(batch, keys).int() + high) + low)
        self.word_keys = _mix(_mix(_count((width + 1) // 2, keys).int() + low) + high)
        self.words = keys.new_empty(joint.chunk, len(self.word_keys))
        self.spare = torch.empty_like(self.words)

    def apply_(self, hidden: Tensor, cells: _Cells) -> None:
        """Set dropped units (N, H) to 0."""
        n = len(hidden)
        keys = self._cell_keys(self.row_keys[cells.row], cells.frame, cells.position)
        words = torch.add(keys[:, None], self.word_keys, out=self.words[:n])
        _mix_in_place(words, self.spare[:n])
        hidden *= words.view(torch.int16)[:, : self.width].ge_(self.threshold)

    def applied(self, hidden: Tensor, first_frame: int) -> Tensor:
        """Units (B, T, P, H) of all utterances from one frame on, 0 where dropped."""
        frame, position = _count(hidden.shape[1], hidden), _count(hidden.shape[2], hidden)
        keys = self._cell_keys(self.row_keys[:, None, None], frame[:, None] + first_frame, position)
        words = _mix(keys[..., None] + self.word_keys)
        return hidden * (words.view(torch.int16)[..., : self.width] >= self.threshold)

    def _cell_keys(self, row_keys: Tensor, frame: Tensor, position: Tensor) -> Tensor:
        return _mix(frame.int() * 65536 + position.int() + row_keys)


_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # the second as int32


def _mix(word: Tensor) -> Tensor:
    """A hash of each int32; by sums, products and views, which the rehearsal device records in a graph."""
    for multiplier in _MULTIPLIERS:
        word = _fold(word) * multiplier
    return _fold(word)


def _fold(word: Tensor) -> Tensor:
    """``word ^ (word >>> 16)`` as x ^ y = x + y - 2 (x & y)."""
    high = word.contiguous().view(torch.int16)[..., 1::2].int() & 0xFFFF  # little-endian
    return word + high - 2 * (word & high)


def _mix_in_place(word: Tensor, spare: Tensor) -> None:
    """``_mix`` without new memory, in a third of the time."""
    for multiplier in _MULTIPLIERS:
        _fold_in_place(word, spare)
        word *= multiplier
    _fold_in_place(word, spare)


def _fold_in_place(word: Tensor, spare: Tensor) -> None:
    torch.bitwise_right_shift(word, 16, out=spare)
    spare &= 0xFFFF
    word ^= spare


# ----------------------------------------------------------------------------------------------- recursions


def _posteriors_by_rows(blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> _Posteriors:
    """A frame is a row: within it, paths move by labels only, which a cumulative sum makes one logcumsumexp.

    In float64, where differences of cumulative sums lose nothing that fp32 would keep. The backward
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

    # into each cell: from the frame before it, and from the position before it (at position 0, of no effect)
    by_blank = torch.stack((F.pad(blank, (0, 0, 1, -1)), turned(blank)))
    by_label = torch.stack((F.pad(label, (1, -1)), turned(label)))
    base = by_label.cumsum(-1)
    relative = by_blank - base
    row = torch.full_like(base[:, :, 0], -torch.inf)
    row[..., 0] = 0
    rows = []
    for t in range(most):
        row = torch.logcumsumexp(row + relative[:, :, t], -1) + base[:, :, t]
        rows.append(row)
    alpha, beta = torch.stack(rows, 2)
    beta = turned(beta)

    inside = _inside((batch, most, positions), frames, symbols)
    occupancy = (alpha + beta - beta[:, :1, :1]).exp().masked_fill(~inside, 0)
    leaves_by_label = inside & (position < symbols[:, None])[:, None]
    label_share = (label + F.pad(beta, (-1, 1)) - beta).exp().masked_fill(~leaves_by_label, 0)
    return _Posteriors((-beta[:, 0, 0]).masked_fill(frames == 0, 0), occupancy, label_share)


def _posteriors_by_diagonals(blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> _Posteriors:
    """A diagonal t + u is a step: every path crosses each once, so its probabilities may be normalised there.

    That keeps fp32 exact enough (the sums stay small), and lets the occupancy be a softmax. Paths to and
    from the diagonal run in one loop, the second over the padded lattice turned by 180 degrees.
    """
    batch, most, positions = blank.shape
    frame, position = _count(most, blank)[:, None], _count(positions, blank)
    last_frame, last_position = frames[:, None, None] - 1, symbols[:, None, None]
    no_label = (frame > last_frame) | (position >= last_position)
    is_last = (frame == last_frame) & (position == last_position)
    no_blank = ((frame >= last_frame) | (position > last_position)) & (is_last == 0)
    blank = _skewed(blank.masked_fill(no_blank, _NEVER), _NEVER)
    label = _skewed(label.masked_fill(no_label, _NEVER), _NEVER)
    ends = _skewed(is_last.to(blank.dtype), 0)
    begins = torch.zeros_like(ends)
    begins[:, 0, 0] = 1

    # into each cell, from the diagonal before it; a path that begins there comes from nowhere
    from_blank = F.pad(blank, (0, 0, 1, -1), value=_NEVER) * (1 - begins)
    by_blank = torch.stack((from_blank, blank.flip(1, 2)))
    by_label = torch.stack((F.pad(label, (1, -1, 1, -1), value=_NEVER), label.flip(1, 2)))
    carries = 1 - torch.stack((begins, ends.flip(1, 2)))
    reached = torch.zeros_like(by_blank[:, :, 0])
    odds, totals, diagonals = [], [], []
    for d in range(most + positions - 1):
        one = by_blank[:, :, d] + carries[:, :, d] * reached
        other = by_label[:, :, d] + F.pad(reached, (1, -1), value=_NEVER)
        total = torch.maximum(one, other) + F.softplus(-(one - other).abs())
        reached = total.log_softmax(-1)
        odds.append((other - one)[1])
        totals.append(total[1])
        diagonals.append(reached)
    alpha, beta = (torch.stack([diagonal[way] for diagonal in diagonals], 1) for way in (0, 1))

    inside = _inside((batch, most, positions), frames, symbols)
    occupancy = _straight((alpha + beta.flip(1, 2)).softmax(-1), most) * inside
    label_share = _straight(torch.stack(odds, 1).flip(1, 2).sigmoid(), most) * (no_label == 0)
    mass = ((torch.stack(totals, 1) - beta) * beta.exp()).sum(-1).flip(1)  # what normalising took out
    beyond = _count(mass.shape[1], mass) > frames[:, None] - 1 + symbols[:, None]
    loss = -mass.masked_fill(beyond, 0).sum(-1)
    return _Posteriors(loss.masked_fill(frames == 0, 0), occupancy, label_share)


def _skewed(field: Tensor, fill: float) -> Tensor:
    """(B, T, P) as diagonals (B, T + P - 1, P): element [d, u] is cell (d - u, u), or ``fill``."""
    batch, frames, positions = field.shape
    padded = F.pad(field.transpose(1, 2), (0, positions), value=fill).flatten(1)
    return padded[:, :-positions].reshape(batch, positions, frames + positions - 1).transpose(1, 2)


def _straight(diagonals: Tensor, frames: int) -> Tensor:
    """The inverse of ``_skewed``."""
    batch, steps, positions = diagonals.shape
    padded = F.pad(diagonals.transpose(1, 2).flatten(1), (0, positions))
    return padded.reshape(batch, positions, steps + 1)[:, :, :frames].transpose(1, 2)
