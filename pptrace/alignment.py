"""What only both sides of a channel tell: where a wrapped ring stands, and transports.

A black box counts the ops of each channel, a Flight Recorder dump does not: when its
ring has wrapped, only the last ops are known, without their numbers. But the two sides
of a channel complete the same ops, in the same order. So the first op that is not
complete stands at the same number on both, unless it belongs to a batch that another op
holds up; then times and sizes must decide, and where they do not, the channel stays
uncertain.

A dump does not say either whether a group was set up eagerly, which decides what single
ops ride (`pptrace.semantics`). An op that is complete although only an op of the other
transport faces it says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pptrace.records import (
    Channel,
    ChannelState,
    Direction,
    Flag,
    Group,
    Kind,
    RankLog,
    Record,
    Transport,
)

__all__ = ["settle"]

_CLOCKS_NS = 1_000_000_000
"""By how much the wall clocks of two hosts may differ."""
_SHIFTS = 16
"""How many ops one side may be ahead of the other in dumps made one after another."""
_BAD_SHARE = 0.25
"""Share of pairs of different sizes that makes a shift more likely than a fault."""

_GroupKey = tuple[str, tuple[int, ...]]


def settle(logs: Mapping[int, RankLog]) -> None:
    """Number the ops of dumps as the other side does; mark what stays uncertain.

    Changes the logs that come from Flight Recorder dumps, in place; black boxes are
    only read.
    """
    dumps = {r: log for r, log in logs.items() if "flight_recorder" in log.environment}
    if not dumps:
        return
    _settle_doubts(logs, dumps)
    _set_transports(logs, dumps)
    sides = _sides(logs)
    for log in dumps.values():
        log.channels = []
    for (channel, direction), side in sides.items():
        if side.rank in dumps:
            _number(logs, sides, channel, direction)
    _believe(dumps, sides)
    for (channel, direction), side in sides.items():
        if side.rank in dumps:
            dumps[side.rank].channels.append(_state(channel, direction, side))
    _number_collectives(logs, dumps)


# -- calls that go on --------------------------------------------------------------


def _settle_doubts(logs: Mapping[int, RankLog], dumps: Mapping[int, RankLog]) -> None:
    """Say whether last ops without a stack are single, or batches whose call goes on.

    A single op is listed once its pair's communicator exists, for which the peer has to
    come, too. A peer that shows no single op with this rank, and is inside a call
    itself, did not come: then the op is a batch whose call goes on as well.
    """
    doubtful = [
        (rank, log.records[seq - 1])
        for rank, log in dumps.items()
        for seq in log.environment["flight_recorder"].get("doubtful", ())
    ]
    is_settled = False
    while not is_settled:
        is_settled = True
        for rank, record in doubtful:
            if not record.in_call and _is_held_up(logs, rank, record):
                is_settled = False
                record.flags |= Flag.COALESCED
                record.transport = Transport.GROUP
                record.batch = 1 + max(r.batch for r in logs[rank].records)
                record.returned_ns = record.wait_ns = record.waited_ns = 0


def _is_held_up(logs: Mapping[int, RankLog], rank: int, record: Record) -> bool:
    """Whether the peer is inside a call of the group and never came to the pair's."""
    peer = logs.get(record.peer)
    if peer is None or record.group is None:
        return False
    ops = [
        other
        for (channel, _), other in _ops(record.peer, peer)
        if channel.group == record.group.key
    ]
    if any(o.transport is Transport.PAIR and o.peer == rank for o in ops):
        return False
    return any(o.in_call and not o.done_ns for o in ops)


# -- transports --------------------------------------------------------------------


def _set_transports(logs: Mapping[int, RankLog], dumps: Mapping[int, RankLog]) -> None:
    known: dict[_GroupKey, bool] = {}
    for rank, log in logs.items():
        if rank not in dumps:
            known |= {group.key: group.eager for group in log.groups.values()}
    keys = {group.key for log in dumps.values() for group in log.groups.values()}
    for key in keys:
        if known[key] if key in known else _is_eager(logs, key):
            for log in dumps.values():
                _make_eager(log, key)


def _make_eager(log: RankLog, key: _GroupKey) -> None:
    """Let all P2P of a group ride the group's communicator."""
    eager: dict[int, Group] = {}
    for index, group in log.groups.items():
        if group.key == key:
            eager[index] = log.groups[index] = replace(group, eager=True)
    for record in log.records:
        if record.group is not None and record.group.index in eager:
            record.group = eager[record.group.index]
            record.transport = Transport.GROUP


@dataclass(slots=True)
class _Tally:
    """Ops of one direction of an edge on one side, by transport."""

    posted: dict[Transport, int] = field(default_factory=dict)
    done: dict[Transport, int] = field(default_factory=dict)
    is_whole: bool = True

    def add(self, record: Record) -> None:
        transport = record.transport
        self.posted[transport] = self.posted.get(transport, 0) + 1
        if record.done_ns:
            self.done[transport] = self.done.get(transport, 0) + 1


def _is_eager(logs: Mapping[int, RankLog], key: _GroupKey) -> bool:
    """Whether ops are complete that could not have met on communicators of pairs."""
    tallies: dict[tuple[int, int, Direction], _Tally] = {}
    for rank, log in logs.items():
        lost = _lost_groups(log)
        for (channel, direction), record in _ops(rank, log):
            if channel.group == key:
                place = (channel.src, channel.dst, direction)
                tally = tallies.setdefault(place, _Tally())
                tally.add(record)
                tally.is_whole &= key[0] not in lost
    return any(
        _refutes(mine, theirs)
        for (src, dst, direction), mine in tallies.items()
        for theirs in [tallies.get((src, dst, _other(direction)))]
        if theirs is not None
    )


def _refutes(mine: _Tally, theirs: _Tally) -> bool:
    """Whether more ops are complete on a transport than the other side posted there."""
    if theirs.is_whole:
        if sum(mine.done.values()) > sum(theirs.posted.values()):
            return False  # their dump is simply of an earlier moment
        return any(
            done > theirs.posted.get(transport, 0)
            for transport, done in mine.done.items()
        )
    # Of both sides only the end is left: their transports must not overlap at all.
    is_apart = not mine.posted.keys() & theirs.posted.keys()
    return is_apart and min(sum(t.done.values()) for t in (mine, theirs)) > 1


def _other(direction: Direction) -> Direction:
    return Direction.RECV if direction is Direction.SEND else Direction.SEND


# -- numbers -----------------------------------------------------------------------


@dataclass(slots=True)
class _Side:
    """One side of a channel: what is left of its ops, oldest first."""

    rank: int
    ops: list[Record] = field(default_factory=list)
    first: int | None = 0
    """k of the oldest op; None while it is not known."""
    uncertain: str = ""

    @property
    def frontier(self) -> int:
        """Index behind the last complete op."""
        for index in range(len(self.ops), 0, -1):
            if self.ops[index - 1].done_ns:
                return index
        return 0

    @property
    def held(self) -> int:
        """Pending ops whose data may have gone although another op holds their batch."""
        start = self.frontier
        if start == len(self.ops) or not self.ops[start].flags & Flag.COALESCED:
            return 0
        batch = self.ops[start].batch
        return sum(1 for record in self.ops[start:] if record.batch == batch)


_Sides = dict[tuple[Channel, Direction], _Side]


def _sides(logs: Mapping[int, RankLog]) -> _Sides:
    sides: _Sides = {}
    for rank, log in logs.items():
        if "flight_recorder" in log.environment:
            for place, record in _ops(rank, log):
                if place not in sides:
                    is_lost = place[0].group[0] in _lost_groups(log)
                    sides[place] = (
                        _Side(rank, first=None, uncertain=_reason(log))
                        if is_lost
                        else _Side(rank)
                    )
                sides[place].ops.append(record)
        elif not log.incomplete:
            for state in log.channels:
                place = (state.channel, state.direction)
                sides[place] = _Side(rank, first=state.posted)
            for place, record in _ops(rank, log):
                side = sides.setdefault(place, _Side(rank))
                if not side.ops:
                    side.first = record.k
                side.ops.append(record)
    return sides


def _ops(rank: int, log: RankLog) -> Iterator[tuple[tuple[Channel, Direction], Record]]:
    for record in log.records:
        if record.kind is not Kind.OP or record.group is None:
            continue
        if not record.flags & Flag.ANY_SOURCE:
            yield (record.channel(rank), record.direction), record


def _lost_groups(log: RankLog) -> Collection[str]:
    """Groups whose first ops a dump's ring has overwritten."""
    lost: Collection[str] = log.environment.get("flight_recorder", {}).get("lost", ())
    return lost


def _reason(log: RankLog) -> str:
    return (
        f"the ring of r{log.rank}'s dump begins at record {log.overwritten}, and the"
        " other side does not say which op that is"
    )


def _number(
    logs: Mapping[int, RankLog], sides: _Sides, channel: Channel, direction: Direction
) -> None:
    """Give the ops of a dump's side their numbers; settles the other side, too."""
    side = sides[channel, direction]
    if side.first is None:
        other = sides.get((channel, _other(direction)))
        if other is None:
            other = _silent_side(logs, channel, direction)
        if other is None:
            side.first = 0
        else:
            _join(side, other)
    for index, record in enumerate(side.ops):
        record.k = (side.first or 0) + index


def _silent_side(
    logs: Mapping[int, RankLog], channel: Channel, direction: Direction
) -> _Side | None:
    """A side that shows no op at all; None if its rank's counts are not known."""
    rank = channel.dst if direction is Direction.SEND else channel.src
    log = logs.get(rank)
    if log is None or log.incomplete:
        return None
    return _Side(rank, first=None if channel.group[0] in _lost_groups(log) else 0)


def _join(side: _Side, other: _Side) -> None:
    shift, is_certain = _shift(side, other)
    # Op i of this side pairs with op i + shift of the other.
    if other.first is None:
        other.first = max(0, -shift)
    first = other.first + shift
    if first < 0:  # more history than the other side has counted: it cannot be
        first, is_certain = 0, False
    side.first = first
    if is_certain:
        side.uncertain = other.uncertain = ""
    elif not other.uncertain:
        other.uncertain = side.uncertain


def _shift(side: _Side, other: _Side) -> tuple[int, bool]:
    """By how much the other side's index of a pair is ahead, and whether that is sure."""
    plain = other.frontier - side.frontier
    if _is_doubtful(side, other, plain):
        return _nearby(side, other, plain), False
    choices = [plain + step for step in range(-side.held, other.held + 1)]
    if len(choices) == 1:
        return plain, True
    possible = [shift for shift in choices if _is_possible(side, other, shift)]
    alike = [shift for shift in possible if not _unlike(side, other, shift)]
    left = sorted(alike or possible, key=lambda shift: abs(shift - plain))
    return (left[0], len(left) == 1) if left else (plain, False)


def _nearby(side: _Side, other: _Side, plain: int) -> int:
    """The next shift that pairs ops of equal sizes; ``plain`` if there is none.

    One dump may be so much older that ops complete in the other are not posted in it.
    """
    for distance in range(1, _SHIFTS + 1):
        for shift in (plain + distance, plain - distance):
            if _is_in_time(side, other, shift) and not _unlike(side, other, shift):
                return shift
    return plain


def _pairs(side: _Side, other: _Side, shift: int) -> Iterator[tuple[Record, Record]]:
    for index in range(max(0, -shift), min(len(side.ops), len(other.ops) - shift)):
        yield side.ops[index], other.ops[index + shift]


def _is_possible(side: _Side, other: _Side, shift: int) -> bool:
    """Whether every complete op has a partner, posted before it was complete."""
    if side.frontier + shift > len(other.ops) or other.frontier - shift > len(side.ops):
        return False
    return _is_in_time(side, other, shift)


def _is_in_time(side: _Side, other: _Side, shift: int) -> bool:
    return not any(
        _precedes(a, b) or _precedes(b, a) for a, b in _pairs(side, other, shift)
    )


def _precedes(done: Record, partner: Record) -> bool:
    return 0 < done.done_ns < partner.posted_ns - _CLOCKS_NS


def _unlike(side: _Side, other: _Side, shift: int) -> int:
    """Pairs of different sizes."""
    return sum(a.numel != b.numel for a, b in _pairs(side, other, shift))


def _is_doubtful(side: _Side, other: _Side, shift: int) -> bool:
    """Whether so many sizes differ that the dumps are rather of different moments."""
    count = len(list(_pairs(side, other, shift)))
    unlike = _unlike(side, other, shift)
    return unlike > 1 and unlike > _BAD_SHARE * count


def _believe(dumps: Mapping[int, RankLog], sides: _Sides) -> None:
    """Complete after all is what is complete on the other side.

    Of a batch that holds for all of its ops or for none.
    """
    for rank, log in dumps.items():
        for seqs in log.environment["flight_recorder"].get("late", ()):
            records = [log.records[seq - 1] for seq in seqs]
            done = [_done_elsewhere(sides, rank, record) for record in records]
            if all(done):
                for record, done_ns in zip(records, done, strict=True):
                    record.done_ns = max(done_ns, record.posted_ns + 1)
                    record.returned_ns = record.posted_ns
                    record.wait_ns = record.waited_ns = 0


def _done_elsewhere(sides: _Sides, rank: int, record: Record) -> int:
    """When the partner of an op was complete; 0 if it is not, or not known."""
    if record.kind is not Kind.OP or record.group is None:
        return 0
    other = sides.get((record.channel(rank), _other(record.direction)))
    if other is None or other.first is None:
        return 0
    index = record.k - other.first
    return other.ops[index].done_ns if 0 <= index < len(other.ops) else 0


def _state(channel: Channel, direction: Direction, side: _Side) -> ChannelState:
    first = side.first or 0
    return ChannelState(
        channel,
        direction,
        first + len(side.ops),
        first + side.frontier,
        side.uncertain,
    )


# -- collectives -------------------------------------------------------------------


def _number_collectives(
    logs: Mapping[int, RankLog], dumps: Mapping[int, RankLog]
) -> None:
    """Count collectives where torch's own number counts batches of P2P, too.

    That number then differs from rank to rank. Where the beginning is lost, the last
    complete collective is the same on all ranks, as with ops.
    """
    keys = {
        group.key
        for log in dumps.values()
        for group in log.groups.values()
        if group.name in log.environment["flight_recorder"].get("mixed", ())
    }
    for key in keys:
        members = {
            rank: [
                r for r in log.records if r.kind is Kind.COLLECTIVE and _is_of(r, key)
            ]
            for rank, log in logs.items()
        }
        counts: dict[int, int] = {}
        for rank, records in members.items():
            lost = key[0] in _lost_groups(logs[rank])
            if rank in dumps and not lost:
                for k, record in enumerate(records):
                    record.k = k
            if records and not lost:
                counts[rank] = records[0].k + _complete(records)
        done = max(counts.values(), default=0)
        longest = max((_complete(m) for m in members.values()), default=0)
        for rank, records in members.items():
            if key[0] in _lost_groups(logs[rank]):
                first = max(done, longest) - _complete(records)
                for k, record in enumerate(records, first):
                    record.k = k


def _is_of(record: Record, key: _GroupKey) -> bool:
    return record.group is not None and record.group.key == key


def _complete(records: list[Record]) -> int:
    """Index behind the last complete one."""
    return max((i + 1 for i, r in enumerate(records) if r.done_ns), default=0)
