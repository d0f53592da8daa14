"""A machine without a network whose own name does not resolve: its ranks find each other all the same."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable

from .conftest import Command
from .engines import skip_without

skip_without("ip", "unshare", "hostname", is_root=True)


def test_two_ranks_train_where_no_name_resolves(command: Callable[..., Command]) -> None:
    run = command("run", "trainer.max_steps=2", "world_size=2", "launcher=torchrun")
    train = shlex.join([sys.executable, "-m", "speechtrain.commands.train", *run.arguments])
    script = f"ip link set lo up; hostname no-such-host; exec {train}"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "sh", "-c", script],
        env=run.environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert run.result()["steps"] == 2
