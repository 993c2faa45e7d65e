"""Whether a job under emulation can still move, decided from its black boxes alone.

A rank acts only when its host runs or a message reaches it. So nothing will ever happen
again in a job whose hosts are all blocked (or have ended) while no message is on its
way. Counts of several processes cannot be read at one moment; as is known of
termination detection, it suffices that a second look, begun on every rank after the
first had ended on all of them, finds all as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pptrace.errors import PptraceError
from pptrace.records import RankLog, Status
from pptrace.runs import load_run

__all__ = ["Watch", "has_ended", "read_heads"]


class _Rank(NamedTuple):
    """What must be the same in both looks."""

    has_ended: bool
    blocked: int
    sent: int
    received: int
    next_seq: int
    progress_ns: int


class Watch:
    """Decides over successive reads of the black boxes of one job.

    The host of a rank counts as blocked if one of its threads is, so this is for jobs
    that do all their communication on one thread per rank. Never says True of a job
    that is not under emulation, or of which a rank was killed: its last counts may be
    older than its last message.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._found: dict[int, _Rank] | None = None
        self._beats_ns = 0
        self._rounds = 0

    def see(self, logs: Mapping[int, RankLog]) -> bool:
        """Take note of one more read; returns whether nothing can happen any more."""
        found = {rank: _state(log) for rank, log in sorted(logs.items())}
        if not self._is_at_rest(found):
            self._found = None
            return False
        beats = [log.heartbeat_ns for log in logs.values() if not has_ended(log)]
        if found != self._found:
            self._found, self._rounds = found, 0
            self._beats_ns = max(beats, default=0)
        elif min(beats, default=self._beats_ns + 1) > self._beats_ns:
            self._rounds += 1
            self._beats_ns = max(beats, default=0)
        # A monitor looks before it writes the time of its heartbeat, so the look behind
        # the first new one may be older than that time. The next one's cannot be.
        return self._rounds >= 2

    def _is_at_rest(self, found: Mapping[int, _Rank]) -> bool:
        """Whether no host runs and, as far as one look can say, no message does."""
        if list(found) != list(range(self._num_ranks)):
            return False
        ranks = found.values()
        return all(rank.has_ended or rank.blocked for rank in ranks) and sum(
            rank.sent for rank in ranks
        ) == sum(rank.received for rank in ranks)


def has_ended(log: RankLog) -> bool:
    """Whether the rank's process is gone and wrote its last counts before it went."""
    return (
        log.alive is False
        and log.status in {Status.EXITED, Status.RAISED}
        and log.heartbeat_ns >= log.status_ns
    )


def read_heads(out: Path) -> dict[int, RankLog]:
    """What the headers of a job say, without records; empty if it has not begun."""
    try:
        return load_run(out, tail=0).logs
    except PptraceError:
        return {}


def _state(log: RankLog) -> _Rank:
    return _Rank(has_ended(log), *log.emulation, log.next_seq, log.progress_ns)
