"""Programs as real processes: the black boxes they leave get the same verdicts.

A few cases always; all of them with ``PPTRACE_CASES=all`` in the environment.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from pptrace.commands_check import RunProgram
from pptrace.errors import InputError
from pptrace.program_job import run_program
from pptrace.programs import load, parse
from test_programs import _CASES, _NAMES, Expected

__all__: list[str] = []

_SAMPLE = ("b2", "e2", "g2")
_CHOSEN = _NAMES if os.environ.get("PPTRACE_CASES") == "all" else list(_SAMPLE)


@pytest.mark.multirank
@pytest.mark.parametrize("name", _CHOSEN)
def test_real_processes_get_the_verdict_of_the_check(name: str, tmp_path: Path) -> None:
    """Code, culprit and op are those written down by hand."""
    file = _CASES / f"{name}.pp"
    done = run_program(file, load(file), tmp_path)
    Expected.of(name).assert_met(done.report)


def _command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command = RunProgram()
    command.prepare_parser(parser)
    return command.run(parser.parse_args(arguments))


@pytest.mark.multirank
def test_a_program_that_is_right_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, threads, signals, collectives and payloads: exit code 0, no finding."""
    file = tmp_path / "right.pp"
    file.write_text(
        "group pp = 0-1\n"
        "r0:\n"
        "  thread { signal 1 go; wait signal 1 gone }\n"
        "  step GPipe n=1 { F0; S F0->1 [bf16 2x3]; R B0<-1; B0 }\n"
        "  a = all_reduce; wait a; barrier world\n"
        '  catch { F1 { raise ValueError "caught" } }\n'
        "  {S x->1, R y<-1}; W1\n"
        "r1:\n"
        "  wait signal 0 go; signal 0 gone\n"
        "  step GPipe n=1 { R F0<-0 [bf16 2x3]; F0; B0; S B0->0 }\n"
        "  all_reduce; barrier world\n"
        "  {R x<-0, S y->0}; I1\n"
    )
    assert _command(str(file), "--out", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == []
    assert [rank["state"] for rank in report["ranks"]] == ["exited", "exited"]


def test_groups_must_be_alike(tmp_path: Path) -> None:
    """Emulation sets up all groups at creation or none; the program says one of each."""
    text = "group a = 0-1 eager\ngroup b = 0-1\nr0: S x->1 @a; S x->1 @b\nr1:"
    with pytest.raises(InputError, match="a eager and b not"):
        run_program(tmp_path / "a.pp", parse(text), tmp_path)
