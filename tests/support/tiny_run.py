"""Keys of a tiny run, and a run that has not trained."""

from __future__ import annotations

from pathlib import Path

TINY = (
    *("recipe=demo", "device.threads=1", "trainer.max_steps=2", "data.workers=0"),
    *("data.train.utterances=16", "data.valid.unheard.utterances=4", "decoder.max_symbols=40"),
    *(
        "encoder.hidden=16",
        "model.prediction.hidden=16",
        "model.prediction.embedding=8",
        "model.joint.hidden=16",
    ),
)


def untrained(folder: Path, *overrides: str) -> Path:
    """A run that has saved its initial weights and has not trained."""
    from speechtrain.checkpoint.whole import Checkpointer
    from speechtrain.config.resolved import dump
    from speechtrain.rank.build import build_task
    from speechtrain.runs.compose import compose
    from tests.support.composed import composed

    if any(override.startswith("init_from=") for override in overrides):
        config = compose([*overrides])
    else:
        config = composed(*overrides)
    config.run_dir = str(folder)
    task, tokenizer = build_task(config)
    Checkpointer(folder).save(1, {"task": task}, task.state_dict())
    (folder / "config.yaml").write_text(dump(config))
    tokenizer.save(str(folder))
    return folder
