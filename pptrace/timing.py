"""A plan in unit time: when each action runs, how much time is idle, what is in flight.

F, I and W take 1, B takes 2, messages take nothing: a message is there when both its
send and its receive have been posted, each after the action before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pptrace.plan import Act, Action, Batch, Collective, Instruction, Op, Plan, Wait
from pptrace.records import Direction, Transport
from pptrace.semantics import transport_of

__all__ = ["Slot", "Timing", "play"]

_COST = {"F": 1, "I": 1, "W": 1, "B": 2}


@dataclass(frozen=True, slots=True)
class Slot:
    """One action of a rank, from ``begin`` until before ``end``, in units of an F."""

    begin: int
    end: int
    action: Action


@dataclass(frozen=True, slots=True)
class Timing:
    """When what runs, by rank; made by `play`."""

    slots: Mapping[int, tuple[Slot, ...]]

    @property
    def makespan(self) -> int:
        """Time at which the last action ends."""
        return max((s[-1].end for s in self.slots.values() if s), default=0)

    @property
    def bubble_share(self) -> float:
        """Idle rank-time over all rank-time: 0 is perfect."""
        busy = sum(s.end - s.begin for slots in self.slots.values() for s in slots)
        span = self.makespan * len(self.slots)
        return 1 - busy / span if span else 0.0

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """By rank: most forwards done whose backward (the W, where split) is not.

        A rank with several stages counts the microbatch of each.
        """
        return {rank: _peak(slots) for rank, slots in self.slots.items()}

    def render(
        self, width: int = 100, *, marks: Mapping[int, str] | None = None
    ) -> str:
        """Ranks × time as text; ``marks`` are put at the end of a rank's row."""
        return "\n".join(_rows(self, width, marks or {}))


def _peak(slots: tuple[Slot, ...]) -> int:
    change = {"F": 1, "B": -1, "W": -1}
    level = peak = 0
    for slot in slots:
        level += change.get(slot.action.kind, 0)
        peak = max(peak, level)
    return peak


# -- playing -----------------------------------------------------------------------


def play(plan: Plan, computed: Mapping[int, int] | None = None) -> Timing:
    """Play the main threads of a plan, as far as matching alone lets them get.

    ``computed`` says how many actions each rank runs at most: how far it really gets
    under the rules, where it does not get to the end.
    """
    return _Player(plan, computed).play()


class _Player:
    def __init__(self, plan: Plan, computed: Mapping[int, int] | None) -> None:
        self._programs: dict[int, Iterator[Instruction]] = {
            rank: iter(plan.programs[rank]) for rank in plan.ranks
        }
        self._computed = computed
        self._clock = dict.fromkeys(self._programs, 0)
        self._slots: dict[int, list[Slot]] = {rank: [] for rank in self._programs}
        self._posted: dict[tuple[object, ...], deque[tuple[int, Op | Batch, int]]] = {}
        self._open: dict[tuple[int, Op | Batch], tuple[int, int]] = {}
        self._waiting: dict[tuple[int, Op | Batch], int] = {}
        self._running = deque(self._programs)

    def play(self) -> Timing:
        while self._running:
            self._advance(self._running.popleft())
        return Timing({rank: tuple(slots) for rank, slots in self._slots.items()})

    def _advance(self, rank: int) -> None:
        for instruction in self._programs[rank]:
            if isinstance(instruction, (Action, Act)):
                if not self._act(rank, instruction):
                    return
            elif isinstance(instruction, Op):
                self._post(rank, instruction, (instruction,), coalesced=False)
            elif isinstance(instruction, Batch):
                self._post(rank, instruction, instruction.ops, coalesced=True)
            elif isinstance(instruction, Wait) and not self._wait(rank, instruction.on):
                return

    def _act(self, rank: int, instruction: Action | Act) -> bool:
        action = instruction.action if isinstance(instruction, Act) else instruction
        slots = self._slots[rank]
        if self._computed is not None and len(slots) >= self._computed.get(rank, 0):
            return False
        begin = self._clock[rank]
        self._clock[rank] = begin + _COST.get(action.kind, 1)
        slots.append(Slot(begin, self._clock[rank], action))
        return True

    def _post(
        self, rank: int, posted: Op | Batch, ops: tuple[Op, ...], *, coalesced: bool
    ) -> None:
        now = self._clock[rank]
        self._open[rank, posted] = (len(ops), now)
        for op in ops:
            edge = op.edge
            transport = transport_of(coalesced=coalesced, eager=edge.group.eager)
            is_send = edge.direction is Direction.SEND
            ends = (rank, edge.peer) if is_send else (edge.peer, rank)
            place = (edge.group.index, transport is Transport.GROUP, ends)
            mirror = self._posted.get((*place, not is_send))
            if mirror:
                other_rank, other, since = mirror.popleft()
                self._match(rank, posted, since)
                self._match(other_rank, other, now)
            else:
                queue = self._posted.setdefault((*place, is_send), deque())
                queue.append((rank, posted, now))

    def _match(self, rank: int, posted: Op | Batch, at: int) -> None:
        key = (rank, posted)
        left, ready = self._open[key]
        self._open[key] = (left - 1, max(ready, at))
        if left == 1 and key in self._waiting:
            del self._waiting[key]
            self._clock[rank] = max(self._clock[rank], ready, at)
            self._running.append(rank)

    def _wait(self, rank: int, posted: Op | Batch | Collective) -> bool:
        if isinstance(posted, Collective):
            return True
        left, ready = self._open[rank, posted]
        if left:
            self._waiting[rank, posted] = rank
            return False
        self._clock[rank] = max(self._clock[rank], ready)
        return True


# -- text --------------------------------------------------------------------------


def _rows(timing: Timing, width: int, marks: Mapping[int, str]) -> Iterator[str]:
    stages = {s.action.stage for slots in timing.slots.values() for s in slots}
    with_stage = len(stages) > len(timing.slots)
    labels = {
        rank: [_label(slot, with_stage=with_stage) for slot in slots]
        for rank, slots in timing.slots.items()
    }
    longest = max((len(t) for texts in labels.values() for t in texts), default=2)
    cell = longest + 1
    lead = max((len(f"r{rank}") for rank in timing.slots), default=2) + 1
    columns = max(1, (width - lead) // cell)
    for rank, slots in timing.slots.items():
        cells: list[str] = []
        for slot, text in zip(slots, labels[rank], strict=True):
            cells += ["·"] * (slot.begin - len(cells))
            cells += [text, *["═" * longest] * (slot.end - slot.begin - 1)]
        mark = marks.get(rank, "")
        if not mark:
            cells += ["·"] * (timing.makespan - len(cells))
        shown = "".join(part.ljust(cell) for part in cells[:columns])
        more = "…" if len(cells) > columns else ""
        yield f"{f'r{rank}'.ljust(lead)}{shown}{more}{mark}".rstrip()


def _label(slot: Slot, *, with_stage: bool) -> str:
    action = slot.action
    stage = f"{action.stage}" if with_stage else ""
    return f"{stage}{action.kind}{action.microbatch}"
