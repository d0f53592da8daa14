"""Uni-directional LSTM stacks with the reference's initialisation, then an optional LayerNorm.

B rows, T frames, I inputs, H units, 4H their gates in torch's order: input, forget, candidate, output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speechtrain import torch_private
from speechtrain.compute_policy import ComputePolicy, PolicyAware
from speechtrain.nn.full_precision import at_least_fp32, full_precision

State = tuple[Tensor, Tensor]


class LSTM(nn.Module, PolicyAware):
    """``layers`` LSTM layers with dropout between them and on the output, then LayerNorm if ``layer_norm``.

    Shapes are batch-first: (B, T, ``inputs``) to (B, T, ``hidden``). Uni-directional, so padding at
    a row's end never reaches its valid frames and no packing is needed.

    Initialisation (MLPerf RNN-T reference): PyTorch's uniform(±1/sqrt(hidden)); the forget-gate
    quarter of every input bias becomes ``forget_gate_bias`` and that of every recurrent bias 0;
    then all weights and biases are multiplied by ``init_scale``. LayerNorm follows the whole stack,
    as in Intel AIDK (which skips it in evaluation by mistake; here it always runs).

    The implementations have the same parameters and results. ``fused`` is torch's own, in fp32 for every
    precision. ``layers`` is the same one layer at a time where it draws dropout: cuDNN's own dropout would
    set up its generator anew, and be waited for, after each seed. ``loop`` iterates over the frames, after
    one product for the inputs of all frames; its products may be bfloat16 (cells, gates and outputs stay
    fp32). On a device that is not static, ``loop`` serves training only, and calls that record no gradient
    use ``fused``.
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
        self.lstm = nn.LSTM(inputs, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.norm: nn.Module = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self._policy = ComputePolicy()
        with torch.no_grad():
            for name, parameter in self.lstm.named_parameters():
                if name.startswith("bias"):
                    forget = parameter[hidden : 2 * hidden]
                    forget.fill_(forget_gate_bias if name.startswith("bias_ih") else 0.0)
                parameter.mul_(init_scale)

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Map (B, T, inputs) to (B, T, hidden) and the state (layers, B, hidden) × 2 after the last frame."""
        policy = self._policy
        is_loop = policy.lstm == "loop" and (policy.static_shapes or torch.is_grad_enabled())
        # no autocast inside: oneDNN's LSTM backward is slower in bf16 than in fp32 (1.4 to 2.1 times
        # on an AVX512-BF16 machine), and the loop casts by itself
        with full_precision(x.device):
            x = at_least_fp32(x).transpose(0, 1)  # time-major: no copy inside
            draws = self.training and self.lstm.dropout > 0
            run = self._loop if is_loop else self._layers if policy.lstm == "layers" and draws else self.lstm
            y, state = run(x, state)
            return self.norm(self.dropout(y.transpose(0, 1))), state

    def zeros(self, like: Tensor, rows: int) -> State:
        """The state before the first frame."""
        shape = self.lstm.num_layers, rows, self.lstm.hidden_size
        return like.new_zeros(shape), like.new_zeros(shape)

    def _layers(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Compute the same as ``self.lstm`` from (T, B, inputs), with dropout of torch between the layers."""
        start = x.new_zeros(1, x.shape[1], self.lstm.hidden_size)
        after = []
        for layer, weights in enumerate(self.lstm.all_weights):
            if layer:
                x = F.dropout(x, self.lstm.dropout, self.training)
            before = [start, start] if state is None else [part[layer : layer + 1] for part in state]
            # has biases, layers, dropout, training, both directions, batch first
            x, *last = torch.lstm(x, before, list[Tensor](weights), True, 1, 0.0, self.training, False, False)
            after.append(last)
        hidden, cell = (torch.cat(parts) for parts in zip(*after, strict=True))
        return x, (hidden, cell)

    def _loop(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Compute the same as ``self.lstm`` from (T, B, inputs)."""
        start = x.new_zeros(x.shape[1], self.lstm.hidden_size)
        hiddens, cells = [], []
        for layer, weights in enumerate(self.lstm.all_weights):
            if layer:
                x = F.dropout(x, self.lstm.dropout, self.training)
            before = (start, start) if state is None else (state[0][layer], state[1][layer])
            x, hidden, cell = _Layer.apply(x, *before, *weights, self._policy)  # type: ignore[no-untyped-call]
            hiddens.append(hidden)
            cells.append(cell)
        return x, (torch.stack(hiddens), torch.stack(cells))


class EndSegment(torch.autograd.Function):
    """Identity of tensors that ends a lazy device's graph in forward and, at the same place, in backward."""

    @staticmethod
    def forward(ctx: Any, mark_step: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark_step = mark_step
        ctx.set_materialize_grads(False)
        mark_step()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.mark_step()
        return (None, *gradients)


class _Layer(torch.autograd.Function):
    """One LSTM layer: (T, B, I) and a state (B, H) × 2 to (T, B, H) and the last state.

    Only the recurrent product is computed frame by frame. The product of the inputs and the products for
    the gradients of inputs and weights cover all frames at once. Autograd through a plain Python loop
    would add the weights' gradients by frames, and write a zero tensor of the whole sequence for each frame.
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
        frames, rows, inputs = x.shape
        products = x.dtype if policy.product_dtype == torch.float32 else policy.product_dtype
        narrow = x.reshape(frames * rows, inputs).to(products)
        gates = torch.mm(narrow, input_weight.to(products).t()).to(x.dtype) + (input_bias + bias)
        walk = _forward_static if policy.static_shapes else _forward
        gates, cells, hiddens, outputs = walk(gates.view(frames, rows, -1), weight.to(products), hidden, cell)
        ctx.save_for_backward(narrow, input_weight, weight, gates, cells, hiddens)
        ctx.policy = policy
        last = frames - 1
        return outputs, outputs[last].clone(), cells[frames].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor | None, ...]:
        narrow, input_weight, weight, gates, cells, hiddens = ctx.saved_tensors
        products, (frames, rows, width) = narrow.dtype, outputs.shape
        with full_precision(outputs.device):
            walk = _backward_static if ctx.policy.static_shapes else _backward
            slopes = _Slopes.of(gates, cells)
            by_gates, hidden, cell = walk(outputs, hidden, cell, slopes, weight.to(products))
            flat = by_gates.view(frames * rows, 4 * width)
            inputs = None
            if ctx.needs_input_grad[0]:
                inputs = torch.mm(flat, input_weight.to(products)).to(outputs.dtype).view(frames, rows, -1)
            transposed = flat.t()
            by_input = torch.mm(transposed, narrow).to(weight.dtype)
            by_hidden = torch.mm(transposed, hiddens[:frames].reshape(frames * rows, width)).to(weight.dtype)
            by_bias = flat.sum(0, dtype=outputs.dtype)
        # two tensors: one tensor for both biases would be copied, and lazy tensors copy by way of the host
        return inputs, hidden, cell, by_input, by_hidden, by_bias, by_bias.clone(), None


class _Slopes(NamedTuple):
    """The factors of backward at each frame; none depends on the gradient."""

    gates: Tensor  # (T, B, 4H) d cell / d sum of the first three gates; d output / d sum of the output gate
    cell: Tensor  # (T, B, H) d output / d cell
    forget: Tensor  # (T, B, H) d cell / d previous cell

    @classmethod
    def of(cls, gates: Tensor, cells: Tensor) -> _Slopes:
        width = cells.shape[2]
        before, squashed = cells[:-1], cells[1:].tanh()
        enter, forget = gates[..., :width], gates[..., width : 2 * width]
        candidate, output = gates[..., 2 * width : 3 * width], gates[..., 3 * width :]
        by_gates = (
            enter * (1 - enter) * candidate,
            forget * (1 - forget) * before,
            (1 - candidate * candidate) * enter,
            output * (1 - output) * squashed,
        )
        return cls(torch.cat(by_gates, 2), output * (1 - squashed * squashed), forget)


def _product(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """The product of each frame's (``rows``, I) by ``weight`` (O, I) transposed, prepared once.

    Plain bf16 products reorder the weight at every frame: 2.6 times the time at B=4 and H=1024, with equal
    results.
    """
    if weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        packed = torch_private.reorder_linear_weight(weight.contiguous(), rows)
        return lambda x: torch_private.linear_pointwise(x, packed, None, "none", [], "")
    return lambda x: torch.mm(x, weight.t())


def _forward(
    gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Iterate over the frames, with every result written in place.

    ``gates`` (T, B, 4H) holds the inputs' part of the gates' sums and is overwritten by the gates;
    ``weight`` is (4H, H). Returns the gates; the cells (T + 1, B, H) and the outputs in the products'
    dtype (T + 1, B, H), both with the given state first; and the outputs (T, B, H).
    """
    frames, rows, width = len(gates), *cell.shape
    cells = gates.new_empty(frames + 1, rows, width)
    hiddens = torch.empty_like(cells, dtype=weight.dtype)
    cells[0], hiddens[0] = cell, hidden
    is_narrow = hiddens.dtype != cells.dtype
    outputs = torch.empty_like(cells[1:]) if is_narrow else hiddens[1:]
    squashed = torch.empty_like(cells[0])
    # contiguous, since every frame's product reads it in this order: 1.5 times faster at B=4 in fp32
    recurrent = weight.t() if is_narrow else weight.t().contiguous()
    product = _product(weight, rows)
    for t in range(frames):
        sums, after = gates[t], cells[t + 1]
        if is_narrow:
            sums += product(hiddens[t])
        else:
            sums.addmm_(hiddens[t], recurrent)
        enter_and_forget, candidate, output = torch.split(sums, [2 * width, width, width], 1)
        enter_and_forget.sigmoid_()
        candidate.tanh_()
        output.sigmoid_()
        torch.mul(sums[:, width : 2 * width], cells[t], out=after)
        after.addcmul_(sums[:, :width], candidate)
        torch.mul(output, torch.tanh(after, out=squashed), out=outputs[t])
        if is_narrow:
            hiddens[t + 1] = outputs[t]
    return gates, cells, hiddens, outputs


def _forward_static(
    gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_forward`` in few operations a frame, without writes into slices, which lazy devices copy whole."""
    width = cell.shape[1]
    recurrent, is_narrow = weight.t().contiguous(), weight.dtype != gates.dtype
    hidden = hidden.to(recurrent.dtype)
    squashed, candidates, cells, hiddens, outputs = [], [], [cell], [hidden], []
    for t in range(len(gates)):
        if is_narrow:
            sums = gates[t] + torch.mm(hidden, recurrent).to(gates.dtype)
        else:
            sums = torch.addmm(gates[t], hidden, recurrent)
        one, candidate = torch.sigmoid(sums), torch.tanh(sums[:, 2 * width : 3 * width])
        cell = torch.addcmul(one[:, width : 2 * width] * cell, one[:, :width], candidate)
        output = one[:, 3 * width :] * torch.tanh(cell)
        hidden = output.to(recurrent.dtype)
        squashed.append(one)
        candidates.append(candidate)
        cells.append(cell)
        hiddens.append(hidden)
        outputs.append(output)
    all_squashed = torch.stack(squashed)
    parts = all_squashed[..., : 2 * width], torch.stack(candidates), all_squashed[..., 3 * width :]
    return torch.cat(parts, 2), torch.stack(cells), torch.stack(hiddens), torch.stack(outputs)


def _backward(
    outputs: Tensor, hidden: Tensor, cell: Tensor, slopes: _Slopes, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Iterate backwards over the frames: from the gradients of the outputs (T, B, H) and of the last state
    to those of the gates' sums (T, B, 4H), in the dtype of ``weight`` (4H, H), and of the given state."""
    rows, width = cell.shape
    by_gates = torch.empty_like(slopes.gates, dtype=weight.dtype)
    cell, product = cell.clone(), _product(weight.t(), rows)
    for t in range(len(by_gates) - 1, -1, -1):
        hidden = hidden + outputs[t]
        cell.addcmul_(hidden, slopes.cell[t])
        slope, result = slopes.gates[t].view(rows, 4, width), by_gates[t].view(rows, 4, width)
        torch.mul(slope[:, :3], cell[:, None], out=result[:, :3])
        torch.mul(slope[:, 3], hidden, out=result[:, 3])
        cell *= slopes.forget[t]
        hidden = product(by_gates[t]).to(cell.dtype)
    return by_gates, hidden, cell


def _backward_static(
    outputs: Tensor, hidden: Tensor, cell: Tensor, slopes: _Slopes, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``_backward`` without writes into slices."""
    by_gates: list[Tensor] = []
    for t in range(len(outputs) - 1, -1, -1):
        hidden = hidden + outputs[t]
        cell = torch.addcmul(cell, hidden, slopes.cell[t])
        sums = (slopes.gates[t] * torch.cat((cell, cell, cell, hidden), 1)).to(weight.dtype)
        by_gates.append(sums)
        cell = cell * slopes.forget[t]
        hidden = torch.mm(sums, weight).to(cell.dtype)
    return torch.stack(by_gates[::-1]), hidden, cell
