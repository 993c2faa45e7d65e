"""The Perfetto trace, as a trace processor and so the Perfetto UI understands it."""

from __future__ import annotations

import contextlib
import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from pptrace.errors import InputError
from pptrace.matching import match
from pptrace.records import Direction, Flag, Kind, Pass, RankLog, Status
from pptrace.report import Finding, Report
from pptrace.timeline import build
from pptrace.viewers.perfetto import TraceStats, write_trace
from synthetic import MS, RUN_START_WALL_NS, SECOND, Host, SyntheticRun, one_f_one_b
from trace_processor import Query, Rows, loaded

Logs = dict[int, RankLog]
Trace = tuple[Logs, TraceStats, Query]

VERDICT = Finding(
    code="PPT001",
    name="transport split",
    severity="error",
    sentence="r0 fused its send of F1 with the receive of B0; r1 receives F1 alone",
    culprits=(0,),
    victims=(1, 2, 3),
    evidence=("r0 {isend F1→r1, irecv B0←r1} on group pp", "r1 irecv F1←r0 on 0:1"),
    remedy=("use pptrace.schedules.Schedule1F1B",),
)
STRAGGLER = Finding("PPT009", "straggler", "note", "r3 is slow", culprits=(3,))
REPORT = Report("made up", "2025-06-15T15:06:40Z", 4, (VERDICT, STRAGGLER), ())

# The tree of tracks in the order in which the UI shows it; the UI asks the same.
SHOWN_TRACKS = """
  include perfetto module viz.summary.track_event;
  select name, parent_id, has_data, track_ids
  from _track_event_tracks_ordered_groups order by parent_id is not null, order_id
"""

FLOWS = """
  select
    source.ts as sent, target.ts as received, source.name as source,
    target.name as target,
    source_rank.name as source_rank, target_rank.name as target_rank,
    extract_arg(source.arg_set_id, 'debug.transport') as transport,
    extract_arg(source.arg_set_id, 'debug.k') as k
  from flow
  join slice source on source.id = flow.slice_out
  join slice target on target.id = flow.slice_in
  join track source_track on source_track.id = source.track_id
  join track target_track on target_track.id = target.track_id
  join track source_rank on source_rank.id = source_track.parent_id
  join track target_rank on target_rank.id = target_track.parent_id
"""


def _healthy(folder: Path) -> Logs:
    """Two steps of 1F1B on 4 ranks."""
    return one_f_one_b(folder, 4, 8, steps=2).finish()


def _hung(folder: Path) -> Logs:
    """The founding hang: 4 ranks, 2 microbatches. In the end r3 raises."""
    run = one_f_one_b(folder, 4, 2)
    run.exception(3, "RuntimeError: watchdog\nTraceback of it", run.end_ns)
    run.note(2, "a hook failed open", run.end_ns)
    return run.finish(idle_ns=30 * SECOND)


def _skewed(folder: Path, skew_ns: int) -> Logs:
    """11 ranks on two hosts, one with another uptime and a wrong wall clock."""
    near, far = Host("near", 5 * SECOND), Host("far", 777 * SECOND, skew_ns)
    hosts = [far if rank % 2 else near for rank in range(11)]
    return one_f_one_b(folder, 11, 12, hosts=hosts).finish()


RUNS: dict[str, Callable[[Path], Logs]] = {
    "healthy": _healthy,
    "hung": _hung,
    "ahead": lambda folder: _skewed(folder, 50 * MS),
    "behind": lambda folder: _skewed(folder, -50 * MS),
}

Open = Callable[[str], Trace]


@pytest.fixture(scope="module")
def open_trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Writes and loads the trace of one of `RUNS`, once."""
    traces: dict[str, Trace] = {}
    with contextlib.ExitStack() as stack:

        def open_one(name: str) -> Trace:
            if name not in traces:
                folder = tmp_path_factory.mktemp(name)
                logs = RUNS[name](folder)
                path = folder / "job.pftrace.gz"
                stats = write_trace(logs, path, REPORT if name == "hung" else None)
                traces[name] = logs, stats, stack.enter_context(loaded(path))
            return traces[name]

        yield open_one


@pytest.fixture(scope="module", params=sorted(RUNS))
def trace(open_trace: Open, request: pytest.FixtureRequest) -> Trace:
    """Each of the traces."""
    return open_trace(request.param)


@pytest.fixture(scope="module")
def healthy(open_trace: Open) -> Trace:
    """Two steps of 1F1B on 4 ranks."""
    return open_trace("healthy")


@pytest.fixture(scope="module")
def hung(open_trace: Open) -> Trace:
    """The founding hang, with a report."""
    return open_trace("hung")


@pytest.fixture(scope="module")
def skewed(open_trace: Open) -> Trace:
    """11 ranks on two hosts."""
    return open_trace("ahead")


def _rank(track_name: str) -> int:
    """The rank in the name of a rank's track: ``rank 03 · stage 3 · node0``."""
    word, number, *_ = track_name.split()
    assert word == "rank"
    return int(number)


def _shown_ranks(query: Query) -> Rows:
    tracks = [row for row in query(SHOWN_TRACKS) if row["parent_id"] is None]
    return [row for row in tracks if row["name"].startswith("rank")]


def test_the_trace_processor_has_nothing_to_complain_about(trace: Trace) -> None:
    """No packet is malformed, lost or out of place."""
    _, _, query = trace
    assert (
        query("select name, value from stats where severity != 'info' and value") == []
    )


def test_every_completed_pair_has_one_arrow_in_the_right_direction(
    trace: Trace,
) -> None:
    """From the isend on the sender to the completion on the receiver, later in time."""
    logs, stats, query = trace
    expected = Counter(
        (p.send.rank, p.recv.rank, p.channel.transport.name.lower(), p.k)
        for view in match(logs).values()
        for p in view.pairs()
        if p.recv.record.done_ns
    )
    flows = query(FLOWS)
    drawn = Counter(
        (
            _rank(flow["source_rank"]),
            _rank(flow["target_rank"]),
            flow["transport"],
            flow["k"],
        )
        for flow in flows
    )
    assert drawn == expected
    assert set(drawn.values()) <= {1}
    assert stats.flows == len(flows) > 0
    for flow in flows:
        label = flow["source"].removeprefix("isend ").partition("→")[0]
        assert flow["target"] == f"received {label}←r{_rank(flow['source_rank'])}"
        assert flow["sent"] < flow["received"]


def test_no_slices_overlap_on_a_track(trace: Trace) -> None:
    """A track is a stack: what overlapped would be drawn with wrong ends."""
    _, _, query = trace
    overlapping = query("""
      select * from (
        select name, ts, dur, track_id,
          lead(ts) over (partition by track_id order by ts, id) as next
        from slice)
      where next is not null and (dur = -1 or ts + dur > next)
    """)
    assert overlapping == []
    assert query("select name from slice where depth > 0 or dur < -1") == []


def test_every_slice_lasts_as_long_as_its_record(trace: Trace) -> None:
    """Names and durations of all actions and ops are those of the black boxes."""
    logs, _, query = trace
    expected = Counter(
        (
            rank,
            record.label,
            -1 if record.is_open else record.done_ns - record.posted_ns,
        )
        for rank, log in logs.items()
        for record in log.records
        if record.kind in {Kind.ACTION, Kind.OP}
    )
    rows = query("""
      select slice.name, dur, ifnull(parent.name, track.name) as rank
      from slice join track on track.id = slice.track_id
      left join track parent on parent.id = track.parent_id
      where category in ('F', 'B', 'sends', 'receives')
    """)
    drawn = Counter(
        (_rank(row["rank"]), _label(row["name"]), row["dur"]) for row in rows
    )
    assert drawn == expected


def _label(name: str) -> str:
    """``F2`` of ``F2 stage 1``, of ``isend F2→r1`` and of ``irecv F2←r1``."""
    words = name.replace("→", " ").replace("←", " ").split()
    return words[1] if words[0] in {"isend", "irecv"} else words[0]


def test_actions_and_ops_carry_stage_and_microbatch(trace: Trace) -> None:
    """They can be selected in SQL, and the name of an action says both."""
    _, _, query = trace
    rows = query("""
      select name, category,
        extract_arg(arg_set_id, 'debug.stage') as stage,
        extract_arg(arg_set_id, 'debug.microbatch') as microbatch,
        extract_arg(arg_set_id, 'debug.pass') as pass
      from slice where category in ('F', 'B', 'sends', 'receives')
    """)
    assert rows
    for row in rows:
        assert row["stage"] is not None
        assert _label(row["name"]) == f"{row['pass']}{row['microbatch']}"
        if row["category"] in {"F", "B"}:
            assert row["category"] == row["pass"]
            assert row["name"].endswith(f" stage {row['stage']}")


def test_ranks_are_shown_in_numeric_order(trace: Trace) -> None:
    """0, 1, 2, …, 10, where sorting by name would put 10 before 2."""
    logs, _, query = trace
    assert [_rank(row["name"]) for row in _shown_ranks(query)] == sorted(logs)


def test_a_rank_says_its_stage_and_host(skewed: Trace) -> None:
    """Both stand in the name of its track."""
    _, _, query = skewed
    names = [row["name"] for row in _shown_ranks(query)]
    assert names[3] == "rank 03 · stage 3 · far"
    assert names[10] == "rank 10 · stage 10 · near"


def test_compute_is_seen_before_anything_is_unfolded(healthy: Trace) -> None:
    """Actions are on the rank's own track; the rest is below it, in reading order."""
    _, _, query = healthy
    second = _shown_ranks(query)[1]
    own = query(f"select category from slice where track_id in ({second['track_ids']})")
    assert {row["category"] for row in own} == {"F", "B"}
    below = [
        row["name"]
        for row in query(SHOWN_TRACKS)
        if str(row["parent_id"]) == second["track_ids"]
    ]
    assert below == ["steps", "sends", "receives", "waits"]


def test_all_ranks_are_on_one_clock(trace: Trace) -> None:
    """The trace begins at 0, lasts as long as the run, and knows the wall time."""
    _, stats, query = trace
    (extent,) = query("""
      select min(ts) as first, max(ts) as last, to_realtime(0) as wall
      from slice where category in ('F', 'B', 'sends', 'receives', 'steps')
    """)
    assert extent["first"] == 0
    assert 0 < extent["last"] < SECOND
    assert abs(extent["wall"] - RUN_START_WALL_NS) < SECOND
    assert stats.clock_residual_ns == 0


def test_an_op_carries_all_its_fields(healthy: Trace) -> None:
    """Everything the black box knows of an op can be read in the UI."""
    _, _, query = healthy
    (row,) = query("""
      select arg_set_id from slice where name = 'isend F3→r1' order by ts limit 1
    """)
    fields = {
        arg["key"].removeprefix("debug."): arg["display_value"]
        for arg in query(f"select * from args where arg_set_id = {row['arg_set_id']}")
    }
    assert float(fields.pop("in_wait_us")) > 0
    assert fields == {
        "kind": "isend",
        "peer": "1",
        "group_peer": "1",
        "transport": "group",
        "group": "pipeline",
        "group_ranks": "0-3",
        "channel": "pipeline group r0→r1",
        "k": "0",
        "tag": "0",
        "shape": "[2, 8]",
        "dtype": "float32",
        "contiguous": "true",
        "nbytes": "64",
        "tensor_index": "0",
        "batch": "4",
        "batch_index": "0",
        "batch_size": "2",
        "coalesced": "true",
        "thread": "0",
        "stage": "0",
        "microbatch": "3",
        "pass": "F",
        "desc": "batch",
        "step": "1",
        "seq": "9",
        "in_call_us": "5.0",
        "state": "done",
    }


def test_ops_alike_but_for_one_field_do_not_share_it(tmp_path: Path) -> None:
    """Fields that most ops share are written once; each op still has its own."""
    run = SyntheticRun(tmp_path, 3)
    seqs = [
        run.op(0, Direction.SEND, 1, 0, MS, shape=(2, 5)),
        run.op(0, Direction.SEND, 1, 2 * MS, 3 * MS, shape=(5, 2)),
        run.op(0, Direction.SEND, 2, 4 * MS, 5 * MS, shape=(5, 2)),
        run.op(0, Direction.SEND, 2, 6 * MS, 7 * MS, shape=(5, 2), desc="other"),
        run.op(0, Direction.SEND, 2, 8 * MS, 9 * MS, shape=(5, 2), microbatch=7),
    ]
    write_trace(run.finish(), tmp_path / "job.pftrace")
    with loaded(tmp_path / "job.pftrace") as query:
        rows = query("""
          select
            extract_arg(arg_set_id, 'debug.seq') as seq,
            extract_arg(arg_set_id, 'debug.shape') as shape,
            extract_arg(arg_set_id, 'debug.peer') as peer,
            extract_arg(arg_set_id, 'debug.desc') as desc,
            extract_arg(arg_set_id, 'debug.microbatch') as microbatch
          from slice where category = 'sends' order by ts
        """)
    assert [tuple(row.values()) for row in rows] == [
        (seqs[0], "[2, 5]", 1, None, None),
        (seqs[1], "[5, 2]", 1, None, None),
        (seqs[2], "[5, 2]", 2, None, None),
        (seqs[3], "[5, 2]", 2, "other", None),
        (seqs[4], "[5, 2]", 2, None, 7),
    ]


def test_what_hangs_stays_open(hung: Trace) -> None:
    """Ops without a partner, the waits for them, the steps; nothing else."""
    _, stats, query = hung
    rows = query("""
      select slice.name, parent.name as rank
      from slice join track on track.id = slice.track_id
      join track parent on parent.id = track.parent_id
      where dur = -1 order by slice.name
    """)
    drawn = {(_rank(row["rank"]), row["name"]) for row in rows}
    assert drawn == {(rank, "step 1") for rank in range(4)} | {
        (0, "isend F1→r1 unmatched"),
        (0, "irecv B0←r1 unmatched"),
        (0, "wait {F1→r1, B0←r1}"),
        (1, "irecv F1←r0 unmatched"),
        (1, "wait F1←r0"),
        (2, "irecv F1←r1 unmatched"),
        (2, "wait F1←r1"),
        (3, "isend B0→r2 unmatched"),
        (3, "irecv F1←r2 unmatched"),
        (3, "wait {B0→r2, F1←r2}"),
    }
    assert stats.open_slices == query.one("select count() from slice where dur = -1")


def test_what_a_rank_is_stuck_in_is_seen_before_anything_is_unfolded(
    hung: Trace,
) -> None:
    """After its last action, the rank's own track shows the call or wait it is in."""
    _, _, query = hung
    last = [
        query.one(f"""
          select name from slice where track_id in ({rank["track_ids"]})
          order by ts desc limit 1
        """)
        for rank in _shown_ranks(query)
    ]
    assert last == [
        "in wait {F1→r1, B0←r1}",
        "in wait F1←r0",
        "in wait F1←r1",
        "in wait {B0→r2, F1←r2}",
    ]


def test_a_hang_is_as_long_as_it_was(hung: Trace) -> None:
    """Half a minute of silence is half a minute of trace."""
    _, _, query = hung
    assert query.one("select trace_end() - trace_start()") >= 30 * SECOND


def test_the_verdict_is_in_the_trace(hung: Trace) -> None:
    """On top, readable, over the time in which nothing went on; culprits are marked."""
    _, _, query = hung
    top = query(SHOWN_TRACKS)[0]
    assert top["name"] == "Verdict"
    (verdict,) = query(f"select * from slice where track_id in ({top['track_ids']})")
    assert verdict["name"] == f"PPT001 transport split: {VERDICT.sentence}"
    assert verdict["dur"] == 30 * SECOND
    fields = {
        arg["key"]: arg["string_value"]
        for arg in query(f"select * from args where arg_set_id={verdict['arg_set_id']}")
    }
    assert fields["debug.evidence 2"] == VERDICT.evidence[1]
    assert fields["debug.remedy 1"] == VERDICT.remedy[0]
    assert fields["debug.victims"] == "1-3"
    assert query.one("select count() from slice where name glob 'PPT009*is slow'") == 1
    assert _markers(query) >= {
        (0, "PPT001 transport split: culprit"),
        (3, "PPT009 straggler: culprit"),
    }


def _markers(query: Query) -> set[tuple[int, str]]:
    rows = query("""
      select slice.name, parent.name as rank
      from slice join track on track.id = slice.track_id
      join track parent on parent.id = track.parent_id
      where track.name = 'markers'
    """)
    return {(_rank(row["rank"]), row["name"]) for row in rows}


def test_exceptions_notes_and_fates_are_marked(hung: Trace) -> None:
    """Who raised, what pptrace had to say, and who gave a sign of life last."""
    _, _, query = hung
    assert _markers(query) >= {
        (3, "exception: RuntimeError: watchdog"),
        (3, "an exception left the step"),
        (2, "note: a hook failed open"),
        (1, "last sign of life"),
    }
    text = query.one("""
      select extract_arg(arg_set_id, 'debug.text') from slice
      where name glob 'exception: *'
    """)
    assert text == "RuntimeError: watchdog\nTraceback of it"


def test_a_healthy_run_has_no_markers(healthy: Trace) -> None:
    """Nothing to see, nothing shown."""
    _, stats, query = healthy
    assert _markers(query) == set()
    assert stats.open_slices == 0


def test_no_arrow_is_lost_where_clocks_cannot_agree(tmp_path: Path) -> None:
    """A receive complete before its send, beyond repair, still gets its arrow."""
    run = SyntheticRun(tmp_path, 2)
    run.op(0, Direction.SEND, 1, 5 * MS, 6 * MS)
    run.op(1, Direction.RECV, 0, MS, 2 * MS)
    stats = write_trace(run.finish(), tmp_path / "job.pftrace")
    assert stats.clock_residual_ns == 3 * MS
    with loaded(tmp_path / "job.pftrace") as query:
        (flow,) = query(FLOWS)
    assert (flow["source"], flow["target"]) == ("isend x→r1", "received x←r0")


def test_the_fates_of_ranks_beside_a_hang(tmp_path: Path) -> None:
    """A rank that left, one that pptrace left, and a collective that hangs."""
    run = SyntheticRun(tmp_path, 3)
    run.collective(0, "all_reduce", 0)
    run.action(1, Pass.F, 0, 0, MS)
    run.status(1, Status.EXITED, 2 * MS)
    run.status(2, Status.DISABLED, 2 * MS)
    write_trace(run.finish(idle_ns=SECOND), tmp_path / "job.pftrace")
    with loaded(tmp_path / "job.pftrace") as query:
        assert _markers(query) == {
            (0, "last sign of life"),
            (1, "exited normally"),
            (2, "pptrace was disabled"),
        }
        present = query("select name from slice where category = 'present'")
        assert [row["name"] for row in present] == ["in call all_reduce"]


def test_a_hang_that_ended_in_an_exception_is_still_seen(tmp_path: Path) -> None:
    """The wait that timed out stands where the hang was, and so does the verdict."""
    run = SyntheticRun(tmp_path, 2)
    run.action(0, Pass.F, 0, 0, MS)
    seq = run.op(0, Direction.RECV, 1, MS, flags=Flag.FAILED)
    run.set_times(0, seq, returned=MS, wait=2 * MS, waited=40 * SECOND)
    run.exception(0, "RuntimeError: timed out", 40 * SECOND)
    path = tmp_path / "job.pftrace"
    write_trace(run.finish(), path, REPORT)
    with loaded(path) as query:
        rows = query("""
          select name, ts, dur from slice where category in ('present', 'error')
          and dur > 0 order by name
        """)
    assert [(row["name"][:7], row["ts"], row["dur"]) for row in rows] == [
        ("PPT001 ", 2 * MS, 40 * SECOND - 2 * MS),
        ("failed ", 2 * MS, 40 * SECOND - 2 * MS),
    ]


def test_a_busy_rank_is_not_shown_as_waiting(tmp_path: Path) -> None:
    """An open action is what the rank is doing, even with a receive outstanding."""
    run = SyntheticRun(tmp_path, 2)
    seq = run.op(0, Direction.RECV, 1, 0)
    run.set_times(0, seq, returned=1, wait=2)
    run.action(0, Pass.F, 0, MS)
    path = tmp_path / "job.pftrace"
    write_trace(run.finish(), path)
    assert "F0 stage 0" in _names(path)
    assert not any(name.startswith("in ") for name in _names(path))


def _packets(path: Path) -> list[schema.TracePacket]:
    trace = schema.Trace()
    data = path.read_bytes()
    trace.ParseFromString(gzip.decompress(data) if path.suffix == ".gz" else data)
    return list(trace.packet)


def _names(path: Path) -> list[str]:
    names = {
        entry.iid: entry.name
        for packet in _packets(path)
        for entry in packet.interned_data.event_names
    }
    begin = schema.TrackEvent.TYPE_SLICE_BEGIN
    return [
        names[packet.track_event.name_iid]
        for packet in _packets(path)
        if packet.track_event.type == begin
    ]


def test_a_large_trace_is_written_in_parts_and_whole(tmp_path: Path) -> None:
    """Beyond one part's packets nothing is lost, and .gz holds the same as plain."""
    timeline = build(one_f_one_b(tmp_path, 4, 64, steps=4, slots=4096).finish())
    plain, packed = tmp_path / "job.pftrace", tmp_path / "job.pftrace.gz"
    stats = write_trace(timeline, plain)
    packed_stats = write_trace(timeline, packed)
    packets = _packets(plain)
    assert len(packets) > 3 * 4096
    kinds = Counter(packet.track_event.type for packet in packets)
    assert kinds[schema.TrackEvent.TYPE_SLICE_BEGIN] == stats.slices
    assert kinds[schema.TrackEvent.TYPE_SLICE_END] == stats.slices
    assert kinds[schema.TrackEvent.TYPE_INSTANT] == stats.flows == 2 * 3 * 64 * 4
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert stats.nbytes == plain.stat().st_size
    assert packed_stats.nbytes == packed.stat().st_size < stats.nbytes / 4


def test_a_large_batch_does_not_fill_the_screen_with_its_name(tmp_path: Path) -> None:
    """A wait for hundreds of ops names some and counts the rest."""
    run = SyntheticRun(tmp_path, 2)
    for index in range(300):
        seq = run.op(
            0, Direction.SEND, 1, 0, batch=(1, index, 300), flags=Flag.COALESCED,
            pass_=Pass.F, microbatch=index,
        )  # fmt: skip
        run.set_times(0, seq, returned=1, wait=2)
    path = tmp_path / "job.pftrace"
    write_trace(run.finish(), path)
    assert "wait {F0→r1, F1→r1, F2→r1, F3→r1, 296 more}" in _names(path)


def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """One clear line; what was there before is still there, nothing half-made beside."""
    logs = one_f_one_b(tmp_path, 2, 2).finish()
    path = tmp_path / "job.pftrace"
    write_trace(logs, path)
    before, files = path.read_bytes(), set(tmp_path.iterdir())
    broken = Finding("PPT001", "x", "error", "y", evidence=(object(),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_trace(logs, path, Report("", "", 2, (broken,), ()))
    assert path.read_bytes() == before
    assert set(tmp_path.iterdir()) == files
    with pytest.raises(
        InputError, match=r"missing/job\.pftrace: cannot be written: No"
    ):
        write_trace(logs, tmp_path / "missing" / "job.pftrace")


def test_a_run_without_records_is_still_a_trace(tmp_path: Path) -> None:
    """Nothing was recorded; the trace says of which run."""
    stats = write_trace(SyntheticRun(tmp_path, 2).finish(), tmp_path / "job.pftrace")
    assert stats == TraceStats(1, 0, 0, stats.nbytes, 0)
    assert "2 ranks on 1 host" in _names(tmp_path / "job.pftrace")
