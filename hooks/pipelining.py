"""Hooks on ``torch.distributed.pipelining``: batches, chunks and steps.

They give the ops below (`pptrace.hooks.p2p`) their meaning: stage, microbatch, F or B,
the schedule's ``desc``, and which step they belong to.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining import schedules

from pptrace.errors import PreflightError
from pptrace.hooks import torch_compat
from pptrace.hooks.p2p import open_batch, run_batch
from pptrace.hooks.patching import PatchList
from pptrace.hooks.state import Active, active, fail_open, guarded
from pptrace.records import Pass, ScheduleRun

__all__ = ["install"]


def install(patches: PatchList) -> None:
    """Install the pipelining hooks."""
    patches.replace_function(schedules, "_batch_p2p", _batch_p2p)
    stage = torch_compat.stage_base()
    _install_chunks(patches, stage)
    for name, letter in torch_compat.P2P_OPS_METHODS:
        label = functools.partial(_p2p_ops, pass_=int(Pass[letter]))
        patches.replace(stage, name, label)
    for base in torch_compat.schedule_bases():
        patches.replace(base, "step", _step)
        for name in torch_compat.START_UP_METHODS:
            patches.replace(base, name, _start_up)


def _install_chunks(patches: PatchList, stage: type) -> None:
    patches.replace(stage, "forward_one_chunk", _forward_one_chunk)
    patches.replace(stage, "backward_one_chunk", _backward_one_chunk)
    patches.replace(stage, "backward_weight_one_chunk", _backward_weight_one_chunk)


# -- batches -----------------------------------------------------------------------


def _batch_p2p(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _batch_p2p(p2p_ops: Any, desc: str | None = None) -> Any:
        on = active("batch")
        if on is None or not p2p_ops:
            return original(p2p_ops, desc)
        try:
            batch = open_batch(on, p2p_ops, desc)
            # Under emulation the rule says what one call is, whatever torch this is.
            batch.coalesced = (
                on.emulator is not None and on.recorder.rule == "coalesced"
            )
            call = functools.partial(original, p2p_ops, desc)
            if on.emulator is not None and on.recorder.rule == "split":
                call = functools.partial(
                    torch_compat.split_batch_p2p, original, p2p_ops
                )
        except Exception as error:  # noqa: BLE001
            fail_open(on, "batch", error)
            return original(p2p_ops, desc)
        return run_batch(on, batch, call)

    return _batch_p2p


def _p2p_ops(original: Callable[..., Any], *, pass_: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def p2p_ops(self: Any, *args: Any, **kwargs: Any) -> Any:
        ops = original(self, *args, **kwargs)
        on = active("labels")
        if on is None:
            return ops
        try:
            chunk_id = int(args[0] if args else next(iter(kwargs.values())))
            for index, op in enumerate(ops):
                op._pptrace_label = (pass_, self.stage_index, chunk_id, index)
        except Exception as error:  # noqa: BLE001
            fail_open(on, "labels", error)
        return ops

    return p2p_ops


# -- chunks ------------------------------------------------------------------------


def _forward_one_chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_one_chunk(
        self: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        call = functools.partial(original, self, fwd_chunk_id, *args, **kwargs)
        return _action(call, Pass.F, self, fwd_chunk_id)

    return forward_one_chunk


def _backward_one_chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward_one_chunk(
        self: Any,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call = functools.partial(
            original, self, bwd_chunk_id, loss, full_backward, *args, **kwargs
        )
        return _action(call, Pass.B if full_backward else Pass.I, self, bwd_chunk_id)

    return backward_one_chunk


def _backward_weight_one_chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward_weight_one_chunk(
        self: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        call = functools.partial(original, self, bwd_chunk_id, *args, **kwargs)
        return _action(call, Pass.W, self, bwd_chunk_id)

    return backward_weight_one_chunk


def _action(call: Callable[[], Any], pass_: Pass, stage: Any, chunk_id: int) -> Any:
    on = active("chunk")
    if on is None:
        return call()
    try:
        seq = on.recorder.begin_action(int(pass_), stage.stage_index, chunk_id)
    except Exception as error:  # noqa: BLE001
        fail_open(on, "chunk", error)
        return call()
    try:
        result = call()
    except BaseException as error:
        guarded(on, "chunk", on.recorder.end_action, seq, error)
        raise
    guarded(on, "chunk", on.recorder.end_action, seq, None)
    return result


# -- steps -------------------------------------------------------------------------


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        on = active("step")
        if on is None:
            return original(self, *args, **kwargs)
        began = time.monotonic_ns()
        try:
            seq = _begin_step(on, self)
        except PreflightError:
            raise
        except Exception as error:  # noqa: BLE001
            fail_open(on, "step", error)
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            guarded(on, "step", on.recorder.end_step, seq, began, error)
            guarded(on, "step", on.on_exception, error)
            raise
        guarded(on, "step", on.recorder.end_step, seq, began, None)
        return result

    return step


def _begin_step(on: Active, schedule: Any) -> int:
    stages = torch_compat.stages_of(schedule)
    for stage in stages:
        kind = type(stage)
        # A subclass that overrides a chunk method without calling ours.
        if kind not in on.chunk_hooked:
            on.chunk_hooked.add(kind)
            for owner in kind.__mro__:
                if owner is torch_compat.stage_base():
                    break
                _install_chunks(on.patches, owner)
    has_backward = bool(getattr(schedule, "_has_backward", True))
    n_microbatches = int(schedule._n_microbatches)
    key = (id(schedule), n_microbatches)
    if on.described.get(key, (None,))[0] is not type(schedule):
        run = _describe(schedule, stages, n_microbatches)
        on.described[key] = (type(schedule), on.recorder.box.schedule(run))
        group = getattr(stages[0], "group", None) if stages else None
        state = on.recorder.group_state(group or c10d._get_default_group())
        on.preflight.add(
            schedule,
            run,
            is_eager=state.value.eager,
            forward_only=not has_backward,
        )
    return on.recorder.begin_step(
        n_microbatches=n_microbatches,
        stage=stages[0].stage_index if stages else -1,
        schedule=on.described[key][1],
        is_eval=not has_backward,
    )


def _describe(schedule: Any, stages: list[Any], n_microbatches: int) -> ScheduleRun:
    kind = type(schedule)
    first = stages[0] if stages else None
    group = getattr(first, "group", None) or c10d._get_default_group()
    mapping = getattr(first, "stage_index_to_group_rank", None) or {}
    return ScheduleRun(
        name=kind.__name__,
        module=kind.__module__,
        n_microbatches=n_microbatches,
        num_stages=int(getattr(first, "num_stages", 0)),
        stages=tuple(int(s.stage_index) for s in stages),
        stage_to_rank={int(s): int(r) for s, r in mapping.items()},
        group=(str(group.group_name), tuple(c10d.get_process_group_ranks(group))),
        metadata=torch_compat.metadata_mode(first),
    )


def _start_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """The exchange before the first microbatch: its ops carry ``Pass.META``."""

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> Any:
        on = active("start-up")
        if on is None:
            return original(self, *args, **kwargs)
        context = on.recorder.context
        outer, context.pass_ = context.pass_, int(Pass.META)
        try:
            return original(self, *args, **kwargs)
        finally:
            context.pass_ = outer

    return initialize
