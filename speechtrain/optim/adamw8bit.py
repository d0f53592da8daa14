"""AdamW whose moments have 8 bits (Dettmers et al., 2022), by the bitsandbytes library."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from speechtrain.errors import ConfigError, MachineError
from speechtrain.optim.common import TensorwiseOptimizer, check_settings

_DEVICES = ("cpu", "cuda", "xpu")
_BLOCK = 256  # elements with a scale of their own; the library's only size
_WHOLE = 4096  # smaller tensors keep fp32 moments, as the library does


@cache
def _library() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels for other work
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError:
        fix = "pip install -e '.[memory]', or use optimizer=adamw"
        raise MachineError(f"optimizer=adamw8bit: bitsandbytes is not installed here; {fix}") from None


@cache
def _maps(device: torch.device) -> tuple[Tensor, ...]:
    """The values of the codes of both moments."""
    return tuple(_library().create_dynamic_map(signed=signed).to(device) for signed in (True, False))


class AdamW8bit(TensorwiseOptimizer):
    """AdamW with two bytes of state for a weight in place of eight; tensors below 4096 elements have fp32.

    The library's kernels update each tensor; its state is of plain tensors, which checkpoints hold exactly.
    Raises MachineError where the library is not installed, ConfigError for a device that it does not know.
    """

    can_shard = False  # rows of a tensor are not whole blocks

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        settings = {"lr": lr, "betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
        check_settings({**settings, "betas": betas})
        super().__init__(params, settings)
        kinds = {p.device.type for group in self.param_groups for p in group["params"]}
        if unknown := kinds.difference((*_DEVICES, "meta")):
            raise ConfigError(f"optimizer=adamw8bit does not run on {unknown.pop()}; use optimizer=adamw")
        _library()

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        (first, second), eps, decay = group["betas"], group["eps"], {"weight_decay": group["weight_decay"]}
        for p, gradient in zip(parameters, gradients, strict=True):
            state = self.state[p] = self.state[p] or _first(p.detach())
            state["step"] += 1
            at, (one, other) = (state["step"], float(group["lr"])), (state["exp_avg"], state["exp_avg_sq"])
            p, gradient = p.detach(), gradient.contiguous()
            if "scale" in state:
                maps, scales = _maps(p.device), (state["scale"], state["scale_sq"])
                settings = (first, second, 0.0, 0.0, eps, *at, *maps, *scales)
                _library().optimizer_update_8bit_blockwise(
                    "adam", gradient, p, one, other, *settings, **decay
                )
            else:
                settings = (one, first, eps, *at, other, second)
                _library().optimizer_update_32bit("adam", gradient, p, *settings, **decay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch. Raises ValueError for a state of another shape: a kernel would read beyond its end."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            own = _first(torch.empty_like(p, device="meta"))
            shapes = [{k: getattr(v, "shape", 0) for k, v in each.items()} for each in (state, own)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"the state of a parameter of shape {tuple(p.shape)} does not fit it")
            for name, value in own.items():  # torch has made codes the parameter's type, which holds each
                state[name] = state[name].to(value.dtype) if isinstance(value, Tensor) else state[name]


def _first(p: Tensor) -> dict[str, Any]:
    """The state of a parameter before its first update."""
    moments, is_narrow = ("exp_avg", "exp_avg_sq"), p.numel() >= _WHOLE
    dtype = torch.uint8 if is_narrow else torch.float32
    state: dict[str, Any] = {name: torch.zeros_like(p, dtype=dtype) for name in moments}
    for name in ("scale", "scale_sq") if is_narrow else ():
        state[name] = p.new_zeros(-(-p.numel() // _BLOCK), dtype=torch.float32)
    return {**state, "step": 0}
