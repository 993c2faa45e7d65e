"""Numbers that go together: what will fail for a batch size, and what will not.

Answers the cause behind shape mismatches and "Expecting N arg_mbs but got M": a batch
that does not divide into the microbatches, or has fewer rows than there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from pptrace.errors import InputError
from pptrace.schedules.actions import Action, measure, order_1f1b, order_gpipe

__all__ = ["Advice", "Setting", "advise", "programs"]

_SINGLE = {"1f1b": order_1f1b, "gpipe": order_gpipe}
_NAMES = {
    name.lower(): name
    for name in (
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "LoopedBFS",
        "ZBVZeroBubble",
        "DualPipeV",
    )
}
_V_SHAPED = {"zbvzerobubble", "dualpipev"}


def _canonical(schedule: str) -> str:
    name = schedule.lower()
    name = name.removeprefix("schedule")
    if name not in _NAMES:
        known = ", ".join(_NAMES.values())
        raise InputError(repr(schedule), "is no schedule of torch's", f"known: {known}")
    return name


class _StubStage:
    """As much of a stage as torch's constructors look at."""

    submod = None
    has_backward = False

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = num_ranks
        self.group_rank = 0
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.stage_index_to_group_rank = {s: s % num_ranks for s in range(num_stages)}


def programs(
    schedule: str,
    num_ranks: int,
    n_microbatches: int,
    stages_per_rank: int | None = None,
) -> dict[int, list[Action]]:
    """The actions of every rank of a fixed schedule, without running anything.

    Args:
        schedule: as for `get_schedule_class`: "1F1B", "Interleaved1F1B", ...
        num_ranks: size of the pipeline's process group.
        n_microbatches: at least 1.
        stages_per_rank: 1 for single-stage schedules, else 2 by default.

    Raises:
        InputError: no such schedule, or a number that no schedule can have.
    """
    name = _canonical(schedule)
    for what, value in (("ranks", num_ranks), ("microbatches", n_microbatches)):
        if value < 1:
            raise InputError(f"{value} {what}", "is too few")
    per_rank = stages_per_rank or (1 if name in _SINGLE else 2)
    allowed = {1} if name in _SINGLE else {2} if name in _V_SHAPED else None
    if allowed and per_rank not in allowed:
        (number,) = allowed
        raise InputError(
            f"{per_rank} stages per rank", f"{_NAMES[name]} has exactly {number}"
        )
    if name in _SINGLE:
        order = _SINGLE[name]
        return {s: order(s, num_ranks, n_microbatches) for s in range(num_ranks)}
    from pptrace.schedules.registry import get_schedule_class

    num_stages = num_ranks * per_rank
    mine = [0, num_stages - 1] if name in _V_SHAPED else range(0, num_stages, num_ranks)
    stages = [_StubStage(index, num_stages, num_ranks) for index in mine]
    schedule_class = get_schedule_class(_NAMES[name])
    found: dict[int, list[Action]]
    found = schedule_class(stages, n_microbatches).programs()
    return found


@dataclass(frozen=True, slots=True)
class Setting:
    """A combination that runs, and what it costs."""

    schedule: str
    batch_size: int
    n_microbatches: int
    bubble_share: float
    """Idle rank-time over all rank-time, where a backward takes twice a forward."""
    needs_fixed: bool
    """Whether only `pptrace.schedules` runs it: torch's own refuses, or hangs."""

    def __str__(self) -> str:
        whose = "pptrace.schedules" if self.needs_fixed else "torch's or pptrace's"
        return (
            f"{self.schedule} ({whose}): batch {self.batch_size}, "
            f"{self.n_microbatches} microbatches of "
            f"{self.batch_size // self.n_microbatches}, "
            f"bubble {self.bubble_share:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """What is wrong with a combination, and the nearest ones that are right."""

    problems: tuple[str, ...]
    """What will fail, in the order in which it would; empty if nothing will."""
    settings: tuple[Setting, ...]
    """First the combination asked about, if it runs; then the nearest that do."""

    @property
    def ok(self) -> bool:
        """Whether the combination runs with torch's own schedule."""
        return not self.problems

    def __str__(self) -> str:
        lines = [f"- {problem}" for problem in self.problems] or ["nothing will fail"]
        return "\n".join([*lines, *(f"  {setting}" for setting in self.settings)])


def advise(
    batch_size: int,
    n_microbatches: int,
    num_stages: int,
    schedule: str,
    *,
    stages_per_rank: int | None = None,
) -> Advice:
    """Say what will fail for these numbers, and the nearest ones that will not.

    Args:
        batch_size: rows of the batch that ``step`` is given, on one pipeline.
        n_microbatches: as given to the schedule.
        num_stages: stages of the whole pipeline.
        schedule: as for `get_schedule_class`: "1F1B", "Interleaved1F1B", ...
        stages_per_rank: 1 for single-stage schedules, else 2 by default.

    Raises:
        InputError: no such schedule; no stage; or stages that do not divide over ranks.
    """
    name = _canonical(schedule)
    per_rank = stages_per_rank or (1 if name in _SINGLE else 2)
    if num_stages < 1 or num_stages % per_rank:
        raise InputError(
            f"{num_stages} stages", f"do not divide over ranks of {per_rank}"
        )
    ranks = num_stages // per_rank
    problems = [
        *_batch_problems(batch_size, n_microbatches),
        *_torch_problems(name, n_microbatches, ranks, num_stages),
    ]

    def setting(batch: int, n: int) -> Setting:
        share = measure(programs(name, ranks, n, per_rank)).bubble_share
        refused = bool(_torch_problems(name, n, ranks, num_stages))
        return Setting(_NAMES[name], batch, n, share, refused)

    wanted: list[tuple[int, int]] = []
    if not _batch_problems(batch_size, n_microbatches):
        wanted.append((batch_size, n_microbatches))
    if problems:
        wanted += _nearest(batch_size, n_microbatches, name, ranks, num_stages)
    return Advice(
        tuple(problems), tuple(setting(*pair) for pair in dict.fromkeys(wanted))
    )


def _batch_problems(batch_size: int, n: int) -> list[str]:
    if n < 1:
        return [f"{n} microbatches: no schedule can run fewer than 1"]
    if batch_size < n:
        too_few = f"batch of {batch_size} has fewer rows than there are microbatches"
        return [f"{too_few}: torch raises 'Expecting {n} arg_mbs but got {batch_size}'"]
    rows, extra = divmod(batch_size, n)
    if not extra:
        return []
    uneven = f"{extra} of them have {rows + 1} rows, the others {rows}"
    why = f"{uneven}, but every stage expects the shape of the first"
    return [f"batch of {batch_size} does not divide into {n} microbatches: {why}"]


def _torch_problems(name: str, n: int, ranks: int, num_stages: int) -> list[str]:
    """What torch's own schedule does not do for this n; the fixed one does."""
    if n < 1:
        return []
    rounds = max(1, n // ranks)
    if name in {"1f1b", "dualpipev"} and n < num_stages:
        why = f"on {num_stages} stages"
        if name == "1f1b":
            why += ", or hangs where it does not"
    elif name.startswith("interleaved") and n % rounds:
        why = f"on {ranks} ranks: not a multiple of its {rounds} rounds"
    else:
        return []
    microbatches = "1 microbatch" if n == 1 else f"{n} microbatches"
    refused = f"torch's {_NAMES[name]} refuses {microbatches} {why}"
    return [f"{refused}; that of pptrace.schedules runs it"]


def _nearest(
    batch_size: int, n: int, name: str, ranks: int, num_stages: int
) -> list[tuple[int, int]]:
    """The nearest n for this batch and the nearest batches for this n.

    The nearest n below and above, and where torch's own schedule refuses those, the
    nearest that it accepts too.
    """
    found: list[tuple[int, int]] = []
    below, above = range(n - 1, 0, -1), range(max(n, 0) + 1, batch_size + 1)
    for counts in (below, above):
        divides = [c for c in counts if not batch_size % c]
        accepted = [
            c for c in divides if not _torch_problems(name, c, ranks, num_stages)
        ]
        found += [(batch_size, c) for c in (*divides[:1], *accepted[:1])]
    if n >= 1 and (batch_size % n or batch_size < n):
        rows = batch_size // n
        found += [(rows * n, n)] if rows else []
        found.append(((rows + 1) * n, n))
    return [pair for pair in dict.fromkeys(found) if pair != (batch_size, n)]
