"""The layout of Flight Recorder dumps: a file's bytes to entries that were checked.

torch writes a dump as a pickle or as JSON, of versions 2.3 to 2.10 so far; which keys
exist and how their values are written differs. What a file holds is not trusted: values
of the wrong type are left out, sizes are limited before memory is spent, and nothing in
a file is executed (`pptrace.pickles`).
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pptrace import pickles
from pptrace.errors import InputError

__all__ = ["Dump", "Entry", "looks_like_dump", "read_dump"]

_MAX_BYTES = 256 << 20
"""Of a dump, unpacked; 20,000 entries with stacks take about 10 MB."""
_MAX_RATIO = 100
"""Packed JSON of equal entries shrinks about 40 times."""
_ANY_RATIO_BYTES = 1 << 20
_BYTES_PER_BRACKET = 6
"""JSON of a dump has one list or object per 20 bytes."""
_BYTES_PER_ENTRY = 100
"""What an entry takes at least in a pickle; in JSON it is four times that."""
_MAX_RANK = 1 << 20
_MAX_TEXT = 1024
_MAX_ITEMS = 64
_MAX_FRAMES = 128
_SNIFFED = 4096
_GZIP = b"\x1f\x8b"
_PICKLES = (b"\x80", b"}", b"(")
"""First bytes: the protocol's number, or of older protocols a dictionary."""
_PIECE = 1 << 16
_ADVICE = "a dump is what TORCH_NCCL_DUMP_ON_TIMEOUT or _dump_fr_trace() writes"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the ring. Times are wall-clock nanoseconds, 0 if not known."""

    record_id: int
    pg_id: int
    group: str
    desc: str
    collective_seq: int
    p2p_seq: int
    op_id: int
    is_p2p: bool
    backend: str
    """What stands before the colon of the profiling name: ``nccl``."""
    name: str
    """What stands behind it: ``send 1->0``, ``all_reduce``, ``coalesced``."""
    state: str
    created_ns: int
    started_ns: int
    completed_ns: int
    timeout_ms: int
    is_retired: bool
    sizes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    """Shapes of the inputs and of the outputs."""
    dtypes: tuple[tuple[str, ...], tuple[str, ...]]
    frames: tuple[tuple[str, str, int], ...]
    """Python stack where it was issued, innermost first: function, file, line."""
    thread: str


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's dump as it lies in the file."""

    path: Path
    version: str
    library: str
    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    """Description and global ranks of each process group, by its name."""
    entries: tuple[Entry, ...]
    """By record id."""
    changed_ns: int
    """When the file was written last."""
    skipped: int = 0
    """Entries that could not be used."""
    enqueued: Mapping[int, int] = field(default_factory=dict)
    """Number of the last work whose call returned, by ``pg_id``."""


# -- files -------------------------------------------------------------------------


def looks_like_dump(path: Path) -> bool:
    """Whether a file begins as a dump does. Reads 4 KiB; False if it cannot."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(_SNIFFED)
    except OSError:
        return False
    if head.startswith(_GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _SNIFFED)
        except zlib.error:
            return False
    if head.startswith(_PICKLES):
        return b"pg_config" in head or b"entries" in head
    if head.lstrip()[:1] == b"{":
        words = (b'"entries"', b'"pg_config"', b'"comm_lib_version"', b'"nccl_version"')
        return any(word in head for word in words) and b'"communicators"' not in head
    return False


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Read one dump: pickle or JSON, plain or packed with gzip.

    Raises:
        InputError: the file cannot be read, is no dump, is damaged, needs far more
            memory than its length, or is a pickle that would run code.
    """
    path = Path(path)
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise InputError(path, "is not a regular file")
        if info.st_size > _MAX_BYTES:
            raise InputError(path, f"is too large for a dump: {info.st_size} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}") from None
    data = _unpacked(path, data)
    value = _decode(path, data)
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list):
        raise InputError(path, "is not a Flight Recorder dump", _ADVICE)
    return _to_dump(path, value, len(data), info)


def _unpacked(path: Path, data: bytes) -> bytes:
    if not data.startswith(_GZIP):
        return data
    limit = min(_MAX_BYTES, max(_ANY_RATIO_BYTES, _MAX_RATIO * len(data)))
    try:
        if sum(map(len, _pieces(data))) > limit:  # counted before any of it is kept
            raise InputError(path, f"unpacks to more than {limit} bytes: refused")
        return b"".join(_pieces(data))
    except zlib.error as error:
        raise InputError(path, f"is damaged: {error}") from None
    except EOFError:
        raise InputError(path, "is cut off", "its gzip stream has no end") from None


def _pieces(data: bytes) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    rest, total = data, 0
    while not unpacker.eof:
        piece = unpacker.decompress(rest, _PIECE)
        rest = unpacker.unconsumed_tail
        if not piece and not rest and not unpacker.eof:
            raise EOFError
        total += len(piece)
        yield piece
        if total > _MAX_BYTES:
            return


def _decode(path: Path, data: bytes) -> Any:
    if not data:
        raise InputError(path, "is empty")
    try:
        if data.startswith(_PICKLES):
            return pickles.loads(data)
        if data[:64].lstrip()[:1] == b"{":
            return _from_json(data)
    except pickles.PickleError as error:
        raise InputError(path, str(error)) from None
    except RecursionError:
        raise InputError(path, "is damaged: nested too deeply") from None
    except ValueError as error:
        raise InputError(path, f"is damaged: {error}") from None
    raise InputError(path, "is not a Flight Recorder dump", _ADVICE)


def _from_json(data: bytes) -> Any:
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > 10_000 + len(data) // _BYTES_PER_BRACKET:
        raise ValueError(f"more than one list per {_BYTES_PER_BRACKET} bytes")
    return json.loads(data)


# -- values ------------------------------------------------------------------------


def _to_dump(path: Path, value: dict[Any, Any], data_bytes: int, info: Any) -> Dump:
    checker = _Checker()
    most = 10_000 + data_bytes // _BYTES_PER_ENTRY
    raw = list({id(e): e for e in value["entries"][:most]}.values())
    entries = [e for e in map(checker.entry, raw) if e is not None]
    return Dump(
        path=path,
        version=checker.text(value.get("version")),
        library=checker.text(
            value.get("comm_lib_version") or value.get("nccl_version")
        ),
        groups=dict(_groups(checker, value.get("pg_config"))),
        entries=tuple(sorted(entries, key=lambda e: e.record_id)),
        changed_ns=info.st_mtime_ns,
        skipped=len(value["entries"]) - len(entries),
        enqueued=dict(_enqueued(value.get("pg_status"))),
    )


def _groups(
    checker: _Checker, config: Any
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    if not isinstance(config, dict):
        return
    for name, group in config.items():
        if isinstance(group, dict) and isinstance(name, str):
            ranks = checker.ranks(group.get("ranks"))
            if ranks:
                yield checker.text(name), (checker.text(group.get("desc")), ranks)


def _enqueued(status: Any) -> Iterator[tuple[int, int]]:
    if not isinstance(status, dict):
        return
    for key, value in status.items():
        last = (
            value.get("last_enqueued_collective") if isinstance(value, dict) else None
        )
        if re.fullmatch(r"\d{1,18}", str(key)) and (
            type(last) is int
            or (isinstance(last, str) and re.fullmatch(r"-?\d{1,18}", last))
        ):
            yield int(key), int(last)


class _Checker:
    """Turns raw values into checked ones, each object once.

    A pickle may refer to one large object thousands of times; making a copy for each
    reference would let a small file fill the memory.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Any] = {}

    def entry(self, raw: Any) -> Entry | None:
        """One entry; None if it is none."""
        if not isinstance(raw, dict):
            return None
        group = raw.get("process_group")
        if not isinstance(group, (list, tuple)) or len(group) != 2:
            return None
        backend, _, name = self.text(raw.get("profiling_name")).partition(":")
        if not name:
            return None
        return Entry(
            record_id=_number(raw.get("record_id")),
            pg_id=_number(raw.get("pg_id")),
            group=self.text(group[0]),
            desc=self.text(group[1]),
            collective_seq=_number(raw.get("collective_seq_id")),
            p2p_seq=_number(raw.get("p2p_seq_id")),
            op_id=_number(raw.get("op_id")),
            is_p2p=raw.get("is_p2p") is True or name[:5] in {"send ", "recv "},
            backend=backend,
            name=name,
            state=self.text(raw.get("state")),
            created_ns=_number(raw.get("time_created_ns")),
            started_ns=_number(raw.get("time_discovered_started_ns")),
            completed_ns=_number(raw.get("time_discovered_completed_ns")),
            timeout_ms=_number(raw.get("timeout_ms")),
            is_retired=raw.get("retired") is True,
            sizes=(
                self.once("shapes", raw.get("input_sizes"), self._shapes),
                self.once("shapes", raw.get("output_sizes"), self._shapes),
            ),
            dtypes=(
                self.once("texts", raw.get("input_dtypes"), self._texts),
                self.once("texts", raw.get("output_dtypes"), self._texts),
            ),
            frames=self.once("frames", raw.get("frames"), self._frames),
            thread=self.text(raw.get("thread_id")),
        )

    def once(
        self,
        sort: str,
        value: Any,
        make: Callable[[Any], Any],
        kinds: tuple[type, ...] = (list, tuple),
    ) -> Any:
        """``make(value)``, or what it made of the same object before.

        ``value`` must live as long as the checker, since its identity is the key.
        """
        if not isinstance(value, kinds):
            return ()
        key = (sort, id(value))
        if key not in self._made:
            self._made[key] = make(value)
        return self._made[key]

    def text(self, value: Any) -> str:
        """A string of limited length; empty if it is none."""
        if not isinstance(value, str):
            return ""
        if len(value) <= _MAX_TEXT:
            return value
        key = ("text", id(value))
        if key not in self._made:
            self._made[key] = value[:_MAX_TEXT]
        return str(self._made[key])

    def ranks(self, value: Any) -> tuple[int, ...]:
        """``"[0, 1]"`` or a list of numbers; empty if it is neither."""
        return tuple(self.once("ranks", value, _ranks, (str, list)))

    def _shapes(self, value: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.once("shape", s, _shape) for s in value[:_MAX_ITEMS])

    def _texts(self, value: Sequence[Any]) -> tuple[str, ...]:
        return tuple(self.text(item) for item in value[:_MAX_ITEMS])

    def _frames(self, value: Sequence[Any]) -> tuple[tuple[str, str, int], ...]:
        return tuple(
            self._frame(frame)
            for frame in value[:_MAX_FRAMES]
            if isinstance(frame, dict)
        )

    def _frame(self, frame: dict[Any, Any]) -> tuple[str, str, int]:
        key = ("frame", id(frame))
        if key not in self._made:
            self._made[key] = (
                self.text(frame.get("name")),
                self.text(frame.get("filename")),
                _number(frame.get("line")),
            )
        found: tuple[str, str, int] = self._made[key]
        return found


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 63 else 0


def _ranks(value: str | Sequence[Any]) -> tuple[int, ...]:
    if isinstance(value, str):
        value = [int(number) for number in re.findall(r"\d{1,7}", value)]
    ranks = tuple(n for n in value if type(n) is int and 0 <= n < _MAX_RANK)
    return ranks if len(set(ranks)) == len(ranks) else ()


def _shape(value: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_number(size) for size in value[:_MAX_ITEMS])
