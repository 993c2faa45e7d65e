"""What one rank observed: the records of its black box, as plain values.

This module is the model alone. `pptrace.blackbox` turns it into bytes and back; the
analysis reads it; nothing here knows torch, files or terminals.

Units: ``*_ns`` are nanoseconds of the host's monotonic clock (``time.monotonic_ns``),
0 meaning "has not happened"; sizes are elements (``numel``) or bytes (``nbytes``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

__all__ = [
    "DISABLED",
    "NONE",
    "Channel",
    "ChannelState",
    "Direction",
    "Flag",
    "Group",
    "Kind",
    "Pass",
    "RankLog",
    "Record",
    "ScheduleRun",
    "Signature",
    "Status",
    "Transport",
    "format_ranks",
    "parse_ranks",
]

DISABLED = "pptrace.disable() was called"
"""Why a rank's counts are not complete: ops after that are not in its black box."""

NONE = -1
"""A stage, microbatch or step that is not known."""


class Kind(IntEnum):
    """What a record describes."""

    OP = 1
    """One isend or irecv."""
    ACTION = 2
    """One compute action (F, B, I or W) of a stage and microbatch."""
    STEP = 3
    """One call of a schedule's ``step`` or ``eval``."""
    COLLECTIVE = 4
    """A collective or barrier of a process group."""
    EXCEPTION = 5
    """An exception that left a hooked call."""
    NOTE = 6
    """Something pptrace has to say about itself (a hook that failed open, ...)."""


class Direction(IntEnum):
    """The direction of an op."""

    SEND = 1
    RECV = 2


class Transport(IntEnum):
    """The communicator an op rides (semantics: what can match what)."""

    GROUP = 1
    """The process group's own communicator."""
    PAIR = 2
    """A 2-rank communicator, one per pair of ranks of the group."""


class Pass(IntEnum):
    """Which part of the pipeline an action or op belongs to."""

    UNKNOWN = 0
    F = 1
    """Forward."""
    B = 2
    """Full backward."""
    I = 3  # noqa: E741 - torch's own letter for the action
    """Backward for the inputs only."""
    W = 4
    """Backward for the weights only."""
    META = 5
    """Start-up exchange before the first microbatch (votes, shapes)."""


class Flag(IntFlag):
    """Bits of a record."""

    COALESCED = 1
    """Issued inside one coalesced batch (``batch_isend_irecv``)."""
    CONTIGUOUS = 2
    """The tensor was contiguous."""
    EVAL = 4
    """STEP: forward only."""
    FAILED = 8
    """The call, the wait or the action ended in an exception."""
    DROPPED = 16
    """The work was dropped before its completion was seen."""
    ANY_SOURCE = 32
    """A receive from any rank: its channel is not known."""


class Status(IntEnum):
    """What a rank last said of itself; stands in the header page."""

    STARTING = 0
    RUNNING = 1
    EXITED = 2
    """The interpreter ended normally."""
    RAISED = 3
    """An exception left the schedule's step (and the process may have ended)."""
    DISABLED = 4
    """`pptrace.disable` was called: later ops are not in the file."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as one rank knows it.

    ``ranks[i]`` is the global rank of group rank i. ``eager`` says whether the group's
    communicator was set up at creation (``device_id=`` given), which decides the
    transport of single ops.
    """

    index: int
    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str = ""
    eager: bool = False

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What identifies the group on every rank."""
        return (self.name, self.ranks)

    @property
    def label(self) -> str:
        """Name for people: the description if the user gave one."""
        return self.desc if self.desc and self.desc != "undefined" else self.name


class Channel(NamedTuple):
    """Where ops pair up: the k-th send with the k-th receive of the same channel.

    ``src`` and ``dst`` are global ranks. ``tag`` is 0 where the backend ignores tags
    (NCCL); gloo pairs by tag, so there it tells channels apart.
    """

    group: tuple[str, tuple[int, ...]]
    transport: Transport
    src: int
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class ChannelState:
    """One side's counters of a channel, from the channel table."""

    channel: Channel
    direction: Direction
    posted: int
    """Ops posted so far: the next op has k = posted."""
    done: int
    """Ops known to be complete."""
    uncertain: str = ""
    """Why ``posted`` may be too low or too high; empty if it is exact."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The payload of an op: shape, dtype, strides (in elements)."""

    shape: tuple[int, ...] = ()
    dtype: str = ""
    strides: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype or '?'}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """The schedule a step ran: what the rank itself believed.

    ``stages`` are the stages of this rank; ``stage_to_rank[s]`` is the group rank of
    stage s.
    """

    name: str
    n_microbatches: int
    num_stages: int
    stages: tuple[int, ...] = ()
    stage_to_rank: dict[int, int] = field(default_factory=dict)
    group: tuple[str, tuple[int, ...]] | None = None
    metadata: str = ""
    module: str = ""


@dataclass(slots=True)
class Record:
    """One slot of the ring, decoded.

    Times by kind. OP: posted, returned (the call gave control back), wait (first wait
    began), waited (it returned), done (completion seen). ACTION and STEP: posted is
    the begin, done the end. COLLECTIVE: as OP. EXCEPTION and NOTE: posted only.
    """

    seq: int
    kind: Kind
    posted_ns: int
    returned_ns: int = 0
    wait_ns: int = 0
    waited_ns: int = 0
    done_ns: int = 0
    flags: Flag = Flag(0)
    direction: Direction = Direction.SEND
    transport: Transport = Transport.GROUP
    pass_: Pass = Pass.UNKNOWN
    tensor_index: int = 0
    group: Group | None = None
    peer: int = NONE
    group_peer: int = NONE
    batch: int = 0
    batch_index: int = 0
    batch_size: int = 0
    k: int = 0
    tag: int = 0
    step: int = NONE
    stage: int = NONE
    thread: int = 0
    microbatch: int = NONE
    numel: int = 0
    nbytes: int = 0
    signature: Signature = Signature()
    text: str = ""
    """OP: the schedule's ``desc``; COLLECTIVE: its name; EXCEPTION, NOTE: the message."""

    @property
    def is_open(self) -> bool:
        """Not known to have ended."""
        return self.done_ns == 0

    @property
    def in_call(self) -> bool:
        """The host went into the call and has not come back."""
        return self.returned_ns == 0 and not self.flags & Flag.FAILED

    @property
    def in_wait(self) -> bool:
        """The host is inside ``wait()``."""
        return self.wait_ns != 0 and self.waited_ns == 0

    def channel(self, rank: int) -> Channel:
        """The channel of this OP as issued by global rank ``rank``."""
        assert self.group is not None
        src, dst = (
            (rank, self.peer) if self.direction is Direction.SEND else (self.peer, rank)
        )
        tag = self.tag if self.group.backend == "gloo" else 0
        return Channel(self.group.key, self.transport, src, dst, tag)

    @property
    def label(self) -> str:
        """The op or action in schedule terms: ``F2``, ``B0``, ``metadata`` or ``x``."""
        if self.pass_ is Pass.META:
            return "metadata"
        if self.pass_ is Pass.UNKNOWN:
            return "x" if self.kind is Kind.OP else self.text
        return f"{self.pass_.name}{self.microbatch}"


@dataclass(slots=True)
class RankLog:
    """All that is known of one rank: header, tables and the readable records."""

    path: str
    rank: int
    world_size: int
    pid: int = 0
    host: str = ""
    boot_id: str = ""
    run: str = ""
    attempt: int = 0
    status: Status = Status.STARTING
    status_ns: int = 0
    start_monotonic_ns: int = 0
    start_wall_ns: int = 0
    heartbeat_ns: int = 0
    """Monotonic time of the monitor's last sign of life."""
    heartbeat_wall_ns: int = 0
    next_seq: int = 1
    progress_ns: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    schedules: list[ScheduleRun] = field(default_factory=list)
    """In order of first use."""
    channels: list[ChannelState] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    """Oldest first; those overwritten by the ring or torn are not here."""
    torn: int = 0
    overwritten: int = 0
    missing_bytes: int = 0
    """How much of the file was cut off; its newest records may be among them."""
    incomplete: str = ""
    """Why counts of this rank's channels cannot be trusted; empty if they can."""
    environment: dict[str, Any] = field(default_factory=dict)
    emulation: tuple[int, int, int] = (0, 0, 0)
    """Emulated runs: host threads blocked, messages sent and received so far."""
    alive: bool | None = None
    """Whether the process runs now; None where that cannot be known from here."""
    terminated_ns: int = 0
    """Wall time at which a signal that can be seen ended it (SIGTERM, SIGABRT)."""
    terminated_by: str = ""
    stacks: str = ""
    """Python stacks of the process at detection or death, if saved."""

    def to_wall_ns(self, monotonic_ns: int) -> int:
        """Translate this host's monotonic time into wall-clock nanoseconds."""
        if self.heartbeat_ns and self.heartbeat_wall_ns:
            return monotonic_ns - self.heartbeat_ns + self.heartbeat_wall_ns
        return monotonic_ns - self.start_monotonic_ns + self.start_wall_ns


def format_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """Write ranks compactly: ``(0, 1, 2, 5)`` becomes ``0-2,5``; order is kept."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ranks) + 1):
        if i < len(ranks) and ranks[i] == ranks[i - 1] + 1:
            continue
        first, last = ranks[start], ranks[i - 1]
        parts.append(str(first) if first == last else f"{first}-{last}")
        start = i
    return ",".join(parts)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read what `format_ranks` wrote. Raises ValueError on anything else."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)
