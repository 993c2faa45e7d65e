"""Fixed schedules: right results in real processes, and free of deadlock as data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import itertools
import subprocess
import sys
from typing import Any

import pytest

import pptrace.schedules
from pptrace.errors import InputError
from pptrace.schedules import actions
from schedule_runs import Emulation, run_cases
from schedule_worker import Case, Outcome

__all__: list[str] = []

_TOLERANCE = 1e-12
_SINGLE = ("Schedule1F1B", "ScheduleGPipe")
_LOOPED = (
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
)
_V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_ALL = (*_SINGLE, *_LOOPED, *_V_SHAPED)


def _multi(name: str, n: int, **options: Any) -> Case:
    placement = "v" if name in _V_SHAPED else "loop"
    return Case(name, n, stages_per_rank=2, placement=placement, **options)


def _assert_right(case: Case, ranks: list[Outcome]) -> None:
    """Losses, outputs and every gradient equal those without a pipeline."""
    assert [rank.error for rank in ranks] == [""] * len(ranks), case
    losses = [rank.losses for rank in ranks if rank.losses][-1]
    for step, what in enumerate(case.steps):
        if case.loss:
            assert losses[step] == pytest.approx(
                ranks[0].reference_losses[step], abs=_TOLERANCE
            ), case
        for rank in ranks:
            assert rank.gradients[step] == pytest.approx(
                rank.reference[step], abs=_TOLERANCE
            ), (case, step, what)
            if case.loss and "t" in case.steps[: step + 1]:
                assert rank.gradients[step], (case, "no gradient to compare")


# One start of torchrun per entry of _JOBS, with many cases in it.


def _single_cases(num_ranks: int) -> list[Case]:
    counts = sorted({1, 2, num_ranks - 1, num_ranks, num_ranks + 2} - {0})
    make = functools.partial(Case, "Schedule1F1B")
    cases = [
        make(n, metadata=metadata) for n in counts for metadata in ("static", "dynamic")
    ]
    cases += [make(n, source="torch") for n in counts if n >= num_ranks]
    cases += [
        make(2, tensors=2),
        make(2, scale_grads=False),
        make(2, loss=False, steps="ttf"),
        make(2, steps="et"),
        make(2, metadata="dynamic", steps="tet"),
        make(2, steps="tete"),
        make(2, steps="tf"),
        Case("ScheduleGPipe", 1),
        Case("ScheduleGPipe", 3, metadata="dynamic", steps="tet", tensors=2),
    ]
    if num_ranks == 3:
        cases += [make(n, skip=True, steps="tet") for n in (1, 2, 4)]
        cases += [Case("ScheduleGPipe", 3, skip=True)]
    return cases


def _multi_cases(num_ranks: int) -> list[Case]:
    cases = []
    for name in (*_LOOPED, *_V_SHAPED):
        accepted, refused = 2 * num_ranks, 2 * num_ranks + 1
        cases += [
            _multi(name, 1, steps="tet"),
            _multi(name, num_ranks - 1, metadata="dynamic", steps="et"),
            _multi(name, refused, steps="tet", tensors=2),
            _multi(name, 2, loss=False),
            _multi(name, accepted, defer=True),
            _multi(name, accepted),
            _multi(name, accepted, source="torch"),
        ]
    return cases


# Under emulation every case runs in a group whose communicators have never been used.
def _emulated_cases(num_ranks: int) -> list[Case]:
    cases = [
        Case("Schedule1F1B", n, metadata=metadata)
        for n in (1, 2, num_ranks)
        for metadata in ("static", "dynamic")
    ]
    cases += [
        Case("Schedule1F1B", num_ranks - 1, steps="tet"),
        Case("ScheduleGPipe", 1),
    ]
    for name in (*_LOOPED, *_V_SHAPED):
        cases += [
            _multi(name, 1, metadata="dynamic"),
            _multi(name, 2 * num_ranks + 1, steps="tet"),
            _multi(name, num_ranks, defer=True),
        ]
    return cases


_JOBS: dict[str, tuple[int, list[Case], Emulation | None]] = {
    "1 rank": (1, _single_cases(1), None),
    "2 ranks": (2, _single_cases(2), None),
    "3 ranks": (3, _single_cases(3), None),
    "4 ranks": (4, _single_cases(4), None),
    "2 ranks, two stages each": (2, _multi_cases(2), None),
    "4 ranks, two stages each": (4, _multi_cases(4), None),
    "4 ranks, split": (4, _emulated_cases(4), Emulation("split")),
    "4 ranks, coalesced": (4, _emulated_cases(4), Emulation("coalesced")),
    "4 ranks, eager": (4, _emulated_cases(4), Emulation("split", eager=True)),
    "3 ranks, skip connections": (
        3,
        [Case(name, n, skip=True) for name in _SINGLE for n in (1, 2, 4)],
        Emulation("split", eager=True),
    ),
}


@pytest.fixture(scope="module", params=_JOBS)
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, list[Outcome]]:
    """Every case of one job, run."""
    num_ranks, cases, emulation = _JOBS[request.param]
    folder = tmp_path_factory.mktemp("ranks")
    return dict(zip(cases, run_cases(folder, num_ranks, cases, emulation), strict=True))


@pytest.mark.multirank
@pytest.mark.slow
def test_results_equal_the_model_without_a_pipeline(
    ran: dict[Case, list[Outcome]],
) -> None:
    """Any number of microbatches, both metadata modes, several steps, eval between."""
    for case, ranks in ran.items():
        if case.source == "pptrace":
            _assert_right(case, ranks)


@pytest.mark.multirank
@pytest.mark.slow
def test_where_torch_accepts_n_nothing_differs_from_torch(
    ran: dict[Case, list[Outcome]],
) -> None:
    """Same bits, same number of actions, as many microbatches in flight."""
    compared = 0
    for case, theirs in ran.items():
        if case.source != "torch":
            continue
        ours = ran[dataclasses.replace(case, source="pptrace")]
        for mine, their in zip(ours, theirs, strict=True):
            assert mine.error == their.error == ""
            assert mine.losses == their.losses
            assert mine.outputs == their.outputs
            assert mine.gradients == their.gradients
            assert mine.actions == their.actions
            assert mine.in_flight <= their.in_flight
        compared += 1
    assert compared == sum(case.source == "torch" for case in ran)


@pytest.mark.multirank
@pytest.mark.slow
def test_no_batch_has_a_send_beside_a_receive(ran: dict[Case, list[Outcome]]) -> None:
    """The one thing that makes a transport split possible never happens."""
    mixed = {case.source: 0 for case in ran}
    for case, ranks in ran.items():
        if case.skip:
            continue  # torch's start-up of traced stages has such a batch on all ranks
        mixed[case.source] += sum(rank.mixed_batches for rank in ranks)
    assert mixed["pptrace"] == 0
    single = [
        case for case in ran if case.source == "torch" and case.schedule in _SINGLE
    ]
    assert mixed.get("torch", 0) > 0 or not single or len(ran[single[0]]) == 1


@pytest.mark.multirank
@pytest.mark.slow
def test_outputs_are_returned_by_the_last_stage_alone_and_only_if_wanted(
    ran: dict[Case, list[Outcome]],
) -> None:
    """``step`` returns the merged output; ``return_outputs=False`` returns nothing."""
    for case, ranks in ran.items():
        outputs = [rank.outputs for rank in ranks]
        last = outputs.pop(0 if case.placement == "v" else -1)
        assert {value for rank in outputs for value in map(str, rank)} <= {"None"}
        for what, output in zip(case.steps, last, strict=True):
            if what == "f":
                assert output is None
            else:
                assert len(output) == case.n * 2 * 4 * case.tensors


# The schedule as data: no processes.

_GRID = list(itertools.product(range(1, 9), range(1, 13)))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_every_op_may_block_and_still_nothing_waits_in_a_circle(name: str) -> None:
    """Sends and receives as rendezvous, one at a time: the strictest rule there is."""
    order = getattr(actions, f"order_{name}")
    for num_stages, n in _GRID:
        programs = {s: order(s, num_stages, n) for s in range(num_stages)}
        assert actions.rendezvous_problem(programs) is None, (num_stages, n)


def test_the_strict_check_finds_torchs_circle() -> None:
    """Two neighbours that both send first are seen, so a clean answer means something."""
    programs = {
        0: [actions.parse(text) for text in ("0F0", "0SEND_F0", "0RECV_B0")],
        1: [actions.parse(text) for text in ("1SEND_B0", "1RECV_F0")],
    }
    assert actions.rendezvous_problem(programs) == (
        "rank 0 in 0SEND_F0; rank 1 in 1SEND_B0"
    )


def test_1f1b_is_the_schedule_one_expects() -> None:
    """The actions of a small case, read by eye."""
    text = " ".join(pptrace.schedules.actions_1f1b(1, 3, 3))
    assert text == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1RECV_F2 1SEND_B0 "
        "1F2 1SEND_F2 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1REDUCE_GRAD"
    )


def test_actions_survive_a_csv_round_trip() -> None:
    """What is written reads back the same."""
    programs = {s: actions.order_1f1b(s, 4, 3) for s in range(4)}
    file = io.StringIO()
    actions.write_csv(programs, file)
    file.seek(0)
    assert actions.read_csv(file) == programs


@pytest.mark.parametrize("text", ["F0", "0X1", "0F0 ", "(0F0)B", "0F0@", "0F0junk"])
def test_text_that_is_no_action_is_refused_in_one_line(text: str) -> None:
    """Parsing says what was wrong; surrounding blanks are no error."""
    if text == "0F0 ":
        assert actions.parse(text) == actions.parse("0F0")
        return
    with pytest.raises(InputError, match="is no action"):
        actions.parse(text)


def test_skip_connections_get_one_order_for_all_ranks() -> None:
    """A tensor that jumps over a stage waits in no circle, whatever blocks."""
    for num_stages, n in itertools.product(range(3, 6), range(1, 8)):
        edges = [(s, s + 1) for s in range(num_stages - 1)]
        edges += [(0, num_stages - 1), (0, 2)]
        for order in (actions.order_1f1b, actions.order_gpipe):
            orders = {
                s: actions.compute_only(order(s, num_stages, n))
                for s in range(num_stages)
            }
            programs = actions.lower(orders, edges)
            assert actions.rendezvous_problem(programs) is None
            assert {s: actions.compute_only(p) for s, p in programs.items()} == orders


def test_fewer_microbatches_cost_a_bubble_and_nothing_else() -> None:
    """Bubble share and microbatches in flight of a few cases computed by hand."""
    cost = actions.measure({s: actions.order_1f1b(s, 4, 2) for s in range(4)})
    assert (cost.makespan, cost.bubble_share, cost.in_flight) == (15, 0.6, 2)
    cost = actions.measure({s: actions.order_1f1b(s, 4, 8) for s in range(4)})
    assert (cost.bubble_share, cost.in_flight) == (pytest.approx(3 / 11), 4)


# The classes: what a training script sees.


def test_a_fixed_schedule_looks_like_torchs() -> None:
    """Same name, same signature, a subclass."""
    from torch.distributed.pipelining import schedules as torch_schedules

    for name in ("Schedule1F1B", "ScheduleGPipe"):
        theirs = getattr(torch_schedules, name)
        ours = getattr(pptrace.schedules, name)
        assert ours.__name__ == name
        assert issubclass(ours, theirs)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.signature(ours.step) == inspect.signature(theirs.step)


class _StubStage:
    """As much of a stage as a constructor looks at."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.has_backward = False


def test_torchs_own_order_of_actions_is_known_to_its_tools() -> None:
    """``pipeline_order`` has every microbatch of every stage once (torch's has not)."""
    schedule = pptrace.schedules.Schedule1F1B(_StubStage(0, 3), 2)
    order: dict[int, list[Any]] = schedule.pipeline_order
    assert {rank: [str(a) for a in row] for rank, row in order.items()} == {
        0: ["0F0", "0F1", "0B0", "0B1", "0REDUCE_GRAD"],
        1: ["1F0", "1F1", "1B0", "1B1", "1REDUCE_GRAD"],
        2: ["2F0", "2B0", "2F1", "2B1", "2REDUCE_GRAD"],
    }


def test_no_microbatch_is_refused() -> None:
    """The only number that no schedule can run."""
    with pytest.raises(ValueError, match="at least 1"):
        pptrace.schedules.Schedule1F1B(_StubStage(0, 3), 0)


def test_importing_the_package_does_not_import_torch() -> None:
    """The checker reads actions where torch is not installed."""
    code = (
        "import sys, pptrace.schedules as s; s.actions_1f1b(0, 2, 2); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
