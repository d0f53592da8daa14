"""Who is named, and when a hang is announced; time is a number that the test turns."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from speechtrain.distributed.rank_status import RankStatus
from speechtrain.rank.hang import HANG, START_SECONDS, HangDiagnosis, HangReport, Watch, diagnose


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A watch whose ticks the test makes."""

    def __init__(self, folder: Path, seconds: float = 10.0, rank: int = 0, size: int = 1) -> None:
        self.rank_status, self.clock, self.folder = RankStatus(), Clock(), folder / "stuck"
        self.left: list[tuple[HangDiagnosis, HangReport]] = []
        self.watch = Watch(
            self.rank_status,
            rank,
            size,
            self.folder,
            seconds,
            lambda *ended: self.left.append(ended),
            self.clock,
        )

    def wait(self, seconds: float) -> bool:
        """Look once a tick for so long; whether a hang was announced."""
        for _ in range(round(seconds / self.watch.tick)):
            self.clock.now += self.watch.tick
            if self.watch.check_hang():
                return True
        return False


def test_a_place_that_stands_still_is_a_hang(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.rank_status.begin_phase(1, "data")
    assert not rig.wait(9)
    rig.rank_status.begin_phase(1, "forward")
    assert not rig.wait(9)
    rig.rank_status.begin_collective()
    assert not rig.wait(9)
    rig.rank_status.end_collective()
    assert not rig.wait(9)
    assert not rig.folder.exists(), "nothing is written while a run moves"
    assert rig.wait(4)
    assert (rig.folder / HANG).exists()


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.rank_status.begin_phase(1, "forward")
    assert not rig.wait(5)
    for _ in range(4):
        rig.clock.now += 3600
        assert not rig.watch.check_hang()
    assert rig.wait(5)


def test_before_the_first_step_only_waiting_counts_and_has_its_own_limit(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.rank_status.begin_phase(0, "warm-up")
    assert not rig.wait(3 * START_SECONDS), "a long compilation"
    rig.rank_status.begin_collective()
    assert not rig.wait(START_SECONDS - 10)
    assert rig.wait(20)


def test_the_hang_of_a_peer_is_heard(tmp_path: Path) -> None:
    rig = Rig(tmp_path, size=2)
    rig.rank_status.begin_phase(1, "forward")
    assert not rig.wait(1)
    rig.folder.mkdir()
    (rig.folder / HANG).touch()
    assert rig.wait(1)


def test_an_answer_says_where_the_main_thread_is(tmp_path: Path) -> None:
    rig = Rig(tmp_path, seconds=0.2)
    rig.rank_status.begin_phase(7, "validation")
    rig.watch.clock = time.monotonic
    rig.watch.start()
    for _ in range(3000):
        if rig.left:
            break
        threading.Event().wait(0.01)
    rig.watch.close()
    ((verdict, note),) = rig.left
    assert (verdict.rank, note.step, note.phase, note.is_waiting) == (0, 7, "validation", False)
    assert "step 7, phase validation, stands still for" in verdict.message
    assert "trainer.timeout_seconds=0.2 sets the limit" in verdict.message
    assert f'File "{__file__}"' in verdict.stack
    assert f"{Path(__file__).name}:" in verdict.message


def test_a_collective_is_noted_until_its_end() -> None:
    class Meeting:
        def __init__(self) -> None:
            self.rank_status = RankStatus()
            self.rank_status.begin_phase(1, "agree")

        def meet(self, fails: bool) -> bool:
            with self.rank_status.collective():
                assert self.rank_status.is_waiting
                if fails:
                    raise RuntimeError
            return True

    meeting = Meeting()
    assert meeting.meet(False)
    assert not meeting.rank_status.is_waiting
    assert meeting.rank_status.collective_phases == {"agree"}
    with pytest.raises(RuntimeError):
        meeting.meet(True)
    assert meeting.rank_status.is_waiting


def waiting(rank: int, phase: str, phase_count: int, step: int = 3, is_odd: bool = False) -> HangReport:
    return HangReport(rank, step, phase, phase_count, is_waiting=True, is_odd=is_odd, still_seconds=5.0)


def test_the_rank_that_others_wait_for_is_named() -> None:
    notes = [
        waiting(0, "agree", 14),
        HangReport(1, 3, "data", 11, still_seconds=5.2),
        waiting(2, "agree", 14),
    ]
    verdict = diagnose(notes, 3, 5.0)
    assert verdict == diagnose(reversed(notes), 3, 5.0)
    assert verdict.rank == 1
    assert "step 3, phase data, stands still for 5.2 s; rank 0 (step 3, agree) waits" in verdict.message


def test_of_several_the_one_furthest_behind_is_named() -> None:
    notes = [
        HangReport(0, 3, "update", 15, still_seconds=9.0),
        HangReport(1, 3, "forward", 12),
        waiting(2, "log", 16),
    ]
    assert diagnose(notes, 3, 5.0).rank == 1
    same = [
        HangReport(0, 3, "backward", 13, still_seconds=5.0),
        HangReport(1, 3, "backward", 13, still_seconds=6.0),
    ]
    assert diagnose(same, 2, 5.0).rank == 1


def test_a_rank_without_an_answer_is_named() -> None:
    verdict = diagnose([waiting(0, "agree", 14), waiting(1, "agree", 14)], 3, 5.0)
    assert (verdict.rank, verdict.reporter) == (2, 0)
    assert "rank 2 does not answer" in verdict.message


def test_ranks_that_wait_for_different_things() -> None:
    skipped = [waiting(0, "agree", 14), waiting(1, "backward", 18, step=4)]
    verdict = diagnose(skipped, 2, 5.0)
    assert verdict.rank == 1
    assert (
        "step 4, phase backward, waits in another collective than rank 0 (step 3, agree)" in verdict.message
    )
    extra = [waiting(0, "backward", 13), waiting(1, "forward", 12, is_odd=True)]
    assert diagnose(extra, 2, 5.0).rank == 1
    odd_one_out = [waiting(0, "agree", 14), waiting(1, "log", 16), waiting(2, "log", 16)]
    assert diagnose(odd_one_out, 3, 5.0).rank == 0
    together = diagnose([waiting(0, "agree", 14), waiting(1, "agree", 14)], 2, 5.0)
    assert "in the same collective as all ranks" in together.message
