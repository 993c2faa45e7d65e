"""A job's program as statements, and the one interpreter that performs them.

The checker plays the instructions that `Program.instructions` yields, and
`pptrace.program_runner` performs the same ones with torch. The text of programs is
`pptrace.programs`' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pptrace.plan import (
    Act,
    Action,
    Await,
    Batch,
    Caught,
    Collective,
    Die,
    Edge,
    Instruction,
    Leave,
    Op,
    Plan,
    Raise,
    Signal,
    Sleep,
    Spawn,
    Step,
    Wait,
)
from pptrace.records import (
    NONE,
    Direction,
    Group,
    Pass,
    ScheduleRun,
    Signature,
)

__all__ = [
    "COLLECTIVES",
    "DEFAULT",
    "WORLD",
    "Block",
    "Collect",
    "Comment",
    "Compute",
    "Kill",
    "Label",
    "Listen",
    "OpText",
    "Pause",
    "Post",
    "Program",
    "ProgramError",
    "Quit",
    "Statement",
    "Tell",
    "Throw",
    "WaitFor",
]

WORLD = "world"
"""The group of all ranks; it is always there."""
COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "reduce_scatter",
)
DEFAULT = Signature((1,), "float32", (1,))
"""The payload of an op that does not say."""


# -- the program as data -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Label:
    """What an op or action is about: ``F2``, ``1B0``, ``F0.1``, or any word."""

    word: str = ""
    pass_: Pass = Pass.UNKNOWN
    microbatch: int = NONE
    stage: int = NONE
    """NONE: the rank's place in its pipeline."""
    index: int = 0

    def __str__(self) -> str:
        stage = "" if self.stage == NONE else str(self.stage)
        text = self.word or f"{stage}{self.pass_.name}{self.microbatch}"
        return f"{text}.{self.index}" if self.index else text


@dataclass(frozen=True, slots=True)
class OpText:
    """One isend or irecv as written; ``group`` is empty where none was named."""

    direction: Direction
    label: Label
    peer: int
    signature: Signature = DEFAULT
    group: str = ""


class Post(NamedTuple):
    """Post ops: one alone, or all in one batch.

    ``name`` is what a later `WaitFor` calls it; ``at_once``: it is waited on right here
    (``send``, ``recv``).
    """

    ops: tuple[OpText, ...]
    is_batch: bool = False
    name: str = ""
    at_once: bool = False


class WaitFor(NamedTuple):
    """Wait on what was posted under these names; without names on all that is open."""

    names: tuple[str, ...] = ()


class Compute(NamedTuple):
    """An action; ``body`` is what happens inside it."""

    label: Label
    body: tuple[Statement, ...] = ()


class Collect(NamedTuple):
    """A collective of a group; waited on at once unless it has a ``name``."""

    what: str
    group: str = ""
    name: str = ""


class Tell(NamedTuple):
    """Tell another rank's host something outside the process groups."""

    rank: int
    name: str = ""


class Listen(NamedTuple):
    """Wait until a rank has told."""

    rank: int
    name: str = ""


class Pause(NamedTuple):
    """Sleep."""

    seconds: float


class Throw(NamedTuple):
    """Raise an exception."""

    type: str
    message: str = ""


class Kill(NamedTuple):
    """The process is killed, as by the out-of-memory killer."""


class Quit(NamedTuple):
    """End here, without waiting for what is open."""


class Block(NamedTuple):
    """``catch``, ``thread``, ``step`` or ``eval`` with what is inside.

    ``name`` and ``n`` are a step's schedule and its number of microbatches.
    """

    kind: str
    body: tuple[Statement, ...]
    name: str = ""
    n: int = 0


class Comment(NamedTuple):
    """A line that starts with #."""

    text: str


Statement = (
    Post
    | WaitFor
    | Compute
    | Collect
    | Tell
    | Listen
    | Pause
    | Throw
    | Kill
    | Quit
    | Block
    | Comment
)


class ProgramError(Exception):
    """An exception that a program raises: ``TYPE: message``."""


@dataclass(frozen=True)
class Program:
    """A job's program; made by `parse`."""

    name: str
    header: tuple[str, ...]
    """The header's lines in their order, comments and all, normalised."""
    world_size: int
    groups: dict[str, tuple[int, ...]]
    """By name, in the order declared; without the world."""
    eager: frozenset[str]
    """Names of the groups that are set up at creation."""
    ranks: dict[int, tuple[Statement, ...]]
    sections: tuple[tuple[tuple[int, ...], tuple[Statement, ...]], ...]
    """As written: several ranks may share one."""
    host: str = ""
    """``async`` or ``blocking`` where the program says so."""
    preconnected: bool = False
    _groups: dict[str, Group] = field(default_factory=dict, compare=False, repr=False)

    def group(self, name: str) -> Group:
        """A declared group, or the world, as the records have it."""
        if not self._groups:
            members = {WORLD: tuple(range(self.world_size)), **self.groups}
            for index, (key, ranks) in enumerate(members.items(), 1):
                self._groups[key] = Group(
                    index, key, key, ranks, "nccl", eager=key in self.eager
                )
        return self._groups[name]

    def default_group(self, rank: int, peer: int = NONE) -> str:
        """The first declared group with the rank (and its peer), else the world."""
        for name, ranks in self.groups.items():
            if rank in ranks and peer in (NONE, *ranks):
                return name
        return WORLD

    def uses(self) -> set[str]:
        """The groups that ops and collectives ride."""
        found: set[str] = set()
        for rank, body in self.ranks.items():
            for statement in _flat(body):
                if isinstance(statement, Post):
                    found |= {
                        op.group or self.default_group(rank, op.peer)
                        for op in statement.ops
                    }
                elif isinstance(statement, Collect):
                    found.add(statement.group or self.default_group(rank))
        return found

    def stage(self, rank: int) -> int:
        """A rank's place in its pipeline: that in its first group."""
        return self.group(self.default_group(rank)).ranks.index(rank)

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """What a rank's main thread does, in order.

        Whoever performs them may throw an exception into the iterator where an
        instruction raised it; ``catch`` then catches it.
        """
        return _Interpreter(self, rank).run(self.ranks.get(rank, ()))

    def schedules(self, rank: int) -> tuple[ScheduleRun, ...]:
        """The schedules that a rank's steps run, in order of first use."""
        group = self.group(self.default_group(rank))
        found: dict[tuple[str, int], ScheduleRun] = {}
        for block in _steps(self.ranks.get(rank, ())):
            found[block.name, block.n] = ScheduleRun(
                name=block.name or "Program",
                n_microbatches=block.n,
                num_stages=len(group.ranks),
                stages=(self.stage(rank),),
                stage_to_rank={s: s for s in range(len(group.ranks))},
                group=group.key,
                metadata="static",
            )
        return tuple(found.values())

    def plan(self) -> Plan:
        """The program as the checker plays it."""
        ranks = range(self.world_size)
        self.group(WORLD)
        return Plan(
            name=self.name,
            programs={rank: _Replay(self, rank) for rank in ranks},
            groups=tuple(self._groups.values()),
            schedules={rank: self.schedules(rank) for rank in ranks},
        )


class _Replay:
    """Instructions that can be had again and again."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank

    def __iter__(self) -> Iterator[Instruction]:
        return self._program.instructions(self._rank)


def _flat(body: Iterable[Statement]) -> Iterator[Statement]:
    """All statements, those inside others too."""
    for statement in body:
        yield statement
        if isinstance(statement, (Block, Compute)):
            yield from _flat(statement.body)


def _steps(body: Iterable[Statement]) -> Iterator[Block]:
    for statement in _flat(body):
        if isinstance(statement, Block) and statement.kind in ("step", "eval"):
            yield statement


# -- the interpreter ---------------------------------------------------------------

_STAYS_OPEN = (Post, WaitFor, Throw, Kill, Quit, Block, Comment, Pause)
"""Before any other statement, the receives that are open are waited on."""


class _Exit(Exception):  # noqa: N818 - a way out, not an error
    """The program says ``exit``."""


class _Interpreter:
    """Performs one thread of a rank, statement by statement."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self._open: list[Op | Batch] = []
        self._named: dict[str, Op | Batch | Collective] = {}
        self._edges: dict[OpText, Edge] = {}
        self._schedules = [
            (run.name, run.n_microbatches) for run in program.schedules(rank)
        ]

    def run(self, body: Sequence[Statement]) -> Iterator[Instruction]:
        """All of it; an exception nobody catches is the last instruction."""
        try:
            yield from self._body(body)
            yield from self._wait_all()
        except _Exit:
            return
        except Exception as error:  # noqa: BLE001 - whatever was thrown in
            yield Raise(_error_text(error))

    def _body(self, body: Sequence[Statement]) -> Iterator[Instruction]:
        for statement in body:
            if not isinstance(statement, _STAYS_OPEN):
                yield from self._wait_receives()
            if isinstance(statement, Post):
                yield from self._post(statement)
            elif isinstance(statement, WaitFor):
                yield from self._wait_for(statement)
            elif isinstance(statement, Compute):
                yield from self._compute(statement)
            elif isinstance(statement, Block):
                yield from self._block(statement)
            elif isinstance(statement, Collect):
                yield from self._collect(statement)
            else:
                yield from self._other(statement)

    def _other(self, statement: Statement) -> Iterator[Instruction]:
        if isinstance(statement, Tell):
            yield Signal(statement.rank, statement.name)
        elif isinstance(statement, Listen):
            yield Await(statement.rank, statement.name)
        elif isinstance(statement, Pause):
            yield Sleep(statement.seconds)
        elif isinstance(statement, Throw):
            raise ProgramError(f"{statement.type}: {statement.message}".rstrip(": "))
        elif isinstance(statement, Kill):
            yield Die()
        elif isinstance(statement, Quit):
            raise _Exit

    # ops

    def _op(self, text: OpText) -> Op:
        edge = self._edges.get(text)
        if edge is None:
            edge = self._edges[text] = self._edge(text)
        return Op(edge, text.label.microbatch)

    def _edge(self, text: OpText) -> Edge:
        program, label = self._program, text.label
        group = text.group or program.default_group(self._rank, text.peer)
        stage = NONE
        if label.pass_ not in (Pass.UNKNOWN, Pass.META):
            stage = self._stage(label)
        return Edge(
            direction=text.direction,
            peer=text.peer,
            group=program.group(group),
            pass_=label.pass_,
            stage=stage,
            index=label.index,
            signature=text.signature,
            name=label.word if label.pass_ is Pass.UNKNOWN else "",
        )

    def _stage(self, label: Label) -> int:
        return self._program.stage(self._rank) if label.stage == NONE else label.stage

    def _post(self, statement: Post) -> Iterator[Instruction]:
        ops = [self._op(text) for text in statement.ops]
        posted = Batch(ops) if statement.is_batch else ops[0]
        if statement.name:
            self._named[statement.name] = posted
        elif not statement.at_once:
            self._open.append(posted)
        yield posted
        if statement.at_once:
            yield Wait(posted)

    def _wait_receives(self) -> Iterator[Instruction]:
        still_open: list[Op | Batch] = []
        waiting: list[Op | Batch] = []
        for posted in self._open:
            (waiting if _receives(posted) else still_open).append(posted)
        self._open = still_open
        for posted in waiting:
            yield Wait(posted)

    def _wait_all(self) -> Iterator[Instruction]:
        waiting, self._open = self._open, []
        for posted in waiting:
            yield Wait(posted)

    def _wait_for(self, statement: WaitFor) -> Iterator[Instruction]:
        if not statement.names:
            yield from self._wait_all()
        for name in statement.names:
            posted = self._named.get(name)
            if posted is not None:  # a catch may have passed it by
                yield Wait(posted)

    def _collect(self, statement: Collect) -> Iterator[Instruction]:
        program = self._program
        group = statement.group or program.default_group(self._rank)
        posted = Collective(statement.what, program.group(group))
        if statement.name:
            self._named[statement.name] = posted
        yield posted
        if not statement.name:
            yield Wait(posted)

    # blocks

    def _compute(self, statement: Compute) -> Iterator[Instruction]:
        label = statement.label
        action = Action(self._stage(label), label.pass_.name, label.microbatch)
        if not statement.body:
            yield action
            return
        yield Act(action)
        yield from self._inside(statement.body)

    def _inside(self, body: Sequence[Statement]) -> Iterator[Instruction]:
        try:
            yield from self._body(body)
        except _Exit:
            raise
        except Exception as error:
            yield Leave(_error_text(error))
            raise
        yield Leave()

    def _block(self, block: Block) -> Iterator[Instruction]:
        if block.kind == "thread":
            thread = self._program, self._rank
            yield Spawn(lambda: _Interpreter(*thread).run(block.body))
        elif block.kind == "catch":
            try:
                yield from self._body(block.body)
            except _Exit:
                raise
            except Exception as error:  # noqa: BLE001 - that is what catch is for
                yield Caught(_error_text(error))
        else:
            number = self._schedules.index((block.name or "Program", block.n))
            yield Step(number, is_eval=block.kind == "eval")
            yield from self._inside((*block.body, WaitFor()))


def _receives(posted: Op | Batch) -> bool:
    ops = posted.ops if isinstance(posted, Batch) else (posted,)
    return any(op.edge.direction is Direction.RECV for op in ops)


def _error_text(error: BaseException) -> str:
    if isinstance(error, ProgramError):
        return str(error)
    return f"{type(error).__name__}: {error}"
