"""speechtrain train: compose a config, start the ranks of the run, and report how they ended."""

from __future__ import annotations

from contextlib import nullcontext

from speechtrain import __version__
from speechtrain.commands._cli import console
from speechtrain.start.choices import choices, config_dir, option_value
from speechtrain.start.command_line import check_command, read_command

HELP = """usage: speechtrain train [-h] [-m] [--config-dir DIR] [--cfg job] [--version] [RUN] [KEY=VALUE ...]

Train a speech model, or continue a run. The same command continues its run, and a run that has ended
returns its result.

positional arguments:
  RUN                        run directory, also as run_dir=RUN: continue this run
  KEY=VALUE                  a key of the config, or GROUP=CHOICE

options:
  -h, --help                 show this help message and exit
  -m, --multirun             train one run for each of several values (KEY=A,B)
  --config-dir DIR           a folder of your own choices for GROUP=CHOICE
  --cfg job                  print the composed config, with every key that can be set, and exit
  --version                  print the version and exit

groups, each with its choices and the choices of your --config-dir:
{groups}

keys:
  world_size=N               processes of the run. launcher= starts them, hydra/launcher= runs a sweep's jobs
  device=NAME                auto (default): cuda if a GPU is usable, else hpu, else cpu
  launcher=NAME              how the ranks are started. auto: local for one rank, torchrun for several
  seed=N                     seed of every random decision
  run_dir=DIR                default runs/<model>-<data>-<hash>. run_dir=RUN alone continues the run RUN
  resume=auto|never|must     auto: continue if there are checkpoints, never: refuse them, must: require them
  accept_code=true           continue a run although the code of your own classes has changed
  dry_run=true               start nothing. Print the command of the ranks and the needs of the run
  trainer.max_steps=N        optimizer updates (also max_epochs, max_hours, and target, a WER as a fraction)
  trainer.max_hours=H        a limit. If max_steps and max_epochs are null, the updates are planned to fill it
  trainer.accumulate=N       micro-batches per rank and update
  trainer.simulate_world=N   micro-batches per update of all ranks. accumulate follows from world_size
  data.train=FILE[,FILE]     with data=manifest: manifests, tables or folders, read in this order
  data.untranscribed=FOLDER  with recipe=scratch: recordings for which a first run writes texts
  data.valid.NAME=FILE       with data=manifest: an evaluation set. It replaces the sets of a recipe
  'data.train={a: {path: FILE, weight: 3}, b: FILE}'   sets with a weight, a normaliser, a language
  allow_targets=MODULE       let _target_ name classes of your own module (this line and the environment only)

environment:
  DATASET_DIR                folder of corpora: data=fsdd, data=librispeech, speechtrain prepare corpus=NAME
  OUTPUT_DIR                 folder of run directories, instead of runs/
  NUM_STEPS                  trainer.max_steps, if the command line does not set it
  SPEECHTRAIN_CACHE          folder of indexes and joined corpora (default ~/.cache/speechtrain)
  SPEECHTRAIN_DEVICE         the device that device=auto means here
  SPEECHTRAIN_ALLOW_TARGETS  like allow_targets=

examples:
  speechtrain train model=rnnt device=cpu precision=bf16
  speechtrain train recipe=scratch data.train=FOLDER_OR_MANIFEST trainer.max_hours=0.5
  speechtrain train data=manifest data.train=a.jsonl,b.jsonl data.valid.dev=dev.jsonl
  speechtrain train -m model=rnnt optimizer.lr=1e-3,4e-3

exit codes: 0 done, 1 internal error, 2 config, 3 data, 4 machine, 5 run directory, 6 diverged,
75 saved after a signal (the same command continues), 130 killed
"""


def run(argv: list[str]) -> int:
    """Train, and return the exit code. Raises a SpeechtrainError.

    A command is one job. With ``-m`` it is a sweep, whose jobs Hydra starts one by one or side by side.
    """
    if "--help" in argv or "-h" in argv:  # Hydra's own help would need a composed config.
        lines = []
        for group, names in choices(config_dir(argv)).items():
            lines.append(f"  {group:<12} {' | '.join(names)}")
        print(HELP.replace("{groups}", "\n".join(lines)), end="")
        return 0
    if "--version" in argv:
        print(f"speechtrain {__version__}")
        return 0
    from speechtrain.start.job import print_config, start_job
    from speechtrain.start.sweep import run_hydra

    command = read_command(argv)
    external_launch = command.external_launch
    if external_launch and external_launch.world.rank:
        return external_launch.join()  # Only rank 0 composes the config and starts the run below.
    context = external_launch.reporting_exit_code() if external_launch else nullcontext()
    with context:
        check_command(command)
        if option_value(command.flags, "--cfg", "-c") == "job":
            print_config(command)
        elif command.is_sweep or command.prints:
            run_hydra(command)
        else:
            start_job(command)
    return 0


main = console(run)

if __name__ == "__main__":
    main()
