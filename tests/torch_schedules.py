"""Every schedule torch ships, on real ranks, beside what the checker says of it.

    python tests/torch_schedules.py            all cells; writes docs/torch_schedules.md
    python tests/torch_schedules.py --sample   the few that `make test` runs

Four processes per cell, in a process group never used before, with NCCL's rules
emulated. The checker is asked with the host blocking, as it is on gloo. Exit code 1 if
the two disagree on a cell: on refused, passes or hangs, on torch's reason for refusing,
or on the verdict of a hang.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

import pptrace
from pptrace import verdicts
from pptrace.checker import CheckResult, check
from pptrace.diagnosis import diagnose
from pptrace.hooks import emulation, session  # noqa: F401 - loaded before the forks
from pptrace.report import Report
from pptrace.runs import load_run
from quiescence import Watch, read_heads
from schedule_worker import Block, Case, run_case

_ROOT = Path(__file__).parents[1]
sys.path.append(str(_ROOT / "examples"))

from train_1f1b import UnguardedSchedule1F1B  # noqa: E402 - an example, no package

__all__ = [
    "Cell",
    "Outcome",
    "all_cells",
    "disagreement",
    "expected",
    "judge",
    "sample_cells",
    "tables",
]

RANKS = 4
COUNTS = range(1, 9)
RULES = ("split", "coalesced")
METADATA = ("static", "dynamic")
UNGUARDED = "UnguardedSchedule1F1B"
STAGES_PER_RANK = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    UNGUARDED: 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
_V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")

PASSES, REFUSED, HANGS = "passes", "refused", "hangs"
FAILS, DIFFERS, DIED, UNDECIDED = "fails", "differs", "died", "undecided"
SIGNS = {
    PASSES: "✓",
    REFUSED: "R",
    HANGS: "H",
    FAILS: "E",
    DIFFERS: "≠",
    DIED: "†",
    UNDECIDED: "?",
}

TOLERANCE = 1e-12
"""Absolute, in float64: a pipeline scales gradients after their sum, not before."""
CELL_LIMIT_S = 90.0
"""Without a result and without quiescence: then the cell is not decided."""
_POLL_S = 0.05
_HANG_AFTER_S = 3600  # pptrace's own detection has no part in this
_PARAMETERS = sum(p.numel() for p in Block(1).parameters())
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Cell:
    """One schedule of torch's on four ranks, under one set of conditions."""

    schedule: str
    n: int
    rule: str
    eager: bool
    metadata: str

    @property
    def case(self) -> Case:
        """What each rank runs: two training steps."""
        return Case(
            self.schedule,
            self.n,
            source="torch",
            metadata=self.metadata,
            stages_per_rank=STAGES_PER_RANK[self.schedule],
            placement="v" if self.schedule in _V_SHAPED else "loop",
        )

    def __str__(self) -> str:
        group = "eager" if self.eager else "lazy"
        name = self.schedule.removeprefix("Schedule")
        return f"{name:22} n={self.n} {self.rule:9} {group:5} {self.metadata:7}"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell, or what the checker says will."""

    fate: str
    code: str = ""
    """Of a hang: code of the verdict."""
    culprits: tuple[int, ...] = ()
    detail: str = ""
    """Torch's reason to refuse, an error, the verdict's sentence."""


def all_cells() -> list[Cell]:
    """All there are: 512."""
    return [
        Cell(schedule, n, rule, eager, metadata)
        for rule, eager, schedule, n, metadata in itertools.product(
            RULES, (False, True), STAGES_PER_RANK, COUNTS, METADATA
        )
    ]


def sample_cells() -> list[Cell]:
    """Those that the tests run: each schedule, each fate, each condition."""
    names = tuple(STAGES_PER_RANK)
    lazy = [Cell(name, 1, "split", False, "static") for name in names]
    eager = [Cell(name, 4, "coalesced", True, "dynamic") for name in names]
    return [
        *lazy,
        Cell("ScheduleZBVZeroBubble", 5, "split", False, "dynamic"),
        *eager,
        Cell(UNGUARDED, 2, "coalesced", True, "static"),
        Cell("ScheduleDualPipeV", 8, "coalesced", True, "static"),
    ]


# -- what the checker says -----------------------------------------------------------


def _start_up(cell: Cell) -> str:
    """What stands in the checker for the start-up that the emulated ranks have.

    They run the installed torch's: votes by single ops, then shapes. Under the
    coalesced rule the shapes too go by single ops, as torch up to 2.8 sent them; on a
    lazy group only `shapes` keeps them off the group's communicator, and the votes, on
    pair communicators that nothing uses later, make no difference.
    """
    return "shapes" if cell.rule == "coalesced" and not cell.eager else "votes"


@functools.cache
def expected(cell: Cell) -> Outcome:
    """The checker's word, for a first step and then for one that is not the first."""
    for preconnect in False, True:
        said = _of_check(_check(cell, preconnect=preconnect))
        if said.fate is not PASSES:
            return said
    return said


def _check(cell: Cell, *, preconnect: bool) -> CheckResult:
    name = cell.schedule
    cls = UnguardedSchedule1F1B if name == UNGUARDED else getattr(torch_schedules, name)
    return check(
        cls,
        num_stages=RANKS * STAGES_PER_RANK[name],
        num_ranks=RANKS,
        n_microbatches=cell.n,
        rule=cell.rule,
        eager=cell.eager,
        metadata=cell.metadata,
        host="blocking",
        start_up=_start_up(cell),
        preconnect=preconnect,
    )


def _of_check(result: CheckResult) -> Outcome:
    if result.ok:
        return Outcome(PASSES)
    if result.findings[0].code == verdicts.REFUSED:
        reason = result.findings[0].sentence.partition(": ")[2]
        return Outcome(REFUSED, detail=reason)
    return _of_report(result.report)


def _of_report(report: Report) -> Outcome:
    first = report.findings[0]
    return Outcome(HANGS, first.code, first.culprits, first.sentence)


def disagreement(cell: Cell, found: Outcome) -> str:
    """One line if the checker says something else than what was found, else nothing."""
    said = expected(cell)
    same = said.fate == found.fate
    if same and said.fate == REFUSED:
        same = said.detail.strip() == found.detail.strip()
    if same and said.fate == HANGS:
        same = (said.code, said.culprits) == (found.code, found.culprits)
    if same:
        return ""
    return f"{cell}: checker {_words(said)}; real ranks {_words(found)}"


def _words(outcome: Outcome) -> str:
    who = f" r{','.join(map(str, outcome.culprits))}" if outcome.culprits else ""
    text = f" ({outcome.detail})" if outcome.detail else ""
    return f"{outcome.fate} {outcome.code}{who}{text}"


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
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # `run_case` takes torch's schedules from there by name.
    setattr(torch_schedules, UNGUARDED, UnguardedSchedule1F1B)
    pptrace.enable(
        folder / "runs",
        emulate="nccl",
        rule=cells[0].rule,
        eager=cells[0].eager,
        hang_after=_HANG_AFTER_S,
        report=False,
        preflight="off",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for cell in cells:
        line = json.dumps(asdict(run_case(cell.case)))
        with (folder / f"rank{rank}.jsonl").open("a") as file:
            file.write(line + "\n")
        dist.barrier()
    while True:
        signal.pause()


# -- one job -------------------------------------------------------------------------


def run_job(cells: list[Cell], folder: Path) -> list[Outcome]:
    """Run cells of one rule and kind of group in one job, up to the first that sticks.

    Returns what was found of all that were decided, at least of one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    pids = [_fork(rank, port, cells, folder) for rank in range(RANKS)]
    try:
        return _follow(cells, folder, pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _follow(cells: list[Cell], folder: Path, pids: list[int]) -> list[Outcome]:
    found: list[Outcome] = []
    watch = Watch(RANKS)
    deadline = time.monotonic() + CELL_LIMIT_S
    while len(found) < len(cells):
        # Whether nothing moves any more is asked first, then what there is by then.
        is_stuck = watch.see(read_heads(folder / "runs"))
        ended = [rank for rank, pid in enumerate(pids) if _is_gone(pid)]
        here = [x for x in _lines(folder, len(found)) if x is not None]
        if len(here) == RANKS:
            found.append(judge(cells[len(found)], here))
            deadline = time.monotonic() + CELL_LIMIT_S
        elif ended:
            found.append(Outcome(DIED, detail=_last_words(folder, ended[0])))
        elif is_stuck:
            found.append(_stuck(folder, here))
        elif time.monotonic() > deadline:
            found.append(Outcome(UNDECIDED))
        else:
            time.sleep(_POLL_S)
            continue
        if found[-1].fate not in {PASSES, REFUSED, DIFFERS}:
            break
    return found


def _stuck(folder: Path, here: list[dict[str, Any]]) -> Outcome:
    """Ask the post-mortem; ranks that wrote a line have ended the cell."""
    errors = [line["error"] for line in here if line["error"]]
    if errors:
        return Outcome(FAILS, detail="; ".join(errors))
    run = load_run(folder / "runs")
    report = diagnose(run.logs)
    return _of_report(report) if report.findings else Outcome(HANGS)


def _is_gone(pid: int) -> bool:
    """Whether a child has ended; it is left for `waitpid`."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _lines(folder: Path, index: int) -> list[dict[str, Any] | None]:
    """What each rank wrote of the cell with this index; None if it has not."""
    found: list[dict[str, Any] | None] = []
    for rank in range(RANKS):
        path = folder / f"rank{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text.split("\n")[:-1]  # the last may be half written
        found.append(json.loads(lines[index]) if index < len(lines) else None)
    return found


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"rank{rank}.log").read_text(errors="replace").split("\n")
    return f"rank {rank}: " + " | ".join(filter(None, lines[-4:]))


def judge(cell: Cell, ranks: list[dict[str, Any]]) -> Outcome:
    """Of a cell that every rank ended: refused, or the numbers compared.

    ``ranks`` are `schedule_worker.Outcome` as mappings, in order of ranks.
    """
    errors = sorted({rank["error"] for rank in ranks})
    if errors != [""]:
        # Refused: the same ValueError everywhere, before anything ran.
        kind, _, reason = errors[0].partition(": ")
        is_refusal = len(errors) == 1 and kind == "ValueError"
        if is_refusal and not any(rank["actions"] for rank in ranks):
            return Outcome(REFUSED, detail=reason)
        return Outcome(FAILS, detail="; ".join(filter(None, errors)))
    last = ranks[0 if cell.schedule in _V_SHAPED else -1]
    size = _PARAMETERS * STAGES_PER_RANK[cell.schedule]
    pairs = [(last["losses"], last["reference_losses"], cell.n)]
    pairs += [(rank["gradients"], rank["reference"], size) for rank in ranks]
    flat = itertools.chain.from_iterable
    for ours, theirs, length in pairs:
        if [len(step) for step in (*ours, *theirs)] != [length] * 4:  # two steps each
            return Outcome(DIFFERS, detail="losses or gradients are missing")
        for a, b in zip(flat(ours), flat(theirs), strict=True):
            if not abs(a - b) <= TOLERANCE:  # not (x > y): so that NaN is a difference
                return Outcome(DIFFERS, detail=f"{a} is not {b}")
    return Outcome(PASSES)


# -- all of them ---------------------------------------------------------------------


def run(cells: list[Cell]) -> dict[Cell, Outcome]:
    """Run all cells, those first that should not end their job; a line for each."""
    results: dict[Cell, Outcome] = {}
    for kind in itertools.product(RULES, (False, True)):
        todo = [cell for cell in cells if (cell.rule, cell.eager) == kind]
        todo.sort(key=lambda cell: expected(cell).fate == HANGS)
        while todo:
            folder = Path(tempfile.mkdtemp(prefix="pptrace-torch-"))
            began = time.monotonic()
            found = dict(zip(todo, run_job(todo, folder), strict=False))
            results |= found
            todo = todo[len(found) :]
            _say(found, folder, time.monotonic() - began)
    return {cell: results[cell] for cell in cells}


def _say(found: dict[Cell, Outcome], folder: Path, seconds: float) -> None:
    wrong = [line for line in map(disagreement, found, found.values()) if line]
    for cell, outcome in found.items():
        print(f"{cell} {_words(outcome)[:120]}")
    print(f"-- {seconds:.1f} s", *wrong, sep="\n   ")
    if wrong:
        print(f"   black boxes and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    sys.stdout.flush()


def tables(results: dict[Cell, Outcome]) -> str:
    """A table per rule and kind of group: what real ranks did, by schedule and n."""
    lines: list[str] = []
    for rule, eager in itertools.product(RULES, (False, True)):
        lines += [f"### `{rule}`, {'eager' if eager else 'lazy'} group", ""]
        lines += ["| schedule | metadata | " + " | ".join(f"n={n}" for n in COUNTS)]
        lines[-1] += " |"
        lines += ["|---|---|" + "---|" * len(COUNTS)]
        for name, metadata in itertools.product(STAGES_PER_RANK, METADATA):
            cells = [Cell(name, n, rule, eager, metadata) for n in COUNTS]
            row = " | ".join(_sign(results.get(cell)) for cell in cells)
            lines.append(f"| {name} | {metadata} | {row} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _sign(found: Outcome | None) -> str:
    if found is None:
        return ""
    code = found.code.removeprefix("PPT") if found.code else ""
    return f"{SIGNS[found.fate]} {code}".rstrip()


def _wrong_in_torch(results: dict[Cell, Outcome]) -> str:
    """All that is no pass, one line per schedule, fate and conditions."""
    groups: dict[tuple[str, ...], list[int]] = {}
    details: dict[tuple[str, ...], str] = {}
    for cell, found in results.items():
        if found.fate != PASSES:
            key = (cell.schedule, found.fate, found.code, _conditions(cell, found))
            groups.setdefault(key, []).append(cell.n)
            details.setdefault(key, found.detail)
    return "\n".join(
        f"- `{key[0]}` {' '.join(filter(None, key[1:3]))} at n = "
        f"{', '.join(map(str, sorted(set(counts))))}{key[3]}: {details[key]}"
        for key, counts in groups.items()
    )


def _conditions(cell: Cell, found: Outcome) -> str:
    """None of a refusal: torch refuses whatever they are."""
    if found.fate == REFUSED:
        return ""
    group = "eager" if cell.eager else "lazy"
    return f" (`{cell.rule}`, {group} group)"


def write_page(results: dict[Cell, Outcome], seconds: float) -> None:
    """Write docs/torch_schedules.md."""
    wrong = [line for line in map(disagreement, results, results.values()) if line]
    fates = [outcome.fate for outcome in results.values()]
    counts = ", ".join(f"{fates.count(f)} {f}" for f in SIGNS if f in fates)
    text = _PAGE.format(
        date=datetime.datetime.now(datetime.timezone.utc).date(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        python=platform.python_version(),
        torch=torch.__version__,
        pptrace=pptrace.__version__,
        cells=len(results),
        minutes=seconds / 60,
        counts=counts,
        found="\n".join(f"- {line}" for line in wrong) if wrong else "None.",
        faults=_wrong_in_torch(results),
        tables=tables(results),
    )
    (_ROOT / "docs" / "torch_schedules.md").write_text(text, "utf-8")


_PAGE = """\
# Torch's own schedules: the checker beside real ranks

Written by `make torch-schedules` on {date}: {cells} cells, each on four processes on gloo
with NCCL's rules emulated, two training steps in a process group never used before.
{machine}; Python {python}, torch {torch}, pptrace {pptrace}; {minutes:.1f} minutes. No GPU
was involved.

Found: {counts}.

**Disagreements between checker and real ranks**: {found}

The checker was asked with `host="blocking"`, as waits are on gloo, for a first step and
for one after everything has been used. It has to agree on passes, refused or hangs; on
torch's words where torch refuses; on code and culprits of the verdict where it hangs (the
real ranks' from their black boxes). Hangs are decided by quiescence, not by a time-out
([how](full.md)). A pass means losses and every gradient equal those of the model without
a pipeline (float64, allowed 1e-12).

## What is wrong in torch's own schedules

A refusal is a limit that the schedule need not have: [the fixed ones](schedules.md) take
every n. `UnguardedSchedule1F1B` is torch's `Schedule1F1B` without its check of n, and
shows what the check keeps away. The words are those for the first n of each line.

{faults}

Not in these cells: `defer_pp_recv=True`, and hosts that do not block
([the checker](checker.md)).

## All cells

✓ passes; R refused by torch; H hangs, with the verdict's number (PPT0xx). E an error in a
call, ≠ other results, † a process ended, ? not decided in time.

**Start-up.** The ranks run the installed torch's: a vote by single ops, then the shapes.
Under `coalesced` the shapes go by single ops too, as in the releases that had the rule.
On an eager group the vote uses every edge both ways before the first microbatch: that is
why 1F1B with n < S passes there. Releases that had the `coalesced` rule took no vote, so
for it the checker's default start-up is theirs; the cells below were checked with
`start_up="votes"` where the group is eager. With the default the checker finds, for the
old releases, a first-use deadlock (PPT002) of `UnguardedSchedule1F1B` at n = 1, 2 and 3
there; real ranks cannot show it with the installed torch.

{tables}
"""


def main() -> int:
    """Run; 0 if the checker and the real ranks agree on every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", action="store_true", help="only a few cells")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    began = time.monotonic()
    results = run(sample_cells() if options.sample else all_cells())
    if options.json:
        rows = [[asdict(c), asdict(found)] for c, found in results.items()]
        options.json.write_text(json.dumps(rows))
    if not options.sample:
        write_page(results, time.monotonic() - began)
    wrong = [line for line in map(disagreement, results, results.values()) if line]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"checker and real ranks agree on {len(results) - len(wrong)} of ", end="")
    print(f"{len(results)} cells")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
