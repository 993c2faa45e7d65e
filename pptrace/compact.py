"""What one rank of a schedule does, in a form that is cheap to record and to look at.

A schedule on 64 ranks posts tens of thousands of ops per step. All ranks share one
`Symbol` per slot, kind and microbatch, a batch is the very list the schedule passed on,
and an action is a number; `Tape` turns that into the instructions of `pptrace.plan`
where somebody needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pptrace.plan import Action, Batch, Collective, Edge, Instruction, Op, Wait

__all__ = [
    "ACTIONS",
    "KINDS",
    "NEXT_ACTION",
    "Symbol",
    "Tape",
    "action_number",
    "symbol_code",
]

KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
ACTIONS = "FBIW"
_SLOTS = 1 << 10
"""More stages than this on one rank do not happen."""


NEXT_ACTION = _SLOTS * len(ACTIONS)
"""From the number of an action to that of the next microbatch."""


def symbol_code(slot: int, kind: int) -> int:
    """The number of an op's slot (the n-th stage of its rank) and kind."""
    return slot * len(KINDS) + kind


def action_number(slot: int, kind: int, microbatch: int) -> int:
    """An action as a number."""
    return microbatch * NEXT_ACTION + slot * len(ACTIONS) + kind


class Symbol:
    """An op of a stage to its neighbour: the same object on every rank."""

    __slots__ = ("code", "microbatch")

    def __init__(self, code: int, microbatch: int) -> None:
        self.code = code
        self.microbatch = microbatch


class Tape:
    """What one rank did, as recorded.

    ``items`` are, in program order: a tuple (list of symbols, description) where ops
    were posted by ``_batch_p2p``; a list where all works of such a list were waited on;
    a number for an action; anything else is an instruction as it stands.
    ``edges`` are the rank's edges by the code of a symbol, ``stages`` its stages by
    slot; ``splits``: one-sided batches are issued one by one. Microbatches of symbols
    are below ``n_microbatches``.
    """

    def __init__(
        self,
        items: list[Any],
        edges: Sequence[Edge | None],
        stages: Sequence[int],
        *,
        splits: bool,
        n_microbatches: int,
    ) -> None:
        self.n_microbatches = n_microbatches
        self.items = items
        self.edges = edges
        self.stages = stages
        self.splits = splits
        self._instructions: list[Instruction] | None = None

    def __iter__(self) -> Iterator[Instruction]:
        if self._instructions is None:
            self._instructions = list(_Reader(self).read())
        return iter(self._instructions)


class _Reader:
    """Turns a tape into instructions."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        # What a list, or a symbol in it, stood for when it was posted last.
        self._posted: dict[int, list[Op | Batch]] = {}

    def read(self) -> Iterator[Instruction]:
        """All instructions, in order."""
        for item in self._tape.items:
            kind = type(item)
            if kind is tuple:
                yield from self._post(*item)
            elif kind is int:
                yield self._action(item)
            elif kind is list or isinstance(item, Symbol):
                yield from self._waits(item)
            else:
                yield item

    def _waits(self, works: Any) -> Iterator[Instruction]:
        """Waits on a list of works, or on one."""
        posted = self._posted.get(id(works))
        if posted is not None:
            yield from map(Wait, posted)
        elif isinstance(works, list):  # put together from several calls
            for work in works:
                if isinstance(work, Symbol):
                    yield from self._waits(work)
                elif isinstance(work, (Op, Batch, Collective)):
                    yield Wait(work)

    def _post(self, symbols: list[Symbol], desc: str | None) -> Iterator[Instruction]:
        tape = self._tape
        ops = [self._op(symbol) for symbol in symbols]
        splits = tape.splits and len({op.edge.direction for op in ops}) == 1
        posted: list[Op | Batch] = [*ops] if splits else [Batch(ops, desc or "")]
        self._posted[id(symbols)] = posted
        for number, symbol in enumerate(symbols):
            self._posted[id(symbol)] = [posted[number if splits else 0]]
        yield from posted

    def _op(self, symbol: Symbol) -> Op:
        edge = self._tape.edges[symbol.code]
        if edge is None:
            raise ValueError(f"{KINDS[symbol.code % 4]} has nowhere to go")
        return Op(edge, symbol.microbatch)

    def _action(self, number: int) -> Action:
        microbatch, rest = divmod(number, NEXT_ACTION)
        slot, kind = divmod(rest, len(ACTIONS))
        return Action(self._tape.stages[slot], ACTIONS[kind], microbatch)
