"""A sample of torch's schedules on real ranks beside the checker, and what compares."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import schedule_worker
import torch_schedules as table
from torch_schedules import Cell, Outcome

__all__: list[str] = []

_SCRIPT = Path(table.__file__)
_PAGE = _SCRIPT.parents[1] / "docs" / "torch_schedules.md"
_LIMIT_S = 100

# -- the sample ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Outcome]:
    """What became of each cell of the sample, run as all are run."""
    path = tmp_path_factory.mktemp("torch") / "found.json"
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), "--sample", "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output
    return {
        Cell(**cell): Outcome(**outcome | {"culprits": tuple(outcome["culprits"])})
        for cell, outcome in json.loads(path.read_text())
    }


@pytest.mark.multirank
@pytest.mark.slow
class TestSample:
    """Four ranks; every schedule of torch's."""

    def test_real_ranks_do_what_the_checker_says(
        self, found: dict[Cell, Outcome]
    ) -> None:
        """Each fate occurs, so no one answer would do for all."""
        assert list(found) == table.sample_cells()
        lines = [table.disagreement(*item) for item in found.items()]
        assert list(filter(None, lines)) == []
        assert {outcome.fate for outcome in found.values()} == {
            table.PASSES,
            table.REFUSED,
            table.HANGS,
        }

    def test_the_hang_has_the_transport_split_for_its_verdict(
        self, found: dict[Cell, Outcome]
    ) -> None:
        """1F1B with n < S on a lazy group, read from its black boxes."""
        outcome = found[Cell(table.UNGUARDED, 1, "split", False, "static")]
        assert (outcome.fate, outcome.code) == (table.HANGS, "PPT001")


# -- the checker ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "least"), [("Schedule1F1B", 4), ("ScheduleDualPipeV", 8)]
)
def test_what_torch_refuses_is_reported_with_its_reason(
    schedule: str, least: int
) -> None:
    """Under all conditions and for no other n."""
    for cell in table.all_cells():
        if cell.schedule == schedule:
            said = table.expected(cell)
            assert (said.fate == table.REFUSED) == (cell.n < least), cell
            assert "microbatches" in said.detail or cell.n >= least


# -- what compares -------------------------------------------------------------------

HANG = Cell(table.UNGUARDED, 1, "split", False, "static")
REFUSAL = Cell("Schedule1F1B", 1, "split", False, "static")
PASS = Cell("ScheduleGPipe", 1, "split", False, "static")


@pytest.mark.parametrize("cell", [HANG, REFUSAL, PASS])
@pytest.mark.parametrize("fate", list(table.SIGNS))
def test_another_fate_is_a_disagreement(cell: Cell, fate: str) -> None:
    """And the line names the cell."""
    said = table.expected(cell)
    line = table.disagreement(cell, dataclasses.replace(said, fate=fate))
    assert line.startswith(str(cell)) if fate != said.fate else line == ""


@pytest.mark.parametrize(
    ("cell", "change"),
    [
        (HANG, {"code": "PPT002"}),
        (HANG, {"culprits": (3,)}),
        (REFUSAL, {"detail": "another reason"}),
    ],
)
def test_the_same_fate_for_another_reason_is_a_disagreement(
    cell: Cell, change: dict[str, Any]
) -> None:
    """Another verdict, another culprit, another word of torch's."""
    outcome = dataclasses.replace(table.expected(cell), **change)
    assert table.disagreement(cell, outcome)


def _ranks(cell: Cell) -> list[dict[str, Any]]:
    """Four ranks of a cell in which all is right."""
    size = table._PARAMETERS * table.STAGES_PER_RANK[cell.schedule]
    each = {
        "gradients": [[0.5] * size] * 2,
        "reference": [[0.5] * size] * 2,
        "reference_losses": [[1.0] * cell.n] * 2,
    }
    ranks = [vars(schedule_worker.Outcome()) | each for _ in range(table.RANKS)]
    ranks[0 if "V" in cell.schedule else -1]["losses"] = [[1.0] * cell.n] * 2
    return json.loads(json.dumps(ranks))  # no list stands in two places


@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleDualPipeV"])
def test_numbers_of_every_rank_are_compared(name: str) -> None:
    """Gradients of all, losses of the one with the last stage; NaN is a difference."""
    cell = Cell(name, 2, "split", False, "static")
    assert table.judge(cell, _ranks(cell)).fate == table.PASSES
    for rank, value in (0, math.nan), (3, 0.5 + 1e-9):
        ranks = _ranks(cell)
        ranks[rank]["gradients"][1][3] = value
        assert table.judge(cell, ranks).fate == table.DIFFERS
    ranks = _ranks(cell)
    for rank in ranks:
        rank["losses"] = []
    assert table.judge(cell, ranks).fate == table.DIFFERS


def test_refused_is_one_error_everywhere_before_anything_ran() -> None:
    """An error of one rank alone, or after a forward, is a failure."""
    error = {"error": "ValueError: no", "actions": {}}
    fine = vars(schedule_worker.Outcome())
    refused = table.judge(REFUSAL, [fine | error] * 4)
    assert refused == Outcome(table.REFUSED, detail="no")
    late = error | {"actions": {"forward_one_chunk": 1}}
    for ranks in [fine | error] * 3 + [fine], [fine | late] * 4:
        assert table.judge(REFUSAL, ranks).fate == table.FAILS


# -- all of them ---------------------------------------------------------------------


def test_the_grid_is_complete() -> None:
    """Eight schedules, n in 1..8, both rules, lazy and eager, static and dynamic."""
    cells = table.all_cells()
    assert len(cells) == len(set(cells)) == 8 * 8 * 2 * 2 * 2
    assert set(table.sample_cells()) <= set(cells)


def test_the_committed_table_is_what_the_checker_says() -> None:
    """docs/torch_schedules.md is what a whole run without disagreement wrote."""
    page = _PAGE.read_text("utf-8")
    said = {cell: table.expected(cell) for cell in table.all_cells()}
    assert table.tables(said) in page
    assert "checker and real ranks**: None." in page
