"""Builds the parts of a run that depend on one another, and all parts once for their errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechtrain.errors import ConfigError, first_line
from speechtrain.files import absolute_path
from speechtrain.run_directory import run_of
from speechtrain.start.run_config import RunConfig
from speechtrain.start.targets import place_of_error

if TYPE_CHECKING:  # A command that builds nothing must not import torch.
    from torch.optim import Optimizer

    from speechtrain.data.base import DataModule
    from speechtrain.encoders.base import Encoder
    from speechtrain.task import Task
    from speechtrain.text.vocabulary import Tokenizer


@dataclass(frozen=True)
class StartParts:
    """The parts that the start of a run builds, each once."""

    tokenizer: Tokenizer
    data: DataModule
    encoder: Encoder | None  # without values. None: only the ranks can build the network
    rank_bytes: int  # memory of a rank for weights, gradients, optimizer state and weight average. 0: unknown


def build_encoder(run: RunConfig) -> Encoder:
    return run.encoder.build(augment=run.augment.build())


def build_model(run: RunConfig, tokenizer: Tokenizer, encoder: Encoder) -> Task:
    """Return the model with its decoders.

    Raises ConfigError if the model writes text and ``decoder`` does not search, or if a decoder is a beam
    search that the model does not have.
    """
    task = run.model.build(tokenizer=tokenizer, encoder=encoder)
    task.decoder = run.decoder.build()
    task.final_decoder = run.final_decoder.build()
    if not task.writes_text:
        return task
    if not task.decoder.searches:
        raise ConfigError("decoder=none: this model writes text. Set decoder=greedy")
    for name, decoder in {"decoder": task.decoder, "final_decoder": task.final_decoder}.items():
        if not task.beam and getattr(decoder, "sums_paths", False):
            raise ConfigError(f"{name}: this model has no beam search. Set {name}=greedy")
    return task


def build_data(
    run: RunConfig,
    tokenizer: Tokenizer,
    task: Task | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> DataModule:
    """Return the data module.

    ``task`` decides the predicted memory of a batch, and whether audio is normalised. A long wait for a batch
    raises Preempted if ``stop_requested`` returns true.
    """
    objects: dict[str, Any] = {
        "tokenizer": tokenizer,
        "initial_run": str(initial_run(run) or ""),
        "stop_requested": stop_requested,
    }
    if task is not None:
        objects |= {"footprint": task.footprint(), "normalise": task.normalise_audio}
    return run.data.build(**objects)


def initial_run(run: RunConfig) -> Path | None:
    """Return the directory of the run at ``init_from``, or None if that is no run."""
    path = run.init_from or "hf:"
    # Path.resolve would raise RuntimeError for a link to itself.
    return None if path.startswith("hf:") else run_of(Path(os.path.realpath(absolute_path(path))))


def build_optimizer(run: RunConfig, groups: Iterable[dict[str, Any]], **flags: Any) -> Optimizer:
    """Return the optimizer of the parameter ``groups``.

    ``flags`` are the device's values for settings of optimizers. They are used if the config has the setting.
    Raises ConfigError if the optimizer has no kernels for the device.
    """
    known_flags = {name: flag for name, flag in flags.items() if name in run.optimizer.node}
    optimizer = run.optimizer.build(params=list(groups), **known_flags)
    check_device = getattr(optimizer, "check_device", None)
    if check_device:
        check_device(run.device.build().name)
    return optimizer


def dry_build(run: RunConfig) -> StartParts:
    """Construct the parts of a run for their errors, before a process starts, and return them.

    Networks are constructed on torch's meta device, without values. Two kinds of parts are constructed by the
    ranks only: a network that fails on the meta device, and trackers, which open files. Raises the errors of
    the parts.
    """
    tokenizer = run.tokenizer.build()
    # This constructs the optimizer. The schedule refers to its learning rate, so the optimizer's error about
    # a wrong rate must come first.
    weight_bytes = bytes_per_weight(run)
    run.schedule.build(steps_per_epoch=1, planned_steps=1)
    data = build_data(run, tokenizer)
    network = network_without_values(run, tokenizer)
    if network is None:
        return StartParts(tokenizer, data, None, 0)
    encoder, model = network
    encoder_rate = getattr(encoder, "sample_rate", None)
    data_rate = getattr(data, "sample_rate", None)
    if encoder_rate and data_rate and data_rate != encoder_rate:
        raise ConfigError(
            f"data.sample_rate={data_rate}: the encoder expects {encoder_rate} Hz. Set both to one rate"
        )
    weights = sum(p.numel() for p in model.parameters())
    return StartParts(tokenizer, data, encoder, int(weight_bytes * weights))


def bytes_per_weight(run: RunConfig) -> float:
    """Return the memory of a rank for each weight of the model, which is fp32.

    It counts weights, gradients, the optimizer's state and the average of the weights.
    """
    import torch

    # The state of a small parameter has the same bytes per weight as the state of the model. The parameter
    # has 4096 weights, because an 8-bit optimizer stores the state of smaller ones in fp32.
    probe = torch.nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros(64, 64)
    optimizer = build_optimizer(run, [{"params": [probe]}])
    optimizer.step()  # The first step allocates the state.
    state = [tensor.nbytes for tensor in optimizer.state[probe].values() if isinstance(tensor, torch.Tensor)]
    average_copies = 1 if run.trainer.ema else 0
    copies = 2 + sum(state) / probe.nbytes + average_copies  # 2: weights and gradients
    shards = 1 if run.trainer.shard == "none" else run.world_size
    return copies / shards * probe.itemsize


def network_without_values(run: RunConfig, tokenizer: Tokenizer) -> tuple[Encoder, Task] | None:
    """Return the encoder and the model on the meta device, where weights take no memory.

    Return None for a network that cannot be built there. Raises ConfigError if its shapes are impossible.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutInitialisation(TorchFunctionMode):
        """Skips random initial weights. On the meta device they would import torch's compiler, in 1 s."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keywords = kwargs or {}
            if function in (torch.Tensor.normal_, torch.nn.init.normal_):
                return args[0] if args else keywords["tensor"]
            return function(*args, **keywords)

    try:
        with torch.device("meta"), WithoutInitialisation():
            encoder = build_encoder(run)
            return encoder, build_model(run, tokenizer, encoder)
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if "meta" not in str(error):
            problem = f"{place_of_error(error)}model or encoder: {first_line(error)}"
            raise ConfigError(problem) from error
        return None
