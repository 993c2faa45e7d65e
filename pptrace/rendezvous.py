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

from collections.abc import Iterator

from pptrace.plan import (
    Action,
    Batch,
    Edge,
    Instruction,
    Leave,
    Op,
    Plan,
    Step,
    Sync,
    Wait,
)

__all__ = ["meets_in_order"]

_QUIET = (Wait, Action, Sync, Step, Leave)


def meets_in_order(plan: Plan, *, preconnected: bool = False) -> bool:
    """Whether the plan can run that way: True means it ends under every rule.

    Labels and payloads of what meets must agree, too: then nothing is wrong with it.
    """
    return _Look(plan, preconnected=preconnected).run()


class _Place:
    """Where the single ops, or the batches, of one group and pair of ranks meet."""

    __slots__ = ("posted", "rank")

    def __init__(self) -> None:
        self.rank = -1
        self.posted: Op | Batch | None = None


class _Look:
    """One look at a plan; ``run`` may be called once."""

    def __init__(self, plan: Plan, *, preconnected: bool) -> None:
        self._programs: dict[int, Iterator[Instruction]] = {
            rank: iter(plan.programs[rank]) for rank in plan.ranks
        }
        self._running = list(self._programs)
        self._preconnected = preconnected
        self._ended = 0
        self._places: dict[
            tuple[int, int, int, bool], _Place
        ] = {}  # by id of the group
        # One lookup per op: the places of an edge, and the edge it was seen to mirror.
        self._single: dict[Edge, _Place] = {}
        self._batched: dict[Edge, _Place] = {}
        self._mirrors: dict[Edge, Edge] = {}
        self._set_up: dict[int, dict[int, Batch]] = {}  # by id of the group
        self._held: dict[int, Batch] = {}

    def run(self) -> bool:
        """Run all ranks as far as they get; returns whether all got to the end."""
        while self._running:
            rank = self._running.pop()
            held = self._held.pop(rank, None)
            met = held is None or self._meet_batch(rank, held)
            if met is None:
                return False
            if met and not self._advance(rank):
                return False
        return self._ended == len(self._programs)

    def _advance(self, rank: int) -> bool:
        """Run one rank until it blocks; returns False where the look is over."""
        single = self._single
        for instruction in self._programs[rank]:
            if type(instruction) in _QUIET:
                continue
            if isinstance(instruction, Batch):
                met = self._batch(rank, instruction)
                if met is None:
                    return False
                if not met:
                    return True
                continue
            if not isinstance(instruction, Op):
                return False
            edge = instruction.edge
            place = single.get(edge)
            if place is None:
                place = single[edge] = self._place(rank, edge, batched=False)
            other = place.posted
            if other is None:
                place.posted, place.rank = instruction, rank
                return True
            if not self._is_mirror(instruction, other):
                return False
            place.posted = None
            self._running.append(place.rank)
        self._ended += 1
        return True

    def _place(self, rank: int, edge: Edge, *, batched: bool) -> _Place:
        low, high = sorted((rank, edge.peer))
        return self._places.setdefault((id(edge.group), low, high, batched), _Place())

    def _is_mirror(self, op: Op, other: Op | Batch) -> bool:
        """Whether two ops are the two ends of one message."""
        if not isinstance(other, Op) or op.microbatch != other.microbatch:
            return False
        a, b = op.edge, other.edge
        if self._mirrors.get(a) is b:  # seen before
            return True
        if (
            a.direction is b.direction
            or a.pass_ is not b.pass_
            or a.index != b.index
            or a.signature != b.signature
            or a.name != b.name
        ):
            return False
        self._mirrors[a], self._mirrors[b] = b, a
        return True

    # batches

    def _batch(self, rank: int, batch: Batch) -> bool | None:
        """Post a batch: whether it has met; None where the look is over."""
        group = batch.ops[0].edge.group
        if not (group.eager or self._preconnected):
            waiting = self._set_up.setdefault(id(group), {})
            if rank not in waiting:
                waiting[rank] = batch
                if len(waiting) < len(group.ranks):
                    return False
                for other, first in waiting.items():
                    if other != rank:
                        self._held[other] = first
                        self._running.append(other)
        return self._meet_batch(rank, batch)

    def _meet_batch(self, rank: int, batch: Batch) -> bool | None:
        place: _Place | None = None
        for op in batch.ops:
            found = self._batched.get(op.edge)
            if found is None:
                found = self._place(rank, op.edge, batched=True)
                self._batched[op.edge] = found
            if place is not None and place is not found:
                return None  # it has several peers or groups
            place = found
        assert place is not None
        other = place.posted
        if other is None:
            place.posted, place.rank = batch, rank
            return False
        if not isinstance(other, Batch) or not self._mirrors_batch(batch, other):
            return None
        place.posted = None
        self._running.append(place.rank)
        return True

    def _mirrors_batch(self, batch: Batch, other: Batch) -> bool:
        """Whether each op has its partner in the other batch, in the same order."""
        if len(batch.ops) != len(other.ops):
            return False
        sends, recvs = _split(batch)
        other_sends, other_recvs = _split(other)
        return (
            len(sends) == len(other_recvs)
            and all(map(self._is_mirror, sends, other_recvs))
            and all(map(self._is_mirror, recvs, other_sends))
        )


def _split(batch: Batch) -> tuple[list[Op], list[Op]]:
    """The sends and the receives of a batch."""
    sends: list[Op] = []
    recvs: list[Op] = []
    for op in batch.ops:
        (sends if op.edge.direction == 1 else recvs).append(op)
    return sends, recvs
