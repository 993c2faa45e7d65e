"""A sample of the differential test (`differential.py`); ``make differential`` runs all.

Programs on which checker and run once disagreed are in ``differential.REGRESSIONS``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("differential.py")


@pytest.mark.multirank
@pytest.mark.slow
def test_checker_and_emulated_runs_agree() -> None:
    """Random programs, fixed seed: the same hosts hang, the same ops are unmatched."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--programs", "60", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checker and runs agree" in done.stdout
    assert "60 programs" in done.stdout
