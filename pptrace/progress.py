"""Plan against fact: how far each rank is in its schedule, and where it left the plan.

The preflight leaves the checker's plan of each schedule beside the black boxes, as JSON
with the ops of one step per rank of the pipeline, in the notation of programs
(``S F0->1``, ``R B0<-1``; ranks counted within the pipeline). A report lays them beside
the ops that each rank has recorded in its current step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pptrace import verdicts
from pptrace.records import Direction, Flag, Kind, Pass, RankLog, Record, ScheduleRun
from pptrace.report import Finding, Report

if TYPE_CHECKING:
    from pptrace.plan import Plan

__all__ = ["Progress", "add_progress", "file_name", "save"]

_PREFIX = "plan-"
_OP = re.compile(r"([SR]) (\S+?)(?:->|<-)(\d+)")

PlanKey = tuple[str, int, int, bool]
"""Schedule, stages, microbatches, forward only."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a rank is in the plan of its current step. Ops in words, global ranks."""

    done: int
    """Ops posted as planned."""
    total: int
    expected: str = ""
    """The next op of the plan; empty at its end."""
    posted: str = ""
    """What the rank posted in its place; empty if it has not left the plan."""

    def __str__(self) -> str:
        at = f"op {self.done} of {self.total}"
        if self.posted:
            return f"{at}, posted {self.posted} where the plan has {self.expected}"
        return f"{at}, next expected {self.expected}" if self.expected else at


def file_name(run: ScheduleRun, *, forward_only: bool) -> str:
    """Name of a schedule's plan in the run's folder."""
    kind = "-eval" if forward_only else ""
    return f"{_PREFIX}{run.name}-S{run.num_stages}-n{run.n_microbatches}{kind}.json"


def save(plan: Plan, run: ScheduleRun, folder: Path, *, forward_only: bool) -> None:
    """Write the ops of a plan, one list per rank of the pipeline.

    Raises:
        OSError: the file cannot be written.
    """
    value = {
        "schedule": run.name,
        "num_stages": run.num_stages,
        "n_microbatches": run.n_microbatches,
        "forward_only": forward_only,
        "ranks": [
            list(_planned_ops(plan.programs[rank])) for rank in sorted(plan.programs)
        ],
    }
    path = folder / file_name(run, forward_only=forward_only)
    path.write_text(json.dumps(value), "utf-8")


def _planned_ops(program: Any) -> Any:
    for instruction in program:
        for op in getattr(instruction, "ops", (instruction,)):
            if getattr(op, "edge", None) and op.edge.pass_ is not Pass.META:
                yield op.text


def add_progress(report: Report, logs: Mapping[int, RankLog], folder: Path) -> Report:
    """The report with each rank's progress, and the first deviation as a finding."""
    plans = _load(folder)
    if not plans:
        return report
    found = {
        rank: progress
        for rank, log in logs.items()
        if (progress := _progress(log, plans)) is not None
    }
    ranks = tuple(
        replace(view, progress=str(found[view.rank])) if view.rank in found else view
        for view in report.ranks
    )
    left = [rank for rank, progress in sorted(found.items()) if progress.posted]
    findings = report.findings
    # What deviates in a hang that is explained already only repeats it.
    if left and not any(f.severity == "error" for f in findings):
        findings = (*findings, _deviation(left, found))
    return replace(report, ranks=ranks, findings=findings)


def _deviation(left: Sequence[int], found: Mapping[int, Progress]) -> Finding:
    verdict = verdicts.VERDICTS[verdicts.LEFT_THE_PLAN]
    first = min(left, key=lambda rank: found[rank].done)
    return Finding(
        code=verdict.code,
        name=verdict.name,
        severity="warning",
        sentence=f"r{first} left its schedule's plan: {found[first]}",
        culprits=(first,),
        evidence=tuple(f"r{rank}: {found[rank]}" for rank in left),
        remedy=verdict.remedy,
    )


def _load(folder: Path) -> dict[PlanKey, list[list[str]]]:
    plans: dict[PlanKey, list[list[str]]] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        try:
            value = json.loads(path.read_text("utf-8"))
            key = (
                str(value["schedule"]),
                int(value["num_stages"]),
                int(value["n_microbatches"]),
                bool(value["forward_only"]),
            )
            plans[key] = [[str(op) for op in ops] for ops in value["ranks"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an unreadable plan costs this view only
    return plans


def _progress(
    log: RankLog, plans: Mapping[PlanKey, list[list[str]]]
) -> Progress | None:
    """Where the rank is, if its step is open and all of its records are there."""
    step, ops = _current_step(log)
    run = next(
        (
            r
            for r in reversed(log.schedules)
            if step is not None
            and (r.name, r.n_microbatches) == (step.text, step.microbatch)
        ),
        None,
    )
    if step is None or run is None or run.group is None or step.done_ns:
        return None
    forward_only = bool(step.flags & Flag.EVAL)
    plan = plans.get((run.name, run.num_stages, run.n_microbatches, forward_only))
    members = run.group[1]
    if plan is None or log.rank not in members:
        return None
    own = members.index(log.rank)
    return _compare(plan[own], ops, members) if own < len(plan) else None


def _current_step(log: RankLog) -> tuple[Record | None, list[Record]]:
    step: Record | None = None
    ops: list[Record] = []
    for record in log.records:
        if record.kind is Kind.STEP:
            step, ops = record, []
        elif record.kind is Kind.OP and record.pass_ in (Pass.F, Pass.B):
            ops.append(record)
    return step, ops


def _compare(
    planned: Sequence[str], ops: Sequence[Record], members: Sequence[int]
) -> Progress:
    total = len(planned)
    for at, (text, record) in enumerate(zip(planned, ops, strict=False)):
        expected = _in_words(text, members)
        if expected != _posted(record):
            return Progress(at, total, expected, _posted(record))
    done = len(ops)
    if done > total:
        return Progress(total, total, "the end of the step", _posted(ops[total]))
    return Progress(
        done, total, _in_words(planned[done], members) if done < total else ""
    )


def _in_words(text: str, members: Sequence[int]) -> str:
    match = _OP.fullmatch(text)
    if match is None:
        return text
    letter, label, peer = match.groups()
    rank = members[int(peer)] if int(peer) < len(members) else peer
    return f"isend {label}→r{rank}" if letter == "S" else f"irecv {label}←r{rank}"


def _posted(record: Record) -> str:
    if record.direction is Direction.SEND:
        return f"isend {record.label}→r{record.peer}"
    return f"irecv {record.label}←r{record.peer}"
