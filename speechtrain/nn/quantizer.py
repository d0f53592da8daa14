"""Product quantisation by Gumbel softmax: frames to discrete codes, with gradients.

Legend: ``...`` the axes of the frames, such as (B rows, M frames of a row), C input width, G groups, V
entries of a group's codebook. A code is the concatenation of one entry of each codebook.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from speechtrain.errors import ConfigError
from speechtrain.nn.full_precision import at_least_fp32, full_precision


class Quantized(NamedTuple):
    """The codes of a micro-batch, and statistics of the codebook entries that its frames use.

    Each frame has a weight, 1 or 0. The statistics count only frames of weight 1.

    ``hard`` and ``soft`` are sums over frames, and ``frames`` is the number of frames, so the sums of
    several micro-batches or ranks can be added before a perplexity is computed. In fairseq, each micro-batch
    and rank has a perplexity, and the mean of these perplexities is logged. ``diversity`` is the loss of one
    micro-batch, as in fairseq.
    """

    codes: Tensor  # (..., code width): the G selected entries, concatenated
    ids: Tensor  # (..., G) int64, the selected entry of each codebook
    hard: Tensor  # (G, V) number of frames for which the entry is most likely, without noise or gradient
    soft: Tensor  # (G, V) summed probabilities of the entry, without noise
    frames: Tensor  # () number of frames of weight 1

    def code_perplexity(self) -> Tensor:
        """Return the perplexity (G,) of the most likely entries: the number of used entries, from 1 to V."""
        return perplexity(self.hard, self.frames)

    def prob_perplexity(self) -> Tensor:
        """Return the perplexity (G,) of the mean probabilities: the number of used entries, from 1 to V.

        Unlike ``code_perplexity``, it has a gradient.
        """
        return perplexity(self.soft, self.frames)

    def diversity(self) -> Tensor:
        """Return the diversity loss (G V − summed ``prob_perplexity``) / (G V).

        It is 0 if all entries are used equally.
        """
        groups, entries = self.soft.shape
        return ((entries - self.prob_perplexity()) / (groups * entries)).sum()


class GumbelQuantizer(nn.Module):
    """Selects one of the ``entries`` of each of ``groups`` codebooks (Baevski et al. 2020, section 2).

    In training, the selected entry is the argmax of the noisy logits, which are the sum of logits and Gumbel
    noise. The gradient is computed as if the entry were softmax(noisy logits / temperature)
    (straight-through, Jang et al. 2017).
    In evaluation, the selected entry is the argmax of the logits.

    Tensors are stored in fp32 under any autocast, or in fp64 for fp64. Only the matmul of the projection may
    round its inputs to fewer bits on a GPU (``nn.full_precision``).

    The weights of the projection to logits are initialised by normal(0, ``init_std``). With 1 (published),
    the selected entries depend on the frames from the first step on. The features of all frames are similar
    at first, so few entries are selected. With a smaller value, the noise has more effect at first, and all
    entries are selected.
    """

    def __init__(
        self,
        input_width: int = 512,
        code_width: int = 256,
        groups: int = 2,
        entries: int = 320,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        if groups < 1 or code_width % groups:
            raise ConfigError(
                f"GumbelQuantizer.code_width is {code_width}. It must be a multiple of groups ({groups})"
            )
        if entries < 2:
            raise ConfigError(f"GumbelQuantizer.entries is {entries}. It must be 2 or more")
        if init_std <= 0:
            raise ConfigError(f"GumbelQuantizer.init_std is {init_std}. It must be above 0")
        self.groups, self.entries = groups, entries
        self.projection = nn.Linear(input_width, groups * entries)
        nn.init.normal_(self.projection.weight, std=init_std)
        nn.init.zeros_(self.projection.bias)
        self.codebook = nn.Parameter(torch.rand(groups, entries, code_width // groups))

    def forward(
        self, x: Tensor, temperature: Tensor | float, weight: Tensor, noise: Tensor | None = None
    ) -> Quantized:
        """Quantise frames (..., C) with weights (...), 1 or 0.

        In training, ``noise`` (..., G, V) replaces the numbers from the device's generator. Evaluation has no
        noise.
        """
        with full_precision(x.device):
            logits = self.projection(at_least_fp32(x)).unflatten(-1, (self.groups, self.entries))
            # The statistics are computed without noise, also in training.
            likeliest_ids = logits.argmax(-1)
            likeliest = self._one_hot(likeliest_ids, logits)
            probabilities = logits.softmax(-1)
            ids, selection = likeliest_ids, likeliest
            if self.training:
                if noise is None:
                    noise = gumbel(torch.rand_like(logits))
                noisy_logits = logits + noise
                ids = noisy_logits.argmax(-1)
                # The selection is the one-hot vector of the argmax, and has the gradient of the softmax. The
                # difference is computed first, because it is exactly 0. So equal ids have bit-equal codes.
                noisy = (noisy_logits / temperature).softmax(-1)
                selection = self._one_hot(ids, logits) + (noisy - noisy.detach())
            # ``flatten(0, -3)`` joins the axes of the n frames to (n, G, V). The einsum is one matmul for
            # each group. A broadcast multiplication would allocate (n, G V, width).
            codes = torch.einsum("ngv,gvd->ngd", selection.flatten(0, -3), self.codebook)
            weight = weight.flatten().to(logits.dtype)
            hard = torch.einsum("n,ngv->gv", weight, likeliest.flatten(0, -3))
            soft = torch.einsum("n,ngv->gv", weight, probabilities.flatten(0, -3))
            frame_axes = x.shape[:-1]
            return Quantized(codes.reshape(*frame_axes, -1), ids, hard, soft, frames=weight.sum())

    def _one_hot(self, ids: Tensor, like: Tensor) -> Tensor:
        """Return one-hot vectors (..., G, V) of ``ids`` (..., G), in the type of ``like``."""
        return (ids[..., None] == torch.arange(self.entries, device=ids.device)).to(like.dtype)


def gumbel(uniform: Tensor) -> Tensor:
    """Return standard Gumbel noise from uniform numbers u in [0, 1): −log(−log(u))."""
    return -(-uniform.clamp(min=2.0**-25).log()).log()


def perplexity(sums: Tensor, frames: Tensor) -> Tensor:
    """Return the perplexity (G,), from 1 to V, of the distributions ``sums`` (G, V) / ``frames`` ().

    Without frames it is 1.
    """
    p = sums / frames.clamp(min=1)
    entropy = -(p * (p + 1e-7).log()).sum(-1)
    return entropy.exp()


def code_temperature(step: int, start: float = 2.0, floor: float = 0.5, decay: float = 0.999995) -> float:
    """Return the temperature after ``step`` updates: ``start × decay^step``, at least ``floor``."""
    return max(start * decay**step, floor)
