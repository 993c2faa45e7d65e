"""The look at pairs of ranks: what it lets pass never hangs, and it lets schedules pass."""

from __future__ import annotations

import random

import pytest
from torch.distributed.pipelining import schedules

from pptrace.dryrun import dry_run
from pptrace.pairs import is_mirrored
from pptrace.plan import Plan
from pptrace.schedules.recording import Setup, default_start_up, record
from pptrace.semantics import Host, Rule
from test_check import Unguarded

__all__: list[str] = []


def _plan(cls: type, rule: Rule, n: int, *, ranks: int = 3, per_rank: int = 1) -> Plan:
    start_up = default_start_up(rule)
    return record(cls, Setup(ranks, ranks * per_rank, n, rule, start_up))


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    ("cls", "per_rank"),
    [(schedules.Schedule1F1B, 1), (schedules.ScheduleGPipe, 1)],
)
def test_schedules_on_a_line_pass(cls: type, per_rank: int, rule: Rule) -> None:
    """Both rules, with the set-up of the group in the middle."""
    assert is_mirrored(_plan(cls, rule, 4, per_rank=per_rank))


@pytest.mark.parametrize("rule", Rule)
def test_a_schedule_that_hangs_does_not_pass(rule: Rule) -> None:
    """1F1B with fewer microbatches than stages, unguarded."""
    assert not is_mirrored(_plan(Unguarded, rule, 2, ranks=4))


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("seed", range(60))
def test_what_passes_after_a_disturbance_is_clean(rule: Rule, seed: int) -> None:
    """One rank's posts in another order, dropped or doubled."""
    chance = random.Random(seed)
    plan = _plan(schedules.Schedule1F1B, rule, 3)
    items = plan.programs[chance.randrange(3)].items  # type: ignore[attr-defined]
    posts = [at for at, item in enumerate(items) if type(item) is tuple]
    one, two = chance.sample(posts, 2)
    match chance.randrange(3):
        case 0:
            items[one], items[two] = items[two], items[one]
        case 1:
            del items[one]
        case _:
            items[one] = items[two]
    if is_mirrored(plan):
        assert all(dry_run(plan, host=host).simulation.is_clean for host in Host)
