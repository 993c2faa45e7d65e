"""The emulator in real processes: it hangs exactly where the rules say.

A pool of worker processes (this file, run as a script) executes programs; a hang is
quiescence, not a time-out: every rank blocked or ended and no message on its way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_programs import group_of, one_f_one_b, parse, programs, start_up
from pptrace.hooks.emulation import Emulator
from pptrace.records import Direction, Group, Transport
from pptrace.semantics import TRUNCATED, Host, Kernel, Law, Rule
from pptrace.simulation import At, Await, Post, Signal, Step, Wait, simulate

RANKS = 4
LIMIT_S = 60.0


# -- the worker --------------------------------------------------------------------


def steps_of(job: dict[str, Any], rank: int) -> Iterable[Step]:
    """The program of one rank of a job: a text, or a schedule."""
    if "texts" in job:
        groups = [Group(**{**g, "ranks": tuple(g["ranks"])}) for g in job["groups"]]
        return parse(rank, job["texts"][rank], *groups)
    group = group_of(*range(job["stages"]))
    schedule = one_f_one_b(group, rank, job["n"], Rule(job["rule"]))
    if job["dynamic"] is None:
        return schedule
    return itertools.chain(start_up(group, rank, dynamic=job["dynamic"]), schedule)


class Run:
    """One program in execution in a worker."""

    def __init__(self, stores: list[Any], rank: int, job: dict[str, Any]) -> None:
        self.rank = rank
        self.job = job
        self.store = stores[0]
        self.emulator = Emulator(
            lambda: stores[1],
            rank,
            len(job.get("texts", ())) or job["stages"],
            run=job["run"],
            host=job["host"],
            _without=Law(job["without"]),
        )
        self.at = At.RUNNING
        self.begun = 0
        self.error = ""
        self.wrong: list[str] = []
        self.awaiting = ""
        self.signals: dict[tuple[int, int], int] = {}
        self.works: dict[Kernel, Any] = {}
        self.tensors: dict[Kernel, list[torch.Tensor]] = {}
        self.is_stopping = False
        self.thread = threading.Thread(target=self.execute, daemon=True)

    def execute(self) -> None:
        """Take all steps."""
        try:
            for step in steps_of(self.job, self.rank):
                self.begun += 1
                self.take(step)
            self.at = At.ENDED
        except dist.DistBackendError as error:
            self.error = str(error)
            self.at = At.RAISED

    def take(self, step: Step) -> None:
        """Take one step."""
        if isinstance(step, Post):
            self.at = At.CALL
            self.post(step.kernel)
        elif isinstance(step, Wait):
            self.at = At.WAIT
            self.works[step.kernel].wait()
            self.check(step.kernel)
        elif isinstance(step, Signal):
            self.store.set(self.signal(self.rank, step.rank), "1")
        elif isinstance(step, Await):
            self.awaiting = self.signal(step.rank, self.rank)
            while not self.store.check([self.awaiting]) and not self.is_stopping:
                time.sleep(0.001)
            self.awaiting = ""
        self.at = At.RUNNING

    def signal(self, source: int, target: int) -> str:
        """The key of the next signal between two ranks."""
        n = self.signals[source, target] = self.signals.get((source, target), 0) + 1
        return f"{self.job['run']}/{source}-{target}-{n}"

    def post(self, kernel: Kernel) -> None:
        """Post a kernel through the emulator, sends filled with bytes of their own."""
        (name, ranks), transport = (
            kernel.communicator.group,
            kernel.communicator.transport,
        )
        group = Group(1, name, name, ranks, "nccl", kernel.communicator.eager)
        if kernel.collective is not None:
            self.works[kernel] = self.emulator.enter_collective(
                group, kernel.collective
            )
            return
        tensors = [
            torch.full((op.nbytes,), _byte(self.rank), dtype=torch.uint8)
            if op.direction is Direction.SEND
            else torch.zeros(op.nbytes, dtype=torch.uint8)
            for op in kernel.ops
        ]
        self.tensors[kernel] = tensors
        ops = [
            self.emulator.op(op.direction, tensor, op.peer)
            for op, tensor in zip(kernel.ops, tensors, strict=True)
        ]
        [work] = self.emulator.post(group, transport, ops, kernel.coalesced)
        self.works[kernel] = work

    def check(self, kernel: Kernel) -> None:
        """Check that what a waited-on kernel received came from where it should."""
        if self.emulator.host is Host.ASYNC:
            return
        for op, tensor in zip(kernel.ops, self.tensors.get(kernel, ()), strict=True):
            whose = op.peer if op.direction is Direction.RECV else self.rank
            if not bool((tensor == _byte(whose)).all()):
                self.wrong.append(f"{op.direction.name} {op.peer}: {tensor.tolist()}")

    def report(self) -> dict[str, Any]:
        """What it is doing now."""
        at = self.at  # before the emulator's state: it may only have gone on since
        awaiting = self.awaiting
        state = self.emulator.state()
        if awaiting and not self.store.check([awaiting]):
            at = At.SIGNAL
        elif at not in {At.ENDED, At.RAISED} and not state.hosts_blocked:
            at = At.RUNNING
        return {
            "at": at.name,
            "begun": self.begun,
            "error": self.error,
            "wrong": self.wrong,
            "sent": state.sent,
            "received": state.received,
            "blocked": fingerprint(self.emulator.blocked_on()),
            "pending": self.pending(),
            "posted": self.posted(),
            "completed": [work.is_completed() for work in list(self.works.values())],
        }

    def pending(self) -> list[Any]:
        """Ops posted and not matched: the channel's ends and transport, k."""
        with self.emulator._lock:
            return [
                [op.channel.transport, op.channel.src, op.channel.dst, op.k, self.rank]
                for kernel in self.emulator._works
                for op in kernel.ops
                if not op.matched
            ]

    def posted(self) -> list[Any]:
        """How many ops were posted: the channel's ends and transport, the number."""
        found = []
        with self.emulator._lock:
            for stream in self.emulator._machine._streams.values():
                transport = stream.communicator.transport
                for peer, edge in stream.sends.items():
                    found.append([transport, self.rank, peer, edge.posted])
                for peer, edge in stream.recvs.items():
                    found.append([transport, peer, self.rank, edge.posted])
        return found


def fingerprint(blocked: Iterable[Any]) -> list[Any]:
    """What blocks, as plain data."""
    return sorted(
        [
            [
                b.rank,
                b.obstacle.name,
                [[op.direction, op.peer, op.k] for op in b.ops],
                list(b.ranks),
            ]
            for b in blocked
        ]
    )


def _byte(rank: int) -> int:
    return rank + 1


def _store(port: int) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S)
    )


def _serve(port: int, rank: int) -> None:
    torch.set_num_threads(1)
    run: Run | None = None
    # Kept for all runs: now and then torch takes five seconds to open one.
    stores = [_store(port) for _ in range(2)]
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any] = {}
        if job["do"] == "start":
            run = Run(stores, rank, job)
            run.thread.start()
        elif job["do"] == "state" and run is not None:
            answer = run.report()
        elif job["do"] == "stop" and run is not None:
            run.is_stopping = True
            run.emulator.close()
            run.thread.join(LIMIT_S)
            answer = {"alive": run.thread.is_alive()}
        print(json.dumps(answer), flush=True)


# -- the pool ----------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What became of a job in real processes."""

    ranks: list[dict[str, Any]]

    @property
    def at(self) -> list[str]:
        """Where each rank stands."""
        return [rank["at"] for rank in self.ranks]

    @property
    def is_hung(self) -> bool:
        """Whether some host waits for ever."""
        return not {"ENDED", "RAISED"} >= set(self.at)

    @property
    def blocked(self) -> list[Any]:
        """What blocks, on all ranks."""
        return sorted(b for rank in self.ranks for b in rank["blocked"])

    @property
    def unmatched(self) -> list[Any]:
        """Pending ops whose partner was never posted: as `Run.pending`."""
        posted = {
            (transport, src, dst, rank): count
            for rank, report in enumerate(self.ranks)
            for transport, src, dst, count in report["posted"]
        }
        return sorted(
            [transport, src, dst, k, rank]
            for report in self.ranks
            for transport, src, dst, k, rank in report["pending"]
            if k >= posted.get((transport, src, dst, dst if rank == src else src), 0)
        )


class Pool:
    """Worker processes that run one job after another."""

    def __init__(self, size: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.runs = 0
        self.workers = [
            subprocess.Popen(
                [sys.executable, __file__, str(self.store.port), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def ask(self, rank: int, **command: Any) -> dict[str, Any]:
        """Send a command and read the answer; the test's time limit bounds it."""
        worker = self.workers[rank]
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(command) + "\n")
        worker.stdin.flush()
        answer: dict[str, Any] = json.loads(worker.stdout.readline())
        return answer

    def start(self, ranks: int, **job: Any) -> None:
        """Start a job."""
        self.runs += 1
        job = {"host": "blocking", "without": 0, "run": str(self.runs), **job}
        for rank in range(ranks):
            self.ask(rank, do="start", **job)

    def texts(self, *texts: str, groups: Iterable[Group] = (), **job: Any) -> Outcome:
        """Run programs in the one-line notation to their end or quiescence."""
        eager = bool(job.pop("eager", False))
        chosen = list(groups) or [group_of(*range(len(texts)), eager=eager)]
        told = [plain(group) for group in chosen]
        return self.run(len(texts), texts=texts, groups=told, **job)

    def run(self, ranks: int, **job: Any) -> Outcome:
        """Run a job to its end or quiescence."""
        self.start(ranks, **job)
        outcome = self.settle(range(ranks))
        self.stop(range(ranks))
        for report in outcome.ranks:
            assert not report["wrong"]
        return outcome

    def settle(
        self, ranks: Iterable[int], gone: Iterable[dict[str, Any]] = ()
    ) -> Outcome:
        """Wait until nothing can happen any more (see `EmulatorState`).

        ``gone`` are the last reports of ranks that were quiescent and were killed.
        """
        before: list[tuple[Any, ...]] | None = None
        ranks, gone = list(ranks), list(gone)
        while True:
            reports = [self.ask(rank, do="state") for rank in ranks]
            counts = [(r["at"], r["begun"], r["sent"], r["received"]) for r in reports]
            counted = [*reports, *gone]
            sent, received = (sum(r[key] for r in counted) for key in _COUNTS)
            still = sent == received and not any(r["at"] == "RUNNING" for r in reports)
            if still and counts == before:
                return Outcome(reports)
            before = counts if still else None

    def stop(self, ranks: Iterable[int]) -> None:
        """End the job; hosts still blocked get an error."""
        for rank in ranks:
            assert self.ask(rank, do="stop") == {"alive": False}

    def close(self) -> list[int]:
        """End the workers as processes end, without a word; their exit codes."""
        for worker in self.workers:
            if worker.stdin is not None and not worker.stdin.closed:
                worker.stdin.close()
        try:
            return [worker.wait(LIMIT_S) for worker in self.workers]
        finally:
            for worker in self.workers:
                worker.kill()
                worker.wait()
                if worker.stdout is not None:
                    worker.stdout.close()


def plain(group: Group) -> dict[str, Any]:
    """A group as JSON."""
    return {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}


_COUNTS = ("sent", "received")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One pool for the whole module: starting a worker imports torch."""
    workers = Pool(RANKS)
    yield workers
    assert workers.close() == [0] * RANKS


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """A pool of a test's own, for what cannot be used again."""
    workers = Pool(3)
    yield workers
    workers.close()


pytestmark = pytest.mark.multirank


# -- where it hangs ----------------------------------------------------------------


def test_a2_hangs_for_the_ranks_that_never_came(pool: Pool) -> None:
    """The first batch of a new group is held inside the call."""
    outcome = pool.texts("{S1}", "{R0}", "", "")
    assert outcome.at == ["CALL", "CALL", "ENDED", "ENDED"]
    assert [[rank, why, ranks] for rank, why, _, ranks in outcome.blocked] == [
        [0, "COMMUNICATOR", [2, 3]],
        [1, "COMMUNICATOR", [2, 3]],
    ]


def test_a2_passes_without_the_set_up_rule(pool: Pool) -> None:
    """The set-up rule alone makes A2 hang."""
    assert not pool.texts("{S1}", "{R0}", "", "", without=Law.SET_UP.value).is_hung


@pytest.mark.parametrize(
    ("law", "job"),
    [
        (Law.TRANSPORT, {"rule": "split", "dynamic": True}),
        (Law.FIRST_USE, {"rule": "coalesced", "dynamic": None}),
    ],
    ids=["transport", "first-use"],
)
def test_a1_hangs_by_exactly_one_rule(
    pool: Pool, law: Law, job: dict[str, Any]
) -> None:
    """1F1B, 4 stages, 1 microbatch: hangs with its rule, trains without."""
    others = (Law.TRANSPORT | Law.SET_UP | Law.FIRST_USE) & ~law
    assert pool.run(4, stages=4, n=1, **job).is_hung
    assert pool.run(4, stages=4, n=1, without=others.value, **job).is_hung
    assert not pool.run(4, stages=4, n=1, without=law.value, **job).is_hung


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("stages", [3, 4])
def test_1f1b_hangs_exactly_below_the_number_of_stages(
    pool: Pool, stages: int, rule: Rule, dynamic: bool | None
) -> None:
    """In real processes hosts block, so both rules hang for every n < S."""
    hung = [
        pool.run(stages, stages=stages, n=n, rule=rule.value, dynamic=dynamic).is_hung
        for n in range(1, stages + 2)
    ]
    expected = stages if rule is Rule.SPLIT or not dynamic else 1
    assert hung == [n < expected for n in range(1, stages + 2)]


@pytest.mark.parametrize(
    "texts",
    [
        ("S1 !1", "?0 R0"),
        ("S1~", ""),
        ("R1 R1", "S0", "S1"),
        ("{S1,R1}", "S0 R0"),
        ("S1 R1", "S0 R0"),
        ("S1 R1", "{R0,S0}", "", ""),
        ("barrier S1", "R0 barrier"),
        ("{S1,R1} {S1,R1}", "{S0,R0} {S0,R0}"),
    ],
    ids=["A4", "A6", "A5", "B1", "C1", "B4", "E3", "B3-fused"],
)
@pytest.mark.parametrize("eager", [False, True])
def test_cases_end_as_simulated(
    pool: Pool, texts: tuple[str, ...], eager: bool
) -> None:
    """The same programs in processes and in the simulation leave the same places."""
    agree(pool, texts, eager=eager)


def test_a3_hangs_inside_set_up_across_groups(pool: Pool) -> None:
    """Pipeline set-up between data-parallel collectives issued in another order."""
    groups = [
        group_of(0, 1, name="dp01"),
        group_of(2, 3, name="dp23"),
        group_of(0, 2, name="pp02"),
        group_of(1, 3, name="pp13"),
    ]
    outcome = pool.texts(
        "@dp01:all_gather @pp02:S2",
        "@pp13:S3 @dp01:all_gather",
        "@pp02:R0 @dp23:all_gather",
        "@dp23:all_gather @pp13:R1",
        groups=groups,
    )
    assert outcome.at == ["CALL"] * 4


def test_a_one_sided_batch_of_two_ranks_is_truncated(pool: Pool) -> None:
    """The call fails with the error NCCL gives, on the rank that expected less."""
    outcome = pool.texts("{S1,R1}", "{R0}")
    assert outcome.at == ["CALL", "RAISED"]
    assert TRUNCATED in outcome.ranks[1]["error"]


def test_a_healthy_exchange_delivers_every_payload(pool: Pool) -> None:
    """Batches, single ops, two groups and large payloads, both ways at once."""
    big = "x3000000"
    outcome = pool.texts(
        *(
            f"{{S{(r + 1) % 4}{big},R{(r - 1) % 4}{big}}} barrier "
            + ("S3x70000 R3" if r == 0 else "R0x70000 S0" if r == 3 else "")
            for r in range(4)
        )
    )
    assert outcome.at == ["ENDED"] * 4
    assert not outcome.blocked


# -- against the simulation --------------------------------------------------------


def agree(
    pool: Pool, texts: Iterable[str], *, eager: bool, host: Host = Host.BLOCKING
) -> None:
    """Run both ways; every rank must stand at the same place for the same reasons."""
    texts = tuple(texts)
    real = pool.texts(*texts, eager=eager, host=host.value)
    model = simulate(programs(dict(enumerate(texts)), eager=eager), host=host)
    assert [(r["at"], r["begun"]) for r in real.ranks] == [
        (host.at.name, host.begun) for host in model.hosts
    ]
    assert real.blocked == fingerprint(model.blocked)
    assert real.unmatched == sorted(
        [c.transport, c.src, c.dst, op.k, op.kernel.rank]
        for op in model.unmatched
        if op.kernel is not None
        for c in [op.channel]
    )


@st.composite
def random_texts(draw: st.DrawFn) -> list[str]:
    """Programs of 2 to 4 ranks that mostly fit together, with some words disturbed."""
    size = draw(st.integers(2, RANKS))
    words: list[list[str]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(1, 8))):
        i, j = draw(st.permutations(range(size)))[:2]
        kind = draw(st.sampled_from(["edge", "edge", "swap", "ring", "all"]))
        wait = draw(st.sampled_from(["", "", "~"]))
        if kind == "edge":
            batched = draw(st.booleans())
            words[i].append((f"{{S{j}}}" if batched else f"S{j}") + wait)
            words[j].append(f"{{R{i}}}" if batched else f"R{i}")
        elif kind == "swap":
            words[i].append(f"{{S{j},R{j}}}{wait}")
            words[j].append(f"{{S{i},R{i}}}")
        elif kind == "ring":
            for rank in range(size):
                words[rank].append(f"{{S{(rank + 1) % size},R{(rank - 1) % size}}}")
        else:
            for rank in range(size):
                words[rank].append("barrier")
    for rank in range(size):
        if len(words[rank]) > 1 and not draw(st.integers(0, 2)):
            at = draw(st.integers(0, len(words[rank]) - 2))
            change = draw(st.sampled_from(["swap", "drop"]))
            if change == "swap":
                pair = words[rank][at : at + 2]
                words[rank][at : at + 2] = pair[::-1]
            else:
                del words[rank][at]
    return [" ".join([*found, "W"]) for found in words]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts=random_texts(), eager=st.booleans(), host=st.sampled_from(Host))
def test_random_programs_end_as_simulated(
    pool: Pool, texts: list[str], eager: bool, host: Host
) -> None:
    """Hang or not, where, why, and which ops are unmatched: as the simulation says."""
    agree(pool, texts, eager=eager, host=host)


# -- works -------------------------------------------------------------------------


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[list[Emulator]]:
    """Two emulators in this process, rank 0 and rank 1, edges not used."""
    store = dist.HashStore()
    host = getattr(request, "param", Host.BLOCKING)
    emulators = [Emulator(lambda: store, rank, 2, host=host) for rank in range(2)]
    yield emulators
    for emulator in emulators:
        emulator.close()


PAIR = group_of(0, 1, eager=True)


def exchange(
    emulators: list[Emulator], sent: torch.Tensor, received: torch.Tensor
) -> torch.Tensor:
    """Send a tensor from rank 0 to rank 1."""
    sender, receiver = emulators

    def send() -> None:
        [work] = sender.post(PAIR, Transport.GROUP, [sender.op(1, sent, 1)], False)
        work.wait()

    thread = threading.Thread(target=send)
    thread.start()
    op = receiver.op(2, received, 0)
    [work] = receiver.post(PAIR, Transport.GROUP, [op], False)
    assert work.wait() is True
    thread.join(LIMIT_S)
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_tensor_of_any_dtype_arrives(
    pair: list[Emulator], dtype: torch.dtype
) -> None:
    """Dense tensors arrive as they were sent; a scalar and an empty one too."""
    for shape in ((3, 5), (), (0,)):
        sent = torch.randn(shape).to(dtype)
        assert torch.equal(exchange(pair, sent, torch.zeros_like(sent)), sent)


def test_sizes_are_as_on_nccl(pair: list[Emulator]) -> None:
    """F1: the smaller of both sizes is copied; nothing hangs, nothing terminates."""
    five = exchange(pair, torch.arange(1.0, 4.0), torch.zeros(5))
    assert five.tolist() == [1, 2, 3, 0, 0]
    room = torch.zeros(4)
    exchange(pair, torch.arange(1.0, 5.0), room[:3])
    assert room.tolist() == [1, 2, 3, 0]
    big = exchange(pair, torch.ones(1 << 20), torch.zeros(10))
    assert big.tolist() == [1.0] * 10
    half = exchange(pair, torch.ones(1 << 21), torch.zeros(1 << 20))
    assert bool((half == 1).all())
    assert exchange(pair, torch.ones(2), torch.zeros(2)).tolist() == [1, 1]


def test_strides_and_dtypes_are_not_carried(pair: list[Emulator]) -> None:
    """F4: elements travel in storage order, so other strides permute in silence."""
    sent = torch.arange(6.0).reshape(2, 3).t()
    assert sent.stride() == (1, 3)
    received = exchange(pair, sent, torch.zeros(3, 2))
    assert received.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert not torch.equal(received, sent)
    raw = exchange(pair, torch.ones(1), torch.zeros(1, dtype=torch.int32))
    assert raw.item() == 0x3F800000


def test_a_work_says_what_torch_needs(pair: list[Emulator]) -> None:
    """Completion, result and future of a real ``dist.Work``, one for a whole batch."""
    first, second = pair
    tensors = [torch.ones(2), torch.zeros(2)]
    ops = [first.op(1, tensors[0], 1), first.op(2, tensors[1], 1)]
    works: list[Any] = []
    group = group_of(0, 1)
    thread = threading.Thread(
        target=lambda: works.extend(first.post(group, Transport.GROUP, ops, True))
    )
    thread.start()
    others = [second.op(2, torch.zeros(2), 0), second.op(1, torch.full((2,), 7.0), 0)]
    [theirs] = second.post(group, Transport.GROUP, others, True)
    thread.join(LIMIT_S)
    [work] = works
    assert isinstance(work, dist.Work)
    assert work.wait(timedelta(seconds=LIMIT_S))
    theirs.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert [tensor.tolist() for tensor in work.result()] == [[1, 1], [7, 7]]
    assert work.get_future().wait()[1].tolist() == [7, 7]


def test_a_future_asked_for_early_completes_later(pair: list[Emulator]) -> None:
    """The future of a pending receive is set when its send comes."""
    exchange(pair, torch.ones(1), torch.zeros(1))
    receiver, sender = pair[1], pair[0]
    op = receiver.op(2, torch.zeros(1), 0)
    [work] = receiver.post(PAIR, Transport.GROUP, [op], False)
    future = work.get_future()
    assert not future.done()
    assert not work.is_completed()
    sender.post(PAIR, Transport.GROUP, [sender.op(1, torch.ones(1), 1)], False)
    assert future.wait()[0].item() == 1


def test_a_wait_with_a_timeout_raises(pair: list[Emulator]) -> None:
    """The caller's own time-out is kept, and the op stays pending."""
    exchange(pair, torch.ones(1), torch.zeros(1))
    op = pair[1].op(2, torch.zeros(1), 0)
    [work] = pair[1].post(PAIR, Transport.GROUP, [op], False)
    with pytest.raises(dist.DistBackendError, match="timed out"):
        work.wait(timedelta(milliseconds=20))
    assert not work.is_completed()
    pair[0].post(PAIR, Transport.GROUP, [pair[0].op(1, torch.ones(1), 1)], False)
    assert work.wait()


@pytest.mark.parametrize("pair", list(Host), indirect=True)
def test_a_collective_carries_gloos_work(pair: list[Emulator]) -> None:
    """It is complete when its turn has come on every rank and gloo's is complete.

    Waiting blocks even an asynchronous host: gloo's collective would.
    """

    class Real(dist.Work):
        done = False

        def is_completed(self) -> bool:
            return self.done

        def wait(self, timeout: timedelta | None = None) -> bool:
            del timeout
            self.done = True
            return True

    first = pair[0].enter_collective(PAIR, "barrier").carry(Real())
    assert not first.is_completed()
    waiter = threading.Thread(target=first.wait)
    waiter.start()
    while not pair[0].state().hosts_blocked:
        pass
    pair[1].enter_collective(PAIR, "barrier").wait()
    waiter.join(LIMIT_S)
    assert first.is_completed()


def test_async_waits_return_at_once(pool: Pool) -> None:
    """As on CUDA: the host runs past an op that never completes, to its end."""
    outcome = pool.texts("S1 R1 R1", "R0 S0", host="async")
    assert outcome.at == ["ENDED", "ENDED"]
    assert outcome.ranks[0]["completed"] == [True, True, False]
    assert outcome.blocked == [[0, "PARTNER", [[Direction.RECV, 1, 1]], [1]]]


def test_tensors_it_cannot_move_are_refused(pair: list[Emulator]) -> None:
    """A device it does not know is named before anything is posted."""
    op = pair[0].op(1, torch.zeros(1, device="meta"), 1)
    with pytest.raises(ValueError, match="on meta"):
        pair[0].post(PAIR, Transport.GROUP, [op], False)


# -- the end -----------------------------------------------------------------------


def test_a_killed_peer_leaves_silence(own_pool: Pool) -> None:
    """Its partner waits on without an error, and serves its other partners as before.

    It also ends normally, with ops pending.
    """
    pool = own_pool
    texts = ("S1 R1 R1~ ?2 S2 R2 S1~ W", "R0 S0 ?0", "R0 S0")
    pool.start(3, texts=texts, groups=[plain(group_of(0, 1, 2))])
    before = pool.settle(range(3))
    assert before.at == ["SIGNAL", "SIGNAL", "CALL"]
    pool.workers[1].kill()
    pool.workers[1].wait(LIMIT_S)
    pool.store.set(f"{pool.runs}/2-0-1", "1")
    after = pool.settle([0, 2], gone=[before.ranks[1]])
    assert after.at == ["WAIT", "ENDED"]
    assert [why for _, why, _, _ in after.blocked] == ["ORDER", "PARTNER"]
    assert not after.ranks[0]["error"]
    assert pool.close() == [0, -signal.SIGKILL, 0]


@pytest.mark.parametrize("where", ["call", "wait"])
def test_ctrl_c_ends_a_host_that_is_held(where: str) -> None:
    """KeyboardInterrupt reaches the main thread inside the call and inside the wait."""
    script = """
import os, signal, sys, threading, torch, torch.distributed as dist
from pptrace.hooks.emulation import Emulator
from pptrace.records import Group, Transport
from pptrace.semantics import Law
store = dist.HashStore()
laws = Law.FIRST_USE if sys.argv[1] == "wait" else Law.NONE
emulator = Emulator(lambda: store, 0, 2, _without=laws)
def interrupt():
    while not emulator.state().hosts_blocked:
        pass
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
group = Group(1, "pp", "pp", (0, 1), "nccl", True)
at = "call"
try:
    [work] = emulator.post(
        group, Transport.GROUP, [emulator.op(1, torch.ones(1), 1)], False
    )
    at = "wait"
    work.wait()
except KeyboardInterrupt:
    print("interrupted in", at)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, where],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert ended.stdout == f"interrupted in {where}\n"
    assert not ended.stderr


def test_close_frees_a_held_host_and_may_be_called_twice(pair: list[Emulator]) -> None:
    """Switching off must not leave the job's thread inside pptrace for ever."""
    errors: list[Exception] = []

    def post() -> None:
        try:
            op = pair[0].op(1, torch.ones(1), 1)
            pair[0].post(PAIR, Transport.GROUP, [op], False)
        except dist.DistBackendError as error:
            errors.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    while not pair[0].state().hosts_blocked:
        pass
    pair[0].close()
    thread.join(LIMIT_S)
    pair[0].close()
    assert ["closed" in str(error) for error in errors] == [True]


def test_ranks_of_two_hosts_are_told_so() -> None:
    """Loopback serves one host: the call fails and says why."""
    store = dist.HashStore()
    emulator = Emulator(lambda: store, 0, 2, run="x")
    value = {"address": "127.0.0.1", "port": 1, "token": "", "host": "elsewhere"}
    store.set("pptrace/emulation/x/1", json.dumps(value))
    with pytest.raises(dist.DistBackendError, match="runs on host elsewhere"):
        emulator.post(PAIR, Transport.GROUP, [emulator.op(1, torch.ones(1), 1)], False)
    emulator.close()


def test_strangers_are_turned_away(pair: list[Emulator]) -> None:
    """A connection without the token of this rank is closed, and nothing else stops."""
    address = json.loads(pair[1]._fabric._store.get("pptrace/emulation//1"))
    with socket.create_connection((address["address"], address["port"])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        stranger.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert exchange(pair, torch.ones(1), torch.zeros(1)).item() == 1


def _main() -> None:
    _serve(int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    _main()
