"""Logs of a job as evidence: which rank failed how, when, and in which line it stands.

Reads one mixed file or one file per rank: lines of NCCL's watchdog, Python tracebacks,
the launcher's summary, NCCL's warnings, and what ``ncclras -f json`` prints. Lines of
several ranks in one file are told apart by their prefixes. Logs are read line by line
and nothing in them is executed.
"""

from __future__ import annotations

import datetime
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pptrace.errors import InputError
from pptrace.lines import Fact, Sort, recognise

__all__ = ["Event", "LogEvidence", "Process", "read"]

_MAX_LINE = 8192
_MAX_EVENTS = 20_000
_MAX_TRACEBACK = 200
_MAX_JSON_BYTES = 64 << 20
_SUFFIXES = (".log", ".txt", ".out", ".err", ".json")
_DEPTH = 5
_LAUNCHERS = ("ChildFailedError", "RendezvousConnectionError", "SignalException")
"""Exceptions of the launcher's own, no rank's."""

_PREFIX = re.compile(
    r"\[rank(?P<rank>\d{1,7})\]:? ?|\[[A-Za-z_]{1,20}(?P<local>\d{1,5})\]: ?"
    r"|(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d{0,9}Z?) (?:\| ?|stderr [FP] )?"
    r"|(?P<task>\d{1,5}): "
)
_TIMES = re.compile(
    r"[EWIF](?P<month>\d{1,2})(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d{1,9})"
    r"|(?P<date>\d{4}-\d\d-\d\d)[T_ ](?P<clock2>\d\d:\d\d:\d\d)(?:[.,](?P<part2>\d{1,9}))?"
)
_WORTH_A_LOOK = re.compile(
    r"atchdog|NCCL|nccl|Traceback \(|exitcode|received by PID|closing signal"
    r"|Root Cause|Failures:|Killed process|Expecting \d|emory|onnection|Broken pipe"
    r"|Store|terminate called|dump|Error|Exception|Exit|Interrupt|18446744073709551615"
)
_SUMMARY = re.compile(
    r"\s{0,4}(?:Failures:|Root Cause \(first observed failure\):)\s*$"
)
_FIELD = re.compile(
    r"\s{0,8}(time|host|rank|exitcode|error_file|traceback)\s{0,8}: (.*)"
)
_CHAINED = ("The above exception was the direct cause", "During handling of the above")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a line, or a traceback, reports."""

    fact: Fact
    rank: int | None
    """Global rank; None where the log does not tell."""
    text: str
    """The line, or the whole traceback."""
    where: str
    """File and line number."""
    order: int
    """Place among all lines read."""
    at_ns: int = 0
    """Wall time by the host's local clock, 0 if not known."""
    near_ns: int = 0
    """The same, or where it is not known the last time that stands before it."""
    is_traceback: bool = False
    is_first: bool = False
    """The launcher called it the first failure of its node."""

    @property
    def headline(self) -> str:
        """The last line of a traceback, else the line itself."""
        return self.text.rstrip().rpartition("\n")[2].strip()


@dataclass(frozen=True, slots=True)
class Process:
    """A process that NCCL's RAS could not reach."""

    rank: int | None
    host: str
    pid: int
    is_dead: bool
    """RAS holds it for dead; else it is only unresponsive."""


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """What the logs of a job say."""

    events: tuple[Event, ...] = ()
    """In the order read."""
    processes: tuple[Process, ...] = ()
    ranks: frozenset[int] = frozenset()
    """Ranks of which there are lines."""
    world_size: int = 0
    files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    written_ns: int = 0
    """When the newest of the files was written."""

    _by_rank: dict[int, list[Event]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for event in self.events:
            if event.rank is not None:
                self._by_rank.setdefault(event.rank, []).append(event)

    def of(self, rank: int) -> list[Event]:
        """Events of one rank, in the order read."""
        return self._by_rank.get(rank, [])


def read(paths: Iterable[str | os.PathLike[str]]) -> LogEvidence:
    """Read logs.

    Args:
        paths: files, folders, or patterns such as ``rank*.log``.

    Raises:
        InputError: none of them names a file that can be read.
    """
    problems: list[str] = []
    files = list(dict.fromkeys(_expand(paths, problems)))
    if not files:
        raise InputError(", ".join(map(str, paths)), "names no log", problems[0])
    reader = _Reader(_ranks_of_files(files))
    used = []
    for path in files:
        try:
            reader.read(path)
            used.append(str(path))
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
        except InputError as error:
            problems.append(f"{path.name}: {error.reason}")
    if not used:
        raise InputError(files[0], "cannot be read", problems[0])
    if reader.is_full:
        problems.append(f"the logs hold more than {_MAX_EVENTS} lines of interest; the"
                        " rest was left out")  # fmt: skip
    ranks = {e.rank for e in reader.events if e.rank is not None} | reader.ranks
    return LogEvidence(
        events=tuple(reader.events),
        processes=tuple(reader.processes),
        ranks=frozenset(ranks),
        world_size=max([reader.world_size, *(rank + 1 for rank in ranks)], default=0),
        files=tuple(used),
        problems=tuple(problems),
        written_ns=max(path.stat().st_mtime_ns for path in files if path.exists()),
    )


# -- files -------------------------------------------------------------------------


def _expand(
    paths: Iterable[str | os.PathLike[str]], problems: list[str]
) -> Iterator[Path]:
    for given in paths:
        path = Path(given)
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from _walk(path, _DEPTH)
        else:
            found = [Path(name) for name in sorted(glob.glob(str(given)))]  # noqa: PTH207 - absolute patterns
            if not found:
                problems.append(f"{given}: no such file")
            yield from (file for file in found if file.is_file())


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.is_dir() and depth > 0:
            yield from _walk(Path(entry.path), depth - 1)
        elif entry.name.endswith(_SUFFIXES) and entry.is_file():
            yield Path(entry.path)


def _ranks_of_files(files: list[Path]) -> dict[Path, int]:
    """The rank that a file's name gives, where it gives one."""
    ranks: dict[Path, int] = {}
    alike: dict[str, list[tuple[Path, list[str]]]] = {}
    for path in files:
        named = re.search(r"rank[_\-.]?(\d{1,7})(?!\d)", path.name, re.IGNORECASE)
        # torchrun --log-dir: .../attempt_0/3/stderr.log
        launched = re.search(r"attempt_\d{1,4}/(\d{1,5})/[^/]+$", path.as_posix())
        if named or launched:
            ranks[path] = int((named or launched)[1])  # type: ignore[index]
        else:
            form = re.sub(r"\d{1,7}", "#", str(path))
            alike.setdefault(form, []).append((path, re.findall(r"\d{1,7}", str(path))))
    for same in alike.values():
        numbers = [n for _, n in same]
        varying = [i for i, column in enumerate(zip(*numbers, strict=False))
                   if len(set(column)) > 1]  # fmt: skip
        if len(varying) == 1:  # worker-0.log, worker-1.log, …
            values = [int(n[varying[0]]) for n in numbers]
            if max(values) < 4 * len(values):
                ranks |= {path: v for (path, _), v in zip(same, values, strict=True)}
    return ranks


# -- lines -------------------------------------------------------------------------


@dataclass(slots=True)
class _Stream:
    """Lines of one rank within a file: what is open in them."""

    rank: int | None
    at_ns: int = 0
    lines: list[str] = field(default_factory=list)
    """An open traceback, or a complete one that may be continued."""
    start: int = 0
    is_open: bool = False


class _Reader:
    """Collects events from file after file."""

    def __init__(self, named: dict[Path, int]) -> None:
        self.named = named
        self.events: list[Event] = []
        self.processes: list[Process] = []
        self.ranks: set[int] = set()
        self.world_size = 0
        self.order = 0
        self.is_full = False

    def read(self, path: Path) -> None:
        """Read one file: a log, or the JSON of ``ncclras``.

        Raises:
            OSError: it cannot be read.
            InputError: it is the JSON of ``ncclras``, and damaged.
        """
        with path.open("rb") as file:
            head = file.read(4096)
            if head.lstrip()[:1] == b"{" and b'"communicators' in head:
                self._read_ras(path)
                return
            if head.startswith(b'{"message"') and b'"py_callstack"' in head:
                self._read_error_file(path)
                return
            file.seek(0)
            _File(self, path, self.named.get(path)).read(file)

    def add(self, event: Event) -> None:
        """Keep an event, while there are not too many."""
        if len(self.events) >= _MAX_EVENTS:
            self.is_full = True
        else:
            self.events.append(event)

    def _read_error_file(self, path: Path) -> None:
        """What torchrun has a failing process write: ``attempt_0/3/error.json``."""
        value = _load_json(path, "a torchrun error file")
        try:
            info = value["message"]["extraInfo"]
            text, at_s = str(info["py_callstack"])[: 1 << 16], int(info["timestamp"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(path, f"is damaged: {error}") from None
        headline = text.strip().rpartition("\n")[2]
        fact = recognise(headline) or Fact(Sort.EXCEPTION, "A Python exception.")
        self.order += 1
        at_ns = at_s * 1_000_000_000 if 0 < at_s < 1 << 33 else 0
        self.add(
            Event(
                replace(fact, sort=Sort.EXCEPTION), self.named.get(path), text.strip(),
                f"{path.name}:1", self.order, at_ns, at_ns, is_traceback=True,
            )
        )  # fmt: skip

    def _read_ras(self, path: Path) -> None:
        value = _load_json(path, "the output of ncclras")
        try:
            communicators = value["communicators"]
            sizes = [int(c["size"]) for c in communicators]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(path, f"is damaged: {error}") from None
        world = max(sizes, default=0)
        self.world_size = max(self.world_size, world)
        for communicator, size in zip(communicators, sizes, strict=True):
            missing = communicator.get("missing_ranks")
            for raw in missing if isinstance(missing, list) else ():
                process = _process(raw, is_world=size == world)
                if process is not None:
                    self.processes.append(process)


def _load_json(path: Path, what: str) -> Any:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise InputError(path, f"is too large for {what}")
    data = path.read_bytes()
    if data.count(b"[") + data.count(b"{") > 10_000 + len(data) // 16:
        raise InputError(path, f"is not {what}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(path, f"is damaged: {error}") from None


def _process(raw: Any, *, is_world: bool) -> Process | None:
    if not isinstance(raw, dict) or not isinstance(raw.get("status"), dict):
        return None
    rank, pid, status = raw.get("rank"), raw.get("pid"), raw["status"]
    is_dead = status.get("considered_dead") is True
    if not is_dead and status.get("unresponsive") is not True:
        return None
    return Process(
        # Only in the communicator of all ranks its ranks are the global ones.
        rank=rank if is_world and type(rank) is int and 0 <= rank < 1 << 20 else None,
        host=str(raw.get("host", ""))[:200],
        pid=pid if type(pid) is int else -1,
        is_dead=is_dead,
    )


class _File:
    """One log, from its first line to its last."""

    def __init__(self, reader: _Reader, path: Path, named: int | None) -> None:
        self.reader = reader
        self.path = path
        self.named = named
        self.streams: dict[tuple[int | None, int | None], _Stream] = {}
        self.prefixes: set[int] = set()
        self.written = datetime.datetime.fromtimestamp(path.stat().st_mtime)  # noqa: DTZ006 - logs are in local time
        self.number = 0
        self.last_ns = 0
        self.summary: dict[str, str] | None = None
        self.is_first = False
        self.begin = len(reader.events)

    def read(self, file: Any) -> None:
        """Read all lines; long ones are cut."""
        rest = False
        while raw := file.readline(_MAX_LINE):
            is_whole = raw.endswith(b"\n")
            if not rest:
                self.number += 1
                self.reader.order += 1
                self._line(raw.decode("utf-8", "replace").rstrip("\r\n"))
            rest = not is_whole
        self._end_summary()
        for stream in self.streams.values():
            self._end_traceback(stream)
        self._settle_ranks()

    def _settle_ranks(self) -> None:
        """Lines without a prefix belong to the only rank that has lines here."""
        only = self.named
        if only is None and len(self.prefixes) == 1:
            (only,) = self.prefixes
        events = self.reader.events
        for index in range(self.begin, len(events)):
            event = events[index]
            if event.rank is None and only is not None and event.fact.sort not in {
                Sort.EXIT, Sort.STOP, Sort.KERNEL,
            }:  # fmt: skip
                events[index] = replace(event, rank=only)
        self.reader.ranks |= self.prefixes | ({only} if only is not None else set())

    def _line(self, line: str) -> None:
        rank, local, text = _split_prefix(line)
        if rank is not None:
            self.prefixes.add(rank)
        if self.summary is not None and self._in_summary(text):
            return
        stream = self.streams.get((rank, local))
        if stream is None:
            stream = self.streams[rank, local] = _Stream(rank)
        if stream.lines and self._in_traceback(stream, text):
            return
        if not _WORTH_A_LOOK.search(line):
            return
        stream.at_ns = self._time(line) or stream.at_ns
        if text.startswith("Traceback (most recent call last)"):
            self._end_traceback(stream)
            stream.lines, stream.start, stream.is_open = [text], self.number, True
        elif _SUMMARY.match(text):
            self.summary, self.is_first = {}, "Root Cause" in text
        else:
            self._take(stream, text)

    def _take(self, stream: _Stream, text: str) -> None:
        fact = recognise(text)
        if fact is None:
            return
        rank = stream.rank
        is_default = fact.group in {"", "0"} or fact.desc == "default_pg"
        if rank is None and self.named is None and is_default and fact.group_rank >= 0:
            rank = fact.group_rank
        self._add(fact, rank, text, at_ns=stream.at_ns)

    def _add(self, fact: Fact, rank: int | None, text: str, **more: Any) -> None:
        where = f"{self.path.name}:{more.pop('number', self.number)}"
        self.last_ns = more.get("at_ns") or self.last_ns
        more["near_ns"] = self.last_ns
        self.reader.add(Event(fact, rank, text, where, self.reader.order, **more))

    # -- tracebacks ----------------------------------------------------------------

    def _in_traceback(self, stream: _Stream, text: str) -> bool:
        """Whether the line belongs to the stream's traceback."""
        if stream.is_open:
            if len(stream.lines) < _MAX_TRACEBACK:
                stream.lines.append(text)
            if text and not text[0].isspace():
                stream.is_open = False
            return True
        if not text.strip() or text.startswith(_CHAINED):
            stream.lines.append(text)
            return True
        if (
            text.startswith("Traceback (most recent call last)")
            and any(line.startswith(_CHAINED) for line in stream.lines[-3:])
            and len(stream.lines) < _MAX_TRACEBACK
        ):
            stream.lines.append(text)
            stream.is_open = True
            return True
        self._end_traceback(stream)
        return False

    def _end_traceback(self, stream: _Stream) -> None:
        if stream.lines:
            text = "\n".join(stream.lines).strip()
            headline = text.rpartition("\n")[2]
            if not any(name in headline for name in _LAUNCHERS):
                fact = recognise(headline) or Fact(
                    Sort.EXCEPTION, "A Python exception."
                )
                fact = replace(fact, sort=Sort.EXCEPTION)
                self._add(
                    fact, stream.rank, text, at_ns=stream.at_ns, is_traceback=True,
                    number=stream.start,
                )  # fmt: skip
        stream.lines, stream.is_open = [], False

    # -- the launcher's summary ----------------------------------------------------

    def _in_summary(self, text: str) -> bool:
        """Whether the line belongs to the launcher's list of failures."""
        summary = self.summary
        assert summary is not None
        found = _FIELD.match(text)
        if found is not None and not summary.get("traceback", "").startswith(
            "Traceback"
        ):
            summary[found[1]] = found[2]
            return True
        if re.match(r"\[\d{1,6}\]:\s*$", text):
            self._end_summary()
            self.summary = {}
            return True
        if text.startswith((" ", "\t")) or not text:
            if "traceback" in summary and len(summary["traceback"]) < 1 << 16:
                summary["traceback"] += "\n" + text.removeprefix("  ")
            return True
        self._end_summary()
        return False

    def _end_summary(self) -> None:
        summary, self.summary = self.summary, None
        if not summary or "exitcode" not in summary:
            return
        fact = recognise(f"exitcode  : {summary['exitcode']}")
        rank = re.match(r"(\d{1,7}) ", summary.get("rank", "") + " ")
        if fact is None or rank is None:
            return
        trace = summary.get("traceback", "").strip()
        self._add(
            fact, int(rank[1]), trace or f"exitcode {summary['exitcode']}",
            at_ns=self._time(summary.get("time", "")), is_first=self.is_first,
            is_traceback=trace.startswith("Traceback"),
        )  # fmt: skip

    # -- times ---------------------------------------------------------------------

    def _time(self, line: str) -> int:
        """Wall nanoseconds of a line's time stamp by the local clock; 0 without one."""
        found = _TIMES.search(line[:200])
        if found is None:
            return 0
        clock = found["clock"] or found["clock2"]
        date = found["date"] or f"{self.written.year}-{found['month']}-{found['day']}"
        part = (found["part"] or found["part2"] or "").ljust(9, "0")
        try:
            moment = datetime.datetime.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S")  # noqa: DTZ007 - logs are in local time
            if not found["date"] and moment > self.written + datetime.timedelta(days=1):
                moment = moment.replace(year=moment.year - 1)
            return int(moment.timestamp()) * 1_000_000_000 + int(part)
        except (ValueError, OverflowError, OSError):
            return 0


def _split_prefix(line: str) -> tuple[int | None, int | None, str]:
    """Global rank, local rank or task, and the line without its prefixes."""
    rank = local = None
    at = 0
    for _ in range(4):
        found = _PREFIX.match(line, at)
        if found is None:
            break
        if found["rank"] is not None:
            rank = int(found["rank"])
        elif found["local"] or found["task"]:
            local = int(found["local"] or found["task"])
        at = found.end()
    return rank, local, line[at:]
