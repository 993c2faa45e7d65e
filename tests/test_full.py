"""The sample of the full table that runs with every test, and what judges a cell."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import full
from full import Cell, Fate, Result
from schedule_worker import Outcome

__all__: list[str] = []

_FULL = Path(full.__file__)
_PAGE = _FULL.parents[1] / "docs" / "full.md"
_LIMIT_S = 110

# -- the sample ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def fates(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Fate]:
    """What became of each cell of the sample, run as `make full` runs them all."""
    path = tmp_path_factory.mktemp("full") / "fates.json"
    process = subprocess.Popen(
        [sys.executable, str(_FULL), "--sample", "--json", str(path)],
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
    rows = json.loads(path.read_text())
    return {Cell(**row): Fate[fate] for row in rows for fate in [row.pop("fate")]}


@pytest.mark.multirank
@pytest.mark.slow
class TestSample:
    """S = 2, 3 and 4, n below, at and above S, both rules, static and dynamic."""

    def test_the_fixed_schedule_equals_the_model_without_a_pipeline(
        self, fates: dict[Cell, Fate]
    ) -> None:
        """For every n, in a lazily set-up group that was never used before."""
        ours = {cell: f for cell, f in fates.items() if cell.source == "pptrace"}
        assert {cell for cell in ours if cell.n < cell.size}
        assert set(ours.values()) == {Fate.PASSES}

    def test_torchs_stops_exactly_where_n_is_below_s(
        self, fates: dict[Cell, Fate]
    ) -> None:
        """It hangs there, and everywhere else it passes."""
        theirs = {cell: f for cell, f in fates.items() if cell.source == "torch"}
        stopped = {cell for cell, fate in theirs.items() if fate is not Fate.PASSES}
        assert stopped == {cell for cell in theirs if cell.n < cell.size}
        assert {theirs[cell] for cell in stopped if cell.size > 2} == {Fate.HANGS}

    def test_two_ranks_and_one_communicator_make_an_error_of_it(
        self, fates: dict[Cell, Fate]
    ) -> None:
        """S = 2, n = 1: an error under the coalesced rule, a hang under the split one."""
        for metadata in full.METADATA:
            for rule, fate in ("split", Fate.HANGS), ("coalesced", Fate.FAILS):
                assert fates[Cell(rule, 2, 1, "torch", metadata)] is fate


# -- judging a cell ------------------------------------------------------------------


def seen_by_two_ranks() -> list[dict[str, Any]]:
    """A cell of S = 2, n = 2 in which all is right."""
    gradients = [[0.5] * full._PARAMETERS] * 2
    losses = [[1.0, 2.0]] * 2
    first = vars(Outcome()) | {
        "gradients": gradients,
        "reference": gradients,
        "reference_losses": losses,
    }
    ranks = [first, first | {"losses": losses}]
    return json.loads(json.dumps(ranks))  # no list stands in two places


CELL = Cell("split", 2, 2, "pptrace", "static")


def test_equal_results_pass() -> None:
    """The difference is kept for the page."""
    ranks = seen_by_two_ranks()
    ranks[0]["gradients"][1][3] += 1e-15
    result = full.judge(CELL, ranks)
    assert result.fate is Fate.PASSES
    assert result.difference == pytest.approx(1e-15, rel=0.2)


@pytest.mark.parametrize("value", [0.5 + 1e-9, math.nan, math.inf])
def test_one_gradient_that_differs_is_enough(value: float) -> None:
    """Of any rank, in any step; no number is a difference too."""
    for rank in 0, 1:
        for step in 0, 1:
            ranks = seen_by_two_ranks()
            ranks[rank]["gradients"][step][0] = value
            assert full.judge(CELL, ranks).fate is Fate.DIFFERS


def test_one_loss_that_differs_is_enough() -> None:
    """Of the second microbatch of the second step."""
    ranks = seen_by_two_ranks()
    ranks[1]["losses"][1][1] += 1e-9
    assert full.judge(CELL, ranks).fate is Fate.DIFFERS


@pytest.mark.parametrize("what", ["gradients", "reference", "losses"])
def test_results_that_are_missing_never_pass(what: str) -> None:
    """One parameter without a gradient, a step left out, nothing at all."""
    for cut in ([[], []], [[1.0]], []):
        ranks = seen_by_two_ranks()
        ranks[1][what] = cut
        assert full.judge(CELL, ranks).fate is Fate.DIFFERS
    ranks = seen_by_two_ranks()
    for rank in ranks:
        rank["gradients"] = rank["reference"] = [[], []]
    assert full.judge(CELL, ranks).fate is Fate.DIFFERS
    assert full.judge(CELL, [vars(Outcome())] * 2).fate is Fate.DIFFERS


def test_an_error_on_one_rank_fails_the_cell() -> None:
    """Whatever the others saw; its text is kept."""
    ranks = seen_by_two_ranks()
    ranks[0]["error"] = "RuntimeError: no"
    assert full.judge(CELL, ranks) == Result(CELL, Fate.FAILS, "RuntimeError: no")


# -- all of them ---------------------------------------------------------------------


def test_the_acceptance_grid_is_complete() -> None:
    """S in 2..6, n in 1..8, both rules, both metadata modes, both schedules."""
    cells = full.all_cells()
    assert len(cells) == len(set(cells)) == 5 * 8 * 2 * 2 * 2
    assert set(full.sample_cells()) <= set(cells)


@pytest.mark.parametrize("fate", list(Fate))
def test_any_cell_that_is_not_as_expected_ends_with_exit_code_1(
    fate: Fate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is named."""
    results = [Result(CELL, fate), Result(Cell("split", 3, 1, "torch", "static"), fate)]
    monkeypatch.setattr(full, "run", lambda _: results)
    monkeypatch.setattr(sys, "argv", ["full.py", "--sample"])
    assert full.main() == 1
    printed = capsys.readouterr().out
    named = [r.cell for r in results if str(r.cell) in printed]
    assert named == [r.cell for r in results if fate is not r.cell.expected]


def test_the_committed_table_has_every_cell_as_expected() -> None:
    """docs/full.md is what a whole run without a deviation wrote."""
    page = _PAGE.read_text("utf-8")
    cells = full.all_cells()
    assert full.tables([Result(cell, cell.expected) for cell in cells]).strip() in page
    assert f"{len(cells)} cells" in page
    assert "Deviations from the expected: None." in page
