"""A schedule as a picture: what a viewer needs to draw it, computed once.

Unit time, as `pptrace.schedules.actions.play` has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pptrace.schedules.actions import (
    Action,
    Programs,
    Timed,
    measure,
    play,
    stage_to_rank_of,
)
from pptrace.schedules.advice import programs as programs_of

__all__ = ["Arrow", "Box", "Picture", "draw", "picture"]


@dataclass(frozen=True, slots=True)
class Box:
    """One compute action of a rank, from ``begin`` until before ``end``."""

    begin: int
    end: int
    kind: str
    label: str
    """``F3``; ``5F3`` where ranks have several stages."""
    chunk: int
    """Which of its rank's stages it is on: 0 for the lowest."""
    sends: int
    """Where its result goes: 1 to a higher rank, -1 to a lower one, 0 nowhere else."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message: from the end of one box to the begin of the box that needs it."""

    kind: str
    """``F`` (an activation) or ``B`` (a gradient)."""
    source: int
    begin: int
    target: int
    end: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A schedule to be drawn; times in units of an F."""

    title: str
    makespan: int
    bubble_share: float
    in_flight: int
    ranks: dict[int, tuple[Box, ...]]
    arrows: tuple[Arrow, ...]


def picture(
    schedule: str,
    num_ranks: int,
    n_microbatches: int,
    stages_per_rank: int | None = None,
) -> Picture:
    """The picture of a fixed schedule; arguments and errors as those of `programs`."""
    found = programs_of(schedule, num_ranks, n_microbatches, stages_per_rank)
    return draw(found, f"{schedule}, {num_ranks} ranks, {n_microbatches} microbatches")


def draw(programs: Programs, title: str) -> Picture:
    """The picture of any schedule.

    Raises:
        InputError: it cannot be followed to the end.
    """
    played = play(programs)
    home = stage_to_rank_of(programs)
    stages = {rank: sorted(s for s in home if home[s] == rank) for rank in programs}
    several = len(home) > len(programs)

    def box(rank: int, timed: Timed) -> Box:
        action = timed.action
        label = f"{action.kind}{action.microbatch}"
        other = home.get(_target(action), rank) if action.kind != "W" else rank
        return Box(
            timed.begin,
            timed.end,
            action.kind,
            f"{action.stage}{label}" if several else label,
            stages[rank].index(action.stage),
            (other > rank) - (other < rank),
        )

    cost = measure(programs)
    return Picture(
        title,
        cost.makespan,
        cost.bubble_share,
        cost.in_flight,
        {r: tuple(box(r, t) for t in timed) for r, timed in sorted(played.items())},
        _arrows(played, home),
    )


def _target(action: Action) -> int:
    """The stage that needs the result."""
    return action.stage + (1 if action.kind == "F" else -1)


def _arrows(played: dict[int, list[Timed]], home: dict[int, int]) -> tuple[Arrow, ...]:
    begins = {
        (t.action.stage, "F" if t.action.kind == "F" else "B", t.action.microbatch): (
            t.begin
        )
        for timed in played.values()
        for t in timed
        if t.action.kind != "W"
    }
    arrows = []
    for rank, timed in sorted(played.items()):
        for t in timed:
            kind = "F" if t.action.kind == "F" else "B"
            target = _target(t.action)
            if t.action.kind == "W" or home.get(target, rank) == rank:
                continue
            begin = begins[target, kind, t.action.microbatch]
            arrows.append(Arrow(kind, rank, t.end, home[target], begin))
    return tuple(arrows)
