"""Quiescence from black boxes: said when nothing can happen any more, never before."""

from __future__ import annotations

from pathlib import Path

import pytest

from pptrace.blackbox import BlackBox, file_name, with_process_state
from pptrace.records import Kind, RankLog, Status
from quiescence import Watch, read_heads

__all__: list[str] = []

_BLOCKED = {0: (1, 7, 5), 1: (1, 5, 7)}  # hosts blocked, messages sent and received


class Job:
    """Two ranks whose monitors a test drives by hand."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.boxes = [
            BlackBox(out / file_name(rank), rank=rank, world_size=2) for rank in (0, 1)
        ]

    def beat(self, counts: dict[int, tuple[int, int, int]]) -> dict[int, RankLog]:
        """One heartbeat of each rank given; returns what a reader then finds."""
        for rank, (blocked, sent, received) in counts.items():
            self.boxes[rank].set_emulation(blocked, sent, received)
            self.boxes[rank].heartbeat(0, 0, 0, 0, 0)
        return read_heads(self.out)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of two ranks."""
    return Job(tmp_path)


def see(watch: Watch, *reads: dict[int, RankLog]) -> list[bool]:
    """What the watch says after each read."""
    return [watch.see(logs) for logs in reads]


def test_a_job_that_stands_still_is_quiescent(job: Job) -> None:
    """It is said once the second look has certainly begun after the first had ended."""
    reads = [job.beat(_BLOCKED) for _ in range(4)]
    assert see(Watch(2), *reads) == [False, False, True, True]


def test_reading_the_same_heartbeat_again_proves_nothing(job: Job) -> None:
    """However often one looks: the monitors have not looked since."""
    logs = job.beat(_BLOCKED)
    assert not any(see(Watch(2), *[logs] * 10))
    alone = {0: job.beat({0: (1, 5, 5)})[0]}
    assert not any(see(Watch(1), *[alone] * 10))


def test_every_rank_must_have_been_looked_at_again(job: Job) -> None:
    """A rank whose monitor does not come to run may have anything to tell."""
    reads = [job.beat(_BLOCKED)]
    reads += [job.beat({0: _BLOCKED[0]}) for _ in range(10)]
    assert not any(see(Watch(2), *reads))


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param({0: (1, 7, 5), 1: (1, 6, 7)}, id="a message is on its way"),
        pytest.param({0: (1, 7, 5), 1: (0, 5, 7)}, id="a host runs"),
        pytest.param({0: (0, 0, 0), 1: (0, 0, 0)}, id="no emulation"),
        pytest.param({0: (1, 7, 5)}, id="a rank that has said nothing"),
    ],
)
def test_a_job_that_may_move_is_not_quiescent(
    job: Job, counts: dict[int, tuple[int, int, int]]
) -> None:
    """Any of these can still bring the others on."""
    assert not any(see(Watch(2), *[job.beat(counts) for _ in range(10)]))


def test_a_missing_black_box_leaves_it_open(job: Job) -> None:
    """The third rank may be about to send."""
    assert not any(see(Watch(3), *[job.beat(_BLOCKED) for _ in range(10)]))


def test_messages_in_between_begin_it_anew(job: Job) -> None:
    """Blocked in both looks, with counts that agree, but not the same ones."""
    watch = Watch(2)
    assert see(watch, job.beat(_BLOCKED), job.beat(_BLOCKED)) == [False, False]
    moved = {0: (1, 8, 6), 1: (1, 6, 8)}
    reads = [job.beat(moved) for _ in range(3)]
    assert see(watch, *reads) == [False, False, True]


def test_a_record_in_between_begins_it_anew(job: Job) -> None:
    """The host was not blocked all the time."""
    watch = Watch(2)
    assert see(watch, job.beat(_BLOCKED), job.beat(_BLOCKED)) == [False, False]
    job.boxes[1].record(1, Kind.NOTE)
    reads = [job.beat(_BLOCKED) for _ in range(3)]
    assert see(watch, *reads) == [False, False, True]


@pytest.mark.parametrize(
    ("status", "quiescent"),
    [(Status.EXITED, True), (Status.RAISED, True), (Status.RUNNING, False)],
)
def test_a_rank_that_ended_does_not_move_but_one_that_was_killed_may_have(
    job: Job, *, status: Status, quiescent: bool
) -> None:
    """The first wrote its last counts; those of the second may lack its last message."""
    watch = Watch(2)
    counts = {0: (1, 7, 5), 1: (0, 5, 7)}
    job.boxes[1].set_status(status)
    job.beat(counts)
    said = []
    for _ in range(4):
        logs = job.beat({0: counts[0]})
        logs[1] = with_process_state(logs[1], alive=False)
        said.append(watch.see(logs))
    assert said[-1] is quiescent


def test_a_job_that_has_not_begun_reads_as_nothing(tmp_path: Path) -> None:
    """No folder yet, or an empty one: no error, no verdict."""
    assert read_heads(tmp_path / "none") == read_heads(tmp_path) == {}
    assert not Watch(1).see({})
