"""Write a run as a Perfetto trace: ranks × time, sends tied to receives by arrows.

How the tracks are laid out was decided by looking at the UI (v52):

* Ranks are plain top-level tracks, not processes: the UI sorts processes by how much
  they hold. Top-level tracks it sorts by name, so ranks are padded to equal width.
* A rank's compute stands on the rank's own track and so is seen without unfolding: what
  opens is the pipeline diagram.
* Slices that overlap lie on tracks of their own, since a track is a stack; tracks of one
  name under one parent are drawn as one.
* An arrow ends at an instant at the completion of the receive. Ended at the receive's
  slice, which may begin before the send's, it would be lost without a word.
* Colours come from a slice's name without its numbers: every F looks alike.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from pptrace.errors import InputError
from pptrace.records import (
    NONE,
    Direction,
    Flag,
    Kind,
    Pass,
    RankLog,
    Record,
    Status,
    format_ranks,
)
from pptrace.report import Finding, Report
from pptrace.timeline import Arrow, Lane, Row, Span, Timeline, build

__all__ = ["TraceStats", "write_trace"]

_Value = str | int | float | bool
_Fields = Iterable[tuple[str, _Value]]

_PACKETS_PER_CHUNK = 4096
_SEQUENCE = 1
_BOOTTIME, _REALTIME = 6, 1  # perfetto's ids of its builtin clocks
_MAX_MEMBERS = 4
"""Ops named in the slice of a joint call or wait; a batch can have hundreds."""


@dataclass(frozen=True, slots=True)
class TraceStats:
    """What was written."""

    slices: int
    open_slices: int
    """Slices that never end: what hangs."""
    flows: int
    """Arrows from a send to the completion of its receive."""
    nbytes: int
    """Size of the file."""
    clock_residual_ns: int
    """See `pptrace.timeline.Timeline.residual_ns`."""


def write_trace(
    logs: Mapping[int, RankLog] | Timeline,
    path: str | os.PathLike[str],
    report: Report | None = None,
) -> TraceStats:
    """Write a trace for ui.perfetto.dev, or any other Perfetto UI or trace processor.

    Args:
        logs: the black boxes of a run by rank, or the timeline built from them.
        path: the file; gzip-compressed if its name ends in ``.gz``.
        report: adds its verdict, and marks the culprits.

    Raises:
        InputError: the file cannot be written. There is then none, or the one that was
            there before.
    """
    timeline = logs if isinstance(logs, Timeline) else build(logs)
    path = Path(path)
    try:
        with _replacing(path) as stream:
            writer = _Writer(stream, timeline.start_ns)
            _Run(writer, timeline, report).draw()
            writer.flush()
        nbytes = path.stat().st_size
    except OSError as error:
        raise InputError(path, f"cannot be written: {error.strerror}") from None
    return TraceStats(
        slices=writer.slices,
        open_slices=writer.slices - writer.ends,
        flows=writer.flows,
        nbytes=nbytes,
        clock_residual_ns=timeline.residual_ns,
    )


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` once it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as compressed:
                    yield cast("BinaryIO", compressed)
            else:
                yield raw
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# -- packets -----------------------------------------------------------------------


class _Writer:
    """Makes packets of tracks and events; writes them out every few thousand.

    Strings that repeat are written once and referred to by number.
    """

    def __init__(self, stream: BinaryIO, start_ns: int) -> None:
        self.slices = self.ends = self.flows = 0
        self._stream = stream
        self._start_ns = start_ns
        self._tracks = 0
        self._interned: dict[tuple[str, str], int] = {}
        self._trace = schema.Trace()
        packet = self._packet()
        packet.sequence_flags = schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for clock, now in ((_BOOTTIME, 0), (_REALTIME, start_ns)):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=now)

    def track(
        self, name: str, *, parent: int = 0, order: int = 0, about: str = ""
    ) -> int:
        """Describe a track; return its number. ``order`` is its place in ``parent``."""
        self._tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._tracks
        descriptor.name = name
        descriptor.child_ordering = schema.TrackDescriptor.EXPLICIT
        descriptor.sibling_order_rank = order
        if parent:
            descriptor.parent_uuid = parent
        if about:
            descriptor.description = about
        return self._tracks

    def slice(
        self,
        track: int,
        begin_ns: int,
        end_ns: int | None,
        name: str,
        category: str,
        fields: _Fields,
        *,
        constant: bytes = b"",
        arrow: int = 0,
    ) -> None:
        """Draw a slice, open if ``end_ns`` is None; an arrow starts at it if numbered.

        Slices of a track must come in order of time and not overlap. ``constant`` are
        fields that `fields_once` has made.
        """
        event = self._event(
            track, begin_ns, schema.TrackEvent.TYPE_SLICE_BEGIN, name, category, fields
        )
        if constant:
            event.MergeFromString(constant)
        if arrow:
            event.flow_ids.append(arrow)
            self.flows += 1
        self.slices += 1
        if end_ns is not None:
            packet = self._packet()
            packet.timestamp = end_ns - self._start_ns
            packet.track_event.type = schema.TrackEvent.TYPE_SLICE_END
            packet.track_event.track_uuid = track
            self.ends += 1

    def instant(
        self,
        track: int,
        at_ns: int,
        name: str,
        category: str,
        fields: _Fields = (),
        *,
        arrow: int = 0,
    ) -> None:
        """Draw a point in time; an arrow ends at it if numbered."""
        event = self._event(
            track, at_ns, schema.TrackEvent.TYPE_INSTANT, name, category, fields
        )
        if arrow:
            event.terminating_flow_ids.append(arrow)

    def fields_once(self, fields: _Fields) -> bytes:
        """Encode fields that many slices share: taking them over costs next to nothing."""
        event = schema.TrackEvent()
        _annotate(event, self._number(fields))
        encoded: bytes = event.SerializeToString()
        return encoded

    def flush(self) -> None:
        """Write out what is complete.

        A new message each time: clearing one is a trap, for whoever still holds its list
        of packets fills a list that nobody writes.
        """
        self._stream.write(self._trace.SerializeToString())
        self._trace = schema.Trace()

    def _packet(self) -> Any:
        if len(self._trace.packet) >= _PACKETS_PER_CHUNK:
            self.flush()
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def _event(
        self,
        track: int,
        at_ns: int,
        kind: int,
        name: str,
        category: str,
        fields: _Fields,
    ) -> Any:
        # All that is interned here may write packets of its own, so it comes first.
        name_number = self._intern("event_names", name)
        category_number = self._intern("event_categories", category)
        numbered = self._number(fields)
        packet = self._packet()
        packet.timestamp = at_ns - self._start_ns
        packet.sequence_flags = schema.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        event.type = kind
        event.track_uuid = track
        event.name_iid = name_number
        event.category_iids.append(category_number)
        _annotate(event, numbered)
        return event

    def _number(self, fields: _Fields) -> list[tuple[int, _Value]]:
        return [
            (self._intern("debug_annotation_names", key), value)
            for key, value in fields
        ]

    def _intern(self, table: str, text: str) -> int:
        """The number of a text; a packet tells it to the reader before its first use."""
        number = self._interned.get((table, text))
        if number is None:
            number = self._interned[table, text] = len(self._interned) + 1
            packet = self._packet()
            packet.sequence_flags = schema.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            getattr(packet.interned_data, table).add(iid=number, name=text)
        return number


def _annotate(event: Any, numbered: list[tuple[int, _Value]]) -> None:
    annotate = event.debug_annotations.add
    for number, value in numbered:
        annotation = annotate()
        annotation.name_iid = number
        if isinstance(value, str):
            annotation.string_value = value
        elif isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, float):
            annotation.double_value = value
        else:
            annotation.int_value = value


# -- the run -----------------------------------------------------------------------


class _Run:
    """Draws one timeline: what does not change from slice to slice is kept here."""

    def __init__(
        self, writer: _Writer, timeline: Timeline, report: Report | None
    ) -> None:
        self.writer = writer
        self.timeline = timeline
        self.findings = report.findings if report else ()
        self.width = len(str(max(timeline.logs, default=0)))
        self.outgoing: dict[tuple[int, int], Arrow] = {}
        self.incoming: dict[tuple[int, int], Arrow] = {}
        for arrow in timeline.arrows:
            self.outgoing[arrow.pair.send.rank, arrow.pair.send.record.seq] = arrow
            self.incoming[arrow.pair.recv.rank, arrow.pair.recv.record.seq] = arrow

    def draw(self) -> None:
        """Draw all of it."""
        _write_head(self.writer, self.timeline, self.findings)
        for order, (rank, log) in enumerate(self.timeline.logs.items(), start=1):
            self._draw_rank(order, rank, log)

    def _draw_rank(self, order: int, rank: int, log: RankLog) -> None:
        track = self.writer.track(
            _rank_name(log, self.width), order=order, about=_about(log)
        )
        lanes = self.timeline.lanes(rank)
        constants: dict[tuple[Any, ...], bytes] = {}
        for place, lane in enumerate(lanes):
            own = track
            if place or lane.row is not Row.COMPUTE:
                own = self.writer.track(
                    lane.row.value, parent=track, order=list(Row).index(lane.row)
                )
            if lane.row in {Row.SEND, Row.RECV}:
                self._draw_ops(rank, lane, own, constants)
            else:
                self._draw_spans(lane, own)
        self._draw_present(track, lanes)
        self._draw_markers(rank, track)

    def _draw_spans(self, lane: Lane, track: int) -> None:
        for span in lane.spans:
            self.writer.slice(
                track,
                span.begin_ns,
                span.end_ns,
                _name(lane.row, span),
                _category(lane.row, span.record),
                _fields(span),
            )

    def _draw_ops(
        self,
        rank: int,
        lane: Lane,
        track: int,
        constants: dict[tuple[Any, ...], bytes],
    ) -> None:
        """Ops, with the arrows that leave sends and arrive at receives."""
        for span in lane.spans:
            op, key = span.record, (rank, span.record.seq)
            likeness = _likeness(op)
            constant = constants.get(likeness)
            if constant is None:
                constant = self.writer.fields_once(_constant_op_fields(rank, op))
                constants[likeness] = constant
            is_unmatched = key in self.timeline.unmatched
            leaving = self.outgoing.get(key)
            self.writer.slice(
                track,
                span.begin_ns,
                span.end_ns,
                f"{_kind(op)} {_edge(op)}{' unmatched' if is_unmatched else ''}",
                lane.row.value,
                _op_fields(op, is_unmatched=is_unmatched),
                constant=constant,
                arrow=leaving.number if leaving else 0,
            )
            arriving = self.incoming.get(key)
            if arriving:
                name = f"received {_edge(op)}"
                self.writer.instant(
                    track, arriving.end_ns, name, "arrow", arrow=arriving.number
                )

    def _draw_present(self, track: int, lanes: list[Lane]) -> None:
        """The call or wait the rank is in, or failed in, after its last action.

        On the same track, so that a hang shows before anything is unfolded.
        """
        compute = next((lane.spans for lane in lanes if lane.row is Row.COMPUTE), ())
        stuck = [
            (lane.row, span)
            for lane in lanes
            if lane.row in {Row.CALL, Row.WAIT}
            for span in lane.spans
            if span.end_ns is None or span.record.flags & Flag.FAILED
        ]
        if not stuck:
            return
        row, span = max(stuck, key=lambda item: item[1].begin_ns)
        last_end = compute[-1].end_ns if compute else 0
        if last_end is None or last_end > span.begin_ns:
            return  # an action is open, or came after: that is what it is doing
        name = f"{'in' if span.end_ns is None else 'failed in'} {_name(row, span)}"
        self.writer.slice(
            track, span.begin_ns, span.end_ns, name, "present", _fields(span)
        )

    def _draw_markers(self, rank: int, parent: int) -> None:
        """Exceptions, notes, verdicts on this rank, and what became of it."""
        marks: list[tuple[int, str, str, list[tuple[str, _Value]]]] = []
        for record in self.timeline.markers(rank):
            at = self.timeline.at(rank, record.posted_ns)
            word = record.kind.name.lower()
            headline = record.text.partition("\n")[0]
            fields = list(_fields(Span(at, at, (record,))))
            marks.append((at, f"{word}: {headline}", word, fields))
        for finding in self.findings:
            if rank in finding.culprits:
                name = f"{finding.code} {finding.name}: culprit"
                fields = list(_finding_fields(finding))
                at = self.timeline.progress_ns
                marks.append((at, name, finding.severity, fields))
        log = self.timeline.logs[rank]
        is_stalled = self.timeline.end_ns > self.timeline.progress_ns
        if (fate := _fate(log)) and (is_stalled or log.status is Status.RAISED):
            marks.append((self.timeline.at(rank, fate[1]), fate[0], "fate", []))
        track = self.writer.track("markers", parent=parent, order=len(Row))
        free_ns = 0
        for at, name, category, fields in sorted(marks, key=lambda mark: mark[0]):
            # Two at one time would be stacked: the second comes a nanosecond later.
            self.writer.instant(track, max(at, free_ns), name, category, fields)
            free_ns = max(at, free_ns) + 1


def _write_head(
    writer: _Writer, timeline: Timeline, findings: tuple[Finding, ...]
) -> None:
    """The verdict on top, and below it what the trace was made from."""
    # The UI puts top-level tracks without children elsewhere, so this one has some; and
    # it sorts by name: "Run" and "Verdict" come before "rank".
    top = writer.track("Verdict" if findings else "Run")
    if findings:
        _write_finding(writer, timeline, top, findings[0])
    for finding in findings[1:]:
        place = writer.track("further findings", parent=top, order=1)
        _write_finding(writer, timeline, place, finding)
    about = writer.track("this trace", parent=top, order=2)
    logs = timeline.logs.values()
    world_size = max((log.world_size for log in logs), default=0)
    fields: list[tuple[str, _Value]] = [
        ("run", next((log.run for log in logs), "")),
        ("ranks", f"{len(timeline.logs)} of {world_size}"),
        ("clock_residual_ns", timeline.residual_ns),
    ]
    fields += [
        (f"clock_correction_ns of {host.host or format_ranks(host.ranks)}",
         host.correction_ns)
        for host in timeline.hosts
    ]  # fmt: skip
    name = f"{_count(timeline.logs, 'rank')} on {_count(timeline.hosts, 'host')}"
    writer.slice(about, timeline.start_ns, timeline.end_ns, name, "about", fields)


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _write_finding(
    writer: _Writer, timeline: Timeline, track: int, finding: Finding
) -> None:
    """A finding over the time in which nothing went on any more."""
    name = f"{finding.code} {finding.name}: {finding.sentence}"
    fields = list(_finding_fields(finding))
    writer.slice(
        track, timeline.progress_ns, timeline.end_ns, name, finding.severity, fields
    )


def _finding_fields(finding: Finding) -> Iterator[tuple[str, _Value]]:
    yield "code", finding.code
    yield "verdict", finding.sentence
    yield "culprits", format_ranks(finding.culprits)
    yield "victims", format_ranks(finding.victims)
    for title, texts in (("evidence", finding.evidence), ("remedy", finding.remedy)):
        for number, text in enumerate(texts, start=1):
            yield f"{title} {number}", text


def _rank_name(log: RankLog, width: int) -> str:
    stages = sorted({stage for run in log.schedules for stage in run.stages})
    if not stages:
        stages = sorted(
            {r.stage for r in log.records if r.kind is Kind.ACTION and r.stage != NONE}
        )
    parts = [f"rank {log.rank:0{width}}"]
    if stages:
        parts.append(f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}")
    if log.host:
        parts.append(log.host)
    return " · ".join(parts)


def _about(log: RankLog) -> str:
    facts = [f"pid {log.pid} on {log.host or 'an unknown host'}"]
    facts += [f"{run.name}, {run.n_microbatches} microbatches" for run in log.schedules]
    if log.overwritten:
        facts.append(f"{log.overwritten} older records were overwritten")
    if log.torn:
        facts.append(f"{log.torn} records are torn")
    if log.incomplete:
        facts.append(f"counts of its ops are incomplete: {log.incomplete}")
    return "; ".join(facts)


# -- slices ------------------------------------------------------------------------


def _name(row: Row, span: Span) -> str:
    record = span.record
    match row:
        case Row.COMPUTE:
            return f"{record.label} stage {record.stage}"
        case Row.STEP:
            return f"{'eval' if record.flags & Flag.EVAL else 'step'} {record.step}"
        case Row.CALL:
            return f"call {_members(span.records)}"
        case Row.WAIT:
            return f"wait {_members(span.records)}"
    return record.text or row.value


def _members(records: tuple[Record, ...]) -> str:
    """What a call or wait is for: one op or collective, or several in braces."""
    names = [
        _edge(record) if record.kind is Kind.OP else record.text or "collective"
        for record in records[:_MAX_MEMBERS]
    ]
    if len(records) > _MAX_MEMBERS:
        names.append(f"{len(records) - _MAX_MEMBERS} more")
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def _kind(record: Record) -> str:
    return "isend" if record.direction is Direction.SEND else "irecv"


def _edge(record: Record) -> str:
    index = f"[{record.tensor_index}]" if record.tensor_index else ""
    arrow = "→" if record.direction is Direction.SEND else "←"
    peer = f"r{record.peer}" if record.peer >= 0 else "any"
    return f"{record.label}{index}{arrow}{peer}"


def _category(row: Row, record: Record) -> str:
    return record.pass_.name if row is Row.COMPUTE else row.value


def _fields(span: Span) -> Iterator[tuple[str, _Value]]:
    """All that is known of anything but an op; what is not known is left out."""
    record = span.record
    if len(span.records) > 1 or record.kind is Kind.OP:
        yield "ops", ", ".join(f"{_kind(op)} {_edge(op)}" for op in span.records)
    if record.group is not None:
        yield "group", record.group.label
        yield "group_ranks", format_ranks(record.group.ranks)
    if record.kind is Kind.STEP:
        yield "n_microbatches", record.microbatch
    elif record.microbatch != NONE:
        yield "microbatch", record.microbatch
    if record.stage != NONE:
        yield "stage", record.stage
    if record.pass_ is not Pass.UNKNOWN:
        yield "pass", record.pass_.name
    if record.text:
        yield "text", record.text
    yield "step", record.step
    yield "thread", record.thread
    yield "seq", record.seq
    if record.flags & Flag.FAILED:
        yield "state", "failed"


def _likeness(op: Record) -> tuple[Any, ...]:
    """Ops of a rank with the same likeness share their `_constant_op_fields`."""
    group = op.group.index if op.group is not None else None
    return (
        op.direction, op.peer, op.group_peer, op.transport, group, op.tag,
        op.tensor_index, op.signature, op.nbytes, op.batch_size, op.stage, op.pass_,
        op.text, op.thread, op.flags & (Flag.CONTIGUOUS | Flag.COALESCED),
    )  # fmt: skip


def _constant_op_fields(rank: int, op: Record) -> Iterator[tuple[str, _Value]]:
    """What is the same for all ops that look alike."""
    transport = op.transport.name.lower()
    yield "kind", _kind(op)
    yield "peer", op.peer
    yield "group_peer", op.group_peer
    yield "transport", transport
    if op.group is not None:
        channel = op.channel(rank)
        yield "group", op.group.label
        yield "group_ranks", format_ranks(op.group.ranks)
        yield "channel", f"{op.group.label} {transport} r{channel.src}→r{channel.dst}"
    yield "tag", op.tag
    yield "shape", f"[{', '.join(map(str, op.signature.shape))}]"
    yield "dtype", op.signature.dtype
    yield "contiguous", bool(op.flags & Flag.CONTIGUOUS)
    yield "nbytes", op.nbytes
    yield "tensor_index", op.tensor_index
    yield "batch_size", op.batch_size
    yield "coalesced", bool(op.flags & Flag.COALESCED)
    yield "thread", op.thread
    if op.stage != NONE:
        yield "stage", op.stage
    if op.pass_ is not Pass.UNKNOWN:
        yield "pass", op.pass_.name
    if op.text:
        yield "desc", op.text


def _op_fields(op: Record, *, is_unmatched: bool) -> Iterator[tuple[str, _Value]]:
    """What differs from op to op."""
    if op.microbatch != NONE:
        yield "microbatch", op.microbatch
    yield "k", op.k
    yield "batch", op.batch
    yield "batch_index", op.batch_index
    yield "step", op.step
    yield "seq", op.seq
    if op.returned_ns:
        yield "in_call_us", (op.returned_ns - op.posted_ns) / 1e3
    if op.waited_ns:
        yield "in_wait_us", (op.waited_ns - op.wait_ns) / 1e3
    if op.flags & Flag.FAILED:
        yield "state", "failed"
    elif op.done_ns:
        yield "state", "done"
    elif is_unmatched:
        yield "state", "unmatched: the other side never posted it"
    elif op.flags & Flag.DROPPED:
        yield "state", "dropped before its completion was seen"
    else:
        yield "state", "not complete"


def _fate(log: RankLog) -> tuple[str, int] | None:
    """What became of the rank, and when on its monotonic clock."""
    if log.terminated_by:
        wall_to_monotonic = -log.to_wall_ns(0)
        return f"ended by {log.terminated_by}", log.terminated_ns + wall_to_monotonic
    if log.status in (Status.EXITED, Status.RAISED, Status.DISABLED) and log.status_ns:
        words = {
            Status.EXITED: "exited normally",
            Status.RAISED: "an exception left the step",
            Status.DISABLED: "pptrace was disabled",
        }
        return words[log.status], log.status_ns
    if not log.heartbeat_ns:
        return None
    words_alive = {
        True: "last sign of life: it is running",
        False: "last sign of life: it is gone",
        None: "last sign of life",
    }
    return words_alive[log.alive], log.heartbeat_ns
