"""Single-stage schedules that run a list of actions: `Schedule1F1B`, `ScheduleGPipe`.

The list is the schedule: torch's constructor, ``step`` and ``eval`` stay, and only the
loop over microbatches is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import schedules as torch_schedules

from pptrace.schedules import _compat
from pptrace.schedules.actions import (
    SENDS,
    Action,
    compute_only,
    forward_only,
    lower,
    order_1f1b,
    order_gpipe,
    with_peers,
)

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["ForwardOnly", "Schedule1F1B", "ScheduleGPipe", "check_n_microbatches"]


def check_n_microbatches(n_microbatches: int) -> None:
    """Refuse what no schedule can run.

    Raises:
        ValueError: fewer than one microbatch.
    """
    if n_microbatches < 1:
        raise ValueError(
            f"n_microbatches must be at least 1, but got {n_microbatches}."
        )


class _Step:
    """One pass over the actions of one stage: posts, waits and computes."""

    def __init__(
        self,
        schedule: Any,
        inputs: tuple[list[Any], list[Any], list[Any] | None],
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        self._schedule = schedule
        self._stage = stage = schedule._stage
        self._inputs = inputs
        self._loss_kwargs = loss_kwargs
        self._forward_options = _compat.forward_options(return_outputs)
        self._works: dict[tuple[str, int], list[dist.Work]] = {}
        self._unposted: dict[tuple[str, int], dict[int, list[dist.P2POp]]] = {}
        self._make_ops: dict[str, tuple[Callable[[int], list[dist.P2POp]], str]] = {
            "RECV_F": (stage.get_fwd_recv_ops, "fwd_recv"),
            "SEND_F": (stage.get_fwd_send_ops, "fwd_send"),
            "RECV_B": (stage.get_bwd_recv_ops, "bwd_recv"),
            "SEND_B": (stage.get_bwd_send_ops, "bwd_send"),
        }

    def run(self, actions: list[Action]) -> None:
        """Do all of it, in order; on return every op is complete.

        Raises:
            RuntimeError: the stage has ops for a peer that the actions do not know.
        """
        for _, kind, microbatch, peer, _ in actions:
            if microbatch is None:
                continue
            if kind == "F":
                self._forward(microbatch)
            elif kind == "B":
                self._backward(microbatch)
            else:
                self._post(kind, microbatch, peer)
        for key in list(self._works):
            self._wait(*key)
        left = [f"{kind}{mb}" for (kind, mb), ops in self._unposted.items() if ops]
        if left:
            raise RuntimeError(
                f"Stage {self._stage.stage_index}: the schedule has no action for some "
                f"ops of {', '.join(left)}."
            )

    def _wait(self, kind: str, microbatch: int) -> None:
        for work in self._works.pop((kind, microbatch), ()):
            work.wait()

    def _post(self, kind: str, microbatch: int, peer: int | None) -> None:
        """Post one message: one batch per peer, never a send beside a receive.

        The send before it is waited for first: it has long been received, and its
        tensor must not stay alive for the whole step.
        """
        make, desc = self._make_ops[kind]
        key = (kind, microbatch)
        if kind in SENDS:
            self._wait(kind, microbatch - 1)
        if peer is None:
            ops = make(microbatch)
            peers = {op.group_peer for op in ops}
            if len(peers) == 1:  # nearly always
                self._works[key] = _compat.post(ops, desc)
                return
            self._works[key] = works = []
            for rank in sorted(peers):
                mine = [op for op in ops if op.group_peer == rank]
                works.extend(_compat.post(mine, desc))
            return
        by_peer = self._unposted.get(key)
        if by_peer is None:
            by_peer = self._unposted[key] = {}
            for op in make(microbatch):
                by_peer.setdefault(op.group_peer, []).append(op)
        mine = by_peer.pop(self._stage.stage_index_to_group_rank[peer], [])
        self._works.setdefault(key, []).extend(_compat.post(mine, desc))

    def _forward(self, microbatch: int) -> None:
        self._wait("RECV_F", microbatch)
        arg_mbs, kwarg_mbs, target_mbs = self._inputs
        output = self._stage.forward_one_chunk(
            microbatch,
            arg_mbs[microbatch],
            kwarg_mbs[microbatch],
            **self._forward_options,
        )
        _compat.compute_loss(
            self._schedule, output, target_mbs, microbatch, self._loss_kwargs
        )

    def _backward(self, microbatch: int) -> None:
        self._wait("RECV_B", microbatch)
        self._stage.backward_one_chunk(
            microbatch,
            loss=self._schedule._maybe_get_loss(self._stage, microbatch),
            last_backward=microbatch == self._schedule._n_microbatches - 1,
        )


class _ByActions:
    """A single-stage schedule of torch's that runs its list of actions."""

    _stage: Any
    _n_microbatches: int
    _num_stages: int
    _has_backward: bool
    _check_inputs: Callable[..., tuple[list[Any], list[Any]]]
    _update_losses: Callable[..., None]

    @staticmethod
    def _order(stage: int, num_stages: int, n: int) -> list[Action]:
        """The actions of one stage."""
        raise NotImplementedError

    def programs(self) -> dict[int, list[Action]]:
        """The actions of every stage, in the order that its rank performs them."""
        order, n = self._order, self._n_microbatches
        programs = {s: order(s, self._num_stages, n) for s in range(self._num_stages)}
        edges = _compat.stage_edges(self._stage)
        if edges is None:
            return programs
        lowered = lower({s: compute_only(p) for s, p in programs.items()}, edges)
        return {stage: with_peers(program) for stage, program in lowered.items()}

    def _actions(self) -> list[Action]:
        """This stage's actions for the step that begins."""
        key = (self._n_microbatches, self._has_backward)
        cached: dict[tuple[int, bool], list[Action]]
        cached = self.__dict__.setdefault("_pptrace_actions", {})
        if key not in cached:
            actions = self.programs()[self._stage.stage_index]
            cached[key] = actions if self._has_backward else forward_only(actions)
        return cached[key]

    def _get_pipeline_order(self) -> dict[int, list[Any]] | None:
        """The compute actions of every rank as torch's own values, for its tools."""
        return _compat.pipeline_order(self.programs())

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        target = target_mbs[0] if target_mbs is not None else None
        _compat.initialize_stage(self, args[0], kwargs[0], target, loss_kwargs)
        step = _Step(self, (args, kwargs, target_mbs), return_outputs, loss_kwargs)
        step.run(self._actions())
        self._update_losses(self._stage, losses)
        if self._has_backward:
            _compat.reduce_gradients(self)


def _constructor(torch_init: Callable[..., None]) -> Callable[..., None]:
    """Torch's constructor, minus its refusal of fewer microbatches than stages."""

    @functools.wraps(torch_init)
    def __init__(  # noqa: N807
        self: Any, stage: Any, n_microbatches: int, *args: Any, **kwargs: Any
    ) -> None:
        check_n_microbatches(n_microbatches)
        n_accepted = max(n_microbatches, stage.num_stages)
        torch_init(self, stage, n_accepted, *args, **kwargs)
        if n_accepted != n_microbatches:
            self._n_microbatches = n_microbatches
            if hasattr(self, "_get_pipeline_order"):  # 2.8, and ours always
                self.pipeline_order = self._get_pipeline_order()

    return __init__


class Schedule1F1B(_ByActions, torch_schedules.Schedule1F1B):
    """1F1B for any number of microbatches, free of deadlock on every transport.

    Torch's own (<https://github.com/pytorch/torchtitan/issues/775>) holds the last
    warm-up send back and fuses it with the first backward's receive; with fewer
    microbatches than stages the neighbour does not, and they never meet. Here no send
    shares a batch with a receive, and both sides of an edge take F before B.
    """

    _order = staticmethod(order_1f1b)
    __init__ = _constructor(torch_schedules.Schedule1F1B.__init__)


class ScheduleGPipe(_ByActions, torch_schedules.ScheduleGPipe):
    """GPipe for any number of microbatches (torch 2.7 to 2.10 refuse n < stages).

    Skip connections are safe in the backward too, and evaluation leaves the gradients
    alone.
    """

    _order = staticmethod(order_gpipe)
    __init__ = _constructor(torch_schedules.ScheduleGPipe.__init__)


class _ScheduleForwardOnly(torch_schedules._ScheduleForwardOnly):
    """Torch's own, minus the refusal of n < stages in torch 2.7 to 2.10."""

    __init__ = _constructor(torch_schedules._ScheduleForwardOnly.__init__)


ForwardOnly = _ScheduleForwardOnly
"""The same under a name that can be imported; torch's own name is private."""
