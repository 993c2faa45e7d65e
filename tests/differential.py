"""The checker against emulated runs: do they agree on hang or not, and on which ops?

    python tests/differential.py --programs 2000 --seed 1

Hypothesis draws programs of 2 to 5 ranks. The checker plays each one (its hosts block
in ``wait``), and a pool of worker processes performs it with torch's public calls under
``pptrace.enable(emulate="nccl")``. Each program has process groups and threads of its
own, so the pool goes on where one hangs. A hang is quiescence seen in the black boxes.
Compared are, by rank, whether the host ends, raises or waits for ever, and the ops that
are unmatched and those that are not done. A disagreement is shrunk and printed.

`tests/test_differential.py` runs a sample; ``make differential`` runs two thousand.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import pptrace
from pptrace import blackbox, program_runner
from pptrace.checker import check_plan
from pptrace.hooks import emulation, session
from pptrace.matching import match
from pptrace.programs import parse
from pptrace.records import Kind, RankLog, Record
from pptrace.semantics import Host, Law
from pptrace.simulation import At
from pptrace.statements import WORLD, Program

RANKS = 5
PROGRAMS_PER_POOL = 60
"""A hung program leaves its threads behind, each one its channels in the tables."""
LIMIT_S = 30.0
FOREVER = timedelta(days=1)
REGRESSIONS: tuple[str, ...] = ()
"""Shrunk programs on which the two once disagreed; performed before all others."""


class OpKey(NamedTuple):
    """An op, as both sides name it."""

    rank: int
    direction: str
    peer: int
    k: int
    transport: str
    group: str
    where: str = ""
    """Of an open op: whether the host is inside its ``call`` or ``wait``."""

    def __str__(self) -> str:
        arrow = "->" if self.direction == "SEND" else "<-"
        place = f"{self.transport} communicator of {self.group}"
        where = f", in its {self.where}" if self.where else ""
        return f"r{self.rank}{arrow}r{self.peer} #{self.k} on the {place}{where}"


@dataclass(frozen=True)
class Outcome:
    """What became of a program; by rank, and sets of ops."""

    hosts: tuple[str, ...]
    """``ended``, ``raised`` or ``blocked``."""
    unmatched: frozenset[OpKey] = frozenset()
    open: frozenset[OpKey] = frozenset()
    """Posted, and not done."""


def differences(checked: Outcome, real: Outcome) -> list[str]:
    """What the two do not agree on, one line each."""
    found = [
        f"r{rank}: the checker says {here}, the run {there}"
        for rank, (here, there) in enumerate(
            zip(checked.hosts, real.hosts, strict=True)
        )
        if here != there
    ]
    for what in ("unmatched", "open"):
        ours, theirs = getattr(checked, what), getattr(real, what)
        found += [f"{what} by the checker only: {op}" for op in sorted(ours - theirs)]
        found += [f"{what} in the run only: {op}" for op in sorted(theirs - ours)]
    return found


def ops_of(
    logs: Mapping[int, RankLog], names: Mapping[str, str]
) -> tuple[frozenset[OpKey], frozenset[OpKey]]:
    """The unmatched and the open ops of a program's groups, by its names for them."""

    def key(rank: int, op: Record) -> OpKey:
        assert op.group is not None
        name, transport = names[op.group.name], op.transport.name
        return OpKey(rank, op.direction.name, op.peer, op.k, transport, name)

    unmatched = frozenset(
        key(op.rank, op.record)
        for view in match(logs).values()
        if view.channel.group[0] in names
        for op in (*view.unmatched_sends, *view.unmatched_recvs)
    )
    still_open = frozenset(
        key(rank, op)._replace(
            where="call" if op.in_call else "wait" if op.in_wait else ""
        )
        for rank, log in logs.items()
        for op in log.records
        if op.kind is Kind.OP and op.group is not None and op.group.name in names
        if op.is_open
    )
    return unmatched, still_open


def predict(program: Program) -> Outcome:
    """What the checker says."""
    run = check_plan(program.plan(), host=Host.BLOCKING).run
    if run is None:
        return Outcome(("ended",) * program.world_size)
    words = {At.ENDED: "ended", At.RAISED: "raised"}
    hosts = tuple(words.get(host.at, "blocked") for host in run.simulation.hosts)
    names = {name: name for name in (WORLD, *program.groups)}
    return Outcome(hosts, *ops_of(run.logs, names))


# -- a worker ------------------------------------------------------------------------


class Performer(program_runner._Performer):
    """Performs a program of fewer ranks than the job has, in groups of its own."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__(program, rank, None)  # type: ignore[arg-type]
        if WORLD in program.uses():
            world = list(range(program.world_size))
            self._groups[WORLD] = dist.new_group(world)

    def names(self) -> dict[str, str]:
        """What torch calls the groups this rank is in, and what the program does."""
        return {
            group.group_name: name
            for name, group in self._groups.items()
            if isinstance(group, dist.ProcessGroup)
        }


class _Keeping(dict[Any, Any]):
    """Works as the runner holds them, and beyond their wait."""

    def __init__(self) -> None:
        super().__init__()
        self._all: list[Any] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self._all.append(value)
        super().__setitem__(key, value)


class Worker:
    """One rank of the pool: obeys its pipe, performs programs on threads."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self._rank = rank
        self._pipe = pipe
        self._state = "ended"
        self._kept: Any = None  # works of the last program: dropped ones are not seen

    def serve(self) -> None:
        """Until the pipe is closed."""
        while True:
            text = self._pipe.recv()
            self._pipe.send(self._perform(text) if text else self._look())

    def _perform(self, text: str) -> dict[str, str]:
        program = parse(text)
        performer = Performer(program, self._rank)
        if self._rank < program.world_size:
            self._state = "running"
            thread = program_runner._Thread(performer)
            instructions = program.instructions(self._rank)
            threading.Thread(
                target=self._run, args=(thread, instructions), daemon=True
            ).start()
        return performer.names()

    def _run(self, thread: Any, instructions: Any) -> None:
        thread._works = kept = _Keeping()
        self._kept = thread, kept
        try:
            thread.run(instructions)
        except dist.DistBackendError:
            self._state = "raised"
        except BaseException as error:  # noqa: BLE001 - the parent prints it
            self._state = f"{type(error).__name__}: {error}"
        else:
            self._state = "ended"

    def _look(self) -> str:
        """Bring the black box up to date."""
        state = self._state
        on = session.current()
        assert on is not None
        assert on._on is not None
        on._on.recorder.poll_works()
        on._on.recorder.heartbeat()
        return state


def work(rank: int, port: int, out: Path, pipe: Connection, *, eager: bool) -> None:
    """One worker, until its parent goes."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    pptrace.enable(
        out / "runs",
        emulate="nccl",
        rule="split",
        eager=eager,
        host="blocking",
        hang_after=100_000,
        report=False,
        preflight="off",
    )
    dist.init_process_group("gloo", timeout=FOREVER)
    pipe.send(pptrace.run_folder())
    Worker(rank, pipe).serve()


# -- the pool ------------------------------------------------------------------------


class Pool:
    """Five workers that are one job; performs programs one after another."""

    def __init__(self, out: Path, *, eager: bool) -> None:
        self._out = Path(tempfile.mkdtemp(dir=out))
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self.performed = 0
        self._left = [0] * RANKS  # threads of hung programs, by rank
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        for rank in range(RANKS):
            self._fork(rank, port, eager=eager)
        self._folder = Path(self._answers()[0])

    def _fork(self, rank: int, port: int, *, eager: bool) -> None:
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            self._pids.append(pid)
            self._pipes.append(ours)
            return
        try:
            for pipe in (ours, *self._pipes):
                pipe.close()
            work(rank, port, self._out, theirs, eager=eager)
        except EOFError:
            pass
        except BaseException:  # noqa: BLE001 - into the log
            traceback.print_exc()
        finally:
            os._exit(1)

    def close(self) -> None:
        """Kill the workers."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()

    def perform(self, text: str, world_size: int) -> Outcome:
        """Perform one program until it has ended or nothing can move any more."""
        names: dict[str, str] = {}
        for found in self._ask(text):
            names |= found
        deadline = time.monotonic() + LIMIT_S
        before: object = None
        while True:
            states = self._ask("")
            hosts, seen = self._hosts(states, world_size)
            if seen is not None and seen == before:
                break
            before = seen
            if time.monotonic() > deadline:
                raise RuntimeError(f"neither ended nor stood still:\n{text}")
            if seen is None:
                time.sleep(0.002)  # the workers need the cores more than we do
        self.performed += 1
        for rank, host in enumerate(hosts):
            self._left[rank] += host == "blocked"
        logs = {rank: self._read(rank, None) for rank in range(world_size)}
        return Outcome(hosts, *ops_of(logs, names))

    def _hosts(
        self, states: list[str], world_size: int
    ) -> tuple[tuple[str, ...], object | None]:
        """What the hosts do, and all counters, None while something can still move."""
        heads = [self._read(rank, 0) for rank in range(RANKS)]
        hosts = tuple(
            "blocked"
            if state == "running" and heads[rank].emulation[0] > self._left[rank]
            else state
            for rank, state in enumerate(states[:world_size])
        )
        sent = sum(head.emulation[1] for head in heads)
        if "running" in hosts or sent != sum(head.emulation[2] for head in heads):
            return hosts, None
        counts = [(h.emulation, h.next_seq, h.progress_ns) for h in heads]
        return hosts, (hosts, counts)

    def _read(self, rank: int, tail: int | None) -> RankLog:
        return blackbox.read(self._folder / blackbox.file_name(rank), tail=tail)

    def _ask(self, text: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(text)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(LIMIT_S):
                raise RuntimeError(f"no answer of worker {rank}: {self._said(rank)}")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"worker {rank} died: {self._said(rank)}") from None
        return answers

    def _said(self, rank: int) -> str:
        return (self._out / f"rank{rank}.log").read_text(errors="replace")[-2000:]


class Pools:
    """One pool for programs with eager groups, one for the others, made anew in time."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._pools: dict[bool, Pool] = {}

    def perform(self, text: str) -> Outcome:
        """Perform one program."""
        program = parse(text)
        is_eager = program_runner.check_eager(program)
        pool = self._pools.get(is_eager)
        if pool is not None and pool.performed >= PROGRAMS_PER_POOL:
            self._pools.pop(is_eager).close()
            pool = None
        if pool is None:
            pool = self._pools[is_eager] = Pool(self._out, eager=is_eager)
        try:
            return pool.perform(text, program.world_size)
        except RuntimeError:
            self._pools.pop(is_eager).close()
            raise

    def close(self) -> None:
        """Kill all workers."""
        while self._pools:
            self._pools.popitem()[1].close()


# -- random programs -----------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """One statement of one rank."""

    kind: str
    """``now``: waited on at once; ``later``; ``named``; ``wait``; ``barrier``."""
    ops: tuple[str, ...] = ()
    is_batch: bool = False
    name: str = ""

    def __str__(self) -> str:
        if self.kind in ("wait", "barrier"):
            return f"{self.kind} {self.name}".strip()
        if self.is_batch:
            text = "{" + ", ".join(self.ops) + "}"
            return f"{self.name} = {text}" if self.kind == "named" else text
        if self.kind == "named":
            return f"{self.name} = {self.ops[0]}"
        word = {"S": "send", "R": "recv"}[self.ops[0][0]]
        return word + self.ops[0][1:] if self.kind == "now" else self.ops[0]


class _Draft:
    """A program in the making: at first one that is right, then faults put in."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.size = draw(st.sampled_from((2, 2, 3, 4, RANKS)))
        ranks = st.sampled_from(range(self.size))
        self.groups = {"pp": tuple(range(self.size))}
        if draw(st.booleans()):
            members = draw(st.sets(ranks, min_size=2))
            self.groups["dp"] = tuple(sorted(members))
        self.is_eager = draw(st.sampled_from((False, False, True)))
        self.ranks: list[list[Said]] = [[] for _ in range(self.size)]
        self.names = 0

    def text(self) -> str:
        """The program as text."""
        end = " eager" if self.is_eager else ""
        lines = [
            f"group {name} = {' '.join(map(str, ranks))}{end}"
            for name, ranks in self.groups.items()
        ]
        for rank, body in enumerate(self.ranks):
            lines.append(f"r{rank}: {'; '.join(map(str, body))}".rstrip())
        return "\n".join(lines) + "\n"

    def event(self) -> None:
        """Something that two ranks or more do together."""
        draw = self.draw
        group = draw(st.sampled_from(sorted(self.groups, reverse=True)))
        members = self.groups[group]
        kind = draw(
            st.sampled_from(("op", "op", "batch", "exchange", "all", "barrier"))
        )
        if kind == "barrier":
            if draw(st.booleans()):
                for rank in members:
                    self.ranks[rank].append(Said("barrier", name=group))
            return
        if kind == "all":
            self._batches(self._ring(members), group)
            return
        pair = st.permutations(members).map(lambda ranks: ranks[:2])
        src, dst = draw(pair)
        if kind == "op":
            self._singles(src, dst, group)
        elif kind == "batch":
            self._batches([(src, dst)], group)
        else:
            self._batches([(src, dst), (dst, src)], group)

    def _ring(self, members: tuple[int, ...]) -> list[tuple[int, int]]:
        return list(zip(members, (*members[1:], members[0]), strict=True))

    def _singles(self, src: int, dst: int, group: str) -> None:
        for rank, op in (
            (src, self._op("S", dst, group)),
            (dst, self._op("R", src, group)),
        ):
            self._add(rank, (op,), is_batch=False)

    def _batches(self, edges: Iterable[tuple[int, int]], group: str) -> None:
        ops: dict[int, list[str]] = {}
        for src, dst in edges:
            ops.setdefault(src, []).append(self._op("S", dst, group))
            ops.setdefault(dst, []).append(self._op("R", src, group))
        for rank, posted in ops.items():
            self._add(rank, tuple(posted), is_batch=True)

    def _op(self, letter: str, peer: int, group: str) -> str:
        size = self.draw(st.sampled_from((1, 1, 1, 2, 3)))
        payload = "" if size == 1 else f" [f32 {size}]"
        arrow = "->" if letter == "S" else "<-"
        return f"{letter} x{arrow}{peer}{payload} @{group}"

    def _add(self, rank: int, ops: tuple[str, ...], *, is_batch: bool) -> None:
        kinds = ("later", "named") if is_batch else ("later", "now", "named")
        kind = self.draw(st.sampled_from(kinds))
        name = ""
        if kind == "named":
            self.names += 1
            name = f"a{self.names}"
        self.ranks[rank].append(Said(kind, ops, is_batch, name))

    def waits(self) -> None:
        """Wait on named works somewhere later; on some never."""
        for body in self.ranks:
            for said in [s for s in body if s.kind == "named"]:
                if self.draw(st.sampled_from((True, True, True, False))):
                    at = self.draw(st.integers(body.index(said) + 1, len(body)))
                    body.insert(at, Said("wait", name=said.name))

    def fault(self) -> None:
        """Drop, repeat, swap or alter a statement of one rank."""
        draw = self.draw
        body = self.ranks[draw(st.integers(0, self.size - 1))]
        if not body:
            return
        at = draw(st.integers(0, len(body) - 1))
        kind = draw(
            st.sampled_from(("drop", "swap", "swap", "batch", "part", "part", "again"))
        )
        said = body[at]
        if kind == "drop" and said.kind != "named":
            del body[at]
        elif kind == "swap" and at and not _depends(body[at - 1], said):
            body[at - 1 : at + 1] = [said, body[at - 1]]
        elif kind == "batch" and len(said.ops) == 1:
            way = "later" if said.kind == "now" else said.kind
            body[at] = Said(way, said.ops, not said.is_batch, said.name)
        elif kind == "part" and len(said.ops) > 1:
            body[at] = Said(said.kind, said.ops[1:], said.is_batch, said.name)
        elif kind == "again" and said.kind in ("now", "later", "barrier"):
            body.insert(at, said)


def _depends(first: Said, second: Said) -> bool:
    return second.kind == "wait" and first.name == second.name


@st.composite
def texts(draw: Any) -> str:
    """Programs in the text format."""
    draft = _Draft(draw)
    for _ in range(draw(st.integers(1, 8))):
        draft.event()
    draft.waits()
    for _ in range(draw(st.integers(0, 3))):
        draft.fault()
    return draft.text()


# -- the test ------------------------------------------------------------------------


class Differential:
    """Performs programs, counts what became of them, keeps the last disagreement."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.failed = ""

    def examine(self, text: str) -> None:
        """Raises AssertionError if checker and run disagree."""
        try:
            checked = predict(parse(text))
            found = differences(checked, self._pools.perform(text))
        except Exception as error:  # noqa: BLE001 - to be shrunk like a disagreement
            found = [_where(error)]
        if found:
            self.failed = "\n".join((text, *found))
            raise AssertionError(self.failed)
        self.counts["programs"] += 1
        for word in ("blocked", "raised"):
            self.counts[word] += word in checked.hosts
        self.counts["unmatched"] += bool(checked.unmatched)
        if self.counts["programs"] % 100 == 0:
            print(self, flush=True)

    def __str__(self) -> str:
        counts = self.counts
        return (
            f"{counts['programs']} programs: {counts['blocked']} hang,"
            f" {counts['raised']} raise, {counts['unmatched']} with unmatched ops;"
            f" {time.monotonic() - self._began:.0f} s"
        )


def _where(error: Exception) -> str:
    """An error of the checker or of the pool, with the place that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__} in {place}: {error}"


def run(count: int, number: int, pools: Pools) -> tuple[Differential, bool]:
    """The regressions, then random programs; returns whether all agreed."""
    test = Differential(pools)

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(texts())
    def agree(text: str) -> None:
        test.examine(text)

    try:
        for text in REGRESSIONS:
            test.examine(text)
        agree()
    except AssertionError:
        return test, False
    return test, True


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--without", choices=[law.name for law in Law], help="let the runs break a law"
    )
    args = parser.parse_args()
    if args.without:
        broken = functools.partial(emulation.Emulator, _without=Law[args.without])
        emulation.Emulator = broken  # type: ignore[assignment, misc]
    with tempfile.TemporaryDirectory(prefix="pptrace-differential-") as out:
        pools = Pools(Path(out))
        try:
            test, agreed = run(args.programs, args.seed, pools)
        finally:
            pools.close()
    print(test)
    if not agreed:
        print(f"disagreement, shrunk:\n{test.failed}")
        return 1
    print("checker and runs agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
