"""Ranks that are forked from the process of the commands, and tiny runs of wav2vec 2.0."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .conftest import STARTER, Command
from .starting import Started

TINY = [
    *("model=wav2vec2_small", "model._target_=pretraining.RecordedWav2Vec2", "data=digits", "augment=small"),
    "encoder.conv_layers=[[16,10,5],[16,3,2],[16,3,2],[16,3,2],[16,3,2],[16,2,2],[16,2,2]]",
    *("encoder.width=32", "encoder.feed_forward=48", "encoder.layers=3", "encoder.position_kernel=16"),
    *("model.codes=24", "model.code_width=16", "model.final_width=16", "model.negatives=12"),
    *("encoder.dropout=0.1", "encoder.attention_dropout=0.1", "encoder.input_dropout=0.1"),
    *("encoder.activation_dropout=0.1", "encoder.layer_drop=0.3"),
    "encoder.channel_mask={_target_:speechtrain.nn.masking.SpanMask,probability:0.2,length:4,min_masks:0}",
    *("model.temperature=[2,0.5,0.97]", "model.penalty_weight=1", "tracking=jsonl"),
    *("device.threads=1", "device.autotune=false"),
    *("data.train.utterances=50", "data.train.min_words=2", "data.train.max_words=4", "data.batch.count=2"),
    *("data.valid.unheard.utterances=3", "data.workers=0", "trainer.max_epochs=null", "trainer.log_every=1"),
]
"""Every dropout, layer drop and channel masks on; the temperature falls by 3 % an update."""


class Pretraining(Command):
    """A run in a directory of its own, its draws recorded there."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str], *overrides: str) -> None:
        own = {"SPEECHTRAIN_ALLOW_TARGETS": "pretraining", "DRAWN": str(run_dir / "drawn.jsonl")}
        super().__init__(run_dir, {**environment, **own}, [])
        self.arguments = [*TINY, *overrides, f"run_dir={run_dir}"]

    def drawn(self) -> dict[tuple[int, int], list[Any]]:
        """Step, ids and checksums of each micro-batch by its address; every attempt drew the same."""
        found: dict[tuple[int, int], list[Any]] = {}
        for line in (self.run_dir / "drawn.jsonl").read_text().splitlines():
            epoch, index, *rest = json.loads(line)
            assert found.setdefault((epoch, index), rest) == rest
        return dict(sorted(found.items()))


_MOST_SECONDS = 600.0  # on a busy machine; pytest ends a test after as many


class Forks:
    """Ranks that are forked from the process of ``STARTER``; one run at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        own = {"SPEECHTRAIN_ALLOW_TARGETS": "pretraining,recording", "OMP_NUM_THREADS": "1"}
        self._environment = {**environment, **own}
        self._ranks: list[Started] = []

    def start(self, config: Path, ranks: int = 1) -> list[int]:
        """Process ids of a run's ranks."""
        variables = {**self._environment, "DRAWN": str(config.with_name("drawn.jsonl"))}
        err = str(config.with_name("stderr.log"))
        with socket.create_server(("127.0.0.1", 0)) as found:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
        self._ranks = []
        for rank in range(ranks):
            world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            own = {name: str(value) for name, value in world.items()} if ranks > 1 else {}
            rank_variables = {**variables, **own}
            self._ranks.append(STARTER.start([str(config)], rank_variables, "rank", os.devnull, err))
        return [rank.pid for rank in self._ranks]

    def wait(self) -> list[int]:
        """Their exit codes, negative for signals, when all have ended."""
        return [rank.wait(_MOST_SECONDS) for rank in self._ranks]

    def run(self, config: Path, ranks: int = 1) -> list[int]:
        self.start(config, ranks)
        return self.wait()
