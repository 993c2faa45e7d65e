"""Multi-stage schedules that take any number of microbatches and can be evaluated.

Torch's order of compute actions is kept, with surplus microbatches taken out; torch's
runtime performs it. What is ours: which order, and the place of sends and receives
where torch's own cannot be trusted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from pptrace.schedules import _compat
from pptrace.schedules.actions import (
    Action,
    compute_only,
    forward_only,
    keep_microbatches,
    lower,
    parse,
    stage_to_rank_of,
)
from pptrace.schedules.single import check_n_microbatches

__all__ = [
    "ScheduleDualPipeV",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "at_least_stages",
    "whole_rounds",
]

_logger = logging.getLogger(__name__)


def whole_rounds(n: int, num_ranks: int) -> int:
    """The least number ≥ ``n`` that the interleaved schedules divide into rounds."""
    while n % max(1, n // num_ranks):
        n += 1
    return n


def at_least_stages(n: int, num_ranks: int) -> int:
    """The least number ≥ ``n`` that DualPipeV, two stages per rank, accepts."""
    return max(n, 2 * num_ranks)


def _any(n: int, num_ranks: int) -> int:
    del num_ranks
    return n


class _ByOrders(torch_schedules._PipelineScheduleRuntime):
    """A multi-stage schedule of torch's with another order of actions.

    Up to torch 2.9 most multi-stage schedules do not run on torch's runtime but step by
    step, with sends and receives in one batch; as it comes first here, they now do.
    """

    _n_microbatches: int
    _has_backward: bool

    def programs(self) -> dict[int, list[Action]]:
        """The actions of every rank, in the order that it performs them."""
        return _parsed(self.pipeline_order_with_comms)

    def _take(self, n_microbatches: int, n_ordered: int) -> None:
        """Order the actions of the first microbatches of a longer schedule."""
        if n_microbatches != n_ordered:
            name = type(self).__name__
            _logger.info(
                "%s: %d microbatches, in the order of the first ones of %d",
                name,
                n_microbatches,
                n_ordered,
            )
        self._n_microbatches = n_microbatches
        orders = {
            rank: keep_microbatches(order, n_microbatches)
            for rank, order in _parsed(self.pipeline_order).items()
        }
        self.pipeline_order = _compat.torch_actions(orders)
        _compat.set_stage_to_rank(self, stage_to_rank_of(orders))
        _compat.prepare_with_comms(self, self.pipeline_order)
        if getattr(self, "_defer_pp_recv", False):
            self.pipeline_order_with_comms = _compat.torch_actions(
                lower(_without_comms(self.programs()), deferred=True)
            )

    @functools.cached_property
    def _forward_program(self) -> dict[int, list[Any]]:
        """What is run where nothing has a gradient."""
        orders = _parsed(self.pipeline_order)
        forward = {rank: forward_only(order) for rank, order in orders.items()}
        unsharded = _compat.add_unshard(_compat.torch_actions(forward))
        deferred = getattr(self, "_defer_pp_recv", False)
        return _compat.torch_actions(lower(_parsed(unsharded), deferred=deferred))

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        with _compat.no_start_up_ops_to_self(self._stages):
            super()._initialize_stages(*args, **kwargs)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        """Run one step; where nothing has a gradient, its forwards alone.

        Torch runs the backward actions of an evaluation too: they fail between two
        stages of one rank, and divide gradients that are there by the microbatches.
        """
        with _compat.all_works_kept():
            if self._has_backward:
                with _compat.scaled_once(self):
                    super()._step_microbatches(*args, **kwargs)
                return
            whole = self.pipeline_order_with_comms
            self.pipeline_order_with_comms = self._forward_program
            try:
                super()._step_microbatches(*args, **kwargs)
            finally:
                self.pipeline_order_with_comms = whole


def _parsed(programs: dict[int, list[Any]]) -> dict[int, list[Action]]:
    return {
        rank: [parse(str(action)) for action in program if action is not None]
        for rank, program in programs.items()
    }


def _without_comms(programs: dict[int, list[Action]]) -> dict[int, list[Action]]:
    return {rank: compute_only(program) for rank, program in programs.items()}


def _constructor(
    torch_init: Callable[..., None], accepted: Callable[[int, int], int]
) -> Callable[..., None]:
    """Torch's constructor for a number of microbatches that it accepts, then ours."""

    @functools.wraps(torch_init)
    def __init__(  # noqa: N807
        self: Any, stages: list[Any], n_microbatches: int, *args: Any, **kwargs: Any
    ) -> None:
        check_n_microbatches(n_microbatches)
        n_ordered = accepted(n_microbatches, stages[0].group_size)
        torch_init(self, stages, n_ordered, *args, **kwargs)
        on_runtime = hasattr(self, "pipeline_order_with_comms")
        deferred = getattr(self, "_defer_pp_recv", False)
        if n_ordered != n_microbatches or not on_runtime or deferred:
            self._take(n_microbatches, n_ordered)

    return __init__


class ScheduleLoopedBFS(_ByOrders, torch_schedules.ScheduleLoopedBFS):
    """Torch's order; evaluation runs forwards alone, deferred receives are safe."""

    __init__ = _constructor(torch_schedules.ScheduleLoopedBFS.__init__, _any)


class ScheduleInterleaved1F1B(_ByOrders, torch_schedules.ScheduleInterleaved1F1B):
    """Interleaved 1F1B for microbatches that do not divide into whole rounds too.

    They are ordered as the first ones of the next number that does: the last round is
    just shorter.
    """

    __init__ = _constructor(
        torch_schedules.ScheduleInterleaved1F1B.__init__, whole_rounds
    )


class ScheduleInterleavedZeroBubble(
    _ByOrders, torch_schedules.ScheduleInterleavedZeroBubble
):
    """Interleaved zero bubble for microbatches that make no whole rounds too."""

    __init__ = _constructor(
        torch_schedules.ScheduleInterleavedZeroBubble.__init__, whole_rounds
    )


class ScheduleZBVZeroBubble(_ByOrders, torch_schedules.ScheduleZBVZeroBubble):
    """Torch's order; can be evaluated, and run without a loss function."""

    __init__ = _constructor(torch_schedules.ScheduleZBVZeroBubble.__init__, _any)


if hasattr(torch_schedules, "ScheduleDualPipeV"):  # 2.9

    class ScheduleDualPipeV(_ByOrders, torch_schedules.ScheduleDualPipeV):
        """DualPipeV for fewer microbatches than stages too, and for evaluation.

        Fewer are ordered as the first ones of as many as there are stages.
        """

        __init__ = _constructor(
            torch_schedules.ScheduleDualPipeV.__init__, at_least_stages
        )
