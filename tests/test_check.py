"""The checker: what it says of torch's schedules, the fixed ones, and a user's own."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining import schedules

import pptrace.schedules
from pptrace.checker import CheckResult, check, check_csv
from pptrace.commands_check import Check
from pptrace.errors import InputError
from pptrace.schedules import actions

__all__: list[str] = []

_MULTI = (
    schedules.ScheduleInterleaved1F1B,
    schedules.ScheduleLoopedBFS,
    schedules.ScheduleInterleavedZeroBubble,
    schedules.ScheduleZBVZeroBubble,
    schedules.ScheduleDualPipeV,
)
_SETTINGS = [
    {"rule": rule, "host": host, "eager": eager, "metadata": metadata}
    for rule, host, eager, metadata in itertools.product(
        ("split", "coalesced"),
        ("async", "blocking"),
        (False, True),
        ("static", "dynamic"),
    )
]


class Unguarded(schedules.Schedule1F1B):
    """Torch's 1F1B without its refusal of fewer microbatches than stages."""

    def __init__(self, stage: Any, n_microbatches: int, loss_fn: Any = None) -> None:
        schedules.PipelineScheduleSingle.__init__(
            self, stage, n_microbatches, loss_fn=loss_fn
        )


def _run(schedule: type, ranks: int, n: int, **settings: Any) -> CheckResult:
    per_rank = 2 if schedule in _MULTI else 1
    return check(
        schedule,
        num_stages=ranks * per_rank,
        num_ranks=ranks,
        n_microbatches=n,
        **settings,
    )


def _codes(result: CheckResult) -> list[str]:
    return [finding.code for finding in result.findings]


@pytest.mark.parametrize("host", ["async", "blocking"])
@pytest.mark.parametrize("metadata", ["static", "dynamic"])
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_1f1b_hangs_for_fewer_microbatches_than_stages_where_batches_split(
    stages: int, metadata: str, host: str
) -> None:
    """Under the split rule with a lazy group, 1F1B deadlocks exactly for n < S."""
    for n in range(1, stages + 3):
        result = _run(Unguarded, stages, n, rule="split", metadata=metadata, host=host)
        assert result.ok == (n >= stages), n
        if n < stages:
            assert _codes(result)[0] == "PPT001"
            assert f"n={n} < S={stages}" in result.findings[0].sentence


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_1f1b_under_the_coalesced_rule_depends_on_what_wait_does(stages: int) -> None:
    """First use deadlocks at n = 1 where hosts go on, at any n < S where they block."""
    for n in range(1, stages + 2):
        result = _run(Unguarded, stages, n, rule="coalesced", host="async")
        assert result.ok == (n != 1), n
        result = _run(Unguarded, stages, n, rule="coalesced", host="blocking")
        assert result.ok == (n >= stages), n
        if n < stages:
            assert _codes(result)[0] == "PPT002"


@pytest.mark.parametrize("settings", _SETTINGS)
def test_schedules_known_to_be_sound_have_no_finding(settings: dict[str, Any]) -> None:
    """All other schedules of torch, and the fixed ones, never hang where they may run."""
    fixed = (pptrace.schedules.Schedule1F1B, pptrace.schedules.ScheduleGPipe)
    for schedule in (*fixed, schedules.ScheduleGPipe, *_MULTI):
        for ranks, n in itertools.product((2, 4), (1, 2, 3, 4, 8)):
            result = _run(schedule, ranks, n, **settings)
            assert result.ok or result.plan is None, (schedule, ranks, n)
            assert result.plan is not None or schedule in _MULTI


def test_deferred_receives_hang_in_torchs_schedules_and_not_in_the_fixed() -> None:
    """With ``defer_pp_recv`` both sides of a pair send before they receive."""
    kinds = (schedules.ScheduleLoopedBFS, pptrace.schedules.ScheduleLoopedBFS)
    torchs, fixed = (
        check(kind, num_stages=4, num_ranks=2, n_microbatches=4, defer_pp_recv=True)
        for kind in kinds
    )
    assert _codes(torchs)[0] == "PPT012"
    assert fixed.ok


def test_what_torch_refuses_is_a_finding_with_its_reason() -> None:
    """The constructor's own words are the verdict; nothing else is said."""
    result = _run(schedules.Schedule1F1B, 4, 2)
    assert not result.ok
    assert result.plan is None
    assert "(2) must be greater than" in result.findings[0].sentence
    assert result.timeline() == ""


def test_preconnected_pairs_leave_the_transport_split_alone() -> None:
    """Where every edge has been used before, first use is no obstacle any more."""
    settings: dict[str, Any] = {"rule": "coalesced", "host": "async"}
    assert not _run(Unguarded, 4, 1, **settings).ok
    assert _run(Unguarded, 4, 1, preconnect=True, **settings).ok
    assert not _run(Unguarded, 4, 1, rule="split", preconnect=True).ok


def test_an_eager_group_has_one_transport() -> None:
    """Set up at creation, single and batched ops ride the same communicator."""
    assert _run(Unguarded, 4, 2, rule="split", host="async", eager=True).ok
    assert not _run(Unguarded, 4, 2, rule="split", host="async", eager=False).ok


def test_forward_only_runs_have_no_backward() -> None:
    """``eval`` is checked too: it has no gradient to exchange."""
    for schedule in (schedules.Schedule1F1B, schedules.ScheduleGPipe, *_MULTI):
        result = _run(schedule, 2, 4, forward_only=True)
        assert result.ok
        assert result.plan is not None
        labels = {op.label[0] for op in result.plan.ops(0)}
        assert labels == {"F", "m"}  # m as in metadata


def test_numbers_agree_with_playing_the_actions() -> None:
    """Bubble share and peak in flight are those of the actions played in unit time."""
    for schedule, order in (
        (schedules.ScheduleGPipe, actions.order_gpipe),
        (pptrace.schedules.Schedule1F1B, actions.order_1f1b),
    ):
        result = _run(schedule, 4, 8)
        cost = actions.measure({s: order(s, 4, 8) for s in range(4)})
        assert result.bubble_share == pytest.approx(cost.bubble_share)
        assert max(result.peak_in_flight.values()) == cost.in_flight


def test_timeline_shows_ranks_over_time() -> None:
    """One row per rank; B is two units long, and idle time is dotted."""
    assert _run(schedules.ScheduleGPipe, 2, 2).timeline().splitlines() == [
        "r0 F0 F1 ·  ·  ·  B0 ══ B1 ══",
        "r1 ·  F0 F1 B0 ══ B1 ══ ·  ·",
    ]


def test_timeline_of_a_hang_ends_where_it_hangs() -> None:
    """Every rank shows the actions that ran, and what it is stuck in."""
    rows = _run(Unguarded, 2, 1).timeline().splitlines()
    assert rows[0].startswith("r0 F0 ✗ ")
    assert "F0→r1" in rows[0]
    assert rows[1].startswith("r1 ✗ ")
    assert "F0←r0" in rows[1]


class OneSidedEvaluation(schedules.ScheduleGPipe):
    """Its last stage leaves out the receive of microbatch 1."""

    def _step_microbatches(self, *_: Any, **__: Any) -> None:
        stage, n = self._stage, self._n_microbatches
        self._initialize_stage(None, None)  # type: ignore[no-untyped-call]
        for i in range(n):
            if not (stage.is_last and i == 1):
                schedules._wait_batch_p2p(
                    schedules._batch_p2p(stage.get_fwd_recv_ops(i))
                )
            stage.forward_one_chunk(i, (), {})
            schedules._wait_batch_p2p(schedules._batch_p2p(stage.get_fwd_send_ops(i)))


def test_a_users_own_step_is_run_as_it_is() -> None:
    """A subclass with its own loop is judged by that loop, per rank."""
    result = _run(OneSidedEvaluation, 3, 3)
    assert not result.ok
    assert 2 in result.findings[0].culprits


class PlainCalls(schedules.ScheduleGPipe):
    """Builds its own P2POps and asks torch.distributed for ranks."""

    def _step_microbatches(self, *_: Any, **__: Any) -> None:
        import torch

        rank, size = dist.get_rank(), dist.get_world_size(self._stage.group)
        tensor = torch.zeros(2)
        works = []
        if rank + 1 < size:
            group = self._stage.group
            works += dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, tensor, rank + 1, group)]
            )
        if rank:
            works += [dist.irecv(tensor, src=rank - 1, group=self._stage.group)]
        for work in works:
            work.wait()
        dist.barrier(group=self._stage.group)


def test_calls_of_torch_distributed_are_recorded() -> None:
    """Hand-made ops count: here sends are batched and receives are not."""
    result = _run(PlainCalls, 2, 1)
    assert not result.ok
    assert _codes(result)[0] == "PPT001"


class Broken(schedules.ScheduleGPipe):
    """Raises on every rank."""

    def _step_microbatches(self, *_: Any, **__: Any) -> None:
        raise KeyError("oops")


def test_a_class_that_cannot_run_is_one_line_with_its_place() -> None:
    """File, line and reason; not a traceback, and not a verdict on anybody."""
    with pytest.raises(InputError, match=r"test_check\.py:\d+: .*KeyError: 'oops'"):
        _run(Broken, 2, 2)


class RaisesOnOne(schedules.ScheduleGPipe):
    """Raises on rank 1, before it sends its first output."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        if self._stage.stage_index == 1:
            raise TypeError("no gradient")
        super()._step_microbatches(*args, **kwargs)


def test_a_rank_that_raises_is_the_culprit() -> None:
    """The others wait for it and are victims."""
    result = _run(RaisesOnOne, 4, 4)
    assert _codes(result)[0] == "PPT050"
    assert result.findings[0].culprits == (1,)
    assert "TypeError: no gradient" in result.findings[0].sentence


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("1F1B", schedules.Schedule1F1B),
        ("schedulegpipe", schedules.ScheduleGPipe),
        ("Interleaved1F1B", schedules.ScheduleInterleaved1F1B),
        ("pptrace.schedules:Schedule1F1B", pptrace.schedules.Schedule1F1B),
    ],
)
def test_schedules_are_found_by_name(name: str, found: type) -> None:
    """Torch's by their names, anybody's as module:Class."""
    result = check(name, num_stages=4, n_microbatches=4)
    assert result.plan is not None
    assert result.plan.schedules[0][0].name == found.__name__


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2F2B", "2F2B: is no schedule of torch"),
        ("no_such_module:X", "no_such_module: cannot be imported"),
        ("json:Nothing", "json: has no Nothing"),
        ("json:JSONDecoder", r"decoder\.py:\d+: JSONDecoder is no schedule"),
        ("json:loads", "json:loads: is not a class"),
    ],
)
def test_a_wrong_name_is_one_clear_line(name: str, message: str) -> None:
    """It says what was wrong with it."""
    with pytest.raises(InputError, match=message):
        check(name, num_stages=2, n_microbatches=2)


def test_nothing_of_torch_is_changed_afterwards() -> None:
    """Every name that is replaced for the recording is the very same object again."""
    before = [dict(vars(module)) for module in (schedules, c10d, dist)]
    switched_on = gc.isenabled()
    _run(Unguarded, 4, 2)
    with pytest.raises(InputError):
        _run(Broken, 2, 2)
    for module, names in zip((schedules, c10d, dist), before, strict=True):
        assert all(names[name] is value for name, value in vars(module).items())
    assert gc.isenabled() == switched_on
    assert not dist.is_initialized()


class AsksAnotherThread(schedules.ScheduleGPipe):
    """While it is recorded, another thread of the process uses torch."""

    seen: tuple[Any, ...] = ()

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        def look() -> None:
            group = dist.is_initialized()
            type(self).seen = (group, schedules._batch_p2p([]), dist.isend)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        super()._step_microbatches(*args, **kwargs)


def test_other_threads_see_torch_as_it_is() -> None:
    """A job that trains meanwhile keeps its process group and its transports."""
    isend = dist.isend
    assert _run(AsksAnotherThread, 2, 2).ok
    assert AsksAnotherThread.seen == (False, [], isend)


def test_a_plan_can_be_told_in_torchs_words() -> None:
    """The actions of a rank, in torch's text form, as CSV files and messages use it."""
    result = _run(schedules.ScheduleGPipe, 2, 2)
    assert result.plan is not None
    assert " ".join(map(str, result.plan.actions(1))) == (
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    )


# -- tables ----------------------------------------------------------------------------

_COMPUTE_ONLY = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
_WITH_MESSAGES = (
    "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


@pytest.mark.parametrize("text", [_COMPUTE_ONLY, _WITH_MESSAGES])
def test_a_table_of_torch_is_checked(tmp_path: Path, text: str) -> None:
    """With messages in it or without: torch adds them then."""
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    result = check_csv(path)
    assert result.ok
    assert result.plan is not None
    ops = {op.text for op in result.plan.ops(1) if op.label != "metadata"}
    assert ops == {"R F0<-0", "S B0->0", "R F1<-0", "S B1->0"}


def test_messages_in_another_order_are_found_in_a_table(tmp_path: Path) -> None:
    """Each side sends before it receives, and neither posts the receive first."""
    path = tmp_path / "schedule.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
    )
    assert not check_csv(path).ok


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1Q0\n", r"schedule\.csv:2: '1Q0': is no action"),
        ("0F0,0B0\n\n1F0\n", r"schedule\.csv:2: has no action"),
        ("", r"schedule\.csv: has no action"),
    ],
)
def test_a_malformed_table_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    """File, line and the cell."""
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        check_csv(path)


def test_a_table_torch_refuses_is_a_finding(tmp_path: Path) -> None:
    """Its reason is quoted, without the table it prints."""
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    result = check_csv(path)
    assert _codes(result) == ["PPT026"]
    assert "without first running Forward" in result.findings[0].sentence


# -- the command ------------------------------------------------------------------------


def _command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command = Check()
    command.prepare_parser(parser)
    return command.run(parser.parse_args(arguments))


def test_the_command_says_ok(capsys: pytest.CaptureFixture[str]) -> None:
    """Conditions, verdict, timeline and numbers; exit code 0."""
    assert _command("--schedule", "GPipe", "--pp", "2", "--microbatches", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ScheduleGPipe, 2 stages on 2 ranks, n=2 · rule ")
    assert lines[1].startswith("ok")
    assert "r1 ·  F0 F1 B0 ══ B1 ══ ·  ·" in lines
    assert "bubble: 33.3% of all rank-time" in "\n".join(lines)
    assert "most microbatches in flight: 2 (r0 2, r1 2)" in lines


def test_the_command_shows_the_verdict_of_a_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same report as a post-mortem's, and where each rank is stuck; exit code 1."""
    path = tmp_path / "hang.pp"
    path.write_text("r0: S x->1; R x<-1\nr1: S x->0; R x<-0\n")
    assert _command(str(path)) == 1
    shown = capsys.readouterr().out
    assert "ERROR PPT012 sends face each other" in shown
    assert "r0 ✗ " in shown
    assert " ago" not in shown


def test_the_command_makes_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """One verdict per number of ranks and of microbatches."""
    name = f"{__name__}:Unguarded"
    numbers = ("--pp", "2,4", "--microbatches", "1-4", "--rule", "split", "--sweep")
    assert _command("--schedule", name, *numbers) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:7]]
    assert rows == [
        ["n", "pp=2", "pp=4"],
        ["1", "PPT001", "PPT001"],
        ["2", "ok", "PPT001"],
        ["3", "ok", "PPT001"],
        ["4", "ok", "ok"],
    ]


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The report with the numbers, for scripts."""
    assert _command("--schedule", "1F1B", "--pp=4", "--microbatches=2", "--json") == 1
    value = json.loads(capsys.readouterr().out)
    assert value["findings"][0]["code"] == "PPT026"
    assert (value["ok"], value["bubble_share"]) == (False, None)


def test_a_class_is_found_in_a_file_and_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As module:Class where the user stands, or as path/to/file.py:Class."""
    text = "from torch.distributed.pipelining.schedules import ScheduleGPipe as Mine\n"
    (tmp_path / "their_own_schedule.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for module in ("their_own_schedule", tmp_path / "their_own_schedule.py"):
        assert (
            _command("--schedule", f"{module}:Mine", "--pp=2", "--microbatches=2") == 0
        )
    sys.modules.pop("their_own_schedule", None)
    assert "ok: every op meets its partner" in capsys.readouterr().out


def test_a_refusal_names_the_schedule_that_accepts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And says nothing of ranks, which do not exist."""
    assert _command("--schedule", "1F1B", "--pp=4", "--microbatches=2") == 1
    said = capsys.readouterr().out
    assert "use pptrace.schedules.Schedule1F1B" in said
    assert "never starts" not in said
    assert "cannot be seen" not in said


def test_a_hang_that_is_foreseen_has_no_ages() -> None:
    """No clock runs in a check."""
    result = check(Unguarded, num_stages=4, n_microbatches=2)
    assert result.report.pending
    assert {op.age_s for op in result.report.pending} == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs one of FILE, --schedule and --csv"),
        (["a.pp", "--schedule", "1F1B"], "needs one of"),
        (["a.pp", "--pp", "2"], "go with --schedule"),
        (["--schedule", "1F1B", "--pp", "4"], "--microbatches: is missing"),
        (["--schedule", "1F1B", "--pp", "x", "--microbatches", "1"], "is no number"),
        (["--schedule", "1F1B", "--pp", "2,4", "--microbatches", "1"], "several"),
        (["--schedule", "1F1B", "--pp", "0", "--microbatches", "1"], "1 or more"),
        (
            ["--schedule", "LoopedBFS", "--pp=4", "--stages=6", "--microbatches=1"],
            "--stages 6: is no multiple of --pp 4",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str) -> None:
    """They say which one and why."""
    with pytest.raises(InputError, match=message):
        _command(*arguments)
