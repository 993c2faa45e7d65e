"""All ranks on one clock: corrections, lanes, arrows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptrace.matching import Pair
from pptrace.records import DISABLED, Direction, Flag, Kind, Pass, RankLog, Status
from pptrace.timeline import Row, Span, Timeline, _partition, build
from synthetic import MS, RUN_START_WALL_NS, SECOND, Host, SyntheticRun, one_f_one_b

US = 1_000
SEND, RECV = Direction.SEND, Direction.RECV


def _two_hosts(skew_ns: int) -> list[Host]:
    """Ranks 0 and 1 on one host, 2 and 3 on another whose wall clock is ahead."""
    near, far = Host("near", 5 * SECOND), Host("far", 777 * SECOND, skew_ns)
    return [near, near, far, far]


def _true(timeline: Timeline, rank: int, monotonic_ns: int, host: Host) -> int:
    """By how much the timeline puts a time later than it truly was."""
    true_ns = monotonic_ns - host.uptime_ns + RUN_START_WALL_NS
    return timeline.at(rank, monotonic_ns) - true_ns


def _pairs(timeline: Timeline) -> list[Pair]:
    return [pair for view in timeline.channels.values() for pair in view.pairs()]


def _assert_causal(timeline: Timeline) -> None:
    for pair in _pairs(timeline):
        send, recv = pair.send, pair.recv
        assert timeline.at(recv.rank, recv.record.done_ns) >= timeline.at(
            send.rank, send.record.posted_ns
        )
        assert timeline.at(send.rank, send.record.done_ns) >= timeline.at(
            recv.rank, recv.record.posted_ns
        )


def test_ranks_of_one_host_are_never_shifted_against_each_other(tmp_path: Path) -> None:
    """One host has one clock: zero correction, whatever its wall clock did meanwhile."""
    logs = one_f_one_b(tmp_path, 4, 8).finish()
    for rank, log in logs.items():  # the wall clock was stepped between the readings
        log.heartbeat_wall_ns += rank * 300 * MS
        log.heartbeat_ns += rank
    timeline = build(logs)
    assert [host.correction_ns for host in timeline.hosts] == [0]
    assert timeline.hosts[0].ranks == (0, 1, 2, 3)
    assert len(set(timeline.offsets.values())) == 1
    assert timeline.residual_ns == 0


def test_hosts_that_agree_are_left_alone(tmp_path: Path) -> None:
    """Different monotonic bases are no skew: wall clocks that agree get no correction."""
    hosts = _two_hosts(0)
    timeline = build(one_f_one_b(tmp_path, 4, 8, hosts=hosts).finish())
    assert [host.correction_ns for host in timeline.hosts] == [0, 0]
    for rank, host in enumerate(hosts):
        assert _true(timeline, rank, host.uptime_ns + MS, host) == 0


@pytest.mark.parametrize("skew_ns", [50 * MS, -50 * MS, 3_600 * SECOND])
def test_a_skewed_host_is_brought_back(tmp_path: Path, skew_ns: int) -> None:
    """The correction restores causality and is off by at most one op's latency."""
    hosts = _two_hosts(skew_ns)
    run = one_f_one_b(tmp_path, 4, 8, hosts=hosts)
    timeline = build(run.finish())
    _assert_causal(timeline)
    assert timeline.residual_ns == 0
    near = _true(timeline, 0, hosts[0].uptime_ns, hosts[0])
    far = _true(timeline, 3, hosts[3].uptime_ns, hosts[3])
    assert abs(far - near) <= run.latency_ns
    corrections = [host.correction_ns for host in timeline.hosts]
    assert abs(abs(corrections[1] - corrections[0]) - abs(skew_ns)) <= run.latency_ns


@pytest.mark.parametrize("skew_ns", [50 * MS, -50 * MS])
def test_traffic_in_one_direction_suffices(tmp_path: Path, skew_ns: int) -> None:
    """Forwards alone bound the skew from both sides: sends are rendezvous."""
    hosts = [Host("near"), Host("far", 9 * SECOND, skew_ns)]
    run = SyntheticRun(tmp_path, 2, hosts=hosts)
    run.play({0: "F0; S F0>1; F1; S F1>1", 1: "R F0<0; F0; R F1<0; F1"})
    timeline = build(run.finish())
    _assert_causal(timeline)
    errors = [_true(timeline, r, h.uptime_ns, h) for r, h in enumerate(hosts)]
    assert abs(errors[1] - errors[0]) <= run.compute_ns + run.latency_ns


@settings(max_examples=20, deadline=None)
@given(skews=st.lists(st.integers(-100 * MS, 100 * MS), min_size=5, max_size=5))
def test_any_skews_of_a_healthy_run_can_be_repaired(
    tmp_path_factory: pytest.TempPathFactory, skews: list[int]
) -> None:
    """Skews cannot make true times contradict each other, so nothing is left over."""
    hosts = [Host(f"node{i}", (i + 1) * SECOND, skew) for i, skew in enumerate(skews)]
    folder = tmp_path_factory.mktemp("run")
    timeline = build(one_f_one_b(folder, 5, 6, hosts=hosts, slots=128).finish())
    _assert_causal(timeline)
    assert timeline.residual_ns == 0


def test_the_residual_is_what_no_correction_can_repair(tmp_path: Path) -> None:
    """Two pairs that contradict each other by 10 and 6 ns leave 8 ns each at best."""
    run = SyntheticRun(tmp_path, 2, hosts=[Host("a"), Host("b")])
    run.op(0, SEND, 1, 1_000)
    run.op(1, RECV, 0, 900, 990)
    run.op(1, SEND, 0, 2_000)
    run.op(0, RECV, 1, 1_900, 1_994)
    timeline = build(run.finish())
    assert timeline.residual_ns == 8
    assert all(arrow.end_ns > arrow.begin_ns for arrow in timeline.arrows)


def test_a_buffered_send_does_not_bend_the_clocks(tmp_path: Path) -> None:
    """Where rendezvous contradicts causality, causality alone decides."""
    run = SyntheticRun(tmp_path, 2, hosts=[Host("a"), Host("b")])
    for at in (0, 10 * MS):  # complete at the sender long before the receive is posted
        run.op(0, SEND, 1, at, at + 10 * US)
    run.op(1, RECV, 0, 5 * MS, 5 * MS + US)
    run.op(1, RECV, 0, 10 * MS + 20 * US, 10 * MS + 30 * US)
    run.op(1, SEND, 0, 12 * MS, 12 * MS + 10 * US)
    run.op(0, RECV, 1, 12 * MS, 12 * MS + 10 * US)
    timeline = build(run.finish())
    assert [host.correction_ns for host in timeline.hosts] == [0, 0]
    assert timeline.residual_ns == 0


@given(
    st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 20)), max_size=40)
)
def test_lanes_never_overlap_and_are_as_few_as_possible(
    intervals: list[tuple[int, int | None]],
) -> None:
    """As many lanes as spans are ever open at once; each span is on exactly one."""
    spans = [
        Span(begin, None if length is None else begin + length, ())
        for begin, length in intervals
    ]
    object_order = {id(span): i for i, span in enumerate(spans)}
    lanes = list(_partition(spans))
    placed = [id(span) for lane in lanes for span in lane]
    assert sorted(placed) == sorted(object_order)
    for lane in lanes:
        for before, after in pairwise(lane):
            assert before.end_ns is not None
            assert before.end_ns <= after.begin_ns
    begins = sorted(span.begin_ns for span in spans)
    most = max(
        (
            sum(
                span.begin_ns <= at
                and (span.end_ns is None or at < max(span.end_ns, span.begin_ns + 1))
                for span in spans
            )
            for at in begins
        ),
        default=0,
    )
    assert len(lanes) <= most


def _row(timeline: Timeline, rank: int, row: Row) -> list[Span]:
    return [
        span for lane in timeline.lanes(rank) if lane.row is row for span in lane.spans
    ]


def test_what_hangs_never_ends(tmp_path: Path) -> None:
    """In the founding hang exactly the ops that pair with nothing stay open."""
    timeline = build(one_f_one_b(tmp_path, 4, 2).finish(idle_ns=30 * SECOND))
    open_ops = {
        (rank, span.record.label, span.record.direction)
        for rank in range(4)
        for row in (Row.SEND, Row.RECV)
        for span in _row(timeline, rank, row)
        if span.end_ns is None
    }
    assert open_ops == {
        (0, "F1", SEND),
        (0, "B0", RECV),
        (1, "F1", RECV),
        (2, "F1", RECV),
        (3, "B0", SEND),
        (3, "F1", RECV),
    }
    assert len(timeline.unmatched) == 6
    assert timeline.end_ns - timeline.progress_ns == 30 * SECOND


def test_a_run_that_is_over_ends_with_its_last_record(tmp_path: Path) -> None:
    """An hour of idling after the last step is not part of the picture."""
    run = one_f_one_b(tmp_path, 2, 2)
    for rank in range(2):
        run.status(rank, Status.EXITED, run.end_ns + SECOND)
    timeline = build(run.finish(idle_ns=3_600 * SECOND))
    assert timeline.end_ns == timeline.progress_ns
    assert timeline.end_ns - timeline.start_ns < SECOND


def test_failed_and_dropped_ops_end_unless_nobody_ever_posted_the_other_side(
    tmp_path: Path,
) -> None:
    """A dropped work may be complete, so it is not shown as hanging; an orphan hangs."""
    run = SyntheticRun(tmp_path, 2)
    failed = run.op(0, SEND, 1, 10, flags=Flag.FAILED)
    run.set_times(0, failed, returned=20, wait=30, waited=40)
    dropped = run.op(0, SEND, 1, 50, flags=Flag.DROPPED)
    run.set_times(0, dropped, returned=60)
    orphan = run.op(0, SEND, 1, 70, flags=Flag.DROPPED)
    for at in (10, 50):
        run.op(1, RECV, 0, at)
    timeline = build(run.finish())
    durations = {
        span.record.seq: span.end_ns and span.end_ns - span.begin_ns
        for span in _row(timeline, 0, Row.SEND)
    }
    assert durations == {failed: 30, dropped: 10, orphan: None}


def test_a_batch_is_waited_for_once(tmp_path: Path) -> None:
    """Two ops behind one work are one wait, and one call if the call took long."""
    run = SyntheticRun(tmp_path, 2)
    flags = Flag.COALESCED
    seqs = [
        run.op(0, SEND, 1, 0, batch=(1, 0, 2), flags=flags),
        run.op(0, RECV, 1, 0, batch=(1, 1, 2), flags=flags),
    ]
    for seq in seqs:
        run.set_times(0, seq, returned=3 * MS, wait=4 * MS)
    lone = run.op(0, SEND, 1, 4 * MS)
    run.set_times(0, lone, returned=4 * MS + US)
    inside = run.op(0, SEND, 1, 5 * MS)
    timeline = build(run.finish())
    waits = _row(timeline, 0, Row.WAIT)
    assert [[r.seq for r in span.records] for span in waits] == [seqs]
    assert waits[0].end_ns is None
    calls = _row(timeline, 0, Row.CALL)
    assert [[r.seq for r in span.records] for span in calls] == [seqs, [inside]]
    assert calls[0].end_ns == calls[0].begin_ns + 3 * MS
    assert calls[1].end_ns is None


def test_every_completed_pair_has_one_arrow(tmp_path: Path) -> None:
    """2·(S−1)·n arrows for one step, each forward in time."""
    timeline = build(one_f_one_b(tmp_path, 4, 8).finish())
    assert len(timeline.arrows) == 2 * 3 * 8
    assert len({arrow.number for arrow in timeline.arrows}) == 48
    assert all(arrow.begin_ns < arrow.end_ns for arrow in timeline.arrows)


def test_counts_that_cannot_be_trusted_draw_no_arrows(tmp_path: Path) -> None:
    """With a gap in one side's counts, k no longer tells which send a receive got."""
    logs = one_f_one_b(tmp_path, 3, 3).finish()
    logs[0].incomplete = "enabled late"
    timeline = build(logs)
    assert {(a.pair.channel.src, a.pair.channel.dst) for a in timeline.arrows} == {
        (1, 2),
        (2, 1),
    }


def test_ranks_come_in_numeric_order(tmp_path: Path) -> None:
    """However the files were found, rank 2 comes before rank 10."""
    logs = one_f_one_b(tmp_path, 11, 11).finish()
    shuffled = {rank: logs[rank] for rank in sorted(logs, key=str)}
    assert list(build(shuffled).logs) == list(range(11))


def test_ranks_without_records_or_files_are_no_obstacle(tmp_path: Path) -> None:
    """A missing peer and an empty black box still give a timeline."""
    run = SyntheticRun(tmp_path, 3)
    run.action(0, Pass.F, 0, MS, 2 * MS)
    run.op(0, SEND, 2, 2 * MS)
    logs = run.finish()
    del logs[2]
    timeline = build(logs)
    assert timeline.lanes(1) == []
    assert not timeline.unmatched  # nothing is known of rank 2
    assert [span.end_ns for span in _row(timeline, 0, Row.SEND)] == [None]
    assert build({}).arrows == ()
    bare = build({0: RankLog(path="", rank=0, world_size=1)})
    assert bare.start_ns == bare.end_ns


def test_lanes_hold_every_record_that_lasts(tmp_path: Path) -> None:
    """Actions, ops, steps and collectives are all there, each once."""
    run = one_f_one_b(tmp_path, 2, 2)
    run.collective(1, "all_reduce", run.end_ns, run.end_ns + MS)
    timeline = build(run.finish())
    for rank, log in timeline.logs.items():
        shown = [
            span.record.seq
            for lane in timeline.lanes(rank)
            if lane.row not in {Row.CALL, Row.WAIT}
            for span in lane.spans
        ]
        lasting = {Kind.OP, Kind.ACTION, Kind.STEP, Kind.COLLECTIVE}
        recorded = [r.seq for r in log.records if r.kind in lasting]
        assert sorted(shown) == sorted(recorded)


def test_a_run_that_ended_with_disable_keeps_its_arrows(tmp_path: Path) -> None:
    """Ops after ``disable`` are missing, those before it are counted right."""
    logs = one_f_one_b(tmp_path, 3, 3).finish()
    whole = len(build(logs).arrows)
    for log in logs.values():
        log.incomplete = DISABLED
    assert len(build(logs).arrows) == whole > 0
