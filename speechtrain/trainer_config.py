"""The typed ``trainer`` node of the config: how long, how often, how much. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainerConfig:
    """Settings of the shared trainer. A step is one optimizer update."""

    max_steps: int | None = None  # optimizer updates
    max_epochs: float | None = None
    max_hours: float | None = None  # wall time, earlier parts of a resumed run included
    target: float | None = None  # stop once the task's metric (WER as a fraction) is this low
    accumulate: int = 1  # micro-batches per rank and step
    simulate_world: int | None = None  # world_size × accumulate; accumulate is then derived
    shard: str = "none"  # none | parameters: each rank holds its share of them (FSDP2) or all (DDP)
    clip: float = 1.0  # largest global gradient norm; 0 turns clipping off
    ema: float = 0.999  # decay of the weight average that is evaluated and exported; 0 turns it off
    log_every: int = 10  # steps
    validate_every: int | None = None  # steps; null: after each epoch
    save_every: int | None = None  # steps; null: after each validation
    keep: int = 2  # newest checkpoints kept, beside the best
    on_save_error: str = "continue"  # continue | stop, when a checkpoint cannot be written
    on_collapse: str = "stop"  # stop | warn, when the task sees training collapse
    max_graphs: int | None = None  # compilations that a device which counts them may make; null: no limit
    max_bad_updates: int = 10  # non-finite updates in a row that end the run
    timeout_seconds: float = 1800.0  # without a move, or kept waiting by a peer: the stuck rank is named
    profile: str = ""  # A:B writes a torch profile of steps A to B
