"""A quick look that settles most plans: can they run one meeting after the other?

Read a plan as strictly as possible: every call blocks its host until its whole kernel
is done. If all ranks get to the end that way, each kernel meeting exactly one other
that mirrors it, then there is one order of all meetings that every rank follows. By
induction over it nothing can wait for ever under any rule of `pptrace.semantics`:
whatever stands before a kernel, on its host or on its communicator, has met; both sides
are in their calls with mirror edges, so first use is no obstacle; and where a group's
communicator still has to be set up, all its ranks must come to their first call on it
before any goes on, which is required here too.

The converse does not hold: a plan that fails here needs the whole simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pptrace.compact import Symbol, Tape
from pptrace.pairs import is_mirrored
from pptrace.plan import (
    Action,
    Batch,
    Edge,
    Leave,
    Op,
    Plan,
    Step,
    Sync,
    Wait,
)
from pptrace.records import Direction, Group, Pass

__all__ = ["meets_in_order"]

_QUIET = (Wait, Symbol, Action, Sync, Step, Leave)


def meets_in_order(plan: Plan, *, preconnected: bool = False) -> bool:
    """Whether the plan can run that way: True means it ends under every rule.

    Labels and payloads of what meets must agree, too: then nothing is wrong with it.
    """
    return (
        is_mirrored(plan, preconnected=preconnected)
        or _Look(plan, preconnected=preconnected).run()
    )


class _Place:
    """Where the single ops, or the batches, of one group and pair of ranks meet."""

    __slots__ = ("posted", "rank")

    def __init__(self) -> None:
        self.rank = -1
        self.posted: Any = None  # an op, a batch, or a list of symbols


class _Rank:
    """One rank: its items, and for its symbols, by code, where and what they meet."""

    __slots__ = ("alone", "batched", "edges", "is_up", "items", "mirrors", "number")

    def __init__(self, number: int, program: Any) -> None:
        is_tape = isinstance(program, Tape)
        self.number = number
        self.items: Iterator[Any] = iter(program.items if is_tape else program)
        self.edges: Sequence[Edge | None] = program.edges if is_tape else ()
        self.is_up = True
        """Nothing is left to set up before its batches of symbols."""
        # Under the coalesced rule a symbol that is alone is a batch, too.
        self.alone: list[_Place | None] = [None] * len(self.edges)
        self.batched: list[_Place | None] = [None] * len(self.edges)
        self.mirrors: list[int] = [-1] * len(self.edges)


class _Look:
    """One look at a plan; ``run`` may be called once."""

    def __init__(self, plan: Plan, *, preconnected: bool) -> None:
        self._ranks = {rank: _Rank(rank, plan.programs[rank]) for rank in plan.ranks}
        self._running = list(self._ranks)
        self._preconnected = preconnected
        self._ended = 0
        self._places: dict[tuple[object, ...], _Place] = {}
        self._mirrors: dict[Edge, Edge] = {}
        self._set_up: dict[int, dict[int, Any]] = {}  # by id of the group
        self._held: dict[int, Any] = {}
        self._prepare(plan)

    def run(self) -> bool:
        """Run all ranks as far as they get; returns whether all got to the end."""
        while self._running:
            rank = self._ranks[self._running.pop()]
            held = self._held.pop(rank.number, None)
            met: bool | None = True
            if held is not None:
                met = self._meet(rank, held)
            if met:
                met = self._advance(rank)
            if met is None:
                return False
        return self._ended == len(self._ranks)

    def _prepare(self, plan: Plan) -> None:
        """Find where each rank's symbols meet, and the code of what they meet."""
        messages: dict[tuple[object, ...], tuple[_Rank, int]] = {}
        for rank in self._ranks.values():
            for code, edge in enumerate(rank.edges):
                if edge is None:
                    continue
                splits = plan.programs[rank.number].splits  # type: ignore[attr-defined]
                kind = "single symbols" if splits else "symbols"
                rank.alone[code] = self._place(rank, edge, kind)
                rank.batched[code] = self._place(rank, edge, "symbols")
                rank.is_up = edge.group.eager or self._preconnected
                is_send = edge.direction is Direction.SEND
                step = 1 if edge.pass_ is Pass.F else -1
                source = edge.stage if is_send else edge.stage - step
                message = (edge.pass_, source, edge.index, edge.signature)
                other = messages.pop((*message, not is_send), None)
                if other is None:
                    own = (*message, is_send)
                    messages[own] = (rank, code)
                elif other[0].number == edge.peer:
                    rank.mirrors[code] = other[1]
                    other[0].mirrors[other[1]] = code

    def _place(self, rank: _Rank, edge: Edge, kind: str) -> _Place:
        low, high = sorted((rank.number, edge.peer))
        key = (kind, id(edge.group), low, high)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = _Place()
        return found

    def _advance(self, rank: _Rank) -> bool | None:
        """Run a rank: whether it got to the end; None where the look is over."""
        running, alone, mirrors = self._running, rank.alone, rank.mirrors
        for item in rank.items:
            kind = type(item)
            if kind is int or kind is list:
                continue
            if kind is not tuple:
                met = self._instruction(rank, item)
                if not met:
                    return met
                continue
            # One symbol, or two of a mixed batch: nearly all of a schedule.
            symbols = item[0]
            first = symbols[0]
            if len(symbols) == 1:
                place = alone[first.code]
            else:
                place = self._place_of_pair(rank, symbols)
            if place is None:
                return None
            if not rank.is_up and place is rank.batched[first.code]:
                rank.is_up = True
                if not self._come(rank, symbols):
                    return False
            other = place.posted
            if other is None:
                place.posted, place.rank = symbols, rank.number
                return False
            mate = other[0]
            if (
                mirrors[first.code] != mate.code
                or first.microbatch != mate.microbatch
                or len(symbols) + len(other) > 2
            ) and not _is_mirror(mirrors, symbols, other):
                return None
            place.posted = None
            running.append(place.rank)
        self._ended += 1
        return True

    @staticmethod
    def _place_of_pair(rank: _Rank, symbols: list[Symbol]) -> _Place | None:
        """Where a send and a receive with one peer meet; None for anything else."""
        if len(symbols) > 2:
            return None
        one, two = symbols[0].code, symbols[1].code
        place = rank.batched[one]
        return place if (one ^ two) & 1 and rank.batched[two] is place else None

    def _instruction(self, rank: _Rank, item: Any) -> bool | None:
        """Anything but symbols: whether the rank goes on; None if the look is over."""
        if isinstance(item, _QUIET):
            return True
        if isinstance(item, Batch):
            group = item.ops[0].edge.group
            is_up = group.eager or self._preconnected
            if not (is_up or self._has_come(rank, group)) and not self._come(
                rank, item
            ):
                return False
        elif not isinstance(item, Op):
            return None
        return self._meet(rank, item)

    # set-up of a group

    def _has_come(self, rank: _Rank, group: Group) -> bool:
        return rank.number in self._set_up.get(id(group), ())

    def _come(self, rank: _Rank, posted: Any) -> bool:
        """A rank's first call on a group: whether all ranks have come to theirs."""
        group = _group_of(rank, posted)
        waiting = self._set_up.setdefault(id(group), {})
        if rank.number in waiting:
            return True
        waiting[rank.number] = posted
        if len(waiting) < len(group.ranks):
            return False
        for other, first in waiting.items():
            if other != rank.number:
                self._held[other] = first
                self._running.append(other)
        return True

    # meeting

    def _meet(self, rank: _Rank, posted: Any) -> bool | None:
        """Post something: whether it has met; None where the look is over."""
        place = self._place_of(rank, posted)
        if place is None:
            return None
        other = place.posted
        if other is None:
            place.posted, place.rank = posted, rank.number
            return False
        if isinstance(posted, list):
            matches = _is_mirror(rank.mirrors, posted, other)
        else:
            matches = self._mirrors_ops(posted, other)
        if not matches:
            return None
        place.posted = None
        self._running.append(place.rank)
        return True

    def _place_of(self, rank: _Rank, posted: Any) -> _Place | None:
        """Where something meets; None if it has several peers or groups."""
        if isinstance(posted, list):
            code: int = posted[0].code
            return rank.batched[code]
        if isinstance(posted, Op):
            return self._place(rank, posted.edge, "op")
        places = [self._place(rank, op.edge, "batch") for op in posted.ops]
        return places[0] if all(place is places[0] for place in places) else None

    def _mirrors_ops(self, posted: Op | Batch, other: Op | Batch) -> bool:
        """Whether each op has its partner on the other side, in the same order."""
        sends, recvs = _sides(posted)
        other_sends, other_recvs = _sides(other)
        return (
            len(sends) == len(other_recvs)
            and len(recvs) == len(other_sends)
            and all(map(self._mirrors_op, sends, other_recvs))
            and all(map(self._mirrors_op, recvs, other_sends))
        )

    def _mirrors_op(self, op: Op, other: Op) -> bool:
        """Whether two ops are the two ends of one message."""
        if op.microbatch != other.microbatch:
            return False
        a, b = op.edge, other.edge
        if self._mirrors.get(a) is b:  # seen before
            return True
        if (a.pass_, a.index, a.signature, a.name) != (
            b.pass_,
            b.index,
            b.signature,
            b.name,
        ):
            return False
        self._mirrors[a], self._mirrors[b] = b, a
        return True


def _group_of(rank: _Rank, posted: Any) -> Group:
    edge = (
        rank.edges[posted[0].code] if isinstance(posted, list) else posted.ops[0].edge
    )
    assert edge is not None
    group: Group = edge.group
    return group


def _sides(posted: Op | Batch) -> tuple[list[Op], list[Op]]:
    """The sends and the receives."""
    ops = posted.ops if isinstance(posted, Batch) else (posted,)
    sends = [op for op in ops if op.edge.direction is Direction.SEND]
    return sends, [op for op in ops if op.edge.direction is Direction.RECV]


def _is_mirror(mirrors: list[int], symbols: list[Symbol], other: list[Symbol]) -> bool:
    """Whether one or two symbols and those of the other side are the same messages."""
    first, mate = symbols[0], other[0]
    if len(symbols) != len(other):
        return False
    if len(symbols) == 1:
        return mirrors[first.code] == mate.code and first.microbatch == mate.microbatch
    second, its_mate = symbols[1], other[1]
    if mirrors[first.code] != mate.code:
        mate, its_mate = its_mate, mate
    return (
        mirrors[first.code] == mate.code
        and first.microbatch == mate.microbatch
        and mirrors[second.code] == its_mate.code
        and second.microbatch == its_mate.microbatch
    )
