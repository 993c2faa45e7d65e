"""A sample of the differential test (`differential.py`); ``make differential`` runs all.

Programs on which checker and run once disagreed are in ``differential.REGRESSIONS``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pptrace.programs import parse

SCRIPT = Path(__file__).with_name("differential.py")


@pytest.mark.multirank
@pytest.mark.slow
def test_checker_and_emulated_runs_agree() -> None:
    """Random programs, fixed seed: the same hosts hang, the same ops are unmatched."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--programs", "40", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checker and runs agree" in done.stdout
    assert "40 programs" in done.stdout


@pytest.mark.multirank
@pytest.mark.slow
def test_a_rule_that_the_runs_do_not_keep_is_noticed() -> None:
    """Runs that know no pair communicators: a shrunk program and both outcomes."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--programs", "30", "--without", "TRANSPORT"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    text = done.stdout.partition("disagreement, shrunk:\n")[2].partition("\n\n")[0]
    program = parse(text)
    assert sum(len(body) for body in program.ranks.values()) <= 4, text
    assert "the checker says ended, the run blocked" in done.stdout
