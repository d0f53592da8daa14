"""Uni-directional LSTM stacks with the reference's initialisation, then an optional LayerNorm.

Legend: B rows, T frames, I inputs, H units. The 4H gates of the units are in torch's order: input, forget,
candidate, output. The sums are the values that the sigmoids and the tanh turn into the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speechtrain import torch_private
from speechtrain.compute_policy import ComputePolicy, GraphFunction, PolicyAware, equal_parts
from speechtrain.nn.full_precision import at_least_fp32, full_precision

State = tuple[Tensor, Tensor]


class LSTM(nn.Module, PolicyAware):
    """``layers`` LSTM layers with dropout between them and on the output, then LayerNorm if ``layer_norm``.

    Shapes are batch-first: (B, T, ``inputs``) to (B, T, ``hidden``). The LSTM is uni-directional, so padding
    at a row's end never reaches the row's valid frames, and no packing is needed.

    Initialisation (MLPerf RNN-T reference): all weights and biases are PyTorch's uniform(±1/sqrt(hidden)).
    The forget-gate quarter of every input bias becomes ``forget_gate_bias``, and the same quarter of every
    recurrent bias becomes 0. Then all weights and biases are multiplied by ``init_scale``. LayerNorm follows
    the whole stack, as in Intel AIDK. AIDK skips it in evaluation by mistake, and here it always runs.

    The policy selects one of three implementations. They have the same parameters and results:

    - ``fused`` is torch's own LSTM, in fp32 for every precision.
    - ``layers`` is torch's own LSTM one layer at a time, if dropout is drawn. cuDNN's own dropout would set
      up its generator after each new seed, and the host would wait for that.
    - ``loop`` computes the inputs of all frames in one matmul and then iterates over the frames. Its matmuls
      may be bfloat16. Cells, gates and outputs stay fp32. On a device that is not static, ``loop`` serves
      training only, and calls that record no gradient use ``fused``.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        layers: int,
        dropout: float = 0.0,
        layer_norm: bool = False,
        forget_gate_bias: float = 1.0,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        dropout_between_layers = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(inputs, hidden, layers, dropout=dropout_between_layers)
        self.dropout = nn.Dropout(dropout)
        self.norm: nn.Module = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self._policy = ComputePolicy()
        with torch.no_grad():
            for name, parameter in self.lstm.named_parameters():
                forget_quarter = parameter[hidden : 2 * hidden]
                if name.startswith("bias_ih"):
                    forget_quarter.fill_(forget_gate_bias)
                elif name.startswith("bias_hh"):
                    forget_quarter.fill_(0.0)
                parameter.mul_(init_scale)

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Map (B, T, inputs) to (B, T, hidden) and the state (layers, B, hidden) × 2 after the last frame."""
        policy = self._policy
        loop_serves = policy.static_shapes or torch.is_grad_enabled()
        draws_dropout = self.training and self.lstm.dropout > 0
        run: Callable[[Tensor, State | None], tuple[Tensor, State]] = self.lstm
        if policy.lstm == "loop" and loop_serves:
            run = self._run_loop
        elif policy.lstm == "layers" and draws_dropout:
            run = self._run_layers
        # The stack runs without autocast. oneDNN's LSTM backward is slower in bf16 than in fp32 (1.4 to 2.1
        # times on an AVX512-BF16 machine), and the loop casts by itself.
        with full_precision(x.device):
            x = at_least_fp32(x).transpose(0, 1)  # time-major, so that no implementation copies it
            y, state = run(x, state)
            return self.norm(self.dropout(y.transpose(0, 1))), state

    def zeros(self, like: Tensor, rows: int) -> State:
        """Return the state before the first frame."""
        shape = self.lstm.num_layers, rows, self.lstm.hidden_size
        return like.new_zeros(shape), like.new_zeros(shape)

    def _run_layers(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Compute the same as ``self.lstm`` from (T, B, inputs), with dropout of torch between the layers."""
        zeros = x.new_zeros(1, x.shape[1], self.lstm.hidden_size)
        hiddens, cells = [], []
        for layer, weights in enumerate(self.lstm.all_weights):
            if layer:
                x = F.dropout(x, self.lstm.dropout, self.training)
            start = [zeros, zeros] if state is None else [part[layer : layer + 1] for part in state]
            # The last arguments: has biases, layers, dropout, training, bidirectional, batch first.
            x, hidden, cell = torch.lstm(
                x, start, list[Tensor](weights), True, 1, 0.0, self.training, False, False
            )
            hiddens.append(hidden)
            cells.append(cell)
        return x, (torch.cat(hiddens), torch.cat(cells))

    def _run_loop(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Compute the same as ``self.lstm`` from (T, B, inputs), frame by frame."""
        zeros = x.new_zeros(x.shape[1], self.lstm.hidden_size)
        hiddens, cells = [], []
        for layer, weights in enumerate(self.lstm.all_weights):
            if layer:
                x = F.dropout(x, self.lstm.dropout, self.training)
            start = (zeros, zeros) if state is None else (state[0][layer], state[1][layer])
            x, hidden, cell = _Layer.apply(x, *start, *weights, self._policy)  # type: ignore[no-untyped-call]
            hiddens.append(hidden)
            cells.append(cell)
        return x, (torch.stack(hiddens), torch.stack(cells))


class _Layer(torch.autograd.Function):
    """One LSTM layer: (T, B, I) and a state (B, H) × 2 to (T, B, H) and the last state.

    Only the recurrent matmul is computed frame by frame. The matmul of the inputs and the matmuls for the
    gradients of inputs and weights cover all frames at once. Autograd through a plain Python loop would add
    the weights' gradients frame by frame, and write a zero tensor of the whole sequence for each frame.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        hidden: Tensor,
        cell: Tensor,
        input_weight: Tensor,
        weight: Tensor,
        input_bias: Tensor,
        bias: Tensor,
        policy: ComputePolicy,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = x.dtype if policy.product_dtype == torch.float32 else policy.product_dtype
        flat_x = x.flatten(0, 1).to(dtype)
        input_sums = torch.mm(flat_x, input_weight.to(dtype).t())
        sums = input_sums.to(x.dtype) + (input_bias + bias)
        iterate = _forward_static if policy.static_shapes else _forward
        sums = sums.unflatten(0, x.shape[:2])  # type: ignore[no-untyped-call]
        gates, cells, hiddens, outputs = iterate(sums, weight.to(dtype), hidden, cell)
        ctx.save_for_backward(flat_x, input_weight, weight, gates, cells, hiddens[:-1].flatten(0, 1))
        ctx.policy = policy
        return outputs, outputs[-1].clone(), cells[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, output_gradients: Tensor, hidden_gradient: Tensor, cell_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        flat_x, input_weight, weight, gates, cells, flat_hiddens = ctx.saved_tensors
        x_gradient = None
        with full_precision(cells.device):
            iterate = _backward_static if ctx.policy.static_shapes else _backward
            derivatives = _derivatives(gates, cells)
            sum_gradients, hidden_gradient, cell_gradient = iterate(
                output_gradients, hidden_gradient, cell_gradient, derivatives, weight.to(flat_x.dtype)
            )
            flat_gradients = sum_gradients.flatten(0, 1)
            if ctx.needs_input_grad[0]:
                flat_x_gradient = torch.mm(flat_gradients, input_weight.to(flat_x.dtype)).to(cells.dtype)
                x_gradient = flat_x_gradient.unflatten(0, sum_gradients.shape[:2])  # type: ignore[no-untyped-call]
            input_weight_gradient = _weight_gradient(flat_gradients, flat_x, input_weight)
            weight_gradient = _weight_gradient(flat_gradients, flat_hiddens, weight)
            bias_gradient = flat_gradients.sum(0, dtype=cells.dtype)
        weight_gradients = input_weight_gradient, weight_gradient
        # Autograd would copy one tensor for both biases, and lazy tensors copy by way of the host.
        bias_gradients = bias_gradient, bias_gradient.clone()
        return x_gradient, hidden_gradient, cell_gradient, *weight_gradients, *bias_gradients, None


def _weight_gradient(sum_gradients: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of ``weight`` (4H, O) from N frames of inputs (N, O)."""
    return torch.mm(sum_gradients.t(), inputs).to(weight.dtype)


class _Derivatives(NamedTuple):
    """The derivatives of the cell and the output of each frame. They do not depend on the gradient."""

    sums: Tensor  # (T, B, 4H) d cell / d sum for the first three gates, d output / d sum for the output gate
    output_by_cell: Tensor  # (T, B, H) d output / d cell
    cell_by_previous: Tensor  # (T, B, H) d cell / d previous cell


_Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients of the sums (T, B, 4H) and of the state before the first frame (B, H) × 2."""


def _derivatives(gates: Tensor, cells: Tensor) -> _Derivatives:
    width = cells.shape[2]
    previous_cells, cell_tanh = cells[:-1], cells[1:].tanh()
    enter, forget = gates[..., :width], gates[..., width : 2 * width]
    candidate, output = gates[..., 2 * width : 3 * width], gates[..., 3 * width :]
    by_sums = (
        enter * (1 - enter) * candidate,
        forget * (1 - forget) * previous_cells,
        (1 - candidate * candidate) * enter,
        output * (1 - output) * cell_tanh,
    )
    return _Derivatives(torch.cat(by_sums, 2), output * (1 - cell_tanh * cell_tanh), forget)


def _frame_matmul(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies one frame (``rows``, I) by ``weight`` (O, I) transposed.

    The weight is packed once. A plain bf16 matmul reorders the weight at every frame: it takes 2.6 times the
    time at B=4 and H=1024, with equal results.
    """
    if weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed_weight = torch_private.reorder_linear_weight(weight.contiguous(), rows)
        return lambda x: torch_private.linear_pointwise(x, packed_weight, None, "none", [], "")
    return lambda x: torch.mm(x, weight.t())


def _forward(
    sums: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Iterate over the frames. Each frame is written in place.

    ``sums`` (T, B, 4H) holds the inputs' part of the sums, and the gates overwrite it. ``weight`` is (4H, H).

    Returns:
        The gates (T, B, 4H).
        The cells (T + 1, B, H). The first is ``cell``.
        The outputs in the dtype of ``weight`` (T + 1, B, H). The first is ``hidden``.
        The outputs (T, B, H).
    """
    cells = sums.new_empty(len(sums) + 1, *cell.shape)
    hiddens = torch.empty_like(cells, dtype=weight.dtype)
    cells[0], hiddens[0] = cell, hidden
    is_narrow = hiddens.dtype != cells.dtype
    outputs = torch.empty_like(cells[1:]) if is_narrow else hiddens[1:]
    # Each frame's matmul reads the weight in this order. A contiguous one is 1.5 times faster at B=4 in fp32.
    recurrent = weight.t() if is_narrow else weight.t().contiguous()
    matmul = _frame_matmul(weight, len(cell))
    width = cell.shape[1]
    for t, frame_sums in enumerate(sums):
        if is_narrow:
            frame_sums += matmul(hiddens[t])
        else:
            frame_sums.addmm_(hiddens[t], recurrent)
        # The sums (B, 4H) of the frame become its gates in place.
        enter_and_forget, candidate, output_gate = torch.split(frame_sums, [2 * width, width, width], 1)
        enter_and_forget.sigmoid_()
        candidate.tanh_()
        output_gate.sigmoid_()
        enter, forget = torch.split(enter_and_forget, width, 1)
        next_cell, output = cells[t + 1], outputs[t]
        torch.mul(forget, cells[t], out=next_cell)
        next_cell.addcmul_(enter, candidate)
        torch.tanh(next_cell, out=output)
        output.mul_(output_gate)
        if is_narrow:
            hiddens[t + 1] = outputs[t]
    return sums, cells, hiddens, outputs


def _forward_static(
    sums: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``_forward`` in few operations for each frame, without writes into slices.

    Lazy devices copy a whole tensor for each write into a slice of it.
    """
    recurrent = weight.t().contiguous()
    hidden = hidden.to(weight.dtype)
    first_cell, first_hidden = cell[None], hidden[None]
    frames = len(sums)
    count, size = equal_parts(frames)
    parts = []
    for part_sums in _split(sums, size, (0, count * size - frames)):
        part = _forward_part(part_sums, recurrent, hidden, cell)
        cell, hidden = part[1][-1], part[2][-1]
        parts.append(part)
    gates, cells, hiddens, outputs = (_concatenate(fields)[:frames] for fields in zip(*parts, strict=True))
    return gates, torch.cat((first_cell, cells)), torch.cat((first_hidden, hiddens)), outputs


@GraphFunction
def _forward_part(
    sums: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gates (t, B, 4H) of some frames, and their cells, hiddens and outputs (t, B, H).

    The hiddens are the outputs in the dtype of ``recurrent`` (H, 4H).
    """
    width = cell.shape[1]
    sigmoids, candidates, cells, hiddens, outputs = [], [], [], [], []
    for t in range(len(sums)):
        if recurrent.dtype == sums.dtype:
            frame_sums = torch.addmm(sums[t], hidden, recurrent)
        else:
            frame_sums = sums[t] + torch.mm(hidden, recurrent).to(sums.dtype)
        sigmoid = torch.sigmoid(frame_sums)
        candidate = torch.tanh(frame_sums[:, 2 * width : 3 * width])
        cell = torch.addcmul(sigmoid[:, width : 2 * width] * cell, sigmoid[:, :width], candidate)
        output = sigmoid[:, 3 * width :] * torch.tanh(cell)
        hidden = output.to(recurrent.dtype)
        sigmoids.append(sigmoid)
        candidates.append(candidate)
        cells.append(cell)
        hiddens.append(hidden)
        outputs.append(output)
    stacked = torch.stack(sigmoids)
    gates = stacked[..., : 2 * width], torch.stack(candidates), stacked[..., 3 * width :]
    return torch.cat(gates, 2), torch.stack(cells), torch.stack(hiddens), torch.stack(outputs)


def _split(field: Tensor, size: int, padding: tuple[int, int], value: float = 0.0) -> list[Tensor]:
    """Split a field (T, B, ·) into parts of ``size`` frames, after padding before and after its frames."""
    if any(padding):
        field = F.pad(field, (0, 0, 0, 0, *padding), value=value)
    return [field[start : start + size] for start in range(0, len(field), size)]


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _backward(
    output_gradients: Tensor,
    hidden_gradient: Tensor,
    cell_gradient: Tensor,
    derivatives: _Derivatives,
    weight: Tensor,
) -> _Gradients:
    """Iterate backwards over the frames, from the gradients of the outputs (T, B, H) and of the last state.

    The gradients of the sums have the dtype of ``weight`` (4H, H).
    """
    sum_gradients = torch.empty_like(derivatives.sums, dtype=weight.dtype)
    gate_gradients = sum_gradients.unflatten(2, (4, -1))  # type: ignore[no-untyped-call]
    gate_derivatives = derivatives.sums.unflatten(2, (4, -1))  # type: ignore[no-untyped-call]
    matmul = _frame_matmul(weight.t(), len(cell_gradient))
    for t in reversed(range(len(sum_gradients))):
        hidden_gradient = hidden_gradient + output_gradients[t]
        cell_gradient = cell_gradient.addcmul(hidden_gradient, derivatives.output_by_cell[t])
        torch.mul(gate_derivatives[t, :, :3], cell_gradient[:, None], out=gate_gradients[t, :, :3])
        torch.mul(gate_derivatives[t, :, 3], hidden_gradient, out=gate_gradients[t, :, 3])
        cell_gradient *= derivatives.cell_by_previous[t]
        hidden_gradient = matmul(sum_gradients[t]).to(cell_gradient.dtype)
    return sum_gradients, hidden_gradient, cell_gradient


def _backward_static(
    output_gradients: Tensor,
    hidden_gradient: Tensor,
    cell_gradient: Tensor,
    derivatives: _Derivatives,
    weight: Tensor,
) -> _Gradients:
    """Compute ``_backward`` without writes into slices."""
    frames = len(output_gradients)
    count, size = equal_parts(frames)
    padding = count * size - frames, 0
    fields = [_split(field, size, padding) for field in (output_gradients, *derivatives[:2])]
    # The gradient of the cell passes through the padding.
    fields.append(_split(derivatives.cell_by_previous, size, padding, value=1.0))
    parts = []
    for part_fields in zip(*(field[::-1] for field in fields), strict=True):
        part, hidden_gradient, cell_gradient = _backward_part(
            part_fields[0], hidden_gradient, cell_gradient, _Derivatives(*part_fields[1:]), weight
        )
        parts.append(part)
    sum_gradients = _concatenate(parts[::-1])[-frames:]
    if padding[0]:
        hidden_gradient = torch.mm(sum_gradients[0], weight).to(cell_gradient.dtype)
    return sum_gradients, hidden_gradient, cell_gradient


@GraphFunction
def _backward_part(
    output_gradients: Tensor,
    hidden_gradient: Tensor,
    cell_gradient: Tensor,
    derivatives: _Derivatives,
    weight: Tensor,
) -> _Gradients:
    sum_gradients: list[Tensor] = []
    for t in reversed(range(len(output_gradients))):
        hidden_gradient = hidden_gradient + output_gradients[t]
        cell_gradient = torch.addcmul(cell_gradient, hidden_gradient, derivatives.output_by_cell[t])
        gradients = torch.cat((cell_gradient, cell_gradient, cell_gradient, hidden_gradient), 1)
        sum_gradients.append((derivatives.sums[t] * gradients).to(weight.dtype))
        cell_gradient = cell_gradient * derivatives.cell_by_previous[t]
        hidden_gradient = torch.mm(sum_gradients[-1], weight).to(cell_gradient.dtype)
    return torch.stack(sum_gradients[::-1]), hidden_gradient, cell_gradient
