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
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from pptrace.compact import (
    ACTIONS,
    KINDS,
    NEXT_ACTION,
    Symbol,
    Tape,
    action_number,
    symbol_code,
)
from pptrace.plan import Batch, Collective, Edge, Op, Wait
from pptrace.records import Direction, Group, Pass
from pptrace.semantics import Rule

__all__ = [
    "Direct",
    "OwnStage",
    "Recorder",
    "StubGroup",
    "StubStage",
    "Symbols",
    "recording",
]

_STAGE: Any = torch_stage.PipelineStage


class _Now:
    """The recording that goes on: there is one at a time."""

    thread = 0
    plain_thread = 0
    """The same while only torch's own code runs: the short way."""
    recorder: Recorder
    append: Callable[[Any], None]


_now = _Now()


class _StubWork:
    """What makes something that was posted pass for the ``Work`` torch gives back."""

    __slots__ = ()

    def wait(self, *_: object) -> bool:
        _now.append(Wait(self))  # type: ignore[arg-type]
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return False


class _StubSymbol(Symbol):
    """An op that passes for torch's ``P2POp``, and for the ``Work`` it becomes."""

    __slots__ = ()

    def wait(self, *_: object) -> bool:
        _now.append(self)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return False

    @property
    def edge(self) -> Edge:
        edge = _now.recorder.edges[self.code]
        assert edge is not None
        return edge

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


class _StubOp(_StubWork, Op):
    """An op without a label that passes for its ``Work``."""

    __slots__ = ()


class _StubBatch(_StubWork, Batch):
    """A coalesced batch that passes for its one ``Work``."""

    __slots__ = ()


class _StubCollective(_StubWork, Collective):
    """A collective that passes for its ``Work``."""

    __slots__ = ()


class Symbols:
    """The ops of all microbatches by slot and kind, shared by all ranks.

    ``of(slot, kind)[microbatch]`` is a list with the one op, as a stage hands it out.
    """

    def __init__(self, n_microbatches: int) -> None:
        self.n_microbatches = n_microbatches
        self._lists: dict[int, list[list[Any]]] = {}
        self.nothing: list[list[Any]] = [[] for _ in range(n_microbatches)]

    def of(self, slot: int, kind: int) -> list[list[Any]]:
        code = symbol_code(slot, kind)
        if code not in self._lists:
            self._lists[code] = [
                [_StubSymbol(code, mb)] for mb in range(self.n_microbatches)
            ]
        return self._lists[code]


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

    def __init__(
        self, group: StubGroup, rule: Rule, symbols: Symbols, *, is_plain: bool
    ) -> None:
        self.group = group
        self.symbols = symbols
        self.is_plain = is_plain and _returns_list
        """Torch's code alone: it does not change lists it was given."""
        self.items: list[Any] = []
        self.edges: list[Edge | None] = []
        self.splits = rule is Rule.SPLIT

    def begin(self) -> None:
        """This thread's next calls are this rank's."""
        _now.recorder = self
        _now.append = self.items.append

    def tape(self, stages: list[int]) -> Tape:
        """What was recorded."""
        return Tape(
            self.items,
            self.edges,
            stages,
            splits=self.splits,
            n_microbatches=self.symbols.n_microbatches,
        )

    def batch_p2p(self, p2p_ops: list[Any], desc: str | None) -> Any:
        """Stand in for ``_batch_p2p`` where ops and works may be anybody's."""
        if not p2p_ops:
            return _as_torch([])
        if all(type(op) is _StubSymbol for op in p2p_ops):
            self.items.append(([*p2p_ops], desc))
            return _as_torch([*p2p_ops])
        ops = [self._to_op(op) for op in p2p_ops]
        if self.splits and len({op.edge.direction for op in ops}) == 1:
            self.items += ops
            return _as_torch(ops)
        return _as_torch([self._coalesced(ops, desc or "")])

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Any]:
        """Stand in for ``batch_isend_irecv``."""
        return [self._coalesced([self._to_op(op) for op in p2p_op_list], "")]

    def post_one(self, edge: Edge) -> Any:
        """Post a single op without a label."""
        op = _StubOp(edge)
        self.items.append(op)
        return op

    def collective(self, name: str, group: Group) -> Any:
        """Post a collective."""
        work = _StubCollective(name, group)
        self.items.append(work)
        return work

    def _coalesced(self, ops: list[_StubOp], desc: str) -> _StubBatch:
        batch = _StubBatch(ops, desc)
        self.items.append(batch)
        return batch

    def _to_op(self, op: Any) -> _StubOp:
        """What a ``P2POp`` says, a stage's or the schedule's own."""
        if type(op) is _StubSymbol:
            return _StubOp(op.edge, op.microbatch)
        direction = Direction.SEND if op.op is dist.isend else Direction.RECV
        group = op.group if isinstance(op.group, StubGroup) else self.group
        return _StubOp(group.edge(direction, op.group_peer))


# 2.6 and 2.7 give back one work or None, later ones a list.
_returns_list = hasattr(torch_schedules, "_wait_batch_p2p")


def _as_torch(works: list[Any]) -> Any:
    if _returns_list:
        return works
    return works[-1] if works else None


class StubStage(_STAGE):  # type: ignore[misc]
    """A pipeline stage that computes nothing and owns nothing.

    ``isinstance`` of torch's ``PipelineStage``, whose constructor does not run.
    `place` says which stage of which rank it is.
    """

    # Properties of torch's class; values are read faster.
    is_first = is_last = False
    has_backward = True

    def __init__(self, index: int, num_stages: int, recorder: Recorder) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.group = recorder.group
        self.group_rank = recorder.group.own_rank
        self.group_size = len(recorder.group.value.ranks)
        self.device = torch.device("cpu")
        self.submod = _module()
        self.log_prefix = f"[Stage {index}]"
        self.stage_index_to_group_rank = {
            stage: stage % self.group_size for stage in range(num_stages)
        }
        self.chunks = None
        self.args_recv_info: dict[int, Any] = {0: ()}
        self.act_send_info: dict[int, Any] = {}
        self.output_chunks: list[Any] = []
        self._recorder = recorder
        self._ops: list[list[list[Any]]] = []

    def place(self, slot: int) -> None:
        """Take its place among the rank's stages, once all know where stages are."""
        recorder = self._recorder
        self._ops = []
        for kind in range(len(KINDS)):
            edge = self._edge(kind)
            recorder.edges.append(edge)
            symbols = recorder.symbols
            is_none = edge is None or (kind > 1 and not self.has_backward)
            self._ops.append(symbols.nothing if is_none else symbols.of(slot, kind))
        self._hand_out()
        self._compute([action_number(slot, kind, 0) for kind in range(len(ACTIONS))])

    def _edge(self, kind: int) -> Edge | None:
        """The edge to the neighbour; None if there is none or it is on this rank."""
        name = KINDS[kind]
        direction = Direction.SEND if name[0] == "S" else Direction.RECV
        onward = name in {"SEND_F", "RECV_B"}
        other = self.stage_index + (1 if onward else -1)
        if not 0 <= other < self.num_stages:
            return None
        group = self.group.value
        group_peer = self.stage_index_to_group_rank[other]
        if group_peer == self.group_rank:
            return None
        return Edge(
            direction, group.ranks[group_peer], group, Pass[name[-1]], self.stage_index
        )

    def _hand_out(self) -> None:
        """Give out the shared lists, by functions that cost next to nothing."""
        sends_f, recvs_f, sends_b, recvs_b = self._ops
        self.get_fwd_send_ops = sends_f.__getitem__
        self.get_fwd_recv_ops = recvs_f.__getitem__
        self.get_bwd_send_ops = sends_b.__getitem__
        self.get_bwd_recv_ops = recvs_b.__getitem__

    def _compute(self, numbers: list[int]) -> None:
        """Write down what is computed; ``numbers`` are the slot's by kind of action."""
        append = self._recorder.items.append
        f, b, i, w = numbers

        def forward_one_chunk(
            fwd_chunk_id: int,
            args: Any = None,  # noqa: ARG001 - torch's signature
            kwargs: Any = None,  # noqa: ARG001
            save_forward_output: bool = True,  # noqa: ARG001
        ) -> None:
            append(fwd_chunk_id * NEXT_ACTION + f)

        def backward_one_chunk(
            bwd_chunk_id: int,
            loss: Any = None,  # noqa: ARG001
            full_backward: bool = True,
            last_backward: bool = False,  # noqa: ARG001
        ) -> None:
            append(bwd_chunk_id * NEXT_ACTION + (b if full_backward else i))

        def backward_weight_one_chunk(bwd_chunk_id: int, *_: Any, **__: Any) -> None:
            append(bwd_chunk_id * NEXT_ACTION + w)

        self.forward_one_chunk = forward_one_chunk
        if self.has_backward:
            self.backward_one_chunk = backward_one_chunk
            self.backward_weight_one_chunk = backward_weight_one_chunk
        else:
            self.backward_one_chunk = self.set_local_fwd_input
            self.backward_weight_one_chunk = self.set_local_fwd_input

    def set_local_fwd_input(self, *_: Any, **__: Any) -> None:
        """Nothing to hand over to the next stage of this rank."""

    set_local_bwd_input = set_local_fwd_input
    get_local_bwd_output = set_local_fwd_input
    scale_grads = set_local_fwd_input
    perform_reduce_grad = set_local_fwd_input
    clear_runtime_states = set_local_fwd_input


class OwnStage(StubStage):
    """A stage for code that is not torch's: its lists are the caller's to change."""

    def _hand_out(self) -> None:
        super()._hand_out()
        for name in _ACCESSORS:
            setattr(self, name, functools.partial(_copied, getattr(self, name)))


_ACCESSORS = (
    "get_fwd_send_ops",
    "get_fwd_recv_ops",
    "get_bwd_send_ops",
    "get_bwd_recv_ops",
)


def _copied(of: Callable[[int], list[Any]], *args: int, **named: int) -> list[Any]:
    (chunk_id,) = args or named.values()
    return [*of(chunk_id)]


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
        _now.plain_thread = _now.thread if recorder.is_plain else 0
        try:
            yield
        finally:
            _now.thread = _now.plain_thread = 0
            torch_schedules.logger.removeFilter(_is_not_recording)
            for namespace, name, original, ours in reversed(replaced):
                if namespace.get(name) is ours:
                    namespace[name] = original


def _is_not_recording(_: logging.LogRecord) -> bool:
    """Torch logs the whole schedule when a step raises: here that is not news."""
    return _now.thread != threading.get_ident()


def _replace(
    classes: Iterable[type],
) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Replace the functions wherever schedule code may look them up; say where."""
    modules = [sys.modules.get(cls.__module__) for cls in classes]
    homes = [torch_schedules, c10d, dist, *filter(None, modules)]
    ours = {}
    for owner, name, make in _SUBSTITUTES:
        original = getattr(owner, name, None)
        if original is not None:
            ours[id(original)] = (original, make(original))
    for namespace in {id(home): vars(home) for home in homes}.values():
        for alias, value in list(namespace.items()):
            if id(value) in ours:
                original, replacement = ours[id(value)]
                namespace[alias] = replacement
                yield namespace, alias, original, replacement


def _batch_p2p(original: Callable[..., Any]) -> Any:
    now, this_thread = _now, threading.get_ident

    @functools.wraps(original)
    def batch_p2p(p2p_ops: list[Any], desc: str | None = None) -> Any:
        if now.plain_thread == this_thread():
            if p2p_ops:
                now.append((p2p_ops, desc))
            return p2p_ops
        if now.thread == this_thread():
            return now.recorder.batch_p2p(p2p_ops, desc)
        return original(p2p_ops, desc)

    return batch_p2p


def _wait_batch_p2p(original: Callable[..., Any]) -> Any:
    now, this_thread = _now, threading.get_ident

    @functools.wraps(original)
    def wait_batch_p2p(work: list[Any]) -> None:
        if now.plain_thread != this_thread():
            original(work)
        elif work:
            now.append(work)

    return wait_batch_p2p


class Direct:
    """Runs torch's own step with the recorder's functions as its globals.

    Nobody else runs this copy of it, so it need not ask, call by call, which thread it
    is. One copy serves all ranks: Python gets faster at code it has run before.
    """

    def __init__(self) -> None:
        self._bind, self._batch_p2p = _batch_p2p_to()
        self._copies: dict[Any, types.FunctionType] = {}

    def step(self, step: Any, recorder: Recorder) -> Any:
        """The bound method to call in place of ``step``, for this rank only."""
        function = inspect.unwrap(step.__func__)
        if not (recorder.is_plain and isinstance(function, types.FunctionType)):
            return step
        copy = self._copies.get(function)
        if copy is None:
            copy = self._copies[function] = self._copy(function)
        append = recorder.items.append
        self._bind(append)
        if "_wait_batch_p2p" in copy.__globals__:
            # A list that was never posted, such as an empty one, holds up nothing.
            copy.__globals__["_wait_batch_p2p"] = append
        return types.MethodType(copy, step.__self__)

    def _copy(self, function: types.FunctionType) -> types.FunctionType:
        names = dict(function.__globals__)
        if "_batch_p2p" in names:
            names["_batch_p2p"] = self._batch_p2p
        copy = types.FunctionType(
            function.__code__,
            names,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy


def _batch_p2p_to() -> tuple[Callable[[Any], None], Any]:
    """A ``_batch_p2p`` that writes down what is posted, and what tells it where to."""
    append: Any = None

    def bind(to: Any) -> None:
        nonlocal append
        append = to

    def batch_p2p(p2p_ops: list[Any], desc: str | None = None) -> Any:
        if p2p_ops:
            append((p2p_ops, desc))
        return p2p_ops

    return bind, batch_p2p


def _dispatch(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Let this thread's calls go to ``function``, with the recorder first."""

    def make(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if _now.thread != threading.get_ident():
                return original(*args, **kwargs)
            return function(_now.recorder, *args, **kwargs)

        return dispatch

    return make


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


_NO_CONTEXT = contextlib.nullcontext()

_SUBSTITUTES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch_schedules, "_batch_p2p", _batch_p2p),
    (torch_schedules, "_wait_batch_p2p", _wait_batch_p2p),
    (torch_schedules, "record_function", _dispatch(lambda *_: _NO_CONTEXT)),
    (c10d, "batch_isend_irecv", _dispatch(Recorder.batch_isend_irecv)),
    (c10d, "get_rank", _dispatch(_get_rank)),
    (c10d, "get_world_size", _dispatch(_get_world_size)),
    (c10d, "get_global_rank", _dispatch(_get_global_rank)),
    (c10d, "get_group_rank", _dispatch(_get_group_rank)),
    (c10d, "get_process_group_ranks", _dispatch(_get_ranks)),
    (c10d, "_get_default_group", _dispatch(lambda recorder: recorder.group)),
    (c10d, "get_backend", _dispatch(lambda *_: "nccl")),
    (c10d, "is_initialized", _dispatch(lambda *_: True)),
)
