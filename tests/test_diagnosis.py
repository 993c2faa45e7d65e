"""The diagnosis: every class of hang gets its code, culprit and words; health none.

The black boxes are written by `Job`: each rank's program runs on the model of NCCL's
rules (`pptrace.simulation`), and the records are those that the hooks would have
written up to where it got.
"""

from __future__ import annotations

import cProfile
import dataclasses
import json
import pstats
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from pptrace import verdicts
from pptrace.diagnosis import diagnose
from pptrace.records import (
    Channel,
    ChannelState,
    Direction,
    Flag,
    Group,
    Kind,
    Pass,
    RankLog,
    Record,
    ScheduleRun,
    Signature,
    Status,
    Transport,
)
from pptrace.report import Finding, Report
from pptrace.semantics import Communicator, Host, Kernel, KernelOp, KernelState
from pptrace.simulation import (
    At,
    Await,
    Fail,
    Post,
    Signal,
    Spawn,
    Step,
    Wait,
    simulate,
)

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
_OP = re.compile(
    r"([SRsr]) ([\w.]+)(?:\[(\d)\])?([<>])(\d+)(?:@(\w+))?((?: \w+=\S+)*)$"
)
_LABEL = re.compile(r"([FBIW])(\d+)$")


class Rank:
    """One rank: runs its program and records it as the hooks would."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        # Every host's clock starts elsewhere; only its own log knows where.
        self.base = (rank + 1) * 1000 * SECOND
        self.log = RankLog(
            path=f"rank{rank:05d}.pptrace",
            rank=rank,
            world_size=job.world,
            pid=4000 + rank,
            host="node-a",
            boot_id="boot",
            status=Status.RUNNING,
            start_monotonic_ns=self.base,
            start_wall_ns=START,
            alive=True,
        )
        for group in job.groups.values():
            if rank in group.ranks:
                self.log.groups[group.index] = group
        self.counts: dict[Channel | tuple[str, ...], int] = {}
        self.kernels: list[tuple[Kernel, list[Record]]] = []
        self.context: dict[str, Any] = {}
        self.batches = 0
        self.stage = job.stages.get(rank, -1)
        self.ended = False

    def now(self) -> int:
        """The time of this rank's clock, one tick on."""
        return self.base + self.job.tick()

    def add(self, kind: Kind, **fields: Any) -> Record:
        """Write one record."""
        record = Record(len(self.log.records) + 1, kind, self.now(), **fields)
        self.log.records.append(record)
        self.log.progress_ns = record.posted_ns
        return record

    # programs

    def steps(self, text: str, thread: int = 1) -> Iterator[Step]:
        """The steps of a program, recorded as they are taken."""
        for word in filter(None, (part.strip() for part in _split(text))):
            yield from self.take(word, thread)
        if thread == 1:
            self.ended = True

    def take(self, word: str, thread: int) -> Iterator[Step]:
        """Take one word of a program."""
        if word.startswith("{"):
            yield from self.post(_split(word[1:-1], ","), True, thread)
        elif _OP.match(word):
            yield from self.post([word], False, thread)
        elif word.startswith(("signal ", "await ")):
            name, peer = word.split()
            yield Signal(int(peer)) if name == "signal" else Await(int(peer))
        elif word.startswith("sleep"):
            yield Await(self.rank, "never")
        elif word.startswith("hang "):  # inside an action for ever
            self.action(word.split()[1], thread)
            yield Await(self.rank, "never")
        elif word.startswith("thread "):
            yield Spawn(self.steps(word[7:].replace("|", ";"), thread + 1))
        elif word.startswith(("raise ", "catch ")):
            yield from self.fail(word)
        elif word.startswith(("step ", "eval ")):
            self.begin_step(word)
        elif word == "end":
            self.context["step_record"].done_ns = self.now()
        elif "@" in word:
            yield from self.collective(word, thread)
        else:
            self.action(word, thread).done_ns = self.now()

    def action(self, word: str, thread: int) -> Record:
        """Begin an action."""
        pass_, microbatch = _label(word)
        self.context |= {"pass_": pass_, "microbatch": microbatch}
        return self.add(
            Kind.ACTION, pass_=pass_, microbatch=microbatch, stage=self.stage,
            step=self.context.get("step", 0), thread=thread,
        )  # fmt: skip

    def begin_step(self, word: str) -> None:
        """Begin a step or an evaluation."""
        kind, number, *rest = word.split()
        fields = dict(part.split("=") for part in rest)
        run = self.log.schedules[int(fields.get("schedule", 0))]
        self.context["step"] = int(number)
        self.context["step_record"] = self.add(
            Kind.STEP, step=int(number), stage=self.stage, text=run.name,
            microbatch=run.n_microbatches, flags=Flag(4 if kind == "eval" else 0),
        )  # fmt: skip

    def fail(self, word: str) -> Iterator[Step]:
        """Raise, or catch and go on."""
        how, _, text = word.partition(" ")
        pass_ = self.context.get("pass_", Pass.UNKNOWN)
        self.add(
            Kind.EXCEPTION, text=f"{text}\nTraceback (most recent call last):\n{text}",
            pass_=pass_, stage=self.stage if pass_ else -1,
            microbatch=self.context.get("microbatch", -1), step=self.context.get("step", 0),
        )  # fmt: skip
        if how == "raise":
            self.log.status = Status.RAISED
            yield Fail(text)

    def collective(self, word: str, thread: int) -> Iterator[Step]:
        """Enter a collective and wait for it."""
        name, _, group_name = word.partition("@")
        group = self.job.groups[group_name]
        key = ("collective", group_name)
        k = self.counts[key] = self.counts.get(key, -1) + 1  # type: ignore[index]
        record = self.add(Kind.COLLECTIVE, group=group, k=k, text=name, thread=thread)
        kernel = Kernel(Communicator.of(group, Transport.GROUP), collective=name)
        yield from self.run(kernel, [record], is_waited=True)

    def post(
        self, words: Sequence[str], coalesced: bool, thread: int
    ) -> Iterator[Step]:
        """Post one call's ops and, unless written small, wait for them."""
        self.batches += 1
        parsed = [self.parse(word, coalesced) for word in words]
        group, transport = parsed[0]["group"], parsed[0]["transport"]
        kernel = Kernel(
            Communicator.of(group, transport, self.rank, parsed[0]["peer"]),
            tuple(KernelOp(p["direction"], p["peer"]) for p in parsed),
            coalesced=coalesced,
        )
        records = []
        for index, fields in enumerate(parsed):
            record = self.add(
                Kind.OP, **fields, batch=self.batches, batch_index=index,
                batch_size=len(parsed), thread=thread,
                flags=Flag.COALESCED if coalesced else Flag(0),
            )  # fmt: skip
            channel = record.channel(self.rank)
            key = channel._replace(tag=fields["direction"])
            record.k = self.counts[key] = self.counts.get(key, -1) + 1
            records.append(record)
        is_waited = not all(word.strip()[0].islower() for word in words)
        yield from self.run(kernel, records, is_waited=is_waited)

    def parse(self, word: str, coalesced: bool) -> dict[str, Any]:
        """The fields of an op."""
        found = _OP.match(word.strip())
        assert found, word
        letter, label, index, _, peer_text, group_name, options = found.groups()
        group = self.job.groups[group_name or self.job.default]
        extra = dict(part.split("=") for part in options.split())
        pass_, microbatch = _label(label)
        shape = tuple(map(int, extra.get("shape", "4,8").split(",")))
        numel = 1
        for size in shape:
            numel *= size
        strides = extra.get("strides")
        dtype = extra.get("dtype", "float32")
        peer = int(peer_text)
        return {
            "direction": Direction.SEND if letter in "Ss" else Direction.RECV,
            "transport": Transport.GROUP
            if coalesced or group.eager or group.backend == "gloo"
            else Transport.PAIR,
            "group": group,
            "peer": peer,
            "group_peer": group.ranks.index(peer),
            "pass_": pass_,
            "microbatch": microbatch,
            "stage": self.stage if pass_ else -1,
            "tensor_index": int(index or 0),
            "tag": int(extra.get("tag", 0)),
            "step": self.context.get("step", 0),
            "numel": numel,
            "nbytes": numel * 4,
            "signature": Signature(
                shape, dtype,
                tuple(map(int, strides.split(","))) if strides else _strides(shape),
            ),
        }  # fmt: skip

    def run(
        self, kernel: Kernel, records: list[Record], *, is_waited: bool
    ) -> Iterator[Step]:
        """Take a kernel through its call and its wait."""
        self.kernels.append((kernel, records))
        yield Post(kernel)
        for record in records:
            record.returned_ns = self.now()
        if is_waited:
            for record in records:
                record.wait_ns = self.now()
            yield Wait(kernel)
            for record in records:
                record.waited_ns = self.now()
        self.log.progress_ns = self.now()

    def close(self, hosts: Sequence[At], *, drained: bool) -> None:
        """Fill in what is known at the end."""
        for kernel, records in self.kernels:
            if kernel.state is KernelState.DONE:
                for record in records:
                    record.done_ns = record.waited_ns or self.now()
            for error in filter(None, [kernel.error]):
                for record in records:
                    record.flags |= Flag.FAILED
                self.add(Kind.EXCEPTION, text=f"DistBackendError: {error}\ntraceback")
                self.log.status = Status.RAISED
        # On CUDA a program that is over still waits for its streams.
        if self.ended and drained and set(hosts) == {At.ENDED}:
            self.log.status, self.log.alive = Status.EXITED, False
            self.log.status_ns = self.log.progress_ns
        elif self.log.status is Status.RAISED:
            self.log.alive, self.log.status_ns = False, self.log.progress_ns
        for key, last in self.counts.items():
            if isinstance(key, Channel):
                direction = Direction(key.tag)
                channel = key._replace(tag=0)
                self.log.channels.append(ChannelState(channel, direction, last + 1, 0))


class Job:
    """All ranks of a job; ``logs`` are its black boxes ``hang`` seconds later."""

    def __init__(
        self,
        *programs: str,
        groups: dict[str, Sequence[int]] | None = None,
        default: str = "pp",
        eager: bool = False,
        host: Host = Host.BLOCKING,
        schedules: dict[int, list[ScheduleRun]] | None = None,
        stages: dict[int, int] | None = None,
        hang: float = 30.0,
        backend: str = "nccl",
    ) -> None:
        self.world = len(programs)
        everyone = tuple(range(self.world))
        self.groups = {
            name: Group(n, name, name, tuple(ranks), backend, eager)
            for n, (name, ranks) in enumerate(
                {"world": everyone, "pp": everyone, **(groups or {})}.items(), 1
            )
        }
        self.default = default
        self.stages = stages if stages is not None else dict(enumerate(everyone))
        self.clock = 0
        self.ranks = [Rank(self, rank) for rank in range(self.world)]
        for rank, runs in (schedules or {}).items():
            self.ranks[rank].log.schedules = list(runs)
        outcome = simulate(
            {
                r.rank: r.steps(text)
                for r, text in zip(self.ranks, programs, strict=True)
            },
            host=host,
        )
        for rank in self.ranks:
            mine = [h for h in outcome.hosts if h.rank == rank.rank]
            rank.close([h.at for h in mine], drained=rank.rank not in outcome.undrained)
        self.outcome = outcome
        self.is_deadlock = outcome.is_deadlock
        self.is_clean = outcome.is_clean
        self.unmatched = {
            (
                op.kernel.rank, op.peer,
                "isend" if op.direction is Direction.SEND else "irecv",
                op.kernel.communicator.transport.name.lower(), op.k,
            )
            for op in outcome.unmatched
            if op.kernel is not None
        }  # fmt: skip
        self.now_ns = START + self.clock + int(hang * SECOND)
        self.logs = {rank.rank: rank.log for rank in self.ranks}
        self.beat()

    def tick(self) -> int:
        """Advance the clock that all ranks share."""
        self.clock += 1_000_000
        return self.clock

    def beat(self, *, until: dict[int, float] | None = None) -> None:
        """Let every living rank's monitor beat until now (or so many seconds before)."""
        for rank, log in self.logs.items():
            if log.status in (Status.EXITED, Status.RAISED):
                log.heartbeat_wall_ns = log.to_wall_ns(log.progress_ns)
                log.heartbeat_ns = log.progress_ns
                continue
            wall = self.now_ns - int((until or {}).get(rank, 0.0) * SECOND)
            log.heartbeat_wall_ns = wall
            log.heartbeat_ns = wall - START + log.start_monotonic_ns

    def kill(self, rank: int, seconds_ago: float) -> None:
        """SIGKILL a rank some time before now."""
        self.logs[rank].alive = False
        self.beat(
            until={r: seconds_ago for r, g in self.logs.items() if g.alive is False}
        )

    def report(self, **options: Any) -> Report:
        """Diagnose the black boxes."""
        return diagnose(self.logs, now_wall_ns=self.now_ns, **options)


def _split(text: str, separator: str = ";") -> list[str]:
    return text.split(separator) if text.strip() else []


def _label(word: str) -> tuple[Pass, int]:
    if word == "meta":
        return Pass.META, -1
    found = _LABEL.match(word)
    return (Pass[found[1]], int(found[2])) if found else (Pass.UNKNOWN, -1)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def one_f_one_b(
    stage: int, stages: int, n: int, *, step: int = 1, split: bool = True
) -> str:
    """torch's 1F1B as a program, guard bypassed (semantics §2, §3)."""
    prev, following = stage - 1, stage + 1
    out: list[str] = [f"step {step}"]

    def issue(ops: list[str], wait: bool = True) -> None:
        mixed = len({op[0] for op in ops}) > 1
        words = ops if wait else [op.lower()[0] + op[1:] for op in ops]
        if ops and (mixed or not split):
            out.append("{" + ", ".join(words) + "}")
        else:
            out.extend(words)

    def recv_f(m: int) -> list[str]:
        return [f"R F{m}<{prev}"] if stage else []

    def send_f(m: int) -> list[str]:
        return [f"S F{m}>{following}"] if following < stages else []

    def recv_b(m: int) -> list[str]:
        return [f"R B{m}<{following}"] if following < stages else []

    def send_b(m: int) -> list[str]:
        return [f"S B{m}>{prev}"] if stage else []

    warm = min(n, stages - stage)
    held: list[str] = []
    for m in range(warm):
        issue(recv_f(m))
        out.append(f"F{m}")
        held = send_f(m)
        if m != warm - 1:
            issue(held)
    f, b = warm, 0
    while True:
        issue(held + recv_b(b))
        out.append(f"B{b}")
        held = send_b(b)
        b += 1
        if f == n:
            break
        issue(held + recv_f(f))
        out.append(f"F{f}")
        held = send_f(f)
        f += 1
    issue(held)
    while b < n:
        issue(recv_b(b))
        out.append(f"B{b}")
        issue(send_b(b))
        b += 1
    out.append("end")
    return "; ".join(out)


def pipeline(
    stages: int, n: int, *, split: bool = True, steps: int = 1, **options: Any
) -> Job:
    """A job that runs torch's 1F1B."""
    programs = [
        "; ".join(
            one_f_one_b(s, stages, n, step=step + 1, split=split)
            for step in range(steps)
        )
        for s in range(stages)
    ]
    return Job(*programs, schedules=schedules(stages, n), **options)


def schedules(
    stages: int, n: int, name: str = "Schedule1F1B", group: str = "pp"
) -> dict[int, list[ScheduleRun]]:
    """What each rank believes of the schedule it runs."""
    ranks = tuple(range(stages))
    return {
        s: [
            ScheduleRun(
                name, n, stages, (s,), {i: i for i in ranks}, (group, ranks), "static"
            )
        ]
        for s in ranks
    }


def verdict(job: Job, **options: Any) -> Finding:
    """The first finding; a report that says nothing fails the test."""
    report = job.report(**options)
    assert report.findings, "no finding"
    return report.findings[0]


def expect(
    job: Job, code: str, culprits: Sequence[int], *words: str, **options: Any
) -> Report:
    """The verdict has this code and these culprits, and its sentence these words."""
    report = job.report(**options)
    shown = "\n".join(
        f"{f.code} {f.severity} {f.culprits}: {f.sentence}" for f in report.findings
    )
    assert report.findings, "no finding"
    first = report.findings[0]
    assert first.code == code, shown
    assert first.culprits == tuple(culprits), shown
    for word in words:
        assert word in first.sentence, f"{word!r} is not in: {first.sentence}"
    json.loads(report.to_json())
    return report


# -- the founding case -----------------------------------------------------------------


def test_founding_case_names_the_fused_send_and_the_remedy() -> None:
    """1F1B with n=2 on 4 stages: the fused send, the lone receive, n < S, the fix."""
    job = pipeline(4, 2)
    report = expect(
        job, verdicts.TRANSPORT_SPLIT, [0],
        "r0 fuses the send of F1", "{isend F1→r1, irecv B0←r1}", "lone irecv F1←r0",
        "n=2 < S=4",
    )  # fmt: skip
    first = report.findings[0]
    assert first.severity == "error"
    assert first.victims == (1, 2, 3)
    assert len(report.findings) == 1
    assert any("pptrace.schedules.Schedule1F1B" in line for line in first.remedy)
    assert any("n ≥ S" in line for line in first.remedy)
    assert any("ScheduleGPipe" in line for line in first.remedy)
    assert report.exit_code == 1
    assert [r.role for r in report.ranks] == ["culprit", "victim", "victim", "victim"]
    assert report.ranks[1].doing == "waits for irecv F1←r0"
    unmatched = {
        (v.rank, v.direction, v.label)
        for v in report.pending
        if v.reason == "unmatched"
    }
    assert {(0, "isend", "F1"), (0, "irecv", "B0"), (1, "irecv", "F1")} <= unmatched
    assert "r3" in report.chain[0]
    assert report.chain[-1].startswith("r0")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stages", [4, 6])
def test_founding_case_for_every_n_below_the_stages(stages: int, n: int) -> None:
    """For every n < S the split is found between ranks 0 and 1, with n and S."""
    expect(pipeline(stages, n), verdicts.TRANSPORT_SPLIT, [0], f"n={n} < S={stages}")


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("stages", "n"), [(2, 2), (4, 4), (4, 8), (3, 5)])
def test_enough_microbatches_are_healthy(stages: int, n: int, split: bool) -> None:
    """1F1B with n ≥ S finishes and yields no finding under either rule."""
    job = pipeline(stages, n, split=split, steps=2)
    assert not job.is_deadlock
    report = job.report()
    assert report.findings == ()
    assert report.exit_code == 0
    assert {r.state for r in report.ranks} == {"exited"}
    assert report.pending == ()


# -- ranks that end ---------------------------------------------------------------------


def test_a_rank_that_raised_is_the_culprit() -> None:
    """G1: r1 raises in F0; the exception, its place and the victims are named."""
    job = Job(
        "F0; S F0>1; R B0<1", "R F0<0; F0; raise ValueError: bad weights",
        "R F0<1; F0", "R F0<2; F0",
    )  # fmt: skip
    report = expect(
        job, verdicts.RAISED, [1],
        "r1 raised ValueError: bad weights in F0 of stage 1", "before posting isend F0→r2",
        "r0, r2 and r3 are victims",
    )  # fmt: skip
    assert any("Traceback" in line for line in report.findings[0].evidence)
    assert report.ranks[1].state == "raised"
    assert report.ranks[3].role == "victim"


def test_a_killed_rank_is_the_culprit() -> None:
    """G4: r1 is gone; pid, host, last record, the op it owed and the victims."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; hang F0", "R F0<1; F0", "R F0<2; F0")
    job.kill(1, seconds_ago=12)
    report = expect(
        job, verdicts.DIED, [1],
        "r1 (pid 4001 on node-a) is gone", "in F0 of stage 1", "ago", "it owes isend F0→r2",
        "r0, r2 and r3 wait behind it",
    )  # fmt: skip
    assert len(report.findings) == 1
    assert report.ranks[1].state == "dead"


def test_a_slow_rank_is_a_note_not_a_deadlock() -> None:
    """G5: r1 is alive in F0 for long: straggler, exit code 0."""
    job = Job("F0; S F0>1; R B0<1", "step 1; R F0<0; hang F0", "R F0<1; F0",
              schedules=schedules(3, 4))  # fmt: skip
    report = expect(
        job, verdicts.STRAGGLER, [1],
        "r1 is alive", "in F0 of stage 1", "not a deadlock", "r2 waits for irecv F0←r1",
        trigger="no progress for 10 s",
    )  # fmt: skip
    assert report.findings[0].severity == "note"
    assert report.exit_code == 0


STACKS = """\
pptrace: no progress for 2 s on rank 0; Python stacks at 1796140003.593
Current thread 0x00007f0fb36036c0 (most recent call first):
  File "/env/pptrace/hooks/monitor.py", line 335 in _dump_stacks
  File "/lib/threading.py", line 1002 in _bootstrap

Thread 0x00007f0fd5e76b80 (most recent call first):
  File "/env/torch/nn/functional.py", line 10 in linear
  File "/home/me/model.py", line 42 in forward
  File "/env/torch/nn/modules/module.py", line 1789 in _call_impl
  File "/home/me/train.py", line 17 in <module>
pptrace: end of stacks
"""


def test_the_stack_of_a_slow_rank_is_quoted() -> None:
    """The main thread's innermost frame, and the innermost of the user's own code."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; hang F0")
    job.logs[1].stacks = STACKS
    report = job.report()
    assert report.findings[0].code == verdicts.STRAGGLER
    assert report.findings[0].evidence[-2:] == (
        "stack of r1: /env/torch/nn/functional.py:10 in linear",
        "stack of r1: /home/me/model.py:42 in forward",
    )


def test_ops_in_flight_of_a_running_job_are_no_finding() -> None:
    """A healthy job read while it runs: pending ops, a busy rank, nothing wrong."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; hang F0", "R F0<1; F0", hang=0.3)
    report = job.report()
    assert report.findings == ()
    assert len(report.pending) == 2


# -- A. first use ------------------------------------------------------------------------


def test_a1_first_use_under_the_coalesced_rule() -> None:
    """A1: r0 fused its last warm-up send, r1 posted a lone receive in a batch of its own."""
    report = expect(
        pipeline(4, 1, split=False), verdicts.FIRST_USE, [0],
        "{isend F0→r1, irecv B0←r1}", "lone irecv F0←r0", "n=1 < S=4",
    )  # fmt: skip
    assert any("pptrace.schedules.Schedule1F1B" in r for r in report.findings[0].remedy)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a1_coalesced_rule_with_blocking_hosts(n: int) -> None:
    """Under the coalesced rule, too, every n < S that hangs is explained by n < S."""
    job = pipeline(4, n, split=False)
    assert job.is_deadlock
    first = verdict(job)
    assert first.code in (verdicts.FIRST_USE, verdicts.GROUPING, verdicts.BATCH_CYCLE)
    assert f"n={n} < S=4" in first.sentence


def test_a2_group_set_up_incomplete() -> None:
    """A2: the first batched P2P of a group was entered by two of its four ranks."""
    job = Job("{S x>1}", "{R x<0}", "sleep", "sleep")
    report = expect(
        job, verdicts.GROUP_SETUP, [2, 3],
        "first batched P2P on group pp", "entered by r0 and r1 only", "r2 and r3 never came",
    )  # fmt: skip
    assert report.findings[0].victims == (0, 1)
    assert len(report.findings) == 1


def test_a2_ranks_that_exited_never_came_either() -> None:
    """A2 with ranks that finished: they are named, and that they finished."""
    expect(Job("{S x>1}", "{R x<0}", "", ""), verdicts.GROUP_SETUP, [2, 3], "exited")


def test_a3_set_up_of_a_pair_in_progress() -> None:
    """A3: both sides are inside the call, no op is missing."""
    job = Job("S meta>2", "sleep", "R meta<0", "sleep")
    for rank in (0, 2):
        record = next(r for r in job.logs[rank].records if r.kind is Kind.OP)
        record.returned_ns = record.wait_ns = record.waited_ns = record.done_ns = 0
        job.logs[rank].status, job.logs[rank].alive = Status.RUNNING, True
    expect(
        job, verdicts.SETUP_IN_PROGRESS, [],
        "r0 and r2 are both inside the call since", "set-up of pair (0, 2)", "no op is missing",
    )  # fmt: skip


def test_a4_receive_not_posted_by_a_rank_that_waits_elsewhere() -> None:
    """A4: r0 is inside its first send; r1 has not posted the receive."""
    expect(
        Job("S F0>1; signal 1", "await 0; R F0<0"), verdicts.RECV_NOT_POSTED, [1],
        "r0 is blocked inside the call (the first op of pair 0:1)", "isend F0→r1",
        "r1 has not posted irecv F0←r0",
    )  # fmt: skip


def test_a5_a_rank_that_finished_owes_two_ops() -> None:
    """A5: two unmatched ops, the rank both wait for finished normally."""
    report = expect(
        Job("R x<1; R x<1", "S x>0", "S x>1"), verdicts.EXITED, [1],
        "r1 finished normally", "2 unmatched ops", "isend x→r0", "irecv x←r2",
    )  # fmt: skip
    assert report.findings[0].victims == (0, 2)
    assert report.ranks[1].doing == "exited normally"


def test_a5_needs_no_patience() -> None:
    """A rank that has exited will never post: that is certain at once."""
    expect(Job("R x<1", "", hang=0.1), verdicts.EXITED, [1])


def test_a6_host_that_never_returns_from_isend() -> None:
    """A6: r0 is blocked inside isend, the first op of the pair."""
    expect(
        Job("s x>1", "sleep"), verdicts.RECV_NOT_POSTED, [1],
        "r0 is blocked inside the call (the first op of pair 0:1)",
    )  # fmt: skip


def test_a1_message_truncated_on_a_group_of_two() -> None:
    """Two ranks alone: the asymmetry ends in an error, whose cause is the fused batch."""
    report = expect(
        Job("{S x>1, R y<1}", "{R x<0}; {S y>0}"), verdicts.FIRST_USE, [0],
        "{isend x→r1, irecv x←r1}", "lone irecv x←r0",
    )  # fmt: skip
    assert report.ranks[1].doing.startswith("raised DistBackendError: message trunc")
    assert report.ranks[1].role == "victim"


# -- B. batching -------------------------------------------------------------------------


def test_b1_grouped_against_separate_on_one_communicator() -> None:
    """B1, eager group: one side batches, the other does not."""
    expect(
        Job("{S x>1, R y<1}", "S y>0; R x<0", "sleep", eager=True),
        verdicts.GROUPING, [0, 1], "edge (0, 1)", "as one batch", "one by one",
        "undefined",
    )  # fmt: skip


def test_b1_grouped_against_separate_in_a_lazy_group() -> None:
    """B1, lazy group: the batch and the single ops ride different communicators."""
    expect(
        Job("{S x>1, R y<1}", "S y>0; R x<0", ""), verdicts.TRANSPORT_SPLIT, [0], "r1",
    )  # fmt: skip


def test_b2_cycle_through_batch_boundaries() -> None:
    """B2: a skip connection shares a batch; the cycle and the batch are named."""
    job = Job(
        "F0; {S F0>1, S F0[1]>2}", "{R F0<0}; F0; {S F0>2}", "{R F0[1]<0, R F0<1}; F0",
        eager=True,
    )  # fmt: skip
    assert job.is_deadlock
    expect(
        job,
        verdicts.BATCH_CYCLE,
        [0, 2],
        "r0→r2→r1→r0",
        "{isend F0→r1, isend F0[1]→r2}",
    )


def test_b3_sends_face_each_other_in_steady_state() -> None:
    """B3: each side sends before it receives, separately and waited on."""
    expect(
        Job("S F1>1; R B0<1", "S B0>0; R F1<0"), verdicts.SENDS_FACE, [0, 1],
        "r0 in isend F1→r1", "r1 in isend B0→r0", "two sends wait for each other",
    )  # fmt: skip


def test_b4_lone_send_against_a_batch() -> None:
    """B4: the lone side and the fused side are both named, whatever the transport."""
    expect(Job("S F3>1; R B0<1", "{R F3<0, S B0>0}", ""), verdicts.TRANSPORT_SPLIT, [1])
    expect(
        Job("S F3>1; R B0<1", "{R F3<0, S B0>0}", "", eager=True),
        verdicts.GROUPING,
        [0, 1],
    )


def test_b5_nothing_wrong_logically() -> None:
    """All matched and nothing moves: no logical mismatch, and what that rules out."""
    job = Job("{S x>1, S y>1}", "{R x<0, R y<0}")
    for log in job.logs.values():
        log.status, log.alive = Status.RUNNING, True
        for record in log.records:
            record.waited_ns = record.done_ns = 0
    job.beat()
    report = expect(job, verdicts.NO_MISMATCH, [], "posted on both sides", "ruled out")
    assert report.findings[0].severity == "warning"


# -- C. order ----------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [True, False])
def test_c1_two_sends_wait_for_each_other(eager: bool) -> None:
    """C1: send before receive on both sides."""
    expect(
        Job("S x>1; R x<1", "S x>0; R x<0", "", eager=eager), verdicts.SENDS_FACE, [0, 1],
        "two sends wait for each other",
    )  # fmt: skip


def test_c1_in_the_queue_of_one_communicator() -> None:
    """C1 on CUDA: hosts run ahead, all ops are posted, the order of kernels blocks."""
    job = Job("s x>1; R x<1", "s x>0; R x<0", "", eager=True, host=Host.ASYNC)
    for rank in (0, 1):
        job.logs[rank].status, job.logs[rank].alive = Status.RUNNING, True
    job.beat()
    assert job.is_deadlock
    first = verdict(job)
    assert first.code in (verdicts.SENDS_FACE, verdicts.WAIT_CYCLE), first.sentence
    assert first.culprits == (0, 1)


def test_c1_across_two_communicators() -> None:
    """CUDA: a kernel that its compute stream keeps back keeps its partner waiting."""
    job = Job(
        "{R F0<1, S B0>1}; R F1<1; {R F2<1, S B2>1}",
        "{S F0>0, R B0<0}; {S F2>0, R B2<0}; S F1>0", host=Host.ASYNC,
    )  # fmt: skip
    assert job.is_deadlock
    assert job.unmatched == set()
    first = verdict(job)
    assert first.severity == "error"
    assert first.culprits == (0, 1)


def test_c1_receives_face_each_other() -> None:
    """Receive before send on both sides is told apart from sends."""
    expect(Job("R x<1; S x>1", "R x<0; S x>0"), verdicts.RECVS_FACE, [0, 1])


def test_c1_a_ring_of_sends() -> None:
    """Three ranks in a ring of sends: all of them, as a ring."""
    expect(
        Job("S x>1; R x<2", "S x>2; R x<0", "S x>0; R x<1"), verdicts.SENDS_FACE, [0, 1, 2],
        "ring",
    )  # fmt: skip


def test_c1_a_mixed_circle() -> None:
    """A circle of sends and receives is a wait cycle."""
    expect(
        Job("S x>1; R y<2", "R z<2; R x<0", "S y>0; S z>1"),
        verdicts.WAIT_CYCLE,
        [0, 1, 2],
    )


def test_c2_first_difference_in_order() -> None:
    """C2: both sides have the ops, in another order; the first difference is named."""
    job = Job(
        "step 1; S F0>1; S F2>1; S F1>1; R B0<1", "step 1; R F0<0; R F1<0; R F2<0; hang F2",
        schedules=schedules(2, 4),
    )  # fmt: skip
    report = expect(
        job, verdicts.ORDER_DIFFERS, [0, 1], "k=1 from r0 to r1", "F2 for the sender",
        "F1 for the receiver", "in step 1",
    )  # fmt: skip
    assert [f.severity for f in report.findings] == ["error"]


# -- D. groups and ranks -------------------------------------------------------------------


def test_d1_the_two_sides_use_different_groups() -> None:
    """D1: one side posts on the default group, the other on the pipeline's."""
    job = Job(
        "{S F0>1@world}", "{R F0<0@pp}", "sleep", "sleep", groups={"pp": [0, 1]},
    )  # fmt: skip
    report = expect(
        job, verdicts.WRONG_GROUP, [0, 1], "group world", "group pp", "never match",
        "on group world only r0 of 4 ranks joined",
    )  # fmt: skip
    assert len([f for f in report.findings if f.severity == "error"]) == 1


def test_d2_group_rank_used_as_global_rank() -> None:
    """D2: r3 receives from 0, the group rank of r1, and r1's send stays unmatched."""
    job = Job(
        "S F0>2@a", "S F0>3@b", "R F0<0@a", "R F0<0@world; F0",
        groups={"a": [0, 2], "b": [1, 3]}, eager=True,
    )  # fmt: skip
    expect(
        job, verdicts.WRONG_RANK, [3], "r3 receives from r0", "r1 sends to r3",
        "0 is the rank of r1 within group b",
    )  # fmt: skip


def test_d3_global_ranks_first_group_ranks_beside() -> None:
    """D3: an op of a subgroup shows both kinds of ranks."""
    job = Job("sleep", "sleep", "sleep", "R F0<1@pp", groups={"pp": [1, 3]})
    assert job.report().pending[0].edge == "r3←r1 (group pp=[1,3]: 1←0)"


# -- E. skipped and added ops --------------------------------------------------------------


def test_e1_an_extra_evaluation_on_one_rank() -> None:
    """E1: r1 is in a run that r0, which has exited, never started."""
    runs = schedules(2, 2)
    job = Job(
        one_f_one_b(0, 2, 2), one_f_one_b(1, 2, 2) + "; eval 2; R F0<0", schedules=runs,
    )  # fmt: skip
    expect(
        job, verdicts.RUN_NOT_STARTED, [0], "evaluation run 2", "irecv F0←r0",
        "r0 started only 1 run",
    )  # fmt: skip


def test_e2_fewer_gradients_sent_than_received() -> None:
    """E2: r0 expects two tensors for B0, r1 sends one; the index is named."""
    job = Job(
        "step 1; S F0>1; R B0<1; R B0[1]<1", "step 1; R F0<0; F0; S B0>0; hang B1",
        schedules=schedules(2, 2),
    )  # fmt: skip
    expect(
        job,
        verdicts.MISSING_OP,
        [1],
        "r0 expects 2 tensors for B0",
        "r1 sends 1",
        "index 1",
    )


def test_e2_the_next_microbatch_fills_the_gap() -> None:
    """E2 further on: the gap was filled by the next microbatch; the first one is named."""
    job = Job(
        "R B0<1; R B0[1]<1; R B1<1; R B1[1]<1", "S B0>0; S B1>0; sleep",
    )  # fmt: skip
    expect(job, verdicts.MISSING_OP, [1], "k=1", "2 tensors for B0", "sends 1")


def test_e3_barrier_against_receive() -> None:
    """E3: r0 is in a barrier, r1 in a receive that r0 posts only after it."""
    expect(
        Job("barrier@world; S x>1", "R x<0; barrier@world"), verdicts.COLLECTIVE_VS_P2P,
        [0, 1], "r0 is in barrier #0 of group world", "irecv x←r0",
    )  # fmt: skip


def test_e4_only_one_rank_skips_the_start_up_exchange() -> None:
    """E4: r0 and r2 exchange shapes, r1 does not."""
    job = Job(
        "step 1; S meta>1; F0; S F0>1", "step 1; F0; R F0<0@other; F0",
        "step 1; R meta<1; R F0<1",
        schedules=schedules(3, 4), groups={"other": [0, 1, 2]},
    )  # fmt: skip
    expect(job, verdicts.STARTUP_NOT_JOINED, [1], "start-up exchange", "r1 does not")


def test_e4_metadata_paired_with_an_activation() -> None:
    """E4 where the channel pairs metadata with an activation: the first difference."""
    job = Job("S meta>1; S F0>1; R B0<1", "R F0<0; F0; hang B0", hang=30)
    expect(
        job,
        verdicts.STARTUP_NOT_JOINED,
        [1],
        "metadata for the sender",
        "F0 for the receiver",
    )


def test_e5_gpipe_with_one_microbatch_is_healthy() -> None:
    """E5: nothing is said when nothing is wrong."""
    job = Job("F0; S F0>1; R B0<1; B0", "R F0<0; F0; S F0>2; R B0<2; B0; S B0>0",
              "R F0<1; F0; B0; S B0>1")  # fmt: skip
    assert job.report().findings == ()


# -- F. payload ----------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "expected"), [("3", "5"), ("4", "3")])
def test_f1_sizes_differ_though_nothing_hangs(sent: str, expected: str) -> None:
    """F1: elements and bytes of both sides, although the run finished."""
    job = Job(f"S F0>1 shape={sent}", f"R F0<0 shape={expected}")
    assert not job.is_deadlock
    report = expect(
        job,
        verdicts.SIZE_DIFFERS,
        [0],
        f"{sent} elements",
        f"{expected} elements",
        "bytes",
    )
    assert report.findings[0].severity == "warning"
    assert report.exit_code == 1


def test_f2_last_microbatch_is_smaller() -> None:
    """F2: F2 has two rows where three are expected; the batch does not divide."""
    job = Job(
        "S F0>1 shape=3,4; S F1>1 shape=3,4; S F2>1 shape=2,4",
        "R F0<0 shape=3,4; R F1<0 shape=3,4; R F2<0 shape=3,4",
    )
    report = expect(
        job, verdicts.SIZE_DIFFERS, [0], "isend F2→r1", "float32[2, 4]", "float32[3, 4]",
        "does not divide",
    )  # fmt: skip
    assert "1 of 3 pairs" in report.findings[0].evidence[0]


def test_f3_sequence_length_changes_in_step_2() -> None:
    """F3: from step 2 on the receiver keeps the old shape; the step is named."""
    job = Job(
        "step 1; S F0>1 shape=2,8; end; step 2; S F0>1 shape=2,16; end",
        "step 1; R F0<0 shape=2,8; end; step 2; R F0<0 shape=2,8; end",
        schedules=schedules(2, 2),
    )
    expect(job, verdicts.SIZE_DIFFERS, [0], "in step 2")


def test_f4_strides_differ() -> None:
    """F4: the same shape in another memory layout."""
    job = Job("S F0>1 shape=4,4 strides=1,4", "R F0<0 shape=4,4 strides=4,1")
    expect(job, verdicts.STRIDES_DIFFER, [0], "strides (1, 4)", "strides (4, 1)")


def test_f_dtype_and_shape_differ() -> None:
    """A float32 sent into a bfloat16, and a transposed shape, are told apart."""
    expect(
        Job("S F0>1", "R F0<0 dtype=bfloat16"),
        verdicts.DTYPE_DIFFERS,
        [0],
        "float32",
        "bfloat16",
    )
    expect(Job("S F0>1 shape=2,8", "R F0<0 shape=8,2"), verdicts.SHAPE_DIFFERS, [0])


def test_f_harmless_differences_are_silent() -> None:
    """Flat buffers, and strides of dimensions of size one, are no finding."""
    assert Job("S F0>1 shape=16", "R F0<0 shape=2,8").report().findings == ()
    job = Job("S F0>1 shape=1,8 strides=8,1", "R F0<0 shape=1,8 strides=1,1")
    assert job.report().findings == ()


# -- G. ranks that raise, die or lag -------------------------------------------------------


def test_g1_where_it_was_raised_and_the_op_of_that_microbatch() -> None:
    """The root cause's own frame comes first, and the send its microbatch owed."""
    job = Job(
        "S F0>1; S F1>1; R B0<1", "R F0<0; F0; S F0>2; R F1<0; F1; raise ValueError: no",
        "R F0<1; F0; {S B0>1, R F1<1}", eager=True,
    )  # fmt: skip
    record = next(r for r in job.logs[1].records if r.kind is Kind.EXCEPTION)
    record.text = (
        'ValueError: no\nTraceback (most recent call last):\n  File "/t/stage.py", line'
        ' 7, in call\n  File "/me/model.py", line 3, in forward\nValueError: no\n\n'
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/t/outer.py", line 9, in step\n'
        "RuntimeError: failed to run forward"
    )
    report = expect(job, verdicts.RAISED, [1], "before posting isend F1→r2")
    assert report.findings[0].evidence[0] == "r1 raised at /me/model.py:3 in forward"


def test_g1_echoes_of_others_are_victims() -> None:
    """G1: connection errors after another rank's exception do not make culprits."""
    job = Job(
        "F0; S F0>1; R B0<1", "R F0<0; F0; raise ValueError: bad weights", "R F0<1; F0",
    )  # fmt: skip
    for rank, seconds in ((0, 1), (2, 2)):
        _echo(
            job,
            rank,
            "RuntimeError: [../gloo/pair.cc:1] Connection closed by peer",
            seconds,
        )
    report = expect(job, verdicts.RAISED, [1], "ValueError", "r0 and r2 are victims")
    assert len(report.findings) == 1


def _echo(job: Job, rank: int, text: str, seconds: float) -> None:
    """The rank's open op fails with a communication error, and so does the rank."""
    log = job.logs[rank]
    at = log.progress_ns + int(seconds * SECOND)
    for record in log.records:
        if record.kind is Kind.OP and not record.done_ns:
            record.flags |= Flag.FAILED
            record.returned_ns = record.returned_ns or record.posted_ns
            record.wait_ns = record.wait_ns or record.returned_ns
            record.waited_ns = at
    log.records.append(
        Record(len(log.records) + 1, Kind.EXCEPTION, at, text=f"{text}\ntrace")
    )
    log.progress_ns = at
    log.status, log.status_ns, log.alive = Status.RAISED, at, False
    job.beat()


def test_g1_time_outs_do_not_hide_the_hang() -> None:
    """When all ranks end in time-outs, the hang is analysed as it stood."""
    job = pipeline(4, 2)
    for rank in range(4):
        _echo(
            job,
            rank,
            "RuntimeError: Timed out waiting 1800000ms for recv operation",
            20,
        )
    report = expect(job, verdicts.TRANSPORT_SPLIT, [0])
    assert len(report.findings) == 1
    assert {r.state for r in report.ranks} == {"raised"}


def test_g2_one_op_behind_after_an_exception() -> None:
    """G2: r1 caught an exception and went on; the op it skipped is named."""
    job = Job(
        "S F0>1; S F1>1; S F2>1", "R F0<0; F0; S F0>2; R F1<0; F1; catch OutOfMemoryError: CUDA; "
        "R F2<0; F2; S F2>2; sleep", "R F0<1; F0; R F1<1; F1; R F2<1; F2",
    )  # fmt: skip
    expect(
        job, verdicts.SKIPPED, [1], "r1 went on after OutOfMemoryError: CUDA in F1 of stage 1",
        "skipped isend F1→r2",
    )  # fmt: skip


def test_g2_unlabelled() -> None:
    """G2 without schedule labels: the rank that survived an exception is named."""
    job = Job(
        "S x>1; S x>1", "R x<0; S x>2; catch OutOfMemoryError: CUDA; R x<0; sleep",
        "R x<1; R x<1",
    )  # fmt: skip
    expect(job, verdicts.SKIPPED, [1], "skipped isend x→r2")


def test_g3_raised_while_building_sends() -> None:
    """G3: r2 raises before it sends B0; r1 waits for it."""
    job = Job(
        "S F0>1; R B0<1", "R F0<0; F0; S F0>2; R B0<2", "R F0<1; F0; B0; "
        "raise RuntimeError: element 0 of tensors does not require grad",
    )  # fmt: skip
    expect(
        job, verdicts.RAISED, [2], "does not require grad in B0 of stage 2",
        "before posting isend B0→r1", "r0 and r1 are victims",
    )  # fmt: skip


@pytest.mark.parametrize("cut", range(1, 9))
def test_g4_killed_in_any_phase(cut: int) -> None:
    """G4: wherever r1 is killed it is the culprit, the others at most victims."""
    words = ["R F0<0", "F0", "S F0>2", "R B0<2", "B0", "S B0>0"]
    job = Job(
        "F0; S F0>1; R B0<1; B0; sleep", "; ".join([*words[: cut - 1], "sleep"]),
        "R F0<1; F0; B0; S B0>1; sleep",
    )  # fmt: skip
    job.kill(1, seconds_ago=25)
    report = expect(job, verdicts.DIED, [1], "r1 (pid 4001 on node-a) is gone")
    assert not any(1 in f.victims for f in report.findings)
    assert len(report.findings) == 1


@pytest.mark.parametrize("end", ["killed", "exited"])
def test_g4_ended_in_the_middle_of_a_matched_op(end: str) -> None:
    """Both sides posted the op and one ended before it was complete: who waits is named."""
    job = Job("F0; S F0>1; sleep", "R F0<0; sleep")
    send, recv = (
        next(r for r in job.logs[n].records if r.kind is Kind.OP) for n in (0, 1)
    )
    send.done_ns = send.waited_ns = recv.done_ns = recv.waited_ns = 0
    if end == "killed":
        job.kill(0, seconds_ago=20)
        report = expect(job, verdicts.DIED, [0], "r1 waits behind it")
    else:
        job.logs[0].status, job.logs[0].alive = Status.EXITED, False
        job.logs[0].status_ns = job.logs[0].progress_ns
        report = expect(job, verdicts.EXITED, [0], "before isend F0→r1 was complete")
    assert report.findings[0].victims == (1,)


def test_g4_ended_in_the_middle_of_an_op_the_ring_has_overwritten() -> None:
    """The dead rank's record of the op is gone; its counter still says that it posted."""
    job = Job("F0; S F0>1; sleep", "R F0<0; sleep")
    recv = next(r for r in job.logs[1].records if r.kind is Kind.OP)
    recv.done_ns = recv.waited_ns = 0
    job.logs[0].records.clear()
    job.kill(0, seconds_ago=29)
    expect(job, verdicts.DIED, [0], "r1 waits behind it")


def test_g4_victims_raise_after_the_death() -> None:
    """G4: the dead one is the culprit although the others' errors are all one sees."""
    job = Job("S F0>1; R B0<1", "R F0<0; hang F0", "R F0<1; F0")
    job.kill(1, seconds_ago=29)
    for rank in (0, 2):
        _echo(job, rank, "DistBackendError: Connection reset by peer", 5)
    job.beat(until={1: 29})
    report = expect(job, verdicts.DIED, [1])
    assert len(report.findings) == 1
    assert report.findings[0].victims == (0, 2)


def test_g4_the_launcher_ends_the_others() -> None:
    """G4: ranks ended by SIGTERM after a death are the launcher's victims."""
    job = Job("S F0>1; R B0<1", "R F0<0; hang F0", "R F0<1; F0")
    job.kill(1, seconds_ago=20)
    for rank in (0, 2):
        _terminate(job, rank, 19)
    report = expect(job, verdicts.DIED, [1])
    assert [r.state for r in report.ranks] == ["terminated", "dead", "terminated"]
    assert len(report.findings) == 1


def _terminate(job: Job, rank: int, seconds_ago: float) -> None:
    log = job.logs[rank]
    log.alive, log.terminated_by = False, "SIGTERM"
    log.terminated_ns = job.now_ns - int(seconds_ago * SECOND)
    log.heartbeat_wall_ns = log.terminated_ns
    log.heartbeat_ns = log.terminated_ns - START + log.start_monotonic_ns


def test_g4_in_a_copied_directory() -> None:
    """A copied directory: the rank whose monitor fell silent is the dead one."""
    job = Job("S F0>1; R B0<1", "R F0<0; hang F0", "R F0<1; F0")
    for log in job.logs.values():
        log.alive = None
    job.beat(until={1: 25})
    report = expect(job, verdicts.DIED, [1], "no sign of life")
    assert [r.state for r in report.ranks] == ["unknown", "dead", "unknown"]


def test_g4_slow_in_a_copied_directory() -> None:
    """A copied directory: a rank whose monitor still beats is slow, not dead."""
    job = Job(
        "S F0>1; R B0<1", "R F0<0; hang F0", "R F0<1; F0", schedules=schedules(3, 4)
    )
    for log in job.logs.values():
        log.alive = None
    expect(job, verdicts.STRAGGLER, [1])


def test_g4_a_hang_before_the_death_comes_first() -> None:
    """A rank killed long after the deadlock it was part of: both, the deadlock first."""
    job = Job("S x>1; R x<1", "S x>0; R x<0", hang=60)
    job.kill(0, seconds_ago=10)
    report = expect(job, verdicts.SENDS_FACE, [0, 1])
    assert [f.code for f in report.findings] == [verdicts.SENDS_FACE, verdicts.DIED]


def test_all_ended_by_the_launcher_after_a_hang() -> None:
    """A launcher's time-out ended everything: the hang is analysed as it stood."""
    job = pipeline(4, 2)
    for rank in range(4):
        _terminate(job, rank, 5)
    report = expect(job, verdicts.TRANSPORT_SPLIT, [0])
    assert {r.state for r in report.ranks} == {"terminated"}


def test_ended_from_outside_while_all_was_well() -> None:
    """SIGTERM in the middle of progress is a note, not a hang."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; hang F0", hang=0.3)
    for rank in range(2):
        _terminate(job, rank, 0.1)
    report = expect(job, verdicts.ENDED_FROM_OUTSIDE, [], "SIGTERM")
    assert report.exit_code == 0


# -- H. counts -----------------------------------------------------------------------------


def test_h1_different_numbers_of_microbatches() -> None:
    """H1: r1 waits for F4, r0 scheduled 4 microbatches; said before anything else."""
    runs = {0: schedules(2, 4)[0], 1: schedules(2, 5)[1]}
    job = Job(
        one_f_one_b(0, 2, 4), one_f_one_b(1, 2, 5), schedules=runs,
    )  # fmt: skip
    report = expect(
        job, verdicts.CONFIG_DIFFERS, [0, 1], "n_microbatches", "r0: n_microbatches 4",
        "r1: n_microbatches 5", "r1 waits for irecv F4←r0", "r0 scheduled 4",
    )  # fmt: skip
    assert len(report.findings) == 1


def test_h1_the_odd_one_out() -> None:
    """Of three ranks the one with another setting is the culprit."""
    runs = schedules(3, 4)
    runs[1] = schedules(3, 5)[1]
    job = Job(
        *(one_f_one_b(s, 3, 5 if s == 1 else 4) for s in range(3)), schedules=runs
    )
    expect(job, verdicts.CONFIG_DIFFERS, [1])


def test_h2_data_iterator() -> None:
    """H2: r0 is between steps; r1 waits for it."""
    job = Job(
        one_f_one_b(0, 2, 2) + "; sleep", one_f_one_b(1, 2, 2) + "; step 2; R F0<0",
        schedules=schedules(2, 2),
    )  # fmt: skip
    expect(
        job, verdicts.BETWEEN_STEPS, [0], "outside the schedule", "after step 1",
        "data iterator", "not in communication", "r1 waits for irecv F0←r0",
    )  # fmt: skip


def test_h2_a_short_pause_between_steps_is_no_finding() -> None:
    """A rank that loads data for a moment is healthy."""
    job = Job(
        one_f_one_b(0, 2, 2) + "; sleep", one_f_one_b(1, 2, 2) + "; step 2; R F0<0",
        schedules=schedules(2, 2), hang=2,
    )  # fmt: skip
    assert job.report().findings == ()


def test_h3_batch_smaller_than_microbatches() -> None:
    """H3: which rank, how many chunks, and n."""
    job = Job(
        "step 1; raise ValueError: Expecting 4 arg_mbs but got 3", "step 1; R F0<0",
        schedules=schedules(2, 4),
    )  # fmt: skip
    expect(job, verdicts.BATCH_TOO_SMALL, [0], "r0's batch", "3 chunks", "n=4")


# -- I. collectives ------------------------------------------------------------------------


def test_i1_a_stage_skips_a_collective() -> None:
    """I1: one rank left out the all_reduce and is in the next step already."""
    job = Job(
        "step 1; end; all_reduce@world; step 2; S F0>1",
        "step 1; end; step 2; R F0<0", "step 1; end; all_reduce@world; step 2; R F0<1",
        schedules=schedules(3, 4),
    )  # fmt: skip
    expect(
        job, verdicts.COLLECTIVE_VS_P2P, [1], "all_reduce #0 of group world",
        "r1 has not entered", "irecv F0←r0", "left it out",
    )  # fmt: skip


def test_i1_who_skipped_what_is_not_guessed() -> None:
    """One rank is missing in the collective, but another owes it an op: both are named."""
    job = Job("all_reduce@world", "S F0>2; all_reduce@world", "all_reduce@world")
    expect(job, verdicts.COLLECTIVE_VS_P2P, [1, 2], "isend F0→r2")


def test_i1_a_collective_that_one_rank_never_enters() -> None:
    """A rank that is nowhere to be seen while the others are in a collective."""
    job = Job("all_reduce@world", "sleep", "all_reduce@world")
    expect(
        job, verdicts.COLLECTIVE_NOT_ENTERED, [1], "entered by r0 and r2", "not by r1"
    )


def test_i1_exited_without_the_collective() -> None:
    """A rank that finished and owes a collective."""
    job = Job("all_reduce@world", "", "all_reduce@world")
    expect(job, verdicts.EXITED, [1], "all_reduce #0")


def test_i2_two_threads_share_a_group() -> None:
    """I2: position, op and thread on each side."""
    job = Job(
        "all_gather@world; barrier@world", "thread all_gather@world; barrier@world"
    )
    entered = [r for log in job.logs.values() for r in log.records if r.k == 0]
    assert {r.text for r in entered} == {"all_gather", "barrier"}
    expect(
        job, verdicts.COLLECTIVE_ORDER, [0, 1], "collective #0 of group world",
        "all_gather on r0 (thread 1)", "barrier on r1 (thread 1)",
    )  # fmt: skip


def test_i2_collectives_of_two_groups_cross() -> None:
    """Two groups entered in another order: each rank waits in its own."""
    job = Job(
        "barrier@a; barrier@b",
        "barrier@b; barrier@a",
        groups={"a": [0, 1], "b": [0, 1]},
    )
    expect(job, verdicts.COLLECTIVE_ORDER, [0, 1], "group a", "group b")


def test_i_collective_in_the_queue_of_a_communicator() -> None:
    """CUDA: all entered the barrier, but on r1 its kernel stands behind a receive."""
    expect(
        Job("barrier@world; S F0>1", "{R F0<0}; barrier@world", eager=True,
            default="world", host=Host.ASYNC),
        verdicts.COLLECTIVE_VS_P2P, [0, 1], "r1 has queued it behind irecv F0←r0",
    )  # fmt: skip


def test_i3_a_stage_that_never_receives() -> None:
    """I3: the last stage finished without receiving; its neighbour waits."""
    expect(Job("S F0>1", ""), verdicts.EXITED, [1], "irecv F0←r0", "in vain")


# -- J. misleading diagnostics --------------------------------------------------------------


def test_j1_the_second_send_is_owed() -> None:
    """J1: r0→r1 done once, r1 waits for a second send, r2 for r1: r0 owes it."""
    expect(
        Job("S x>1; sleep", "R x<0; R x<0; S x>2", "R x<1"), verdicts.SEND_NOT_POSTED, [0],
        "r0 has not posted isend x→r1",
    )  # fmt: skip


# -- never blame the innocent ---------------------------------------------------------------


def _random_programs(random: Random) -> list[str]:
    """Programs of two to four ranks that agree on most ops, with faults put in."""
    world = random.randint(2, 4)
    programs: list[list[str]] = [[] for _ in range(world)]
    for number in range(random.randint(1, 6)):
        src, dst = random.sample(range(world), 2)
        send, recv = f"S F{number}>{dst}", f"R F{number}<{src}"
        if random.random() < 0.3:
            back = (f"R B{number}<{dst}", f"S B{number}>{src}")
            programs[src].append("{" + f"{send}, {back[0]}" + "}")
            programs[dst].append("{" + f"{recv}, {back[1]}" + "}")
            continue
        programs[src].append(send)
        programs[dst].append(recv)
    for program in programs:
        if program and random.random() < 0.35:
            fault = random.choice(("drop", "swap", "single", "batch"))
            at = random.randrange(len(program))
            if fault == "drop":
                del program[at]
            elif fault == "swap":
                program.insert(random.randrange(len(program)), program.pop(at))
            elif fault == "single":
                program[at : at + 1] = program[at].strip("{}").split(", ")
            elif not program[at].startswith("{"):
                program[at] = "{" + program[at] + "}"
    return ["; ".join(program) for program in programs]


@pytest.mark.parametrize("host", list(Host))
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int, eager: bool, host: Host) -> None:
    """A finding exactly where the model says deadlock; unmatched ops exactly its own."""
    programs = _random_programs(Random(seed))
    job = Job(*programs, eager=eager, host=host)
    report = job.report()
    shown = f"{programs}\n" + "\n".join(
        f"{f.code} {f.sentence}" for f in report.findings
    )
    # Ops that meet the wrong partner are said even where nothing hangs.
    silent = (verdicts.ORDER_DIFFERS, verdicts.MISSING_OP)
    errors = [
        f
        for f in report.findings
        if f.severity != "note" and not (job.is_clean and f.code in silent)
    ]
    assert bool(errors) == (job.is_deadlock or not job.is_clean), shown
    unmatched = {
        (v.rank, v.peer, v.direction, v.transport, v.k)
        for v in report.pending
        if v.reason == "unmatched"
    }
    assert unmatched == job.unmatched, shown
    codes = {f.code for f in errors}
    assert verdicts.UNDETERMINED not in codes, shown
    if job.is_deadlock:
        assert verdicts.NO_MISMATCH not in codes, shown
        stuck = {h.rank for h in job.outcome.hosts if h.at not in (At.ENDED, At.RAISED)}
        involved = {r for f in errors for r in (*f.culprits, *f.victims)}
        assert stuck <= involved, shown


# -- invariance -----------------------------------------------------------------------------

CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "split": (["{S x>1, R y<1}", "S y>0; R x<0", ""], {}),
    "grouping": (["{S x>1, R y<1}", "S y>0; R x<0", ""], {"eager": True}),
    "first use": (["{S x>1, R y<1}", "{S y>0}; {R x<0}", ""], {"eager": True}),
    "batches": (
        ["{S x>1, S y>2}", "{R x<0}; {S x>2}", "{R y<0, R x<1}"], {"eager": True},
    ),
    "set-up": (["{S x>1}", "{R x<0}", "sleep"], {}),
    "sends": (["S x>1; R x<1", "S x>0; R x<0", ""], {}),
    "receives": (["R x<1; S x>1", "R x<0; S x>0", ""], {}),
    "circle": (["S x>1; R y<2", "R z<2; R x<0", "S y>0; S z>1"], {}),
    "not posted": (["S x>1", "sleep", ""], {}),
    "exited": (["R x<1; R x<1", "S x>0", "S x>1"], {}),
    "collective": (["barrier@world; S x>1", "R x<0; barrier@world", "barrier@world"], {}),
    "raised": (["S x>1; R x<1", "R x<0; raise ValueError: no", "R x<1"], {}),
    "order": (["S F0>1; S F1>1; R B0<1", "R F1<0; R F0<0; sleep", ""], {}),
}  # fmt: skip


def _renamed(program: str, order: Sequence[int], group: str) -> str:
    """The same program with ranks permuted, labels and the group renamed."""
    program = re.sub(r"([<>])(\d+)", lambda m: m[1] + str(order[int(m[2])]), program)
    program = re.sub(r"\b([xyz])(?=[<>])", lambda m: f"tensor.{m[1]}", program)
    return re.sub(r"\b([FB])(\d)", lambda m: f"{m[1]}{int(m[2]) + 5}", program).replace(
        "@world", f"@{group}"
    )


@pytest.mark.parametrize("case", list(CASES))
def test_the_code_does_not_depend_on_numbering_or_names(case: str) -> None:
    """Permuted ranks, renamed labels and groups, two unrelated ranks: the same code."""
    programs, options = CASES[case]
    first = verdict(Job(*programs, groups={"pp": [0, 1, 2]}, **options))
    order = [4, 0, 3]
    others = ["", "S own>2; S own>2", "R own<1; R own<1", "", ""]
    for old, new in enumerate(order):
        others[new] = _renamed(programs[old], order, "mine")
    others[1], others[2] = (
        others[1].replace(">2", ">2@rest"),
        others[2].replace("<1", "<1@rest"),
    )
    job = Job(
        *others,
        groups={"mine": sorted(order), "rest": [1, 2]},
        default="mine",
        **options,
    )
    again = verdict(job)
    assert again.code == first.code, again.sentence
    assert again.severity == first.severity
    assert len(again.culprits) == len(first.culprits)
    assert {1, 2}.isdisjoint({*again.culprits, *again.victims}), again.sentence


def test_replicas_with_the_same_fault_are_one_finding() -> None:
    """DP × PP: the fault of two pipelines is one finding with a count."""
    job = Job(
        "{S F0>2@a, R B0<2@a}", "{S F0>3@b, R B0<3@b}", "R F0<0@a", "R F0<1@b",
        groups={"a": [0, 2], "b": [1, 3]}, stages={0: 0, 1: 0, 2: 1, 3: 1},
    )  # fmt: skip
    report = expect(
        job, verdicts.TRANSPORT_SPLIT, [0, 1], "the same in 1 other place: r1"
    )
    assert len(report.findings) == 1
    assert report.findings[0].victims == (2, 3)


def test_independent_faults_are_all_listed() -> None:
    """Two unrelated cycles and a raised rank: three findings."""
    job = Job(
        "S x>1; R x<1", "S x>0; R x<0", "R y<3; S y>3", "R y<2; S y>2",
        "raise ValueError: no",
    )  # fmt: skip
    codes = {f.code: f.culprits for f in job.report().findings}
    assert codes == {
        verdicts.SENDS_FACE: (0, 1),
        verdicts.RECVS_FACE: (2, 3),
        verdicts.RAISED: (4,),
    }


# -- what is not known ----------------------------------------------------------------------


def test_a_missing_black_box_is_undetermined() -> None:
    """The file that would settle it is named; the rank is listed as missing."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; F0; S F0>2", "R F0<1; sleep")
    del job.logs[1]
    report = expect(
        job, verdicts.UNDETERMINED, [], "irecv B0←r1", "the black box of r1 is not here"
    )
    assert any("rank00001.pptrace" in line for line in report.findings[0].remedy)
    assert report.ranks[1].state == "missing"
    assert report.ranks[1].doing == "no black box"


def test_untrusted_counts_are_undetermined() -> None:
    """A rank whose counts are incomplete is not blamed; the reason is said."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; F0; sleep")
    job.logs[1].incomplete = "enabled after a schedule had run"
    expect(job, verdicts.UNDETERMINED, [], "enabled after a schedule had run")


def test_a_rank_that_switched_pptrace_off_is_not_blamed() -> None:
    """After disable() a rank's silence proves nothing."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; F0; sleep")
    job.logs[1].status = Status.DISABLED
    job.logs[1].incomplete = "pptrace.disable() was called"
    assert verdict(job).code == verdicts.UNDETERMINED


def test_no_mismatch_is_not_claimed_on_untrusted_counts() -> None:
    """Matched as far as one can see, but a rank missed ops: undetermined."""
    job = Job("{S x>1}", "{R x<0}")
    for log in job.logs.values():
        log.status, log.alive = Status.RUNNING, True
        for record in log.records:
            record.waited_ns = record.done_ns = 0
    job.logs[0].incomplete = "enabled late"
    job.beat()
    expect(job, verdicts.UNDETERMINED, [], "enabled late")


def test_the_same_exception_everywhere_is_one_finding() -> None:
    """Every rank raises the same thing: one finding, rank 0 among its culprits."""
    report = expect(
        Job(*["raise ValueError: no such file"] * 4), verdicts.RAISED, range(4)
    )
    assert len(report.findings) == 1


def test_an_uncertain_channel_is_undetermined() -> None:
    """One channel whose count may be wrong: that is the reason given."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; F0; sleep")
    log = job.logs[0]
    log.channels = [dataclasses.replace(c, uncertain="cut off") for c in log.channels]
    expect(job, verdicts.UNDETERMINED, [], "cut off")


def test_a_dead_rank_is_named_even_if_counts_are_incomplete() -> None:
    """Death is certain whatever the counts say."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; hang F0")
    job.logs[1].incomplete = "a hook failed"
    job.kill(1, seconds_ago=20)
    expect(job, verdicts.DIED, [1])


def test_nothing_at_all() -> None:
    """No logs, or logs without records, make an empty report."""
    assert diagnose({}).findings == ()
    report = Job("sleep", "sleep").report()
    assert report.findings == ()
    assert [r.doing for r in report.ranks] == ["has posted nothing yet"] * 2


def test_all_left_without_a_word_at_the_end() -> None:
    """os._exit on every rank after the work: nothing is open, so nothing is wrong."""
    job = pipeline(2, 2)
    for log in job.logs.values():
        log.status = Status.RUNNING
    assert job.report().findings == ()


# -- CUDA ------------------------------------------------------------------------------------


def test_founding_case_where_waits_do_not_block_the_host() -> None:
    """On CUDA waits return at once; the verdict is the same."""
    expect(pipeline(4, 2, host=Host.ASYNC), verdicts.TRANSPORT_SPLIT, [0], "n=2 < S=4")


def test_an_open_action_is_no_straggler_when_its_stream_is_stuck() -> None:
    """A host inside F that cannot end because the stream waits is a victim."""
    job = Job(
        "sleep", "step 1; R F0<0; hang F0", host=Host.ASYNC, eager=True,
        schedules=schedules(2, 4),
    )  # fmt: skip
    record = next(r for r in job.logs[1].records if r.kind is Kind.OP)
    record.returned_ns = record.wait_ns = record.waited_ns = record.posted_ns + 1
    action = job.ranks[1].action("F0", 1)
    assert not action.done_ns
    report = expect(job, verdicts.SEND_NOT_POSTED, [0])
    assert report.ranks[1].role == "victim"


# -- size ------------------------------------------------------------------------------------


def test_cost_grows_with_the_number_of_ranks_only() -> None:
    """Twice the ranks cost about twice the work, counted in calls, not in seconds."""

    def calls(replicas: int) -> int:
        programs, groups = [], {}
        for n in range(replicas):
            a, b = 2 * n, 2 * n + 1
            groups[f"g{n}"] = [a, b]
            programs += [f"S x>{b}@g{n}; R x<{b}@g{n}", f"S x>{a}@g{n}; R x<{a}@g{n}"]
        job = Job(*programs, groups=groups)
        profile = cProfile.Profile()
        report = profile.runcall(job.report)
        assert report.findings[0].code == verdicts.SENDS_FACE
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(64) < 2.6 * calls(32)
