"""A schedule as data: actions with a text form that parses back, and checks of them.

Nothing here needs torch. The text form is torch's own (``0F0``, ``1RECV_F0``,
``2REDUCE_GRAD``); ``0SEND_F1@2`` adds the peer stage where an action has several peers.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "actions_1f1b",
    "actions_gpipe",
    "compute_only",
    "forward_only",
    "keep_microbatches",
    "lower",
    "measure",
    "order_1f1b",
    "order_gpipe",
    "parse",
    "read_csv",
    "rendezvous_problem",
    "stage_to_rank_of",
    "with_peers",
    "write_csv",
]

_PATTERN = re.compile(
    r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|UNSHARD|RESHARD|F|B|I|W)"
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
    """

    stage: int
    kind: str
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
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


def parse(text: str) -> tuple[Action, ...]:
    """Read one cell: an action, torch's ``(0F1;3B0)OVERLAP_F_B`` (two), or nothing.

    Raises:
        InputError: the text is no action.
    """
    text = text.strip()
    if text.startswith("("):
        inside, _, kind = text[1:].partition(")")
        if kind != "OVERLAP_F_B":
            raise InputError(text, "is no action", "known: (0F1;3B0)OVERLAP_F_B")
        parts = (parse(part) for part in inside.split(";"))
        return tuple(itertools.chain.from_iterable(parts))
    if not text:
        return ()
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise InputError(text, "is no action", "examples: 0F0, 1RECV_F0, 2REDUCE_GRAD")
    stage, kind, microbatch, peer = match.groups()
    return (
        Action(
            int(stage),
            kind,
            int(microbatch) if microbatch else None,
            int(peer) if peer else None,
        ),
    )


def write_csv(programs: Programs, file: TextIO) -> None:
    """Write one row per rank, one action per cell: what torch's CSV loaders read."""
    writer = csv.writer(file, lineterminator="\n")
    for rank in sorted(programs):
        writer.writerow([str(action) for action in programs[rank]])


def read_csv(file: TextIO) -> dict[int, list[Action]]:
    """Read what `write_csv` or torch's ``_dump_csv`` wrote.

    Raises:
        InputError: a cell is no action.
    """
    return {
        rank: [action for cell in row for action in parse(cell)]
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
        add("B", b)
        add("RECV_F", f, when=f < n and not first)
        add("SEND_B", b, when=not first)
        if f < n:
            add("F", f)
            add("SEND_F", f, when=not last)
    return [*actions, Action(stage, "REDUCE_GRAD")]


def actions_1f1b(stage: int, num_stages: int, n: int) -> list[str]:
    """The 1F1B schedule of one stage, for any ``n`` ≥ 1 microbatches.

    The rule: a send is posted as soon as its tensor exists, never together with a
    receive; after each backward the next forward's receive is posted first, then the
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


def forward_only(actions: Iterable[Action]) -> list[Action]:
    """What is left of a schedule where nothing has a gradient (eval, no loss)."""
    kept = {"F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
    return [action for action in actions if action.kind in kept]


def compute_only(actions: Iterable[Action]) -> list[Action]:
    """The same schedule without its sends and receives."""
    return [action for action in actions if action.kind not in SENDS | RECEIVES]


def with_peers(actions: Iterable[Action]) -> list[Action]:
    """Name the peer of every send and receive, the adjacent stage's too."""
    both = SENDS | RECEIVES
    return [a._replace(peer=a.other) if a.kind in both else a for a in actions]


def keep_microbatches(actions: Iterable[Action], n: int) -> list[Action]:
    """Drop every action of microbatch ``n`` and later.

    What is left of a right schedule is right: taking whole microbatches out of an order
    that all ranks can follow leaves an order that they can follow.
    """
    return [a for a in actions if a.microbatch is None or a.microbatch < n]


def stage_to_rank_of(programs: Programs) -> dict[int, int]:
    """Which rank holds each stage, read from the actions themselves."""
    return {
        action.stage: rank for rank, program in programs.items() for action in program
    }


def _advance(
    programs: Programs, step: Callable[[int, Action], bool]
) -> dict[int, Action]:
    """Let every rank do its next action where ``step`` allows it; return who is stuck.

    ``step`` performs the action and returns True, or returns False if it cannot yet.
    """
    position = dict.fromkeys(sorted(programs), 0)
    moved = True
    while moved:
        moved = False
        for rank, at in position.items():
            if at < len(programs[rank]) and step(rank, programs[rank][at]):
                position[rank] += 1
                moved = True
    return {
        rank: programs[rank][at]
        for rank, at in position.items()
        if at < len(programs[rank])
    }


def _inputs(action: Action, last_stage: int) -> tuple[Action | None, Action | None]:
    """The compute actions on another stage, and on its own, that an action needs."""
    stage, kind, microbatch, _ = action
    if kind == "F":
        return (Action(stage - 1, "F", microbatch) if stage else None), None
    if kind in BACKWARDS:
        later = Action(stage + 1, "B", microbatch) if stage < last_stage else None
        return later, Action(stage, "F", microbatch)
    return None, Action(stage, "I", microbatch) if kind == "W" else None


def lower(
    orders: Programs, edges: Iterable[tuple[int, int]] | None = None
) -> dict[int, list[Action]]:
    """Add the sends and receives to compute-only orders, for any set of edges.

    ``edges`` are pairs of stages (source, destination); by default each stage feeds the
    next. Every message is put at one point of one sequence that all ranks follow: right
    after the action that made it, on both sides. Each rank's program is its part of
    that sequence, so nothing can wait in a circle, whatever an op blocks.

    Raises:
        InputError: the orders themselves cannot be followed to the end.
    """
    home = stage_to_rank_of(orders)
    last = max(home)
    pairs = (
        sorted(set(edges)) if edges is not None else [(s, s + 1) for s in range(last)]
    )
    programs: dict[int, list[Action]] = {rank: [] for rank in orders}
    done: set[tuple[int, str, int | None]] = set()

    def ready(action: Action) -> bool:
        stage, kind, microbatch, _ = action
        if kind == "F":
            return all(
                (src, "F", microbatch) in done for src, dst in pairs if dst == stage
            )
        if kind in BACKWARDS:
            return (stage, "F", microbatch) in done and all(
                (dst, "B", microbatch) in done for src, dst in pairs if src == stage
            )
        return kind != "W" or (stage, "B", microbatch) in done

    def step(rank: int, action: Action) -> bool:
        if not ready(action):
            return False
        stage, kind, microbatch, _ = action
        programs[rank].append(action)
        letter = "B" if kind in BACKWARDS else kind
        done.add((stage, letter, microbatch))
        for src, dst in pairs:
            here, there = (src, dst) if letter == "F" else (dst, src)
            if letter not in "FB" or here != stage or home[there] == rank:
                continue
            peer = None if abs(there - here) == 1 else (there, here)
            send = Action(here, f"SEND_{letter}", microbatch, peer and peer[0])
            recv = Action(there, f"RECV_{letter}", microbatch, peer and peer[1])
            programs[rank].append(send)
            programs[home[there]].append(recv)
        return True

    stuck = _advance(orders, step)
    if stuck:
        heads = ", ".join(f"rank {rank} at {action}" for rank, action in stuck.items())
        raise InputError("schedule", f"cannot be followed to the end: {heads}")
    return programs


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

    stuck = _advance(programs, step)
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


def measure(programs: Programs) -> Cost:
    """Play a schedule in unit time; sends, receives and reductions cost nothing.

    Raises:
        InputError: it cannot be followed to the end.
    """
    orders = {
        rank: [a for a in program if a.kind in COMPUTE]
        for rank, program in programs.items()
    }
    last = max(stage_to_rank_of(orders))
    ended: dict[Action, int] = {}
    clock = dict.fromkeys(orders, 0)

    def step(rank: int, action: Action) -> bool:
        needs = [need for need in _inputs(action, last) if need is not None]
        if any(need not in ended for need in needs):
            return False
        start = max([clock[rank], *(ended[need] for need in needs)])
        clock[rank] = start + _UNIT_COST[action.kind]
        name = "B" if action.kind == "I" else action.kind
        ended[Action(action.stage, name, action.microbatch)] = clock[rank]
        ended[Action(action.stage, action.kind, action.microbatch)] = clock[rank]
        return True

    stuck = _advance(orders, step)
    if stuck:
        heads = ", ".join(f"rank {rank} at {action}" for rank, action in stuck.items())
        raise InputError("schedule", f"cannot be followed to the end: {heads}")
    busy = sum(_UNIT_COST[a.kind] for order in orders.values() for a in order)
    makespan = max(clock.values())
    return Cost(
        makespan,
        1 - busy / (makespan * len(orders)),
        max(_peak_in_flight(order) for order in orders.values()),
        sum(map(len, orders.values())),
    )


def _peak_in_flight(order: Sequence[Action]) -> int:
    """Forwards done whose backward (the W, where it is split) is not, at the worst."""
    change = {"F": 1, "B": -1, "W": -1}
    return max(itertools.accumulate(change.get(a.kind, 0) for a in order), default=0)
