"""The main job: a 1F1B run hangs, explains itself, and trains with the fixed schedule.

Four ranks on this machine, gloo with NCCL's matching rules (``PPTRACE_EMULATE=nccl``),
two microbatches on four stages. Takes well under a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("PPTRACE_DIR", "pptrace-out")).resolve()
HANG_AFTER_S = 3.0


def start(schedule: str) -> subprocess.Popen[str]:
    """Start the job under torchrun, in a process group of its own."""
    environment = os.environ | {
        "PPTRACE_DIR": str(OUT),
        "PPTRACE_EMULATE": "nccl",
        "PPTRACE_HANG_AFTER": str(HANG_AFTER_S),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", str(HERE / "train_1f1b.py")]
    command += ["--microbatches", "2", "--schedule", schedule]
    return subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def show_until(job: subprocess.Popen[str], last: str, timeout: float) -> bool:
    """Print what a job prints, up to the line that contains ``last`` or its end."""
    watchdog = threading.Timer(timeout, stop, [job])
    watchdog.start()
    assert job.stdout is not None
    try:
        for line in job.stdout:
            if "OMP_NUM_THREADS" in line or line.startswith("****"):
                continue
            print(line, end="", flush=True)
            if last in line:
                return True
    finally:
        watchdog.cancel()
    return False


def stop(job: subprocess.Popen[str]) -> None:
    """End a job and all its ranks, as a user's Ctrl-C would."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def newest_run(since: float) -> Path | None:
    """The run's folder made after ``since`` (seconds since the epoch)."""
    runs = [p for p in OUT.glob("*/") if p.stat().st_mtime >= since]
    return max(runs, key=lambda p: p.stat().st_mtime, default=None)


def say(text: str) -> None:
    """Print a line of the demo itself."""
    print(f"\n\033[1m>>> {text}\033[0m" if sys.stdout.isatty() else f"\n>>> {text}")
    sys.stdout.flush()


def main() -> int:
    """Run both jobs; 0 if the first hung and explained itself and the second trained."""
    say("torch's own 1F1B, 2 microbatches on 4 stages: it hangs ...")
    began = time.time()
    job = start("torch")
    try:
        explained = show_until(job, "pptrace explain", timeout=60)
    finally:
        stop(job)
    run = newest_run(began - 1)
    report = run / "report.json" if run is not None else None
    if not explained or report is None or "PPT001" not in report.read_text():
        say("no report appeared: the demo failed")
        return 1

    say("the same job with pptrace.schedules.Schedule1F1B trains:")
    fixed = start("fixed")
    try:
        show_until(fixed, "nothing stops it before its end", timeout=60)
        code = fixed.wait(timeout=20)
    finally:
        stop(fixed)
    if code != 0:
        say(f"the fixed job ended with exit code {code}: the demo failed")
        return 1

    trace = run / "job.pftrace.gz"
    subprocess.run(
        [sys.executable, "-m", "pptrace", "trace", str(run), "-o", str(trace)],
        check=True,
    )
    say(f"report  {run / 'report.json'}")
    say(f"trace   {trace}   (open it in https://ui.perfetto.dev)")
    say(f"again   pptrace report {run}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
