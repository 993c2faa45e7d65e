"""Logs: every form of line in words, ranks told apart, and the verdict they support."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fr_synthetic import SECOND, START_NS, Ring
from pptrace import flight_recorder, log_findings, logs
from pptrace.alignment import settle
from pptrace.diagnosis import diagnose
from pptrace.errors import InputError
from pptrace.lines import Sort, explain_line, recognise
from pptrace.records import RankLog
from pptrace.report import Report
from synthetic import SyntheticRun

__all__: list[str] = []

_TIMEOUT = (
    "[rank12]:[E111 06:46:36.515025591 ProcessGroupNCCL.cpp:628] [Rank 1] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=15, OpType=COALESCED,"
    " NumelIn=18446744073709551615, NumelOut=18446744073709551615, Timeout(ms)=600000)"
    " ran for 600053 milliseconds before timing out."
)
_ALL_REDUCE = (
    "[Rank 4] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=20518,"
    " OpType=ALLREDUCE, NumelIn=106496, NumelOut=106496, Timeout(ms)=1800000) ran for"
    " 1800270 milliseconds before timing out."
)
_STATES = (
    (
        "[PG 0 Rank 3] Timeout at NCCL work: 1, last enqueued NCCL work: 1, last completed"
        " NCCL work: 0."
    ),
    (
        "[PG ID 0 PG GUID 0(default_pg) Rank 2] Exception (either an error or timeout)"
        " detected by watchdog at work: 1, last enqueued NCCL work: 1, last completed NCCL"
        " work: -1."
    ),
    (
        "[PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work"
        " sequence id: 20585 PG status: last enqueued work: 20589, last completed work: 20584"
    ),
)
_TERMINATED = (
    "[PG ID 6 PG GUID 90(PIPELINE_MODEL_PARALLEL_GROUP) Rank 1] Process group watchdog"
    " thread terminated with exception: [Rank 1] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=1, OpType=COALESCED, ..."
)
_DUMP_SIGNAL = (
    "[rank0]:[E418 01:32:50.907342463 ProcessGroupNCCL.cpp:1890] [PG ID 0 PG GUID"
    " 0(default_pg) Rank 0] Received a dump signal due to a collective timeout from  rank"
    " 1 and we will try our best to dump the debug info. Last enqueued NCCL work: 7, last"
    " completed NCCL work: 6."
)

_SUMMARY = """\
E1201 15:54:26.640000 5533 torch/distributed/elastic/multiprocessing/api.py:1002] failed \
(exitcode: {code}) local_rank: 1 (pid: 5694) of binary: /usr/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-12-01_15:54:26
  host      : node01
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 5693)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 5693
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-12-01_15:54:20
  host      : node01
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 5694)
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""

_TRACEBACK = """\
Traceback (most recent call last):
  File "/job/train.py", line 11, in main
    stage.forward(x)
KeyError: 'a'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/job/train.py", line 12, in main
    raise ValueError("shape mismatch in stage 1") from error
ValueError: shape mismatch in stage 1
"""

_ECHO = """\
Traceback (most recent call last):
  File "/job/train.py", line 30, in main
    work.wait()
RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37
"""


def _prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def _read(folder: Path, files: Mapping[str, str]) -> logs.LogEvidence:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return logs.read([folder / name for name in files])


def _report(
    evidence: logs.LogEvidence, ranks: Mapping[int, RankLog] | None = None
) -> Report:
    ranks = ranks or {}
    report = diagnose(log_findings.combine(ranks, evidence))
    return log_findings.annotate(report, evidence, ranks)


# -- one line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (_TIMEOUT, ["r12", "work 15", "a batch", "600.053 s", "size_t(-1)", "no peer"]),
        (_ALL_REDUCE, ["all_reduce", "20518", "1800.27 s", "106496 elements"]),
        (_STATES[0], ["group 0", "rank 3 within the group", "never finished"]),
        (_STATES[1], ["default_pg", "completed last: -1", "never finished"]),
        (_STATES[2], ["20585", "enqueued 4 more", "not blocked in the call"]),
        (_TERMINATED, ["PIPELINE_MODEL_PARALLEL_GROUP", "a batch", "SIGABRT"]),
        (_DUMP_SIGNAL, ["Rank 1 timed out", "not necessarily the one at fault"]),
        (
            (
                "[PG 0 Rank 0] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600"
                " seconds without making progress in monitoring enqueued collectives."
            ),
            ["did not move for 600 s", "GIL"],
        ),
        (
            "[Rank 1] To avoid data inconsistency, we are taking the entire process down.",
            ["The line that matters is the time-out"],
        ),
        (
            (
                "n1:12:14 [0] misc/socket.cc:50 NCCL WARN Message truncated : received 256"
                " bytes instead of 4"
            ),
            ["256 bytes", "different calls"],
        ),
        (
            (
                "n1:12:14 [0] NCCL WARN NET/Socket : peer 10.0.0.1<50210> message truncated :"
                " receiving 1048576 bytes instead of 65536"
            ),
            ["1048576 bytes", "65536"],
        ),
        ("n1:12:14 [0] NCCL WARN Cuda failure 'out of range'", ["Cuda failure"]),
        (
            "torch.distributed.DistBackendError: NCCL error, ncclRemoteError: A call failed",
            ["lost the connection", "echo"],
        ),
        (_SUMMARY.format(code=-9, traceback="").splitlines()[0], ["SIGKILL", "memory"]),
        ("  exitcode  : -11 (pid: 17)", ["SIGSEGV", "native code"]),
        ("traceback : Signal 6 (SIGABRT) received by PID 5694", ["SIGABRT", "victim"]),
        (
            (
                "W1201 15:54:26.441000 5533 torch/x.py:1028] Sending process 5693 closing"
                " signal SIGTERM"
            ),
            ["5693", "a victim"],
        ),
        ("Root Cause (first observed failure):", ["first", "not the one at fault"]),
        ("ValueError: Expecting 4 arg_mbs but got 3", ["3 chunks", "4 microbatches"]),
        (
            "kernel: Out of memory: Killed process 4711 (python)",
            ["4711", "out of memory"],
        ),
        ("[rank1]: mypkg.errors.StageError: boom", ["StageError"]),
        ("NumelIn=18446744073709551615", ["size_t(-1)"]),
    ],
)
def test_every_form_of_line_is_explained(line: str, words: Sequence[str]) -> None:
    """The explanation says what the numbers mean and who need not be at fault."""
    text = explain_line(line)
    assert text is not None
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("line", ["", "hello", "step 7: loss 2.31", "errors: 0"])
def test_a_line_without_a_meaning_has_none(line: str) -> None:
    """Nothing is made up."""
    assert explain_line(line) is None


def test_numbers_of_a_line_are_kept() -> None:
    """A time-out's fields are there for the diagnosis."""
    fact = recognise(_TIMEOUT)
    assert fact is not None
    assert (fact.sort, fact.op, fact.seq) == (Sort.TIMEOUT, "COALESCED", 15)
    assert (fact.timeout_ms, fact.ran_ms, fact.is_p2p) == (600_000, 600_053, True)
    state = recognise(_STATES[2])
    assert state is not None
    assert (state.group, state.desc, state.group_rank) == ("0", "default_pg", 0)
    assert (state.enqueued, state.completed) == (20589, 20584)


# -- whose line --------------------------------------------------------------------


def test_ranks_in_one_mixed_file_are_told_apart(tmp_path: Path) -> None:
    """Lines of two tracebacks come in turn; each keeps its own."""
    ours = _prefixed("[rank1]: ", _TRACEBACK).splitlines()
    theirs = _prefixed("[rank0]: ", _ECHO).splitlines()
    mixed = [
        line for i in range(20) for part in (ours, theirs) for line in part[i : i + 1]
    ]
    evidence = _read(tmp_path, {"job.log": "\n".join(mixed)})
    texts = {e.rank: e.text for e in evidence.events if e.is_traceback}
    assert texts[1] == _TRACEBACK.strip()
    assert texts[0] == _ECHO.strip()


@pytest.mark.parametrize(
    "name",
    ["rank1.log", "logs/rank_1.txt", "job-rank-1.out", "none_x/attempt_0/1/stderr.log"],
)
def test_the_name_of_a_file_says_whose_it_is(tmp_path: Path, name: str) -> None:
    """One file per rank: no prefix is needed."""
    evidence = _read(tmp_path, {name: _TRACEBACK})
    assert [e.rank for e in evidence.events] == [1]


def test_files_that_differ_in_one_number_are_ranks(tmp_path: Path) -> None:
    """``worker-0.log`` and ``worker-1.log``, whatever the rest of the path says."""
    evidence = _read(
        tmp_path, {"job9/worker-0.log": "fine\n", "job9/worker-1.log": _TRACEBACK}
    )
    assert [e.rank for e in evidence.events] == [1]


def test_the_only_prefix_in_a_file_speaks_for_the_rest(tmp_path: Path) -> None:
    """NCCL's own lines carry no rank; the file's other lines do."""
    text = f"{_TIMEOUT}\nn1:12:14 [0] NCCL WARN Message truncated : received 256 bytes instead of 4\n"
    evidence = _read(tmp_path, {"a.log": text})
    assert {e.rank for e in evidence.events} == {12}


def test_a_group_rank_is_not_taken_for_a_global_one(tmp_path: Path) -> None:
    """Without a prefix only ranks of the default group are global ones."""
    evidence = _read(tmp_path, {"a.log": f"{_TERMINATED}\n{_STATES[1]}\n"})
    assert [e.rank for e in evidence.events] == [None, 2]


def test_prefixes_may_be_stacked(tmp_path: Path) -> None:
    """torchrun's tee, a container's time stamps, and torch's own prefix."""
    text = _prefixed(
        "2026-12-01T15:54:17.25Z stderr F [default1]:[rank5]: ", _TRACEBACK
    )
    [event] = _read(tmp_path, {"a.log": text}).events
    assert event.rank == 5
    assert event.headline == "ValueError: shape mismatch in stage 1"
    assert event.at_ns % SECOND == 250_000_000


def test_years_and_order_come_out_right(tmp_path: Path) -> None:
    """c10 logs have no year: a line of December read in January is of last year."""
    path = tmp_path / "a.log"
    path.write_text("[rank0]:[E1231 23:00:00.5 x.cpp:1] " + _ALL_REDUCE)
    stamp = time.mktime((2027, 1, 2, 0, 0, 0, 0, 0, -1))
    os.utime(path, (stamp, stamp))
    [event] = logs.read([path]).events
    assert time.localtime(event.at_ns // SECOND)[:4] == (2026, 12, 31, 23)


def test_patterns_and_folders_are_opened(tmp_path: Path) -> None:
    """What the shell did not expand is expanded; what is not there is said."""
    _read(tmp_path, {"rank0.log": "x", "rank1.log": _TRACEBACK})
    evidence = logs.read([str(tmp_path / "rank*.log"), str(tmp_path / "none*.log")])
    assert len(evidence.files) == 2
    assert any("none*.log: no such file" in line for line in evidence.problems)
    assert logs.read([tmp_path]).files == evidence.files
    with pytest.raises(InputError, match="names no log"):
        logs.read([tmp_path / "none.log"])


def test_what_torchrun_itself_prints_is_understood(tmp_path: Path) -> None:
    """A real job of two ranks, one of which raises: its output, and its log folder."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('boom of stage 1')\n"
        "    dist.all_reduce(torch.ones(2))\n"
        "main()\n"
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--log-dir",
        str(tmp_path / "out"), "--tee=3", str(script),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    (tmp_path / "console.log").write_text(done.stdout + done.stderr)
    for path in ("console.log", "out"):
        verdict = _report(logs.read([tmp_path / path])).verdict
        assert verdict is not None
        assert (verdict.code, verdict.culprits) == ("PPT050", (1,)), verdict
        assert "boom of stage 1" in verdict.sentence


# -- logs alone --------------------------------------------------------------------


def test_the_rank_that_raised_is_the_culprit(tmp_path: Path) -> None:
    """Not the one whose echo stands first; the verdict says what it rests on."""
    text = _prefixed("[rank0]: ", _ECHO) + _prefixed("[rank1]: ", _TRACEBACK)
    report = _report(_read(tmp_path, {"job.log": text}))
    verdict = report.verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT050", (1,))
    assert verdict.sentence.startswith("from logs alone: r1 raised ValueError")
    assert any("KeyError" in line for line in verdict.evidence)
    assert any("no black box" in line for line in report.problems)
    doing = {view.rank: view.doing for view in report.ranks}
    assert "Connection closed" in doing[0]


@pytest.mark.parametrize("code", [-9, -11])
def test_the_rank_that_was_killed_is_the_culprit(tmp_path: Path, code: int) -> None:
    """By the launcher's summary; the one it then ended itself is a victim."""
    name = {-9: "SIGKILL", -11: "SIGSEGV"}[code]
    trace = f"Signal {-code} ({name}) received by PID 5694"
    text = _prefixed("[rank0]: ", _ECHO) + _SUMMARY.format(code=code, traceback=trace)
    verdict = _report(_read(tmp_path, {"job.log": text})).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits, verdict.victims) == ("PPT052", (1,), (0,))
    assert name in verdict.sentence
    order = next(line for line in verdict.evidence if "first to fail" in line)
    assert order.index("r1") < order.index("r0")


def test_whom_the_launcher_kills_is_no_culprit(tmp_path: Path) -> None:
    """SIGKILL after SIGTERM did not help: still the launcher's doing."""
    trace = "Signal 9 (SIGKILL) received by PID 5694"
    text = (
        "W1201 15:54:20.4 5533 torch/x.py:1028] Sending process 5694 closing signal"
        " SIGTERM\n" + _prefixed("[rank0]: ", _TRACEBACK)
        + _SUMMARY.format(code=-9, traceback=trace)
    )  # fmt: skip
    report = _report(_read(tmp_path, {"job.log": text}))
    assert [(f.code, f.culprits) for f in report.findings] == [("PPT050", (0,))]


def test_an_abort_by_the_watchdog_is_a_victim(tmp_path: Path) -> None:
    """The launcher's root cause is the rank whose watchdog was quickest."""
    trace = "Signal 6 (SIGABRT) received by PID 5694"
    line = _TIMEOUT.replace("[rank12]", "[rank1]")
    text = f"{line}\n" + _SUMMARY.format(code=-6, traceback=trace)
    verdict = _report(_read(tmp_path, {"job.log": text})).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT071", ())


def _timeout(rank: int, seq: int, op: str = "ALLREDUCE", numel: int = 64) -> str:
    return (
        f"[rank{rank}]:[E111 06:46:36.5 ProcessGroupNCCL.cpp:628] [Rank {rank}] Watchdog"
        f" caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op},"
        f" NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600053"
        " milliseconds before timing out.\n"
    )


def _state(rank: int, seq: int, enqueued: int) -> str:
    return (
        f"[rank{rank}]:[E111 06:46:36.6 x.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank"
        f" {rank}] Received a dump signal due to a collective timeout from rank {seq} and"
        f" we will try our best. Last enqueued NCCL work: {enqueued}, last completed NCCL"
        f" work: {enqueued}.\n"
    )


def test_collectives_in_another_order_show_in_the_lines(tmp_path: Path) -> None:
    """One number, two kinds of collective."""
    text = _timeout(0, 9) + _timeout(1, 9, "BROADCAST") + _timeout(2, 9)
    verdict = _report(_read(tmp_path, {"job.log": text})).verdict
    assert verdict is not None
    assert verdict.code == "PPT032"
    assert "ALLREDUCE on r0, r2 but BROADCAST on r1" in verdict.sentence


def test_a_rank_that_says_it_is_behind_is_named(tmp_path: Path) -> None:
    """It prints what it enqueued last when another rank asks for dumps."""
    text = _timeout(0, 9) + _timeout(2, 9) + _state(1, 0, 8)
    verdict = _report(_read(tmp_path, {"job.log": text})).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT031", (1,))
    assert verdict.victims == (0, 2)
    assert verdict.severity == "warning"


def test_a_batch_that_timed_out_is_undetermined_but_explained(tmp_path: Path) -> None:
    """The lines hold no peer; who was silent, what a batch is and what helps is said."""
    batch = _TIMEOUT.replace("[rank12]", "[rank1]")
    text = f"{batch}\n" + batch.replace("[rank1]", "[rank3]").replace(
        "[Rank 1]", "[Rank 3]"
    )
    report = _report(
        _read(tmp_path, {"job.log": text + "\n[rank2]: step 7 Error-free\n"})
    )
    verdict = report.verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits, verdict.victims) == ("PPT071", (), (1, 3))
    assert "from logs alone" in verdict.sentence
    assert "r0, r2 have reported no time-out" in verdict.sentence
    assert any("size_t(-1)" in line for line in verdict.evidence)
    assert any("--fr" in line for line in verdict.remedy)
    assert report.exit_code == 1


def test_sizes_that_differ_are_said(tmp_path: Path) -> None:
    """pytorch#97191: the only clue stands in the numbers."""
    text = _timeout(0, 1, numel=200) + _timeout(1, 1, numel=100)
    verdict = _report(_read(tmp_path, {"job.log": text})).verdict
    assert verdict is not None
    assert "disagree on the number of elements (r0: 200, r1: 100)" in verdict.sentence


def test_quiet_logs_give_no_finding(tmp_path: Path) -> None:
    """Progress, warnings of Python and losses are no evidence."""
    text = (
        "[rank0]: UserWarning: deprecated\nstep 1 loss 3\n[rank1]: NCCL version 2.21\n"
    )
    report = _report(_read(tmp_path, {"job.log": text}))
    assert report.findings == ()
    assert report.exit_code == 0


_RAS = {
    "nccl_version": "2.29.1",
    "communicators_count": 2,
    "communicators": [
        {
            "hash": "0x1", "size": 4, "ranks_count": 2, "missing_ranks_count": 2,
            "ranks": [{"rank": 0, "pid": 10}, {"rank": 1, "pid": 11}],
            "missing_ranks": [
                {"rank": 2, "host": "10.0.0.2", "pid": 12, "cuda_dev": 0,
                 "status": {"unresponsive": True, "considered_dead": True}},
                {"rank": 3, "host": "10.0.0.2", "pid": 13, "cuda_dev": 1,
                 "status": {"unresponsive": True, "considered_dead": False}},
            ],
        },
        {
            "hash": "0x2", "size": 2, "ranks": [],
            "missing_ranks": [
                {"rank": 1, "host": "10.0.0.2", "pid": 12,
                 "status": {"unresponsive": True, "considered_dead": True}},
            ],
        },
    ],
}  # fmt: skip


def test_ras_names_the_dead(tmp_path: Path) -> None:
    """Ranks of the communicator of all ranks are global; of others they are not."""
    evidence = _read(tmp_path, {"ras.json": json.dumps(_RAS)})
    assert [(p.rank, p.is_dead) for p in evidence.processes] == [
        (2, True),
        (3, False),
        (None, True),
    ]
    assert evidence.world_size == 4
    verdict = _report(evidence).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT052", (2,))
    assert any("RAS cannot reach it" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    "text",
    ['{"communicators": 3}', '{"communicators": [{}]}', '{"communicators": [', "{}"],
)
def test_damaged_ras_output_is_one_line(tmp_path: Path, text: str) -> None:
    """The other logs are read all the same."""
    (tmp_path / "ras.json").write_text(text)
    (tmp_path / "rank1.log").write_text(_TRACEBACK)
    evidence = logs.read([tmp_path / "ras.json", tmp_path / "rank1.log"])
    assert [e.rank for e in evidence.events] == [1]
    assert len(evidence.problems) == (text != "{}")


# -- beside black boxes and dumps --------------------------------------------------


def _waiting(folder: Path) -> dict[int, RankLog]:
    """Dumps of r0, r2 and r3 that wait; the rank that raised, r1, has none."""
    for rank, ops in {0: ("recv 1",), 2: ("recv 1",), 3: ("recv 2",)}.items():
        ring = Ring(rank, {"0": range(4)})
        for op in ops:
            verb, peer = op.split()
            getattr(ring, verb)(int(peer), done=False)
        ring.write(folder)
    found = flight_recorder.read_files([folder]).logs
    settle(found)
    return found


def test_a_log_settles_what_dumps_leave_open(tmp_path: Path) -> None:
    """The rank that raised is the one without a dump; its log says what it raised."""
    dumps = _waiting(tmp_path)
    before = diagnose(dumps).verdict
    assert before is not None
    assert before.code == "PPT071"
    evidence = _read(tmp_path / "logs", {"rank1.log": _TRACEBACK})
    report = _report(evidence, dumps)
    verdict = report.verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT050", (1,))
    assert verdict.victims == (0, 2, 3)
    assert "logs alone" not in verdict.sentence


def test_a_kill_that_only_the_launcher_saw_settles_it_too(tmp_path: Path) -> None:
    """SIGKILL leaves nothing but a line in the launcher's summary."""
    dumps = _waiting(tmp_path)
    trace = "Signal 9 (SIGKILL) received by PID 5694"
    text = _SUMMARY.format(code=-9, traceback=trace)
    verdict = _report(_read(tmp_path / "logs", {"job.log": text}), dumps).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT052", (1,))
    assert "SIGKILL" in verdict.sentence


def _boxes(folder: Path) -> dict[int, RankLog]:
    run = SyntheticRun(folder, 2)
    run.play({0: "F0; S F0>1; R B0<1; B0", 1: "R F0<0; F0; stop"})
    return run.finish(idle_ns=60 * SECOND)


def test_lines_stand_beside_the_verdict_of_black_boxes(tmp_path: Path) -> None:
    """The verdict stays; what the watchdog said is evidence, explained."""
    boxes = _boxes(tmp_path)
    before = diagnose(boxes).verdict
    line = _TIMEOUT.replace("[rank12]", "[rank0]")
    report = _report(_read(tmp_path / "logs", {"job.log": line}), boxes)
    verdict = report.verdict
    assert before is not None
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == (before.code, before.culprits)
    assert verdict.sentence == before.sentence
    assert any("job.log:1" in e and "a batch" in e for e in verdict.evidence)


def test_an_exception_outside_of_every_hook_comes_from_the_log(tmp_path: Path) -> None:
    """The black box of r1 just stops; its log has the traceback."""
    boxes = _boxes(tmp_path)
    evidence = _read(tmp_path / "logs", {"rank1.log": _TRACEBACK})
    verdict = _report(evidence, boxes).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT050", (1,))
    assert "shape mismatch in stage 1" in verdict.sentence


_ECHOES = (
    _ECHO.splitlines()[-1],
    (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1970, remote process exited"
        " or there was a network error, ncclRemoteError: A call failed"
    ),
    "RuntimeError: [x.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients",
)


@pytest.mark.parametrize("last", _ECHOES)
def test_an_echo_in_a_log_changes_nothing(tmp_path: Path, last: str) -> None:
    """That r0 lost its connection, or waited too long, does not make it the culprit."""
    boxes = _boxes(tmp_path)
    before = diagnose(boxes).verdict
    trace = "\n".join([*_ECHO.splitlines()[:-1], last])
    evidence = _read(tmp_path / "logs", {"rank0.log": trace})
    verdict = _report(evidence, boxes).verdict
    assert before is not None
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == (before.code, before.culprits)


# -- hostile and damaged input ------------------------------------------------------


def test_endless_lines_and_binary_files_are_no_trouble(tmp_path: Path) -> None:
    """Memory does not grow with a line, and noise is not evidence."""
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.write(b"Error" * 4_000_000)
        file.write(b"\n\xff\xfe\x00" + os.urandom(1 << 20))
        file.write(f"\n{_TIMEOUT}\n".encode())
    tracemalloc.start()
    began = time.perf_counter()
    try:
        evidence = logs.read([path])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [e.fact.sort for e in evidence.events if e.rank == 12] == [Sort.TIMEOUT]
    assert peak < 32 << 20
    assert time.perf_counter() - began < 10


def test_more_lines_than_anybody_reads_are_left_out(tmp_path: Path) -> None:
    """A log that repeats one warning for days ends in a word about it."""
    evidence = _read(tmp_path, {"a.log": "n [0] NCCL WARN again\n" * 30_000})
    assert len(evidence.events) == 20_000
    assert any("left out" in line for line in evidence.problems)


@pytest.mark.parametrize(
    "unit",
    [
        "[PG ID 0 PG GUID ", "Watchdog caught collective operation timeout: WorkNCCL(",
        "[rank1]: ", "Traceback (most recent call last):\n", "a.b.", "TCPStore ", "((((",
        "Expecting 9 ", "[0]:\nexitcode : ", "NCCL WARN ", "w" * 200 + ".",
    ],
)  # fmt: skip
def test_no_form_takes_for_ever(tmp_path: Path, unit: str) -> None:
    """Beginnings of known forms, again and again, are read in linear time."""
    text = unit * (200_000 // len(unit))
    began = time.process_time()
    recognise(text)
    _read(tmp_path, {"a.log": text})
    assert time.process_time() - began < 2


def test_mangled_logs_never_break_the_report(tmp_path: Path) -> None:
    """Lines cut, doubled and mixed up: always a report."""
    trace = "Signal 9 (SIGKILL) received by PID 5694"
    text = "\n".join([_TIMEOUT, _ALL_REDUCE, *_STATES, _TERMINATED, _DUMP_SIGNAL])
    text += _prefixed("[rank0]: ", _ECHO) + _prefixed("[rank1]: ", _TRACEBACK)
    text += _SUMMARY.format(code=-9, traceback=trace)
    for seed in range(300):
        chance = random.Random(seed)
        mangled = text
        for _ in range(chance.randrange(1, 12)):
            at, to = sorted(chance.randrange(len(mangled)) for _ in range(2))
            piece = mangled[at : min(to, at + 200)]
            where = chance.randrange(len(mangled))
            mangled = chance.choice(
                [
                    mangled[:at] + mangled[at + len(piece) :],
                    mangled[:where] + piece + mangled[where:],
                    mangled[:at] + chance.choice("\x00\n-9[]():") + mangled[at + 1 :],
                ]
            )
        report = _report(_read(tmp_path, {"a.log": mangled}))
        report.to_json()


def test_times_that_make_no_sense_are_no_times(tmp_path: Path) -> None:
    """The 99th of the 99th month is not known, and no error."""
    line = _TIMEOUT.replace("E111 06:46:36", "E9999 06:46:36")
    [event] = _read(tmp_path, {"a.log": line}).events
    assert event.at_ns == 0
    assert START_NS > 0
