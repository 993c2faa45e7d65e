"""A dry run: a plan played through the rules, and the black boxes it would leave.

`dry_run` gives the same records that the hooks write in real processes, so that the
checker and the post-mortem are one diagnosis and cannot disagree. Times are made up:
one tick per event, and a long silence at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pptrace import simulation
from pptrace.plan import (
    Act,
    Action,
    Await,
    Batch,
    Caught,
    Collective,
    Die,
    Instruction,
    Leave,
    Op,
    Plan,
    Raise,
    Signal,
    Sleep,
    Spawn,
    Step,
    Sync,
    Wait,
)
from pptrace.records import (
    NONE,
    Channel,
    ChannelState,
    Direction,
    Flag,
    Group,
    Kind,
    Pass,
    RankLog,
    Record,
    Status,
)
from pptrace.semantics import (
    TRUNCATED,
    Communicator,
    Host,
    Kernel,
    KernelOp,
    transport_of,
)
from pptrace.simulation import At, EventKind, HostState, Simulation, simulate

__all__ = ["LONG_SLEEP_S", "SILENCE_S", "DryRun", "dry_run"]

LONG_SLEEP_S = 30.0
"""A sleep of this length is where the job is looked at: it is still asleep then."""
_TICK_NS = 10
SILENCE_S = 60
"""How long nothing has happened when the job is looked at."""
_START_NS = 1_000_000_000
_WALL_NS = 1_700_000_000_000_000_000
_ASLEEP = "asleep"
_KILLED = "killed"


@dataclass(frozen=True, slots=True)
class DryRun:
    """What became of a plan: the simulation, and the black boxes it would leave."""

    simulation: Simulation
    logs: dict[int, RankLog]
    now_wall_ns: int
    """The moment of the look, for `pptrace.diagnosis.diagnose`."""


def dry_run(
    plan: Plan, *, host: Host = Host.ASYNC, preconnected: bool = False
) -> DryRun:
    """Play a plan. Time and memory are linear in the number of its ops."""
    ranks = {rank: _Rank(rank, plan) for rank in plan.ranks}
    outcome = simulate(
        {rank: ranks[rank].start() for rank in ranks},
        host=host,
        preconnected=preconnected,
    )
    clock = _Clock(outcome)
    end_ns = clock.at(len(outcome.events)) + SILENCE_S * 1_000_000_000
    logs = {rank: _write(ranks[rank], outcome, clock, host, end_ns) for rank in ranks}
    return DryRun(outcome, logs, _WALL_NS + end_ns)


# -- playing -----------------------------------------------------------------------


@dataclass(slots=True)
class _Begun:
    """An instruction that a thread has begun, and the kernel it made or waits on."""

    instruction: Instruction
    kernel: Kernel | None = None


class _Rank:
    """Turns the instructions of a rank into steps, and keeps what was begun."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self.rank = rank
        self.plan = plan
        self.threads: list[list[_Begun]] = []
        self.kernels: dict[Op | Batch | Collective, Kernel] = {}
        self._communicators: dict[tuple[int, int], Communicator] = {}

    def start(self) -> Iterator[simulation.Step]:
        """The steps of the main thread."""
        return self._thread(self.plan.programs[self.rank])

    def _thread(self, body: Iterable[Instruction]) -> Iterator[simulation.Step]:
        begun: list[_Begun] = []
        self.threads.append(begun)
        return self._steps(body, begun)

    def _steps(
        self, body: Iterable[Instruction], done: list[_Begun]
    ) -> Iterator[simulation.Step]:
        for instruction in body:
            begun = _Begun(instruction)
            done.append(begun)
            if isinstance(instruction, (Op, Batch, Collective)):
                begun.kernel = self._kernel(instruction)
                yield simulation.Post(begun.kernel)
            elif isinstance(instruction, Wait):
                begun.kernel = self.kernels[instruction.on]
                on_host = (
                    isinstance(instruction.on, Collective)
                    and instruction.on.blocks_host
                )
                yield simulation.Wait(begun.kernel, on_host=on_host)
            elif isinstance(instruction, Action):
                yield simulation.Compute(str(instruction))
            else:
                step = self._rare(instruction)
                if step is not None:
                    yield step

    def _rare(self, instruction: Instruction) -> simulation.Step | None:
        step: simulation.Step | None = None
        if isinstance(instruction, Act):
            step = simulation.Compute(str(instruction.action))
        elif isinstance(instruction, Signal):
            step = simulation.Signal(instruction.rank, instruction.name)
        elif isinstance(instruction, Await):
            step = simulation.Await(instruction.rank, instruction.name)
        elif isinstance(instruction, Sleep):
            if instruction.seconds >= LONG_SLEEP_S:
                step = simulation.Await(self.rank, _ASLEEP)
        elif isinstance(instruction, Raise):
            step = simulation.Fail(instruction.error)
        elif isinstance(instruction, Die):
            step = simulation.Fail(_KILLED)
        elif isinstance(instruction, Spawn):
            step = simulation.Spawn(self._thread(instruction.body()))
        elif isinstance(instruction, Sync):
            step = simulation.Sync()
        return step

    def _kernel(self, posted: Op | Batch | Collective) -> Kernel:
        if posted in self.kernels:
            raise ValueError(f"r{self.rank}: {posted!r} is posted twice")
        if isinstance(posted, Collective):
            kernel = Kernel(
                self._communicator(posted.group, NONE), collective=posted.name
            )
        elif isinstance(posted, Op):
            eager = posted.edge.group.eager
            kernel = Kernel(
                self._communicator(
                    posted.edge.group, NONE if eager else posted.edge.peer
                ),
                (_kernel_op(posted),),
            )
        else:
            ops = tuple(_kernel_op(op) for op in posted.ops)
            group = posted.ops[0].edge.group
            kernel = Kernel(
                self._communicator(group, NONE), ops, coalesced=True, label=posted.desc
            )
        self.kernels[posted] = kernel
        return kernel

    def _communicator(self, group: Group, peer: int) -> Communicator:
        """The group's communicator, or that of the pair with ``peer``."""
        key = (group.index, peer)
        found = self._communicators.get(key)
        if found is None:
            transport = transport_of(coalesced=peer == NONE, eager=group.eager)
            found = Communicator.of(group, transport, self.rank, peer)
            self._communicators[key] = found
        return found


def _kernel_op(op: Op) -> KernelOp:
    edge = op.edge
    return KernelOp(edge.direction, edge.peer, edge.nbytes, payload=op)


# -- writing -----------------------------------------------------------------------


class _Clock:
    """When things happened: one tick per event of the simulation."""

    def __init__(self, outcome: Simulation) -> None:
        self.posted: dict[Kernel, int] = {}
        self.returned: dict[Kernel, int] = {}
        self.done: dict[Kernel, int] = {}
        tables = {
            EventKind.POSTED: self.posted,
            EventKind.RETURNED: self.returned,
            EventKind.DONE: self.done,
        }
        for tick, (kind, _, subject) in enumerate(outcome.events):
            table = tables.get(kind)
            if table is not None and isinstance(subject, Kernel):
                table[subject] = self.at(tick)

    @staticmethod
    def at(tick: int) -> int:
        return _START_NS + (tick + 1) * _TICK_NS


def _write(
    rank: _Rank, outcome: Simulation, clock: _Clock, host: Host, end_ns: int
) -> RankLog:
    """The black box that one rank would leave."""
    log = RankLog(
        path="",
        rank=rank.rank,
        world_size=max(rank.plan.ranks) + 1,
        host="(checked)",
        boot_id="(checked)",
        status=Status.RUNNING,
        start_monotonic_ns=_START_NS,
        start_wall_ns=_WALL_NS + _START_NS,
        heartbeat_ns=end_ns,
        heartbeat_wall_ns=_WALL_NS + end_ns,
        groups={g.index: g for g in rank.plan.groups if rank.rank in g.ranks},
        schedules=list(rank.plan.schedules.get(rank.rank, ())),
        alive=True,
    )
    hosts = [state for state in outcome.hosts if state.rank == rank.rank]
    written = _Records(log, clock, host)
    for state, thread in zip(hosts, rank.threads, strict=True):
        _Scribe(written, state, thread).write()
    log.records.sort(key=lambda record: (record.posted_ns, record.seq))
    for seq, record in enumerate(log.records, 1):
        record.seq = seq
    log.next_seq = len(log.records) + 1
    log.channels = written.channels()
    last = max((_latest(record) for record in log.records), default=_START_NS)
    log.progress_ns = last
    _end(log, hosts, rank.rank in outcome.undrained, last)
    return log


def _end(log: RankLog, hosts: list[HostState], undrained: bool, last_ns: int) -> None:
    """Whether the process is over, and how."""
    if any(state.error == _KILLED for state in hosts):
        log.alive = False
        return
    if hosts[0].at is At.RAISED:  # another thread's exception ends that thread alone
        log.status, log.alive = Status.RAISED, False
    elif all(state.at is At.ENDED for state in hosts) and not undrained:
        log.status, log.alive = Status.EXITED, False
    log.status_ns = last_ns


def _latest(record: Record) -> int:
    return max(
        record.posted_ns,
        record.returned_ns,
        record.wait_ns,
        record.waited_ns,
        record.done_ns,
    )


@dataclass(slots=True)
class _Records:
    """The records of a rank in the making."""

    log: RankLog
    clock: _Clock
    host: Host
    batches: int = 0
    steps: int = 0
    of_kernel: dict[Kernel, list[Record]] = field(default_factory=dict)

    def add(self, record: Record) -> Record:
        record.seq = len(self.log.records) + 1
        self.log.records.append(record)
        return record

    def post(self, kernel: Kernel, context: _Context) -> None:
        """Write the records of the kernel's ops, or of its collective."""
        posted = self.clock.posted[kernel]
        returned = self.clock.returned.get(kernel, 0)
        flags = Flag.FAILED if kernel.error else Flag(0)
        self.batches += bool(kernel.ops)
        made = [self._op(kernel, op, at) for at, op in enumerate(kernel.ops)]
        if kernel.collective is not None:
            made = [self._collective(kernel, context)]
        for record in made:
            record.posted_ns = posted
            record.returned_ns = 0 if kernel.error else returned
            record.done_ns = self.clock.done.get(kernel, 0)
            record.flags |= flags
            record.thread = context.thread
            record.step = context.step
            self.add(record)
        self.of_kernel[kernel] = made

    def _op(self, kernel: Kernel, op: KernelOp, position: int) -> Record:
        planned = op.payload
        assert isinstance(planned, Op)
        edge = planned.edge
        flags = Flag.COALESCED if kernel.coalesced else Flag(0)
        return Record(
            seq=0,
            kind=Kind.OP,
            posted_ns=0,
            flags=flags | Flag.CONTIGUOUS,
            direction=edge.direction,
            transport=kernel.communicator.transport,
            pass_=edge.pass_,
            tensor_index=edge.index,
            group=edge.group,
            peer=edge.peer,
            group_peer=edge.group.ranks.index(edge.peer),
            batch=self.batches,
            batch_index=position,
            batch_size=len(kernel.ops),
            k=op.k,
            stage=edge.stage,
            microbatch=planned.microbatch,
            signature=edge.signature,
            numel=edge.numel,
            nbytes=edge.nbytes,
            text=edge.name or kernel.label,
        )

    def _collective(self, kernel: Kernel, context: _Context) -> Record:
        group = next(
            g for g in self.log.groups.values() if g.key == kernel.communicator.group
        )
        return Record(
            seq=0,
            kind=Kind.COLLECTIVE,
            posted_ns=0,
            group=group,
            k=kernel.number,
            stage=context.stage,
            microbatch=context.microbatch,
            text=kernel.collective or "",
        )

    def channels(self) -> list[ChannelState]:
        """The channel table."""
        counts: dict[tuple[Channel, Direction], list[int]] = {}
        for record in self.log.records:
            if record.kind is Kind.OP:
                key = (record.channel(self.log.rank), record.direction)
                count = counts.setdefault(key, [0, 0])
                count[0] = max(count[0], record.k + 1)
                if record.done_ns:
                    count[1] = max(count[1], record.k + 1)
        return [
            ChannelState(channel, direction, posted, done)
            for (channel, direction), (posted, done) in counts.items()
        ]


@dataclass(slots=True)
class _Context:
    thread: int
    step: int = NONE
    stage: int = NONE
    microbatch: int = NONE


class _Scribe:
    """Writes what one thread did, from the instructions it began."""

    def __init__(
        self, records: _Records, state: HostState, begun: list[_Begun]
    ) -> None:
        self._records = records
        self._state = state
        self._steps = begun
        self._context = _Context(state.thread + 1)
        self._open: list[Record] = []
        self._now = _START_NS
        self._error = ""

    def write(self) -> None:
        """Write all of it; what the thread is stuck in stays open."""
        for number, begun in enumerate(self._steps, 1):
            is_last = number == len(self._steps)
            stuck = is_last and self._state.at not in (At.ENDED, At.RAISED)
            if begun.kernel is None:
                self._other(begun.instruction)
            elif isinstance(begun.instruction, Wait):
                self._wait(begun.kernel, stuck=stuck)
            else:
                self._post(begun.kernel)
        if self._state.at is At.RAISED and self._state.error != _KILLED:
            self._raised(self._state.error)

    def _post(self, kernel: Kernel) -> None:
        clock = self._records.clock
        self._now = max(self._now, clock.posted[kernel])
        self._records.post(kernel, self._context)
        self._now = max(self._now, clock.returned.get(kernel, 0))

    def _wait(self, kernel: Kernel, *, stuck: bool) -> None:
        begin = self._now
        if not stuck:
            done = self._records.clock.done.get(kernel, 0)
            # An ASYNC host goes on before the kernel is done.
            blocked = self._records.host is Host.BLOCKING or kernel.collective
            self._now = max(begin, done) if blocked and done else begin
        for record in self._records.of_kernel[kernel]:
            if not record.wait_ns:
                record.wait_ns = begin
            record.waited_ns = 0 if stuck else self._now

    def _other(self, instruction: Instruction) -> None:
        if isinstance(instruction, Action):
            self._begin_action(instruction)
            self._leave("")
        elif isinstance(instruction, Act):
            self._begin_action(instruction.action)
        elif isinstance(instruction, Step):
            self._begin_step(instruction)
        elif isinstance(instruction, Leave):
            self._leave(instruction.error)
        elif isinstance(instruction, Caught):
            self._exception(instruction.error)

    def _begin_action(self, action: Action) -> None:
        context = self._context
        context.stage, context.microbatch = action.stage, action.microbatch or 0
        record = self._record(Kind.ACTION)
        record.pass_ = Pass[action.kind]
        self._open.append(record)

    def _begin_step(self, instruction: Step) -> None:
        self._records.steps += 1
        self._context.step = self._records.steps
        record = self._record(Kind.STEP)
        schedules = self._records.log.schedules
        if instruction.schedule < len(schedules):
            run = schedules[instruction.schedule]
            record.text, record.microbatch = run.name, run.n_microbatches
            record.stage = run.stages[0] if run.stages else NONE
        if instruction.is_eval:
            record.flags |= Flag.EVAL
        self._open.append(record)

    def _leave(self, error: str) -> None:
        record = self._open.pop()
        if error:
            record.flags |= Flag.FAILED
            if record.kind is Kind.ACTION:
                self._exception(error)
        record.done_ns = self._now + 1
        if record.kind is Kind.ACTION:
            self._context.stage = self._context.microbatch = NONE

    def _raised(self, error: str) -> None:
        """The exception passes all that is open, and ends the thread."""
        if error == TRUNCATED:
            error = f"DistBackendError: {error}"
        self._exception(error)
        while self._open:
            record = self._open.pop()
            record.flags |= Flag.FAILED
            record.done_ns = self._now + 1

    def _exception(self, error: str) -> None:
        if error == self._error:
            return  # it has been written where it was first seen
        self._error = error
        record = self._record(Kind.EXCEPTION)
        record.text = error
        for action in self._open[-1:]:
            if action.kind is Kind.ACTION:
                record.pass_ = action.pass_

    def _record(self, kind: Kind) -> Record:
        self._now += 1
        context = self._context
        return self._records.add(
            Record(
                seq=0,
                kind=kind,
                posted_ns=self._now,
                thread=context.thread,
                step=context.step,
                stage=context.stage,
                microbatch=context.microbatch,
            )
        )
