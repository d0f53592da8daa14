"""SIGTERM and Ctrl-C save and exit 75 in every phase; the same command continues; a run is nobody else's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tests.support.processes import state_of

from .conftest import RECORDED, Command, finish, wait_for

LONG = ["trainer.max_steps=4000", "trainer.save_every=4000", "trainer.validate_every=4000"]


def test_a_signal_before_the_first_step(command: Callable[..., Command]) -> None:
    run = command("run", *LONG)
    process = run.start()
    wait_for(lambda: (run.run_dir / "run.json").exists(), process)
    time.sleep(0.5)  # the rank is importing its libraries
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert run.result()["status"] == "preempted"
    assert run.result()["steps"] <= 1


def test_signals_in_training_then_a_continued_run(command: Callable[..., Command]) -> None:
    run = command("run", *LONG)
    steps = []
    for number in (signal.SIGINT, signal.SIGTERM):
        before = len(run.events("train"))
        process = run.start()
        wait_for(lambda: len(run.events("train")) > before, process)  # noqa: B023
        if number == signal.SIGINT:
            second = run.run()
            assert second.returncode == 5
            assert f"in use by pid {run.pid()} on " in second.stderr
        process.send_signal(number)
        ended = finish(process)
        assert ended.returncode == 75, ended.stderr
        where = f"saved at step {run.result()['steps']} in {run.run_dir}"
        assert ended.stderr == f"speechtrain: {where}. The same command continues\n"
        assert run.result()["status"] == "preempted"
        assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"
        assert not run.events("valid")
        steps.append(run.result()["steps"])
    assert steps[0] < steps[1]
    assert [e["step"] for e in run.events("resume")] == steps[:1]

    refused = run.run("resume=never")
    assert refused.returncode == 5
    assert "resume=never" in refused.stderr
    last = steps[1] + 2
    done = run.run("resume=must", f"trainer.max_steps={last}")
    assert done.returncode == 0, done.stderr
    result = run.result()
    assert (result["status"], result["steps"]) == ("finished", last)
    assert sorted(run.losses()) == list(range(1, last + 1))
    assert {"metric", "metrics", "steps", "wall_s", "status"} <= set(result)
    assert result["metric"] == result["metrics"]["wer"] == result["metrics"]["unheard/wer"]
    starts = len(run.events("start"))
    again = run.run(f"trainer.max_steps={last}")
    assert again.returncode == 0
    assert f"is done: finished at step {last}" in again.stdout
    assert len(run.events("start")) == starts  # no process was started for it
    assert done.stderr == again.stderr == ""
    assert not (run.run_dir / "error.log").exists()


def test_a_signal_in_a_validation_is_obeyed_and_made_up_for(command: Callable[..., Command]) -> None:
    slow = ["data.valid.unheard.utterances=120", "data.valid_batch.count=1", "trainer.validate_every=4"]
    run = command("run", *slow, "trainer.max_steps=4", "trainer.save_every=100", "decoder.max_symbols=300")
    process = run.start()
    wait_for(lambda: len(run.events("train")) == 4, process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert run.result()["steps"] == 4
    assert not run.events("valid")
    done = run.run("data.valid.unheard.utterances=120")
    assert done.returncode == 0, done.stderr
    assert [e["step"] for e in run.events("valid")] == [4]
    assert len(run.losses()) == 4
    assert run.result()["metric"] is not None


def test_the_second_signal_kills_and_the_run_still_continues(command: Callable[..., Command]) -> None:
    run = command("run", "trainer.max_steps=2000", "trainer.save_every=2", "trainer.validate_every=2000")
    process = run.start()
    wait_for(lambda: run.checkpoints(), process)
    os.kill(run.pid(), signal.SIGSTOP)  # a rank that does not answer
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130
    done = run.run("trainer.max_steps=20", "resume=must")
    assert done.returncode == 0, done.stderr
    assert sorted(run.losses())[:20] == list(range(1, 21))


def test_a_rank_whose_command_is_gone_saves_and_leaves(command: Callable[..., Command]) -> None:
    run = command("run", *LONG, *RECORDED)
    process = run.start()
    wait_for(lambda: run.events("train"), process)
    rank = run.pid()
    process.kill()
    finish(process)
    wait_for(lambda: not os.path.exists(f"/proc/{rank}") or "(zombie)" in state_of(rank))
    result = run.result()
    assert result["status"] == "preempted"
    assert run.checkpoints()[-1].name == f"step-{result['steps']:08d}"
    done = run.run(f"trainer.max_steps={result['steps'] + 1}")
    assert done.returncode == 0, done.stderr
