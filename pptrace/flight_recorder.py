"""Flight Recorder dumps as records: what torch itself noted of each rank's ops.

A dump knows no stages, microbatches or waits, but it has what NCCL's device said: which
ops are complete. Ops of a batch are listed one by one without a state of their own;
their state is that of the ``coalesced`` entry behind them. Ranks in it are ranks of the
group and are translated. An op whose call is still setting up its communicator is not
in it at all.
"""

from __future__ import annotations

import bisect
import math
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pptrace.alignment import settle
from pptrace.errors import InputError
from pptrace.fr_layout import Dump, Entry, looks_like_dump, read_dump
from pptrace.records import (
    Channel,
    ChannelState,
    Direction,
    Flag,
    Group,
    Kind,
    RankLog,
    Record,
    Signature,
    Status,
    Transport,
)

__all__ = ["Dumps", "find", "is_dump", "read", "read_files", "read_folder", "refine"]

is_dump = looks_like_dump

_P2P = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
_COALESCED = "coalesced"
_DEPTH = 3
_MAX_FILES = 20_000
_COPIED_NS = 7 * 24 * 3600 * 10**9
"""A file written this long after its last entry was copied: its time says nothing."""
_USUAL_TIMEOUT_MS = 600_000
_LATE_NS = 5_000_000_000
"""The watchdog retires what is complete within a second."""
_CLOCK_NS = 500_000_000
"""What a host's wall clock may have drifted from its monotonic one since an op."""
_RUNS = "its kernel runs"
_BATCH_CALLS = frozenset({"batch_isend_irecv", "_coalescing_manager"})

_DTYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2), "Long": ("int64", 8), "Int": ("int32", 4),
    "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16), "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
}  # fmt: skip
"""Names and bytes of torch's dtypes, by the names of its C++ side."""


@dataclass(frozen=True, slots=True)
class Dumps:
    """The dumps of one job: usable ones by rank, and a line for each other file."""

    logs: dict[int, RankLog]
    problems: tuple[str, ...] = ()


def find(folder: str | os.PathLike[str]) -> list[Path]:
    """Dumps in a folder and three levels below, told by how they begin."""
    found: list[Path] = []
    for number, path in enumerate(_walk(Path(folder), _DEPTH)):
        if number >= _MAX_FILES:
            break
        if looks_like_dump(path):
            found.append(path)
    return sorted(found)


def read(path: str | os.PathLike[str]) -> RankLog:
    """Read one dump (pickle or JSON, plain or .gz) as the records of its rank.

    The rank is taken from the file's name and checked against its ops. Numbers of ops
    (``k``) count from the first one in the dump; if the ring had wrapped, the channels
    are marked uncertain, and `pptrace.alignment.settle` compares both sides.

    Raises:
        InputError: the file is no dump, is damaged, would run code, or its rank cannot
            be told.
    """
    dump = read_dump(path)
    return _Reading(dump, _rank(dump)).log()


def read_files(paths: Iterable[str | os.PathLike[str]]) -> Dumps:
    """Read the dumps of one job, as they are: `pptrace.alignment.settle` comes next.

    Args:
        paths: dumps, or folders of dumps. Of several dumps of a rank the newest counts.
    """
    logs: dict[int, RankLog] = {}
    problems: list[str] = []
    for path in _expand(paths, problems):
        try:
            log = read(path)
        except InputError as error:
            problems.append(f"{path.name}: {error.reason}")
            continue
        other = logs.get(log.rank)
        if other is not None:
            older, log = sorted((other, log), key=lambda each: each.progress_ns)
            problems.append(
                f"rank {log.rank} has several dumps: used {Path(log.path).name}, the"
                f" newest; not {Path(older.path).name}"
            )
        logs[log.rank] = log
    world = max((log.world_size for log in logs.values()), default=0)
    for log in logs.values():
        log.world_size = world
    return Dumps(dict(sorted(logs.items())), tuple(problems))


def read_folder(folder: str | os.PathLike[str]) -> dict[int, RankLog]:
    """The usable dumps in a folder, settled, by rank; missing ranks are normal.

    Raises:
        InputError: there is none.
    """
    dumps = read_files([folder])
    if not dumps.logs:
        reason = f"; {dumps.problems[0]}" if dumps.problems else ""
        raise InputError(folder, f"has no usable Flight Recorder dump{reason}")
    settle(dumps.logs)
    return dumps.logs


def _expand(
    paths: Iterable[str | os.PathLike[str]], problems: list[str]
) -> Iterator[Path]:
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield path
            continue
        inside = find(path)
        if not inside:
            problems.append(f"{path}: has no Flight Recorder dump in it")
        yield from inside


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith(".pptrace"):
            continue
        if entry.is_dir():
            if depth > 0:
                yield from _walk(Path(entry.path), depth - 1)
        else:
            yield Path(entry.path)


# -- whose dump --------------------------------------------------------------------


def _rank(dump: Dump) -> int:
    """The rank of a dump: its ops say which ranks it can be, its name which it is."""
    possible = _possible_ranks(dump)
    named = _named_ranks(dump.path.name)
    for rank in named:
        if possible is None or rank in possible:
            return rank
    if possible is not None and len(possible) == 1:
        return next(iter(possible))
    if named:
        return named[0]
    raise InputError(
        dump.path, "does not say whose dump it is", "let its name end in the rank"
    )


def _possible_ranks(dump: Dump) -> set[int] | None:
    """Ranks that can have issued its ops; None if it has none that tell."""
    possible: set[int] | None = None
    for group, name in {(e.group, e.name) for e in dump.entries if e.is_p2p}:
        found, known = _P2P.fullmatch(name), dump.groups.get(group)
        if found is None or known is None or int(found[2]) >= len(known[1]):
            continue
        rank = known[1][int(found[2])]
        possible = {rank} if possible is None else possible & {rank}
    if possible is None and dump.groups:
        return set.intersection(*(set(ranks) for _, ranks in dump.groups.values()))
    return possible


def _named_ranks(name: str) -> list[int]:
    """Numbers of a file name that may be the rank, the likeliest first."""
    plain = re.sub(r"(\.(gz|json|pkl|pickle|pt|bin|txt|dump|trace))+$", "", name)
    behind = re.findall(r"rank[_\-.]?(\d{1,7})(?!\d)", plain, re.IGNORECASE)
    return [int(n) for n in (*behind, *reversed(re.findall(r"\d{1,7}", plain)))]


# -- entries to records ------------------------------------------------------------


@dataclass(slots=True)
class _Batch:
    """P2P ops that share a ``p2p_seq_id``, until their end is seen."""

    first: Entry
    records: list[Record] = field(default_factory=list)


class _Reading:
    """Makes one rank's log from its dump."""

    def __init__(self, dump: Dump, rank: int) -> None:
        self.dump = dump
        self.rank = rank
        self.groups: dict[tuple[str, str], Group | None] = {}
        self.threads: dict[str, int] = {}
        self.records: list[Record] = []
        self.open: dict[str, _Batch] = {}
        self.collectives: dict[tuple[str, int], Record] = {}
        self.batches = 0
        self.strangers = 0
        self.doubtful: list[Record] = []
        """Last ops that may be single ones, or batches of one whose call goes on."""
        self.is_retiring = any(
            e.state == "completed" and e.is_retired for e in dump.entries
        )
        self.late: list[tuple[Entry, list[Record]]] = []
        """Entries whose completion is not believed, with their records."""

    def log(self) -> RankLog:
        for entry in self.dump.entries:
            group = self._group(entry)
            if group is None:
                self.strangers += 1
            elif _P2P.fullmatch(entry.name):
                self._add_op(entry, group)
            elif entry.name == _COALESCED and self._ends_batch(entry):
                self._end_batch(self.open.pop(entry.group), entry)
            elif not entry.is_p2p:
                self._add_collective(entry, group)
        for batch in self.open.values():
            self._leave_open(batch)
        self._find_calls()
        for seq, record in enumerate(self.records, 1):
            record.seq = seq
        _set_waits(self.records)
        return self._finish()

    def _group(self, entry: Entry) -> Group | None:
        """The group of an entry; None if its ranks are not known or lack ours."""
        key = (entry.group, entry.desc)
        if key not in self.groups:
            desc, ranks = self.dump.groups.get(entry.group, ("", ()))
            if not ranks and entry.desc == "default_pg":  # gloo's has another name
                ranks = tuple(range(self._world()))
            self.groups[key] = None
            if self.rank in ranks:
                index = len(self.groups)
                self.groups[key] = Group(
                    index, entry.group, entry.desc or desc, ranks, entry.backend
                )
        return self.groups[key]

    def _world(self) -> int:
        ranks = (rank for _, group in self.dump.groups.values() for rank in group)
        return max(max(ranks, default=0), self.rank) + 1

    # -- P2P -----------------------------------------------------------------------

    def _add_op(self, entry: Entry, group: Group) -> None:
        record = self._op(entry, group)
        if record is None:
            return
        batch = self.open.get(entry.group)
        if batch is None or batch.first.p2p_seq != entry.p2p_seq:
            self._close(entry.group)
            batch = self.open[entry.group] = _Batch(entry)
        batch.records.append(record)
        self.records.append(record)

    def _op(self, entry: Entry, group: Group) -> Record | None:
        found = _P2P.fullmatch(entry.name)
        assert found is not None
        peer = int(found[4])
        if peer >= len(group.ranks) or group.ranks[peer] == self.rank:
            return None
        is_send = found[1] == "send"
        shapes = entry.sizes[0 if is_send else 1] or entry.sizes[1 if is_send else 0]
        dtypes = entry.dtypes[0 if is_send else 1] or entry.dtypes[1 if is_send else 0]
        shape = shapes[0] if shapes else ()
        dtype, width = _DTYPES.get(dtypes[0] if dtypes else "", ("", 0))
        if dtypes and not dtype:
            dtype = dtypes[0].lower()
        numel = math.prod(shape) if shapes else 0
        record = Record(
            seq=0,
            kind=Kind.OP,
            posted_ns=max(1, entry.created_ns),
            returned_ns=max(1, entry.created_ns),
            direction=Direction.SEND if is_send else Direction.RECV,
            transport=Transport.PAIR,
            group=group,
            peer=group.ranks[peer],
            group_peer=peer,
            batch_size=1,
            thread=self.threads.setdefault(entry.thread, len(self.threads)),
            numel=numel,
            nbytes=numel * width,
            # torch lets only contiguous tensors through, so these are their strides.
            signature=Signature(shape, dtype, _contiguous(shape)),
            text=_place(entry),
        )
        self._set_done(entry, [record])
        return record

    def _ends_batch(self, entry: Entry) -> bool:
        """Whether a ``coalesced`` entry ends the open batch of its group."""
        batch = self.open.get(entry.group)
        if batch is None or batch.first.p2p_seq != entry.p2p_seq:
            return False
        # Coalesced collectives count up the other number (older dumps do not list
        # them one by one).
        return entry.is_p2p or batch.first.collective_seq == entry.collective_seq

    def _end_batch(self, batch: _Batch, end: Entry) -> None:
        self._make_batch(batch)
        self._set_done(end, batch.records)
        for record in batch.records:
            if end.state == "started":
                record.text = _began(record.text)

    def _make_batch(self, batch: _Batch) -> None:
        self.batches += 1
        for index, record in enumerate(batch.records):
            record.flags |= Flag.COALESCED
            record.transport = Transport.GROUP
            record.batch, record.batch_index = self.batches, index
            record.batch_size = len(batch.records)

    def _close(self, group: str) -> None:
        """Something else of the group follows: the call of its last P2P returned."""
        batch = self.open.pop(group, None)
        if batch is not None and len(batch.records) > 1:
            self._make_batch(batch)

    def _leave_open(self, batch: _Batch) -> None:
        """The last entries of a group: a single op, or a batch whose call goes on."""
        calls = {frame[0] for frame in batch.first.frames}
        if len(batch.records) == 1 and not calls & _BATCH_CALLS:
            if not calls:
                self.doubtful.append(batch.records[0])
            return
        self._make_batch(batch)
        for record in batch.records:
            record.returned_ns = 0

    # -- collectives ---------------------------------------------------------------

    def _add_collective(self, entry: Entry, group: Group) -> None:
        """One record per sequence number: a coalesced one is listed in parts first."""
        self._close(entry.group)
        key = (entry.group, entry.collective_seq)
        record = self.collectives.get(key)
        if record is None:
            record = self.collectives[key] = Record(
                seq=0,
                kind=Kind.COLLECTIVE,
                posted_ns=max(1, entry.created_ns),
                returned_ns=max(1, entry.created_ns),
                group=group,
                k=max(0, entry.collective_seq - 1),
                thread=self.threads.setdefault(entry.thread, len(self.threads)),
                text=entry.name,
            )
            self.records.append(record)
        elif entry.name != _COALESCED:
            record.text = entry.name
        self._set_done(entry, [record])

    # -- completion ----------------------------------------------------------------

    def _set_done(self, entry: Entry, records: list[Record]) -> None:
        """Say when ops were seen complete, where that is to be believed.

        torch makes the entry before NCCL is called and asks an event that is recorded
        after it: while the host is inside the call, the event counts as complete. The
        same after an abort. Such an entry was never retired by the watchdog, and was
        "complete" long after it began.
        """
        done_ns = _done_ns(entry)
        took_ns = entry.completed_ns - entry.created_ns if entry.created_ns else 0
        limit_ns = entry.timeout_ms * 1_000_000
        is_aborted = 0 < limit_ns <= took_ns
        is_late = self.is_retiring and not entry.is_retired and took_ns > _LATE_NS
        if done_ns and (is_aborted or is_late):
            done_ns = 0
            self.late.append((entry, records))
        for record in records:
            record.done_ns = done_ns

    def _find_calls(self) -> None:
        """What is not complete, not enqueued and the last of its thread is in the call."""
        last = {e.thread: e.record_id for e in self.dump.entries}
        for entry, records in self.late:
            seq = entry.p2p_seq if entry.is_p2p else entry.collective_seq
            is_enqueued = self.dump.enqueued.get(entry.pg_id) == seq
            if entry.record_id == last[entry.thread] and not is_enqueued:
                for record in records:
                    record.returned_ns = 0

    # -- the log -------------------------------------------------------------------

    def _finish(self) -> RankLog:
        dump = self.dump
        times = [max(e.created_ns, e.started_ns, e.completed_ns) for e in dump.entries]
        last_ns = max(times, default=0)
        whole = _whole_groups(dump)
        known = [group for group in self.groups.values() if group is not None]
        log = RankLog(
            path=str(dump.path),
            rank=self.rank,
            world_size=self._world(),
            status=Status.RUNNING,
            status_ns=_dumped_ns(dump, self.records, last_ns),
            next_seq=len(self.records) + 1,
            progress_ns=last_ns,
            groups={group.index: group for group in known},
            records=self.records,
            overwritten=dump.entries[0].record_id if dump.entries else 0,
            environment={
                "flight_recorder": {
                    "version": dump.version,
                    "lost": sorted({g.name for g in known} - whole),
                    "mixed": sorted(_mixed_groups(dump)),
                    "strangers": self.strangers,
                    "doubtful": [r.seq for r in self.doubtful if not r.done_ns],
                    "late": [[r.seq for r in records] for _, records in self.late],
                },
                "environment": {
                    "Flight Recorder": dump.version,
                    **({"NCCL": dump.library} if dump.library else {}),
                },
            },
        )
        log.channels = list(_channels(log, whole))
        return log


def _done_ns(entry: Entry) -> int:
    """When the op was seen complete; 0 if it was not."""
    # gloo never updates the state of an entry, it only retires it.
    is_done = (
        entry.state == "completed"
        or entry.completed_ns
        or (entry.is_retired and entry.backend == "gloo")
    )
    if not is_done:
        return 0
    return max(entry.completed_ns, entry.created_ns + 1)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    width = 1
    for size in reversed(shape):
        strides.append(width)
        width *= max(1, size)
    return tuple(reversed(strides))


def _place(entry: Entry) -> str:
    """Where the op was issued: the innermost frame outside of torch."""
    if not entry.frames:
        return _began("") if entry.state == "started" else ""
    own = [f for f in entry.frames if "/torch/" not in f[1]]
    name, path, line = (own or entry.frames)[0]
    text = f"at {'/'.join(Path(path).parts[-2:])}:{line} in {name}"
    return _began(text) if entry.state == "started" else text


def _began(text: str) -> str:
    return f"{text}, {_RUNS}" if text else _RUNS


def _set_waits(records: list[Record]) -> None:
    """Say that the compute stream waits for each pending op, and since when.

    A dump does not show waits. In a pipeline every receive is waited for before the
    next compute, and a collective at once; on CUDA that holds up the kernels posted
    afterwards, unless one of them has been seen running.
    """
    ran_ns = 0
    for record in reversed(records):
        if not record.done_ns and record.returned_ns:
            record.wait_ns = record.posted_ns
            record.waited_ns = max(record.posted_ns, ran_ns) + 1
        if record.done_ns or record.text.endswith(_RUNS):
            ran_ns = max(ran_ns, record.posted_ns)


def _dumped_ns(dump: Dump, records: list[Record], last_ns: int) -> int:
    """When the dump was made. Only the file's time says so, if it was not copied."""
    if last_ns <= dump.changed_ns <= last_ns + _COPIED_NS:
        return dump.changed_ns
    if dump.changed_ns < last_ns:
        return last_ns
    if all(r.done_ns for r in records):
        return last_ns
    limit_ms = max((e.timeout_ms for e in dump.entries), default=0)
    return last_ns + (limit_ms or _USUAL_TIMEOUT_MS) * 1_000_000


def _whole_groups(dump: Dump) -> set[str]:
    """Groups of which no op was overwritten."""
    names = {entry.group for entry in dump.entries}
    if not dump.entries or dump.entries[0].record_id == 0:
        return names
    whole: set[str] = set()
    seen: set[str] = set()
    for entry in dump.entries:
        if entry.group not in seen:
            seen.add(entry.group)
            if entry.op_id == 1:  # counts the ops of its group, from one
                whole.add(entry.group)
    return whole


def _mixed_groups(dump: Dump) -> set[str]:
    """Groups whose number of collectives counts batches of P2P, too (older torch)."""
    mixed: set[str] = set()
    seen: dict[str, int] = {}
    for entry in dump.entries:
        before = seen.get(entry.group, 0 if entry.record_id == 0 else None)
        if entry.is_p2p and before is not None and entry.collective_seq > before:
            mixed.add(entry.group)
        seen[entry.group] = entry.collective_seq
    return mixed


def _channels(log: RankLog, whole: set[str]) -> Iterator[ChannelState]:
    """Number the ops of each channel; say where the beginning is lost."""
    sides: dict[tuple[Channel, Direction], list[Record]] = {}
    for record in log.records:
        if record.kind is Kind.OP:
            key = (record.channel(log.rank), record.direction)
            sides.setdefault(key, []).append(record)
    for (channel, direction), records in sides.items():
        for k, record in enumerate(records):
            record.k = k
        _fill_in(records)
        reason = ""
        if channel.group[0] not in whole:
            reason = (
                f"the ring of r{log.rank}'s dump begins at record {log.overwritten}"
            )
        done = sum(1 for record in records if record.done_ns)
        yield ChannelState(channel, direction, len(records), done, reason)


def _fill_in(records: list[Record]) -> None:
    """Ops of a channel complete in order: what is before a complete one is, too."""
    done_ns = 0
    for record in reversed(records):
        done_ns = record.done_ns or done_ns
        record.done_ns = done_ns


# -- beside a black box ------------------------------------------------------------


def refine(log: RankLog, dump: RankLog) -> RankLog:
    """A rank's black box, with what the device says of its ops in its dump.

    An op that the black box saw posted and the dump saw complete is complete, also if
    the host never came to ask. Nothing else is taken over: the black box knows what its
    ops are for and also shows those whose call has not returned.
    """
    if log.rank != dump.rank:
        raise ValueError(f"black box of r{log.rank}, dump of r{dump.rank}")
    done = dict(_completions(log, dump))
    if not done:
        return log
    records = [
        replace(r, done_ns=done[r.seq]) if r.seq in done else r for r in log.records
    ]
    return replace(log, records=records)


def _completions(log: RankLog, dump: RankLog) -> Iterator[tuple[int, int]]:
    """(seq of an open record, monotonic time of its completion) of the black box."""
    theirs = _by_stream(dump.records)
    offset_ns = log.to_wall_ns(0)
    for key, mine in _by_stream(log.records).items():
        if all(record.done_ns for record in mine):
            continue
        for record, other in _same_ops(mine, theirs.get(key, []), offset_ns):
            if other.done_ns and not record.done_ns:
                yield record.seq, max(other.done_ns - offset_ns, record.posted_ns + 1)


_Stream = tuple[object, ...]


def _by_stream(records: Iterable[Record]) -> Mapping[_Stream, list[Record]]:
    """Ops of one group, peer and direction, and collectives of one group, in order."""
    streams: dict[_Stream, list[Record]] = {}
    for r in records:
        if r.group is None or r.kind not in {Kind.OP, Kind.COLLECTIVE}:
            continue
        key: _Stream = (r.kind, r.group.key)
        if r.kind is Kind.OP:
            key = (*key, r.peer, r.direction)
        streams.setdefault(key, []).append(r)
    return streams


def _same_ops(
    mine: list[Record], theirs: list[Record], offset_ns: int
) -> Iterator[tuple[Record, Record]]:
    """Pairs of records of one op: both lists are in the order of the calls.

    Either may lack the beginning, and the dump the last ones, whose calls go on. The
    two fit where the times do: torch makes its entry within the call.
    """
    if not theirs:
        return
    posted = [record.posted_ns + offset_ns for record in mine]
    guess = bisect.bisect_right(posted, theirs[-1].posted_ns) - len(theirs)
    best: tuple[float, int] = (_CLOCK_NS, 0)
    for shift in range(guess - 2, guess + 3):  # mine[i + shift] is theirs[i]
        places = range(max(0, -shift), min(len(theirs), len(mine) - shift))
        if places:
            gaps = [abs(theirs[i].posted_ns - posted[i + shift]) for i in places]
            best = min(best, (statistics.median(gaps), shift))
    gap_ns, shift = best
    if gap_ns < _CLOCK_NS:
        for i in range(max(0, -shift), min(len(theirs), len(mine) - shift)):
            yield mine[i + shift], theirs[i]
