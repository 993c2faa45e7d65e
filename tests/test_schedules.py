"""Fixed schedules: right results in real processes, and free of deadlock as data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import itertools
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pptrace.schedules
from pptrace.checker import check, check_csv
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
        make(1, source="installed"),
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
        if case.source != "torch":
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


@pytest.mark.parametrize("name", [*_LOOPED, *_V_SHAPED])
@pytest.mark.parametrize("deferred", [False, True])
def test_multi_stage_programs_wait_in_no_circle_either(
    name: str, deferred: bool
) -> None:
    """Training and evaluation, receives early or late, every op blocking."""
    for num_ranks, n in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 5, 7, 9, 12)):
        schedule = _construct(name, num_ranks, n, defer_pp_recv=deferred)
        programs = schedule.programs()
        forward = {
            rank: [actions.parse(str(action)) for action in program]
            for rank, program in schedule._forward_program.items()
        }
        for program in (programs, forward):
            assert actions.rendezvous_problem(program) is None, (num_ranks, n)
            assert _forwards(program) == {
                (stage, mb) for stage in range(2 * num_ranks) for mb in range(n)
            }


def test_torchs_deferred_receives_do_wait_in_a_circle() -> None:
    """Why the place of deferred receives is ours: the check finds torch's circle."""
    from torch.distributed.pipelining import schedules as torch_schedules

    stages = [_StubStage(0, 4, 2), _StubStage(2, 4, 2)]
    schedule = torch_schedules.ScheduleInterleaved1F1B(stages, 4, defer_pp_recv=True)
    programs = {
        rank: [actions.parse(str(action)) for action in program]
        for rank, program in schedule.pipeline_order_with_comms.items()
    }
    assert "rank 0 in" in str(actions.rendezvous_problem(programs))


@pytest.mark.parametrize("name", [*_LOOPED, *_V_SHAPED])
def test_where_torch_accepts_n_the_programs_are_torchs(name: str) -> None:
    """Not one action differs, so bubble and microbatches in flight do not either."""
    from torch.distributed.pipelining import schedules as torch_schedules

    compared = 0
    for num_ranks, n in itertools.product((2, 3, 4), range(1, 13)):
        try:
            stages = _stub_stages(name, num_ranks)
            theirs = getattr(torch_schedules, name)(stages, n)
        except ValueError:
            continue
        ours = _construct(name, num_ranks, n)
        text = {
            r: list(map(str, p)) for r, p in theirs.pipeline_order_with_comms.items()
        }
        assert {r: list(map(str, p)) for r, p in ours.programs().items()} == text
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize("name", _ALL)
def test_the_checker_finds_nothing_in_a_fixed_schedule(name: str) -> None:
    """Under both rules, lazy and eager, static and dynamic, training and evaluation."""
    per_rank = 1 if name in _SINGLE else 2
    for num_ranks, n in itertools.product((2, 3, 6), (1, 2, 5, 9)):
        for rule, eager, metadata, forward_only in itertools.product(
            ("split", "coalesced"), (False, True), ("static", "dynamic"), (False, True)
        ):
            result = check(
                getattr(pptrace.schedules, name),
                num_stages=num_ranks * per_rank,
                num_ranks=num_ranks,
                n_microbatches=n,
                rule=rule,
                eager=eager,
                metadata=metadata,
                forward_only=forward_only,
            )
            assert result.ok, (num_ranks, n, rule, eager, metadata, result.findings)


def test_1f1b_is_the_schedule_one_expects() -> None:
    """The actions of a small case, read by eye."""
    text = " ".join(pptrace.schedules.actions_1f1b(1, 3, 3))
    assert text == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1RECV_F2 1B0 1SEND_B0 "
        "1F2 1SEND_F2 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1REDUCE_GRAD"
    )


def test_actions_survive_a_csv_round_trip() -> None:
    """What is written reads back the same."""
    programs = {s: actions.order_1f1b(s, 4, 3) for s in range(4)}
    file = io.StringIO()
    actions.write_csv(programs, file)
    file.seek(0)
    assert actions.read_csv(file) == programs


def test_torch_loads_and_the_checker_reads_what_was_written(tmp_path: Path) -> None:
    """1F1B for fewer microbatches than stages, as a file that torch's runtime takes."""
    from torch.distributed.pipelining import schedules as torch_schedules

    path = tmp_path / "1f1b.csv"
    programs = pptrace.schedules.programs("1F1B", 4, 2)
    with path.open("w") as file:
        actions.write_csv(programs, file)
    runtime = torch_schedules._PipelineScheduleRuntime([_StubStage(0, 4)], 2)
    runtime._load_csv(str(path), format="compute_comms")
    loaded = runtime.pipeline_order_with_comms
    assert {r: list(map(str, p)) for r, p in loaded.items()} == {
        r: list(map(str, p)) for r, p in programs.items()
    }
    assert check_csv(path).ok


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

    for name in _ALL:
        theirs = getattr(torch_schedules, name)
        ours = getattr(pptrace.schedules, name)
        assert ours.__name__ == name
        assert issubclass(ours, theirs)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.signature(ours.step) == inspect.signature(theirs.step)


class _StubStage:
    """As much of a stage as a constructor looks at."""

    submod = None
    has_backward = False

    def __init__(self, index: int, num_stages: int, num_ranks: int = 0) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = num_ranks or num_stages
        self.group_rank = 0


def _stub_stages(name: str, num_ranks: int) -> list[_StubStage]:
    last = 2 * num_ranks - 1
    second = last if name in _V_SHAPED else num_ranks
    return [_StubStage(index, last + 1, num_ranks) for index in (0, second)]


def _construct(name: str, num_ranks: int, n: int, **options: Any) -> Any:
    stages = _stub_stages(name, num_ranks)
    return getattr(pptrace.schedules, name)(stages, n, **options)


def _forwards(programs: actions.Programs) -> set[tuple[int, int | None]]:
    return {
        (action.stage, action.microbatch)
        for program in programs.values()
        for action in actions.flatten(program)
        if action.kind == "F"
    }


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


# In torch's place.


@pytest.fixture
def _installed() -> Iterator[None]:
    pptrace.schedules.install()
    yield
    pptrace.schedules.uninstall()


def test_uninstall_puts_back_the_very_same_objects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In torch's modules and in a module that imported a class by name before."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules as torch_schedules

    user = types.ModuleType("a_training_script")
    user.Schedule1F1B = pipelining.Schedule1F1B  # type: ignore[attr-defined]
    user.mine = user.Schedule1F1B  # type: ignore[attr-defined]
    user.other = pipelining.PipelineStage  # type: ignore[attr-defined]
    modules = [torch_schedules, pipelining, user]
    sys.modules[user.__name__] = sys.modules["an_alias"] = user
    try:
        before = [dict(vars(module)) for module in modules]
        for _ in range(2):
            pptrace.schedules.install()
            pptrace.schedules.install()
            assert pptrace.schedules.is_installed()
            assert user.Schedule1F1B is user.mine is pptrace.schedules.Schedule1F1B
            pptrace.schedules.uninstall()
            assert not pptrace.schedules.is_installed()
        pptrace.schedules.uninstall()
    finally:
        del sys.modules[user.__name__], sys.modules["an_alias"]
    assert "left as it is" not in caplog.text
    for module, values in zip(modules, before, strict=True):
        now = vars(module)
        assert now.keys() == values.keys()
        assert all(now[name] is value for name, value in values.items())


@pytest.mark.usefixtures("_installed")
def test_after_install_torch_hands_out_the_fixed_schedules() -> None:
    """By name from both modules, and by torch's ``get_schedule_class``."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules as torch_schedules

    for name in _ALL:
        fixed = getattr(pptrace.schedules, name)
        assert getattr(pipelining, name) is fixed
        assert getattr(torch_schedules, name) is fixed
        short = name.removeprefix("Schedule").lower()
        assert torch_schedules.get_schedule_class(short) is fixed
        assert pptrace.schedules.get_schedule_class(short) is fixed
    assert pipelining.Schedule1F1B(_StubStage(0, 4), 1)._n_microbatches == 1


def test_get_schedule_class_knows_what_torchs_knows() -> None:
    """Any spelling of case; the base classes are torch's; others are refused."""
    from torch.distributed.pipelining import schedules as torch_schedules

    get = pptrace.schedules.get_schedule_class
    assert get("1f1b") is pptrace.schedules.Schedule1F1B
    assert get("DUALPIPEV") is pptrace.schedules.ScheduleDualPipeV
    multi = torch_schedules.PipelineScheduleMulti
    assert get("PipelineScheduleMulti") is multi
    with pytest.raises(ValueError, match="nonsense"):
        get("nonsense")


def test_an_installation_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line that names the schedules, however often it is asked for."""
    with caplog.at_level("INFO", logger="pptrace"):
        pptrace.schedules.install()
        pptrace.schedules.install()
        pptrace.schedules.uninstall()
    (line,) = caplog.messages
    assert "Schedule1F1B" in line


def test_a_place_that_was_changed_meanwhile_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What somebody else put there stays, with a warning."""
    from torch.distributed import pipelining

    original = pipelining.ScheduleGPipe
    pptrace.schedules.install()
    other = type("ScheduleGPipe", (), {})
    pipelining.ScheduleGPipe = other  # type: ignore[misc]
    try:
        pptrace.schedules.uninstall()
        assert pipelining.ScheduleGPipe is other
        assert "pipelining.ScheduleGPipe is not what pptrace put there" in caplog.text
    finally:
        pipelining.ScheduleGPipe = original  # type: ignore[misc]


# Advice.


def test_advice_on_a_batch_that_does_not_divide() -> None:
    """What will fail, then the nearest numbers, each with its bubble share."""
    advice = pptrace.schedules.advise(8, 3, 3, "1F1B")
    assert not advice.ok
    (problem,) = advice.problems
    assert "2 of them have 3 rows, the others 2" in problem
    assert [(s.batch_size, s.n_microbatches) for s in advice.settings] == [
        (8, 2),
        (8, 4),
        (6, 3),
        (9, 3),
    ]
    assert [s.needs_fixed for s in advice.settings] == [True, False, False, False]
    assert advice.settings[1].bubble_share == pytest.approx(2 / 6)


def test_advice_on_fewer_rows_than_microbatches_quotes_torchs_error() -> None:
    """The message that a user would search for is in the answer."""
    advice = pptrace.schedules.advise(2, 4, 4, "gpipe")
    assert "Expecting 4 arg_mbs but got 2" in advice.problems[0]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((8, 2, 4, "1F1B"), "refuses 2 microbatches on 4 stages"),
        ((18, 9, 8, "Interleaved1F1B"), "not a multiple of its 2 rounds"),
        ((16, 4, 8, "DualPipeV"), "refuses 4 microbatches on 8 stages"),
    ],
)
def test_advice_on_what_torch_refuses(
    numbers: tuple[int, int, int, str], expected: str
) -> None:
    """The fixed schedule runs it as it is: that comes first, with its bubble share."""
    advice = pptrace.schedules.advise(*numbers)
    assert expected in advice.problems[0]
    first = advice.settings[0]
    assert (first.batch_size, first.n_microbatches) == numbers[:2]
    assert first.needs_fixed
    assert 0 < first.bubble_share < 1


def test_what_is_advised_divides_and_is_accepted() -> None:
    """Every setting without a note runs on torch's own class; all divide the batch."""
    from torch.distributed.pipelining import schedules as torch_schedules

    for batch, n, num_stages in itertools.product(range(1, 14), range(1, 9), (2, 4)):
        advice = pptrace.schedules.advise(batch, n, num_stages, "1F1B")
        assert advice.ok == (batch % n == 0 and n >= num_stages)
        for setting in advice.settings:
            assert setting.batch_size % setting.n_microbatches == 0
            if not setting.needs_fixed:
                stage = _StubStage(0, num_stages)
                torch_schedules.Schedule1F1B(stage, setting.n_microbatches)


def test_advice_on_nonsense_is_one_clear_line() -> None:
    """An unknown schedule, and stages that no ranks can share."""
    with pytest.raises(InputError, match="known: 1F1B, GPipe"):
        pptrace.schedules.advise(8, 4, 4, "2F2B")
    with pytest.raises(InputError, match="do not divide over ranks"):
        pptrace.schedules.advise(8, 4, 5, "DualPipeV")


def test_programs_by_name_are_those_of_the_class() -> None:
    """The same actions, asked for without a stage."""
    for name in (*_LOOPED, *_V_SHAPED):
        short = name.removeprefix("Schedule")
        assert (
            pptrace.schedules.programs(short, 3, 4) == _construct(name, 3, 4).programs()
        )
    with pytest.raises(InputError, match="exactly 2"):
        pptrace.schedules.programs("DualPipeV", 3, 4, stages_per_rank=1)
