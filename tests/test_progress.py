"""Plan against fact: how far each rank is, and the first op that is not in the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pptrace import progress
from pptrace.checker import check
from pptrace.records import Direction, Group, Kind, Pass, RankLog, Record, ScheduleRun
from pptrace.report import Finding, RankView, Report
from synthetic import one_f_one_b

GROUP = Group(1, "pp", "pp", (4, 6))
RUN = ScheduleRun("Schedule1F1B", 2, 2, (0,), {0: 0, 1: 1}, GROUP.key)
PLAN = ["S F0->1", "S F1->1", "R B0<-1", "R B1<-1"]


def log_of(*posted: str, rank: int = 4) -> RankLog:
    """A rank in the middle of a step that has posted these ops to its one peer."""
    records = [Record(1, Kind.STEP, 1, step=1, microbatch=2, text="Schedule1F1B")]
    for seq, text in enumerate(posted, 2):
        letter, label = text.split()
        records.append(
            Record(
                seq,
                Kind.OP,
                seq,
                direction=Direction.SEND if letter == "S" else Direction.RECV,
                pass_=Pass[label[0]],
                microbatch=int(label[1:]),
                peer=10 - rank,
                group=GROUP,
                step=1,
            )
        )
    return RankLog("", rank, 8, groups={1: GROUP}, schedules=[RUN], records=records)


def report_of(log: RankLog, folder: Path, *findings: Finding) -> Report:
    """A bare report of one rank, with progress added."""
    view = RankView(log.rank, "alive", "waits", None)
    report = Report("", "", 8, findings, (view,))
    return progress.add_progress(report, {log.rank: log}, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a plan in it."""
    value = {
        "schedule": "Schedule1F1B",
        "num_stages": 2,
        "n_microbatches": 2,
        "forward_only": False,
        "ranks": [PLAN, []],
    }
    (tmp_path / "plan-a.json").write_text(json.dumps(value))
    return tmp_path


def test_says_where_the_rank_is_and_what_comes_next(folder: Path) -> None:
    """Ops counted, the next one named with global ranks."""
    report = report_of(log_of("S F0", "S F1"), folder)
    assert report.ranks[0].progress == "op 2 of 4, next expected irecv B0←r6"
    assert report.findings == ()


def test_at_the_end_of_the_plan_nothing_is_expected(folder: Path) -> None:
    """All ops posted: only the count."""
    report = report_of(log_of("S F0", "S F1", "R B0", "R B1"), folder)
    assert report.ranks[0].progress == "op 4 of 4"


@pytest.mark.parametrize(
    ("posted", "said"),
    [
        (
            ("S F0", "R B0"),
            "op 1 of 4, posted irecv B0←r6 where the plan has isend F1→r6",
        ),
        (
            ("S F0", "S F1", "R B0", "R B1", "S F0"),
            "op 4 of 4, posted isend F0→r6 where the plan has the end of the step",
        ),
    ],
)
def test_the_first_deviation_is_a_finding(
    folder: Path, posted: tuple[str, ...], said: str
) -> None:
    """Another op, or one too many, is named with what the plan has there."""
    report = report_of(log_of(*posted), folder)
    assert report.ranks[0].progress == said
    assert [(f.code, f.culprits) for f in report.findings] == [("PPT027", (4,))]
    assert said in report.findings[0].sentence
    assert report.exit_code == 1


def test_in_a_hang_that_is_explained_it_is_no_second_fault(folder: Path) -> None:
    """The progress is shown, but the verdict stays alone."""
    verdict = Finding("PPT001", "transport split", "error", "...")
    report = report_of(log_of("R B0"), folder, verdict)
    assert report.findings == (verdict,)
    assert "posted irecv B0←r6" in report.ranks[0].progress


def test_an_unreadable_plan_costs_nothing_else(folder: Path) -> None:
    """Damaged plans are left out; those that can be read are used."""
    (folder / "plan-b.json").write_text("{")
    (folder / "plan-c.json").write_text('{"schedule": 1}')
    assert report_of(log_of("S F0"), folder).ranks[0].progress.startswith("op 1 of 4")


def test_the_checkers_plan_fits_what_ranks_record(tmp_path: Path) -> None:
    """A healthy 1F1B, cut in its step: every rank is on its plan."""
    logs = one_f_one_b(tmp_path, 3, 4).finish()
    run = logs[0].schedules[0]
    result = check("1F1B", num_stages=3, n_microbatches=4)
    assert result.plan is not None
    progress.save(result.plan, run, tmp_path, forward_only=False)
    for log in logs.values():
        for record in log.records:
            if record.kind is Kind.STEP:
                record.done_ns, record.microbatch = 0, 4
        view = report_of(log, tmp_path).ranks[0]
        done, total = view.progress.removeprefix("op ").split(" of ")
        assert done == total != "0"


def test_the_command_does_not_load_torch_for_it(tmp_path: Path, folder: Path) -> None:
    """``pptrace report`` shows progress from the file alone."""
    one_f_one_b(folder, 2, 2).finish()
    code = (
        "import sys; from pptrace.cli import main; "
        f"main(['report', {str(folder)!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "False"
