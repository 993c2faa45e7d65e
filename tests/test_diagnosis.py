"""The diagnosis: every class of hang gets its code, culprit and words; health none.

The black boxes are written by `Job`: each rank's program runs on the model of NCCL's
rules (`pptrace.simulation`), and the records are those that the hooks would have
written up to where it got.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
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
_OP = re.compile(r"([SRsr]) ([\w.]+)(?:\[(\d)\])?([<>])(\d+)(?:@(\w+))?((?: \w+=\S+)*)$")
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
        return self.base + self.job.tick()

    def add(self, kind: Kind, **fields: Any) -> Record:
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
        pass_, microbatch = _label(word)
        self.context |= {"pass_": pass_, "microbatch": microbatch}
        return self.add(
            Kind.ACTION, pass_=pass_, microbatch=microbatch, stage=self.stage,
            step=self.context.get("step", 0), thread=thread,
        )  # fmt: skip

    def begin_step(self, word: str) -> None:
        kind, number, *rest = word.split()
        fields = dict(part.split("=") for part in rest)
        run = self.log.schedules[int(fields.get("schedule", 0))]
        self.context["step"] = int(number)
        self.context["step_record"] = self.add(
            Kind.STEP, step=int(number), stage=self.stage, text=run.name,
            microbatch=run.n_microbatches, flags=Flag(4 if kind == "eval" else 0),
        )  # fmt: skip

    def fail(self, word: str) -> Iterator[Step]:
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
        name, _, group_name = word.partition("@")
        group = self.job.groups[group_name]
        key = ("collective", group_name)
        k = self.counts[key] = self.counts.get(key, -1) + 1  # type: ignore[index]
        record = self.add(Kind.COLLECTIVE, group=group, k=k, text=name, thread=thread)
        kernel = Kernel(Communicator.of(group, Transport.GROUP), collective=name)
        yield from self.run(kernel, [record], is_waited=True)

    def post(self, words: Sequence[str], coalesced: bool, thread: int) -> Iterator[Step]:
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

    def close(self, hosts: Sequence[At], errors: Sequence[str]) -> None:
        for kernel, records in self.kernels:
            if kernel.state is KernelState.DONE:
                for record in records:
                    record.done_ns = record.waited_ns or self.now()
            for error in filter(None, [kernel.error]):
                for record in records:
                    record.flags |= Flag.FAILED
                self.add(Kind.EXCEPTION, text=f"DistBackendError: {error}\ntraceback")
                self.log.status = Status.RAISED
        if self.ended and set(hosts) == {At.ENDED}:
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
            {r.rank: r.steps(text) for r, text in zip(self.ranks, programs, strict=True)},
            host=host,
        )
        for rank in self.ranks:
            mine = [h for h in outcome.hosts if h.rank == rank.rank]
            rank.close([h.at for h in mine], [h.error for h in mine])
        self.is_deadlock = outcome.is_deadlock
        self.now_ns = START + self.clock + int(hang * SECOND)
        self.logs = {rank.rank: rank.log for rank in self.ranks}
        self.beat()

    def tick(self) -> int:
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
        self.beat(until={r: seconds_ago for r, g in self.logs.items() if g.alive is False})

    def report(self, **options: Any) -> Report:
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


def one_f_one_b(stage: int, stages: int, n: int, *, step: int = 1, split: bool = True) -> str:
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
            one_f_one_b(s, stages, n, step=step + 1, split=split) for step in range(steps)
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
            ScheduleRun(name, n, stages, (s,), {i: i for i in ranks}, (group, ranks), "static")
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
    shown = "\n".join(f"{f.code} {f.severity} {f.culprits}: {f.sentence}" for f in report.findings)
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
    unmatched = {(v.rank, v.direction, v.label) for v in report.pending if v.reason == "unmatched"}
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


def test_ops_in_flight_of_a_running_job_are_no_finding() -> None:
    """A healthy job read while it runs: pending ops, a busy rank, nothing wrong."""
    job = Job("F0; S F0>1; R B0<1", "R F0<0; hang F0", "R F0<1; F0", hang=0.3)
    report = job.report()
    assert report.findings == ()
    assert len(report.pending) == 2
