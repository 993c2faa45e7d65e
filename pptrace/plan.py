"""A plan: what every rank of a job is going to do, as data.

A rank's plan is a sequence of instructions in program order. Putting an `Op` or a
`Batch` there posts it; `Wait` waits on what was posted before. `pptrace.stubs` records
plans from schedules, `pptrace.programs` reads them from text, and `pptrace.dryrun`
plays them through the rules of `pptrace.semantics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pptrace.records import (
    NONE,
    Direction,
    Group,
    Pass,
    ScheduleRun,
    Signature,
)
from pptrace.schedules.actions import Action

__all__ = [
    "Act",
    "Action",
    "Await",
    "Batch",
    "Caught",
    "Collective",
    "Die",
    "Edge",
    "Instruction",
    "Leave",
    "Op",
    "Plan",
    "Raise",
    "Signal",
    "Sleep",
    "Spawn",
    "Step",
    "Sync",
    "Wait",
]

_UNKNOWN = Signature()
_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """All that the ops of one stage, direction and tensor have in common.

    ``peer`` is a global rank. ``name`` is the schedule's own word or the program's
    label, for ops that are not F or B of a microbatch.
    """

    direction: Direction
    peer: int
    group: Group
    pass_: Pass = Pass.UNKNOWN
    stage: int = NONE
    index: int = 0
    signature: Signature = _UNKNOWN
    name: str = ""

    @property
    def numel(self) -> int:
        """Elements; 0 if the shape is not known."""
        if not self.signature.dtype:
            return 0
        numel = 1
        for size in self.signature.shape:
            numel *= size
        return numel

    @property
    def nbytes(self) -> int:
        """Bytes; 0 if the shape is not known."""
        return self.numel * _BYTES.get(self.signature.dtype, 0)


class Op:
    """One isend or irecv. Equality is identity: an op is posted once."""

    __slots__ = ("edge", "microbatch")

    def __init__(self, edge: Edge, microbatch: int = NONE) -> None:
        self.edge = edge
        self.microbatch = microbatch

    def __repr__(self) -> str:
        return f"<{self.text}>"

    @property
    def label(self) -> str:
        """``F2``, ``B0``, ``metadata``, or the program's word."""
        edge = self.edge
        if edge.pass_ is Pass.META:
            return "metadata"
        if edge.pass_ is Pass.UNKNOWN:
            return edge.name or "x"
        return f"{edge.pass_.name}{self.microbatch}"

    @property
    def action(self) -> Action:
        """``1SEND_F2``: torch's notation."""
        edge = self.edge
        return Action(
            edge.stage, f"{edge.direction.name}_{edge.pass_.name}", self.microbatch
        )

    @property
    def text(self) -> str:
        """``S F2->1``: the notation of programs."""
        is_send = self.edge.direction is Direction.SEND
        letter, arrow = ("S", "->") if is_send else ("R", "<-")
        return f"{letter} {self.label}{arrow}{self.edge.peer}"


class Batch:
    """Ops issued by one coalesced call. Equality is identity."""

    __slots__ = ("desc", "ops")

    def __init__(self, ops: Iterable[Op], desc: str = "") -> None:
        self.ops = tuple(ops)
        self.desc = desc

    def __repr__(self) -> str:
        return f"<{{{', '.join(op.text for op in self.ops)}}}>"


@dataclass(slots=True, eq=False)
class Collective:
    """A collective or barrier of a group; a barrier blocks the host on CUDA too."""

    name: str
    group: Group

    @property
    def blocks_host(self) -> bool:
        """Whether the host waits for its end whatever the device."""
        return self.name in {"barrier", "monitored_barrier"}


class Wait(NamedTuple):
    """Wait on something that was posted."""

    on: Op | Batch | Collective


class Act(NamedTuple):
    """Begin a compute action whose end comes later (`Leave`)."""

    action: Action


class Step(NamedTuple):
    """Begin a step of the rank's schedule number ``schedule``; `Leave` ends it."""

    schedule: int = 0
    is_eval: bool = False


class Leave(NamedTuple):
    """The innermost open `Act` or `Step` ends; ``error`` if by an exception."""

    error: str = ""


class Caught(NamedTuple):
    """An exception was caught, and the program goes on."""

    error: str


class Die(NamedTuple):
    """The process is killed: it says nothing, and nobody is told."""


class Raise(NamedTuple):
    """An exception nobody catches: the thread ends here."""

    error: str


class Signal(NamedTuple):
    """Tell another rank's host something outside the process groups."""

    rank: int
    name: str = ""


class Await(NamedTuple):
    """Wait for one `Signal` of ``rank``."""

    rank: int
    name: str = ""


class Sleep(NamedTuple):
    """Do nothing that others can see."""

    seconds: float


class Sync(NamedTuple):
    """Wait on the host until the device is done (reading a value, for instance)."""


class Spawn(NamedTuple):
    """Start another thread of the rank; each call of ``body`` gives it anew."""

    body: Callable[[], Iterable[Instruction]]


Instruction = (
    Op
    | Batch
    | Wait
    | Action
    | Collective
    | Act
    | Step
    | Leave
    | Caught
    | Die
    | Raise
    | Signal
    | Await
    | Sleep
    | Sync
    | Spawn
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plans of all ranks of one job.

    ``programs[rank]`` can be iterated any number of times. ``schedules[rank]`` are the
    schedules that its `Step` instructions speak of.
    """

    name: str
    programs: Mapping[int, Iterable[Instruction]]
    groups: tuple[Group, ...]
    schedules: Mapping[int, tuple[ScheduleRun, ...]] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in numeric order."""
        return tuple(sorted(self.programs))

    def actions(self, rank: int) -> list[Action]:
        """What one rank's main thread does, in torch's terms: ``0F0``, ``1SEND_F0``.

        The start-up exchange, and ops that belong to no microbatch, are left out; their
        text form (`pptrace.schedules.actions.write_csv`) loads into torch.
        """
        found: list[Action] = []
        for instruction in self.programs[rank]:
            if isinstance(instruction, (Op, Batch)):
                ops = (
                    instruction.ops if isinstance(instruction, Batch) else [instruction]
                )
                found += [op.action for op in ops if op.microbatch != NONE]
            elif isinstance(instruction, Action):
                found.append(instruction)
            elif isinstance(instruction, Act):
                found.append(instruction.action)
        return found

    def ops(self, rank: int) -> Iterator[Op]:
        """The ops of one rank's main thread, in program order."""
        for instruction in self.programs[rank]:
            if isinstance(instruction, Op):
                yield instruction
            elif isinstance(instruction, Batch):
                yield from instruction.ops
