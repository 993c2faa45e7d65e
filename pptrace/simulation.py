"""All ranks of a job in one process: decides whether their programs can end.

Each rank's host takes its program's steps until one blocks; its `RankMachine` does the
rest. What the machines tell each other goes through one queue, so no thread, clock or
process is involved, and the same programs always give the same events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from pptrace.records import Direction
from pptrace.semantics import (
    Blocked,
    Host,
    Kernel,
    KernelOp,
    KernelState,
    Law,
    Message,
    RankMachine,
)

__all__ = [
    "At",
    "Await",
    "Compute",
    "Event",
    "EventKind",
    "Fail",
    "HostState",
    "Post",
    "Signal",
    "Simulation",
    "Spawn",
    "Step",
    "Sync",
    "Wait",
    "simulate",
]


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """Go into the call of a kernel."""

    kernel: Kernel


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Wait on a kernel; ``on_host`` blocks the host whatever kind it is."""

    kernel: Kernel
    on_host: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Sync:
    """Wait, on the host, until the compute stream is drained."""


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Run an action on the compute stream."""

    label: str


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """Tell another rank's host something outside the process groups."""

    rank: int
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Await:
    """Wait for one `Signal` that ``rank`` gives this rank."""

    rank: int
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Spawn:
    """Start another host thread of this rank."""

    steps: Iterable[Step]


@dataclass(frozen=True, slots=True, eq=False)
class Fail:
    """Raise: this host thread ends here."""

    error: str


Step = Post | Wait | Sync | Compute | Signal | Await | Spawn | Fail


class At(Enum):
    """Where a host thread stands."""

    RUNNING = "running"
    CALL = "inside a call"
    WAIT = "inside a wait"
    SIGNAL = "waits for a signal"
    ENDED = "ended"
    RAISED = "raised"


class EventKind(Enum):
    """What happened."""

    POSTED = "posted"
    RETURNED = "returned"
    MATCHED = "matched"
    DONE = "done"
    COMPUTED = "computed"
    RAISED = "raised"


class Event(NamedTuple):
    """Something that happened on a rank, to a kernel, an op, or an action."""

    kind: EventKind
    rank: int
    subject: Kernel | KernelOp | str


@dataclass(frozen=True, slots=True)
class HostState:
    """Where one host thread of a rank stands; thread 0 is the first."""

    rank: int
    thread: int
    at: At
    step: Step | None
    """The step it is in, or raised in."""
    begun: int
    """Steps it has begun."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What became of a job."""

    hosts: tuple[HostState, ...]
    """In order of rank, then thread."""
    blocked: tuple[Blocked, ...]
    """In order of rank, then as posted."""
    pending: tuple[KernelOp, ...]
    """Posted ops that have not matched."""
    unmatched: tuple[KernelOp, ...]
    """Those of them whose partner was never posted."""
    undrained: tuple[int, ...]
    """Ranks whose compute stream waits for ever."""
    events: tuple[Event, ...]
    """In one order that respects cause and effect."""

    @property
    def is_deadlock(self) -> bool:
        """Whether some host or compute stream waits for ever."""
        waiting = any(host.at not in _OVER for host in self.hosts)
        return waiting or bool(self.undrained)

    @property
    def errors(self) -> tuple[HostState, ...]:
        """The host threads that ended in an error."""
        return tuple(host for host in self.hosts if host.at is At.RAISED)

    @property
    def is_clean(self) -> bool:
        """Whether all ended, without error, and every op matched."""
        return not (self.is_deadlock or self.errors or self.pending)


_OVER = (At.ENDED, At.RAISED)
_K = TypeVar("_K")


class _HostThread:
    """One host thread of a simulated rank."""

    __slots__ = ("at", "begun", "error", "machine", "step", "steps", "thread")

    def __init__(
        self, machine: RankMachine, thread: int, steps: Iterable[Step]
    ) -> None:
        self.machine = machine
        self.thread = thread
        self.steps: Iterator[Step] = iter(steps)
        self.step: Step | None = None
        self.begun = 0
        self.at = At.RUNNING
        self.error = ""

    def state(self) -> HostState:
        rank = self.machine.rank
        step = None if self.at is At.ENDED else self.step
        return HostState(rank, self.thread, self.at, step, self.begun, self.error)


class _Simulator:
    """Runs the host threads and carries the messages; the machines' `Port`."""

    def __init__(self) -> None:
        self.machines: dict[int, RankMachine] = {}
        self.hosts: list[_HostThread] = []
        self.runnable: deque[_HostThread] = deque()
        self.messages: deque[tuple[int, Message]] = deque()
        self.waiting: dict[Kernel, list[_HostThread]] = {}
        self.syncing: dict[int, list[_HostThread]] = {}
        self.signals: dict[tuple[int, int, str], int] = {}
        self.listening: dict[tuple[int, int, str], list[_HostThread]] = {}
        self.posted: list[Kernel] = []
        self.events: list[Event] = []

    def start(self, machine: RankMachine, steps: Iterable[Step]) -> None:
        thread = sum(host.machine is machine for host in self.hosts)
        host = _HostThread(machine, thread, steps)
        self.hosts.append(host)
        self.runnable.append(host)

    def run(self) -> None:
        while True:
            while self.runnable:
                self._run_host(self.runnable.popleft())
            if not self.messages:
                return
            peer, message = self.messages.popleft()
            machine = self.machines.get(peer)
            if machine is not None:  # a rank without a program does nothing
                machine.receive(message)
                if self.syncing:
                    self._wake_syncing(machine)

    # Port

    def send(self, peer: int, message: Message, op: KernelOp | None) -> None:
        del op
        self.messages.append((peer, message))

    def returned(self, kernel: Kernel) -> None:
        self.events.append(Event(EventKind.RETURNED, kernel.rank, kernel))
        if kernel in self.waiting:
            self._wake(self.waiting.pop(kernel))

    def matched(self, op: KernelOp) -> None:
        assert op.kernel is not None
        self.events.append(Event(EventKind.MATCHED, op.kernel.rank, op))

    def done(self, kernel: Kernel) -> None:
        self.events.append(Event(EventKind.DONE, kernel.rank, kernel))
        if kernel in self.waiting:
            self._wake(self.waiting.pop(kernel))

    def computed(self, rank: int, label: str) -> None:
        self.events.append(Event(EventKind.COMPUTED, rank, label))

    # hosts

    def _wake(self, hosts: Iterable[_HostThread]) -> None:
        for host in hosts:
            # A thread that waits on a kernel another is posting sleeps on.
            step = host.step
            if isinstance(step, Wait) and not step.kernel.is_over:
                self.waiting.setdefault(step.kernel, []).append(host)
                continue
            host.at = At.RUNNING
            self.runnable.append(host)

    def _wake_syncing(self, machine: RankMachine) -> None:
        if machine.is_drained and machine.rank in self.syncing:
            self._wake(self.syncing.pop(machine.rank))

    def _run_host(self, host: _HostThread) -> None:
        """Run a host thread until it blocks or ends."""
        step = host.step
        if isinstance(step, Post) and step.kernel.state is KernelState.FAILED:
            self._raise(host, step.kernel.error)
            return
        for step in host.steps:
            host.step = step
            host.begun += 1
            if not self._take(host, step):
                return
        host.at = At.ENDED

    def _take(self, host: _HostThread, step: Step) -> bool:
        """Take one step; returns whether the thread goes on."""
        machine = host.machine
        if isinstance(step, Post):
            kernel = step.kernel
            self.events.append(Event(EventKind.POSTED, machine.rank, kernel))
            self.posted.append(kernel)
            if not machine.enter(kernel):
                return self._block(host, At.CALL, self.waiting, kernel)
            if kernel.state is KernelState.FAILED:
                return self._raise(host, kernel.error)
        elif isinstance(step, Wait):
            if not machine.wait(step.kernel, on_host=step.on_host):
                return self._block(host, At.WAIT, self.waiting, step.kernel)
        elif isinstance(step, Compute):
            machine.compute(step.label)
        else:
            return self._take_rare(host, step)
        return True

    def _take_rare(self, host: _HostThread, step: Step) -> bool:
        rank = host.machine.rank
        if isinstance(step, Sync):
            if not host.machine.is_drained:
                return self._block(host, At.WAIT, self.syncing, rank)
        elif isinstance(step, Signal):
            key = (rank, step.rank, step.name)
            listeners = self.listening.get(key)
            if listeners:
                self._wake([listeners.pop(0)])
            else:
                self.signals[key] = self.signals.get(key, 0) + 1
        elif isinstance(step, Await):
            key = (step.rank, rank, step.name)
            if not self.signals.get(key):
                return self._block(host, At.SIGNAL, self.listening, key)
            self.signals[key] -= 1
        elif isinstance(step, Spawn):
            self.start(host.machine, step.steps)
        elif isinstance(step, Fail):
            return self._raise(host, step.error)
        else:
            raise TypeError(f"not a step: {step!r}")
        return True

    @staticmethod
    def _block(
        host: _HostThread, at: At, where: dict[_K, list[_HostThread]], key: _K
    ) -> bool:
        host.at = at
        where.setdefault(key, []).append(host)
        return False

    def _raise(self, host: _HostThread, error: str) -> bool:
        host.at = At.RAISED
        host.error = error
        self.events.append(Event(EventKind.RAISED, host.machine.rank, error))
        return False

    # outcome

    def outcome(self) -> Simulation:
        ranks = sorted(self.machines)
        hosts = sorted(self.hosts, key=lambda host: (host.machine.rank, host.thread))
        posted = sorted(self.posted, key=lambda kernel: kernel.rank)
        pending = tuple(op for kernel in posted for op in _pending(kernel))
        return Simulation(
            hosts=tuple(host.state() for host in hosts),
            blocked=tuple(b for r in ranks for b in self.machines[r].blocked_on()),
            pending=pending,
            unmatched=tuple(op for op in pending if not self._has_partner(op)),
            undrained=tuple(r for r in ranks if not self.machines[r].is_drained),
            events=tuple(self.events),
        )

    def _has_partner(self, op: KernelOp) -> bool:
        kernel = op.kernel
        machine = self.machines.get(op.peer)
        if machine is None or kernel is None:
            return False
        is_send = op.direction is Direction.SEND
        direction = Direction.RECV if is_send else Direction.SEND
        return op.k < machine.posted(kernel.communicator, direction, kernel.rank)


def _pending(kernel: Kernel) -> Iterable[KernelOp]:
    if kernel.is_over:  # done, or never posted
        return ()
    return (op for op in kernel.ops if not op.matched)


def simulate(
    programs: Mapping[int, Iterable[Step]],
    *,
    host: Host = Host.ASYNC,
    preconnected: bool = False,
    _without: Law = Law.NONE,
) -> Simulation:
    """Run the programs of all ranks; decides exactly whether they can end.

    ``programs[rank]`` is the rank's steps, taken only as far as the rank gets, so a
    generator can be the program. A rank without one takes part in nothing. Time and
    memory are linear in the number of ops.
    """
    simulator = _Simulator()
    for rank, steps in programs.items():
        machine = RankMachine(
            rank, simulator, host=host, preconnected=preconnected, _without=_without
        )
        simulator.machines[rank] = machine
        simulator.start(machine, steps)
    simulator.run()
    return simulator.outcome()
