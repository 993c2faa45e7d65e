"""A sample of the chaos test (`chaos.py`); ``make chaos`` runs a hundred."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.mark.multirank
@pytest.mark.slow
def test_the_report_is_right_whoever_dies_whenever() -> None:
    """One of four ranks is killed at a random moment; five times, fixed seeds."""
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--runs", "5", "--seed", "1000"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 runs reported right" in done.stdout
    assert "PPT052" in done.stdout, "at least one rank had got as far as its file"
