"""The rules of P2P on NCCL: what an op rides, when it progresses, what it waits for.

The model is a machine per rank that knows only its own calls and the messages of its
peers. `pptrace.simulation` runs all machines of a job in one process;
`pptrace.hooks.emulation` runs one machine in each real process. Both execute this code,
so they cannot differ.

Words. A *call* is the host inside ``isend``, ``irecv``, ``batch_isend_irecv`` or a
collective. Each call puts one *kernel* on one *communicator*: a single op, a coalesced
batch, or a collective. An *edge* is a peer and a direction on a communicator.

Rules, in the order an op meets them:

1. *Transport.* A coalesced op rides its group's communicator. A single op rides a
   2-rank communicator of its pair, or the group's if that was set up eagerly.
2. *Communicator set-up.* The first call on a lazily set-up communicator keeps the host
   until every member is inside a call on it.
3. *First use of an edge.* A call with new edges keeps the host through two phases. In
   the first, each new edge waits until its peer is in a call that has the mirror edge;
   when all have, the rank confirms to the same peers, and waits for their confirmation,
   which each gives only after its own first phase. On a 2-rank communicator both new
   edges travel in one message, so a side that offers more than the other expects makes
   the other's call fail: "message truncated".
4. *Order.* Kernels of a communicator run one at a time, as posted, and none before what
   its rank's compute stream waited for when it was posted. The ops of a batch progress
   together; the batch ends when all have matched.
5. *Rendezvous.* Nothing is buffered. The k-th send pairs with the k-th receive of the
   same communicator and pair, and both match when both kernels run. Sizes never decide.
   A collective ends when the same collective runs on every member.

There are no wildcards, so the outcome depends on no timing: one run decides it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum
from typing import NamedTuple, Protocol

from pptrace.records import (
    NONE,
    Channel,
    Direction,
    Group,
    Transport,
    format_ranks,
)

__all__ = [
    "TRUNCATED",
    "Blocked",
    "Communicator",
    "Host",
    "Kernel",
    "KernelOp",
    "KernelState",
    "Law",
    "Message",
    "MessageKind",
    "Obstacle",
    "Port",
    "RankMachine",
    "Rule",
    "transport_of",
]

GroupKey = tuple[str, tuple[int, ...]]

TRUNCATED = "message truncated"
"""How a one-sided first use of a 2-rank communicator fails (rule 3)."""


class Rule(Enum):
    """How ``_batch_p2p`` issues the ops it is given; it changed between releases."""

    COALESCED = "coalesced"
    """Always as one coalesced batch (torch 2.8 and before)."""
    SPLIT = "split"
    """One by one if all are sends or all receives, else coalesced (2.13 and later)."""

    def coalesces(self, directions: Iterable[Direction]) -> bool:
        """Whether a batch of ops with these directions is issued coalesced."""
        return self is Rule.COALESCED or len(set(directions)) > 1


class Host(Enum):
    """What ``wait()`` does to the host."""

    ASYNC = "async"
    """Returns at once; the compute stream waits (CUDA)."""
    BLOCKING = "blocking"
    """Returns when the kernel is done (gloo)."""


class Law(Flag):
    """The rules that tests can take away, to show that each is needed."""

    NONE = 0
    TRANSPORT = 1
    SET_UP = 2
    FIRST_USE = 4


def transport_of(*, coalesced: bool, eager: bool) -> Transport:
    """The transport of an op (rule 1)."""
    return Transport.GROUP if coalesced or eager else Transport.PAIR


@dataclass(frozen=True, slots=True, eq=False)
class Communicator:
    """A communicator, the same value on all of its members.

    ``group`` is the key of the process group; ``members`` are global ranks: those of
    the group, or the two of a pair, lower first. ``eager``: set up at creation.
    """

    group: GroupKey
    transport: Transport
    members: tuple[int, ...]
    eager: bool = False
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Hashed for every message: hashing the ranks of a large group is not cheap.
        value = hash((self.group, self.transport, self.members))
        object.__setattr__(self, "_hash", value)

    @classmethod
    def of(
        cls, group: Group, transport: Transport, rank: int = NONE, peer: int = NONE
    ) -> Communicator:
        """The communicator of ``group`` that an op between two global ranks rides."""
        if transport is Transport.GROUP:
            return cls(group.key, transport, group.ranks, group.eager)
        return cls(group.key, transport, (min(rank, peer), max(rank, peer)))

    @property
    def label(self) -> str:
        """Name for people: ``pp=[0-3]``, ``pp=[0-3] pair 0:1``."""
        name, ranks = self.group
        label = f"{name}=[{format_ranks(ranks)}]"
        if self.transport is Transport.PAIR:
            label += f" pair {self.members[0]}:{self.members[1]}"
        return label

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Communicator)
            and self._hash == other._hash
            and self.members == other.members
            and self.transport is other.transport
            and self.group == other.group
        )


class KernelState(IntEnum):
    """How far a kernel has come."""

    NEW = 0
    SET_UP = 1
    """The host is inside the call."""
    QUEUED = 2
    """The call has returned; the kernel waits for its turn."""
    RUNNING = 3
    """At the head of its communicator's order, started."""
    DONE = 4
    FAILED = 5
    """The call ended in an error: the kernel was never posted."""


@dataclass(slots=True, eq=False)
class KernelOp:
    """One isend or irecv: ``peer`` is a global rank, ``k`` its number on its channel.

    ``label`` and ``payload`` belong to whoever posted it. A machine fills in the rest.
    """

    direction: Direction
    peer: int
    nbytes: int = 0
    label: str = ""
    payload: object = None
    k: int = NONE
    matched: bool = False
    kernel: Kernel | None = field(default=None, repr=False)
    edge: _Edge | None = field(default=None, repr=False)

    @property
    def channel(self) -> Channel:
        """The channel of a posted op."""
        kernel = self.kernel
        assert kernel is not None
        src, dst = kernel.rank, self.peer
        if self.direction is Direction.RECV:
            src, dst = dst, src
        communicator = kernel.communicator
        return Channel(communicator.group, communicator.transport, src, dst)


@dataclass(slots=True, eq=False)
class Kernel:
    """What one call puts on one communicator.

    Either ``ops`` (one if single, any number if ``coalesced``) or the name of a
    ``collective`` of all members; an empty name pairs with any. Equality is identity:
    a kernel is posted once, by one rank.
    """

    communicator: Communicator
    ops: tuple[KernelOp, ...] = ()
    coalesced: bool = False
    collective: str | None = None
    label: str = ""
    rank: int = NONE
    position: int = NONE
    """How many calls the rank had gone into before."""
    state: KernelState = KernelState.NEW
    error: str = ""
    number: int = NONE
    """Of a collective: how many the rank had posted before it on the communicator."""
    remaining: int = 0
    """Ops not matched yet (of a collective, 1 until it is done)."""
    start_after: int = 0
    """Position the compute stream must have reached."""

    @property
    def has_returned(self) -> bool:
        """Whether the call has given control back, with an error or without."""
        return self.state >= KernelState.QUEUED

    @property
    def is_over(self) -> bool:
        """Whether nothing can wait on it any more."""
        return self.state >= KernelState.DONE


class MessageKind(IntEnum):
    """What one rank's machine tells another's."""

    JOIN = 1
    """I am inside a call on the communicator (rule 2)."""
    EXCHANGE = 2
    """I am inside a call that has these new edges with you (rule 3, phase 1)."""
    CONFIRM = 3
    """All new edges of that call have been exchanged (rule 3, phase 2)."""
    READY = 4
    """My k-th receive from you runs."""
    DATA = 5
    """My k-th send to you runs, and this is its payload."""
    ARRIVE = 6
    """My collective of this number runs."""


class Message(NamedTuple):
    """A message between two machines; each pair of ranks needs them in order.

    ``number`` is k (READY, DATA), the number of the collective (ARRIVE), or the
    directions of the sender's edges (EXCHANGE, CONFIRM: 1 send, 2 receive, 3 both).
    """

    kind: MessageKind
    communicator: Communicator
    source: int
    number: int = 0
    nbytes: int = 0
    name: str = ""


class Port(Protocol):
    """What a machine acts on: its way to the peers and to its host.

    Called from inside the machine's methods; must not call back into it.
    """

    def send(self, peer: int, message: Message, op: KernelOp | None) -> None:
        """Pass a message on; with DATA comes the send whose payload goes with it."""

    def returned(self, kernel: Kernel) -> None:
        """The call of this kernel may give control back (see its state and error)."""

    def matched(self, op: KernelOp) -> None:
        """The op has matched."""

    def done(self, kernel: Kernel) -> None:
        """The kernel is done: who waits on it may go on."""

    def computed(self, rank: int, label: str) -> None:
        """The compute stream of this rank has run the action posted with `compute`."""


class Obstacle(Enum):
    """Why a kernel does not go on."""

    CALL = "another call of this rank on the communicator"
    """The host cannot begin set-up before that call (``behind``) has ended its own."""
    COMMUNICATOR = "communicator set-up"
    """``ranks`` have not been inside a call on the communicator (rule 2)."""
    EXCHANGE = "first use of an edge, phase 1"
    """``ranks`` have not been in a call with the mirror edges of ``ops`` (rule 3)."""
    CONFIRM = "first use of an edge, phase 2"
    """``ranks`` have not ended their own phase 1 (rule 3)."""
    ORDER = "order of the communicator"
    """``behind`` was posted before and is not done (rule 4)."""
    COMPUTE = "compute stream"
    """It was posted after a wait on ``behind``, which is not done (rule 4)."""
    PARTNER = "partner"
    """It runs; the partners of ``ops`` on ``ranks`` do not (rule 5)."""
    MEMBERS = "collective"
    """It runs; the same collective does not on ``ranks`` (rule 5)."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """One kernel that cannot go on, and what it waits for."""

    rank: int
    obstacle: Obstacle
    kernel: Kernel
    ops: tuple[KernelOp, ...] = ()
    ranks: tuple[int, ...] = ()
    behind: Kernel | None = None

    @property
    def in_call(self) -> bool:
        """Whether the host is held inside the call."""
        return self.kernel.state is KernelState.SET_UP


# -- one rank ----------------------------------------------------------------------


class _Edge:
    """A peer and a direction on a communicator, as one rank sees it."""

    __slots__ = (
        "active",
        "confirmed",
        "direction",
        "exchanged",
        "peer",
        "posted",
        "told",
        "used",
    )

    def __init__(self, direction: Direction, peer: int, *, used: bool) -> None:
        self.direction = direction
        self.peer = peer
        self.used = used
        self.exchanged = False
        self.confirmed = False
        self.posted = 0
        self.told = 0  # receives that the peer said run
        self.active: deque[KernelOp] = deque()  # running, not matched, by k


class _Phase(Enum):
    NONE = 0
    EXCHANGE = 1
    CONFIRM = 2


class _Stream:
    """One communicator as one rank sees it: its calls in set-up, its kernels' order."""

    __slots__ = (
        "absent",
        "arrivals",
        "broken",
        "calls",
        "collectives",
        "communicator",
        "edges_used",
        "is_set_up",
        "joined",
        "new",
        "offered",
        "others",
        "phase",
        "queue",
        "recvs",
        "sends",
    )

    def __init__(
        self, communicator: Communicator, rank: int, *, is_set_up: bool, used: bool
    ) -> None:
        self.communicator = communicator
        self.is_set_up = is_set_up
        self.edges_used = used
        self.joined = False
        self.others = frozenset(communicator.members) - {rank}
        self.absent = set(self.others)
        self.calls: deque[Kernel] = deque()
        self.phase = _Phase.NONE
        self.new: list[_Edge] = []  # of the first call
        self.offered = (
            0  # directions in the last EXCHANGE; of use if there are 2 members
        )
        self.broken = ""
        self.queue: deque[Kernel] = deque()
        self.sends: dict[int, _Edge] = {}
        self.recvs: dict[int, _Edge] = {}
        self.collectives = 0
        self.arrivals: dict[int, dict[int, str]] = {}

    def edge(self, direction: Direction, peer: int) -> _Edge:
        edges = self.sends if direction is Direction.SEND else self.recvs
        found = edges.get(peer)
        if found is None:
            if peer not in self.others:
                raise ValueError(f"no peer {peer} on {self.communicator.label}")
            found = edges[peer] = _Edge(direction, peer, used=self.edges_used)
        return found


class RankMachine:
    """The rules, as one rank executes them.

    The host's side is `enter`, `wait` and `compute`; the peers' side is `receive`.
    Everything it causes goes out through ``port``. Not thread-safe: callers lock.
    ``preconnected``: every communicator and edge counts as used (torch 2.15 sets up a
    pipeline's pairs before its first step). ``_without`` takes rules away, for tests.
    """

    def __init__(
        self,
        rank: int,
        port: Port,
        *,
        host: Host = Host.ASYNC,
        preconnected: bool = False,
        _without: Law = Law.NONE,
    ) -> None:
        self.rank = rank
        self.host = host
        self._port = port
        self._is_set_up = preconnected or Law.SET_UP in _without
        self._edges_used = preconnected or Law.FIRST_USE in _without
        self._one_transport = Law.TRANSPORT in _without
        self._calls = 0
        self._streams: dict[Communicator, _Stream] = {}
        # Streams whose head may be able to start: a list worked off in a loop, since
        # one kernel's end can start another's without bound.
        self._agenda: deque[_Stream] = deque()
        self._compute: deque[Kernel | str] = deque()
        self._position = 0
        self._held: dict[int, list[_Stream]] = {}

    # the host's side

    def enter(self, kernel: Kernel) -> bool:
        """The host goes into the call of ``kernel``.

        Returns whether the call has returned already; else `Port.returned` will say.
        """
        if self._one_transport:
            kernel.communicator = _of_group(kernel.communicator)
        stream = self._stream(kernel.communicator)
        kernel.rank = self.rank
        kernel.position = self._calls
        kernel.state = KernelState.SET_UP
        self._calls += 1
        is_new = self._number(stream, kernel)
        if stream.calls:
            stream.calls.append(kernel)
        elif is_new or not stream.is_set_up or stream.broken:
            stream.calls.append(kernel)
            self._set_up(stream)
            self._run()
        else:
            self._queue(stream, kernel)
            self._port.returned(kernel)
            self._run()
        return kernel.has_returned

    def wait(self, kernel: Kernel, *, on_host: bool = False) -> bool:
        """The host waits on ``kernel``; returns whether it may go on at once.

        If not, it may when the kernel is over. ``on_host`` blocks an ``ASYNC`` host
        too, as a barrier does on CUDA.
        """
        if kernel.is_over:
            return True
        if on_host or self.host is Host.BLOCKING:
            return False
        self._compute.append(kernel)
        return True

    def compute(self, label: str) -> None:
        """The host gives an action to the compute stream."""
        if self._compute:
            self._compute.append(label)
        else:
            self._port.computed(self.rank, label)

    @property
    def is_drained(self) -> bool:
        """Whether the compute stream has nothing left to wait for."""
        return not self._compute

    # the peers' side

    def receive(self, message: Message) -> None:
        """A peer's message has arrived (with DATA, all of its payload has)."""
        kind, communicator, source, number, _, name = message
        stream = self._stream(communicator)
        if kind is MessageKind.READY:
            edge = stream.edge(Direction.SEND, source)
            edge.told = number + 1
            while edge.active and edge.active[0].k <= number:
                self._transfer(edge.active.popleft())
        elif kind is MessageKind.DATA:
            self._matched(stream.edge(Direction.RECV, source).active.popleft())
        elif kind is MessageKind.ARRIVE:
            stream.arrivals.setdefault(number, {})[source] = name
            head = stream.queue[0] if stream.queue else None
            if head and head.number == number and head.state is KernelState.RUNNING:
                self._gather(stream, head)
        else:
            self._meet(stream, kind, source, number)
        if self._agenda:
            self._run()

    def target(self, message: Message) -> KernelOp | None:
        """The receive that the payload of a DATA message is for."""
        stream = self._stream(message.communicator)
        active = stream.edge(Direction.RECV, message.source).active
        return active[0] if active and active[0].k == message.number else None

    def posted(
        self, communicator: Communicator, direction: Direction, peer: int
    ) -> int:
        """How many ops of this direction this rank has posted to a peer."""
        return self._stream(communicator).edge(direction, peer).posted

    # set-up: rules 2 and 3

    def _stream(self, communicator: Communicator) -> _Stream:
        found = self._streams.get(communicator)
        if found is None:
            found = self._streams[communicator] = _Stream(
                communicator,
                self.rank,
                is_set_up=self._is_set_up or communicator.eager,
                used=self._edges_used,
            )
        return found

    def _number(self, stream: _Stream, kernel: Kernel) -> bool:
        """Number a kernel's ops; returns whether it has edges never used."""
        is_new = False
        if kernel.collective is not None:
            kernel.number = stream.collectives
            stream.collectives += 1
            kernel.remaining = 1
            return is_new
        for op in kernel.ops:
            edge = stream.edge(op.direction, op.peer)
            op.kernel, op.edge, op.k = kernel, edge, edge.posted
            edge.posted += 1
            is_new = is_new or not edge.used
        kernel.remaining = len(kernel.ops)
        return is_new

    def _meet(
        self, stream: _Stream, kind: MessageKind, source: int, directions: int
    ) -> None:
        if kind is MessageKind.JOIN:
            stream.absent.discard(source)
        else:
            for direction in Direction:
                if directions & _mirror(direction):
                    edge = stream.edge(direction, source)
                    if kind is MessageKind.EXCHANGE:
                        edge.exchanged = True
                    else:
                        edge.confirmed = True
            if kind is MessageKind.EXCHANGE:
                stream.offered = directions
        if stream.calls:
            self._set_up(stream)

    def _set_up(self, stream: _Stream) -> None:
        """Carry the first calls through set-up as far as possible."""
        while stream.calls:
            kernel = stream.calls[0]
            if not (self._open(stream) and self._connect(stream, kernel)):
                return
            stream.calls.popleft()
            if stream.broken:
                kernel.state = KernelState.FAILED
                kernel.error = stream.broken
                self._advance()  # another thread may have waited on it
            else:
                self._queue(stream, kernel)
            self._port.returned(kernel)

    def _open(self, stream: _Stream) -> bool:
        """Set up the communicator; returns whether it is (rule 2)."""
        if stream.is_set_up or stream.broken:
            return True
        communicator = stream.communicator
        if not stream.joined:
            stream.joined = True
            message = Message(MessageKind.JOIN, communicator, self.rank)
            for member in communicator.members:
                if member != self.rank:
                    self._port.send(member, message, None)
        stream.is_set_up = not stream.absent
        return stream.is_set_up

    def _connect(self, stream: _Stream, kernel: Kernel) -> bool:
        """Connect the new edges of a call; returns whether all are used (rule 3)."""
        if stream.phase is _Phase.NONE:
            edges = [op.edge for op in kernel.ops if op.edge and not op.edge.used]
            if not edges or stream.broken:
                return True
            stream.new = list(dict.fromkeys(edges))
            stream.phase = _Phase.EXCHANGE
            self._tell(stream, MessageKind.EXCHANGE)
        if stream.phase is _Phase.EXCHANGE:
            pair = len(stream.communicator.members) == 2  # edges go in one message
            if pair and stream.offered.bit_count() > len(stream.new):
                stream.broken = TRUNCATED
                return True
            if not all(edge.exchanged for edge in stream.new):
                return False
            stream.phase = _Phase.CONFIRM
            self._tell(stream, MessageKind.CONFIRM)
        if not all(edge.confirmed for edge in stream.new):
            return False
        for edge in stream.new:
            edge.used = True
        stream.phase = _Phase.NONE
        stream.new = []
        return True

    def _tell(self, stream: _Stream, kind: MessageKind) -> None:
        directions: dict[int, int] = {}
        for edge in stream.new:
            directions[edge.peer] = directions.get(edge.peer, 0) | edge.direction
        for peer, value in directions.items():
            message = Message(kind, stream.communicator, self.rank, value)
            self._port.send(peer, message, None)

    # progress: rules 4 and 5

    def _queue(self, stream: _Stream, kernel: Kernel) -> None:
        kernel.state = KernelState.QUEUED
        kernel.start_after = self._position + len(self._compute)
        stream.queue.append(kernel)
        if len(stream.queue) == 1:
            self._agenda.append(stream)

    def _run(self) -> None:
        """Start every kernel that may start now."""
        while self._agenda:
            stream = self._agenda.popleft()
            queue = stream.queue
            while queue and queue[0].state is KernelState.QUEUED:
                kernel = queue[0]
                if kernel.start_after > self._position:
                    self._held.setdefault(kernel.start_after, []).append(stream)
                    break
                self._start(stream, kernel)

    def _start(self, stream: _Stream, kernel: Kernel) -> None:
        kernel.state = KernelState.RUNNING
        communicator = stream.communicator
        if kernel.collective is not None:
            message = Message(
                MessageKind.ARRIVE,
                communicator,
                self.rank,
                kernel.number,
                name=kernel.collective,
            )
            for member in communicator.members:
                if member != self.rank:
                    self._port.send(member, message, None)
            self._gather(stream, kernel)
            return
        if not kernel.ops:
            self._finish(stream, kernel)
        for op in kernel.ops:
            edge = op.edge
            assert edge is not None
            if op.direction is Direction.RECV:
                edge.active.append(op)
                message = Message(MessageKind.READY, communicator, self.rank, op.k)
                self._port.send(op.peer, message, None)
            elif op.k < edge.told:
                self._transfer(op)
            else:
                edge.active.append(op)

    def _gather(self, stream: _Stream, kernel: Kernel) -> None:
        arrived = len(stream.arrivals.get(kernel.number, ()))
        others = len(stream.communicator.members) - 1
        if arrived == others and not _missing(stream, kernel):
            stream.arrivals.pop(kernel.number, None)
            kernel.remaining = 0
            self._finish(stream, kernel)

    def _transfer(self, op: KernelOp) -> None:
        kernel = op.kernel
        assert kernel is not None
        message = Message(
            MessageKind.DATA, kernel.communicator, self.rank, op.k, op.nbytes
        )
        self._port.send(op.peer, message, op)
        self._matched(op)

    def _matched(self, op: KernelOp) -> None:
        kernel = op.kernel
        assert kernel is not None
        op.matched = True
        self._port.matched(op)
        kernel.remaining -= 1
        if not kernel.remaining:
            self._finish(self._streams[kernel.communicator], kernel)

    def _finish(self, stream: _Stream, kernel: Kernel) -> None:
        stream.queue.popleft()  # only the head runs
        kernel.state = KernelState.DONE
        self._port.done(kernel)
        if stream.queue:
            self._agenda.append(stream)
        if self._compute and self._compute[0] is kernel:
            self._advance()

    def _advance(self) -> None:
        """Carry the compute stream as far as what it waits for is over."""
        while self._compute:
            head = self._compute[0]
            if isinstance(head, Kernel):
                if not head.is_over:
                    return
            else:
                self._port.computed(self.rank, head)
            self._compute.popleft()
            self._position += 1
            self._agenda.extend(self._held.pop(self._position, ()))

    # what it waits for

    def blocked_on(self) -> tuple[Blocked, ...]:
        """Everything of this rank that cannot go on now, in the order posted."""
        found: list[Blocked] = []
        for stream in self._streams.values():
            for index, kernel in enumerate(stream.calls):
                if index:
                    first = stream.calls[0]
                    found.append(
                        Blocked(self.rank, Obstacle.CALL, kernel, behind=first)
                    )
                else:
                    found.append(self._blocked_call(stream, kernel))
            for index, kernel in enumerate(stream.queue):
                if index:
                    before = stream.queue[index - 1]
                    found.append(
                        Blocked(self.rank, Obstacle.ORDER, kernel, behind=before)
                    )
                else:
                    found.append(self._blocked_head(stream, kernel))
        return tuple(sorted(found, key=lambda blocked: blocked.kernel.position))

    def _blocked_call(self, stream: _Stream, kernel: Kernel) -> Blocked:
        if not stream.is_set_up:
            return Blocked(
                self.rank,
                Obstacle.COMMUNICATOR,
                kernel,
                kernel.ops,
                tuple(sorted(stream.absent)),
            )
        if stream.phase is _Phase.EXCHANGE:
            obstacle = Obstacle.EXCHANGE
            edges = {edge for edge in stream.new if not edge.exchanged}
        else:
            obstacle = Obstacle.CONFIRM
            edges = {edge for edge in stream.new if not edge.confirmed}
        ops = tuple(op for op in kernel.ops if op.edge in edges)
        return Blocked(self.rank, obstacle, kernel, ops, _peers(ops))

    def _blocked_head(self, stream: _Stream, kernel: Kernel) -> Blocked:
        if kernel.state is KernelState.QUEUED:
            # Labels are never at the front: the stream runs them at once.
            waits = self._compute[0] if self._compute else None
            behind = waits if isinstance(waits, Kernel) else None
            return Blocked(self.rank, Obstacle.COMPUTE, kernel, behind=behind)
        if kernel.collective is not None:
            ranks = _missing(stream, kernel)
            return Blocked(self.rank, Obstacle.MEMBERS, kernel, ranks=ranks)
        ops = tuple(op for op in kernel.ops if not op.matched)
        return Blocked(self.rank, Obstacle.PARTNER, kernel, ops, _peers(ops))


def _mirror(direction: Direction) -> Direction:
    return Direction.RECV if direction is Direction.SEND else Direction.SEND


def _of_group(communicator: Communicator) -> Communicator:
    group, eager = communicator.group, communicator.eager
    return Communicator(group, Transport.GROUP, group[1], eager)


def _peers(ops: Iterable[KernelOp]) -> tuple[int, ...]:
    return tuple(sorted({op.peer for op in ops}))


def _missing(stream: _Stream, kernel: Kernel) -> tuple[int, ...]:
    """The members on which the same collective does not run."""
    own = kernel.collective
    names = stream.arrivals.get(kernel.number, {})
    return tuple(
        member
        for member in stream.communicator.members
        if member != kernel.rank
        and (member not in names or (names[member] != own and names[member] and own))
    )
