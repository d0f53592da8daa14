"""AdamW with moments of 8 bits (Dettmers et al., 2022), by the bitsandbytes library."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from speechtrain.errors import ConfigError, MissingPackage
from speechtrain.optim.common import TensorwiseOptimizer, check_settings

_KERNELS = ("cpu", "cuda", "xpu")  # torch's device types that the library has kernels for
_BLOCK = 256  # elements that share a scale. The library supports only this size.
_MIN_QUANTISED = 4096  # Smaller tensors have fp32 moments, as in the library.


@cache
def _library() -> Any:
    # The library warns about missing kernels that this optimizer does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError:
        fix = "Run pip install -e '.[memory]', or use optimizer=adamw"
        raise MissingPackage(f"optimizer=adamw8bit: bitsandbytes is not installed here. {fix}") from None


@cache
def _maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values (256,) of the 8-bit codes of the first and of the second moment."""
    create_map = _library().create_dynamic_map
    return create_map(signed=True).to(device), create_map(signed=False).to(device)


class AdamW8bit(TensorwiseOptimizer):
    """AdamW with two bytes of state for each weight instead of eight.

    Tensors below 4096 elements have fp32 moments. The library's kernels update each tensor. The state
    consists of plain tensors, which checkpoints store exactly.

    Raises MissingPackage if the library is not installed.
    """

    can_shard = False  # Shards are rows of a tensor, which need not be whole blocks.

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings(settings)
        settings["betas"] = (betas[0], betas[1])  # ``betas`` may be a list from the config.
        super().__init__(params, settings)
        _library()

    def check_device(self, kind: str) -> None:
        """Raise ConfigError if the library has no kernels for ``kind``, a device type of torch."""
        if kind not in _KERNELS:
            raise ConfigError(f"optimizer=adamw8bit does not run on device={kind}. Use optimizer=adamw")

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for p, gradient in zip(parameters, gradients, strict=True):
            if not self.state[p]:  # The state of a parameter is {} before its first update.
                self.state[p] = _initial_state(p.detach())
            state = self.state[p]
            state["step"] += 1
            weights = p.detach()
            gradient = gradient.contiguous()
            settings = {
                "state1": state["exp_avg"],
                "state2": state["exp_avg_sq"],
                "beta1": beta1,
                "beta2": beta2,
                "eps": group["eps"],
                "step": state["step"],
                "lr": float(group["lr"]),
                "weight_decay": group["weight_decay"],
            }
            if "scale" not in state:
                _library().optimizer_update_32bit("adam", gradient, weights, **settings)
                continue
            mean_codes, square_codes = _maps(p.device)
            _library().optimizer_update_8bit_blockwise(
                "adam",
                gradient,
                weights,
                **settings,
                beta3=0.0,  # Adam does not use beta3 and alpha.
                alpha=0.0,
                qmap1=mean_codes,
                qmap2=square_codes,
                absmax1=state["scale"],
                absmax2=state["scale_sq"],
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does.

        Raises ValueError for a state of another shape, because a kernel would read beyond its end.
        """
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            template = _initial_state(torch.empty_like(p, device="meta"))
            if _shapes(state) != _shapes(template):
                raise ValueError(f"the state of a parameter of shape {tuple(p.shape)} does not fit it")
            # torch has cast the codes to the parameter's dtype, which represents each code exactly.
            for name, tensor in template.items():
                if isinstance(tensor, Tensor):
                    state[name] = state[name].to(tensor.dtype)


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of each tensor of a state, and 0 for a number."""
    return {name: getattr(tensor, "shape", 0) for name, tensor in state.items()}


def _initial_state(p: Tensor) -> dict[str, Any]:
    """Return the state of a parameter before its first update."""
    is_quantised = p.numel() >= _MIN_QUANTISED
    dtype = torch.uint8 if is_quantised else torch.float32
    state: dict[str, Any] = {"exp_avg": torch.zeros_like(p, dtype=dtype)}
    state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype)
    if is_quantised:
        blocks = -(-p.numel() // _BLOCK)
        state["scale"] = p.new_zeros(blocks, dtype=torch.float32)
        state["scale_sq"] = p.new_zeros(blocks, dtype=torch.float32)
    return {**state, "step": 0}
