"""speechtrain-train: compose a config, start its ranks, report how they ended."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain import __version__
from speechtrain.commands._choices import choices, config_dir
from speechtrain.commands._cli import guarded
from speechtrain.run_directory import CONFIG

if TYPE_CHECKING:
    from omegaconf import DictConfig

HELP = f"""speechtrain-train {__version__}: train a speech model.

usage: speechtrain-train [GROUP=CHOICE ...] [KEY=VALUE ...] [-m] [--config-dir DIR] [--cfg job] [--help]

  speechtrain-train recipe=demo
  speechtrain-train model=rnnt device=cpu precision=bf16 trainer.max_steps=100
  speechtrain-train data=manifest data.train=a.jsonl,b.jsonl data.valid.dev=dev.jsonl
  speechtrain-train -m model=rnnt optimizer.lr=1e-3,4e-3

groups (the choices of each follow; those of your --config-dir add to them)
{{groups}}

keys
  world_size=N               processes of the run (launcher= starts them; hydra/launcher= runs a sweep's jobs)
  launcher=NAME              how the ranks are started; auto is local for one rank, torchrun for several
  seed=N                     seed of every random decision
  run_dir=DIR                default runs/<model>-<data>-<hash>; run_dir=RUN alone continues the run RUN
  resume=auto|never|must     auto: continue if there are checkpoints; never: refuse them; must: require them
  dry_run=true               print what would be started, and start nothing
  trainer.max_steps=N        optimizer updates; also max_epochs, max_hours, target (a WER as a fraction)
  trainer.accumulate=N       micro-batches per rank and update
  trainer.simulate_world=N   micro-batches per update over all ranks: accumulate follows from world_size
  data.train=FILE[,FILE]     with data=manifest: training manifests, their union in order
  data.valid.NAME=FILE       with data=manifest: an evaluation set
  allow_targets=MODULE       let _target_ name classes of your own module (this line and the environment only)
  --cfg job                  print the composed config, with every key that can be set, and exit

environment
  DATASET_DIR                folder of the corpus of data=fsdd
  OUTPUT_DIR                 folder of run directories, instead of runs/
  NUM_STEPS                  trainer.max_steps, if the command line does not set it
  SPEECHTRAIN_CACHE          folder of indexes and joined corpora (default ~/.cache/speechtrain)
  SPEECHTRAIN_ALLOW_TARGETS  like allow_targets=

exit codes: 0 done, 1 internal error, 2 config, 3 data, 4 machine, 5 run directory, 6 diverged,
75 saved after a signal (the same command continues), 130 killed
"""


def main() -> None:
    """Console entry point."""
    sys.exit(guarded(lambda: run(sys.argv[1:])))


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    if "--help" in argv or "-h" in argv:  # without Hydra, whose own help composes everything first
        named = choices(config_dir(argv)).items()
        groups = "\n".join(f"  {group:<12} {' | '.join(names)}" for group, names in named)
        print(HELP.replace("{groups}", groups), end="")
        return 0
    if "--version" in argv:
        print(f"speechtrain {__version__}")
        return 0
    from speechtrain.commands._continue_run import continued, run_to_continue
    from speechtrain.commands._external_launch import explicit_run_dir, join, world_of
    from speechtrain.commands._hydra_app import check_flags, options, run_composed
    from speechtrain.commands._start_run import launch

    world = world_of(argv)
    if world.rank:
        return join(argv, world)
    arguments = rewrite(argv)
    check_flags(arguments)
    folder = config_dir(arguments)
    ranks = world.size if world.size > 1 else None
    run_dir = run_to_continue(arguments, explicit_run_dir(argv))
    if run_dir is not None:
        launch(lambda: continued(run_dir, options(arguments)[1], folder, ranks), run_dir, argv, {})
        return 0

    def job(config: DictConfig, run_dir: Path, overrides: list[str], written: dict[str, str]) -> float | None:
        def configure() -> DictConfig:
            is_new = not (run_dir / CONFIG).is_file()
            return config if is_new else continued(run_dir, overrides, folder, ranks)

        result = launch(configure, run_dir, argv, {"overrides": overrides, "written": written})
        metric: float | None = result["metric"]
        return metric  # what an optimizing sweeper reads

    run_composed(arguments, job)
    return 0


def rewrite(argv: list[str]) -> list[str]:
    """Translate arguments as users of other toolkits type them into Hydra's syntax.

    ``data.train=a.jsonl,b.jsonl`` becomes a list (Hydra would read it as a sweep), and
    ``data.valid.NAME=…`` may add a name. ``allow_targets=`` moves to the environment, so that no
    file can set it.
    """
    from speechtrain.config.targets import ALLOW_TARGETS

    rewritten = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key == "allow_targets" and equals:
            os.environ[ALLOW_TARGETS] = value.strip("[]")
            continue
        if equals and re.fullmatch(r"\+{0,2}data\.(train|valid\.[\w-]+)", key):
            if "," in value and not value.lstrip().startswith(("[", "{", "'", '"')):
                value = "[" + ",".join(_quoted(part) for part in value.split(",")) + "]"
            if key.startswith("data.valid."):
                key = "++" + key
            argument = f"{key}={value}"
        rewritten.append(argument)
    return rewritten


def _quoted(text: str) -> str:
    return "'" + text.strip().replace("\\", "\\\\").replace("'", "\\'") + "'"


if __name__ == "__main__":
    main()
