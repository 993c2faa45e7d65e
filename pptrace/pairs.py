"""The quickest look at a plan: is what each two ranks do with each other mirrored?

Read as in `pptrace.rendezvous`: every call blocks its host until its kernel is done.
Then a rank waits for one other at a time. Where the ranks that talk to each other form
no ring (a pipeline on a line, a V), a circle of waiting ranks can only be two that wait
for each other; and two whose calls to each other are the same messages in the same
order are then both in the same call, and meet. So equal lists, pair by pair, are enough,
and lists compare at the speed of C. Setting up a group's communicator is one point that
all ranks come to; the lists must be equal before and after it.

Anything else (a ring, several groups, larger batches) is left to `pptrace.rendezvous`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pptrace.compact import Symbol, Tape
from pptrace.plan import Action, Batch, Edge, Leave, Op, Plan, Step, Sync, Wait
from pptrace.records import Direction, Group, Pass

__all__ = ["is_mirrored"]

_QUIET = frozenset({int, list, Wait, Action, Sync, Step, Leave})
_UP, _DOWN = 1, 1 << 40
"""Messages to the higher rank are numbered in the low bits, to the lower in the rest."""


def is_mirrored(plan: Plan, *, preconnected: bool = False) -> bool:
    """Whether the plan ends under every rule; False: it has to be looked at closer."""
    tapes = {r: p for r, p in plan.programs.items() if isinstance(p, Tape)}
    if len(tapes) < len(plan.programs) or len({t.splits for t in tapes.values()}) > 1:
        return False
    pairs = {
        (min(rank, edge.peer), max(rank, edge.peer))
        for rank, tape in tapes.items()
        for edge in tape.edges
        if edge is not None
    }
    if not _is_forest(pairs, tapes):
        return False
    keys = _Keys(tapes.values())
    sides = {
        rank: _Side(rank, tape, keys, preconnected=preconnected)
        for rank, tape in tapes.items()
    }
    if not all(side.read() for side in sides.values()):
        return False
    return _all_come(sides) and all(
        sides[low].calls[high] == sides[high].calls[low]
        and sides[low].before.get(high, 0) == sides[high].before.get(low, 0)
        for low, high in pairs
        if low in sides and high in sides
    )


def _is_forest(pairs: Iterable[tuple[int, int]], ranks: Iterable[int]) -> bool:
    """Whether the ranks of a plan, linked by these pairs, form no ring."""
    root = {rank: rank for rank in ranks}

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for low, high in pairs:
        if low not in root or high not in root:
            return False
        a, b = find(low), find(high)
        if a == b:
            return False
        root[a] = b
    return True


class _Keys:
    """Numbers for messages: the same on both sides, different for different ones."""

    def __init__(self, tapes: Iterable[Tape]) -> None:
        self._n = max((tape.n_microbatches for tape in tapes), default=0)
        self._numbers: dict[tuple[int, int], dict[tuple[object, ...], int]] = {}
        self._rows: dict[tuple[int, int], Sequence[int]] = {}

    def of(self, rank: int, edge: Edge) -> Sequence[int]:
        """The numbers of an edge's messages, by microbatch."""
        is_send = edge.direction is Direction.SEND
        step = 1 if edge.pass_ is Pass.F else -1
        source = edge.stage if is_send else edge.stage - step
        unit = _UP if is_send is (rank < edge.peer) else _DOWN
        message = (unit, id(edge.group), edge.pass_, source, edge.index, edge.signature)
        pair = (min(rank, edge.peer), max(rank, edge.peer))
        numbers = self._numbers.setdefault(pair, {})
        number = numbers.setdefault(message, len(numbers))
        # Most pairs number theirs alike, and share these.
        key = (number, unit)
        if key not in self._rows:
            first = number * self._n + 1
            self._rows[key] = [*range(first * unit, (first + self._n) * unit, unit)]
        return self._rows[key]


class _Side:
    """What one rank does with each of its peers: a list per peer, the same for both."""

    def __init__(
        self, rank: int, tape: Tape, keys: _Keys, *, preconnected: bool
    ) -> None:
        self._rank = rank
        self._tape = tape
        self.calls: dict[int, list[Any]] = {}
        self.group: Group | None = None
        """The group whose communicator the rank has to set up, and has come to."""
        self.before: dict[int, int] = {}
        """By peer: how many calls come before that."""
        self._preconnected = preconnected
        self._keys = [edge and keys.of(rank, edge) for edge in tape.edges]
        self._mates = [self._mates_of(code) for code in range(len(tape.edges))]
        for edge in tape.edges:
            if edge is not None:
                self.calls.setdefault(edge.peer, [])

    def _mates_of(self, code: int) -> tuple[int, ...]:
        """What may share a batch of two: the other direction, with the same peer."""
        edges = self._tape.edges
        edge = edges[code]
        return tuple(
            other
            for other, its in enumerate(edges)
            if edge and its and (code ^ other) & 1 and its.peer == edge.peer
        )

    def read(self) -> bool:
        """Fill the lists; False where something does not fit this look."""
        tape, keys, mates = self._tape, self._keys, self._mates
        edges = tape.edges
        put = [self.calls[edge.peer].append if edge else None for edge in edges]
        # What may be the first batch: any call if nothing is issued one by one.
        is_batch, is_up = not tape.splits, self._is_up()
        for item in tape.items:
            if type(item) is not tuple:
                if type(item) not in _QUIET and not self._instruction(item):
                    return False
                continue
            symbols = item[0]
            first = symbols[0]
            code = first.code
            row = keys[code]
            if row is None:
                return False
            key = row[first.microbatch]
            size = len(symbols)
            if size == 2:
                second = symbols[1]
                if second.code not in mates[code]:
                    return False
                key += keys[second.code][second.microbatch]
            elif size != 1:
                return False
            if not is_up and (is_batch or size == 2):
                if not self._come(edges[code].group):
                    return False
                is_up = True
            put[code](key)
        return True

    def _is_up(self) -> bool:
        groups = [edge.group for edge in self._tape.edges if edge is not None]
        return self._preconnected or all(group.eager for group in groups)

    def _come(self, group: Group) -> bool:
        """Set a group up, or have it set up; False if it is a second one."""
        if group.eager or self._preconnected or group is self.group:
            return True
        if self.group is not None:
            return False
        self.group = group
        self.before = {peer: len(calls) for peer, calls in self.calls.items()}
        return True

    def _instruction(self, item: Any) -> bool:
        """Anything but symbols; False if it does not fit this look."""
        if isinstance(item, Op):
            return self._post(item.edge.peer, ("op", self._op(item)))
        if not isinstance(item, Batch):
            return isinstance(item, Symbol)
        first = item.ops[0].edge
        if any(op.edge.peer != first.peer for op in item.ops) or any(
            op.edge.group is not first.group for op in item.ops
        ):
            return False
        # The stable order of the sort keeps that of each direction.
        ops = sorted(map(self._op, item.ops), key=lambda op: op[0])
        return self._come(first.group) and self._post(first.peer, ("batch", ops))

    def _post(self, peer: int, call: Any) -> bool:
        if peer not in self.calls:
            return False
        self.calls[peer].append(call)
        return True

    def _op(self, op: Op) -> tuple[Any, ...]:
        """An op as both ends see it."""
        edge = op.edge
        is_upward = (edge.direction is Direction.SEND) is (self._rank < edge.peer)
        return (
            is_upward,
            id(edge.group),
            edge.pass_,
            edge.index,
            edge.signature,
            edge.name,
            op.microbatch,
        )


def _all_come(sides: dict[int, _Side]) -> bool:
    """Whether nobody sets a group up, or all its ranks do."""
    groups = {id(s.group): s.group for s in sides.values() if s.group is not None}
    if len(groups) > 1:
        return False
    return all(
        sides.keys() >= set(group.ranks)
        and all(sides[rank].group is group for rank in group.ranks)
        for group in groups.values()
    )
