"""Stub stages, and a recorder for what schedule code does with them.

The code is the schedule's own; nothing stands behind it. No tensor is made, no process
group is needed, and one that exists is not touched: the few functions of torch that
schedule code calls are replaced while it runs, by ones that hand every other thread on
to the original. ``dist.isend`` and ``dist.irecv`` stay what they are, since ``_batch_p2p``
of a job that trains meanwhile chooses the transport by their identity.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from pptrace.plan import Action, Batch, Collective, Edge, Instruction, Op, Wait
from pptrace.records import Direction, Group, Pass
from pptrace.semantics import Rule

__all__ = ["Recorder", "StubGroup", "StubStage", "recording"]

_STAGE: Any = torch_stage.PipelineStage
_wait = tuple.__new__
"""Makes named tuples at half the price; there are hundreds of thousands."""


class _Now:
    """The recording that goes on: there is one at a time."""

    thread = 0
    recorder: Recorder
    trace: list[Instruction]


_now = _Now()


def _is_recording() -> bool:
    """Whether this thread records."""
    return _now.thread == threading.get_ident()


class _StubWork:
    """What makes something that was posted pass for the ``Work`` torch gives back."""

    __slots__ = ()

    def wait(self, *_: object) -> bool:
        _now.trace.append(_wait(Wait, (self,)))
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return False


class _StubOp(_StubWork, Op):
    """An op that passes for torch's ``P2POp``, and for the ``Work`` it becomes."""

    __slots__ = ()

    @property
    def op(self) -> Any:
        is_send = self.edge.direction is Direction.SEND
        return dist.isend if is_send else dist.irecv

    @property
    def tensor(self) -> torch.Tensor:
        return torch.empty(1, device="meta")

    @property
    def peer(self) -> int:
        return self.edge.peer

    @property
    def group_peer(self) -> int:
        return self.edge.group.ranks.index(self.edge.peer)

    @property
    def group(self) -> Any:
        return _now.recorder.group

    tag = 0


class _StubBatch(_StubWork, Batch):
    """A coalesced batch that passes for its one ``Work``."""

    __slots__ = ()


class _StubCollective(_StubWork, Collective):
    """A collective that passes for its ``Work``."""

    __slots__ = ()


class StubGroup(dist.ProcessGroup):
    """A process group without processes: what is issued on it is recorded.

    It is registered nowhere; `recording` answers torch's questions about it.
    """

    def __init__(self, value: Group, rank: int) -> None:
        super().__init__(rank, len(value.ranks))  # type: ignore[call-arg]
        self.value = value
        self.own_rank = rank
        self._edges: dict[tuple[Direction, int], Edge] = {}

    def edge(self, direction: Direction, group_peer: int) -> Edge:
        """The edge of ops that carry no label."""
        key = (direction, group_peer)
        if key not in self._edges:
            peer = self.value.ranks[group_peer]
            self._edges[key] = Edge(direction, peer, self.value)
        return self._edges[key]

    def send(self, _tensors: Any, dst: int, _tag: int = 0) -> Any:
        return _now.recorder.post_one(self.edge(Direction.SEND, dst))

    def recv(self, _tensors: Any, src: int, _tag: int = 0) -> Any:
        return _now.recorder.post_one(self.edge(Direction.RECV, src))

    def barrier(self, *_: Any, **__: Any) -> Any:
        return _now.recorder.collective("barrier", self.value)

    def allreduce(self, *_: Any, **__: Any) -> Any:
        return _now.recorder.collective("all_reduce", self.value)

    def broadcast(self, *_: Any, **__: Any) -> Any:
        return _now.recorder.collective("broadcast", self.value)

    def allgather(self, *_: Any, **__: Any) -> Any:
        return _now.recorder.collective("all_gather", self.value)


class Recorder:
    """Writes down, in order, what one rank posts, waits for and computes."""

    def __init__(self, group: StubGroup, rule: Rule) -> None:
        self.group = group
        self.trace: list[Instruction] = []
        self._splits = rule is Rule.SPLIT
        # 2.6 and 2.7 give back one work or None, later ones a list.
        self._returns_list = hasattr(torch_schedules, "_wait_batch_p2p")

    def begin(self) -> None:
        """This thread's next calls are this rank's."""
        _now.recorder = self
        _now.trace = self.trace

    def batch_p2p(self, p2p_ops: list[Any], desc: str | None = None) -> Any:
        """Stand in for ``_batch_p2p``."""
        ops, works = p2p_ops, []
        if any(type(op) is not _StubOp for op in ops):
            ops = [self._to_op(op) for op in ops]
        if self._splits and len({op.edge.direction for op in ops}) < 2:
            self.trace += ops
            works = ops
        elif ops:
            works = [self._coalesced(ops, desc or "")]
        if self._returns_list:
            return works
        return works[-1] if works else None

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Any]:
        """Stand in for ``batch_isend_irecv``."""
        return [self._coalesced([self._to_op(op) for op in p2p_op_list], "")]

    def post_one(self, edge: Edge) -> Any:
        """Post a single op without a label."""
        op = _StubOp(edge)
        self.trace.append(op)
        return op

    def collective(self, name: str, group: Group) -> Any:
        """Post a collective."""
        work = _StubCollective(name, group)
        self.trace.append(work)
        return work

    def _coalesced(self, ops: list[_StubOp], desc: str) -> _StubBatch:
        batch = _StubBatch(ops, desc)
        self.trace.append(batch)
        return batch

    def _to_op(self, op: Any) -> _StubOp:
        """What a schedule's own ``P2POp`` says."""
        if type(op) is _StubOp:
            return op
        direction = Direction.SEND if op.op is dist.isend else Direction.RECV
        group = op.group if isinstance(op.group, StubGroup) else self.group
        return _StubOp(group.edge(direction, op.group_peer))


class StubStage(_STAGE):  # type: ignore[misc]
    """A pipeline stage that computes nothing and owns nothing.

    ``isinstance`` of torch's ``PipelineStage``, whose constructor does not run.
    """

    def __init__(self, index: int, num_stages: int, recorder: Recorder) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.group = recorder.group
        self.group_rank = recorder.group.own_rank
        self.group_size = len(recorder.group.value.ranks)
        self.device = torch.device("cpu")
        self.submod = _module()
        self.log_prefix = f"[Stage {index}]"
        self.stage_index_to_group_rank = {
            stage: stage % self.group_size for stage in range(num_stages)
        }
        self.has_backward = True
        self.chunks = None
        self.args_recv_info: dict[int, Any] = {0: ()}
        self.act_send_info: dict[int, Any] = {}
        self.output_chunks: list[Any] = []
        self.recorder = recorder
        self._edges: dict[tuple[Direction, Pass], list[Edge]] = {}

    def _ops(self, direction: Direction, pass_: Pass, chunk_id: int) -> list[Any]:
        edges = self._edges.get((direction, pass_))
        if edges is None:
            edges = self._edges[direction, pass_] = self._make_edges(direction, pass_)
        return [_StubOp(edge, chunk_id) for edge in edges]

    def _make_edges(self, direction: Direction, pass_: Pass) -> list[Edge]:
        """The edges to the neighbour: forward sends and backward receives go on."""
        onward = (direction is Direction.SEND) == (pass_ is Pass.F)
        other = self.stage_index + (1 if onward else -1)
        if not 0 <= other < self.num_stages:
            return []
        group = self.group.value
        peer = group.ranks[self.stage_index_to_group_rank[other]]
        return [Edge(direction, peer, group, pass_, self.stage_index)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._ops(Direction.RECV, Pass.F, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._ops(Direction.SEND, Pass.F, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.has_backward:
            return []
        return self._ops(Direction.RECV, Pass.B, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.has_backward:
            return []
        return self._ops(Direction.SEND, Pass.B, bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        self.recorder.trace.append(Action(self.stage_index, "F", fwd_chunk_id))

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002 - torch's signature
        full_backward: bool = True,
        *_: Any,
        **__: Any,
    ) -> None:
        if self.has_backward:
            kind = "B" if full_backward else "I"
            self.recorder.trace.append(Action(self.stage_index, kind, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        if self.has_backward:
            self.recorder.trace.append(Action(self.stage_index, "W", bwd_chunk_id))

    def set_local_fwd_input(self, *_: Any) -> None:
        """Nothing to hand over to the next stage of this rank."""

    set_local_bwd_input = set_local_fwd_input
    get_local_bwd_output = set_local_fwd_input
    scale_grads = set_local_fwd_input
    perform_reduce_grad = set_local_fwd_input
    clear_runtime_states = set_local_fwd_input


@functools.cache
def _module() -> torch.nn.Module:
    return torch.nn.Identity()


# -- torch's names while code is recorded --------------------------------------------

_lock = threading.RLock()


@contextlib.contextmanager
def recording(recorder: Recorder, classes: Iterable[type]) -> Iterator[None]:
    """Let ``recorder`` see what this thread does; the job's other threads notice nothing.

    ``classes`` are the schedule's: functions of torch that their modules imported by
    name are replaced there, too. One recording at a time.
    """
    with _lock:
        replaced = list(_replace(classes))
        torch_schedules.logger.addFilter(_is_not_recording)
        recorder.begin()
        _now.thread = threading.get_ident()
        try:
            yield
        finally:
            _now.thread = 0
            torch_schedules.logger.removeFilter(_is_not_recording)
            for namespace, name, original, ours in reversed(replaced):
                if namespace.get(name) is ours:
                    namespace[name] = original


def _is_not_recording(_: logging.LogRecord) -> bool:
    """Torch logs the whole schedule when a step raises: here that is not news."""
    return not _is_recording()


def _replace(
    classes: Iterable[type],
) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Replace the functions wherever schedule code may look them up; say where."""
    modules = [sys.modules.get(cls.__module__) for cls in classes]
    homes = [torch_schedules, c10d, dist, *filter(None, modules)]
    ours = {}
    for owner, name, function in _SUBSTITUTES:
        original = getattr(owner, name, None)
        if original is not None:
            ours[id(original)] = (original, _dispatch(original, function))
    for namespace in {id(home): vars(home) for home in homes}.values():
        for alias, value in list(namespace.items()):
            if id(value) in ours:
                original, replacement = ours[id(value)]
                namespace[alias] = replacement
                yield namespace, alias, original, replacement


def _dispatch(original: Callable[..., Any], function: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if _now.thread != threading.get_ident():
            return original(*args, **kwargs)
        return function(_now.recorder, *args, **kwargs)

    return dispatch


def _group(recorder: Recorder, group: Any) -> StubGroup:
    return group if isinstance(group, StubGroup) else recorder.group


def _get_rank(recorder: Recorder, group: Any = None) -> int:
    return _group(recorder, group).own_rank


def _get_world_size(recorder: Recorder, group: Any = None) -> int:
    return len(_group(recorder, group).value.ranks)


def _get_global_rank(recorder: Recorder, group: Any, group_rank: int) -> int:
    return _group(recorder, group).value.ranks[group_rank]


def _get_group_rank(recorder: Recorder, group: Any, global_rank: int) -> int:
    return _group(recorder, group).value.ranks.index(global_rank)


def _get_ranks(recorder: Recorder, group: Any = None) -> list[int]:
    return list(_group(recorder, group).value.ranks)


_SUBSTITUTES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch_schedules, "_batch_p2p", Recorder.batch_p2p),
    (torch_schedules, "record_function", lambda *_: contextlib.nullcontext()),
    (c10d, "batch_isend_irecv", Recorder.batch_isend_irecv),
    (c10d, "get_rank", _get_rank),
    (c10d, "get_world_size", _get_world_size),
    (c10d, "get_global_rank", _get_global_rank),
    (c10d, "get_group_rank", _get_group_rank),
    (c10d, "get_process_group_ranks", _get_ranks),
    (c10d, "_get_default_group", lambda recorder: recorder.group),
    (c10d, "get_backend", lambda *_: "nccl"),
    (c10d, "is_initialized", lambda *_: True),
)
