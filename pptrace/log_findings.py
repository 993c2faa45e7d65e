"""What logs add to a diagnosis: ends of ranks before it, words and verdicts after it.

`combine` tells the diagnosis which ranks raised or died, so that it can say who waits
for them; `annotate` puts lines of the logs beside the findings. Where nothing but logs
is left, the verdict that they support is made here, and says that it comes from logs
alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pptrace import verdicts
from pptrace.lines import Sort, signal_name
from pptrace.logs import Event, LogEvidence, Process
from pptrace.records import Kind, RankLog, Record, Status, format_ranks
from pptrace.report import Finding, RankView, Report

__all__ = ["annotate", "combine"]

_SIGTERM = 15
_DEADLY = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})
_NEAR_NS = 300_000_000_000
"""How far the time of a line may be from a rank's own last sign of life; hosts log in
their local time, which need not be that of the reader."""
_MAX_LINES = 6
_MAX_ORDER = 8


@dataclass(frozen=True, slots=True)
class _Fate:
    """How a rank ended, by its logs."""

    rank: int
    how: str
    """``raised``, ``died`` or ``terminated``."""
    at_ns: int
    text: str
    """The headline and the traceback, or the name of the signal."""
    event: Event | None = None
    is_echo: bool = False


# -- before the diagnosis ----------------------------------------------------------


def combine(logs: Mapping[int, RankLog], evidence: LogEvidence) -> dict[int, RankLog]:
    """The logs of a run, with the ends of ranks that only text logs know.

    A rank that has neither black box nor dump gets an empty log if its end is known: it
    is a culprit then, whatever is left of the others.
    """
    combined = dict(logs)
    for fate in _fates(evidence, logs):
        log = logs.get(fate.rank)
        if fate.is_echo:
            continue  # a victim; its own records say what it waited for
        if log is None:
            world = max(
                [evidence.world_size, *(each.world_size for each in logs.values())]
            )
            log = RankLog(
                path="", rank=fate.rank, world_size=world, status=Status.RUNNING,
                incomplete="only its log is here", progress_ns=fate.at_ns,
                status_ns=fate.at_ns,
            )  # fmt: skip
        elif not _may_end(log):
            continue
        combined[fate.rank] = _ended(log, fate)
    return dict(sorted(combined.items()))


def _may_end(log: RankLog) -> bool:
    """Whether a rank's own records leave open how it ended."""
    return not log.alive and log.status in {Status.STARTING, Status.RUNNING}


def _ended(log: RankLog, fate: _Fate) -> RankLog:
    sign_ns = max(
        log.heartbeat_wall_ns,
        *(log.to_wall_ns(t) for t in (log.progress_ns, log.status_ns) if t),
        0,
    )
    at_ns = fate.at_ns if abs(fate.at_ns - sign_ns) < _NEAR_NS else sign_ns
    if fate.how == "terminated":
        return replace(log, terminated_by="SIGTERM", terminated_ns=at_ns)
    if fate.how == "died":
        return replace(log, alive=False, terminated_by=fate.text, terminated_ns=at_ns)
    at_ns -= log.to_wall_ns(0)
    records = log.records
    if not any(r.kind is Kind.EXCEPTION for r in records[-3:]):
        record = Record(log.next_seq, Kind.EXCEPTION, at_ns, text=fate.text)
        records = [*records, record]
    return replace(log, records=records, status=Status.RAISED, status_ns=at_ns)


def _fates(evidence: LogEvidence, logs: Mapping[int, RankLog]) -> Iterator[_Fate]:
    stopped = {e.fact.pid for e in evidence.events if e.fact.sort is Sort.STOP}
    found: dict[int, _Fate] = {}
    for rank in sorted(evidence.ranks):
        fate = _fate(evidence, rank, stopped)
        if fate is not None:
            found[rank] = fate
    for process in evidence.processes:
        reached = _rank_of(process, logs)
        if process.is_dead and reached is not None and reached not in found:
            found[reached] = _Fate(reached, "died", evidence.written_ns, "")
    yield from found.values()


def _rank_of(process: Process, logs: Mapping[int, RankLog]) -> int | None:
    if process.rank is not None:
        return process.rank
    same = [r for r, log in logs.items() if log.pid == process.pid > 0]
    return same[0] if len(same) == 1 else None


def _fate(evidence: LogEvidence, rank: int, stopped: set[int]) -> _Fate | None:
    events = evidence.of(rank)
    exits = [e for e in events if e.fact.sort is Sort.EXIT]
    raised = [e for e in events if e.is_traceback]
    code = exits[-1].fact.exit_code or 0 if exits else 0
    name = signal_name(code)
    at_ns = _time(evidence, (exits or raised or events)[-1]) if events else 0
    if name in _DEADLY and exits[-1].fact.pid not in stopped:
        return _Fate(rank, "died", at_ns, name, exits[-1])
    if raised:
        # The launcher's copy has the time, the rank's own may have the whole chain.
        event = max(raised, key=lambda e: (e.at_ns, len(e.text)))
        text = f"{event.headline}\n{event.text}"
        is_echo = any(e.fact.is_echo for e in raised if e.headline == event.headline)
        is_echo = is_echo or _is_echo(event)
        return _Fate(rank, "raised", _time(evidence, event), text, event, is_echo)
    if name == "SIGTERM" or (name in _DEADLY):
        return _Fate(rank, "terminated", at_ns, name, exits[-1])
    if name == "SIGABRT":
        by_watchdog = any(e.fact.sort in {Sort.TIMEOUT, Sort.END} for e in events)
        return None if by_watchdog else _Fate(rank, "died", at_ns, name, exits[-1])
    if code > 0:
        text = f"exit code {code}, without a traceback in the logs"
        return _Fate(rank, "raised", at_ns, text, exits[-1])
    return None


def _is_echo(event: Event) -> bool:
    from pptrace.lines import recognise

    fact = recognise(event.headline)
    return fact is not None and fact.is_echo


def _time(evidence: LogEvidence, event: Event) -> int:
    """Wall time of an event: its own, else that of what stands before it."""
    return event.at_ns or event.near_ns or evidence.written_ns


# -- after the diagnosis -----------------------------------------------------------


def annotate(
    report: Report, evidence: LogEvidence, logs: Mapping[int, RankLog]
) -> Report:
    """The report, with what the logs say.

    Args:
        report: the diagnosis of what `combine` gave.
        evidence: the logs.
        logs: the black boxes and dumps there were before that; may be empty.
    """
    findings = list(report.findings)
    if not logs:
        findings = [
            replace(f, sentence=f"from logs alone: {f.sentence}") for f in findings
        ]
    if not any(f.severity != "note" for f in findings):
        derived = _died(evidence, logs) or _derived(evidence, logs)
        if derived is not None:
            findings.insert(0, derived)
    lines = tuple(_lines(evidence, logs, findings[0] if findings else None))
    if findings:
        first = findings[0]
        findings[0] = replace(first, evidence=(*first.evidence, *lines))
    problems = [*report.problems, *evidence.problems]
    if not logs:
        problems.append(
            "no black box and no Flight Recorder dump: logs say who failed, not which"
            " isend or irecv was never matched"
        )
    world = max(report.world_size, evidence.world_size)
    return replace(
        report,
        world_size=world,
        findings=tuple(findings),
        ranks=tuple(_views(report, evidence, findings, world)),
        problems=tuple(problems),
    )


def _views(
    report: Report, evidence: LogEvidence, findings: Sequence[Finding], world: int
) -> Iterator[RankView]:
    views = {view.rank: view for view in report.ranks}
    culprits = set(findings[0].culprits) if findings else set()
    victims = set(findings[0].victims) if findings else set()
    for rank in range(world):
        view = views.get(rank, RankView(rank, "missing", "no black box", None))
        if view.state == "missing":
            said = _said(evidence, rank)
            if said:
                view = replace(view, state="unknown", doing=said)
        if not view.role:
            role = (
                "culprit" if rank in culprits else "victim" if rank in victims else ""
            )
            view = replace(view, role=role)
        yield view


def _said(evidence: LogEvidence, rank: int) -> str:
    """What a rank that left nothing else was doing, by its log."""
    events = evidence.of(rank)
    for sort in (
        Sort.TIMEOUT,
        Sort.STATUS,
        Sort.EXCEPTION,
        Sort.NCCL,
        Sort.MONITOR,
        Sort.EXIT,
    ):
        for event in reversed(events):
            if event.fact.sort is sort:
                return f"log: {_short(event)}"
    return "log: nothing of interest" if rank in evidence.ranks else ""


# -- words -------------------------------------------------------------------------


def _short(event: Event) -> str:
    """A phrase for an event: ``time-out of COALESCED #15 after 600 s``."""
    fact = event.fact
    if fact.sort is Sort.TIMEOUT:
        number = f" #{fact.seq}" if fact.seq > 0 else ""
        after = f" after {fact.ran_ms / 1000:g} s" if fact.ran_ms > 0 else ""
        return f"time-out of {fact.op}{number}{after}"
    if fact.sort is Sort.STATUS:
        return (
            f"work #{fact.seq} of group {fact.desc or fact.group} failed or timed out"
        )
    if fact.sort is Sort.EXIT and fact.exit_code is not None:
        name = signal_name(fact.exit_code)
        return f"ended by {name}" if name else f"exit code {fact.exit_code}"
    headline = event.headline
    return headline if len(headline) <= 120 else headline[:119] + "…"


def _clock(at_ns: int) -> str:
    if not at_ns:
        return ""
    moment = datetime.datetime.fromtimestamp(at_ns / 1e9)  # noqa: DTZ006 - as in the log
    return f" at {moment:%H:%M:%S}"


def _failures(evidence: LogEvidence) -> list[tuple[int, Event]]:
    """The first failure of each rank, in order of time; then of the lines."""
    sorts = {
        Sort.TIMEOUT, Sort.STATUS, Sort.EXCEPTION, Sort.NCCL, Sort.EXIT, Sort.MONITOR,
    }  # fmt: skip
    first: dict[int, Event] = {}
    for event in evidence.events:
        if event.rank is None or event.fact.sort not in sorts:
            continue
        known = first.get(event.rank)
        if known is None or (not known.at_ns and event.at_ns):
            first[event.rank] = event

    def place(item: tuple[int, Event]) -> tuple[bool, int, bool, int]:
        event = item[1]
        is_victim = event.fact.exit_code == -_SIGTERM or event.fact.is_echo
        return (is_victim, _time(evidence, event), not event.is_first, event.order)

    return sorted(first.items(), key=place)


def _lines(
    evidence: LogEvidence, logs: Mapping[int, RankLog], finding: Finding | None
) -> Iterator[str]:
    """Lines for the evidence of the verdict: the order of failures, what lines mean."""
    failures = _failures(evidence)
    if len(failures) > 1:
        parts = [
            f"r{rank} {_short(event)}{_clock(event.at_ns)}"
            for rank, event in failures[:_MAX_ORDER]
        ]
        more = f", … ({len(failures)} ranks)" if len(failures) > _MAX_ORDER else ""
        yield f"by their logs, first to fail first: {'; '.join(parts)}{more}"
    wanted = set(finding.culprits) if finding is not None else set()
    said: set[str] = set()
    events = [e for e in evidence.events if not e.is_traceback]
    events.sort(key=lambda e: (e.rank not in wanted, e.fact.sort is not Sort.TIMEOUT))
    for event in events:
        if event.fact.sort in {Sort.STOP, Sort.END, Sort.NOTE}:
            continue
        kind = f"{event.fact.sort}{event.fact.op}{event.fact.exit_code}"
        if kind not in said and len(said) < _MAX_LINES:
            said.add(kind)
            whose = f"r{event.rank}, " if event.rank is not None else ""
            yield f"{whose}{event.where}: {event.fact.words}"
    for process in evidence.processes[:_MAX_LINES]:
        rank = _rank_of(process, logs)
        whose = f"r{rank}" if rank is not None else "a process"
        state = "holds it for dead" if process.is_dead else "cannot reach it"
        yield f"{whose} (pid {process.pid} on {process.host}): NCCL's RAS {state}"


# -- verdicts of logs alone --------------------------------------------------------


def _died(evidence: LogEvidence, logs: Mapping[int, RankLog]) -> Finding | None:
    """Ranks that died without a word, while no record shows anybody waiting."""
    dead = [f for f in _fates(evidence, logs) if f.how == "died"]
    if not dead:
        return None
    first = min(dead, key=lambda fate: fate.at_ns)
    by = f"was ended by {first.text}" if first.text else "is dead, NCCL's RAS says"
    words = f" ({first.event.fact.words.rstrip('.')})" if first.event else ""
    sentence = f"from logs alone: r{first.rank} {by}{_clock(first.at_ns)}{words}"
    if len(dead) > 1:
        sentence += f"; so did {_names(f.rank for f in dead if f is not first)}"
    finding = _finding(verdicts.DIED, sentence, [f.rank for f in dead], evidence.ranks)
    return replace(finding, severity="error")


def _derived(evidence: LogEvidence, logs: Mapping[int, RankLog]) -> Finding | None:
    """A verdict from lines, where the diagnosis has none."""
    timeouts = _timeouts(evidence)
    if timeouts:
        return _crossed(timeouts) or _behind(evidence, timeouts) or _waits(
            evidence, logs, timeouts
        )  # fmt: skip
    failures = [
        (rank, event)
        for rank, event in _failures(evidence)
        if event.fact.exit_code not in {0, -_SIGTERM}
    ]
    loose = [
        e
        for e in evidence.events
        if e.fact.sort in {Sort.TIMEOUT, Sort.NCCL, Sort.MONITOR, Sort.KERNEL}
        or (e.fact.sort is Sort.EXIT and e.fact.exit_code not in {0, -_SIGTERM, None})
    ]
    if not failures and not loose:
        return None
    if failures:
        rank, event = failures[0]
        what = f"r{rank} was the first to fail ({_short(event)})"
    else:
        what = f"{loose[0].where} says: {_short(loose[0])}"
    sentence = (
        f"from logs alone, undetermined: {what}, and what the lines report are echoes or"
        " consequences, not a cause"
    )
    return _finding(verdicts.UNDETERMINED, sentence, (), [rank for rank, _ in failures])


def _timeouts(evidence: LogEvidence) -> dict[int, Event]:
    """The work each rank's watchdog gave up on, with its group if another line has it."""
    found: dict[int, Event] = {}
    for rank in sorted(evidence.ranks):
        given_up = [e for e in evidence.of(rank) if e.fact.sort is Sort.TIMEOUT]
        states = [e for e in evidence.of(rank) if e.fact.sort is Sort.STATUS]
        if not given_up and not states:
            continue
        event = (given_up or states)[0]
        for state in states:
            if not event.fact.group and state.fact.seq == event.fact.seq:
                fact = replace(event.fact, group=state.fact.group, desc=state.fact.desc)
                event = replace(event, fact=fact)
        found[rank] = event
    return found


def _finding(
    code: str, sentence: str, culprits: Iterable[int], victims: Iterable[int]
) -> Finding:
    guilty = tuple(sorted(set(culprits)))
    remedy = verdicts.VERDICTS[code].remedy
    if code == verdicts.UNDETERMINED:
        remedy = (
            (
                "collect the Flight Recorder dumps (`pptrace report --fr`), they hold peers"
                " and sizes; TORCH_FR_BUFFER_SIZE=2000 turns them on"
            ),
            "run again with PPTRACE=1: the black boxes say which op was never matched",
        )
    return Finding(
        code, verdicts.VERDICTS[code].name, "warning", sentence, guilty,
        tuple(sorted(set(victims) - set(guilty))), (), remedy,
    )  # fmt: skip


def _crossed(timeouts: Mapping[int, Event]) -> Finding | None:
    """One number, but different collectives: they are issued in different orders."""
    by_place: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, event in timeouts.items():
        fact = event.fact
        if fact.op and not fact.is_p2p and fact.seq > 0:
            place = by_place.setdefault((fact.group, fact.seq), {})
            place.setdefault(fact.op, []).append(rank)
    for (_, seq), ops in by_place.items():
        if len(ops) > 1:
            said = " but ".join(f"{op} on {_names(ranks)}" for op, ranks in ops.items())
            sentence = (
                f"from logs alone: collective #{seq} is {said}: the ranks issue the"
                " collectives of one group in different orders"
            )
            ranks = [r for each in ops.values() for r in each]
            return _finding(verdicts.COLLECTIVE_ORDER, sentence, ranks, ())
    return None


def _behind(evidence: LogEvidence, timeouts: Mapping[int, Event]) -> Finding | None:
    """Ranks that say of themselves that they have not enqueued what others wait in."""
    collectives = {
        r: e
        for r, e in timeouts.items()
        if e.fact.op and not e.fact.is_p2p and e.fact.seq > 0
    }
    if not collectives or len(collectives) < len(timeouts):
        return None
    seq = max(e.fact.seq for e in collectives.values())
    event = next(e for e in collectives.values() if e.fact.seq == seq)
    enqueued: dict[int, int] = {}
    for each in evidence.events:
        if each.rank is not None and each.fact.enqueued >= -1:
            known = enqueued.get(each.rank, -1)
            enqueued[each.rank] = max(known, each.fact.enqueued)
    late = [r for r, last in enqueued.items() if last < seq and r not in collectives]
    if not late:
        return None
    group = event.fact.desc or event.fact.group
    of_group = f" of group {group}" if group else ""
    sentence = (
        f"from logs alone: {event.fact.op} #{seq}{of_group} was entered by"
        f" {_names(collectives)} but not by {_names(late)}, whose last work is"
        f" #{max(enqueued[r] for r in late)}"
    )
    return _finding(verdicts.COLLECTIVE_NOT_ENTERED, sentence, late, collectives)


def _waits(
    evidence: LogEvidence, logs: Mapping[int, RankLog], timeouts: Mapping[int, Event]
) -> Finding:
    """Ranks waited and nothing says for whom."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for rank, event in timeouts.items():
        key = (event.fact.op, event.fact.desc or event.fact.group, event.fact.seq)
        groups.setdefault(key, []).append(rank)
    parts = []
    for (op, group, seq), ranks in list(groups.items())[:4]:
        of_group = f" of group {group}" if group else ""
        number = f" #{seq}" if seq > 0 else ""
        parts.append(f"{_names(ranks)} in {op or 'work'}{number}{of_group}")
    sentence = (
        f"{'from logs alone, ' if not logs else ''}undetermined: NCCL's watchdog gave up"
        f" on {', '.join(parts)}; no rank raised or died before, and these lines name no"
        " peer"
    )
    sizes = {e.fact.numel for e in timeouts.values() if _is_collective(e)}
    if len(sizes) > 1 and len(groups) == 1:
        said = ", ".join(f"r{r}: {e.fact.numel[0]}" for r, e in timeouts.items())
        sentence += f"; the ranks disagree on the number of elements ({said})"
    silent = [r for r in range(evidence.world_size) if r not in timeouts]
    if silent and len(silent) <= max(1, len(timeouts)):
        verb = "has" if len(silent) == 1 else "have"
        sentence += (
            f"; {_names(silent)} {verb} reported no time-out, so {'it' if verb == 'has' else 'they'}"
            " waited in nothing that NCCL knows of: look there first"
        )
    return _finding(verdicts.UNDETERMINED, sentence, (), timeouts)


def _is_collective(event: Event) -> bool:
    return bool(event.fact.op) and not event.fact.is_p2p


def _names(ranks: Iterable[int]) -> str:
    ordered = tuple(sorted(set(ranks)))
    if len(ordered) <= 4:
        return ", ".join(f"r{r}" for r in ordered)
    return f"r[{format_ranks(ordered)}]"
