"""A killed rank is started again with its peers; a signal to one rank stops all, in a validation as well."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.launch.process_tree import children_of
from tests.support.processes import state_of

from .conftest import RECORDED, Command, beyond_loopback, finish, wait_for

UPDATES = 12
SLOW = ["data.valid.unheard.utterances=300", "data.valid_batch.count=1", "decoder.max_symbols=300"]


def test_a_killed_rank_and_a_signal_to_one_in_a_validation(command: Callable[..., Command]) -> None:
    plan = [f"trainer.max_steps={UPDATES}", f"trainer.validate_every={UPDATES}", "trainer.save_every=3"]
    run = command("run", *RECORDED, *plan, *SLOW, "world_size=2", "launcher=torchrun")
    process = run.start("launcher.max_restarts=1")
    wait_for(lambda: len(run.events("train")) >= 4, process)
    (agent,) = children_of(process.pid)
    first, last = run.pid(), len(run.events("train"))
    (killed,) = children_of(agent) - {first}
    os.kill(killed, signal.SIGKILL)

    wait_for(lambda: [e for e in run.events("train")[last:] if e["step"] == UPDATES], process)
    ranks = children_of(agent)
    assert not ranks & {first, killed}
    assert beyond_loopback(process.pid) == []
    (resumed,) = run.events("resume")
    assert resumed["step"] >= 3  # the last save, or what rank 0 saved when it lost its peer
    os.kill((ranks - {run.pid()}).pop(), signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr.endswith(f"saved at step {UPDATES} in {run.run_dir}. The same command continues\n")
    assert all("(zombie)" in state_of(pid) for pid in {agent, *ranks})

    assert not run.events("valid")
    assert sorted(run.losses()) == list(range(1, UPDATES + 1))  # the same ones, where two attempts made them
    addresses = [(epoch, index) for epoch, index, *_ in sorted(run.handed())]
    assert addresses == [divmod(number, 12) for number in range(len(addresses))]  # 48 utterances by four
    assert len(addresses) >= 2 * UPDATES
    assert Checkpointer(run.run_dir).verify(run.checkpoints()[-1]).step == UPDATES
    # of the killed one, or of its peer, which had seen it first
    assert re.search(r"failed \(exitcode: (-9|4)\)", (run.run_dir / "agent.log").read_text())
