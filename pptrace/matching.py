"""Pairing: the k-th send with the k-th receive of the same channel.

NCCL has no wildcards and ignores tags, so this is the whole rule (gloo's tags are part
of the channel, see `pptrace.records.Channel`). Works on any tail of the rings: each op
carries its k, and each rank's channel table says how many it posted, so nothing that
was overwritten is missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pptrace.records import Channel, Direction, Flag, Kind, RankLog, Record

__all__ = ["ChannelView", "Op", "Pair", "match"]


@dataclass(frozen=True, slots=True)
class Op:
    """A record of kind OP together with the rank that posted it."""

    rank: int
    record: Record

    @property
    def channel(self) -> Channel:
        """The channel it was posted on."""
        return self.record.channel(self.rank)


@dataclass(frozen=True, slots=True)
class Pair:
    """A send and the receive that pairs with it."""

    channel: Channel
    k: int
    send: Op
    recv: Op


@dataclass(slots=True)
class ChannelView:
    """Both sides of one channel.

    ``posted`` counts come from the channel tables where a rank has one, else from the
    highest k seen. A side whose rank has no file has ``known`` False: nothing can be
    concluded from its silence.
    """

    channel: Channel
    sends: dict[int, Op] = field(default_factory=dict)
    recvs: dict[int, Op] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    send_known: bool = False
    recv_known: bool = False
    incomplete: str = ""
    """Why the counts cannot be trusted; empty if they can."""

    def pairs(self) -> Iterable[Pair]:
        """Pairs of which both records are still in the rings, by k."""
        for k in sorted(self.sends.keys() & self.recvs.keys()):
            yield Pair(self.channel, k, self.sends[k], self.recvs[k])

    @property
    def unmatched_sends(self) -> list[Op]:
        """Sends the other side never posted a receive for (if that side is known)."""
        if not self.recv_known:
            return []
        return [op for k, op in sorted(self.sends.items()) if k >= self.received]

    @property
    def unmatched_recvs(self) -> list[Op]:
        """Receives the other side never posted a send for (if that side is known)."""
        if not self.send_known:
            return []
        return [op for k, op in sorted(self.recvs.items()) if k >= self.sent]


def match(logs: Mapping[int, RankLog]) -> dict[Channel, ChannelView]:
    """Collect both sides of every channel of a run. ``logs`` is keyed by rank."""
    views: dict[Channel, ChannelView] = {}

    def view(channel: Channel) -> ChannelView:
        found = views.get(channel)
        if found is None:
            found = views[channel] = ChannelView(
                channel,
                send_known=channel.src in logs,
                recv_known=channel.dst in logs,
            )
            found.incomplete = "; ".join(
                f"r{r}: {logs[r].incomplete}"
                for r in sorted({channel.src, channel.dst} & logs.keys())
                if logs[r].incomplete
            )
        return found

    for rank, log in logs.items():
        for state in log.channels:
            side = view(state.channel)
            if state.uncertain:
                parts = filter(None, (side.incomplete, state.uncertain))
                side.incomplete = "; ".join(parts)
            if state.direction is Direction.SEND:
                side.sent = max(side.sent, state.posted)
            else:
                side.received = max(side.received, state.posted)
        for record in log.records:
            if (
                record.kind is not Kind.OP
                or record.group is None
                or record.flags & Flag.ANY_SOURCE
            ):
                continue
            side = view(record.channel(rank))
            if record.direction is Direction.SEND:
                side.sends[record.k] = Op(rank, record)
                side.sent = max(side.sent, record.k + 1)
            else:
                side.recvs[record.k] = Op(rank, record)
                side.received = max(side.received, record.k + 1)
    return views
