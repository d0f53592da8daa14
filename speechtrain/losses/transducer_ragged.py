"""The joint of the transducer loss in the cells within the lengths of each utterance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speechtrain.losses.transducer_durations import posteriors_of_durations
from speechtrain.losses.transducer_frames import posteriors_by_frames
from speechtrain.losses.transducer_joint import ACTIVATIONS, JointNetwork, arcs_with_penalty, gradient_factors
from speechtrain.losses.transducer_lattice import (
    Cells,
    Gradients,
    Inputs,
    Settings,
    inside_mask,
    next_labels,
)
from speechtrain.losses.transducer_recursion import Posteriors


class RaggedJoint(JointNetwork):
    """Computes the losses and the sums of the gradients in the cells within the lengths of each utterance.

    ``chunk`` cells are computed at a time, and gradients only in cells whose occupancy matters. A cell is an
    index of the flattened lattice (B · T · P). A group of utterances is a slice of B.
    """

    def __init__(self, settings: Settings, inputs: Inputs) -> None:
        super().__init__(settings, inputs)
        self.encoder = inputs.encoder.to(settings.wide).flatten(0, 1)  # (B · T, H)
        self.prediction = inputs.prediction.to(settings.wide).flatten(0, 1)  # (B · P, H)
        self.targets = next_labels(inputs, settings.blank).flatten()  # (B · P,)
        # log-probabilities (B, T, P) of blank, next label and each duration
        arcs_of_cell = 2 + len(settings.durations)
        self.arcs = [self.encoder.new_zeros(self.shape) for _ in range(arcs_of_cell)]
        inputs_of_gradients = (self.encoder, self.prediction, self.weight, self.bias)
        self.sums = Gradients(*(torch.zeros_like(x, dtype=settings.wide) for x in inputs_of_gradients))
        self.buffers = _Buffers(settings, inputs.weight)
        # The logits (rows, V + K) of some cells of the present group. Without gradients it has no rows.
        self.stored_logits = self.buffers.logits.new_empty(0, len(self.bias))
        self.stores_all = False  # whether the logits of all cells of the present group are stored
        # The row of each cell (B · T · P) in ``stored_logits``, or -1. Each group uses the rows of
        # ``stored_logits`` again. The entries of earlier groups are then wrong, but are not read again.
        self.stored_row = torch.full((self.arcs[0].numel(),), -1, device=self.bias.device)

    def losses(self, with_gradients: bool) -> Tensor:
        """Return the losses (B,).

        With ``with_gradients``, also add the gradients to the sums, for an upstream gradient of 1.
        """
        losses = self.encoder.new_zeros(self.shape[0])
        if with_gradients:
            logits = self.buffers.logits
            capacity = self.settings.keep // (logits.shape[1] * logits.itemsize)
            self.stored_logits = logits.new_empty(min(capacity, len(self.stored_row)), logits.shape[1])
        for group in self._groups():
            self._fill_arcs(group)
            posteriors = self.posteriors(group)
            losses[group] = posteriors.loss.to(losses.dtype)
            if with_gradients:
                self.add_gradients(group, posteriors, torch.ones_like(losses))
        return losses

    def posteriors(self, group: slice) -> Posteriors:
        """Return the posteriors of the utterances ``group``, whose arcs must be computed."""
        lengths = self.frame_counts[group], self.label_counts[group]
        arcs: Sequence[Tensor] = [log_p[group] for log_p in self.arcs]
        arcs = arcs_with_penalty(self.settings, arcs, self.frame_counts[group])
        if self.settings.durations:
            return posteriors_of_durations(self.settings, [log_p.double() for log_p in arcs], *lengths)
        blank, label = arcs
        return posteriors_by_frames(blank, label, *lengths)

    def add_gradients(self, group: slice, posteriors: Posteriors, upstream: Tensor) -> None:
        """Add the gradients of the utterances ``group`` for the upstream gradients (B,)."""
        arcs = [log_p[group] for log_p in self.arcs]
        weight, *differences = gradient_factors(self.settings, posteriors, arcs)
        weight = weight * upstream[group, None, None]
        # The comparison is negated so that NaN cells are computed, and gradient checks detect them.
        matters = ~(posteriors.occupancy < self.settings.skip_below) & (weight != 0)
        first_cell = group.start * weight[0].numel()
        # The factors of the group are indexed by ``local``, which is counted from ``first_cell``.
        flat_weight = weight.flatten()
        flat_differences = [difference.flatten() for difference in differences]
        local_cells = matters.flatten().nonzero()[:, 0]
        subsets = [(local_cells, self._read_logits)]
        if not self.stores_all:
            has_row = self.stored_row[local_cells + first_cell] >= 0
            subsets = [
                (local_cells[has_row], self._read_logits),
                (local_cells[~has_row], self._compute_logits),
            ]
        for subset, logits_of in subsets:
            for _, local in self._chunks(subset):
                cells = self._cell_indices(local + first_cell)
                hidden = self._hidden(cells)
                logits, _ = self.settings.split_logits(logits_of(cells, hidden))
                chunk_differences = [difference[local] for difference in flat_differences]
                gradient = self._logit_gradient(cells, logits, flat_weight[local], chunk_differences)
                self._add_cell_gradients(cells, hidden, gradient)

    def gradients(self) -> Gradients:
        """Return the sums of the gradients, in the shapes of the inputs."""
        encoder, prediction, weight, bias = self.sums
        batch, frames, positions = self.shape
        encoder = encoder.view(batch, frames, -1)
        prediction = prediction.view(batch, positions, -1)
        return Gradients(encoder, prediction, weight * self.settings.scale, bias)

    def _groups(self) -> Iterator[slice]:
        """Yield groups of consecutive utterances. Each group costs one recursion.

        The logits of a group fit the buffer, unless it is a single long utterance.
        """
        start = group_cells = 0
        cell_counts = self.frame_counts * (self.label_counts + 1)
        for utterance, cells in enumerate(cell_counts.tolist()):
            if utterance > start and group_cells + cells > len(self.stored_logits):
                yield slice(start, utterance)
                start, group_cells = utterance, 0
            group_cells += cells
        yield slice(start, self.shape[0])

    def _fill_arcs(self, group: slice) -> None:
        """Compute the log-probabilities of the arcs, and store the logits that fit the buffer."""
        _, frames, positions = self.shape
        shape = (group.stop - group.start, frames, positions)
        inside = inside_mask(shape, self.frame_counts[group], self.label_counts[group])
        first_cell = group.start * frames * positions
        cells = inside.flatten().nonzero()[:, 0] + first_cell
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
        size = self.settings.chunk
        return [(start, cells[start : start + size]) for start in range(0, len(cells), size)]

    def _cell_indices(self, flat: Tensor) -> Cells:
        _, frames, positions = self.shape
        return Cells.from_flat(flat, frames, positions)

    def _fill_cells(self, flat: Tensor, logits: Tensor) -> None:
        """Compute the arcs of the cells ``flat`` (N,), and write them to ``self.arcs``.

        The logits (N, V + K) of the cells are written to ``logits``.
        """
        cells = self._cell_indices(flat)
        buffers = self.buffers
        torch.addmm(self.bias, self._hidden(cells), self.weight.t(), out=logits)
        if logits.dtype != buffers.wide_logits.dtype:
            logits = buffers.wide_logits[: len(logits)].copy_(logits)
        symbol_logits, duration_logits = self.settings.split_logits(logits)
        log_p_buffer, _ = self.settings.split_logits(buffers.normalised[: len(logits)])
        log_p = torch.log_softmax(symbol_logits, 1, out=log_p_buffer)
        label = log_p.gather(1, self.targets[cells.prediction_row, None])[:, 0]
        arcs = (log_p[:, self.settings.blank], label, *duration_logits.log_softmax(1).unbind(1))
        for lattice_log_p, cell_log_p in zip(self.arcs, arcs, strict=True):
            lattice_log_p.view(-1)[cells.flat] = cell_log_p

    def _is_worth_storing(self, cells: Cells) -> Tensor:
        """Return a mask (N,) of the cells whose logits are stored. As many as fit the buffer are stored.

        The cells with the most paths through them are selected. At random initialisation all paths are nearly
        equally likely, so these are the cells of the highest occupancy. Later the number of paths is a poor
        estimate of the occupancy, but then only few cells matter.
        """
        capacity = len(self.stored_logits)
        frames_left = self.frame_counts[cells.utterance] - 1 - cells.frame
        labels_left = self.label_counts[cells.utterance] - cells.position
        # The number of paths is the number of ways to the cell times the number of ways from the cell on.
        log_ways_to = _log_binomial(cells.frame + cells.position, cells.position)
        log_ways_on = _log_binomial(frames_left + labels_left, labels_left)
        most_paths = (log_ways_to + log_ways_on).topk(capacity).indices
        is_stored = torch.zeros_like(cells.flat, dtype=torch.bool)
        is_stored[most_paths] = True
        return is_stored

    def _add_cell_gradients(self, cells: Cells, hidden: Tensor, gradient: Tensor) -> None:
        """Add the gradients of N cells with ``hidden`` (N, H) to the sums.

        ``gradient`` (N, V + K) is the gradient over the logits.
        """
        wide = self.settings.wide
        self.sums.bias.add_(gradient.sum(0, dtype=wide))
        if wide == self.settings.dtype:
            self.sums.weight.addmm_(gradient.t(), hidden)
        else:
            self.sums.weight.add_(torch.mm(gradient.t(), hidden))
        unit_gradient = torch.mm(gradient, self.weight, out=self.buffers.unit_gradients[: len(hidden)])
        slope = self.slope_(hidden)
        if self.settings.activation != "relu":  # Dropped units of relu have the slope 0 already.
            self.dropout.drop_in_place(slope, cells)
        unit_gradient *= slope
        unit_gradient = unit_gradient.to(wide)
        self.sums.encoder.index_add_(0, cells.encoder_row, unit_gradient)
        self.sums.prediction.index_add_(0, cells.prediction_row, unit_gradient)

    def _logit_gradient(
        self, cells: Cells, symbol_logits: Tensor, weight: Tensor, differences: list[Tensor]
    ) -> Tensor:
        """Return the gradient (N, V + K) over the logits. ``symbol_logits`` is (N, V).

        ``weight`` (N,) and ``differences``, each (N,), are the results of ``gradient_factors`` for the
        cells.
        """
        dtype = self.settings.dtype
        blank, label, *durations = (difference.to(dtype) for difference in differences)
        gradient = self.buffers.softmax[: len(symbol_logits)]
        symbol_gradient, duration_gradient = self.settings.split_logits(gradient)
        torch.softmax(symbol_logits, 1, out=symbol_gradient)
        symbol_gradient.scatter_(1, self.targets[cells.prediction_row, None], label[:, None])
        symbol_gradient[:, self.settings.blank] = blank
        for column, difference in enumerate(durations):
            duration_gradient[:, column] = difference
        gradient *= weight[:, None].to(dtype)
        return gradient

    def _read_logits(self, cells: Cells, hidden: Tensor) -> Tensor:
        """Return the logits (N, V + K) of cells from ``stored_logits``."""
        # A cell outside the lattice has no row. Its gradient is computed only if its weight is NaN.
        rows = self.stored_row[cells.flat].clamp(min=0)
        return torch.index_select(self.stored_logits, 0, rows, out=self.buffers.logits[: len(hidden)])

    def _compute_logits(self, cells: Cells, hidden: Tensor) -> Tensor:
        """Return the logits (N, V + K) of cells with ``hidden`` (N, H)."""
        return torch.addmm(self.bias, hidden, self.weight.t(), out=self.buffers.logits[: len(hidden)])

    def _hidden(self, cells: Cells) -> Tensor:
        """Return the hidden units (N, H) after dropout. The weight contains the scale of dropout."""
        count = len(cells.flat)
        buffers = self.buffers
        hidden = torch.index_select(self.encoder, 0, cells.encoder_row, out=buffers.frame_units[:count])
        position_units = buffers.position_units[:count]
        torch.index_select(self.prediction, 0, cells.prediction_row, out=position_units)
        if self.settings.activation == "relu":
            # The sum is rounded to the matmuls' type before relu, which has the same result as rounding after
            # relu, and is faster. For tanh, the result would differ.
            hidden = torch.add(hidden, position_units, out=buffers.units[:count])
        else:
            hidden += position_units
        self.dropout.drop_in_place(ACTIVATIONS[self.settings.activation](hidden), cells)
        return hidden.to(self.settings.dtype)


class _Buffers:
    """Tensors for the N cells of a chunk, with one row for each cell.

    All chunks use them, because the page faults of new memory cost more than the arithmetic of the softmax.
    """

    def __init__(self, settings: Settings, weight: Tensor) -> None:
        outputs, width = weight.shape
        self.frame_units = weight.new_empty(settings.chunk, width, dtype=settings.wide)
        self.position_units = weight.new_empty(settings.chunk, width, dtype=settings.wide)
        self.units, self.unit_gradients = weight.new_empty(2, settings.chunk, width, dtype=settings.dtype)
        self.logits = weight.new_empty(settings.chunk, outputs, dtype=settings.dtype)
        self.normalised = weight.new_empty(settings.chunk, outputs, dtype=settings.wide)
        # If the dtypes are equal, these two tensors share the memory of the two tensors above.
        self.wide_logits = self.logits.to(settings.wide)
        self.softmax = self.normalised.to(settings.dtype)


def _log_binomial(n: Tensor, k: Tensor) -> Tensor:
    """Return the logarithm of the number of ways to choose k of n objects."""
    return torch.lgamma(n + 1.0) - torch.lgamma(k + 1.0) - torch.lgamma(n - k + 1.0)
