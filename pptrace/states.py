"""What each rank is doing, or did last, read from its records.

`observe` says of every rank whether it lives, what it is stuck in, which action and
step it is in, and which exception ended it; `pptrace.waitfor` joins that into a graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pptrace.records import Flag, Kind, RankLog, Record, Status

__all__ = ["Life", "RankState", "is_host_blocked", "observe"]

_SILENT_NS = 5_000_000_000
"""A monitor beats four times a second: this long after the others, on the same host, it
is dead. Clocks of different hosts and copies made one after another get more."""
_SILENT_FAR_NS = 30_000_000_000

_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer"
    r"|closed the connection|timed? ?out|timeout|socket|recvvalue failed|remote process"
    r"|nccl communicator was aborted|ncclremoteerror|ncclsystemerror|ncclinternalerror"
    r"|watchdog|distbackenderror|distnetworkerror|diststoreerror|peer (has )?(exited|gone)"
    r"|\[.*gloo.*\]|message truncated",
    re.IGNORECASE,
)
"""What the end of another rank, or a hang, makes a communication call say."""
_OUTSIDE = re.compile(r"(KeyboardInterrupt|SignalException|SystemExit)\b")


class Life(str, Enum):
    """What became of a rank's process (the words of `RankView.state`)."""

    ALIVE = "alive"
    EXITED = "exited"
    RAISED = "raised"
    DEAD = "dead"
    TERMINATED = "terminated"
    DISABLED = "disabled"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """A copied file that still beats: alive as far as can be told."""


@dataclass(slots=True)
class RankState:
    """What one rank is doing, or did last. Times are wall-clock nanoseconds."""

    rank: int
    log: RankLog
    life: Life = Life.ALIVE
    until_ns: int = 0
    """Up to when its records speak: now, or its end."""
    last_ns: int = 0
    """Its last record or time stamp."""
    ops: list[Record] = field(default_factory=list)
    """Ops not known to be complete, oldest first."""
    collectives: list[Record] = field(default_factory=list)
    """Collectives not known to be complete, oldest first."""
    action: Record | None = None
    """The action it is in."""
    step: Record | None = None
    """The step it is in."""
    last_step: Record | None = None
    last_record: Record | None = None
    exception: Record | None = None
    """The exception that ended it."""
    survived: list[Record] = field(default_factory=list)
    """Exceptions it went on after."""
    is_echo: bool = False
    """Its exception only repeats that others ended or that nothing moved."""
    entered: dict[int, int] = field(default_factory=dict)
    """Group index → collectives entered."""
    longest_ns: int = 0
    """Longest action or wait that came to an end."""
    threads: int = 1

    def age_ns(self, monotonic_ns: int) -> int:
        """Nanoseconds from a time of this rank's clock to the end of its records."""
        return max(0, self.until_ns - self.log.to_wall_ns(monotonic_ns))

    @property
    def is_over(self) -> bool:
        """Whether its process will post nothing any more."""
        return self.life in (Life.EXITED, Life.DEAD, Life.RAISED)

    @property
    def blocked(self) -> list[Record]:
        """Ops and collectives its host, or its compute stream, cannot get past.

        A wait that has returned without completion is CUDA's: the stream waits. A
        collective is waited for implicitly, so one that is pending counts if nothing
        else does.
        """
        held = [r for r in (*self.ops, *self.collectives) if _holds(r)]
        return held or [r for r in self.collectives if r.returned_ns]


def _holds(record: Record) -> bool:
    return record.returned_ns == 0 or record.wait_ns != 0


def is_host_blocked(record: Record) -> bool:
    """Whether the host itself is inside the call or the wait."""
    return record.returned_ns == 0 or (record.wait_ns != 0 and record.waited_ns == 0)


def _is_done(record: Record) -> bool:
    # A wait that has returned says nothing: on CUDA it returns at once. The hooks ask
    # the work itself right after it.
    return record.done_ns != 0


# -- one rank ----------------------------------------------------------------------


def observe(logs: Mapping[int, RankLog], now_wall_ns: int) -> dict[int, RankState]:
    """What every rank is doing at ``now_wall_ns``, or did last, by rank."""
    states = {rank: _observe(rank, log) for rank, log in sorted(logs.items())}
    newest = max((s.log.heartbeat_wall_ns for s in states.values()), default=0)
    boots = {s.log.boot_id for s in states.values()}
    silent_ns = _SILENT_NS if len(boots) == 1 else _SILENT_FAR_NS
    for state in states.values():
        state.life = _life(state, newest, silent_ns)
        state.until_ns = min(now_wall_ns, _end(state) or now_wall_ns)
    for state in states.values():
        if state.life is Life.RAISED and state.exception is not None:
            state.is_echo = _echoes(state, states)
    return states


def _observe(rank: int, log: RankLog) -> RankState:
    state = RankState(rank, log)
    raised: Record | None = None
    threads: set[int] = set()
    last_ns = max(log.progress_ns, log.start_monotonic_ns)
    for record in log.records:
        kind = record.kind
        if kind is Kind.EXCEPTION:
            # The same exception leaves several hooked calls: its first record says most.
            if raised is None or _head(raised) != _head(record):
                if raised is not None:
                    state.survived.append(raised)
                raised = record
            continue
        if kind is Kind.NOTE:
            continue
        if raised is not None and kind is not Kind.COLLECTIVE:
            state.survived.append(raised)
            raised = None
        state.last_record = record
        _take(state, record, threads)
    state.exception = raised
    state.threads = max(1, len(threads))
    state.last_ns = log.to_wall_ns(last_ns)
    if log.status is Status.RAISED and raised is None and state.survived:
        state.exception = state.survived.pop()
    return state


def _take(state: RankState, record: Record, threads: set[int]) -> None:
    kind = record.kind
    if kind is Kind.OP or kind is Kind.COLLECTIVE:
        threads.add(record.thread)
        if kind is Kind.COLLECTIVE and record.group is not None:
            index = record.group.index
            state.entered[index] = max(state.entered.get(index, 0), record.k + 1)
        if not _is_done(record):
            (state.ops if kind is Kind.OP else state.collectives).append(record)
        elif record.wait_ns and record.waited_ns:
            waited = record.waited_ns - record.wait_ns
            state.longest_ns = max(state.longest_ns, waited)
        return
    is_open = record.done_ns == 0 and not record.flags & Flag.FAILED
    if record.done_ns:
        length = record.done_ns - record.posted_ns
        if kind is Kind.ACTION:
            state.longest_ns = max(state.longest_ns, length)
    if kind is Kind.ACTION:
        state.action = record if is_open else None
    elif kind is Kind.STEP:
        state.last_step = record
        state.step = record if is_open else None
        state.action = None


def _head(record: Record) -> str:
    return record.text.partition("\n")[0]


def _life(state: RankState, newest_beat_ns: int, silent_ns: int) -> Life:
    log = state.log
    if state.exception is not None and not _is_outside(state.exception):
        # Without RAISED it left some call of ours and may yet be handled, unless the
        # process is gone.
        if log.status in (Status.RAISED, Status.EXITED) or log.alive is False:
            return Life.RAISED
    elif log.status is Status.RAISED:
        return Life.RAISED if state.exception is None else Life.TERMINATED
    if log.status is Status.EXITED:
        return Life.EXITED
    if log.status is Status.DISABLED:
        return Life.DISABLED
    if log.alive is True:
        return Life.ALIVE
    if log.terminated_by == "SIGTERM":
        return Life.TERMINATED
    if log.alive is False or log.terminated_by:
        return Life.DEAD
    beat = log.heartbeat_wall_ns
    if beat and beat < newest_beat_ns - silent_ns:
        return Life.DEAD
    return Life.UNKNOWN


def _is_outside(exception: Record) -> bool:
    """Ctrl-C, a launcher's signal, `sys.exit`: not a fault of this rank's program."""
    return _OUTSIDE.match(exception.text) is not None


def _end(state: RankState) -> int:
    """Wall time of a rank's end; 0 if it has not ended."""
    log = state.log
    if state.life is Life.RAISED:
        record = state.exception
        return log.to_wall_ns(record.posted_ns if record else log.status_ns)
    if state.life in (Life.EXITED, Life.DISABLED):
        return log.to_wall_ns(log.status_ns) if log.status_ns else state.last_ns
    if state.life in (Life.DEAD, Life.TERMINATED):
        return max(log.terminated_ns or log.heartbeat_wall_ns, state.last_ns)
    return 0


def _echoes(state: RankState, states: Mapping[int, RankState]) -> bool:
    """Whether an exception is the echo of a hang or of another rank's end."""
    assert state.exception is not None
    if not _ECHO.search(_head(state.exception)):
        return False
    if any(r.flags & Flag.FAILED for r in (*state.ops, *state.collectives)):
        return True
    return any(
        other is not state and other.is_over and other.until_ns <= state.until_ns
        for other in states.values()
    )
