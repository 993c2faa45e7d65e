"""Will it hang: a schedule or a program checked before any process is started.

A plan comes from the schedule's own code or from a file; the rules of
`pptrace.semantics` decide whether it can end; and what would be in the black boxes is
read by the same diagnosis as after a real hang. Exact under those rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import gc
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pptrace import verdicts
from pptrace.dryrun import DryRun, dry_run
from pptrace.errors import InputError
from pptrace.plan import Plan
from pptrace.records import format_ranks
from pptrace.rendezvous import meets_in_order
from pptrace.report import Finding, RankView, Report
from pptrace.semantics import Host, Rule
from pptrace.simulation import EventKind
from pptrace.timing import Timing, play

__all__ = [
    "CheckResult",
    "Conditions",
    "check",
    "check_csv",
    "check_plan",
    "find_schedule",
    "sweep",
]

_TIME = re.compile(r" for \d+\.\d s| at \d\d:\d\d:\d\d UTC")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which rules a schedule is checked; see `check` for each."""

    rule: Rule | str | None = None
    eager: bool = False
    metadata: str = "dynamic"
    host: Host | str = Host.ASYNC
    preconnect: bool = False
    start_up: str | None = None
    forward_only: bool = False


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    ``plan`` is what every rank would do; None where torch refuses to construct the
    schedule. ``run`` is the simulation, where one was needed.
    """

    report: Report
    plan: Plan | None = None
    run: DryRun | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """Nothing wrong; notes do not count."""
        return self.report.exit_code == 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """As in a post-mortem: the verdict first."""
        return self.report.findings

    @functools.cached_property
    def timing(self) -> Timing | None:
        """The plan in unit time, as far as it gets."""
        if self.plan is None:
            return None
        computed = None if self.run is None else _computed(self.run)
        return play(self.plan, computed)

    @property
    def bubble_share(self) -> float | None:
        """Idle share of all rank-time in unit time (F, I, W: 1; B: 2; messages: 0)."""
        return self.timing.bubble_share if self.timing and self.ok else None

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """By rank: most microbatches whose forward is done and backward is not."""
        return self.timing.peak_in_flight if self.timing else {}

    def timeline(self, width: int = 100) -> str:
        """Ranks × time as text; a rank that gets stuck says where."""
        if self.timing is None:
            return ""
        marks = {
            view.rank: f"✗ {view.doing}"
            for view in self.report.ranks
            if self.run is not None and view.state not in ("exited", "missing")
        }
        return self.timing.render(width, marks=marks)


def check(
    schedule: type | str,
    *,
    num_stages: int,
    n_microbatches: int,
    num_ranks: int | None = None,
    rule: Rule | str | None = None,
    eager: bool = False,
    metadata: str = "dynamic",
    host: Host | str = Host.ASYNC,
    preconnect: bool = False,
    start_up: str | None = None,
    forward_only: bool = False,
    **options: Any,
) -> CheckResult:
    """Run a schedule's own code on stub stages and say whether it can hang on NCCL.

    Milliseconds; no process, no GPU, no tensor. A process group that exists is not
    touched.

    Args:
        schedule: a class derived from torch's, or a name: torch's ("1F1B"), or
            "module:Class".
        num_stages: stages of the whole pipeline.
        n_microbatches: microbatches per step.
        num_ranks: ranks of the pipeline; default: one stage each for single-stage
            schedules, two for the others.
        rule: how ``_batch_p2p`` issues ops: "split" (torch 2.13 and later) or
            "coalesced" (2.8 and before); default: as the installed torch does.
        eager: the group is set up at creation (``init_process_group(device_id=...)``).
        metadata: "dynamic" (stages find out shapes at the start) or "static" (given).
        host: what ``wait()`` does: "async" as on CUDA, "blocking" as on gloo.
        preconnect: every communicator and edge has been used before the first step.
        start_up: what is exchanged before the first microbatch: "votes" (torch 2.12 to
            2.14), "neighbours" (2.9 to 2.11), "shapes" (up to 2.8); default: what goes
            with the rule.
        forward_only: check ``eval()`` in place of ``step()``.
        options: further arguments of the schedule's constructor.

    Raises:
        InputError: the schedule cannot be found or used, or a number makes no sense.
    """
    from pptrace.schedules import recording

    cls = find_schedule(schedule) if isinstance(schedule, str) else schedule
    conditions = Conditions(
        rule, eager, metadata, host, preconnect, start_up, forward_only
    )
    ranks = num_ranks or recording.default_ranks(cls, num_stages)
    return _check(cls, (ranks, num_stages, n_microbatches), conditions, options)


def check_csv(path: str | Path, conditions: Conditions | None = None) -> CheckResult:
    """Check a schedule that torch wrote as CSV, with messages or without them.

    Raises:
        InputError: the file cannot be read or is malformed; names the line.
    """
    from pptrace.schedules import recording

    table = recording.read_table(path)
    numbers = (table.num_ranks, table.num_stages, table.n_microbatches)
    return _check(table.schedule, numbers, conditions or Conditions())


def sweep(
    schedule: type | str,
    num_ranks: Iterable[int],
    n_microbatches: Iterable[int],
    *,
    stages_per_rank: int | None = None,
    conditions: Conditions | None = None,
) -> dict[tuple[int, int], CheckResult]:
    """Check a schedule for all these numbers of ranks and of microbatches.

    Returns:
        The result by (ranks, microbatches).

    Raises:
        InputError: as `check`.
    """
    from pptrace.schedules import recording

    cls = find_schedule(schedule) if isinstance(schedule, str) else schedule
    per_rank = stages_per_rank or recording.default_stages_per_rank(cls)
    return {
        (ranks, n): _check(
            cls, (ranks, ranks * per_rank, n), conditions or Conditions()
        )
        for ranks, n in itertools.product(tuple(num_ranks), tuple(n_microbatches))
    }


def _check(
    cls: type,
    numbers: tuple[int, int, int],
    conditions: Conditions,
    options: Mapping[str, Any] | None = None,
) -> CheckResult:
    """Check for these ranks, stages and microbatches."""
    from pptrace.schedules import recording

    for name, number in zip(("ranks", "stages", "microbatches"), numbers, strict=True):
        if number < 1:
            raise InputError(f"{number} {name}", "is too few")
    given = conditions.rule
    rule = _choice("rule", Rule, given) if given else recording.installed_rule()
    setup = recording.Setup(
        *numbers,
        rule=rule,
        start_up=_choice("start_up", recording.StartUp, conditions.start_up)
        if conditions.start_up
        else recording.default_start_up(rule),
        eager=conditions.eager,
        is_static=_is_static(conditions.metadata),
        forward_only=conditions.forward_only,
        options=options or {},
    )
    with _no_collection():
        try:
            plan = recording.record(cls, setup)
        except recording.Refused as refusal:
            return _refused(cls, setup, str(refusal))
        return check_plan(plan, host=conditions.host, preconnect=conditions.preconnect)


def check_plan(
    plan: Plan, *, host: Host | str = Host.ASYNC, preconnect: bool = False
) -> CheckResult:
    """Say whether a plan can hang; see `check` for the arguments."""
    chosen = _choice("host", Host, host)
    with _no_collection():
        if meets_in_order(plan, preconnected=preconnect):
            return CheckResult(_report(plan.ranks), plan)
        run = dry_run(plan, host=chosen, preconnected=preconnect)
        return CheckResult(_diagnose(run), plan, run)


# -- reports -----------------------------------------------------------------------


def _diagnose(run: DryRun) -> Report:
    from pptrace.diagnosis import diagnose

    report = diagnose(run.logs, now_wall_ns=run.now_wall_ns, run="")
    findings = report.findings
    if run.simulation.is_deadlock and not findings:
        findings = (_unexplained(run),)
    return _timeless(dataclasses.replace(report, created=_now(), findings=findings))


def _timeless(report: Report) -> Report:
    """The report without ages: the times of a dry run are made up."""

    def strip(lines: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_TIME.sub("", line) for line in lines)

    return dataclasses.replace(
        report,
        findings=tuple(
            dataclasses.replace(
                finding,
                sentence=_TIME.sub("", finding.sentence),
                evidence=strip(finding.evidence),
            )
            for finding in report.findings
        ),
        ranks=tuple(
            dataclasses.replace(view, since_s=None, last_record_s=None, host="", pid=0)
            for view in report.ranks
        ),
        pending=tuple(dataclasses.replace(op, age_s=None) for op in report.pending),
        chain=strip(report.chain),
    )


def _unexplained(run: DryRun) -> Finding:
    stuck = sorted({b.rank for b in run.simulation.blocked})
    verdict = verdicts.VERDICTS[verdicts.UNDETERMINED]
    return Finding(
        code=verdict.code,
        name=verdict.name,
        severity="error",
        sentence=f"the plan does not end: ranks {format_ranks(stuck)} wait for ever",
        victims=tuple(stuck),
        evidence=tuple(
            f"r{b.rank}: {b.obstacle.value}" for b in run.simulation.blocked
        ),
        remedy=verdict.remedy,
    )


def _refused(cls: type, setup: Any, reason: str) -> CheckResult:
    verdict = verdicts.VERDICTS[verdicts.REFUSED]
    instead = _accepting(cls, setup)
    remedy = (f"use {instead}: it takes these numbers",) if instead else ()
    finding = Finding(
        code=verdict.code,
        name=verdict.name,
        severity="error",
        sentence=f"torch refuses to construct {cls.__name__}: {reason}",
        remedy=(*remedy, *verdict.remedy),
    )
    # No process would get as far as to have a state.
    report = Report("", _now(), setup.num_ranks, findings=(finding,), ranks=())
    return CheckResult(report)


def _accepting(cls: type, setup: Any) -> str | None:
    """The fixed schedule of the same name, if it takes what torch's refuses."""
    from pptrace import schedules
    from pptrace.schedules import recording

    fixed = getattr(schedules, cls.__name__, None)
    if not cls.__module__.startswith("torch.") or not isinstance(fixed, type):
        return None
    try:
        if not check_plan(recording.record(fixed, setup)).ok:
            return None
    except (recording.Refused, InputError):
        return None
    return f"pptrace.schedules.{cls.__name__}"


def _report(ranks: Iterable[int]) -> Report:
    views = tuple(RankView(rank, "exited", "ends", None) for rank in ranks)
    return Report(
        run="",
        created=_now(),
        world_size=len(views),
        findings=(),
        ranks=views,
    )


def _now() -> str:
    now = dt.datetime.now(dt.timezone.utc)
    return now.isoformat(timespec="seconds").replace("+00:00", "Z")


def _computed(run: DryRun) -> Mapping[int, int]:
    counts = dict.fromkeys(run.logs, 0)
    for kind, rank, _ in run.simulation.events:
        if kind is EventKind.COMPUTED:
            counts[rank] += 1
    return counts


# -- arguments ---------------------------------------------------------------------


def find_schedule(name: str) -> type:
    """A schedule class by torch's name, as ``module:Class`` or ``file.py:Class``.

    Modules of the current folder are found, as with ``python -m``.

    Raises:
        InputError: there is none.
    """
    module, colon, attribute = name.rpartition(":")
    if not colon:
        from pptrace.schedules import recording

        return recording.torch_schedule(name)
    try:
        found: Any = _module(module)
    except Exception as error:
        raise InputError(
            _failing_line(error, module), f"cannot be imported: {_one_line(error)}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(module, f"has no {attribute}")
        found = getattr(found, part)
    if not isinstance(found, type):
        raise InputError(name, "is not a class")
    return found


def _module(name: str) -> Any:
    """The module of a name, or of a file; the current folder is looked at last."""
    if name.endswith(".py"):
        path = Path(name).resolve()
        # Its classes' home is looked up by name, which must not be another module's.
        alias = path.stem if path.stem not in sys.modules else f"{path.stem}@{path}"
        spec: Any = importlib.util.spec_from_file_location(alias, path)
        module = sys.modules[alias] = importlib.util.module_from_spec(spec)
        try:
            with _importable(path.parent):
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[alias]
            raise
        return module
    with _importable(Path.cwd()):
        return importlib.import_module(name)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported meanwhile, after all others."""
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _failing_line(error: Exception, module: str) -> str:
    """``file:line`` of the last frame that is a module's and not the import system's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    where, frame = module, error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith("<") and "importlib" not in file and file != __file__:
            where = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return where


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _choice(name: str, kind: Any, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        allowed = " or ".join(member.value for member in kind)
        raise InputError(f"{name} {value!r}", f"is not {allowed}") from None


def _is_static(metadata: str) -> bool:
    if metadata not in ("static", "dynamic"):
        raise InputError(f"metadata {metadata!r}", "is not static or dynamic")
    return metadata == "static"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from scanning what is only growing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
