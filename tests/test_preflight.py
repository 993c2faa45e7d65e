"""Preflight: a job is told before its first step that it will hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import Job, run_folder, torchrun
from pptrace import blackbox
from pptrace.records import Kind
from test_hang import EXAMPLE, copy_of

pytestmark = pytest.mark.multirank


def run(tmp_path: Path, microbatches: int, until: str, **environment: str) -> Job:
    """The example on two ranks of bare gloo, where nothing hangs."""
    script = copy_of(EXAMPLE, tmp_path)
    log = script.with_suffix(".log")
    return torchrun(
        script,
        2,
        "--microbatches",
        str(microbatches),
        "--steps",
        "60",
        until=lambda: until in log.read_text(),
        PPTRACE_DIR=str(tmp_path / "out"),
        **environment,
    )


def notes(tmp_path: Path) -> str:
    """What pptrace noted in rank 0's black box."""
    log = blackbox.read(run_folder(tmp_path / "out") / blackbox.file_name(0))
    return "\n".join(r.text for r in log.records if r.kind is Kind.NOTE)


def test_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    """The default: the pipeline's first rank says what will happen on NCCL."""
    job = run(tmp_path, 1, until="step 59")
    assert "step 59" in job.output
    assert job.output.count("pptrace: preflight:") == 1
    assert "n=1 < S=2" in job.output
    assert "pptrace.schedules.Schedule1F1B" in job.output
    assert "preflight:" in notes(tmp_path)


def test_raises_on_every_rank_if_asked(tmp_path: Path) -> None:
    """``raise``: no rank makes its first step, so none is left waiting."""
    job = run(tmp_path, 1, until="never", PPTRACE_PREFLIGHT="raise")
    assert job.returncode not in (0, -15)
    assert "PreflightError" in job.output
    assert "step 0" not in job.output


@pytest.mark.parametrize(
    ("microbatches", "environment"),
    [(2, {}), (1, {"PPTRACE_PREFLIGHT": "off"})],
    ids=["nothing wrong", "off"],
)
def test_says_nothing(
    tmp_path: Path, microbatches: int, environment: dict[str, str]
) -> None:
    """A schedule that is right, or preflight switched off: not a word."""
    job = run(tmp_path, microbatches, until="step 59", **environment)
    assert "step 59" in job.output
    assert "preflight" not in job.output


def test_too_large_for_the_budget_is_noted(tmp_path: Path) -> None:
    """What is skipped is written down, with the command that does it."""
    job = run(
        tmp_path,
        1,
        until="step 59",
        PPTRACE_PREFLIGHT_BUDGET="0.0001",
    )
    assert "preflight:" not in job.output
    assert "preflight skipped" in notes(tmp_path)
    assert "pptrace check" in notes(tmp_path)
