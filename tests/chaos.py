"""Kill one rank of a training job at a random moment, many times; check the report.

    python tests/chaos.py --runs 100 --seed 1

Each run forks four ranks that train with 1F1B, on bare gloo or with NCCL's rules
emulated, and sends SIGKILL to one of them after a random time between start-up and a
few hundred microbatches. Then ``diagnose`` must name the dead rank and as victims
those that wait for it; no torn slot may have been accepted, and of the dead rank's
records at most the slot in flight may be missing.

`tests/test_chaos.py` runs a few of these; ``make chaos`` runs a hundred.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pptrace
from pptrace.diagnosis import diagnose
from pptrace.errors import PptraceError
from pptrace.hooks import session  # noqa: F401 - imported before the ranks are forked
from pptrace.records import Kind, RankLog
from pptrace.report import Finding, Report
from pptrace.runs import load_run

RANKS = 4
HANG_AFTER_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """One run: what was done and what is wrong with what pptrace said."""

    seed: int
    victim: int
    moment_s: float
    emulate: bool
    found: str
    faults: tuple[str, ...]


def train(rank: int, port: int, out: Path, *, emulate: bool) -> None:
    """One rank, for ever."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    pptrace.enable(
        out / "runs", hang_after=HANG_AFTER_S, emulate="nccl" if emulate else "none"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    while True:
        if rank == 0:
            schedule.step(x)
        elif rank == RANKS - 1:
            schedule.step(target=y)
        else:
            schedule.step()


def fork_rank(rank: int, port: int, out: Path, *, emulate: bool) -> int:
    """Fork one rank; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        train(rank, port, out, emulate=emulate)
    except BaseException:  # noqa: BLE001 - the rank's end, as an interpreter's would be
        import atexit
        import traceback

        kind, error, trace = sys.exc_info()
        traceback.print_exception(kind, error, trace)
        sys.last_value = error
        atexit._run_exitfuncs()
    finally:
        os._exit(1)


def settle(out: Path, victim: int) -> dict[int, RankLog]:
    """Wait until the survivors have ended or stand still; their black boxes."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            logs = load_run(out / "runs").logs
        except PptraceError:
            continue
        now = time.monotonic_ns()
        others = [log for rank, log in logs.items() if rank != victim]
        if others and all(
            log.alive is False or now - log.progress_ns > 1.5e9 for log in others
        ):
            return logs
    return load_run(out / "runs").logs


def faults_of(report: Report, logs: dict[int, RankLog], victim: int) -> list[str]:
    """What is wrong with the report and the files."""
    faults = []
    if victim in logs:
        died = [f for f in report.findings if victim in f.culprits]
        if not died or report.findings[0] is not died[0]:
            faults.append(f"verdict is {_short(report.verdict)}")
        elif report.findings[0].code != "PPT052":
            faults.append(f"code is {report.findings[0].code}")
        else:
            faults += _owed(died[0], report, logs, victim)
    faults += [
        f"r{rank}: {fault}" for rank, log in logs.items() for fault in _gaps(log)
    ]
    return faults


def _owed(
    verdict: Finding, report: Report, logs: dict[int, RankLog], victim: int
) -> list[str]:
    """Survivors that wait for the dead rank must be victims, and what it owes named."""
    faults = []
    for op in report.pending:
        if op.peer != victim or op.rank == victim:
            continue
        if op.rank not in verdict.victims:
            faults.append(f"r{op.rank} waits for {op.label} of the dead, no victim")
        text = " ".join((verdict.sentence, *verdict.evidence, *report.chain))
        if op.reason == "unmatched" and op.label not in text:
            faults.append(f"owed {op.label} to r{op.rank}, not named")
    if set(verdict.culprits) != {victim}:
        faults.append(f"culprits {verdict.culprits}")
    if any(logs[r].alive is False for r in verdict.victims if r in logs):
        pass  # on gloo the peers end with "connection closed": victims all the same
    return faults


def _gaps(log: RankLog) -> list[str]:
    """Slots lost or accepted in a state that cannot be."""
    seqs = [r.seq for r in log.records]
    faults = []
    if seqs and seqs != list(range(seqs[0], seqs[-1] + 1)):
        faults.append(f"records missing between {seqs[0]} and {seqs[-1]}")
    if log.torn > 1:
        faults.append(f"{log.torn} torn slots")
    if seqs and seqs[-1] < log.next_seq - 2:
        faults.append(f"last record {seqs[-1]}, next {log.next_seq}")
    return faults + [
        f"record {record.seq} accepted half written"
        for record in log.records
        if not record.posted_ns or (record.kind is Kind.OP and record.group is None)
    ]


def _short(finding: Finding | None) -> str:
    if finding is None:
        return "none"
    return f"{finding.code} {finding.culprits}: {finding.sentence}"


def one_run(seed: int, folder: Path) -> Outcome:
    """One job, one kill."""
    choose = random.Random(seed)
    victim = choose.randrange(RANKS)
    emulate = choose.random() < 0.7
    moment = choose.choice([choose.uniform(0, 0.6), choose.uniform(0.6, 2.5)])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [fork_rank(r, port, folder, emulate=emulate) for r in range(RANKS)]
    try:
        time.sleep(moment)
        os.kill(pids[victim], signal.SIGKILL)
        os.waitpid(pids[victim], 0)
        pids[victim] = 0
        logs = settle(folder, victim)
        report = diagnose(logs)
        faults = faults_of(report, logs, victim)
    except PptraceError as error:
        # Killed before any rank had got as far as its black box.
        said = "".join(p.read_text()[-500:] for p in folder.glob("rank*.log"))
        return Outcome(seed, victim, moment, emulate, f"no files: {error} {said}", ())
    finally:
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return Outcome(seed, victim, moment, emulate, _short(report.verdict), tuple(faults))


def main() -> int:
    """Run them; print each outcome; 0 if all reports were right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory(prefix="chaos") as folder:
            outcome = one_run(seed, Path(folder))
        bad += bool(outcome.faults)
        print(
            f"{'FAULT' if outcome.faults else 'ok   '} seed {seed} r{outcome.victim} "
            f"after {outcome.moment_s:.2f} s {'nccl' if outcome.emulate else 'gloo'}: "
            f"{outcome.found}",
            *(f"\n      {fault}" for fault in outcome.faults),
            flush=True,
        )
    print(f"{options.runs - bad} of {options.runs} runs reported right")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
