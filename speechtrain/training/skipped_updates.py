"""The messages and errors about updates that were skipped."""

from __future__ import annotations

import contextlib
from pathlib import Path

from speechtrain.checkpoint.checkpointer import UNWRITABLE
from speechtrain.checkpoint.state_file import write_state
from speechtrain.errors import ConfigError, DataError, Diverged, SpeechtrainError
from speechtrain.files import atomic
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.run_state import GlobalBatch, Progress, UpdateRecord


def fault_of(batch: GlobalBatch) -> str:
    """Return why an update by ``batch`` was skipped, with recordings and terms of this rank."""
    emptiness = _emptiness(batch)
    if emptiness:
        return emptiness
    names: dict[str, None] = {}  # in the order of the batch, without repetitions
    for micro_batch, (terms, rows) in zip(batch.micro_batches, batch.loss_details, strict=False):
        names |= {f"the term {name}": None for name, (total, _) in terms.items() if not total.isfinite()}
        finite_rows = [True] * len(micro_batch.ids) if rows is None else rows.isfinite().tolist()
        for name, is_finite in zip(micro_batch.ids, finite_rows, strict=True):
            if name and not is_finite:
                names[f"the loss of {name!r}"] = None
    fault = "non-finite loss or gradient"
    if not names:
        return fault
    hidden_names = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{fault}: {', '.join([*names][:3])}{hidden_names}"


def bad_updates_error(
    config: TrainerConfig, progress: Progress, batch: GlobalBatch, run_dir: Path, seed: int
) -> SpeechtrainError:
    """Return the error for too many skipped updates in a row, of which ``batch`` is the last.

    For updates that are not finite, a file in ``run_dir`` has the micro-batches of this rank.
    """
    emptiness = _emptiness(batch)
    if emptiness:
        updates = f"{progress.bad_updates} skipped updates in a row, {progress.step}"
        return DataError(f"the last of {updates}, had {emptiness}")
    path = run_dir / "replay.safetensors"
    _write_replay(batch, path, progress.step, seed)
    clip = " or trainer.clip" if config.clip else ""
    return Diverged(
        f"{progress.bad_updates} non-finite updates in a row up to step {progress.step}: "
        f"lower optimizer.lr{clip}, or look at the batches in {path}"
    )


def refuse_untrained(progress: Progress, record: UpdateRecord | None) -> None:
    """Raise Diverged or DataError for a run that has ended and has skipped each of its updates.

    ``record`` is of the latest update of this start, if there is one.
    """
    steps = progress.step
    if not 0 < steps == progress.skipped_updates:
        return
    if record is not None and (emptiness := _emptiness(record.batch)):
        raise DataError(f"nothing was learnt in {steps} updates. The last one had {emptiness}")
    raise Diverged(f"none of {steps} updates had a finite loss, so nothing was learnt")


def _emptiness(batch: GlobalBatch) -> str:
    """Return a text with this rank's unusable recordings if the batch has no other, or an empty text."""
    if batch.weight.cpu():
        return ""
    skips = [skip for micro_batch in batch.micro_batches for skip in micro_batch.skipped]
    examples = "; ".join(f"{skip.id!r} ({skip.reason}: {skip.detail})" for skip in skips[:3])
    return f"no usable recording{examples and f': {examples}'}. skipped.jsonl lists all"


def _write_replay(batch: GlobalBatch, path: Path, step: int, seed: int) -> None:
    """Write the micro-batches to ``path``, unless the disk is full. Then the error is still reported.

    The file is for a person who looks for the cause.
    """
    batches = []
    for micro_batch in batch.micro_batches:
        fields = dict(vars(micro_batch))
        del fields["skipped"]  # No checkpoint stores objects of this class.
        batches.append(fields)
    with contextlib.suppress(*UNWRITABLE, ConfigError), atomic(path) as temporary:
        write_state(temporary, {"step": step, "seed": seed, "batches": batches})
