"""The wait-for graph: what each rank is stuck in, and who has to move first.

`WaitFor` joins what every rank is stuck in into a graph whose nodes are ranks, streams (one communicator as one rank queues on it) and
hubs (the set-up of a group, a collective: one node for all that wait and all that are
missing, so the graph stays linear in the number of ranks). Every edge is an AND: a rank
goes on only when all it waits for have moved. So a strongly connected component that
nothing leads out of is a reason of its own: one rank, or a cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pptrace.matching import ChannelView
from pptrace.records import (
    Channel,
    Direction,
    Flag,
    Group,
    Kind,
    Record,
    Transport,
)
from pptrace.states import Life, RankState

__all__ = [
    "Edge",
    "Hub",
    "Root",
    "Stream",
    "WaitFor",
    "Why",
]

_STUCK_BEFORE_DEATH_NS = 5_000_000_000
"""A rank that had been stuck this long when it died was stuck before it died."""


# -- the graph ---------------------------------------------------------------------


_MAX_FOLLOWED = 64
"""Roots whose victims are all followed; of further ones only the nearest."""


class Stream(NamedTuple):
    """A communicator as one rank queues its kernels on it."""

    rank: int
    group: int
    transport: Transport
    low: int
    high: int
    lane: int
    """0, or the record's own number where the backend keeps no order (gloo)."""


class Hub(NamedTuple):
    """Something that needs all ranks of a group: its set-up, or its k-th collective."""

    kind: str
    group: int
    k: int


Node = int | Stream | Hub


class Why(str, Enum):
    """Why one node waits for another."""

    UNPOSTED = "has not posted"
    IN_CALL = "is still inside the call of"
    BEHIND = "has queued it behind"
    QUEUE = "queued on"
    COMPUTE = "computes first"
    SET_UP = "has not come to the set-up of"
    COLLECTIVE = "has not entered"
    FAILED = "failed in"
    GONE = "ended before the end of"
    UNKNOWN = "may or may not have posted"


@dataclass(frozen=True, slots=True)
class Edge:
    """``source`` cannot go on before ``target`` moves; ``op`` is the waiter's."""

    source: Node
    target: Node
    why: Why
    waiter: int
    op: Record
    partner: Record | None = None


@dataclass(slots=True)
class Root:
    """A reason of its own: a cycle of ranks, or one rank that waits for nobody."""

    nodes: tuple[Node, ...]
    inside: list[Edge]
    """Edges of the cycle; empty for a single node."""
    incoming: list[Edge]
    """Edges from nodes outside."""

    @property
    def ranks(self) -> list[int]:
        """The ranks it consists of, streams counted as their ranks."""
        found = {
            n if isinstance(n, int) else n.rank
            for n in self.nodes
            if not isinstance(n, Hub)
        }
        return sorted(found)

    @property
    def is_cycle(self) -> bool:
        """Whether its ranks wait for each other."""
        return bool(self.inside)


class _Matched(Enum):
    YES = 1
    NO = 2
    UNKNOWN = 3


class WaitFor:
    """The graph of one run; see the module's docstring."""

    def __init__(
        self,
        states: dict[int, RankState],
        views: Mapping[Channel, ChannelView],
    ) -> None:
        self.states = states
        self.views = views
        self.edges: dict[Node, list[Edge]] = {}
        self.groups: list[Group] = []
        self._group_ids: dict[tuple[str, tuple[int, ...]], int] = {}
        self._local_ids: dict[tuple[int, int], int] = {}
        self._comers: dict[int, set[int]] | None = None
        self._collectives: dict[tuple[int, int], dict[int, Record]] | None = None
        self._entered: dict[int, dict[int, int]] = {}
        self.pending: dict[int, list[Record]] = {}
        self._kernels: dict[Stream, list[list[Record]]] = {}
        self._todo: list[Stream] = []
        for rank, state in states.items():
            for index, count in state.entered.items():
                group = self._group_id(rank, state.log.groups[index])
                self._entered.setdefault(group, {})[rank] = count
            self.pending[rank] = [r for r in state.ops if not self.is_complete(rank, r)]
            self._queue(rank, state)
        for rank, state in states.items():
            if state.life is Life.RAISED and not state.is_echo:
                continue
            if state.life in (Life.EXITED, Life.DISABLED):
                continue
            if state.life is Life.DEAD and not self._was_stuck(state):
                continue
            for record in self.blocked(rank):
                # Stuck without a reason is a node, too: the root that nothing explains.
                self.edges.setdefault(rank, [])
                self._add_blocked(rank, record)
        while self._todo:
            self._expand(self._todo.pop())

    # -- what is known of an op ------------------------------------------------------

    def _group_id(self, rank: int, group: Group) -> int:
        local = self._local_ids.get((rank, group.index))
        if local is None:
            local = self._group_ids.setdefault(group.key, len(self.groups))
            if local == len(self.groups):
                self.groups.append(group)
            self._local_ids[rank, group.index] = local
        return local

    def partner(self, rank: int, record: Record) -> tuple[_Matched, Record | None]:
        """Whether the other side has posted the op's partner, and its record if kept."""
        if record.group is None or record.flags & Flag.ANY_SOURCE:
            return _Matched.UNKNOWN, None
        view = self.views[record.channel(rank)]
        is_send = record.direction is Direction.SEND
        others = view.recvs if is_send else view.sends
        count = view.received if is_send else view.sent
        if record.k < count:
            other = others.get(record.k)
            return _Matched.YES, other.record if other is not None else None
        known = view.recv_known if is_send else view.send_known
        if not known or view.incomplete:
            return _Matched.UNKNOWN, None
        return _Matched.NO, None

    def is_unposted(self, rank: int, record: Record) -> bool:
        """Whether it is certain that the other side has not posted the partner."""
        return self.partner(rank, record)[0] is _Matched.NO

    def is_complete(self, rank: int, record: Record) -> bool:
        """Done, or known to be from the other side."""
        if record.done_ns:
            return True
        matched, other = self.partner(rank, record)
        if matched is not _Matched.YES:
            return False
        if record.flags & Flag.DROPPED:
            return True  # nobody can see its completion; nothing speaks against it
        return (
            record.direction is Direction.SEND
            and other is not None
            and other.done_ns != 0
        )

    def blocked(self, rank: int) -> list[Record]:
        """What the rank cannot get past, completions seen by the other side left out."""
        state = self.states[rank]
        return [
            r
            for r in state.blocked
            if r.kind is Kind.COLLECTIVE or not self.is_complete(rank, r)
        ]

    # -- streams ---------------------------------------------------------------------

    def _stream(self, rank: int, record: Record) -> Stream:
        assert record.group is not None
        group = self._group_id(rank, record.group)
        lane = record.seq if record.group.backend == "gloo" else 0
        if record.kind is Kind.COLLECTIVE or record.transport is Transport.GROUP:
            return Stream(rank, group, Transport.GROUP, -1, -1, lane)
        low, high = sorted((rank, record.peer))
        return Stream(rank, group, Transport.PAIR, low, high, lane)

    def _queue(self, rank: int, state: RankState) -> None:
        """Put the rank's incomplete kernels on their streams, in the order posted."""
        records = sorted([*self.pending[rank], *state.collectives], key=lambda r: r.seq)
        for record in records:
            if record.group is None:
                continue
            kernels = self._kernels.setdefault(self._stream(rank, record), [])
            if kernels and _same_kernel(kernels[-1][0], record):
                kernels[-1].append(record)
            else:
                kernels.append([record])

    def kernel(self, rank: int, record: Record) -> list[Record]:
        """The incomplete ops that started, or start, together with this one."""
        for kernel in self._kernels.get(self._stream(rank, record), []):
            if any(r is record for r in kernel):
                return kernel
        return [record]

    # -- edges -----------------------------------------------------------------------

    def _add(self, edge: Edge) -> None:
        self.edges.setdefault(edge.source, []).append(edge)

    def _add_blocked(self, rank: int, record: Record) -> None:
        if record.kind is Kind.COLLECTIVE:
            self._add_collective(rank, rank, record)
        elif record.group is None or record.flags & Flag.ANY_SOURCE:
            return
        elif record.returned_ns == 0:
            self._add_call(rank, record)
        else:
            stream = self._stream(rank, record)
            self._add(Edge(rank, stream, Why.QUEUE, rank, record))
            self._todo.append(stream)

    def _expand(self, stream: Stream) -> None:
        """Edges of a stream: what its first incomplete kernel waits for."""
        if stream in self.edges or not self._kernels.get(stream):
            return
        self.edges[stream] = []
        head = self._kernels[stream][0]
        if self._has_gone(stream.rank, None):
            self._add(Edge(stream, stream.rank, Why.GONE, stream.rank, head[0]))
        elif head[0].kind is Kind.COLLECTIVE:
            self._add_collective(stream, stream.rank, head[0])
        elif head[0].returned_ns == 0:
            self._add(Edge(stream, stream.rank, Why.IN_CALL, stream.rank, head[0]))
        else:
            if self._follows_wait(stream, head[0]):
                self._add(Edge(stream, stream.rank, Why.COMPUTE, stream.rank, head[0]))
            for record in head:
                self._add_head_op(stream, record)

    def _follows_wait(self, stream: Stream, head: Record) -> bool:
        """Whether its compute stream waited for another stream when it was posted."""
        return any(
            r.waited_ns
            and r.wait_ns
            and r.waited_ns <= head.posted_ns
            and self._stream(stream.rank, r) != stream
            for r in self.blocked(stream.rank)
        )

    def _add_head_op(self, stream: Stream, record: Record) -> None:
        rank, peer = stream.rank, record.peer
        matched, other = self.partner(rank, record)
        if matched is _Matched.NO:
            self._add(Edge(stream, peer, Why.UNPOSTED, rank, record))
        elif matched is _Matched.UNKNOWN:
            self._add(Edge(stream, peer, Why.UNKNOWN, rank, record))
        elif self._has_gone(peer, other):
            self._add(Edge(stream, peer, Why.GONE, rank, record, other))
        elif other is not None:
            if other.flags & Flag.FAILED and not self.states[peer].is_echo:
                self._add(Edge(stream, peer, Why.FAILED, rank, record, other))
            elif other.returned_ns == 0:
                self._add(Edge(stream, peer, Why.IN_CALL, rank, record, other))
            elif not other.done_ns:
                self._add_behind(stream, rank, record, peer, other)

    def _add_behind(
        self, source: Node, rank: int, record: Record, peer: int, other: Record
    ) -> None:
        """An edge to the stream of ``other`` if that has to wait for its turn."""
        queue = self._stream(peer, other)
        if not self._is_head(queue, other) or self._follows_wait(queue, other):
            self._add(Edge(source, queue, Why.BEHIND, rank, record, other))
            self._todo.append(queue)
        elif (state := self.states[peer]).is_over and not state.is_echo:
            self._add(Edge(source, peer, Why.GONE, rank, record, other))

    def _has_gone(self, peer: int, partner: Record | None) -> bool:
        """Whether the rank ended with its side of a matched op incomplete."""
        state = self.states.get(peer)
        return (
            state is not None
            and state.is_over
            and not state.is_echo
            and not self._was_stuck(state)
            and (partner is None or not partner.done_ns)
        )

    def _was_stuck(self, state: RankState) -> bool:
        """Whether it died, but long after it had got stuck."""
        if state.life is not Life.DEAD:
            return False
        ages = [
            state.age_ns(r.wait_ns or r.posted_ns) for r in self.blocked(state.rank)
        ]
        return max(ages, default=0) >= _STUCK_BEFORE_DEATH_NS

    def _is_head(self, stream: Stream, record: Record) -> bool:
        kernels = self._kernels.get(stream)
        return not kernels or any(r is record for r in kernels[0])

    def _add_call(self, rank: int, record: Record) -> None:
        """Edges of a host that is inside the call that issues an op."""
        kernel = self.kernel(rank, record)
        if record is not kernel[0]:
            return  # the batch is one call: its first op speaks for all
        assert record.group is not None
        unposted = [r for r in kernel if self.partner(rank, r)[0] is _Matched.NO]
        unknown = [r for r in kernel if self.partner(rank, r)[0] is _Matched.UNKNOWN]
        for r in unposted:
            self._add(Edge(rank, r.peer, Why.UNPOSTED, rank, r))
        for r in unknown:
            self._add(Edge(rank, r.peer, Why.UNKNOWN, rank, r))
        group = self._group_id(rank, record.group)
        if (
            record.transport is Transport.GROUP
            and not record.group.eager
            and self._is_first_call(rank, record)
            and self._add_set_up(rank, Hub("set-up", group, 0), record)
        ):
            return
        if unposted or unknown:
            return  # phase 1 of the first use: the matched edges are done with it
        for r in kernel:
            _, other = self.partner(rank, r)
            if self._has_gone(r.peer, other):
                self._add(Edge(rank, r.peer, Why.GONE, rank, r, other))
            elif other is not None and other.returned_ns == 0 and not other.done_ns:
                theirs = self.kernel(r.peer, other)
                if any(self.is_unposted(r.peer, o) for o in theirs):
                    self._add(Edge(rank, r.peer, Why.IN_CALL, rank, r, other))

    # -- what needs a whole group ----------------------------------------------------

    def _is_first_call(self, rank: int, record: Record) -> bool:
        """Whether the rank's first call on its group's communicator has not returned."""
        log, group = self.states[rank].log, record.group
        assert group is not None
        posted = sum(
            c.posted
            for c in log.channels
            if c.channel.transport is Transport.GROUP and c.channel.group == group.key
        )
        in_call = 0
        for other in log.records:
            if other.group is None or other.group.index != group.index:
                continue
            if other.kind is Kind.COLLECTIVE:
                if other.returned_ns:
                    return False
            elif other.kind is Kind.OP and other.transport is Transport.GROUP:
                if other.returned_ns:
                    return False
                in_call += 1
        return posted <= in_call

    def comers(self, group: int) -> set[int]:
        """Ranks that have begun a batched op or a collective on a group."""
        if self._comers is None:
            self._comers = {}
            for rank, state in self.states.items():
                for c in state.log.channels:
                    if c.channel.transport is Transport.GROUP and c.posted:
                        found = self._group_ids.get(c.channel.group)
                        if found is not None:
                            self._comers.setdefault(found, set()).add(rank)
                for record in self.pending[rank]:
                    if record.transport is Transport.GROUP and record.group:
                        found = self._group_id(rank, record.group)
                        self._comers.setdefault(found, set()).add(rank)
            for found, entered in self._entered.items():
                self._comers.setdefault(found, set()).update(entered)
        return self._comers.get(group, set())

    def _add_set_up(self, rank: int, hub: Hub, record: Record) -> bool:
        """Whether ranks are missing in a set-up; adds the edges if so."""
        missing = self.missing(hub)
        if not missing:
            return False
        self._add(Edge(rank, hub, Why.SET_UP, rank, record))
        if len(self.edges.setdefault(hub, [])) == 0:
            for other in missing:
                why = Why.SET_UP if other in self.states else Why.UNKNOWN
                self._add(Edge(hub, other, why, rank, record))
        return True

    def _add_collective(self, source: Node, rank: int, record: Record) -> None:
        assert record.group is not None
        hub = Hub("collective", self._group_id(rank, record.group), record.k)
        self._add(Edge(source, hub, Why.COLLECTIVE, rank, record))
        if hub in self.edges:
            return
        self.edges[hub] = []
        for other in self.missing(hub):
            why = Why.COLLECTIVE
            if other not in self.states or self.states[other].log.incomplete:
                why = Why.UNKNOWN
            self._add(Edge(hub, other, why, rank, record))
        for other, theirs in self.collectives(hub).items():
            if theirs.returned_ns and not theirs.done_ns:
                self._add_behind(hub, rank, record, other, theirs)

    def late(self, hub: Hub) -> list[int]:
        """Ranks that entered a collective but have its kernel queued behind others."""
        edges = self.edges.get(hub, [])
        return sorted(e.target.rank for e in edges if isinstance(e.target, Stream))

    def missing(self, hub: Hub) -> list[int]:
        """Ranks of the group that have not come."""
        ranks = self.groups[hub.group].ranks
        if hub.kind == "set-up":
            came = self.comers(hub.group)
            return [r for r in ranks if r not in came]
        entered = self._entered.get(hub.group, {})
        return [r for r in ranks if entered.get(r, 0) <= hub.k]

    def collectives(self, hub: Hub) -> dict[int, Record]:
        """The record of a collective on each rank that has one, by rank."""
        if self._collectives is None:
            self._collectives = {}
            for rank, state in self.states.items():
                for r in state.log.records:
                    if r.kind is Kind.COLLECTIVE and r.group is not None:
                        key = (self._group_id(rank, r.group), r.k)
                        self._collectives.setdefault(key, {})[rank] = r
        return self._collectives.get((hub.group, hub.k), {})

    # -- reasons ---------------------------------------------------------------------

    def roots(self) -> list[Root]:
        """Components that nothing leads out of, in order of their first rank."""
        component: dict[Node, int] = {}
        groups = list(_components(self.edges))
        for number, nodes in enumerate(groups):
            for node in nodes:
                component[node] = number
        leaves = [True] * len(groups)
        for source, edges in self.edges.items():
            if any(component[e.target] != component[source] for e in edges):
                leaves[component[source]] = False
        roots = {
            n: Root(tuple(nodes), [], []) for n, nodes in enumerate(groups) if leaves[n]
        }
        for source, edges in self.edges.items():
            for edge in edges:
                root = roots.get(component[edge.target])
                if root is not None:
                    is_inside = component[source] == component[edge.target]
                    (root.inside if is_inside else root.incoming).append(edge)
        return sorted(roots.values(), key=lambda r: (r.ranks or [1 << 30])[0])

    def victims(self, nodes: Iterable[Node]) -> list[int]:
        """Ranks that cannot go on before these nodes move, nearest first."""
        back = self._back_edges()
        self._followed += 1
        # Thousands of roots that hold the same ranks would make this quadratic.
        is_deep = self._followed <= _MAX_FOLLOWED
        seen = set(nodes)
        todo = deque(nodes)
        found: list[int] = []
        while todo and (is_deep or len(found) < _MAX_FOLLOWED):
            for edge in back.get(todo.popleft(), []):
                if edge.source not in seen:
                    seen.add(edge.source)
                    todo.append(edge.source)
                    if isinstance(edge.source, int):
                        found.append(edge.source)
        return found

    _followed = 0
    _back: dict[Node, list[Edge]] | None = None

    def _back_edges(self) -> dict[Node, list[Edge]]:
        if self._back is None:
            self._back = {}
            for edges in self.edges.values():
                for edge in edges:
                    self._back.setdefault(edge.target, []).append(edge)
        return self._back

    def waits_on(self, rank: int, limit: int = 8) -> Iterator[tuple[Edge, int]]:
        """Ranks that ``rank`` waits for directly: (edge of the op, the other rank).

        Streams and hubs are looked through. ``limit`` bounds a hub's missing ranks.
        """
        seen: set[tuple[int, int]] = set()
        for first in self.edges.get(rank, []):
            trail: list[tuple[Edge, Node]] = [(first, first.target)]
            through: set[Node] = set()
            while trail:
                edge, node = trail.pop()
                if isinstance(node, int):
                    if node != rank and (node, edge.op.seq) not in seen:
                        seen.add((node, edge.op.seq))
                        yield edge, node
                    continue
                if isinstance(node, Stream) and node.rank != rank:
                    yield edge, node.rank
                    continue
                if node in through:
                    continue
                through.add(node)
                trail += [
                    (edge if isinstance(node, Hub) else nxt, nxt.target)
                    for nxt in self.edges.get(node, [])[:limit]
                ]


def _same_kernel(first: Record, record: Record) -> bool:
    both = first.flags & record.flags
    return bool(both & Flag.COALESCED) and first.batch == record.batch


def _components(edges: Mapping[Node, list[Edge]]) -> Iterator[list[Node]]:
    """Strongly connected components (Tarjan's algorithm, without recursion)."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    on_stack: set[Node] = set()
    stack: list[Node] = []
    for start in list(edges):
        if start in index:
            continue
        work: list[tuple[Node, int]] = [(start, 0)]
        while work:
            node, position = work.pop()
            if position == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            out = edges.get(node, [])
            descend = None
            while position < len(out):
                target = out[position].target
                position += 1
                if target not in index:
                    descend = target
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            if descend is not None:
                work += [(node, position), (descend, 0)]
                continue
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
            if low[node] == index[node]:
                nodes = []
                while True:
                    nodes.append(stack.pop())
                    on_stack.discard(nodes[-1])
                    if nodes[-1] == node:
                        break
                yield nodes
