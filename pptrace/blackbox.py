"""The black box: records to bytes in a memory-mapped file of one rank, and back.

Layout of ``rank00012.pptrace`` (little endian; every offset stands in the header)::

    header page    4 KiB  identity, clock base, and what the rank is doing now
    channel table         64 B per channel: counts of posted and completed ops
    text area             append only: interned strings and JSON facts
    ring                  fixed-size slots, one record each, oldest overwritten

Writing a record is one ``struct.pack_into``. A slot carries its sequence number first
and last; a reader accepts it only if both agree and belong to that place of the ring,
so a slot caught half written (or in a process killed half way) is seen as torn. Times
that become known later are single aligned 8-byte stores into the same slot.

Nothing has to run when a job hangs or dies for the data to exist: the file is the dump.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pptrace.errors import InputError
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
    format_ranks,
    parse_ranks,
)

__all__ = [
    "RING_SLOTS",
    "SUFFIX",
    "BlackBox",
    "file_name",
    "process_start",
    "read",
    "read_bytes",
]

MAGIC = b"PPTRACE\0"
VERSION = 1
SUFFIX = ".pptrace"
RING_SLOTS = 4096

_PAGE = 4096
_CHANNEL_BYTES = 64
_CHANNELS = 1024
_TEXT_BYTES = 512 * 1024
_SLOT_BYTES = 128

# Identity and geometry, written once; then the live words, each 8 bytes and aligned so
# that every store of one is whole.
_IDENTITY = struct.Struct("<8sIIIIQIIQQQiiIIQQQ40s64s64s")
_LIVE = 512
_O_NEXT_SEQ = _LIVE  # with the next word in one store: the hot path writes both
_O_PROGRESS = _LIVE + 8
_O_STATUS = _LIVE + 16
_O_STATUS_NS = _LIVE + 24
_O_HEARTBEAT = _LIVE + 32
_O_HEARTBEAT_WALL = _LIVE + 40
_O_TEXT_USED = _LIVE + 48
_O_CHANNELS_USED = _LIVE + 56
_O_INCOMPLETE = _LIVE + 64  # text id of the reason, 0 if counts can be trusted
_O_NOW = _LIVE + 72  # step, pass, stage, microbatch, state: refreshed by the monitor
_O_NAMESPACE = _LIVE + 136  # inode of the pid namespace: pids mean something in it only
_O_EMULATION = _LIVE + 112  # hosts blocked, messages sent, messages received
_U64 = struct.Struct("<Q")
_U64x2 = struct.Struct("<QQ")
_NOW = struct.Struct("<qqqqQ")
_EMULATION = struct.Struct("<QQQ")

_CHANNEL = struct.Struct("<HBBiiiQQ")  # group, transport, direction, tag, peer, peer
_O_CHANNEL_POSTED = 16
_O_CHANNEL_DONE = 24

_SLOT = struct.Struct("<QQQQQQBBBBBBHiiIHHIiIhHiIQQIIQ")
assert _SLOT.size == _SLOT_BYTES
_O_TIMES = {"returned": 16, "wait": 24, "waited": 32, "done": 40}
_O_FLAGS = 49

_SLOT_DTYPE = np.dtype(
    [
        ("head", "<u8"),
        ("posted", "<u8"),
        ("returned", "<u8"),
        ("wait", "<u8"),
        ("waited", "<u8"),
        ("done", "<u8"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("direction", "u1"),
        ("transport", "u1"),
        ("pass_", "u1"),
        ("tensor_index", "u1"),
        ("group", "<u2"),
        ("peer", "<i4"),
        ("group_peer", "<i4"),
        ("batch", "<u4"),
        ("batch_index", "<u2"),
        ("batch_size", "<u2"),
        ("k", "<u4"),
        ("tag", "<i4"),
        ("step", "<u4"),
        ("stage", "<i2"),
        ("thread", "<u2"),
        ("microbatch", "<i4"),
        ("signature", "<u4"),
        ("numel", "<u8"),
        ("nbytes", "<u8"),
        ("text", "<u4"),
        ("channel", "<u4"),
        ("tail", "<u8"),
    ]
)
assert _SLOT_DTYPE.itemsize == _SLOT_BYTES

STACKS_END = "pptrace: end of stacks\n"
"""Ends each dump of stacks we asked for; what a dying process adds comes after it."""

_FACT, _TEXT = b"F", b"T"
_ENTRY = struct.Struct("<I1s")


def file_name(rank: int) -> str:
    """Name of a rank's black box within the run's folder."""
    return f"rank{rank:05d}{SUFFIX}"


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if it does not run.

    Together with the pid it tells a process from a later one with the same pid. A
    process that ended and was not yet waited for by its parent does not run.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat.rpartition(b")")[2].split()
    return 0 if fields[0] in {b"Z", b"X"} else int(fields[19])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


class BlackBox:
    """The writing side: one open, mapped file.

    ``record`` and the ``set_*`` methods are the hot path. They may be called from
    several threads: a sequence number is drawn from one `itertools.count`, so every
    record has a slot of its own without a lock.

    Raises:
        FileExistsError: there is such a file already.
        OSError: the file cannot be made or mapped (folder missing, disk full).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        run: str = "",
        attempt: int = 0,
        slots: int = RING_SLOTS,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.run = run
        self.slots = slots
        self._channel_offset = _PAGE
        self._text_offset = _PAGE + _CHANNELS * _CHANNEL_BYTES
        self._ring_offset = self._text_offset + _TEXT_BYTES
        size = self._ring_offset + slots * _SLOT_BYTES
        # Never into a file that is there: another job may have it mapped, and cutting
        # it off would kill that job (SIGBUS).
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            # Reserve the blocks now: a full disk must show here as an error, not later
            # as SIGBUS inside the user's training step.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._next = itertools.count(1).__next__
        self._batches = itertools.count(1).__next__
        self._texts: dict[tuple[bytes, str], int] = {}
        self._text_used = 0
        self._channels_used = 0
        self._write_header(rank, world_size, run, attempt)

    def _write_header(self, rank: int, world_size: int, run: str, attempt: int) -> None:
        _IDENTITY.pack_into(
            self._map,
            0,
            MAGIC,
            VERSION,
            _PAGE,
            _SLOT_BYTES,
            self.slots,
            self._channel_offset,
            _CHANNELS,
            _CHANNEL_BYTES,
            self._text_offset,
            _TEXT_BYTES,
            self._ring_offset,
            rank,
            world_size,
            os.getpid(),
            attempt,
            process_start(os.getpid()),
            time.monotonic_ns(),
            time.time_ns(),
            _boot_id().encode(),
            socket.gethostname().encode()[:64],
            run.encode()[:64],
        )
        _U64x2.pack_into(self._map, _O_NEXT_SEQ, 1, time.monotonic_ns())
        _U64.pack_into(self._map, _O_NAMESPACE, _pid_namespace())

    # -- hot path ------------------------------------------------------------------

    def record(
        self,
        now: int,
        kind: int,
        flags: int = 0,
        direction: int = 0,
        transport: int = 0,
        pass_: int = 0,
        tensor_index: int = 0,
        group: int = 0,
        peer: int = -1,
        group_peer: int = -1,
        batch: int = 0,
        batch_index: int = 0,
        batch_size: int = 0,
        k: int = 0,
        tag: int = 0,
        step: int = 0,
        stage: int = -1,
        thread: int = 0,
        microbatch: int = -1,
        signature: int = 0,
        numel: int = 0,
        nbytes: int = 0,
        text: int = 0,
        channel: int = 0,
    ) -> int:
        """Write one record; return its sequence number, the handle for `set_time`."""
        seq = self._next()
        _SLOT.pack_into(
            self._map,
            self._ring_offset + (seq - 1) % self.slots * _SLOT_BYTES,
            seq,
            now,
            0,
            0,
            0,
            0,
            kind,
            flags,
            direction,
            transport,
            pass_,
            tensor_index,
            group,
            peer,
            group_peer,
            batch,
            batch_index,
            batch_size,
            k,
            tag,
            step,
            stage,
            thread,
            microbatch,
            signature,
            numel,
            nbytes,
            text,
            channel,
            seq,
        )
        _U64x2.pack_into(self._map, _O_NEXT_SEQ, seq + 1, now)
        return seq

    def set_time(self, seq: int, offset: int, now: int) -> None:
        """Set one time of record ``seq``; nothing if the ring has overwritten it.

        ``offset`` is one of `RETURNED`, `WAIT`, `WAITED`, `DONE`.
        """
        at = self._ring_offset + (seq - 1) % self.slots * _SLOT_BYTES
        if _U64.unpack_from(self._map, at)[0] == seq:
            _U64.pack_into(self._map, at + offset, now)
        _U64.pack_into(self._map, _O_PROGRESS, now)

    def set_flag(self, seq: int, flag: int) -> None:
        """Add a bit to the flags of record ``seq``."""
        at = self._ring_offset + (seq - 1) % self.slots * _SLOT_BYTES
        if _U64.unpack_from(self._map, at)[0] == seq:
            self._map[at + _O_FLAGS] |= flag

    def set_posted(self, channel: int, count: int) -> None:
        """Publish how many ops this rank has posted on a channel of its table."""
        _U64.pack_into(
            self._map,
            self._channel_offset + channel * _CHANNEL_BYTES + _O_CHANNEL_POSTED,
            count,
        )

    def set_done(self, channel: int, count: int) -> None:
        """Publish how many ops of a channel are known to be complete."""
        _U64.pack_into(
            self._map,
            self._channel_offset + channel * _CHANNEL_BYTES + _O_CHANNEL_DONE,
            count,
        )

    def next_batch(self) -> int:
        """A fresh batch number."""
        return self._batches()

    # -- first use only ------------------------------------------------------------

    def text(self, value: str, limit: int = 16384) -> int:
        """Intern a string; return its id, 0 if the text area is full."""
        return self._append(_TEXT, value[:limit])

    def fact(self, topic: str, /, **fields: Any) -> int:
        """Append a JSON fact (a group, a schedule, the environment)."""
        return self._append(_FACT, json.dumps({"fact": topic, **fields}))

    def signature(
        self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]
    ) -> int:
        """Intern the payload signature of an op."""
        return self._append(_FACT, json.dumps([list(shape), dtype, list(strides)]))

    def _append(self, tag: bytes, value: str) -> int:
        key = (tag, value)
        known = self._texts.get(key)
        if known is not None:
            return known
        data = value.encode("utf-8", "replace")
        start = self._text_used
        end = start + _ENTRY.size + len(data)
        # The last quarter is kept for what a verdict cannot do without.
        limit = (
            _TEXT_BYTES if tag == _TEXT or value[:1] == "{" else _TEXT_BYTES * 3 // 4
        )
        if end > limit:
            return 0
        at = self._text_offset + start
        _ENTRY.pack_into(self._map, at, len(data), tag)
        self._map[at + _ENTRY.size : at + _ENTRY.size + len(data)] = data
        self._text_used = end
        _U64.pack_into(self._map, _O_TEXT_USED, end)
        self._texts[key] = start + 1
        return start + 1

    def group(self, group: Group) -> None:
        """Describe a process group; records refer to it by ``group.index``."""
        self.fact(
            "group",
            index=group.index,
            name=group.name,
            desc=group.desc,
            ranks=format_ranks(group.ranks),
            backend=group.backend,
            eager=group.eager,
        )

    def schedule(self, run: ScheduleRun) -> int:
        """Describe a schedule; STEP records refer to it by the id returned."""
        return self.fact(
            "schedule",
            name=run.name,
            module=run.module,
            n_microbatches=run.n_microbatches,
            num_stages=run.num_stages,
            stages=list(run.stages),
            stage_to_rank={str(s): r for s, r in run.stage_to_rank.items()},
            group=[run.group[0], format_ranks(run.group[1])] if run.group else None,
            metadata=run.metadata,
        )

    def channel(
        self,
        group: int,
        transport: int,
        direction: int,
        tag: int,
        peer: int,
        group_peer: int,
    ) -> int:
        """Add a channel to the table; return its index, -1 if the table is full."""
        index = self._channels_used
        if index >= _CHANNELS:
            return -1
        _CHANNEL.pack_into(
            self._map,
            self._channel_offset + index * _CHANNEL_BYTES,
            group,
            transport,
            direction,
            tag,
            peer,
            group_peer,
            0,
            0,
        )
        self._channels_used = index + 1
        _U64.pack_into(self._map, _O_CHANNELS_USED, index + 1)
        return index

    # -- monitor -------------------------------------------------------------------

    def heartbeat(
        self, step: int, pass_: int, stage: int, microbatch: int, state: int
    ) -> None:
        """Sign of life of the monitor, and what the rank is doing now."""
        _NOW.pack_into(self._map, _O_NOW, step, pass_, stage, microbatch, state)
        _U64x2.pack_into(self._map, _O_HEARTBEAT, time.monotonic_ns(), time.time_ns())

    def set_emulation(self, blocked: int, sent: int, received: int) -> None:
        """Where the emulator stands: host threads blocked, messages sent and received.

        Over all ranks these say whether anything can still happen (quiescence).
        """
        _EMULATION.pack_into(self._map, _O_EMULATION, blocked, sent, received)

    def set_status(self, status: Status) -> None:
        """Say what became of the rank."""
        _U64x2.pack_into(self._map, _O_STATUS, int(status), time.monotonic_ns())

    def set_incomplete(self, reason: str) -> None:
        """Say why channel counts can no longer be trusted; the first reason stays."""
        if not _U64.unpack_from(self._map, _O_INCOMPLETE)[0]:
            _U64.pack_into(self._map, _O_INCOMPLETE, self.text(reason) or 1)

    @property
    def status(self) -> Status:
        """What was said last."""
        return Status(_U64.unpack_from(self._map, _O_STATUS)[0])

    @property
    def progress_ns(self) -> int:
        """Monotonic time of the last record or of the last time set in one."""
        return int(_U64.unpack_from(self._map, _O_PROGRESS)[0])

    def snapshot(self, tail: int = 512) -> bytes:
        """A smaller black box with the last ``tail`` records, for the gather."""
        slots = min(self.slots, tail)
        next_seq = int(_U64.unpack_from(self._map, _O_NEXT_SEQ)[0])
        text_end = self._text_offset + self._text_used
        channel_end = self._channel_offset + self._channels_used * _CHANNEL_BYTES
        ring_offset = _PAGE + (channel_end - _PAGE) + self._text_used
        ring = bytearray(slots * _SLOT_BYTES)
        for seq in range(max(1, next_seq - slots), next_seq):
            source = self._ring_offset + (seq - 1) % self.slots * _SLOT_BYTES
            target = (seq - 1) % slots * _SLOT_BYTES
            ring[target : target + _SLOT_BYTES] = self._map[
                source : source + _SLOT_BYTES
            ]
        head = bytearray(self._map[:_PAGE])
        fields = list(_IDENTITY.unpack_from(head))
        fields[4] = slots
        fields[6] = self._channels_used
        fields[8] = channel_end
        fields[9] = self._text_used
        fields[10] = ring_offset
        _IDENTITY.pack_into(head, 0, *fields)
        return bytes(
            head
            + self._map[_PAGE:channel_end]
            + self._map[self._text_offset : text_end]
            + ring
        )

    def close(self) -> None:
        """Unmap the file; the box must not be written afterwards."""
        self._map.close()


RETURNED = _O_TIMES["returned"]
WAIT = _O_TIMES["wait"]
WAITED = _O_TIMES["waited"]
DONE = _O_TIMES["done"]


# -- reading -----------------------------------------------------------------------


def read(path: str | os.PathLike[str], *, tail: int | None = None) -> RankLog:
    """Read a black box, of a living or a dead process.

    Args:
        path: the file.
        tail: read at most this many of the newest records; None reads all.

    Raises:
        InputError: the file is missing, empty, truncated in its header or foreign.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}") from None
    log = read_bytes(data, path=str(path), tail=tail)
    namespace = _U64.unpack_from(data, _O_NAMESPACE)[0]
    _add_process_state(log, Path(path), _identity(data)[15], namespace)
    return log


def _identity(data: bytes) -> tuple[Any, ...]:
    return _IDENTITY.unpack_from(data)


def read_bytes(data: bytes, *, path: str = "", tail: int | None = None) -> RankLog:
    """Decode a black box held in memory (see `read`)."""
    if len(data) < _PAGE:
        raise InputError(
            path,
            f"is too short for a black box: {len(data)} bytes, the header has {_PAGE}",
            "it was truncated, or never written",
        )
    head = _identity(data)
    if head[0] != MAGIC:
        raise InputError(
            path, "is not a pptrace black box", "its first bytes are not PPTRACE"
        )
    if head[1] != VERSION:
        raise InputError(
            path,
            f"has format version {head[1]}; this pptrace reads {VERSION}",
            "use the pptrace version that wrote it",
        )
    if not head[4] or (head[3], head[7]) != (_SLOT_BYTES, _CHANNEL_BYTES):
        raise InputError(path, "has a damaged header", "its sizes make no sense")
    (next_seq, progress, status, status_ns, beat, beat_wall, text_used, n_channels,
     incomplete) = struct.unpack_from("<9Q", data, _LIVE)  # fmt: skip
    log = RankLog(
        path=path,
        rank=head[11],
        world_size=head[12],
        pid=head[13],
        attempt=head[14],
        start_monotonic_ns=head[16],
        start_wall_ns=head[17],
        boot_id=_c_string(head[18]),
        host=_c_string(head[19]),
        run=_c_string(head[20]),
        status=Status(status) if status in set(Status) else Status.RUNNING,
        status_ns=status_ns,
        heartbeat_ns=beat,
        heartbeat_wall_ns=beat_wall,
        next_seq=next_seq,
        progress_ns=progress,
        emulation=_EMULATION.unpack_from(data, _O_EMULATION),
    )
    texts, signatures, schedules = _read_texts(
        log, data[head[8] : head[8] + min(text_used, head[9])]
    )
    if incomplete:
        log.incomplete = texts.get(incomplete, "a hook switched itself off")
    log.missing_bytes = max(0, head[10] + head[4] * head[3] - len(data))
    if len(data) < head[10]:  # tables cut: silence of a channel proves nothing
        log.incomplete = log.incomplete or "its file was cut off"
    table = data[head[5] : head[5] + min(n_channels, head[6]) * head[7]]
    log.channels = list(_read_channels(log, table))
    _read_ring(log, data[head[10] :], head[4], texts, signatures, schedules, tail)
    return log


def _c_string(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")


def _read_texts(
    log: RankLog, area: bytes
) -> tuple[dict[int, str], dict[int, Signature], dict[int, ScheduleRun]]:
    texts: dict[int, str] = {}
    signatures: dict[int, Signature] = {}
    schedules: dict[int, ScheduleRun] = {}
    at = 0
    while at + _ENTRY.size <= len(area):
        length, tag = _ENTRY.unpack_from(area, at)
        start, key = at + _ENTRY.size, at + 1
        at = start + length
        if at > len(area):
            break
        value = area[start:at].decode("utf-8", "replace")
        if tag == _TEXT:
            texts[key] = value
            continue
        try:
            fact = json.loads(value)
            if isinstance(fact, list):
                signatures[key] = Signature(tuple(fact[0]), fact[1], tuple(fact[2]))
            elif fact["fact"] == "group":
                group = _to_group(fact)
                log.groups[group.index] = group
            elif fact["fact"] == "schedule":
                schedules[key] = _to_schedule(fact)
                log.schedules.append(schedules[key])
            else:
                log.environment[fact.pop("fact")] = fact
        except (ValueError, KeyError, TypeError, IndexError):
            continue  # one unreadable fact must not cost the others
    return texts, signatures, schedules


def _to_group(fact: dict[str, Any]) -> Group:
    return Group(
        index=fact["index"],
        name=fact["name"],
        desc=fact["desc"],
        ranks=parse_ranks(fact["ranks"]),
        backend=fact["backend"],
        eager=fact["eager"],
    )


def _to_schedule(fact: dict[str, Any]) -> ScheduleRun:
    group = fact["group"]
    return ScheduleRun(
        name=fact["name"],
        module=fact["module"],
        n_microbatches=fact["n_microbatches"],
        num_stages=fact["num_stages"],
        stages=tuple(fact["stages"]),
        stage_to_rank={int(s): r for s, r in fact["stage_to_rank"].items()},
        group=(group[0], parse_ranks(group[1])) if group else None,
        metadata=fact["metadata"],
    )


def _read_channels(log: RankLog, table: bytes) -> list[ChannelState]:
    states = []
    for at in range(0, len(table) - _CHANNEL_BYTES + 1, _CHANNEL_BYTES):
        group_index, transport, direction, tag, peer, _, posted, done = (
            _CHANNEL.unpack_from(table, at)
        )
        group = log.groups.get(group_index)
        if group is None:
            continue
        src, dst = (log.rank, peer) if direction == Direction.SEND else (peer, log.rank)
        channel = Channel(group.key, Transport(transport), src, dst, tag)
        states.append(ChannelState(channel, Direction(direction), posted, done))
    return states


def _read_ring(
    log: RankLog,
    ring: bytes,
    slots: int,
    texts: dict[int, str],
    signatures: dict[int, Signature],
    schedules: dict[int, ScheduleRun],
    tail: int | None,
) -> None:
    readable = min(slots, len(ring) // _SLOT_BYTES)
    array = np.frombuffer(ring, _SLOT_DTYPE, count=readable)
    head, place = array["head"], np.arange(readable, dtype=np.uint64)
    used = (head != 0) | (array["tail"] != 0)
    whole = (
        (head != 0)
        & (head == array["tail"])
        & ((head - np.uint64(1)) % np.uint64(slots) == place)
    )
    log.torn = int(np.count_nonzero(used & ~whole))
    good = array[whole]
    good = good[np.argsort(good["head"])]
    log.overwritten = max(0, log.next_seq - 1 - slots)
    if tail is not None:
        good = good[max(0, len(good) - tail) :]
    default = Signature()
    for row in good.tolist():
        record = _to_record(row, log, texts, signatures.get(row[24], default))
        if record is not None:
            if record.kind is Kind.STEP and row[27] in schedules:
                record.text = schedules[row[27]].name
            log.records.append(record)


def _to_record(
    row: tuple[Any, ...], log: RankLog, texts: dict[int, str], signature: Signature
) -> Record | None:
    try:
        kind, pass_ = Kind(row[6]), Pass(row[10])
        direction = Direction(row[8]) if row[8] else Direction.SEND
        transport = Transport(row[9]) if row[9] else Transport.GROUP
    except ValueError:
        log.torn += 1
        return None
    return Record(
        seq=row[0],
        kind=kind,
        posted_ns=row[1],
        returned_ns=row[2],
        wait_ns=row[3],
        waited_ns=row[4],
        done_ns=row[5],
        flags=Flag(row[7]),
        direction=direction,
        transport=transport,
        pass_=pass_,
        tensor_index=row[11],
        group=log.groups.get(row[12]),
        peer=row[13],
        group_peer=row[14],
        batch=row[15],
        batch_index=row[16],
        batch_size=row[17],
        k=row[18],
        tag=row[19],
        step=row[20],
        stage=row[21],
        thread=row[22],
        microbatch=row[23],
        signature=signature,
        numel=row[25],
        nbytes=row[26],
        text=texts.get(row[27], ""),
    )


def _add_process_state(
    log: RankLog, path: Path, process_started: int, namespace: int
) -> None:
    """Is the process alive; did a signal that leaves a trace end it."""
    is_same_host = bool(log.boot_id) and log.boot_id == _boot_id()
    if is_same_host and namespace in (0, _pid_namespace()):
        log.alive = process_start(log.pid) == process_started != 0
    stacks = path.with_suffix(".stacks.txt")
    try:
        text = stacks.read_text("utf-8", "replace")
        changed_ns = stacks.stat().st_mtime_ns
    except OSError:
        return
    log.stacks = text
    at_death = text.rpartition(STACKS_END)[2]
    if log.alive is not True and at_death.strip():
        log.terminated_ns = changed_ns
        log.terminated_by = "SIGABRT" if "Fatal Python error" in at_death else "SIGTERM"


def with_process_state(log: RankLog, *, alive: bool | None) -> RankLog:
    """A copy of ``log`` whose liveness is known from elsewhere (a gather, a test)."""
    return replace(log, alive=alive)
