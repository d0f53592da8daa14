"""The program that runs first on each host of a run, and sets the environment variables of the device there.

``python -m speechtrain.start.on_host RUN/config.yaml RANKS COMMAND …`` replaces itself by COMMAND if the host
has enough CPUs and memory for RANKS ranks. Otherwise it writes a failure into the run directory, which the
user's command reports. If RANKS is 0, the number comes from the environment variables of the program that
started this one, such as srun.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.devices import host
from speechtrain.devices.base import Device
from speechtrain.distributed.world import World
from speechtrain.errors import MachineError, SpeechtrainError, print_notice
from speechtrain.launch.launcher import RANK_MEMORY
from speechtrain.run_directory import RANKS, write_result
from speechtrain.start.resolved import load
from speechtrain.start.run_config import part_of


def host_environment(
    device: Device, processes: int, memory: int, *, run_dir: Path, is_dry: bool = False
) -> dict[str, str]:
    """Return the device's environment variables for ``processes`` ranks on this host.

    Each rank needs ``memory`` bytes for its model. If the host has too few CPUs or too little memory, a dry
    run or a run with a checkpoint prints a warning, and any other run raises MachineError.
    """
    problem = "" if device.oversubscribe else host.oversubscription(processes, memory)
    has_checkpoint = bool(Checkpointer(run_dir).folders())
    raise_or_warn(problem, is_warning=is_dry or has_checkpoint)
    return device.environment(processes)


def restart_for(device: Device, *, is_training: bool = False) -> None:
    """Restart this process if variables are missing that the device's libraries read when Python starts.

    The process is a command of speechtrain. In a user's own Python program, nothing is done. Unless the
    command trains, the device's ``evaluation_variables`` replace variables of the same name. If no variable
    is missing, the function returns. A restart costs a second import of torch, 1.5 s of processor time.
    Raises MachineError if the device is missing.
    """
    is_command = re.fullmatch("speechtrain(-.+)?", Path(sys.argv[0]).name)
    if not is_command:
        return
    device.check(1)
    variables = device.environment(1)
    if not is_training:
        variables |= device.facts.evaluation_variables
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if missing:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


def raise_or_warn(reason: str, is_warning: bool) -> None:
    """Raise MachineError with ``reason``, or print it as a warning. Do nothing if it is empty."""
    if reason and not is_warning:
        raise MachineError(reason)
    if reason:
        print_notice(f"warning: {reason}")


def main(argv: list[str]) -> int:
    """Replace this process by the command in ``argv``, which is ``[config, ranks, *command]``.

    If the host cannot run it, write the failure to the run directory and return its exit code.
    """
    config_path, ranks, *command = argv
    run_dir = Path(config_path).parent
    memory = int(os.environ.get(RANK_MEMORY, "0"))
    try:
        processes = int(ranks) or World.from_environment(os.environ).local_size
        device = part_of(load(Path(config_path)), "device").build()
        device.check(processes)
        variables = host_environment(device, processes, memory, run_dir=run_dir)
        os.execvpe(command[0], command, {**variables, **os.environ})
    except SpeechtrainError as error:
        failure = {
            "status": "failed",
            "error": str(error),
            "exit_code": error.exit_code,
            "failed_at": time.time(),
        }
        write_result(run_dir / RANKS / platform.node(), failure)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
