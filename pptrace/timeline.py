"""All ranks of a run on one clock: lanes of spans, and arrows between them.

Every host has its own monotonic clock, and its wall clock is off by what NTP left. But
the ops themselves say how far: no receive is complete before its send was posted, and
no send before its receive was posted. Each such pair bounds the difference of two
hosts' clocks from one side; the smallest correction that meets all bounds is applied.
Ranks on one host share its monotonic clock and are never shifted against each other.

Times of the result are nanoseconds of that common clock, which is wall time plus the
correction of the host.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median_low

from pptrace.matching import ChannelView, Pair, match
from pptrace.records import (
    DISABLED,
    Channel,
    Direction,
    Flag,
    Kind,
    RankLog,
    Record,
)

__all__ = ["Arrow", "HostClock", "Lane", "Row", "Span", "Timeline", "build"]

_SHORT_CALL_NS = 100_000
"""Calls that gave control back sooner are not drawn: they blocked nobody."""


class Row(Enum):
    """What a lane of one rank shows, in the order of reading."""

    COMPUTE = "compute"
    STEP = "steps"
    SEND = "sends"
    RECV = "receives"
    CALL = "calls"
    """The host inside the call that issues ops."""
    WAIT = "waits"
    """The host inside ``wait()``."""
    COLLECTIVE = "collectives"


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one rank; ``end_ns`` None if it never ended.

    ``records`` has one record, except for a call or wait that stands for several ops.
    """

    begin_ns: int
    end_ns: int | None
    records: tuple[Record, ...]

    @property
    def record(self) -> Record:
        """The first record."""
        return self.records[0]


@dataclass(frozen=True, slots=True)
class Lane:
    """Spans of one row that do not overlap, in order of time."""

    row: Row
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Arrow:
    """A completed pair: from the post of the send to the completion of the receive.

    ``number`` is unique within the timeline. ``end_ns`` is after ``begin_ns`` even where
    the clocks cannot be brought to agree (see `Timeline.residual_ns`).
    """

    number: int
    pair: Pair
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class HostClock:
    """One host's clock: ``correction_ns`` was added to its wall time."""

    host: str
    boot_id: str
    ranks: tuple[int, ...]
    correction_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """All ranks of a run on one clock; made by `build`."""

    logs: Mapping[int, RankLog]
    """By rank, in numeric order."""
    channels: Mapping[Channel, ChannelView]
    arrows: tuple[Arrow, ...]
    unmatched: frozenset[tuple[int, int]]
    """(rank, seq) of the ops the other side never posted."""
    hosts: tuple[HostClock, ...]
    residual_ns: int
    """What no correction can repair: by this much at least one receive is complete
    before its send was posted, however the hosts' clocks are shifted."""
    start_ns: int
    """Time of the first record."""
    progress_ns: int
    """Latest time at which anything began or was completed; failing is no progress."""
    end_ns: int
    """Latest time of any record; if anything is open, of any rank's sign of life."""
    offsets: Mapping[int, int]
    """By rank: what to add to its monotonic times."""

    def at(self, rank: int, monotonic_ns: int) -> int:
        """A rank's monotonic time on the common clock."""
        return monotonic_ns + self.offsets[rank]

    def lanes(self, rank: int) -> list[Lane]:
        """The rank's spans, row by row, on as few lanes as keep them from overlapping.

        Made anew at each call, so that memory is that of one rank.
        """
        rows: dict[Row, list[Span]] = {row: [] for row in Row}
        for record in self.logs[rank].records:
            row = _row_of(record)
            if row is not None:
                rows[row].append(self._span(rank, record))
        rows[Row.CALL] = self._calls(rank)
        rows[Row.WAIT] = self._waits(rank)
        return [Lane(row, lane) for row in Row for lane in _partition(rows[row])]

    def markers(self, rank: int) -> list[Record]:
        """The rank's exceptions and notes."""
        return [
            record
            for record in self.logs[rank].records
            if record.kind in (Kind.EXCEPTION, Kind.NOTE)
        ]

    def _span(self, rank: int, record: Record) -> Span:
        offset = self.offsets[rank]
        end = _end(record, is_unmatched=(rank, record.seq) in self.unmatched)
        return Span(
            record.posted_ns + offset,
            None if end is None else max(end, record.posted_ns) + offset,
            (record,),
        )

    def _calls(self, rank: int) -> list[Span]:
        """Calls that took long or never returned; one for a whole coalesced batch."""
        calls: dict[tuple[str, int], list[Record]] = defaultdict(list)
        for record in self.logs[rank].records:
            if record.kind is Kind.OP and record.flags & Flag.COALESCED:
                calls["batch", record.batch].append(record)
            elif record.kind in (Kind.OP, Kind.COLLECTIVE):
                calls["record", record.seq].append(record)
        spans = []
        for records in calls.values():
            begin = min(record.posted_ns for record in records)
            is_open = any(record.in_call and record.is_open for record in records)
            end = max(record.returned_ns or record.done_ns for record in records)
            if is_open or end - begin >= _SHORT_CALL_NS:
                spans.append(self._joint(rank, records, begin, 0 if is_open else end))
        return spans

    def _waits(self, rank: int) -> list[Span]:
        """Waits; a thread is in one at a time, so what begins together is one."""
        waits: dict[tuple[int, int], list[Record]] = defaultdict(list)
        for record in self.logs[rank].records:
            if record.wait_ns and record.kind in (Kind.OP, Kind.COLLECTIVE):
                waits[record.thread, record.wait_ns].append(record)
        spans = []
        for (_, begin), records in waits.items():
            is_open = any(record.in_wait for record in records)
            end = 0 if is_open else max(record.waited_ns for record in records)
            spans.append(self._joint(rank, records, begin, end))
        return spans

    def _joint(self, rank: int, records: list[Record], begin: int, end: int) -> Span:
        offset = self.offsets[rank]
        return Span(
            begin + offset,
            max(begin, end) + offset if end else None,
            tuple(records),
        )


def _is_counted(view: ChannelView) -> bool:
    """Whether k tells which send a recorded receive got.

    Ops after `pptrace.disable` are missing at the end: those before it are counted.
    """
    reasons = view.incomplete.split("; ") if view.incomplete else []
    return all(reason.endswith(DISABLED) for reason in reasons)


def build(logs: Mapping[int, RankLog]) -> Timeline:
    """Bring all ranks on one clock. ``logs`` is keyed by rank."""
    logs = {rank: logs[rank] for rank in sorted(logs)}
    channels = match(logs)
    hosts = _hosts(logs)
    walls = {rank: _wall_offset(logs, ranks) for ranks in hosts for rank in ranks}
    pairs = [
        pair for view in channels.values() if _is_counted(view) for pair in view.pairs()
    ]
    corrections, residual = _align(pairs, hosts, walls)
    offsets = {
        rank: walls[rank] + correction
        for ranks, correction in zip(hosts, corrections, strict=True)
        for rank in ranks
    }
    unmatched = frozenset(
        (op.rank, op.record.seq)
        for view in channels.values()
        if not view.incomplete
        for op in (*view.unmatched_sends, *view.unmatched_recvs)
    )
    start, progress, end = _extent(logs, offsets, unmatched)
    return Timeline(
        logs=logs,
        channels=channels,
        arrows=tuple(_arrows(pairs, offsets)),
        unmatched=unmatched,
        hosts=tuple(
            HostClock(logs[ranks[0]].host, logs[ranks[0]].boot_id, ranks, correction)
            for ranks, correction in zip(hosts, corrections, strict=True)
        ),
        residual_ns=residual,
        start_ns=start,
        progress_ns=progress,
        end_ns=end,
        offsets=offsets,
    )


# -- spans -------------------------------------------------------------------------


def _row_of(record: Record) -> Row | None:
    match record.kind:
        case Kind.OP:
            return Row.SEND if record.direction is Direction.SEND else Row.RECV
        case Kind.ACTION:
            return Row.COMPUTE
        case Kind.STEP:
            return Row.STEP
        case Kind.COLLECTIVE:
            return Row.COLLECTIVE
    return None


def _end(record: Record, *, is_unmatched: bool) -> int | None:
    """Monotonic time at which a record's span ends; None if it never did.

    What failed is over. A work that was dropped may have completed unseen, unless
    nobody ever posted the other side; its span ends where it was last heard of.
    """
    if record.done_ns:
        return record.done_ns
    was_dropped = record.flags & Flag.DROPPED and not is_unmatched
    if record.flags & Flag.FAILED or was_dropped:
        return _latest(record)
    return None


def _latest(record: Record) -> int:
    return max(
        record.posted_ns,
        record.returned_ns,
        record.wait_ns,
        record.waited_ns,
        record.done_ns,
    )


def _progress(record: Record) -> int:
    """Latest time at which the record says that something went on."""
    if record.flags & Flag.FAILED:
        return max(record.posted_ns, record.returned_ns, record.wait_ns)
    return _latest(record)


def _partition(spans: list[Span]) -> Iterator[tuple[Span, ...]]:
    """Distribute spans over lanes: each to the first lane that is free again."""
    lanes: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, lane)
    for span in sorted(spans, key=lambda span: span.begin_ns):
        while busy and busy[0][0] <= span.begin_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        if span.end_ns is not None:  # one that never ends keeps its lane
            heapq.heappush(busy, (span.end_ns, lane))
    return map(tuple, lanes)


def _extent(
    logs: Mapping[int, RankLog],
    offsets: Mapping[int, int],
    unmatched: frozenset[tuple[int, int]],
) -> tuple[int, int, int]:
    """Start, last progress and end of the run (see `Timeline`)."""
    starts, progress, latest, signs, is_open = [], [], [], [], False
    for rank, log in logs.items():
        offset = offsets[rank]
        for record in log.records:
            starts.append(record.posted_ns + offset)
            latest.append(_latest(record) + offset)
            if _row_of(record) is None:
                continue
            progress.append(_progress(record) + offset)
            is_unmatched = (rank, record.seq) in unmatched
            is_open |= _end(record, is_unmatched=is_unmatched) is None
        signs.append(max(log.start_monotonic_ns, log.heartbeat_ns) + offset)
        if log.status_ns:
            signs.append(log.status_ns + offset)
    if not starts:
        starts = latest = [min(signs, default=0)]
    end = max(latest + signs) if is_open else max(latest)
    return min(starts), max(progress, default=end), end


def _arrows(pairs: list[Pair], offsets: Mapping[int, int]) -> Iterator[Arrow]:
    completed = (pair for pair in pairs if pair.recv.record.done_ns)
    for number, pair in enumerate(completed, start=1):
        begin = pair.send.record.posted_ns + offsets[pair.send.rank]
        end = pair.recv.record.done_ns + offsets[pair.recv.rank]
        yield Arrow(number, pair, begin, max(end, begin + 1))


# -- clocks ------------------------------------------------------------------------


def _hosts(logs: Mapping[int, RankLog]) -> list[tuple[int, ...]]:
    """Ranks by the clock they share: that of one boot of one kernel."""
    hosts: dict[str, list[int]] = {}
    for rank, log in logs.items():
        hosts.setdefault(log.boot_id or log.host or f"rank {rank}", []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]


def _wall_offset(logs: Mapping[int, RankLog], ranks: tuple[int, ...]) -> int:
    """Wall minus monotonic time of a host, by the latest reading of any of its ranks.

    One reading for all: NTP may have stepped the wall clock between two of them.
    """
    latest = max((logs[rank] for rank in ranks), key=lambda log: log.heartbeat_ns)
    return latest.to_wall_ns(0)


_Bounds = dict[tuple[int, int], int]
"""``bounds[a, b] = w``: the correction of host a may exceed that of b by at most w."""


def _align(
    pairs: Iterable[Pair], hosts: list[tuple[int, ...]], walls: Mapping[int, int]
) -> tuple[list[int], int]:
    """The correction of each host, and the residual that none can repair.

    Sends are taken as rendezvous (complete only after the receive was posted) as long
    as that asks nothing more of the clocks than causality does: a small send that the
    network buffered breaks it, and must not bend the clocks.
    """
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    causal: _Bounds = {}
    rendezvous: _Bounds = {}
    for pair in pairs:
        send, recv = pair.send.record, pair.recv.record
        source, target = host_of[pair.send.rank], host_of[pair.recv.rank]
        to_send, to_recv = walls[pair.send.rank], walls[pair.recv.rank]
        if recv.done_ns:
            margin = recv.done_ns + to_recv - send.posted_ns - to_send
            _tighten(causal, (source, target), margin)
        if send.done_ns:
            margin = send.done_ns + to_send - recv.posted_ns - to_recv
            _tighten(rendezvous, (target, source), margin)
    both = dict(causal)
    for edge, margin in rendezvous.items():
        _tighten(both, edge, margin)
    corrections, residual = _solve(causal, len(hosts))
    with_rendezvous, its_residual = _solve(both, len(hosts))
    if its_residual <= residual:
        corrections = with_rendezvous
    middle = median_low(corrections) if corrections else 0
    return [correction - middle for correction in corrections], residual


def _tighten(bounds: _Bounds, edge: tuple[int, int], margin: int) -> None:
    bounds[edge] = min(margin, bounds.get(edge, margin))


def _solve(bounds: _Bounds, n_hosts: int) -> tuple[list[int], int]:
    """Corrections that meet all bounds, loosened by as little as makes that possible.

    Returns them and that little, the residual, found by bisection. All are 0 if all
    bounds are met as they stand.
    """
    solution = _relax(bounds, n_hosts, 0)
    if solution is not None:
        return solution, 0
    too_little, enough = 0, max(-margin for margin in bounds.values())
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if _relax(bounds, n_hosts, middle) is None:
            too_little = middle
        else:
            enough = middle
    solution = _relax(bounds, n_hosts, enough)
    assert solution is not None  # every margin is at least 0 when loosened this much
    return solution, enough


def _relax(bounds: _Bounds, n_hosts: int, slack: int) -> list[int] | None:
    """Shortest paths (Bellman and Ford); None if the bounds contradict each other."""
    corrections = [0] * n_hosts
    for _ in range(n_hosts + 1):
        has_changed = False
        for (a, b), margin in bounds.items():
            limit = corrections[b] + margin + slack
            if corrections[a] > limit:
                corrections[a] = limit
                has_changed = True
        if not has_changed:
            return corrections
    return None
