"""Preflight: the checker run on the real schedule, at its first step.

``warn`` does it in the monitor thread of the pipeline's first rank, off the step's
path; ``raise`` does it on every rank before the first step, since all ranks must raise
alike. A schedule too large for the budget is skipped with a note.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import schedules

from pptrace import progress
from pptrace.errors import PptraceError, PreflightError
from pptrace.hooks.recorder import Recorder
from pptrace.records import ScheduleRun
from pptrace.report import Finding

if TYPE_CHECKING:
    from pptrace.plan import Plan

__all__ = ["Preflight"]

logger = logging.getLogger("pptrace")

_NS_PER_OP = 40_000
"""Rough cost of checking one op on a slow core, for the budget."""


@dataclass(frozen=True)
class _Job:
    schedule: type
    run: ScheduleRun
    is_eager: bool
    forward_only: bool


class Preflight:
    """Which schedules are still to be checked, and the checking."""

    def __init__(self, recorder: Recorder, mode: str, budget_s: float) -> None:
        self._recorder = recorder
        self._mode = mode
        self._budget_s = budget_s
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()

    def add(
        self, schedule: Any, run: ScheduleRun, *, is_eager: bool, forward_only: bool
    ) -> None:
        """A schedule is about to make its first step.

        Raises:
            PreflightError: mode ``raise`` and the check finds an error.
        """
        if self._mode == "off" or run.num_stages < 2:
            return
        job = _Job(type(schedule), run, is_eager, forward_only)
        if self._mode == "raise":
            if wrong := self._check(job):
                raise PreflightError(_message(job, wrong))
        elif 0 in run.stages:
            self._jobs.put(job)

    def work(self) -> None:
        """Check what has been added; called by the monitor thread."""
        while not self._jobs.empty():
            job = self._jobs.get()
            if wrong := self._check(job):
                message = _message(job, wrong)
                self._recorder.note(message)
                logger.warning("pptrace: %s", message)

    def _check(self, job: _Job) -> list[Finding]:
        from pptrace.checker import check

        run = job.run
        ranks = len(set(run.stage_to_rank.values())) or run.num_stages
        cost_s = 4 * run.num_stages * run.n_microbatches * _NS_PER_OP / 1e9
        if cost_s > self._budget_s:
            self._recorder.note(
                f"preflight skipped: {run.name} with {run.num_stages} stages and "
                f"n={run.n_microbatches} would take more than {self._budget_s:g} s; "
                "run `pptrace check` instead"
            )
            return []
        schedule = _checkable(job.schedule)
        if schedule is None:
            self._recorder.note(
                f"preflight skipped: {run.name} has code of its own, which is not run "
                "inside the job; run `pptrace check` on it"
            )
            return []
        try:
            result = check(
                schedule,
                num_stages=run.num_stages,
                n_microbatches=run.n_microbatches,
                num_ranks=ranks,
                rule=self._recorder.rule,
                eager=job.is_eager,
                metadata=run.metadata or "dynamic",
                forward_only=job.forward_only,
            )
        except PptraceError as error:
            self._recorder.note(f"preflight skipped: {error}")
            return []
        if result.plan is None:
            # Constructed anew with plain arguments it refuses; the real one exists.
            self._recorder.note(f"preflight skipped: {run.name} is made otherwise")
            return []
        self._save_plan(result.plan, job)
        return [f for f in result.findings if f.severity == "error"]

    def _save_plan(self, plan: Plan, job: _Job) -> None:
        """Leave the plan beside the black boxes: a report shows progress against it."""
        if 0 in job.run.stages:
            with contextlib.suppress(OSError):
                folder = self._recorder.box.path.parent
                progress.save(plan, job.run, folder, forward_only=job.forward_only)


_TRUSTED = ("torch.distributed.pipelining.", "pptrace.schedules.")


def _checkable(schedule: type) -> type | None:
    """A class that runs nothing but torch's code and ours; None if there is none.

    A user's subclass that only has a constructor of its own, say to get round torch's
    guard, is stood for by its base class with the guard taken out.
    """
    own = []
    for base in schedule.__mro__:
        if base.__module__.startswith(_TRUSTED):
            break
        own.append(base)
    else:
        return None
    allowed = {"__init__", "__module__", "__doc__", "__qualname__"}
    names = {name for cls in own for name in vars(cls)} - allowed
    if any(not (n.startswith("__") or n == "_abc_impl") for n in names):
        return None
    if not issubclass(base, schedules.PipelineScheduleSingle):
        return base

    def unguarded(self: Any, stage: Any, n_microbatches: int, **options: Any) -> None:
        base.__init__(self, stage, max(n_microbatches, stage.num_stages), **options)
        self._n_microbatches = n_microbatches

    return type(schedule.__name__, (base,), {"__init__": unguarded})


def _message(job: _Job, wrong: list[Finding]) -> str:
    first = wrong[0]
    return (
        f"preflight: {job.run.name} with {job.run.num_stages} stages and "
        f"n={job.run.n_microbatches} hangs on NCCL (ranks counted within the pipeline): {first.code} {first.name}: "
        f"{first.sentence}. What to do: " + "; ".join(first.remedy)
    )
