"""Preflight: a job is told before its first step that it will hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import Job, torchrun
from pptrace import blackbox
from pptrace.errors import InputError
from pptrace.records import Kind
from test_hang import EXAMPLE, copy_of

pytestmark = pytest.mark.multirank


def run(
    tmp_path: Path, microbatches: int, until: str, noted: str = "", **environment: str
) -> Job:
    """The example on two ranks of bare gloo, where nothing hangs.

    It is ended once it has printed ``until`` and noted ``noted``.
    """
    script = copy_of(EXAMPLE, tmp_path)
    log = script.with_suffix(".log")
    return torchrun(
        script,
        2,
        "--microbatches",
        str(microbatches),
        "--steps",
        "100000",
        until=lambda: until in log.read_text() and noted in notes(tmp_path),
        PPTRACE_DIR=str(tmp_path / "out"),
        PPTRACE_RING_SLOTS="1048576",
        **environment,
    )


def notes(tmp_path: Path) -> str:
    """What pptrace noted in rank 0's black box."""
    files = list((tmp_path / "out").glob(f"*/{blackbox.file_name(0)}"))
    if not files:
        return ""
    try:
        log = blackbox.read(files[0])
    except InputError:  # just being made
        return ""
    return "\n".join(r.text for r in log.records if r.kind is Kind.NOTE)


def test_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    """The default: the pipeline's first rank says what will happen on NCCL."""
    job = run(tmp_path, 1, until="preflight:", noted="preflight:")
    assert "step 0" in job.output
    assert job.output.count("pptrace: preflight:") == 1
    assert "n=1 < S=2" in job.output
    assert "pptrace.schedules.Schedule1F1B" in job.output


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
    job = run(tmp_path, microbatches, until="step 2000", **environment)
    assert "step 2000" in job.output
    assert "preflight" not in job.output


def test_the_users_own_schedule_code_is_not_run_for_it(tmp_path: Path) -> None:
    """A schedule with code of its own is left alone: it may do anything."""
    script = tmp_path / "own.py"
    body = EXAMPLE.read_text().replace(
        "class Block(",
        """class Own(UnguardedSchedule1F1B):
    def _step_microbatches(self, *args, **kwargs):
        print("OWN CODE", flush=True)
        super()._step_microbatches(*args, **kwargs)


class Block(""",
    )
    script.write_text(body.replace("= UnguardedSchedule1F1B", "= Own"))
    job = torchrun(
        script,
        2,
        "--microbatches",
        "2",
        "--steps",
        "3000",
        until=lambda: "has code of its own" in notes(tmp_path),
        PPTRACE_DIR=str(tmp_path / "out"),
        PPTRACE_RING_SLOTS="1048576",
    )
    assert "has code of its own" in notes(tmp_path)
    assert "preflight:" not in job.output


def test_too_large_for_the_budget_is_noted(tmp_path: Path) -> None:
    """What is skipped is written down, with the command that does it."""
    job = run(
        tmp_path,
        1,
        until="step 0",
        noted="preflight skipped",
        PPTRACE_PREFLIGHT_BUDGET="0.0001",
    )
    assert "preflight:" not in job.output
    assert "preflight skipped" in notes(tmp_path)
    assert "pptrace check" in notes(tmp_path)
