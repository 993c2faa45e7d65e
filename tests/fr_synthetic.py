"""Made-up Flight Recorder dumps, in the layout that torch writes.

Two ways: `Ring` takes the calls of one rank one after another, as torch's recorder
would; `write_dumps` turns the black boxes of a run into the dumps its ranks would have
left. What torch leaves out is left out: an op whose call still sets up its communicator
is not there, ops of a batch have no state of their own, a rank that raised has no dump.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pptrace.records import Direction, Flag, Kind, RankLog, Record, Status, Transport

__all__ = ["SECOND", "START_NS", "Ring", "write_dumps"]

SECOND = 1_000_000_000
START_NS = 1_750_000_000 * SECOND
_DTYPES = {"float32": "Float", "bfloat16": "BFloat16", "float16": "Half",
           "int64": "Long", "int32": "Int", "uint8": "Byte"}  # fmt: skip


@dataclass
class Ring:
    """The recorder of one rank.

    Args:
        rank: the global rank.
        groups: global ranks of each process group, by name.
        capacity: entries kept.
        start_ns: wall time of the first call.
        step_ns: from one call to the next, and from a call to its completion.
    """

    rank: int
    groups: Mapping[str, Sequence[int]]
    capacity: int = 2000
    start_ns: int = START_NS
    step_ns: int = SECOND // 1000
    backend: str = "nccl"
    is_mixed: bool = False
    """Whether a batch counts up the number of collectives, too, as in older torch."""
    timeout_ms: int = 600_000
    entries: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0
    _seqs: dict[str, dict[str, int]] = field(default_factory=dict)
    _enqueued: dict[str, int] = field(default_factory=dict)

    def send(self, peer: int, **kw: Any) -> None:
        """A single isend to a global rank."""
        self._single(f"send {peer}", **kw)

    def recv(self, peer: int, **kw: Any) -> None:
        """A single irecv from a global rank."""
        self._single(f"recv {peer}", **kw)

    def batch(
        self, *ops: str, done: bool = True, ended: bool = True, **kw: Any
    ) -> None:
        """A coalesced batch of ``send PEER`` and ``recv PEER``.

        ``ended`` False leaves out its end: the host is still inside the call.
        ``payloads`` are shape and dtype of each op, if they differ.
        """
        payloads = kw.pop("payloads", [{}] * len(ops))
        group = kw.pop("group", "0")
        seqs = self._next(group, p2p=True)
        seqs["collective"] += self.is_mixed
        created = kw.pop("at_ns", None) or self._now()
        for op, payload in zip(ops, payloads, strict=True):
            seqs["op"] += 1
            name = self._p2p_name(group, op)
            self._add(group, name, created, False, **kw | payload)
        if ended:
            kw |= {"shape": None}
            self._add(group, "coalesced", created, done, is_p2p=True, **kw)

    def collective(
        self, name: str, *, done: bool = True, group: str = "0", **kw: Any
    ) -> None:
        """A collective of a group."""
        seqs = self._next(group, p2p=False)
        seqs["op"] += 1
        self._add(
            group, name, kw.pop("at_ns", None) or self._now(), done, is_p2p=False, **kw
        )

    def skip(self, count: int) -> None:
        """Entries of other groups that only push older ones out of the ring."""
        self.count += count
        self._trim()

    def value(self, version: str = "2.4", *, is_json: bool = False) -> dict[str, Any]:
        """The dump as torch would write it."""
        minor = int(version.split(".")[1])
        library = "comm_lib_version" if minor >= 10 else "nccl_version"
        status = {
            str(zlib.crc32(name.encode()) % 1000): {
                "last_enqueued_collective": self._enqueued.get(name, -1),
                "last_started_collective": -1,
                "last_completed_collective": self._enqueued.get(name, -1),
            }
            for name in self._seqs
        }
        if is_json:
            status = {n: {k: str(v) for k, v in s.items()} for n, s in status.items()}
        entries = [self._entry(e, minor, is_json=is_json) for e in self.entries]
        value: dict[str, Any] = {
            "version": version,
            library: "2.21.5",
            "pg_config": {
                name: {
                    "name": name,
                    "desc": self._desc(name),
                    "ranks": str(list(ranks)),
                }
                for name, ranks in self.groups.items()
            },
            "pg_status": status,
            "entries": entries,
        }
        if is_json:
            value["nccl_comm_state"] = {}
        return value

    def write(
        self,
        folder: Path,
        *,
        version: str = "2.4",
        layout: str = "pickle",
        prefix: str = "nccl_trace_rank_",
        is_packed: bool = False,
        at_ns: int = 0,
    ) -> Path:
        """Write the dump, as of ``at_ns``; by default a time-out after the last call."""
        value = self.value(version, is_json=layout == "json")
        if layout == "json":
            data = json.dumps(value, separators=(",", ":")).encode()
        else:
            data = pickle.dumps(value, protocol=2)
        path = folder / f"{prefix}{self.rank}{'.gz' if is_packed else ''}"
        path.write_bytes(gzip.compress(data) if is_packed else data)
        at_ns = at_ns or self._now() + self.timeout_ms * 1_000_000
        os.utime(path, ns=(at_ns, at_ns))
        return path

    # -- inside --------------------------------------------------------------------

    def _now(self) -> int:
        return self.start_ns + self.count * self.step_ns

    def _next(self, group: str, *, p2p: bool) -> dict[str, int]:
        seqs = self._seqs.setdefault(group, {"collective": 0, "p2p": 0, "op": 0})
        seqs["p2p" if p2p else "collective"] += 1
        return seqs

    def _single(
        self, op: str, *, done: bool = True, group: str = "0", **kw: Any
    ) -> None:
        seqs = self._next(group, p2p=True)
        seqs["op"] += 1
        created = kw.pop("at_ns", None) or self._now()
        self._add(group, self._p2p_name(group, op), created, done, **kw)

    def _p2p_name(self, group: str, op: str) -> str:
        verb, peer = op.split()
        ranks = list(self.groups[group])
        arrow = "->" if verb == "send" else "<-"
        return f"{verb} {ranks.index(self.rank)}{arrow}{ranks.index(int(peer))}"

    def _desc(self, group: str) -> str:
        return "default_pg" if group == "0" else group

    def _add(
        self,
        group: str,
        name: str,
        created_ns: int,
        done: bool,
        *,
        is_p2p: bool = True,
        shape: Sequence[int] | None = (4, 8),
        dtype: str = "Float",
        started: bool = False,
        done_ns: int = 0,
        is_retired: bool = True,
        is_enqueued: bool = True,
        frames: Sequence[tuple[str, str, int]] = (),
    ) -> None:
        seqs = self._seqs[group]
        if is_enqueued:
            self._enqueued[group] = seqs["p2p" if is_p2p else "collective"]
        sizes = [] if shape is None else [list(shape)]
        dtypes = [] if shape is None else [dtype]
        state = "completed" if done else "started" if started else "scheduled"
        is_part = is_p2p and name != "coalesced" and not done
        self.entries.append(
            {
                "record_id": self.count,
                "pg_id": zlib.crc32(group.encode()) % 1000,
                "process_group": (group, self._desc(group)),
                "collective_seq_id": seqs["collective"],
                "p2p_seq_id": seqs["p2p"],
                "op_id": seqs["op"],
                "profiling_name": f"{self.backend}:{name}",
                "time_created_ns": created_ns,
                "input_sizes": sizes,
                "input_dtypes": dtypes,
                "output_sizes": sizes,
                "output_dtypes": dtypes,
                "state": state,
                "time_discovered_started_ns": created_ns if started or done else None,
                "time_discovered_completed_ns": (
                    (done_ns or created_ns + self.step_ns) if done else None
                ),
                "retired": done and is_retired and not is_part,
                "timeout_ms": self.timeout_ms,
                "is_p2p": is_p2p,
                "frames": [
                    {"name": n, "filename": f, "line": line} for n, f, line in frames
                ],
            }
        )
        self.count += 1
        self._trim()

    def _trim(self) -> None:
        oldest = self.count - self.capacity
        self.entries = [e for e in self.entries if e["record_id"] >= oldest]

    def _entry(self, e: dict[str, Any], minor: int, *, is_json: bool) -> dict[str, Any]:
        entry = dict(e)
        if minor >= 10:
            entry |= {"thread_id": "139907144014720", "thread_name": "python"}
        if is_json:
            entry["process_group"] = list(e["process_group"])
            for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
                entry[key] = e[key] or 0
            del entry["frames"]
        return entry


# -- from black boxes --------------------------------------------------------------


def write_dumps(
    logs: Mapping[int, RankLog],
    folder: Path,
    *,
    at_ns: int,
    version: str = "2.10",
    layout: str = "pickle",
    capacity: int = 2000,
) -> list[Path]:
    """Write the dumps that the ranks of a run leave if all is dumped at ``at_ns``."""
    paths = []
    for rank, log in logs.items():
        if log.status is Status.RAISED or _was_killed(log):
            continue
        groups = {g.name: g.ranks for g in log.groups.values()}
        ring = Ring(rank, groups, capacity=capacity)
        _fill(ring, log, logs)
        paths.append(ring.write(folder, version=version, layout=layout, at_ns=at_ns))
    return paths


def _was_killed(log: RankLog) -> bool:
    return log.alive is False and log.status is not Status.EXITED


def _fill(ring: Ring, log: RankLog, logs: Mapping[int, RankLog]) -> None:
    batches: dict[int, list[Record]] = {}
    for record in log.records:
        if record.kind is Kind.OP and record.batch and record.flags & Flag.COALESCED:
            batches.setdefault(record.batch, []).append(record)
    for record in log.records:
        if record.group is None or _sets_up(record, logs):
            continue
        times = {"at_ns": log.to_wall_ns(record.posted_ns), "group": record.group.name}
        if record.done_ns:
            times["done_ns"] = log.to_wall_ns(record.done_ns)
        done = bool(record.done_ns)
        if record.kind is Kind.COLLECTIVE:
            ring.collective(record.text, done=done, **times)
        elif record.kind is Kind.OP and record.flags & Flag.COALESCED:
            ops = batches.get(record.batch, [])
            if ops and ops[0] is record:
                _add_batch(ring, ops, done, times)
        elif record.kind is Kind.OP:
            call = ring.send if record.direction is Direction.SEND else ring.recv
            call(
                record.peer,
                done=done,
                frames=_SINGLE + _CALLER,
                **times,
                **_payload(record),
            )


_SINGLE = [("isend", "/lib/torch/distributed/distributed_c10d.py", 2500)]
_BATCH = [("batch_isend_irecv", "/lib/torch/distributed/distributed_c10d.py", 2700)]
_CALLER = [
    ("_batch_p2p", "/lib/torch/distributed/pipelining/schedules.py", 700),
    ("train", "/job/train.py", 31),
]


def _add_batch(
    ring: Ring, ops: list[Record], done: bool, times: dict[str, Any]
) -> None:
    texts = [
        f"{'send' if r.direction is Direction.SEND else 'recv'} {r.peer}" for r in ops
    ]
    ring.batch(
        *texts,
        done=done,
        ended=ops[0].returned_ns != 0,
        frames=_BATCH + _CALLER,
        payloads=[_payload(r) for r in ops],
        **times,
    )


def _payload(record: Record) -> dict[str, Any]:
    shape = record.signature.shape or (record.numel,)
    return {"shape": shape, "dtype": _DTYPES.get(record.signature.dtype, "Float")}


def _sets_up(record: Record, logs: Mapping[int, RankLog]) -> bool:
    """Whether the record's call still sets up its communicator: no entry yet."""
    if record.returned_ns or record.group is None or record.group.eager:
        return False
    if record.kind is Kind.OP and record.transport is Transport.PAIR:
        return record.k == 0
    came = {
        rank
        for rank, other in logs.items()
        for r in other.records
        if r.group is not None
        and r.group.key == record.group.key
        and (r.kind is Kind.COLLECTIVE or r.transport is Transport.GROUP)
    }
    return came != set(record.group.ranks)
