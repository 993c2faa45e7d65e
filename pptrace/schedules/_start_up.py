"""What ranks exchange before the first microbatch, by torch release.

It decides which communicators and edges have been used when the schedule begins.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from pptrace.plan import Batch, Edge, Instruction, Op, Sync, Wait
from pptrace.records import Direction, Group, Pass

__all__ = ["StartUp", "installed_start_up", "start_up"]

_SEND, _RECV = Direction.SEND, Direction.RECV


class StartUp(Enum):
    """How stages get ready; it changed twice (releases: where each form was read)."""

    SHAPES = "shapes"
    """2.6 to 2.8: shapes go forward by single ops, unless they are given."""
    NEIGHBOURS = "neighbours"
    """2.9 to 2.11: one batch with all neighbours, then shapes forward by batches."""
    VOTES = "votes"
    """2.12 to 2.14: a vote by single ops, then shapes both ways by batches."""


@functools.cache
def installed_start_up() -> StartUp:
    """The form of the installed torch, seen from its code."""
    if hasattr(torch_schedules._PipelineSchedule, "_warmup_p2p"):
        return StartUp.VOTES
    initialize = torch_schedules.PipelineScheduleSingle._initialize_stage
    names = inspect.unwrap(initialize).__code__.co_names
    is_first = "_get_init_p2p_neighbors_ops" in names
    return StartUp.NEIGHBOURS if is_first else StartUp.SHAPES


def start_up(
    form: StartUp, stages: Sequence[Any], *, is_static: bool, has_backward: bool
) -> Iterator[Instruction]:
    """The instructions of one rank; ``stages`` are its own, by index."""
    links = _Links(stages)
    if form is StartUp.VOTES:
        yield from links.votes()
    elif form is StartUp.NEIGHBOURS:
        yield from links.neighbours()
    if is_static:
        return
    batched = form is not StartUp.SHAPES
    yield from links.metadata(forward=True, batched=batched)
    if form is StartUp.VOTES and has_backward:
        yield from links.metadata(forward=False, batched=batched)


class _Links:
    """The messages between a rank's stages and their neighbours on other ranks."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages
        self._group: Group = stages[0].group.value
        self._edges: dict[tuple[Direction, int, int], Edge] = {}

    def _edge(
        self, stage: Any, direction: Direction, other: int, index: int = 0
    ) -> Edge | None:
        """The edge to another stage; None if there is none or it is on this rank."""
        if not 0 <= other < stage.num_stages:
            return None
        group_peer = stage.stage_index_to_group_rank[other]
        if group_peer == stage.group_rank:
            return None
        peer = self._group.ranks[group_peer]
        key = (direction, peer, index)
        if key not in self._edges:
            self._edges[key] = Edge(
                direction, peer, self._group, Pass.META, stage.stage_index, index
            )
        return self._edges[key]

    def _send_or_receive(
        self, edge: Edge | None, *, batched: bool = False
    ) -> Iterator[Instruction]:
        if edge is not None:
            op = Op(edge)
            posted = Batch([op]) if batched else op
            yield posted
            yield Wait(posted)

    def votes(self) -> Iterator[Instruction]:
        """Forward the product of all votes, then its value back."""
        for stage in self._stages:
            index = stage.stage_index
            yield from self._send_or_receive(self._edge(stage, _RECV, index - 1))
            yield from self._send_or_receive(self._edge(stage, _SEND, index + 1))
        for stage in reversed(self._stages):
            index = stage.stage_index
            yield from self._send_or_receive(self._edge(stage, _RECV, index + 1))
            yield from self._send_or_receive(self._edge(stage, _SEND, index - 1))
            yield Sync()  # the result is read

    def neighbours(self) -> Iterator[Instruction]:
        """One batch: a send and a receive with every neighbour."""
        edges = [
            self._edge(stage, direction, stage.stage_index + step)
            for stage in self._stages
            for direction, step in ((_RECV, -1), (_SEND, 1), (_SEND, -1), (_RECV, 1))
        ]
        ops = [Op(edge) for edge in edges if edge is not None]
        if ops:
            batch = Batch(ops)
            yield batch
            yield Wait(batch)

    def metadata(self, *, forward: bool, batched: bool) -> Iterator[Instruction]:
        """Receive the neighbour's object (its size, then its bytes), send one's own."""
        step = 1 if forward else -1
        for stage in self._stages if forward else reversed(self._stages):
            index = stage.stage_index
            for part in range(2):
                edge = self._edge(stage, _RECV, index - step, part)
                yield from self._send_or_receive(edge, batched=batched)
                if edge is not None:
                    yield Sync()  # the size, then the bytes, are read
            for part in range(2):
                edge = self._edge(stage, _SEND, index + step, part)
                yield from self._send_or_receive(edge, batched=batched)
