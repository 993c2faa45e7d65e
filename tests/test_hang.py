"""The main job: real processes hang, raise, die or dawdle, and the job says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import Job, ranks, run_folder, torchrun, wait_for, write_script
from pptrace.errors import InputError
from pptrace.runs import load_run
from test_hooks import PIPELINE

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_1f1b.py"

pytestmark = pytest.mark.multirank


def report_exists(out: Path) -> bool:
    """Whether the job has written its report."""
    return any(out.glob("*/report.json"))


def the_report(out: Path) -> dict[str, Any]:
    """The report the job wrote."""
    value: dict[str, Any] = json.loads((run_folder(out) / "report.json").read_text())
    return value


def hang(
    script: Path, nproc: int, out: Path, *arguments: str, **environment: str
) -> Job:
    """Run a job that hangs until it has printed its report."""
    printed = script.with_suffix(".log")
    return torchrun(
        script,
        nproc,
        *arguments,
        until=lambda: report_exists(out) and "pptrace explain" in printed.read_text(),
        timeout=100,
        PPTRACE_DIR=str(out),
        PPTRACE_HANG_AFTER="2",
        **environment,
    )


def post_mortem(out: Path) -> tuple[int, dict[str, Any]]:
    """``pptrace report --json`` on the output directory: exit code and report."""
    done = subprocess.run(
        [sys.executable, "-m", "pptrace", "report", str(out), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def copy_of(script: Path, folder: Path) -> Path:
    """The script in a folder of the test's own: its log goes beside it."""
    path = folder / script.name
    path.write_text(script.read_text())
    return path


class TestFoundingCase:
    """torch's own 1F1B, two microbatches on four stages."""

    def test_split_rule(self, tmp_path: Path) -> None:
        """The fused send, the lone receive, n < S and the remedy, live and afterwards."""
        out = tmp_path / "out"
        script = copy_of(EXAMPLE, tmp_path)
        job = hang(script, 4, out, PPTRACE_EMULATE="nccl", PPTRACE_RULE="split")
        live = the_report(out)
        code, after = post_mortem(out)
        assert code == 1
        for report in (live, after):
            verdict = report["findings"][0]
            assert verdict["code"] == "PPT001"
            assert verdict["culprits"] == [0]
            sentence = verdict["sentence"]
            assert "{isend F1→r1, irecv B0←r1}" in sentence
            assert "lone irecv F1←r0" in sentence
            assert "n=2 < S=4" in sentence
            assert "pptrace.schedules.Schedule1F1B" in " ".join(verdict["remedy"])
        assert [v["progress"] for v in live["ranks"]][1].startswith("op 3 of 8, next")
        assert live["trigger"].startswith("no progress for")
        assert job.output.count("PPT001 transport split: culprit") == 1
        assert {o["edge"] for o in live["pending"] if o["reason"] == "unmatched"} >= {
            "r0→r1",
            "r1←r0",
        }

    def test_coalesced_rule(self, tmp_path: Path) -> None:
        """As torch up to 2.8: the hosts stand inside the call, on the edges' first use."""
        out = tmp_path / "out"
        script = copy_of(EXAMPLE, tmp_path)
        hang(
            script,
            2,
            out,
            "--microbatches",
            "1",
            PPTRACE_EMULATE="nccl",
            PPTRACE_RULE="coalesced",
        )
        code, report = post_mortem(out)
        assert code == 1
        verdict = report["findings"][0]
        assert verdict["code"] in {"PPT002", "PPT005"}
        assert verdict["culprits"] == [0]
        assert "n=1 < S=2" in verdict["sentence"]

    def test_eager_groups_pass(self, tmp_path: Path) -> None:
        """n = S under the same rules trains to the end, without a report."""
        out = tmp_path / "out"
        job = torchrun(
            copy_of(EXAMPLE, tmp_path),
            2,
            "--microbatches",
            "2",
            PPTRACE_DIR=str(out),
            PPTRACE_EMULATE="nccl",
            PPTRACE_HANG_AFTER="5",
        )
        assert job.returncode == 0, job.output
        assert not report_exists(out)
        code, report = post_mortem(out)
        assert (code, report["findings"]) == (0, [])


class TestRaised:
    """An exception in one rank's chunk."""

    def test_the_report_names_it_and_its_victims(self, tmp_path: Path) -> None:
        """Rank 1 raises in F0: it is named with type, message and action."""
        out = tmp_path / "out"
        script = write_script(
            tmp_path,
            "pptrace.enable()\n"
            + PIPELINE
            + """
class Bad(Block):
    def forward(self, x):
        if dist.get_rank() == 1 and not torch.is_inference_mode_enabled():
            Bad.calls = getattr(Bad, "calls", 0) + 1
            if Bad.calls > 1:
                raise ValueError("the planted fault")
        return super().forward(x)

dist.init_process_group("gloo")
rank = dist.get_rank()
stage = PipelineStage(Bad(), rank, 4, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
one_step(schedule, torch.randn(8, 8), torch.randn(8, 8))
""",
        )
        job = torchrun(script, 4, PPTRACE_DIR=str(out), PPTRACE_HANG_AFTER="30")
        assert job.returncode != 0
        code, report = post_mortem(out)
        assert code == 1
        verdict = report["findings"][0]
        assert verdict["code"] == "PPT050"
        assert verdict["culprits"] == [1]
        assert "ValueError" in verdict["sentence"]
        assert "the planted fault" in verdict["sentence"]
        assert "F0" in verdict["sentence"]
        assert {2, 3} <= set(verdict["victims"])
        printed = job.output.count("pptrace: ERROR")
        assert printed == 1, "the job itself prints it, once, before it ends"


class TestSlow:
    """A rank that only takes long."""

    def test_straggler_is_a_note(self, tmp_path: Path) -> None:
        """One rank sleeps in forward for longer than hang_after: no deadlock verdict."""
        out = tmp_path / "out"
        script = write_script(
            tmp_path,
            "pptrace.enable()\n"
            + PIPELINE
            + """
class Slow(Block):
    def forward(self, x):
        if dist.get_rank() == 1 and os.environ.get("SLEPT") is None and Slow.armed:
            os.environ["SLEPT"] = "1"
            time.sleep(6)
        return super().forward(x)

Slow.armed = False
dist.init_process_group("gloo")
stage = PipelineStage(Slow(), dist.get_rank(), 3, torch.device("cpu"))
schedule = Schedule1F1B(stage, 3, loss_fn=nn.functional.mse_loss)
for step in range(3):
    one_step(schedule, torch.randn(9, 8), torch.randn(9, 8))
    Slow.armed = True
print("FINISHED")
dist.destroy_process_group()
""",
        )
        job = torchrun(script, 3, PPTRACE_DIR=str(out), PPTRACE_HANG_AFTER="2")
        assert job.returncode == 0, job.output
        assert job.output.count("FINISHED") == 3
        live = the_report(out)
        assert [f["code"] for f in live["findings"]] == ["PPT060"]
        assert live["findings"][0]["severity"] == "note"
        assert live["findings"][0]["culprits"] == [1]
        assert live["exit_code"] == 0
        code, after = post_mortem(out)
        assert code == 0
        assert all(f["severity"] == "note" for f in after["findings"])


class TestAsyncWorks:
    """Works whose wait returns at once, as on CUDA, from a stand-in backend."""

    BODY = """
from datetime import timedelta

class Later(dist.Work):
    '''Completes when the other side has posted too; wait() never blocks.'''
    def __init__(self, key, other):
        super().__init__()
        self.other = other
        store.set(key, "1")
    def wait(self, timeout=timedelta(0)):
        return True
    def is_completed(self):
        return store.check([self.other])

counts = {}
def key(kind, src, dst):
    k = counts[kind, src, dst] = counts.get((kind, src, dst), -1) + 1
    return [f"{x}/{src}/{dst}/{k}" for x in (kind, "rs"[kind == "r"])]

def send(pg, tensors, dst, tag=0):
    return Later(*key("s", dist.get_rank(), dst))
def recv(pg, tensors, src, tag=0):
    return Later(*key("r", src, dist.get_rank()))
dist.ProcessGroup.send, dist.ProcessGroup.recv = send, recv

pptrace.enable()
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
rank = dist.get_rank()
"""

    def test_never_completing_op_is_found(self, tmp_path: Path) -> None:
        """The host has gone on long ago; the unmatched send is still named."""
        out = tmp_path / "out"
        script = write_script(
            tmp_path,
            self.BODY
            + """
x = torch.ones(4)
if rank == 0:
    dist.send(x, 1)
    dist.isend(x, 1).wait()
    if os.environ["FAULT"] == "1":
        dist.isend(x, 1).wait()
else:
    dist.recv(x, 0)
    dist.irecv(x, 0).wait()
time.sleep(float(os.environ["STAY"]))
dist.destroy_process_group()
""",
        )
        hang(script, 2, out, FAULT="1", STAY="90")
        report = the_report(out)
        assert report["findings"][0]["code"] == "PPT010"
        unmatched = [o for o in report["pending"] if o["reason"] == "unmatched"]
        assert [(o["rank"], o["direction"], o["k"]) for o in unmatched] == [
            (0, "isend", 2)
        ]

    def test_ops_that_complete_later_are_seen_to(self, tmp_path: Path) -> None:
        """Dropped right after wait(), completed later: no alarm, and done is known."""
        out = tmp_path / "out"
        script = write_script(
            tmp_path,
            self.BODY
            + """
x = torch.ones(4)
if rank == 0:
    for _ in range(3):
        dist.isend(x, 1).wait()
    store.set("posted", "1")
    store.wait(["received"])
else:
    store.wait(["posted"])
    for _ in range(3):
        dist.irecv(x, 0).wait()
    store.set("received", "1")
time.sleep(5)
dist.destroy_process_group()
""",
        )
        job = torchrun(script, 2, PPTRACE_DIR=str(out), PPTRACE_HANG_AFTER="2")
        assert job.returncode == 0, job.output
        assert not report_exists(out)
        logs = load_run(out).logs
        for log in logs.values():
            assert [c.posted for c in log.channels] == [3]
            assert [c.done for c in log.channels] == [3]


def _kill_when_hung(tmp_path: Path, victim: int) -> dict[str, Any]:
    script = write_script(
        tmp_path,
        "pptrace.enable()\n"
        + PIPELINE
        + """
dist.init_process_group("gloo")
schedule = Schedule1F1B(make_stage(), 4, loss_fn=nn.functional.mse_loss)
while True:
    one_step(schedule, torch.randn(8, 8), torch.randn(8, 8))
""",
    )
    out = tmp_path / "out"
    with ranks(
        script, 3, PPTRACE_DIR=str(out), PPTRACE_HANG_AFTER="3", PPTRACE_EMULATE="nccl"
    ) as job:

        def stepping() -> bool:
            try:
                logs = load_run(out).logs
            except InputError:  # not there yet, or just being made
                return False
            return len(logs) == 3 and all(log.next_seq > 300 for log in logs.values())

        wait_for(stepping, 60, "three ranks that train")
        os.kill(job[victim].process.pid, signal.SIGKILL)
        job[victim].process.wait()
        wait_for(lambda: report_exists(out), 30, "the report of the survivors")
        code, report = post_mortem(out)
    assert code == 1
    return report


class TestKilled:
    """SIGKILL of one rank while the others go on."""

    @pytest.mark.parametrize("victim", [0, 1])
    def test_the_dead_rank_is_the_culprit(self, tmp_path: Path, victim: int) -> None:
        """The dead rank is named, the others are victims, whoever collects."""
        report = _kill_when_hung(tmp_path, victim)
        verdict = report["findings"][0]
        assert verdict["code"] == "PPT052"
        assert verdict["culprits"] == [victim]
        assert set(verdict["victims"]) == {0, 1, 2} - {victim}
        dead = report["ranks"][victim]
        assert dead["state"] == "dead"
