"""What runs first on each host of a run over several hosts: it sets what the device needs there.

``python -m speechtrain.runs.on_host RUN/config.yaml RANKS COMMAND …`` refuses a host that cannot hold
RANKS ranks, else becomes COMMAND. RANKS is 0 where the starter's variables say it. A refusal is a result in
the run directory, which the command reports.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path

from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.config.build import build_device
from speechtrain.config.resolved import load
from speechtrain.devices import host
from speechtrain.devices.base import Device
from speechtrain.errors import MachineError, SpeechtrainError, print_notice
from speechtrain.launcher import RANK_MEMORY, World
from speechtrain.run_directory import RANKS, write_result


def host_environment(
    device: Device, processes: int, memory: int, *, run_dir: Path, is_dry: bool = False
) -> dict[str, str]:
    """The variables of ``processes`` ranks on this host, each with ``memory`` bytes for its model.

    Raises MachineError if they are too many for it; a dry run and a run with a checkpoint are warned only.
    """
    reason = "" if device.oversubscribe else host.oversubscription(processes, memory)
    refuse(reason, is_warning=is_dry or bool(Checkpointer(run_dir).folders()))
    return device.environment(processes)


def restart_for(device: Device, *, is_training: bool = False) -> None:
    """Start this command again with the variables that the device's libraries read before Python starts.

    The device's ``evaluation_variables`` replace their namesakes unless the command trains.

    Returns if all variables are set, or if this process is a user's Python and not a command. A restart costs
    a second import of torch, 1.5 s of processor time. Raises MachineError if the device is missing.
    """
    if not re.fullmatch("speechtrain(-.+)?", Path(sys.argv[0]).name):
        return
    device.check(1)
    variables = device.environment(1)
    if not is_training:
        variables |= device.facts.evaluation_variables
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if missing:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


def refuse(reason: str, is_warning: bool) -> None:
    """Raise MachineError, or print a warning, if there is a ``reason``."""
    if reason and not is_warning:
        raise MachineError(reason)
    if reason:
        print_notice(f"warning: {reason}")


def main(argv: list[str]) -> int:
    """Become the command in ``argv``; returns, with an exit code, only after a refusal."""
    config, ranks, *command = argv
    run_dir, memory = Path(config).parent, int(os.environ.get(RANK_MEMORY, "0"))
    try:
        processes = int(ranks) or World.from_environment(os.environ).local_size
        variables = host_environment(build_device(load(Path(config))), processes, memory, run_dir=run_dir)
        os.execvpe(command[0], command, {**variables, **os.environ})
    except SpeechtrainError as error:
        failure = {"error": str(error), "exit_code": error.exit_code, "failed_at": time.time()}
        write_result(run_dir / RANKS / platform.node(), {"status": "failed", **failure})
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
