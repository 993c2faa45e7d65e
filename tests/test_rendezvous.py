"""The quick look: what it lets pass never hangs, under any rule."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

import pptrace.schedules
from pptrace.dryrun import dry_run
from pptrace.plan import Action, Batch, Edge, Instruction, Op, Plan, Wait
from pptrace.records import Direction, Group
from pptrace.rendezvous import meets_in_order
from pptrace.schedules.recording import Refused, Setup, default_start_up, record
from pptrace.semantics import Host, Rule
from test_check import Unguarded

__all__: list[str] = []


def _assert_clean(plan: Plan, *, preconnected: bool) -> None:
    for host in Host:
        simulation = dry_run(plan, host=host, preconnected=preconnected).simulation
        assert simulation.is_clean, (plan, host)


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    """Meetings of two ranks, one after the other, then disturbed a little."""
    size = draw(st.integers(2, 4))
    group = Group(1, "g", "", tuple(range(size)), "nccl", draw(st.booleans()))
    programs: dict[int, list[Instruction]] = {rank: [] for rank in range(size)}
    edges: dict[tuple[int, int, Direction], Edge] = {}

    def op(rank: int, peer: int, direction: Direction, label: int) -> Op:
        key = (rank, peer, direction)
        if key not in edges:
            edges[key] = Edge(direction, peer, group)
        return Op(edges[key], label)

    def post(rank: int, ops: list[Op]) -> None:
        posted = Batch(ops) if len(ops) > 1 or draw(st.booleans()) else ops[0]
        programs[rank].append(posted)
        if draw(st.booleans()):
            programs[rank].append(Wait(posted))

    for number in range(draw(st.integers(1, 6))):
        one, two = draw(st.permutations(range(size)))[:2]
        sides = draw(st.lists(st.sampled_from(Direction), min_size=1, max_size=3))
        mirrored = [Direction(3 - side) for side in sides]
        post(one, [op(one, two, side, number) for side in sides])
        post(two, [op(two, one, side, number) for side in mirrored])
        programs[one].append(Action(one, "F", number))
    rank = draw(st.integers(0, size - 1))
    if draw(st.booleans()) and len(programs[rank]) > 1:
        at = draw(st.integers(0, len(programs[rank]) - 2))
        first, second = programs[rank][at : at + 2]
        if not (isinstance(second, Wait) and second.on is first):
            programs[rank][at : at + 2] = [second, first]
    return Plan("random", programs, (group,))


@settings(max_examples=200, deadline=None)
@given(_plans(), st.booleans())
def test_a_plan_that_passes_the_look_ends(plan: Plan, preconnected: bool) -> None:
    """The simulation agrees, whatever hosts do: the look never lets a hang pass."""
    if meets_in_order(plan, preconnected=preconnected):
        _assert_clean(plan, preconnected=preconnected)


@pytest.mark.parametrize(
    "schedule",
    [
        Unguarded,
        pptrace.schedules.Schedule1F1B,
        schedules.ScheduleGPipe,
        schedules.ScheduleInterleaved1F1B,
        schedules.ScheduleZBVZeroBubble,
    ],
)
def test_schedules_look_the_same_as_recorded_and_as_instructions(
    schedule: type,
) -> None:
    """The compact form is only a shorter way to say it; and what passes ends."""
    per_rank = 2 if issubclass(schedule, schedules.PipelineScheduleMulti) else 1
    passed = 0
    for rule, eager, static in itertools.product(Rule, (False, True), (False, True)):
        for ranks, n in itertools.product((2, 4), (1, 2, 4, 5)):
            setup = Setup(
                ranks, ranks * per_rank, n, rule, default_start_up(rule), eager, static
            )
            try:
                plan = record(schedule, setup)
            except Refused:
                continue
            written_out = dataclasses.replace(
                plan, programs={rank: list(plan.programs[rank]) for rank in plan.ranks}
            )
            looks_right = meets_in_order(plan)
            assert looks_right == meets_in_order(written_out), setup
            if looks_right:
                passed += 1
                _assert_clean(plan, preconnected=False)
    assert passed > 10
