"""Loading a run: finds the black boxes behind a path and reads those it can.

Flight Recorder dumps beside them, or in their place, are read too. One unusable file never costs the others: it becomes one line in `Run.problems`.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pptrace import blackbox
from pptrace.errors import InputError
from pptrace.records import RankLog, format_ranks

__all__ = ["Run", "load_dumps", "load_run"]

_HEADER_BYTES = 4096
_MAX_RANKS = 1 << 20
"""More ranks than any job has: a header that says so is damaged."""
_DEPTH = 2
"""Levels of sub-folders of a run that are searched (attempts, nodes)."""
_DUMP_NAME = re.compile(r"trace|dump|comm_?lib|nccl|flight|fr[_.\-]", re.IGNORECASE)
_NO_DUMPS = (blackbox.SUFFIX, ".pftrace", ".pftrace.gz", ".txt", ".html", ".log", ".py")
_ADVICE = "give the folder that PPTRACE_DIR names, or one run's folder in it"


@dataclass(frozen=True, slots=True)
class Run:
    """The black boxes of one run of a job.

    ``now_wall_ns`` is the moment that ages refer to: the wall clock if a process of the
    run is alive on this machine, else the last sign of life in any of the files.
    """

    path: Path
    logs: dict[int, RankLog]
    problems: tuple[str, ...]
    now_wall_ns: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A file whose header could be read; ``head`` has no records."""

    path: Path
    head: RankLog

    @property
    def run(self) -> tuple[str, int]:
        return (self.head.run, self.head.attempt)


def load_run(
    path: str | os.PathLike[str],
    *,
    tail: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    dumps: Sequence[Path] = (),
) -> Run:
    """Read the black boxes of one run, and its Flight Recorder dumps.

    Args:
        path: a run's folder, the output directory (its newest run is taken), one black
            box, or a folder of dumps alone.
        tail: read at most this many of each rank's newest records; None reads all.
        progress: called with the number of files read and to read, after each file.
        dumps: Flight Recorder dumps, or folders of them, from elsewhere.

    Raises:
        InputError: there is no such path, nothing of ours in it, or nothing readable.
    """
    root = Path(path)
    try:
        folder, logs, problems = _load_boxes(root, tail, progress)
    except InputError as error:
        found = [*_dumps_at(root), *dumps]
        if not found:
            raise
        folder = root if root.is_dir() else root.parent
        logs, problems = {}, []
        if root.exists() and "no black box" not in error.reason and root not in found:
            problems.append(error.reason)
    else:
        found = [*(_dumps_beside(folder) if root.is_dir() else ()), *dumps]
    if found:
        problems += _add_dumps(logs, found)
    if not logs:
        raise InputError(root, f"has nothing that can be used; {problems[0]}", _ADVICE)
    problems += _world_problems(logs)
    return Run(folder, logs, tuple(problems), _now(logs.values()))


def _load_boxes(
    root: Path, tail: int | None, progress: Callable[[int, int], None] | None
) -> tuple[Path, dict[int, RankLog], list[str]]:
    """The run's folder, what its black boxes hold, and problems."""
    folder, files, problems = _find(root)
    candidates = []
    for file in files:
        try:
            candidates.append(_Candidate(file, _read_head(file)))
        except InputError as error:
            if file == root:
                raise
            problems.append(_problem(error, folder))
    if not candidates:
        raise InputError(root, f"has no usable black box; {problems[0]}", _ADVICE)
    chosen = _one_per_rank(_newest_attempt(candidates, problems), folder, problems)
    logs: dict[int, RankLog] = {}
    for done, candidate in enumerate(chosen, 1):
        try:
            log = logs[candidate.head.rank] = _read(candidate.path, tail)
        except InputError as error:
            problems.append(_problem(error, folder))
        else:
            problems += _cut_off(log, folder)
        if progress is not None:
            progress(done, len(chosen))
    if not logs:
        raise InputError(root, f"has no usable black box; {problems[-1]}", _ADVICE)
    return folder, logs, problems


def load_dumps(paths: Sequence[Path]) -> Run:
    """Read Flight Recorder dumps alone: files, or folders of them.

    Raises:
        InputError: none of them can be used.
    """
    logs: dict[int, RankLog] = {}
    problems = _add_dumps(logs, paths)
    if not logs:
        reason = f"no usable Flight Recorder dump; {problems[0]}"
        raise InputError(", ".join(map(str, paths[:3])), reason)
    problems += _world_problems(logs)
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    return Run(folder, logs, tuple(problems), _now(logs.values()))


# -- Flight Recorder dumps -----------------------------------------------------------


def _dumps_at(root: Path) -> list[Path]:
    """Dumps where no black box is: the path itself, or all of its folder."""
    from pptrace import flight_recorder

    if root.is_dir():
        return flight_recorder.find(root)
    return [root] if flight_recorder.is_dump(root) else []


def _dumps_beside(folder: Path) -> list[Path]:
    """Dumps in a folder of black boxes, by their names first: most runs have none."""
    named = [
        Path(entry.path)
        for entry in os.scandir(folder)
        if _DUMP_NAME.search(entry.name) and not entry.name.endswith(_NO_DUMPS)
    ]
    if not named:
        return []
    from pptrace import flight_recorder

    return sorted(path for path in named if flight_recorder.is_dump(path))


def _add_dumps(logs: dict[int, RankLog], paths: Sequence[Path]) -> list[str]:
    """Refine black boxes with dumps of the same rank, add those of others."""
    from pptrace import alignment, flight_recorder

    dumps = flight_recorder.read_files(paths)
    problems = list(dumps.problems)
    alone = [rank for rank in dumps.logs if rank not in logs]
    for rank, dump in dumps.logs.items():
        box = logs.get(rank)
        logs[rank] = dump if box is None else flight_recorder.refine(box, dump)
    alignment.settle(logs)
    if alone:
        problems.append(
            f"{_ranks(alone)}: from Flight Recorder dumps, which know no stages and"
            " microbatches, and no op whose call still sets up its communicator"
        )
    empty = [rank for rank in alone if not logs[rank].records]
    if empty:
        problems.append(
            f"{_ranks(empty)}: no entry in the dump: nothing was issued, or the first"
            " call still sets up its communicator"
        )
    return problems


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


# -- finding -----------------------------------------------------------------------


def _find(root: Path) -> tuple[Path, list[Path], list[str]]:
    """The run's folder, the files that may be its black boxes, and problems."""
    try:
        mode = root.stat().st_mode
        if stat.S_ISREG(mode):
            return root.parent, [root], []
        if not stat.S_ISDIR(mode):
            raise InputError(root, "is neither a folder nor a file", _ADVICE)
        if not any(root.iterdir()):
            raise InputError(root, "is empty", _ADVICE)
        files = sorted(_walk(root, _DEPTH + 1))
    except FileNotFoundError:
        raise InputError(root, "does not exist", _ADVICE) from None
    except OSError as error:
        raise InputError(root, f"cannot be read: {error.strerror}", _ADVICE) from None
    if not files:
        raise InputError(
            root, f"has no black box in it (rank*{blackbox.SUFFIX})", _ADVICE
        )
    if any(file.parent == root for file in files):
        return root, files, []
    return _newest_folder(root, files)


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.name.endswith(blackbox.SUFFIX):
            yield Path(entry.path)
        elif depth > 0 and entry.is_dir():
            try:
                yield from _walk(Path(entry.path), depth - 1)
            except OSError:
                continue  # somebody else's folder beside the runs, or gone just now


def _newest_folder(root: Path, files: list[Path]) -> tuple[Path, list[Path], list[str]]:
    """Of an output directory: the newest run, which may lie in several folders."""
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        child = root / file.relative_to(root).parts[0]
        by_folder.setdefault(child, []).append(file)
    heads = {folder: _first_head(inside) for folder, inside in by_folder.items()}
    known = {folder: head for folder, head in heads.items() if head is not None}
    if not known:
        newest = max(by_folder, key=lambda folder: folder.stat().st_mtime_ns)
        return newest, by_folder[newest], []
    newest = max(known, key=lambda folder: known[folder].start_wall_ns)
    started, run = known[newest].start_wall_ns, known[newest].run
    parts = [f for f in known if f == newest or (run and known[f].run == run)]
    problems = [
        f"{folder.name}: a newer folder, but none of its files is a black box; skipped"
        for folder, head in heads.items()
        if head is None and folder.stat().st_mtime_ns > started
    ]
    inside = [file for folder in sorted(parts) for file in by_folder[folder]]
    return (newest if len(parts) == 1 else root), inside, problems


def _first_head(files: Iterable[Path]) -> RankLog | None:
    for file in files:
        try:
            return _read_head(file)
        except InputError:
            continue
    return None


# -- choosing ----------------------------------------------------------------------


def _newest_attempt(
    candidates: list[_Candidate], problems: list[str]
) -> list[_Candidate]:
    """Only the files of the attempt that started last: attempts do not mix."""
    groups: dict[tuple[str, int], list[_Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.run, []).append(candidate)
    newest = max(groups, key=lambda g: max(c.head.start_wall_ns for c in groups[g]))
    for (run, attempt), group in groups.items():
        if (run, attempt) == newest:
            continue
        ranks = format_ranks(sorted({c.head.rank for c in group}))
        whose = (
            f"attempt {attempt}; attempt {newest[1]} started later"
            if run == newest[0]
            else f"run {run or 'without a name'}; {newest[0] or 'another'} is newer"
        )
        count = "1 file" if len(group) == 1 else f"{len(group)} files"
        problems.append(f"left out {count} (ranks {ranks}) of {whose}")
    return groups[newest]


def _one_per_rank(
    candidates: list[_Candidate], folder: Path, problems: list[str]
) -> list[_Candidate]:
    """The file with the newest sign of life for each rank, in order of ranks."""
    ranks: dict[int, list[_Candidate]] = {}
    for candidate in candidates:
        ranks.setdefault(candidate.head.rank, []).append(candidate)
    chosen = []
    for rank, same in sorted(ranks.items()):
        own_name = blackbox.file_name(rank)
        best = max(same, key=lambda c: (_last_sign(c.head), c.path.name == own_name))
        chosen.append(best)
        if len(same) > 1:
            others = ", ".join(_name(c.path, folder) for c in same if c is not best)
            problems.append(
                f"rank {rank} has {len(same)} files: used "
                f"{_name(best.path, folder)}, the newest sign of life; not {others}"
            )
    return chosen


def _cut_off(log: RankLog, folder: Path) -> list[str]:
    if not log.missing_bytes:
        return []
    name = _name(Path(log.path), folder)
    return [f"{name}: was cut off, its last {log.missing_bytes} bytes are missing"]


def _world_problems(logs: dict[int, RankLog]) -> list[str]:
    sizes: dict[int, list[int]] = {}
    for rank, log in logs.items():
        sizes.setdefault(log.world_size, []).append(rank)
    problems = []
    if len(sizes) > 1:
        said = ", ".join(
            f"{size} (said by r{format_ranks(ranks)})"
            for size, ranks in sorted(sizes.items())
        )
        problems.append(f"the files disagree on the number of ranks: {said}")
    missing = [rank for rank in range(max(sizes)) if rank not in logs]
    if missing:
        has_dumps = any("flight_recorder" in log.environment for log in logs.values())
        or_dump = "or dump " if has_dumps else ""
        problems.append(
            f"no black box {or_dump}of {_ranks(missing)} "
            f"({len(logs)} of {max(sizes)} are here)"
        )
    return problems


# -- reading -----------------------------------------------------------------------


def _read_head(path: Path) -> RankLog:
    """Identity and live words of a black box, from its first page alone."""
    try:
        if not path.is_file():
            raise InputError(path, "is not a regular file")
        with path.open("rb") as file:
            head = blackbox.read_bytes(file.read(_HEADER_BYTES), path=str(path))
    except OSError as error:
        raise InputError(path, f"cannot be read: {error.strerror}") from None
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - see _damaged
        raise _damaged(path, error) from None
    if not 0 <= head.rank < _MAX_RANKS or head.world_size > _MAX_RANKS:
        raise InputError(
            path, f"is damaged: it says rank {head.rank} of {head.world_size}"
        )
    return head


def _read(path: Path, tail: int | None) -> RankLog:
    try:
        return blackbox.read(path, tail=tail)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - see _damaged
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> InputError:
    # Whatever a damaged or hostile file makes the decoder trip over, it is one file.
    return InputError(path, f"is damaged: {type(error).__name__}: {error}")


def _last_sign(log: RankLog) -> int:
    """Wall-clock nanoseconds of the last thing known to have happened in a rank."""
    times = [log.start_wall_ns, log.heartbeat_wall_ns]
    times += [log.to_wall_ns(t) for t in (log.progress_ns, log.status_ns) if t]
    return max(times)


def _now(logs: Iterable[RankLog]) -> int:
    now = time.time_ns()
    signs = []
    for log in logs:
        if log.alive:
            return now
        signs.append(_last_sign(log))
    return min(now, max(signs))


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _problem(error: InputError, folder: Path) -> str:
    return f"{_name(Path(error.where), folder)}: {error.reason}"
