"""Run torch's 1F1B and the fixed one for every S, n, rule and metadata mode.

    python tests/full.py             all 320 cells; writes docs/full.md
    python tests/full.py --sample    the few that `make test` runs

Each cell runs in S real processes, in a process group never used before, with NCCL's
rules emulated. It passes if it finishes, and losses and every gradient equal those of
the model without a pipeline; it hangs if its black boxes show that nothing can happen
any more (`quiescence`). Exit code 1 if any cell does not do what is expected of it.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

import pptrace
from pptrace.hooks import emulation, session  # noqa: F401 - loaded before the forks
from pptrace.schedules import Schedule1F1B  # noqa: F401 - the same
from quiescence import Watch, read_heads
from schedule_worker import Block, Case, run_case

_ROOT = Path(__file__).parents[1]
sys.path.append(str(_ROOT / "examples"))

from train_1f1b import UnguardedSchedule1F1B  # noqa: E402 - an example, no package

__all__ = [
    "Cell",
    "Fate",
    "Result",
    "all_cells",
    "deviations",
    "judge",
    "sample_cells",
    "tables",
]

SIZES = range(2, 7)
COUNTS = range(1, 9)
SAMPLE = {  # a cell that hangs costs a job of its own, those that pass share one
    2: {"torch": (1, 2), "pptrace": (1, 3)},
    3: {"torch": (3,), "pptrace": (2,)},
    4: {"torch": (3, 5), "pptrace": (1, 2, 3, 4)},
}
RULES = {
    "split": "Rule `split`, as torch 2.13 has it",
    "coalesced": "Rule `coalesced`, as torch 2.8 had it",
}
SOURCES = {
    "torch": "torch's `Schedule1F1B`, without its check of n",
    "pptrace": "`pptrace.schedules.Schedule1F1B`",
}
METADATA = ("static", "dynamic")

TOLERANCE = 1e-12
"""Absolute, in float64: a pipeline scales gradients after their sum, not before."""
CELL_LIMIT_S = 90.0
"""Without a result and without quiescence: then the cell is not decided."""
_POLL_S = 0.05
_HANG_AFTER_S = 3600  # pptrace's own detection has no part in this
_PARAMETERS = sum(p.numel() for p in Block(1).parameters())
_PR_SET_PDEATHSIG = 1


class Fate(Enum):
    """What became of a cell; the value stands in the tables."""

    PASSES = "✓"
    HANGS = "H"
    FAILS = "E"
    """A call raised an error."""
    DIFFERS = "≠"
    """It finished, with other losses or gradients."""
    DIED = "†"
    """A process ended."""
    UNDECIDED = "?"


@dataclass(frozen=True)
class Cell:
    """One schedule on S ranks."""

    rule: str
    size: int
    """Number of ranks and of stages."""
    n: int
    source: str
    metadata: str

    @property
    def expected(self) -> Fate:
        """What the rules say of it."""
        if self.source == "pptrace" or self.n >= self.size:
            return Fate.PASSES
        # On a communicator of two, a first use that the sides see differently is an
        # error on the side that expects less; larger ones just wait.
        if self.rule == "coalesced" and self.size == 2:
            return Fate.FAILS
        return Fate.HANGS

    def __str__(self) -> str:
        return (
            f"{self.rule:9} S={self.size} n={self.n} {self.source:7} {self.metadata:7}"
        )


@dataclass(frozen=True)
class Result:
    """A cell and what became of it."""

    cell: Cell
    fate: Fate
    detail: str = ""
    difference: float = 0.0
    """Largest difference of a loss or gradient from those without a pipeline."""


def all_cells() -> list[Cell]:
    """All there are."""
    counts = dict.fromkeys(SOURCES, COUNTS)
    return [cell for size in SIZES for cell in _cells(size, counts)]


def sample_cells() -> list[Cell]:
    """Those that the tests run."""
    return [cell for size, counts in SAMPLE.items() for cell in _cells(size, counts)]


def _cells(size: int, counts: Mapping[str, Iterable[int]]) -> Iterator[Cell]:
    """Of one rule after the other, first those that should pass: they share a job."""
    for rule in RULES:
        cells = [
            Cell(rule, size, n, source, metadata)
            for source in SOURCES
            for n in counts[source]
            for metadata in METADATA
        ]
        yield from sorted(cells, key=lambda cell: cell.expected is not Fate.PASSES)


# -- one rank ------------------------------------------------------------------------


def _fork(rank: int, port: int, cells: list[Cell], folder: Path) -> int:
    """Start one rank; its pid. It runs until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run_rank(rank, port, cells, folder)
    except BaseException:  # noqa: BLE001 - a child must never return to the loop
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _run_rank(rank: int, port: int, cells: list[Cell], folder: Path) -> NoReturn:
    """Run all cells, one line of results after each."""
    size, rule = cells[0].size, cells[0].rule
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # `run_case` takes torch's schedules from there by name.
    torch_schedules.UnguardedSchedule1F1B = UnguardedSchedule1F1B
    pptrace.enable(
        folder / "runs",
        emulate="nccl",
        rule=rule,
        hang_after=_HANG_AFTER_S,
        report=False,
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for cell in cells:
        name = "Schedule1F1B" if cell.source == "pptrace" else "UnguardedSchedule1F1B"
        case = Case(name, cell.n, source=cell.source, metadata=cell.metadata)
        line = json.dumps(asdict(run_case(case)))
        with (folder / f"rank{rank}.jsonl").open("a") as file:
            file.write(line + "\n")
        dist.barrier()
    while True:
        signal.pause()


# -- one job -------------------------------------------------------------------------


def run_job(cells: list[Cell], folder: Path) -> list[Result]:
    """Run cells of one size and rule in one job, up to the first that does not pass.

    Returns the results of all that were decided, at least one.
    """
    size = cells[0].size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    pids = [_fork(rank, port, cells, folder) for rank in range(size)]
    try:
        return _follow(cells, folder, pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _follow(cells: list[Cell], folder: Path, pids: list[int]) -> list[Result]:
    results: list[Result] = []
    watch = Watch(len(pids))
    deadline = time.monotonic() + CELL_LIMIT_S
    while len(results) < len(cells):
        # Whether nothing moves any more is asked first, then what there is by then.
        is_stuck = watch.see(read_heads(folder / "runs"))
        ended = [rank for rank, pid in enumerate(pids) if _is_gone(pid)]
        cell, lines = cells[len(results)], _lines(folder, len(pids), len(results))
        here = [line for line in lines if line is not None]
        if len(here) == len(pids):
            results.append(judge(cell, here))
            deadline = time.monotonic() + CELL_LIMIT_S
        elif ended:
            results.append(Result(cell, Fate.DIED, _last_words(folder, ended[0])))
        elif is_stuck:
            errors = [line["error"] for line in here if line["error"]]
            fate = Fate.FAILS if errors else Fate.HANGS
            results.append(Result(cell, fate, "; ".join(errors)))
        elif time.monotonic() > deadline:
            results.append(Result(cell, Fate.UNDECIDED, _where(folder)))
        else:
            time.sleep(_POLL_S)
            continue
        if results[-1].fate not in {Fate.PASSES, Fate.DIFFERS}:
            break
    return results


def _is_gone(pid: int) -> bool:
    """Whether a child has ended; it is left for `waitpid`."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _lines(folder: Path, size: int, index: int) -> list[dict[str, Any] | None]:
    """What each rank wrote of the cell with this index; None if it has not."""
    found: list[dict[str, Any] | None] = []
    for rank in range(size):
        path = folder / f"rank{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text.split("\n")[:-1]  # the last may be half written
        found.append(json.loads(lines[index]) if index < len(lines) else None)
    return found


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"rank{rank}.log").read_text(errors="replace").split("\n")
    return f"rank {rank}: " + " | ".join(filter(None, lines[-4:]))


def _where(folder: Path) -> str:
    heads = read_heads(folder / "runs")
    counts = {rank: log.emulation for rank, log in heads.items()}
    return f"(blocked, sent, received) by rank: {counts}"


# -- judging -------------------------------------------------------------------------


def judge(cell: Cell, ranks: list[dict[str, Any]]) -> Result:
    """Compare what each rank saw of a finished cell with the model as a whole.

    ``ranks`` are `schedule_worker.Outcome` as mappings, in order of ranks.
    """
    errors = [rank["error"] for rank in ranks if rank["error"]]
    if errors:
        return Result(cell, Fate.FAILS, "; ".join(errors))
    last = ranks[-1]
    steps = len(last["reference_losses"])
    shapes = [(last["losses"], last["reference_losses"], cell.n)]
    shapes += [(r["gradients"], r["reference"], _PARAMETERS) for r in ranks]
    largest = 0.0
    for ours, theirs, size in shapes:
        if not steps or [len(x) for x in (*ours, *theirs)] != [size] * (2 * steps):
            return Result(cell, Fate.DIFFERS, "losses or gradients are missing")
        flat = itertools.chain.from_iterable
        for a, b in zip(flat(ours), flat(theirs), strict=True):
            # not (x <= y): so that NaN is a difference
            if not abs(a - b) <= TOLERANCE:
                return Result(cell, Fate.DIFFERS, f"{a} is not {b}", abs(a - b))
            largest = max(largest, abs(a - b))
    return Result(cell, Fate.PASSES, "", largest)


def deviations(results: Iterable[Result]) -> list[str]:
    """One line for each cell that did not do what was expected."""
    return [
        f"{r.cell}: expected {r.cell.expected.value}, found {r.fate.value} {r.detail}"
        for r in results
        if r.fate is not r.cell.expected
    ]


# -- all of them ---------------------------------------------------------------------


def run(cells: list[Cell]) -> list[Result]:
    """Run all cells; prints a line for each."""
    results: list[Result] = []
    while len(results) < len(cells):
        todo = cells[len(results) :]
        same = [c for c in todo if (c.size, c.rule) == (todo[0].size, todo[0].rule)]
        folder = Path(tempfile.mkdtemp(prefix="pptrace-full-"))
        began = time.monotonic()
        found = run_job(same, folder)
        results += found
        for result in found:
            print(f"{result.cell} {result.fate.name.lower()} {result.detail[:160]}")
        print(f"-- {time.monotonic() - began:.1f} s, {len(results)} of {len(cells)}")
        if deviations(found):
            print(f"   not as expected: black boxes and logs are in {folder}")
        else:
            shutil.rmtree(folder)
        sys.stdout.flush()
    return results


def tables(results: Iterable[Result]) -> str:
    """The tables of docs/full.md: a row per S and metadata mode, a column per n."""
    fates = {result.cell: result.fate.value for result in results}
    lines: list[str] = []
    for rule, rule_text in RULES.items():
        lines += [f"## {rule_text}", ""]
        for source, source_text in SOURCES.items():
            lines += [f"### {source_text}", ""]
            lines += ["| S | metadata | " + " | ".join(f"n={n}" for n in COUNTS) + " |"]
            lines += ["|---|---|" + "---|" * len(COUNTS)]
            for size in SIZES:
                for metadata in METADATA:
                    row = [
                        fates.get(Cell(rule, size, n, source, metadata), "")
                        for n in COUNTS
                    ]
                    lines.append(f"| {size} | {metadata} | {' | '.join(row)} |")
            lines.append("")
    return "\n".join(lines)


def write_page(results: list[Result], seconds: float) -> None:
    """Write docs/full.md."""
    wrong = deviations(results)
    largest = max(result.difference for result in results)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"
    text = _PAGE.format(
        found="\n".join(f"- {line}" for line in wrong) if wrong else "None.",
        machine=machine,
        date=today,
        python=platform.python_version(),
        torch=torch.__version__,
        pptrace=pptrace.__version__,
        cells=len(results),
        minutes=seconds / 60,
        largest=largest,
        tolerance=TOLERANCE,
        tables=tables(results).rstrip(),
    )
    (_ROOT / "docs" / "full.md").write_text(text, "utf-8")


_PAGE = """\
# 1F1B in every case: S = 2 to 6, n = 1 to 8

Written by `make full` on {date}: {cells} cells, each run by S real processes on gloo with
NCCL's rules emulated, in a process group that is set up lazily and was never used before.
Cells that pass follow each other in the same processes; one that does not ends them.
{machine}; Python {python}, torch {torch}, pptrace {pptrace}; {minutes:.1f} minutes.

| | |
|---|---|
| ✓ | two training steps finish; losses and the gradient of every parameter equal those of the model without a pipeline (float64, largest difference {largest:.1g}, allowed {tolerance:.0e}) |
| H | hangs: the job can never move again |
| E | fails: one rank's call raises an error, its neighbour waits for ever |
| ≠ † ? | finishes with other results; a process ended; not decided in time |

S is the number of stages (one per rank), n the number of microbatches. Metadata is
`static` if stages are given their shapes, `dynamic` if they exchange them at the start.

**A hang is decided by quiescence, not by a time-out.** The black box of each rank says,
at every heartbeat, how many of its host threads are blocked and how many messages it has
sent to and received from the other ranks. A job is hung if all hosts are blocked and, over
all ranks, as many messages were received as sent, and a later look at every rank, begun
when the first had ended on all, finds nothing changed (`tests/quiescence.py`).

**Expected**, and checked cell by cell: the fixed schedule always finishes; torch's does
exactly for n ≥ S. Waits block the host here, as on gloo; where they do not, as on CUDA, the
`coalesced` rule lets more of torch's n < S through (all but n = 1, by the model).

**Why E and not H for S = 2, n = 1 under `coalesced`.** Both ranks are in the first use of
the group's communicator, rank 0 with send and receive, rank 1 with its receive alone. On
a communicator of only two ranks NCCL exchanges both directions in one message, so rank 1
gets more than it expects: "message truncated", an error in its call. Rank 0 is held in its
own call for ever. With more ranks each direction waits for its own mirror, and all hang.

Deviations from the expected: {found}

{tables}
"""


def main() -> int:
    """Run; 0 if all is as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", action="store_true", help="only a few cells")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    began = time.monotonic()
    results = run(sample_cells() if options.sample else all_cells())
    if options.json:
        rows = [asdict(r.cell) | {"fate": r.fate.name} for r in results]
        options.json.write_text(json.dumps(rows))
    if not options.sample:
        write_page(results, time.monotonic() - began)
    wrong = deviations(results)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(results) - len(wrong)} of {len(results)} cells are as expected")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
