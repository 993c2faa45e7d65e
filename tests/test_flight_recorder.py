"""Flight Recorder dumps: read as they are met in the field, and what they prove."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fr_synthetic import SECOND, START_NS, Ring, write_dumps
from pptrace import alignment, flight_recorder, pickles, runs
from pptrace.diagnosis import diagnose
from pptrace.dryrun import dry_run
from pptrace.errors import InputError
from pptrace.programs import load
from pptrace.records import Direction, Flag, Kind, RankLog, Transport
from pptrace.report import Report
from pptrace.semantics import Host
from synthetic import one_f_one_b

__all__: list[str] = []

_CASES = Path(__file__).parent / "cases"
_VERSIONS = ("2.3", "2.4", "2.5", "2.7", "2.9", "2.10")


def _rings(world: int, **options: Any) -> list[Ring]:
    return [Ring(rank, {"0": range(world)}, **options) for rank in range(world)]


def _write(rings: Sequence[Ring], folder: Path, **options: Any) -> None:
    at_ns = max(r.start_ns + r.count * r.step_ns for r in rings) + 600 * SECOND
    for ring in rings:
        ring.write(folder, **{"at_ns": at_ns} | options)


def _report(folder: Path) -> Report:
    run = runs.load_run(folder)
    return diagnose(run.logs, now_wall_ns=run.now_wall_ns, problems=run.problems)


# -- reading -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["pickle", "json"])
@pytest.mark.parametrize("version", _VERSIONS)
def test_every_version_and_layout_gives_the_same_records(
    tmp_path: Path, version: str, layout: str
) -> None:
    """Ranks of the group are translated; state of a batch comes from its end."""
    ring = Ring(5, {"0": range(8), "pp": (1, 5, 7)})
    ring.collective("all_reduce")
    ring.send(1, group="pp", shape=(2, 3))
    ring.batch("recv 1", "send 7", group="pp", done=False, dtype="BFloat16")
    log = flight_recorder.read(ring.write(tmp_path, version=version, layout=layout))
    assert (log.rank, log.world_size) == (5, 8)
    reduce, send, recv, other = log.records
    assert (reduce.kind, reduce.text, reduce.k) == (Kind.COLLECTIVE, "all_reduce", 0)
    assert reduce.done_ns
    assert (send.peer, send.group_peer, send.direction) == (1, 0, Direction.SEND)
    assert (send.transport, send.flags) == (Transport.PAIR, Flag(0))
    assert send.done_ns > send.posted_ns
    assert str(send.signature) == "float32[2, 3]"
    assert (send.numel, send.nbytes) == (6, 24)
    assert (recv.peer, recv.direction, other.peer) == (1, Direction.RECV, 7)
    for op in (recv, other):
        assert op.flags & Flag.COALESCED
        assert op.transport is Transport.GROUP
        assert (op.done_ns, op.batch_size, op.batch) == (0, 2, recv.batch)
        assert op.signature.dtype == "bfloat16"
    assert send.group is not None
    assert send.group.key == ("pp", (1, 5, 7))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_container-node02_5", 5),
        ("comm_lib_trace_rank_5", 5),
        ("trace5.json", 5),
        ("fr-rank5-20260101.pkl", 5),
        ("rank_5", 5),
        ("job17_node3_rank5.pickle", 5),
        ("node7_5.gz", 5),
        ("dump.bin", 5),  # its own ops say it: it sends as group rank 1 of [1, 5]
    ],
)
def test_the_rank_is_found_under_any_name(tmp_path: Path, name: str, rank: int) -> None:
    """Prefix, host names, other numbers and suffixes do not matter."""
    ring = Ring(5, {"0": range(8), "pp": (1, 5)})
    ring.send(1, group="pp")
    path = ring.write(tmp_path, is_packed=name.endswith("gz"))
    path = path.rename(tmp_path / name)
    assert flight_recorder.read(path).rank == rank
    assert flight_recorder.find(tmp_path) == [path]


def test_a_name_that_contradicts_the_ops_is_not_believed(tmp_path: Path) -> None:
    """The number at the end may be anything; the rank that sent is in the ops."""
    ring = Ring(2, {"0": range(4)})
    ring.send(3)
    path = ring.write(tmp_path).rename(tmp_path / "rank2_attempt3")
    assert flight_recorder.read(path).rank == 2
    path = path.rename(tmp_path / "host1_dump_0")
    assert flight_recorder.read(path).rank == 2


def test_nobody_knows_whose_dump_it_is(tmp_path: Path) -> None:
    """Without a number in the name and without P2P there is no rank to be told."""
    ring = Ring(1, {"0": range(4)})
    ring.collective("barrier")
    path = ring.write(tmp_path).rename(tmp_path / "dump")
    with pytest.raises(InputError, match="whose dump it is"):
        flight_recorder.read(path)


def test_a_call_that_goes_on_is_in_call(tmp_path: Path) -> None:
    """Ops of a batch without its end: the host is inside the call."""
    ring = Ring(0, {"0": range(2)})
    ring.batch("send 1", "recv 1", ended=False)
    log = flight_recorder.read(ring.write(tmp_path))
    assert [r.in_call for r in log.records] == [True, True]
    assert all(r.flags & Flag.COALESCED for r in log.records)


def test_gloo_entries_are_complete_when_retired(tmp_path: Path) -> None:
    """gloo leaves the state at ``scheduled`` for ever."""
    ring = Ring(0, {"": [0]}, backend="gloo")
    ring.groups = {"0": [0]}
    ring.collective("all_reduce", done=False)
    ring.entries[0]["retired"] = True
    ring.groups = {"": [0]}
    log = flight_recorder.read(ring.write(tmp_path))
    assert log.records[0].done_ns


def test_where_an_op_was_issued_is_kept(tmp_path: Path) -> None:
    """The innermost frame outside of torch."""
    ring = Ring(0, {"0": range(2)})
    frames = [("isend", "/x/torch/distributed/distributed_c10d.py", 1),
              ("train", "/home/me/job/train.py", 31)]  # fmt: skip
    ring.send(1, frames=frames, done=False)
    log = flight_recorder.read(ring.write(tmp_path))
    assert log.records[0].text == "at job/train.py:31 in train"


def test_what_torch_itself_dumps_can_be_read(tmp_path: Path) -> None:
    """A real dump of this torch, of collectives on gloo, in both layouts."""
    import subprocess
    import sys

    code = (
        "import torch.distributed as d, torch, pathlib, sys\n"
        "from torch._C._distributed_c10d import _dump_fr_trace as p\n"
        "from torch._C._distributed_c10d import _dump_fr_trace_json as j\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "d.all_reduce(torch.ones(3)); d.barrier()\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "(out / 'a_rank_0').write_bytes(p())\n"
        "text = j()\n"
        "text = text if isinstance(text, bytes) else text.encode()\n"
        "(out / 'b_rank_0.json').write_bytes(text)\n"
        "import os; os._exit(0)\n"  # gloo's threads may abort an ordinary exit
    )
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment, check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    logs = [flight_recorder.read(path) for path in flight_recorder.find(tmp_path)]
    assert len(logs) == 2
    for log in logs:
        names = [r.text for r in log.records]
        assert names == ["all_reduce", "barrier"]
        assert all(r.done_ns for r in log.records)


# -- health ------------------------------------------------------------------------


def _pair(first: Sequence[str], second: Sequence[str], count: int = 6) -> list[Ring]:
    rings = _rings(2)
    for _ in range(count):
        rings[0].batch(*first)
        rings[1].batch(*second)
    return rings


def _chain(*, is_batched: bool, count: int = 5) -> list[Ring]:
    """Activations down a chain of 4 ranks."""
    rings = _rings(4)
    for ring in rings:
        for _ in range(count):
            for verb, peer in (("recv", ring.rank - 1), ("send", ring.rank + 1)):
                if not 0 <= peer < 4:
                    continue
                if is_batched:
                    ring.batch(f"{verb} {peer}")
                else:
                    getattr(ring, verb)(peer)
    return rings


def _one_way(verb: str, *, is_batched: bool) -> list[Ring]:
    """Forwards or backwards only, between two ranks."""
    other = "recv" if verb == "send" else "send"
    rings = _rings(2)
    for _ in range(6):
        for ring, word, peer in ((rings[0], verb, 1), (rings[1], other, 0)):
            if is_batched:
                ring.batch(f"{word} {peer}")
            else:
                getattr(ring, word)(peer)
    return rings


def _wrapped(start: int, *, capacity: int = 40) -> list[Ring]:
    """A steady pair whose rings begin at different places, also within a batch."""
    rings = _rings(2, capacity=capacity)
    rings[1].skip(start)
    for number in range(50):
        shape = (4, 8) if number % 2 else (2, 8)
        rings[0].batch("send 1", "recv 1", shape=shape)
        rings[1].batch("recv 0", "send 0", shape=shape)
        if number % 7 == 3:
            for ring in rings:
                ring.collective("all_reduce")
    return rings


_HEALTHY: Mapping[str, Callable[[], list[Ring]]] = {
    "send, recv with send, recv": lambda: _pair(("send 1", "recv 1"), ("send 0", "recv 0")),
    "recv, send with recv, send": lambda: _pair(("recv 1", "send 1"), ("recv 0", "send 0")),
    "send, recv with recv, send": lambda: _pair(("send 1", "recv 1"), ("recv 0", "send 0")),
    "recv, send with send, recv": lambda: _pair(("recv 1", "send 1"), ("send 0", "recv 0")),
    "forward, single": lambda: _one_way("send", is_batched=False),
    "forward, batched": lambda: _one_way("send", is_batched=True),
    "backward, single": lambda: _one_way("recv", is_batched=False),
    "backward, batched": lambda: _one_way("recv", is_batched=True),
    "chain of single ops": lambda: _chain(is_batched=False),
    "chain of batches": lambda: _chain(is_batched=True),
    "wrapped": lambda: _wrapped(0),
    "wrapped, other starts": lambda: _wrapped(13),
    "wrapped within a batch": lambda: _wrapped(1, capacity=41),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["pickle", "json"])
@pytest.mark.parametrize("name", _HEALTHY)
def test_health_gives_no_finding(tmp_path: Path, name: str, layout: str) -> None:
    """Steady exchanges in every shape; torch's analyser condemns most of them."""
    _write(_HEALTHY[name](), tmp_path, layout=layout)
    report = _report(tmp_path)
    assert report.findings == ()
    assert report.exit_code == 0


@pytest.mark.parametrize("capacity", [12, 31, 64, 2000])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 4), (8, 16)])
def test_a_healthy_1f1b_gives_no_finding(
    tmp_path: Path, ranks: int, microbatches: int, capacity: int
) -> None:
    """Whatever is left of it in the rings."""
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    run = one_f_one_b(boxes, ranks=ranks, microbatches=microbatches, steps=3)
    logs = run.finish()
    folder = tmp_path / "dumps"
    folder.mkdir()
    at_ns = max(log.to_wall_ns(log.progress_ns) for log in logs.values())
    write_dumps(logs, folder, at_ns=at_ns + 900 * SECOND, capacity=capacity)
    assert _report(folder).findings == ()


@pytest.mark.parametrize("seed", range(30))
def test_dumps_of_a_moving_job_give_no_finding(tmp_path: Path, seed: int) -> None:
    """Dumps made on demand, each a little later than the last, rings wrapped or not."""
    chance = random.Random(seed)
    world = chance.choice([2, 3, 4])
    capacity = chance.choice([16, 30, 2000])
    step_ns = SECOND // 20
    rings = _rings(world, capacity=capacity, step_ns=step_ns)
    end_ns = START_NS + 60 * SECOND
    cuts = [end_ns + chance.randrange(SECOND) for _ in rings]
    at_ns = START_NS
    number = 0
    while at_ns < max(cuts):
        at_ns += 80_000_000
        number += 1
        size = (1 + number % 3, 4)
        for one, two in itertools.pairwise(rings):
            for ring, ops in ((one, ("send", two)), (two, ("recv", one))):
                if at_ns > cuts[ring.rank]:
                    continue
                done_ns = at_ns + 60_000_000
                done = done_ns <= cuts[ring.rank]
                getattr(ring, ops[0])(
                    ops[1].rank, at_ns=at_ns, done_ns=done_ns, done=done, shape=size
                )
    for ring, cut in zip(rings, cuts, strict=True):
        ring.write(tmp_path, at_ns=cut)
    assert _report(tmp_path).findings == ()


# -- hangs -------------------------------------------------------------------------

_SHOWN = {
    "a1_split": ("PPT001", {0}),
    "a5": ("PPT011", {1}),
    "a6": ("PPT010", {1}),
    "b3": ("PPT012", {0, 1}),
    "c1": ("PPT012", {0, 1}),
    "c3": ("PPT012", {0, 1}),
    "d2": ("PPT021", {3}),
    "e1": ("PPT030", {1}),
    "e2": ("PPT011", {1}),
    "e3": ("PPT030", {1}),
    "e4": ("PPT010", {1}),
    "f1_dtype": ("PPT041", {0}),
    "f1_long": ("PPT040", {0}),
    "f1_short": ("PPT040", {0}),
    "f2": ("PPT040", {0}),
    "f3": ("PPT040", {0}),
    "g5": ("PPT011", {0}),
    "h2": ("PPT011", {0}),
    "i1": ("PPT030", {1}),
    "i2": ("PPT032", {0, 1}),
}
"""What dumps show of the known hangs, once the communicators are set up. Where the
black boxes say more (a straggler, a skipped op), the culprit is the same."""


def _dumps_of(
    name: str, folder: Path, *, is_set_up: bool = True, **options: Any
) -> Report:
    program = load(_CASES / f"{name}.pp")
    run = dry_run(
        program.plan(), host=Host.ASYNC, preconnected=is_set_up or program.preconnected
    )
    write_dumps(run.logs, folder, at_ns=run.now_wall_ns, **options)
    return _report(folder)


@pytest.mark.parametrize("layout", ["pickle", "json"])
@pytest.mark.parametrize("name", _SHOWN)
def test_known_hangs_are_seen_in_dumps(tmp_path: Path, name: str, layout: str) -> None:
    """The verdict names the same culprit as that of the black boxes."""
    report = _dumps_of(name, tmp_path, layout=layout)
    code, culprits = _SHOWN[name]
    assert report.verdict is not None
    assert (report.verdict.code, set(report.verdict.culprits)) == (code, culprits)
    assert report.exit_code == 1


@pytest.mark.parametrize("layout", ["pickle", "json"])
def test_a_batch_that_cannot_start_is_seen(tmp_path: Path, layout: str) -> None:
    """A1 under the old rule: both calls go on, so neither batch has its end.

    JSON has no stacks, so r1's receive alone could be single; then r0 would have come.
    """
    report = _dumps_of("a1_coalesced", tmp_path, is_set_up=False, layout=layout)
    assert report.verdict is not None
    assert report.verdict.code == "PPT002"


@pytest.mark.parametrize("name", ["a1_split", "a2", "a4", "e3"])
def test_what_dumps_cannot_show_is_said(tmp_path: Path, name: str) -> None:
    """A host inside communicator set-up leaves no entry: no verdict, but a word."""
    report = _dumps_of(name, tmp_path, is_set_up=False)
    assert report.findings == ()
    assert any("no entry" in line and "sets up" in line for line in report.problems)


@pytest.mark.parametrize("name", ["g1", "g4", "g3", "h3"])
def test_the_rank_that_raised_has_no_dump(tmp_path: Path, name: str) -> None:
    """What waits for it is undetermined; the missing dump is named, not demanded."""
    report = _dumps_of(name, tmp_path)
    assert report.verdict is not None
    assert report.verdict.code == "PPT071"
    missing = {"g1": 1, "g4": 1, "g3": 2, "h3": 0}[name]
    assert f"r{missing}" in report.verdict.sentence
    assert any(f"of rank {missing}" in line for line in report.problems)


def _j1(world: int = 3) -> list[Ring]:
    """r0→r1 done, r1 waits for a second send, r2 waits for r1."""
    rings = _rings(world)
    rings[0].send(1)
    rings[1].recv(0)
    rings[1].recv(0, done=False)
    rings[2].recv(1, done=False)
    return rings


@pytest.mark.parametrize("layout", ["pickle", "json"])
def test_j1_the_owed_send_is_named(tmp_path: Path, layout: str) -> None:
    """torch's analyser blames r2 and a completed send; r0 owes the second send."""
    _write(_j1(), tmp_path, layout=layout)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT011", (0,))
    assert verdict.victims == (1, 2)
    assert "r0 has not posted isend x→r1" in verdict.sentence


def _hung_pair(shift: int, capacity: int, *, is_batched: bool) -> list[Ring]:
    """A long exchange; in the end r1 waits for one send more."""
    rings = _rings(2, capacity=capacity)
    rings[1].skip(shift)
    for _ in range(200):
        for ring, verb, peer in ((rings[0], "send", 1), (rings[1], "recv", 0)):
            if is_batched:
                ring.batch(f"{verb} {peer}")
            else:
                getattr(ring, verb)(peer)
    rings[1].recv(0, done=False)
    return rings


@pytest.mark.parametrize("capacity", [9, 50, 51])
@pytest.mark.parametrize("shift", [0, 17])
def test_j2_what_a_wrapped_ring_still_proves(
    tmp_path: Path, shift: int, capacity: int
) -> None:
    """The last complete op is the same on both sides, so what follows is owed."""
    _write(_hung_pair(shift, capacity, is_batched=False), tmp_path)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT011", (0,))


def _held_batch(gap_ns: int) -> list[Ring]:
    """r0's last batch is held by its receive; whether its send went, only times say."""
    rings = _rings(2, capacity=30, step_ns=10_000_000)
    at_ns = START_NS
    for _ in range(40):
        at_ns += gap_ns
        rings[0].batch("send 1", at_ns=at_ns, done_ns=at_ns + 1_000_000)
        rings[1].batch("recv 0", at_ns=at_ns, done_ns=at_ns + 1_000_000)
    at_ns += gap_ns
    rings[0].batch("send 1", "recv 1", at_ns=at_ns, done=False)
    return rings


def test_j2_what_a_wrapped_ring_does_not_prove_is_undetermined(tmp_path: Path) -> None:
    """Steps shorter than clocks differ: r1's last receive may belong to either send."""
    _write(_held_batch(gap_ns=1_000_000), tmp_path)
    report = _report(tmp_path)
    assert report.verdict is not None
    assert report.verdict.code == "PPT071"
    assert report.verdict.culprits == ()


def test_j2_times_decide_where_they_can(tmp_path: Path) -> None:
    """r1's last receive was complete long before r0 posted the batch."""
    _write(_held_batch(gap_ns=5 * SECOND), tmp_path)
    report = _report(tmp_path)
    assert report.verdict is not None
    assert report.verdict.code in {"PPT010", "PPT011"}
    assert report.verdict.culprits == (1,)


def test_a_group_that_began_within_the_ring_is_known_whole(tmp_path: Path) -> None:
    """Others have pushed older entries out; of this group nothing is lost."""
    rings = [Ring(r, {"0": range(2), "pp": range(2)}, capacity=30) for r in range(2)]
    for ring in rings:
        for _ in range(40):
            ring.collective("all_reduce")
    rings[0].batch("send 1", group="pp")
    rings[1].batch("recv 0", group="pp")
    rings[0].batch("send 1", "recv 1", group="pp", done=False)
    _write(rings, tmp_path)
    logs = flight_recorder.read_folder(tmp_path)
    assert not any(state.uncertain for log in logs.values() for state in log.channels)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert verdict.culprits == (1,)


def test_rings_that_begin_elsewhere_are_not_compared_by_record(tmp_path: Path) -> None:
    """Record ids differ from rank to rank; sizes show when a shift would be wrong."""
    rings = _wrapped(13)
    rings[0].batch("send 1", "recv 1", done=False)
    _write(rings, tmp_path)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert verdict.code != "PPT040"
    assert verdict.culprits in {(1,), ()}


def test_ops_that_met_although_issued_differently_mean_an_eager_group(
    tmp_path: Path,
) -> None:
    """Batched sends and single receives are complete: all ride one communicator."""
    rings = _rings(2)
    for _ in range(5):
        rings[0].batch("send 1")
        rings[1].recv(0)
    rings[1].recv(0, done=False)
    _write(rings, tmp_path)
    logs = flight_recorder.read_folder(tmp_path)
    assert all(g.eager for log in logs.values() for g in log.groups.values())
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT011", (0,))


def test_an_older_dump_does_not_make_a_group_eager(tmp_path: Path) -> None:
    """What the later dump shows complete was simply not posted in the earlier one."""
    rings = _rings(2)
    for number in range(5):
        rings[0].batch("send 1")
        rings[1].batch("recv 0")
        rings[1].recv(0)
        if number < 4:
            rings[0].send(1)
    rings[1].batch("recv 0")
    _write(rings, tmp_path)
    logs = flight_recorder.read_folder(tmp_path)
    assert not any(g.eager for log in logs.values() for g in log.groups.values())


def test_a_receive_of_another_size_is_found(tmp_path: Path) -> None:
    """Nothing hangs, and torch's analyser is content: float32 into bfloat16."""
    rings = _rings(2)
    rings[0].send(1, dtype="Float")
    rings[1].recv(0, dtype="BFloat16")
    _write(rings, tmp_path)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert verdict.code == "PPT041"


def _start(world: int) -> list[Ring]:
    """Ranks whose watchdogs have retired an all_reduce of another group."""
    rings = [Ring(r, {"0": range(world), "pp": range(world)}) for r in range(world)]
    for ring in rings:
        ring.collective("all_reduce")
    return rings


@pytest.mark.parametrize("layout", ["pickle", "json"])
def test_a_call_that_goes_on_looks_complete_and_is_not(
    tmp_path: Path, layout: str
) -> None:
    """While the host is in the call, torch's event of it counts as complete.

    1F1B under the old rule, n = 1: both batches are inside their first use of an edge.
    """
    rings = _start(2)
    lie = {"group": "pp", "done_ns": START_NS + 600 * SECOND, "is_retired": False}
    rings[0].batch("send 1", "recv 1", is_enqueued=False, **lie)
    rings[1].batch("recv 0", is_enqueued=False, **lie)
    _write(rings, tmp_path, layout=layout, at_ns=START_NS + 601 * SECOND)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT002", (0,))


def test_what_an_abort_completed_is_not_complete(tmp_path: Path) -> None:
    """Seen complete after its time-out: that is the watchdog's doing."""
    rings = _j1()
    late = START_NS + 601 * SECOND
    for ring in rings[1:]:
        ring.entries[-1] |= {"state": "completed", "time_discovered_completed_ns": late}
    _write(rings, tmp_path, at_ns=late + SECOND)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert (verdict.code, verdict.culprits) == ("PPT011", (0,))


@pytest.mark.parametrize("is_batched", [True, False])
def test_what_both_sides_saw_complete_is_complete(
    tmp_path: Path, is_batched: bool
) -> None:
    """An op that waited for long and ended just before its dump: nothing is wrong."""
    rings = _start(2)
    late = {"done_ns": START_NS + 9 * SECOND, "is_retired": False}
    for ring, verb, peer in ((rings[0], "send", 1), (rings[1], "recv", 0)):
        kind = late if ring.rank else {"done_ns": START_NS + 9 * SECOND}
        if is_batched:
            ring.batch(f"{verb} {peer}", **kind)
        else:
            getattr(ring, verb)(peer, **kind)
        ring.entries[-1] |= {"time_created_ns": START_NS}
    _write(rings, tmp_path, at_ns=START_NS + 20 * SECOND)
    assert _report(tmp_path).findings == ()


@pytest.mark.parametrize("capacity", [20, 2000])
@pytest.mark.parametrize("missing", [None, 1, 2])
def test_numbers_of_collectives_that_count_batches_are_not_compared(
    tmp_path: Path, capacity: int, missing: int | None
) -> None:
    """In older torch a batch counts up the number of collectives as well.

    The middle rank has more batches than the others, so its numbers run ahead.
    """
    rings = _rings(3, is_mixed=True, capacity=capacity)
    for number in range(15):
        for one, two in itertools.pairwise(rings):
            one.batch(f"send {two.rank}")
            two.batch(f"recv {one.rank}")
        for ring in rings:
            if missing is None or number < 14:
                ring.collective("all_reduce")
            elif ring.rank != missing:
                ring.collective("all_reduce", done=False)
    _write(rings, tmp_path)
    verdict = _report(tmp_path).verdict
    if missing is None:
        assert verdict is None
    else:
        assert verdict is not None
        assert (verdict.code, verdict.culprits) == ("PPT031", (missing,))


def test_a_copied_dump_is_not_of_today(tmp_path: Path) -> None:
    """A file's time of months later says nothing; the time-out in the dump does."""
    _write(_j1(), tmp_path, at_ns=START_NS + 100 * 24 * 3600 * SECOND)
    view = next(r for r in _report(tmp_path).ranks if r.rank == 1)
    assert view.since_s == pytest.approx(600, abs=1)


# -- beside black boxes ------------------------------------------------------------


def _run(folder: Path) -> tuple[dict[int, RankLog], Path]:
    boxes, dumps = folder / "boxes", folder / "dumps"
    boxes.mkdir()
    dumps.mkdir()
    logs = one_f_one_b(boxes, ranks=4, microbatches=2).finish(idle_ns=60 * SECOND)
    at_ns = max(log.heartbeat_wall_ns for log in logs.values())
    write_dumps(logs, dumps, at_ns=at_ns)
    return logs, dumps


def test_dumps_stand_in_for_missing_black_boxes(tmp_path: Path) -> None:
    """Half of the ranks left black boxes, the other half dumps: one verdict."""
    logs, dumps = _run(tmp_path)
    whole = diagnose(logs).verdict
    for rank in (0, 2):
        (tmp_path / "boxes" / f"rank{rank:05d}.pptrace").unlink()
    run = runs.load_run(tmp_path / "boxes", dumps=[dumps])
    assert sorted(run.logs) == [0, 1, 2, 3]
    mixed = diagnose(run.logs, now_wall_ns=run.now_wall_ns).verdict
    assert whole is not None
    assert mixed is not None
    assert (mixed.code, mixed.culprits) == (whole.code, whole.culprits)


@pytest.mark.parametrize("is_newest", [False, True])
def test_dumps_beside_black_boxes_are_found(tmp_path: Path, is_newest: bool) -> None:
    """In the run's folder, given itself or as the newest of the output directory."""
    _, dumps = _run(tmp_path)
    boxes = tmp_path / "boxes"
    for path in dumps.iterdir():
        path.rename(boxes / path.name)
    (boxes / "rank00001.pptrace").unlink()
    (boxes / "job.pftrace.gz").write_bytes(gzip.compress(b"trace"))
    run = runs.load_run(tmp_path if is_newest else boxes)
    assert sorted(run.logs) == [0, 1, 2, 3]
    assert [
        r for r, log in run.logs.items() if "flight_recorder" in log.environment
    ] == [1]
    alone = runs.load_run(boxes / "rank00000.pptrace")
    assert sorted(alone.logs) == [0]


def test_the_device_knows_better_what_is_complete(tmp_path: Path) -> None:
    """An op that the host never came to ask about is complete if its dump says so."""
    logs, dumps = _run(tmp_path)
    box = logs[0]
    done = [r for r in box.records if r.kind is Kind.OP and r.done_ns]
    unseen = [
        dataclasses.replace(r, done_ns=0) if r in done else r for r in box.records
    ]
    blind = dataclasses.replace(box, records=unseen)
    dump = flight_recorder.read_folder(dumps)[0]
    refined = flight_recorder.refine(blind, dump)
    assert [bool(r.done_ns) for r in refined.records] == [
        bool(r.done_ns) for r in box.records
    ]
    for record, original in zip(refined.records, box.records, strict=True):
        assert record.done_ns == pytest.approx(original.done_ns, abs=1000)
        assert record.label == original.label


def test_ops_the_dump_lacks_stay_as_they_are(tmp_path: Path) -> None:
    """The call of the last op has not returned, so torch has no entry of it."""
    logs, dumps = _run(tmp_path)
    box = logs[1]
    dump = flight_recorder.read_folder(dumps)[1]
    dump.records = [r for r in dump.records if r.done_ns]
    refined = flight_recorder.refine(box, dump)
    assert [r.done_ns for r in refined.records] == [r.done_ns for r in box.records]


def test_refine_refuses_another_ranks_dump(tmp_path: Path) -> None:
    """The mistake is named."""
    logs, dumps = _run(tmp_path)
    with pytest.raises(ValueError, match="r0, dump of r1"):
        flight_recorder.refine(logs[0], flight_recorder.read_folder(dumps)[1])


def test_settling_twice_changes_nothing(tmp_path: Path) -> None:
    """What is settled among dumps is settled again beside black boxes."""
    _write(_hung_pair(17, 50, is_batched=False), tmp_path)
    logs = flight_recorder.read_folder(tmp_path)
    before = [
        (r.k, c) for log in logs.values() for r in log.records for c in log.channels
    ]
    alignment.settle(logs)
    after = [
        (r.k, c) for log in logs.values() for r in log.records for c in log.channels
    ]
    assert before == after


# -- hostile and damaged input ------------------------------------------------------


class _Bomb:
    """Runs a command when an ordinary loader reads it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("place", ["top", "entries", "field", "frames"])
def test_nothing_in_a_pickle_runs(tmp_path: Path, protocol: int, place: str) -> None:
    """The command is refused by name, wherever it hides, and does not run."""
    ring = Ring(0, {"0": range(2)})
    ring.send(1)
    value = ring.value()
    target = tmp_path / "ran"
    bomb = _Bomb(f"touch {target}")
    if place == "top":
        value["bomb"] = bomb
    elif place == "entries":
        value["entries"].append(bomb)
    elif place == "field":
        value["entries"][0]["state"] = bomb
    else:
        value["entries"][0]["frames"] = [bomb]
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(value, protocol))
    with pytest.raises(InputError, match=r"posix\.system: refused"):
        flight_recorder.read(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # an ordinary loader does run it
    assert target.exists()


_HOSTILE = {
    "global, protocol 0": b"\x80\x02cos\nsystem\n(S'true'\ntR.",
    "inst": b"\x80\x02(S'true'\nios\nsystem\n.",
    "instance": b"\x80\x02(c__builtin__\neval\nX\x01\x00\x00\x001o.",
    "newobj": b"\x80\x02cbuiltins\nlist\n)\x81.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "build": b"\x80\x02}}b.",
    "memo far away": b"\x80\x02}r\xff\xff\xff\x7f.",
    "long number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "long string": b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "marks": b"\x80\x02" + b"(" * 5000 + b".",
    "no end": b"\x80\x02}",
    "empty stack": b"\x80\x020.",
    "lists": b"\x80\x02" + b"]" * 100_000 + b".",
    "dictionaries": b"\x80\x02" + b"}0" * 100_000 + b".",
    "unhashable key": b"\x80\x02}]Ns.",
    "text number": b"\x80\x02I" + b"9" * 5000 + b"\n.",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_pickles_are_refused(name: str) -> None:
    """At once, with a reason, and without the memory they ask for."""
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(pickles.PickleError):
            pickles.loads(_HOSTILE[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - began < 1
    assert peak < 32 << 20


def _shared_frames() -> bytes:
    """A small pickle whose entries all refer to one long stack."""
    frames = [
        {"name": "f" * 1000, "filename": "g" * 1000, "line": n} for n in range(100)
    ]
    ring = Ring(0, {"0": range(2)})
    ring.send(1)
    entry = ring.value()["entries"][0] | {"frames": frames}
    value = ring.value() | {"entries": [dict(entry) for _ in range(3000)]}
    return pickle.dumps(value, 2)


def _same_entry() -> bytes:
    """One entry, named a hundred thousand times."""
    ring = Ring(0, {"0": range(2)})
    ring.send(1)
    value = ring.value()
    value["entries"] *= 100_000
    return pickle.dumps(value, 2)


@pytest.mark.parametrize("make", [_shared_frames, _same_entry])
def test_references_do_not_multiply(tmp_path: Path, make: Callable[[], bytes]) -> None:
    """What a pickle says once and refers to often is kept once."""
    path = tmp_path / "rank_0"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        flight_recorder.read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * path.stat().st_size + (32 << 20)


def test_a_packed_bomb_is_refused(tmp_path: Path) -> None:
    """A few kilobytes that unpack to gigabytes are not unpacked."""
    path = tmp_path / "rank_0.gz"
    path.write_bytes(gzip.compress(b"{" + b" " * (200 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="unpacks to more"):
            flight_recorder.read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * path.stat().st_size + (32 << 20)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"hello", "is not a Flight Recorder dump"),
        (b"{}", "is not a Flight Recorder dump"),
        (b'{"entries": 3}', "is not a Flight Recorder dump"),
        (b'{"entries": [', "is damaged"),
        (b'{"entries": ' + b"[" * 5000, "is damaged"),
        (b'{"entries":[' + b"[]," * 100_000 + b"[]]}", "is damaged"),
        (b"\x1f\x8bxx", "is damaged"),
        (gzip.compress(mtime=0, data=b'{"entries": []}')[:-9], "is cut off"),
        (b"\x80\x02}q\x00.", "is not a Flight Recorder dump"),
    ],
)
def test_what_is_no_dump_is_one_line(tmp_path: Path, data: bytes, reason: str) -> None:
    """The file, the reason; never a traceback of the decoder."""
    path = tmp_path / "rank_0"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        flight_recorder.read(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


def _mutations(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    mutated = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8, 40])):
        at = chance.randrange(len(mutated))
        how = chance.randrange(4)
        if how == 0:
            mutated[at] = chance.randrange(256)
        elif how == 1:
            del mutated[at : at + chance.randrange(1, 20)]
        elif how == 2:
            mutated[at:at] = mutated[: chance.randrange(1, 40)]
        else:
            mutated[at : at + 8] = chance.choice([b"\xff" * 8, b"\0" * 8, b"}]()Nu.e"])
        if not mutated:
            break
    return bytes(mutated)


@pytest.mark.parametrize("layout", ["pickle", "json"])
def test_damaged_dumps_never_break_the_report(tmp_path: Path, layout: str) -> None:
    """Each is read or refused in one line; what was read can be diagnosed."""
    healthy = tmp_path / "healthy"
    healthy.mkdir()
    rings = _j1()
    _write(rings, healthy, layout=layout)
    logs = flight_recorder.read_folder(healthy)
    original = (healthy / "nccl_trace_rank_1").read_bytes()
    path = tmp_path / "rank_1"
    usable = 0
    for seed in range(400):
        path.write_bytes(_mutations(original, seed))
        try:
            log = flight_recorder.read(path)
        except InputError:
            continue
        usable += 1
        mixed = {**logs, log.rank: log}
        alignment.settle(mixed)
        diagnose(mixed).to_json()
    assert usable > 20


# -- what users run ----------------------------------------------------------------


def test_a_folder_of_dumps_alone_is_a_run(tmp_path: Path) -> None:
    """No black box is needed, and files that are no dumps are passed over."""
    _write(_j1(), tmp_path)
    (tmp_path / "train.log").write_text("hello")
    (tmp_path / "nccl_trace_rank_9").write_bytes(b"\x80\x02}X\x07\0\0\0entriesq\0")
    run = runs.load_run(tmp_path)
    assert sorted(run.logs) == [0, 1, 2]
    assert any("nccl_trace_rank_9: is cut off" in line for line in run.problems)
    assert any("Flight Recorder" in line for line in run.problems)


def test_one_dump_alone_is_a_run(tmp_path: Path) -> None:
    """Its file is the argument."""
    _write(_j1(), tmp_path)
    run = runs.load_run(tmp_path / "nccl_trace_rank_1")
    assert sorted(run.logs) == [1]


def test_the_newest_dump_of_a_rank_counts(tmp_path: Path) -> None:
    """A dump of an earlier time-out beside it is named and left out."""
    _write(_j1(), tmp_path)
    old = Ring(0, {"0": range(3)}, start_ns=START_NS - 3600 * SECOND)
    old.send(1, done=False)
    old.write(tmp_path, prefix="old_rank_")
    run = runs.load_run(tmp_path)
    assert any(
        "several dumps" in line and "old_rank_0" in line for line in run.problems
    )
    assert run.logs[0].records[0].done_ns


def test_json_and_pickle_of_one_job_mix(tmp_path: Path) -> None:
    """Each rank may have dumped in its own way."""
    rings = _j1()
    for ring, layout in zip(rings, ("json", "pickle", "json"), strict=True):
        ring.write(tmp_path, layout=layout, is_packed=ring.rank == 2)
    verdict = _report(tmp_path).verdict
    assert verdict is not None
    assert verdict.culprits == (0,)


def test_a_large_dump_is_read_quickly(tmp_path: Path) -> None:
    """20,000 entries in a few seconds, on one core."""
    ring = Ring(0, {"0": range(2)}, capacity=20_000)
    frames = [(f"function_{n}", f"/job/file_{n}.py", n) for n in range(20)]
    for _ in range(5_000):
        ring.entries.clear()
        break
    for _ in range(100):
        ring.batch("send 1", "recv 1", frames=frames)
    ring.entries = [dict(e, record_id=i) for i, e in enumerate(ring.entries * 66)]
    path = ring.write(tmp_path)
    began = time.process_time()
    log = flight_recorder.read(path)
    assert len(log.records) > 10_000
    assert time.process_time() - began < 10


def test_the_json_of_a_report_can_be_made(tmp_path: Path) -> None:
    """Nothing in the records keeps the report from being written."""
    _write(_j1(), tmp_path)
    value = json.loads(_report(tmp_path).to_json())
    assert value["exit_code"] == 1
    assert value["environment"]["Flight Recorder"] == "2.4"
