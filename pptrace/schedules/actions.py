"""A schedule as data: actions with a text form that parses back, and checks of them.

Nothing here needs torch. The text form is torch's own (``0F0``, ``1RECV_F0``,
``2REDUCE_GRAD``); ``0SEND_F1@2`` adds the peer stage where an action has several peers.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from pptrace.errors import InputError

__all__ = [
    "BACKWARDS",
    "COMPUTE",
    "RECEIVES",
    "SENDS",
    "Action",
    "Cost",
    "Programs",
    "Timed",
    "actions_1f1b",
    "actions_gpipe",
    "compute_only",
    "flatten",
    "forward_only",
    "keep_microbatches",
    "lower",
    "measure",
    "order_1f1b",
    "order_gpipe",
    "parse",
    "play",
    "read_csv",
    "rendezvous_problem",
    "stage_to_rank_of",
    "with_peers",
    "write_csv",
]

_PATTERN = re.compile(
    r"(\d+)((?:WAIT_)?(?:SEND_F|SEND_B|REDUCE_GRAD)|RECV_F|RECV_B|UNSHARD|RESHARD|[FBIW])"
    r"(\d*)(?:@(\d+))?"
)

COMPUTE = frozenset("FBIW")
"""Kinds that compute a microbatch."""
BACKWARDS = frozenset("BI")
"""Kinds that make the gradient of a stage's input."""
SENDS = frozenset({"SEND_F", "SEND_B"})
RECEIVES = frozenset({"RECV_F", "RECV_B"})

_UNIT_COST = {"F": 1, "B": 2, "I": 1, "W": 1}


class Action(NamedTuple):
    """One thing a rank does: compute, post a send, post a receive, reduce gradients.

    A receive is posted by ``RECV_*`` and waited for by the action that consumes it.
    ``peer`` is the other stage of a send or receive; None means the adjacent one.
    ``OVERLAP_F_B`` does its ``parts``, in order, as one; its stage is -1, as in torch.
    """

    stage: int
    kind: str
    microbatch: int | None = None
    peer: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        microbatch = "" if self.microbatch is None else self.microbatch
        peer = "" if self.peer is None else f"@{self.peer}"
        return f"{self.stage}{self.kind}{microbatch}{peer}"

    @property
    def other(self) -> int:
        """The stage at the other end of a send or receive."""
        if self.peer is not None:
            return self.peer
        return self.stage + (1 if self.kind in {"SEND_F", "RECV_B"} else -1)

    @property
    def mirror(self) -> tuple[int, str, int | None, int]:
        """What names the message: the same for a send and for its receive."""
        end = self.kind[-1]
        if self.kind in SENDS:
            return (self.stage, end, self.microbatch, self.other)
        return (self.other, end, self.microbatch, self.stage)


Programs = Mapping[int, Sequence[Action]]
"""The actions of every rank, in program order."""


def parse(text: str) -> Action:
    """Read one action: ``0F0``, ``0SEND_F1@2``, ``(0F1;3B0)OVERLAP_F_B``.

    Raises:
        InputError: the text is no action.
    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")OVERLAP_F_B"):
        inside = text[1 : text.rindex(")")].split(";")
        return Action(-1, "OVERLAP_F_B", parts=tuple(parse(part) for part in inside))
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise InputError(
            repr(text), "is no action", "examples: 0F0, 1RECV_F0, 2REDUCE_GRAD"
        )
    stage, kind, microbatch, peer = match.groups()
    return Action(
        int(stage),
        kind,
        int(microbatch) if microbatch else None,
        int(peer) if peer else None,
    )


def flatten(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions with every overlapped pair taken apart."""
    for action in actions:
        yield from action.parts or (action,)


def write_csv(programs: Programs, file: TextIO) -> None:
    """Write one row per rank, one action per cell: what torch's CSV loaders read."""
    writer = csv.writer(file, lineterminator="\n")
    for rank in sorted(programs):
        writer.writerow([str(action) for action in programs[rank]])


def read_csv(file: TextIO) -> dict[int, list[Action]]:
    """Read what `write_csv` or torch's ``_dump_csv`` wrote; empty cells are idle.

    Raises:
        InputError: a cell is no action.
    """
    return {
        rank: [parse(cell) for cell in row if cell.strip()]
        for rank, row in enumerate(csv.reader(file))
    }


def order_1f1b(stage: int, num_stages: int, n: int) -> list[Action]:
    """What `actions_1f1b` writes as text."""
    warmup = min(n, num_stages - stage)
    first, last = stage == 0, stage == num_stages - 1
    actions: list[Action] = []

    def add(kind: str, microbatch: int, *, when: bool = True) -> None:
        if when:
            actions.append(Action(stage, kind, microbatch))

    for f in range(warmup):
        add("RECV_F", f, when=not first)
        add("F", f)
        add("SEND_F", f, when=not last)
    for b in range(n):
        f = warmup + b
        add("RECV_B", b, when=not last)
        add("RECV_F", f, when=f < n and not first)
        add("B", b)
        add("SEND_B", b, when=not first)
        if f < n:
            add("F", f)
            add("SEND_F", f, when=not last)
    return [*actions, Action(stage, "REDUCE_GRAD")]


def actions_1f1b(stage: int, num_stages: int, n: int) -> list[str]:
    """The 1F1B schedule of one stage, for any ``n`` ≥ 1 microbatches.

    The rule: a send is posted as soon as its tensor exists, never together with a
    receive; the next forward's receive is posted before each backward, so before the
    gradient's send. So both sides of an edge take F before B, always.
    """
    return [str(action) for action in order_1f1b(stage, num_stages, n)]


def order_gpipe(stage: int, num_stages: int, n: int) -> list[Action]:
    """What `actions_gpipe` writes as text."""
    first, last = stage == 0, stage == num_stages - 1
    actions: list[Action] = []
    for kind, receives, sends in (
        ("F", not first, not last),
        ("B", not last, not first),
    ):
        for microbatch in range(n):
            if receives:
                actions.append(Action(stage, f"RECV_{kind}", microbatch))
            actions.append(Action(stage, kind, microbatch))
            if sends:
                actions.append(Action(stage, f"SEND_{kind}", microbatch))
    return [*actions, Action(stage, "REDUCE_GRAD")]


def actions_gpipe(stage: int, num_stages: int, n: int) -> list[str]:
    """The GPipe schedule of one stage: all forwards, then all backwards."""
    return [str(action) for action in order_gpipe(stage, num_stages, n)]


def _keep(actions: Iterable[Action], wanted: Callable[[Action], bool]) -> list[Action]:
    """Drop actions; an overlapped pair of which one part stays becomes that part."""
    kept: list[Action] = []
    for action in actions:
        parts = [part for part in action.parts or (action,) if wanted(part)]
        kept.extend([action] if len(parts) == len(action.parts) > 0 else parts)
    return kept


def forward_only(actions: Iterable[Action]) -> list[Action]:
    """What is left of a schedule where nothing has a gradient (eval, no loss)."""
    return _keep(actions, lambda a: a.kind in {"F", "SEND_F", "RECV_F"})


def compute_only(actions: Iterable[Action]) -> list[Action]:
    """The same schedule without its sends and receives."""
    about_messages = SENDS | RECEIVES | {"WAIT_SEND_F", "WAIT_SEND_B"}  # 2.15's waits
    return [action for action in actions if action.kind not in about_messages]


def with_peers(actions: Iterable[Action]) -> list[Action]:
    """Name the peer of every send and receive, the adjacent stage's too."""
    both = SENDS | RECEIVES
    return [a._replace(peer=a.other) if a.kind in both else a for a in actions]


def keep_microbatches(actions: Iterable[Action], n: int) -> list[Action]:
    """Drop every action of microbatch ``n`` and later.

    What is left of a right schedule is right: taking whole microbatches out of an order
    that all ranks can follow leaves an order that they can follow.
    """
    return _keep(actions, lambda a: a.microbatch is None or a.microbatch < n)


def stage_to_rank_of(programs: Programs) -> dict[int, int]:
    """Which rank holds each stage, read from the actions themselves."""
    return {
        action.stage: rank
        for rank, program in programs.items()
        for action in flatten(program)
    }


def _advance(
    programs: Programs,
    step: Callable[[int, Action], bool],
    push: Callable[[], bool] = bool,
) -> dict[int, Action]:
    """Let every rank do its next action where ``step`` allows it; return who is stuck.

    ``step`` performs the action and returns True, or returns False if it cannot yet.
    ``push`` is asked when no rank can go on: whether it has changed that.
    """
    position = dict.fromkeys(sorted(programs), 0)
    moved = True
    while moved:
        moved = False
        for rank, at in position.items():
            if at < len(programs[rank]) and step(rank, programs[rank][at]):
                position[rank] += 1
                moved = True
        moved = moved or push()
    return {
        rank: programs[rank][at]
        for rank, at in position.items()
        if at < len(programs[rank])
    }


def _inputs(action: Action, last_stage: int) -> tuple[Action | None, Action | None]:
    """The compute actions on another stage, and on its own, that an action needs."""
    stage, kind, microbatch = action[:3]
    if kind == "F":
        return (Action(stage - 1, "F", microbatch) if stage else None), None
    if kind in BACKWARDS:
        later = Action(stage + 1, "B", microbatch) if stage < last_stage else None
        return later, Action(stage, "F", microbatch)
    return None, Action(stage, "I", microbatch) if kind == "W" else None


class _Lowering:
    """Plays the orders of all ranks and puts every message at one moment for both."""

    def __init__(self, orders: Programs, edges: Iterable[tuple[int, int]]) -> None:
        self.home = stage_to_rank_of(orders)
        self.programs: dict[int, list[Action]] = {rank: [] for rank in orders}
        self._done: set[tuple[int, str, int | None]] = set()
        self._received: set[tuple[int, str, int | None, int]] = set()
        self.waiting: dict[int, list[Action]] = {rank: [] for rank in orders}
        self._sources: dict[tuple[int, str], list[int]] = {}
        for src, dst in sorted(set(edges)):
            self._sources.setdefault((dst, "F"), []).append(src)
            self._sources.setdefault((src, "B"), []).append(dst)
            self._sources.setdefault((src, "to F"), []).append(dst)
            self._sources.setdefault((dst, "to B"), []).append(src)

    def missing(self, rank: int, action: Action) -> list[Action] | None:
        """The sends whose messages ``action`` needs; None if one is not yet made."""
        found: list[Action] = []
        ahead: set[tuple[int, str, int | None]] = set()
        for part in action.parts or (action,):
            stage, kind, microbatch = part[:3]
            letter = "B" if kind in BACKWARDS else kind
            for other in self._sources.get((stage, letter), ()):
                message = (other, letter, microbatch, stage)
                if message in self._received or (other, letter, microbatch) in ahead:
                    continue
                if self.home[other] == rank:
                    if message[:3] not in self._done:
                        return None
                    continue
                sends = self.waiting[self.home[other]]
                send = next((s for s in sends if s.mirror == message), None)
                if send is None:
                    return None
                found.append(send)
            own = {"B": "F", "W": "B"}.get(letter)
            if own and not {(stage, own, microbatch)} & (self._done | ahead):
                return None
            ahead.add((stage, letter, microbatch))
        return found

    def perform(self, rank: int, action: Action) -> None:
        """Append a compute action; what it has to send waits for `deliver`."""
        self.programs[rank].append(action)
        for part in action.parts or (action,):
            stage, kind, microbatch = part[:3]
            letter = "B" if kind in BACKWARDS else kind
            self._done.add((stage, letter, microbatch))
            for other in self._sources.get((stage, f"to {letter}"), ()):
                if self.home[other] != rank:
                    send = Action(stage, f"SEND_{letter}", microbatch, other)
                    self.waiting[rank].append(send)

    def deliver(self, send: Action) -> None:
        """Append a send and its receive to both ranks' programs."""
        sender, receiver = self.home[send.stage], self.home[send.other]
        self.waiting[sender].remove(send)
        self._received.add(send.mirror)
        adjacent = abs(send.other - send.stage) == 1
        letter = send.kind[-1]
        recv = Action(send.other, f"RECV_{letter}", send.microbatch, send.stage)
        for rank, action in ((sender, send), (receiver, recv)):
            self.programs[rank].append(
                action._replace(peer=None) if adjacent else action
            )


def lower(
    orders: Programs,
    edges: Iterable[tuple[int, int]] | None = None,
    *,
    deferred: bool = False,
) -> dict[int, list[Action]]:
    """Add the sends and receives to compute-only orders, for any set of edges.

    ``edges`` are pairs of stages (source, destination); by default each stage feeds the
    next. Every message is put at one point of one sequence that all ranks follow, so
    each rank's program is its part of that sequence and nothing can wait in a circle,
    whatever an op blocks. That point is right after the action that made the message;
    ``deferred`` puts it as late as the receiver can go on without it.

    Raises:
        InputError: the orders themselves cannot be followed to the end.
    """
    last = max(stage_to_rank_of(orders))
    work = _Lowering(
        orders, [(s, s + 1) for s in range(last)] if edges is None else edges
    )

    def step(rank: int, action: Action) -> bool:
        if work.waiting[rank]:
            return False
        sends = work.missing(rank, action)
        if sends is None:
            return False
        for send in sends:
            work.deliver(send)
        work.perform(rank, action)
        if not deferred:
            for send in list(work.waiting[rank]):
                work.deliver(send)
        return True

    def push() -> bool:
        for sends in work.waiting.values():
            if sends:
                work.deliver(sends[0])
                return True
        return False

    stuck = _advance(orders, step, push)
    if stuck:
        raise _cannot_end(stuck)
    return work.programs


def _cannot_end(stuck: Mapping[int, Action]) -> InputError:
    heads = ", ".join(f"rank {rank} at {action}" for rank, action in stuck.items())
    return InputError("schedule", f"cannot be followed to the end: {heads}")


def rendezvous_problem(programs: Programs) -> str | None:
    """Where the programs stop if every send and receive blocks until its peer meets it.

    That is the strictest reading of P2P there is (one op at a time, no buffer, no
    overlap), so None means free of deadlock under every rule of order on a
    communicator. Otherwise: what each rank that cannot go on is waiting in.
    """
    home = stage_to_rank_of(programs)
    offered: dict[tuple[int, str, int | None, int], int] = {}
    taken: set[tuple[int, str, int | None, int]] = set()

    def step(rank: int, action: Action) -> bool:
        if action.kind not in SENDS | RECEIVES or home.get(action.other) == rank:
            return True
        message = action.mirror
        if message in taken:
            return True
        if offered.setdefault(message, rank) == rank:
            return False
        taken.add(message)
        return True

    flat = {rank: list(flatten(program)) for rank, program in programs.items()}
    stuck = _advance(flat, step)
    return "; ".join(f"rank {r} in {a}" for r, a in stuck.items()) or None


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule costs in unit time: F, I and W take 1, B takes 2, messages 0."""

    makespan: int
    bubble_share: float
    """Idle rank-time over all rank-time: 0 is perfect."""
    in_flight: int
    """Most microbatches, over all ranks, whose forward is done and backward is not; a
    rank with several stages counts each."""
    actions: int
    """Compute actions, all ranks together."""


class Timed(NamedTuple):
    """A compute action and when it runs, in units of an F."""

    begin: int
    end: int
    action: Action


def play(programs: Programs) -> dict[int, list[Timed]]:
    """When every compute action runs, by rank; messages and reductions take no time.

    Raises:
        InputError: the programs cannot be followed to the end.
    """
    orders = {
        rank: [a for a in flatten(program) if a.kind in COMPUTE]
        for rank, program in programs.items()
    }
    last = max(stage_to_rank_of(orders))
    ended: dict[Action, int] = {}
    played: dict[int, list[Timed]] = {rank: [] for rank in orders}

    def step(rank: int, action: Action) -> bool:
        needs = [need for need in _inputs(action, last) if need is not None]
        if any(need not in ended for need in needs):
            return False
        before = played[rank][-1].end if played[rank] else 0
        begin = max([before, *(ended[need] for need in needs)])
        end = begin + _UNIT_COST[action.kind]
        played[rank].append(Timed(begin, end, action))
        ended[action] = end
        if action.kind == "I":
            ended[action._replace(kind="B")] = end
        return True

    stuck = _advance(orders, step)
    if stuck:
        raise _cannot_end(stuck)
    return played


def measure(programs: Programs) -> Cost:
    """What a schedule costs; see `play`.

    Raises:
        InputError: it cannot be followed to the end.
    """
    played = play(programs)
    orders = [[timed.action for timed in rank] for rank in played.values()]
    busy = sum(t.end - t.begin for rank in played.values() for t in rank)
    makespan = max(rank[-1].end for rank in played.values())
    return Cost(
        makespan,
        1 - busy / (makespan * len(played)),
        max(map(_peak_in_flight, orders)),
        sum(map(len, orders)),
    )


def _peak_in_flight(order: Sequence[Action]) -> int:
    """Forwards done whose backward (the W, where it is split) is not, at the worst."""
    change = {"F": 1, "B": -1, "W": -1}
    return max(itertools.accumulate(change.get(a.kind, 0) for a in order), default=0)
