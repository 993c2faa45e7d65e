"""From a schedule class to a plan: each rank's own code, run on stub stages.

The schedule is constructed once and copied for the other ranks, since torch's
constructors build the tables of all ranks; a class with a constructor of its own is
constructed for each rank.
"""

from __future__ import annotations

import copy
import csv
import functools
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from pptrace.compact import Tape
from pptrace.errors import InputError
from pptrace.plan import Action, Leave, Plan, Raise, Step
from pptrace.records import Group, ScheduleRun
from pptrace.schedules._start_up import StartUp, installed_start_up, start_up
from pptrace.schedules._stubs import (
    Direct,
    OwnStage,
    Recorder,
    StubGroup,
    StubStage,
    Symbols,
    recording,
)
from pptrace.schedules.actions import RECEIVES, SENDS, flatten, parse
from pptrace.semantics import Rule

__all__ = [
    "Refused",
    "Setup",
    "StartUp",
    "Table",
    "default_ranks",
    "default_stages_per_rank",
    "default_start_up",
    "installed_rule",
    "read_table",
    "record",
    "torch_schedule",
]

_FORWARD_ONLY = torch_schedules._ScheduleForwardOnly
_LOSS = object()
_MAPPING = "stage_index_to_group_rank"


class Refused(Exception):  # noqa: N818 - torch's refusal is a result, not a fault
    """The constructor refuses this combination; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a schedule is to be run with."""

    num_ranks: int
    num_stages: int
    n_microbatches: int
    rule: Rule
    start_up: StartUp
    eager: bool = False
    is_static: bool = False
    forward_only: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the constructor."""


@functools.cache
def installed_rule() -> Rule:
    """The rule of the installed torch, seen from its code."""
    names = inspect.unwrap(torch_schedules._batch_p2p).__code__.co_names
    return Rule.SPLIT if "isend" in names else Rule.COALESCED


def default_start_up(rule: Rule) -> StartUp:
    """The installed torch's start-up, or that of the releases that had the rule."""
    if rule is installed_rule():
        return installed_start_up()
    return StartUp.VOTES if rule is Rule.SPLIT else StartUp.SHAPES


def record(schedule: type, setup: Setup) -> Plan:
    """Run the schedule's own code for every rank and write down what it does.

    Raises:
        Refused: the constructor raises.
        InputError: the class is no schedule, or its code fails on every rank.
    """
    ranks = tuple(range(setup.num_ranks))
    group = Group(1, "pp", "pp", ranks, backend="nccl", eager=setup.eager)
    symbols = Symbols(setup.n_microbatches)
    is_plain = all(_is_ours(cls.__module__) for cls in schedule.__mro__[:-1])
    recorders = [
        Recorder(StubGroup(group, rank), setup.rule, symbols, is_plain=is_plain)
        for rank in ranks
    ]
    run = _Run(schedule, setup, recorders)
    with recording(recorders[0], schedule.__mro__):
        run.all_ranks()
    return Plan(
        name=f"{schedule.__name__}, {setup.num_stages} stages on {len(ranks)} ranks,"
        f" n={setup.n_microbatches}",
        programs=run.tapes,
        groups=(group,),
        schedules=run.described,
    )


class _Run:
    """One schedule on all ranks."""

    def __init__(
        self, schedule: type, setup: Setup, recorders: Sequence[Recorder]
    ) -> None:
        self._class = schedule
        self._setup = setup
        self._recorders = recorders
        self._is_multi = _is_multi(schedule)
        self._direct = Direct()
        self._accepted = inspect.signature(schedule).parameters
        self._errors: list[BaseException] = []
        self.described: dict[int, tuple[ScheduleRun, ...]] = {}
        self.tapes: dict[int, Tape] = {}
        self._is_plain = _is_ours(_home(schedule, "__init__"))

    def all_ranks(self) -> None:
        """Construct, then run rank after rank."""
        first, mapping = self._construct_first()
        for recorder in self._recorders:
            recorder.begin()
            rank = recorder.group.own_rank
            stages = self._stages(recorder, mapping)
            if self._is_plain:
                schedule = _copy(first)  # which never runs: a step may keep things
            else:
                schedule = self._construct(stages) if rank else first
            self._adopt(schedule, stages)
            self.described[rank] = (self._describe(stages, mapping),)
            self._run(recorder, schedule, stages)
            self.tapes[rank] = recorder.tape([s.stage_index for s in stages])
        if len(self._errors) == len(self._recorders):
            raise _unusable(self._class, self._errors[0]) from self._errors[0]

    # construction

    def _stages(
        self, recorder: Recorder, mapping: Mapping[int, int]
    ) -> list[StubStage]:
        rank = recorder.group.own_rank
        own = sorted(stage for stage, home in mapping.items() if home == rank)
        kind = StubStage if recorder.is_plain else OwnStage
        stages = [kind(i, self._setup.num_stages, recorder) for i in own]
        for stage in stages:
            stage.stage_index_to_group_rank = dict(mapping)
            stage.has_backward = not self._setup.forward_only
        return stages

    def _construct_first(self) -> tuple[Any, dict[int, int]]:
        """Rank 0's schedule, and which rank it says holds each stage.

        V-shaped schedules say so only once they are constructed, from stages whose
        numbers do not matter to them; then those are put right.
        """
        setup = self._setup
        mapping = {s: s % setup.num_ranks for s in range(setup.num_stages)}
        stages = self._stages(self._recorders[0], mapping)
        schedule = self._construct(stages)
        said = _mapping_of(schedule)
        if said and said != mapping:
            mapping = said
            if not self._is_plain or _MAPPING in self._accepted:
                stages = self._stages(self._recorders[0], mapping)
                schedule = self._construct(stages, mapping)
        return schedule, mapping

    def _construct(
        self, stages: list[StubStage], mapping: Mapping[int, int] | None = None
    ) -> Any:
        setup = self._setup
        options = dict(setup.options)
        if mapping is not None and _MAPPING in self._accepted:  # torch 2.6
            options[_MAPPING] = dict(mapping)
        accepted = self._accepted.values()
        if any(p.name == "loss_fn" or p.kind is p.VAR_KEYWORD for p in accepted):
            options.setdefault("loss_fn", lambda *_, **__: _LOSS)
        target: Any = stages if self._is_multi else stages[0]
        try:
            return self._class(target, setup.n_microbatches, **options)
        except TypeError as error:
            if _depth(error) > 2:
                raise Refused(_reason(error)) from error
            raise InputError(
                _place(self._class), f"cannot be constructed: {error}"
            ) from error
        except Exception as error:
            raise Refused(_reason(error)) from error

    def _adopt(self, schedule: Any, stages: list[StubStage]) -> None:
        """Let a schedule be that of another rank."""
        if self._is_multi:
            schedule._stages = stages
            schedule.rank = stages[0].group_rank if stages else 0
        else:
            schedule._stage = stages[0]

    # running

    def _run(self, recorder: Recorder, schedule: Any, stages: list[StubStage]) -> None:
        setup, items = self._setup, recorder.items
        no_targets = isinstance(schedule, _FORWARD_ONLY)
        if setup.forward_only or no_targets:
            schedule._has_backward = False
        has_backward = bool(schedule._has_backward)
        for slot, stage in enumerate(stages):
            stage.has_backward = has_backward
            stage.place(slot)

        def initialize(*_: Any, **__: Any) -> None:
            items.extend(
                start_up(
                    setup.start_up,
                    stages,
                    is_static=setup.is_static,
                    has_backward=has_backward,
                )
            )

        # On the instance: the class, which others use, stays as it is.
        schedule._initialize_stage = schedule._initialize_stages = initialize
        targets = None if no_targets else [None] * setup.n_microbatches
        items.append(Step(0, is_eval=not has_backward))
        try:
            step = self._direct.step(schedule._step_microbatches, recorder)
            step(target_mbs=targets)
        except Exception as error:  # noqa: BLE001 - the schedule's own, so a result
            self._errors.append(error)
            text = _describe_error(error)
            items.append(Leave(text))
            items.append(Raise(text))
        else:
            items.append(Leave())

    def _describe(
        self, stages: list[StubStage], mapping: dict[int, int]
    ) -> ScheduleRun:
        setup = self._setup
        group = self._recorders[0].group.value
        return ScheduleRun(
            name=self._class.__name__,
            n_microbatches=setup.n_microbatches,
            num_stages=setup.num_stages,
            stages=tuple(stage.stage_index for stage in stages),
            stage_to_rank=dict(mapping),
            group=group.key,
            metadata="static" if setup.is_static else "dynamic",
            module=self._class.__module__,
        )


def _mapping_of(schedule: Any) -> dict[int, int]:
    """Which rank holds each stage: who runs its actions, else what the schedule says."""
    order = getattr(schedule, "pipeline_order", None) or {}
    found = {}
    if isinstance(schedule, torch_schedules.PipelineScheduleMulti):
        for rank, actions in order.items():
            for action in actions:
                if action is not None and action.stage_index >= 0:
                    found[action.stage_index] = rank
    said = getattr(schedule, _MAPPING, None)
    return dict(sorted((found or said or {}).items()))


def _is_multi(schedule: type) -> bool:
    if not inspect.isclass(schedule):
        raise InputError(repr(schedule), "is not a class")
    if issubclass(schedule, torch_schedules.PipelineScheduleMulti):
        return True
    if issubclass(schedule, torch_schedules.PipelineScheduleSingle):
        return False
    raise InputError(
        _place(schedule),
        f"{schedule.__name__} is no schedule",
        "it must derive from PipelineScheduleSingle or PipelineScheduleMulti",
    )


def _home(schedule: type, name: str) -> str:
    """The module of the class that defines a method of the schedule."""
    return next(cls.__module__ for cls in schedule.__mro__ if name in vars(cls))


def _is_ours(module: str) -> bool:
    """Whether a module is torch's, pptrace's, or Python's own abc."""
    return module == "abc" or module.startswith(("torch.", "pptrace."))


def _copy(schedule: Any) -> Any:
    """A copy for another rank: tables are shared, what a step fills is not."""
    twin = copy.copy(schedule)
    for name, value in vars(twin).items():
        if isinstance(value, (list, dict, set)) and not value:
            setattr(twin, name, copy.copy(value))
    return twin


# -- what went wrong -----------------------------------------------------------------


def _reason(error: BaseException) -> str:
    """The first paragraph on one line, with the type where it is not the usual one."""
    text = " ".join(str(error).partition("\n\n")[0].split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _describe_error(error: BaseException) -> str:
    head = f"{type(error).__name__}: {error}".strip()
    return f"{head}\n{''.join(traceback.format_exception(error))}"


def _depth(error: BaseException) -> int:
    return len(traceback.extract_tb(error.__traceback__))


def _place(schedule: type) -> str:
    """``file:line`` of a class, as far as that can be found."""
    try:
        file = inspect.getsourcefile(schedule)
        return f"{file}:{inspect.getsourcelines(schedule)[1]}"
    except (OSError, TypeError):
        return schedule.__qualname__


def _unusable(schedule: type, error: BaseException) -> InputError:
    """Its code fails wherever it runs: the last line of it that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_library(f.filename)]
    where = f"{own[-1].filename}:{own[-1].lineno}" if own else _place(schedule)
    return InputError(
        where,
        f"{schedule.__name__} raises on every rank: {_reason(error)}",
        "it runs on stub stages, without tensors",
    )


def _is_library(file: str) -> bool:
    return "/torch/" in file or file.startswith(_HERE)


_HERE = __file__.rpartition("/")[0].rpartition("/")[0] + "/"


# -- schedules from tables -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """A schedule that a CSV file in torch's format describes, and its numbers."""

    schedule: type
    num_ranks: int
    num_stages: int
    n_microbatches: int


def read_table(path: str | Path) -> Table:
    """Read a schedule that torch's ``_dump_csv`` wrote, with messages or without.

    The schedule's class runs it as torch does: `_PipelineScheduleRuntime` loads the
    file, adds the messages where there are none, and performs the actions.

    Raises:
        InputError: the file cannot be read, or a cell is no action; names the line.
    """
    rows = list(_rows(path))
    flat = [action for row in rows for action in flatten(row)]
    if not flat:
        raise InputError(path, "has no action")
    has_messages = any(action.kind in SENDS | RECEIVES for action in flat)
    form = "compute_comms" if has_messages else "compute_only"
    runtime: Any = torch_schedules._PipelineScheduleRuntime

    class ScheduleFromTable(runtime):  # type: ignore[misc]
        def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any) -> None:
            super().__init__(stages, n_microbatches, loss_fn=loss_fn)
            self._load_csv(str(path), format=form)

    ScheduleFromTable.__name__ = Path(path).name
    return Table(
        ScheduleFromTable,
        num_ranks=len(rows),
        num_stages=max(action.stage for action in flat) + 1,
        n_microbatches=1 + max(action.microbatch or 0 for action in flat),
    )


def _rows(path: str | Path) -> Iterator[list[Action]]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            for cells in reader:
                try:
                    row = [parse(cell) for cell in cells if cell.strip()]
                except InputError as error:
                    where = f"{path}:{reader.line_num}"
                    raise InputError(where, str(error)) from None
                if not row:
                    raise InputError(f"{path}:{reader.line_num}", "has no action")
                yield row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(path, f"cannot be read: {error}") from error


# -- schedules by name ---------------------------------------------------------------


def torch_schedule(name: str) -> type:
    """A schedule of torch's by its name, with or without the word Schedule.

    Raises:
        InputError: there is none.
    """
    known = {
        attribute.removeprefix("_").removeprefix("Schedule").lower(): value
        for attribute, value in vars(torch_schedules).items()
        if attribute.removeprefix("_").startswith("Schedule") and inspect.isclass(value)
    }
    key = name.removeprefix("_").lower().removeprefix("schedule")
    if key not in known:
        names = ", ".join(sorted(cls.__name__ for cls in known.values()))
        raise InputError(name, "is no schedule of torch", f"there are {names}")
    return known[key]


def default_stages_per_rank(schedule: type) -> int:
    """Two where a rank has several stages, else one."""
    return 2 if _is_multi(schedule) else 1


def default_ranks(schedule: type, num_stages: int) -> int:
    """Ranks if nobody says how many."""
    return max(1, num_stages // default_stages_per_rank(schedule))
