"""The one place where the fixed schedules know torch's shapes, version by version.

Everything is found by looking at the installed torch, never by its version number; the
releases named are where each shape was read. Read: 2.6, 2.7, 2.8, 2.9, 2.10, 2.11,
2.12, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from pptrace.schedules.actions import Programs, compute_only

__all__ = [
    "accepts",
    "add_unshard",
    "all_works_kept",
    "batch_p2p_keeping_works",
    "compute_loss",
    "forward_options",
    "initialize_stage",
    "loses_works",
    "no_start_up_ops_to_self",
    "pipeline_order",
    "post",
    "prepare_with_comms",
    "reduce_gradients",
    "scaled_once",
    "set_stage_to_rank",
    "stage_edges",
    "torch_actions",
]

loses_works = not hasattr(torch_schedules, "_wait_batch_p2p")
"""2.6 and 2.7: ``_batch_p2p`` keeps the last work only; on gloo the others are lost."""


_knows_reduce = hasattr(torch_schedules._ComputationType, "REDUCE_GRAD")  # 2.10


@functools.cache
def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` takes an argument of this name."""
    return name in inspect.signature(function).parameters


def _call_batch_p2p(ops: list[dist.P2POp], desc: str) -> list[dist.Work]:
    """Torch's own ``_batch_p2p``, looked up now: a tracer may stand in its place."""
    works: Any = torch_schedules._batch_p2p(ops, desc=desc)
    if works is None:
        return []
    return list(works) if isinstance(works, list) else [works]


def post(ops: list[dist.P2POp], desc: str) -> list[dist.Work]:
    """Post ops of one direction to one peer; returns every work."""
    if not loses_works:
        return _call_batch_p2p(ops, desc)
    return [work for op in ops for work in _call_batch_p2p([op], desc)]


def initialize_stage(
    schedule: Any, args: Any, kwargs: Any, target: Any, loss_kwargs: Any
) -> None:
    """Run torch's start-up exchange of a single-stage schedule, if it is due.

    Up to 2.9 the caller checks ``_stage_initialized``; from 2.10 there is no such
    attribute, the method itself sees whether it has run, and from 2.12 it
    also sees a change between training and evaluation. Before that, a schedule first
    used for evaluation gets its backward side here.
    """
    initialize = schedule._initialize_stage
    if accepts(type(schedule)._initialize_stage, "loss_kwargs"):  # 2.13
        initialize(args, kwargs, target, loss_kwargs)
    elif accepts(type(schedule)._initialize_stage, "target"):  # 2.12
        initialize(args, kwargs, target)
    elif not getattr(schedule, "_stage_initialized", False):
        initialize(args, kwargs)
    elif schedule._has_backward and not schedule._stage.grad_recv_info:
        schedule._stage._prepare_backward_infra(schedule._n_microbatches)


def forward_options(return_outputs: bool) -> dict[str, Any]:
    """Keyword arguments of ``forward_one_chunk`` beyond the inputs (2.10)."""
    forward = torch_stage._PipelineStageBase.forward_one_chunk
    if accepts(forward, "save_forward_output"):
        return {"save_forward_output": return_outputs}
    return {}


def compute_loss(
    schedule: Any, output: Any, targets: Any, microbatch: int, loss_kwargs: Any
) -> None:
    """Let torch compute the loss on the last stage (``loss_kwargs`` since 2.13)."""
    compute = schedule._maybe_compute_loss
    if accepts(type(schedule)._maybe_compute_loss, "loss_kwargs"):
        compute(schedule._stage, output, targets, microbatch, loss_kwargs)
    else:
        compute(schedule._stage, output, targets, microbatch)


def reduce_gradients(schedule: Any) -> None:
    """Scale gradients, after FSDP's reduction where the stage knows one (2.10).

    2.7 to 2.9 only scale; 2.6 leaves scaling to the user.
    """
    stage = schedule._stage
    scale = getattr(schedule, "scale_grads", None)
    if scale is None:
        return
    factor = schedule._n_microbatches if scale else 1
    reduce = getattr(stage, "perform_reduce_grad", stage.scale_grads)
    reduce(factor)


def stage_edges(stage: Any) -> list[tuple[int, int]] | None:
    """Which stage feeds which, if the stage knows it of the whole pipeline.

    Only traced stages do: they carry the graph of all stages. None for others, and
    where each stage feeds just the next one.
    """
    info = getattr(stage, "pipe_info", None)
    if info is None:
        return None
    calls = [node for node in info.graph.nodes if node.op == "call_module"]
    index = {node: i for i, node in enumerate(calls)}

    def sources(node: Any) -> list[Any]:
        found = []
        for used in node.all_input_nodes:
            if used in index:
                found.append(used)
            elif used.op != "placeholder":
                found.extend(sources(used))
        return found

    edges = {(index[src], index[node]) for node in calls for src in sources(node)}
    adjacent = {(i, i + 1) for i in range(len(calls) - 1)}
    return sorted(edges) if edges != adjacent else None


def pipeline_order(programs: Programs) -> dict[int, list[Any]] | None:
    """Compute actions as torch's values, for its visualizer; None before 2.8."""
    if not hasattr(torch_schedules.PipelineScheduleSingle, "_get_pipeline_order"):
        return None
    return torch_actions(
        {
            rank: [
                action
                for action in compute_only(program)
                if _knows_reduce or action.microbatch is not None
            ]
            for rank, program in programs.items()
        }
    )


def torch_actions(programs: Programs) -> dict[int, list[Any]]:
    """The same programs as torch's values."""
    from_str = torch_schedules._Action.from_str
    return {
        rank: [from_str(str(action)) for action in program]
        for rank, program in programs.items()
    }


def prepare_with_comms(schedule: Any, orders: dict[int, list[Any]]) -> None:
    """Let torch add sends, receives and FSDP's actions (renamed in 2.9)."""
    name = "_prepare_schedule_with_comms"
    getattr(schedule, name if hasattr(schedule, name) else "_load_actions")(orders)


def set_stage_to_rank(schedule: Any, mapping: dict[int, int]) -> None:
    """Say where each stage is: in 2.6 the V-shaped schedule leaves that to the user."""
    schedule.stage_index_to_group_rank = mapping
    for stage in schedule._stages:
        stage.stage_index_to_group_rank = mapping


@contextlib.contextmanager
def scaled_once(schedule: Any) -> Iterator[None]:
    """Scale gradients after the step: 2.7 to 2.9 forget it where W is split off."""
    scale = getattr(schedule, "scale_grads", False)
    if not scale or _knows_reduce:
        yield
        return
    schedule.scale_grads = False
    try:
        yield
    finally:
        schedule.scale_grads = scale
    for stage in schedule._stages:
        stage.scale_grads(schedule._n_microbatches)


@contextlib.contextmanager
def no_start_up_ops_to_self(stages: list[Any]) -> Iterator[None]:
    """From 2.9 the start-up of V-shaped schedules has ops from a rank to itself.

    gloo refuses those. 2.12 and later make them only for stages of other classes.
    """
    name = "_get_init_p2p_neighbors_ops"
    changed = [stage for stage in stages if hasattr(stage, name)]

    def without_own(stage: Any, make: Callable[[], list[dist.P2POp]]) -> Any:
        return lambda: [op for op in make() if op.group_peer != stage.group_rank]

    for stage in changed:
        setattr(stage, name, without_own(stage, getattr(stage, name)))
    try:
        yield
    finally:
        for stage in changed:
            delattr(stage, name)


def add_unshard(orders: dict[int, list[Any]]) -> dict[int, list[Any]]:
    """Let torch add FSDP's actions."""
    add = torch_schedules._add_unshard_reshard
    return {rank: add(order) for rank, order in orders.items()}


class _Works(list[dist.Work]):
    """Several works that are waited for like one."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def batch_p2p_keeping_works(
    ops: list[dist.P2POp], desc: str | None = None
) -> list[dist.Work]:
    """What 2.6's and 2.7's ``_batch_p2p`` should have been: waits for every work."""
    del desc
    return _Works(dist.batch_isend_irecv(ops) if ops else ())


@contextlib.contextmanager
def all_works_kept() -> Iterator[None]:
    """Where torch keeps the last work of a batch only, let it keep all.

    Op by op, through whatever stands for ``_batch_p2p``: batches have one direction here.
    """
    if not loses_works:
        yield
        return
    module: Any = torch_schedules
    original = module._batch_p2p

    def keep_all(ops: list[dist.P2POp], desc: str | None = None) -> _Works:
        works = [original([op], desc=desc) for op in ops]
        return _Works(work for work in works if work is not None)

    module._batch_p2p = keep_all
    try:
        yield
    finally:
        module._batch_p2p = original
