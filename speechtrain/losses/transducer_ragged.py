"""The joint of the transducer loss in the cells within the lengths of each utterance."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from speechtrain.losses.transducer_joint import ACTIVATIONS, Walk, logit_differentials
from speechtrain.losses.transducer_lattice import (
    Cells,
    Gradients,
    Inputs,
    Joint,
    Posteriors,
    inside_mask,
    next_labels,
)
from speechtrain.losses.transducer_posteriors import posteriors_of_arcs


class RaggedWalk(Walk):
    """Visits the cells within the lengths, ``chunk`` at a time. Gradients visit only cells that matter.

    A cell is an index of the flattened lattice (B · T · P). Utterances are ``rows`` here, which is a slice
    of B.
    """

    def __init__(self, joint: Joint, inputs: Inputs) -> None:
        super().__init__(joint, inputs)
        self.encoder = inputs.encoder.to(joint.wide).flatten(0, 1)  # (B · T, H)
        self.prediction = inputs.prediction.to(joint.wide).flatten(0, 1)  # (B · P, H)
        self.targets = next_labels(inputs, joint.blank).flatten()  # (B · P,)
        # log-probabilities (B, T, P) of blank, next label and each duration
        self.arcs = [self.encoder.new_zeros(self.shape) for _ in range(2 + len(joint.durations))]
        inputs_of_gradients = (self.encoder, self.prediction, self.weight, self.bias)
        self.sums = Gradients(*(torch.zeros_like(x, dtype=joint.wide) for x in inputs_of_gradients))
        self.buffers = _Buffers(joint, inputs.weight)
        self.stored_logits = self.buffers.logits[:0]
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

    def posteriors(self, rows: slice) -> Posteriors:
        """Return the posteriors of the utterances ``rows``, whose arcs must be computed."""
        symbols = self.symbols[rows]
        arcs = [field[rows] for field in self.arcs]
        return posteriors_of_arcs(self.joint, arcs, self.frames[rows], symbols, is_static=False)

    def add_gradients(self, rows: slice, posteriors: Posteriors, upstream: Tensor) -> None:
        """Add the gradients of the utterances ``rows`` for the upstream gradients (B,)."""
        weight, *arcs = logit_differentials(self.joint, posteriors, [field[rows] for field in self.arcs])
        weight = weight * upstream[rows, None, None]
        # The comparison is negated so that NaN cells are visited, and gradient checks detect them.
        matters = ~(posteriors.occupancy < self.joint.skip_below) & (weight != 0)
        first_cell = rows.start * weight[0].numel()
        weights, *differences = (field.flatten() for field in (weight, *arcs))
        local_cells = matters.flatten().nonzero()[:, 0]  # counted from ``first_cell``
        is_stored = self.stored_row[local_cells + first_cell] >= 0
        for subset in (local_cells[is_stored], local_cells[~is_stored]):
            for chunk in torch.split(subset, self.joint.chunk):
                cells = self._cell_indices(chunk + first_cell)
                self._add_cell_gradients(cells, weights[chunk], [field[chunk] for field in differences])

    def gradients(self) -> Gradients:
        """Return the sums of the gradients, in the shapes of the inputs."""
        encoder, prediction, weight, bias = self.sums
        batch, frames, positions = self.shape
        encoder = encoder.view(batch, frames, -1)
        prediction = prediction.view(batch, positions, -1)
        return Gradients(encoder, prediction, weight * self.joint.scale, bias)

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
        inside = inside_mask((len(self.frames[rows]), *self.shape[1:]), self.frames[rows], self.symbols[rows])
        cells = inside.flatten().nonzero()[:, 0] + rows.start * inside[0].numel()
        is_stored = self._is_worth_storing(self._cell_indices(cells))
        stored_cells = cells[is_stored]
        self.stored_row[stored_cells] = torch.arange(len(stored_cells), device=stored_cells.device)
        for start, chunk in self._chunks(stored_cells):
            self._fill_cells(chunk, self.stored_logits[start : start + len(chunk)])
        for _, chunk in self._chunks(cells[~is_stored]):
            self._fill_cells(chunk, self.buffers.logits[: len(chunk)])

    def _chunks(self, cells: Tensor) -> list[tuple[int, Tensor]]:
        """Return the chunks of ``cells`` (·,), each with the index of its first cell in ``cells``."""
        # torch.split is not used, because it fails for no cells under the compiler of torch 2.11.
        size = self.joint.chunk
        return [(start, cells[start : start + size]) for start in range(0, len(cells), size)]

    def _cell_indices(self, cells: Tensor) -> Cells:
        return Cells.from_flat(cells, *self.shape[1:])

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

    def _is_worth_storing(self, cells: Cells) -> Tensor:
        """Return whether to store the logits (N,) of each cell. As many as fit the buffer are stored.

        The cells with the most paths through them are chosen. If all paths were equally likely, this would be
        the order of occupancy, and at random initialisation they nearly are. Later the order is a poor
        estimate, but then only few cells matter.
        """
        capacity = len(self.stored_logits)
        if len(cells.flat) <= capacity:
            return torch.ones_like(cells.flat, dtype=torch.bool)
        frames_left = self.frames[cells.row] - 1 - cells.frame
        symbols_left = self.symbols[cells.row] - cells.position
        # The number of paths is the number of ways to the cell times the number of ways from the cell on.
        log_ways_to = _log_binomial(cells.frame + cells.position, cells.position)
        log_ways_on = _log_binomial(frames_left + symbols_left, symbols_left)
        is_stored = torch.zeros_like(cells.flat, dtype=torch.bool)
        is_stored[(log_ways_to + log_ways_on).topk(capacity).indices] = True
        return is_stored

    def _add_cell_gradients(self, cells: Cells, weight: Tensor, differences: list[Tensor]) -> None:
        """Add the gradients of N cells to the sums.

        ``weight`` (N,) and ``differences``, each (N,), are the results of ``logit_differentials`` for the
        cells.
        """
        hidden = self._hidden(cells)
        gradient = self._logit_gradient(cells, hidden, weight, differences)
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
        self, cells: Cells, hidden: Tensor, weight: Tensor, differences: list[Tensor]
    ) -> Tensor:
        """Return the gradient (N, V + K) over the logits. ``hidden`` is (N, H)."""
        dtype = self.joint.dtype
        symbol_logits, _ = self.joint.split_logits(self._logits(cells, hidden))
        blank, label, *durations = (field.to(dtype) for field in differences)
        gradient = self.buffers.softmax[: len(hidden)]
        symbol_gradient, duration_gradient = self.joint.split_logits(gradient)
        torch.softmax(symbol_logits, 1, out=symbol_gradient)
        symbol_gradient.scatter_(1, self.targets[cells.position_row, None], label[:, None])
        symbol_gradient[:, self.joint.blank] = blank
        for column, difference in enumerate(durations):
            duration_gradient[:, column] = difference
        gradient *= weight[:, None].to(dtype)
        return gradient

    def _logits(self, cells: Cells, hidden: Tensor) -> Tensor:
        """Return the logits (N, V + K), from ``stored_logits`` if all N cells have a row there."""
        logits = self.buffers.logits[: len(hidden)]
        rows = self.stored_row[cells.flat]
        if bool((rows >= 0).all()):
            return torch.index_select(self.stored_logits, 0, rows, out=logits)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=logits)

    def _hidden(self, cells: Cells) -> Tensor:
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
        self.dropout.apply_(ACTIVATIONS[self.joint.activation](hidden), cells)
        return hidden.to(self.joint.dtype)


class _Buffers:
    """Tensors for the N cells of a chunk, with one row for each cell.

    All chunks use them, because the page faults of new memory cost more than the arithmetic of the softmax.
    """

    def __init__(self, joint: Joint, weight: Tensor) -> None:
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
