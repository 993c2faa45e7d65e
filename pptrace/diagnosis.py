"""The diagnosis: from the black boxes of a run to a report with its verdict.

Pair the ops, build the wait-for graph, explain its roots, look for settings and
payloads that differ, and put the culprit before the victims. Cost grows with what is
in the rings and what is pending, not with what ran.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pptrace import causes, differences, holders, verdicts
from pptrace.matching import match
from pptrace.records import (
    NONE,
    Direction,
    Flag,
    Kind,
    RankLog,
    Record,
    Transport,
)
from pptrace.report import Finding, OpView, RankView, Report, WaitEdge
from pptrace.scene import (
    Cause,
    Scene,
    doing,
    edge_text,
    headline,
    names,
    op_text,
    owed_text,
)
from pptrace.states import Life, observe
from pptrace.waitfor import Root, WaitFor

__all__ = ["diagnose"]

_MAX_CHAIN = 16
_MAX_WAITS = 20_000


def diagnose(
    logs: Mapping[int, RankLog],
    *,
    now_wall_ns: int | None = None,
    run: str = "",
    problems: Sequence[str] = (),
    trigger: str = "",
) -> Report:
    """Say why a run hangs, from what its ranks recorded.

    Args:
        logs: what could be read, by rank; missing ranks are allowed.
        now_wall_ns: the moment that ages refer to; None takes the clock if a process
            is alive, else the last sign of life.
        run: path or name of the run, for the report.
        problems: inputs that could not be used, one line each; passed on.
        trigger: what made the job ask; with one, little patience is needed.
    """
    now_ns = _now(logs.values()) if now_wall_ns is None else now_wall_ns
    states = observe(logs, now_ns)
    views = match(logs)
    graph = WaitFor(states, views)
    scene = Scene(states, graph, views, now_ns, trigger)
    findings, culprits = _findings(scene)
    world = max((log.world_size for log in logs.values()), default=0)
    mismatched = differences.mismatches(scene)
    return Report(
        run=run,
        created=_iso(now_ns),
        world_size=max(world, max(logs, default=-1) + 1),
        findings=findings,
        ranks=_rank_views(scene, world, findings),
        pending=_pending(
            scene, {(p.send.rank, p.send.record.seq) for p, _ in mismatched}
        ),
        waits=_waits(scene),
        chain=_chain(scene, findings, culprits),
        problems=tuple(problems),
        environment=_environment(logs),
        trigger=trigger,
    )


def _now(logs: Iterable[RankLog]) -> int:
    """The clock if a process lives; else the last sign of life in any file."""
    signs = [0]
    for log in logs:
        if log.alive:
            return time.time_ns()
        signs += [log.heartbeat_wall_ns, log.start_wall_ns, log.terminated_ns]
        signs += [log.to_wall_ns(t) for t in (log.progress_ns, log.status_ns) if t]
    return max(signs)


def _iso(wall_ns: int) -> str:
    moment = datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.timezone.utc)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _environment(logs: Mapping[int, RankLog]) -> dict[str, object]:
    for log in logs.values():
        if log.environment:
            return dict(log.environment.get("environment", log.environment))
    return {}


# -- findings ------------------------------------------------------------------------


def _findings(scene: Scene) -> tuple[tuple[Finding, ...], set[int]]:
    """All findings, the verdict first, and the culprits of the verdict."""
    roots = scene.graph.roots()
    found = [*differences.settings(scene), *_ended(scene)]
    configured = {
        r for c in found if c.code == verdicts.CONFIG_DIFFERS for r in c.nodes
    }
    explained = [c for root in roots if (c := _explain(scene, root, configured))]
    found += _merge(scene, explained)
    is_explained = any(c.severity == "error" for c in found)
    found += differences.payloads(scene)
    found += differences.silent_conflicts(scene, is_hang_explained=is_explained)
    if any(c.severity == "error" for c in found):
        # Something is wrong after all, so what merely stands still is no riddle.
        found = [c for c in found if c.code != verdicts.NO_MISMATCH]
    else:
        found += _echoes(scene)
    if not found:
        found += _from_outside(scene)
    ordered = sorted(_fold(found), key=_order)
    findings = tuple(_to_finding(c) for c in ordered)
    return findings, set(findings[0].culprits) if findings else set()


def _order(cause: Cause) -> tuple[int, int, int]:
    severity = ("error", "warning", "note").index(cause.severity)
    return (severity, cause.code != verdicts.CONFIG_DIFFERS, cause.at_ns)


def _to_finding(cause: Cause) -> Finding:
    verdict = verdicts.VERDICTS[cause.code]
    sentence = cause.sentence
    return Finding(
        code=cause.code,
        name=verdict.name,
        severity=cause.severity,
        sentence=sentence[:1].lower() + sentence[1:]
        if sentence[:2] == "R"
        else sentence,
        culprits=tuple(sorted(cause.culprits)),
        victims=tuple(sorted(cause.victims)),
        evidence=cause.evidence,
        remedy=cause.remedy or verdict.remedy,
    )


def _explain(scene: Scene, root: Root, configured: set[object]) -> Cause | None:
    """The cause at a root, unless a difference in settings explains it already."""
    near = {*root.ranks, *(e.waiter for e in root.incoming)}
    if configured & near:
        return None
    return causes.explain(scene, root)


def _ended(scene: Scene) -> list[Cause]:
    """Ranks that raised or died: culprits, whether somebody waits already or not."""
    states = scene.states.values()
    found = [
        holders.raised(scene, s)
        for s in states
        if s.life is Life.RAISED and not s.is_echo
    ]
    dead = [s for s in states if s.life is Life.DEAD]
    if dead and len(dead) == len(scene.states) and not _anything_open(scene):
        return found  # all left without a word, with nothing open: os._exit at the end
    return found + [holders.died(scene, s) for s in dead]


def _anything_open(scene: Scene) -> bool:
    return any(
        s.action or s.step or scene.graph.pending[s.rank] or s.collectives
        for s in scene.states.values()
    )


def _echoes(scene: Scene) -> list[Cause]:
    """Nothing explains it, but ranks raised communication errors: the first is named."""
    echoes = [s for s in scene.states.values() if s.life is Life.RAISED and s.is_echo]
    if not echoes:
        return []
    return [holders.raised(scene, min(echoes, key=lambda s: s.until_ns))]


def _from_outside(scene: Scene) -> list[Cause]:
    ended = [s for s in scene.states.values() if s.life is Life.TERMINATED]
    if not ended:
        return []
    first = min(ended, key=lambda s: s.until_ns)
    by = first.log.terminated_by or headline(first.exception)
    all_wait = all(scene.graph.blocked(rank) for rank in scene.states)
    how = (
        "when every rank had only just begun to wait: too short a time to call it stuck"
        if all_wait
        else "while the job was making progress; nothing was stuck"
    )
    sentence = f"{names([s.rank for s in ended])} ended by {by} from outside {how}"
    return [
        Cause(verdicts.ENDED_FROM_OUTSIDE, "note", sentence, (), at_ns=first.until_ns)
    ]


def _merge(scene: Scene, found: list[Cause]) -> list[Cause]:
    """One finding where several roots show the same thing."""
    kept: list[Cause] = []
    seen: set[tuple[object, ...]] = set()
    quiet: list[Cause] = []
    for cause in found:
        if cause.code == verdicts.NO_MISMATCH:
            quiet.append(cause)
            continue
        key: tuple[object, ...] = (
            cause.code,
            cause.culprits,
            cause.sentence if not cause.culprits else "",
        )
        if cause.code == verdicts.SETUP_IN_PROGRESS:
            key = (cause.code, cause.fold)
        if key not in seen:
            seen.add(key)
            kept.append(cause)
    if quiet:
        kept.append(_no_mismatch(scene, quiet))
    return kept


def _no_mismatch(scene: Scene, quiet: list[Cause]) -> Cause:
    ranks = sorted({r for c in quiet for r in c.victims})
    if holders.is_doubtful(scene, ranks):
        return holders.doubtful(scene, ranks)
    who = names(ranks) if ranks else "the ranks"
    sentence = (
        f"no logical mismatch found: everything that {who}"
        f" wait{'s' if len(ranks) == 1 else ''} for is posted on both sides; missing,"
        " extra, misordered or misgrouped ops and ended ranks are ruled out, the"
        " network, the GPUs and very large unequal batches are not"
    )
    evidence = tuple(line for c in quiet for line in c.evidence)[:8]
    return Cause(
        verdicts.NO_MISMATCH,
        "warning",
        sentence,
        (),
        tuple(ranks),
        evidence,
        at_ns=min(c.at_ns for c in quiet),
    )


def _fold(found: list[Cause]) -> list[Cause]:
    """Fold the same fault of several replicas into one finding with a count."""
    groups: dict[object, list[Cause]] = {}
    for number, cause in enumerate(found):
        key = (
            (cause.code, cause.severity, cause.fold)
            if cause.fold and cause.place is not None
            else number
        )
        groups.setdefault(key, []).append(cause)
    folded = []
    for same in groups.values():
        same.sort(key=lambda c: (c.at_ns, c.culprits))
        places = {c.place for c in same}
        if len(same) == 1 or len(places) < len(same):
            folded += same
            continue
        first, others = same[0], same[1:]
        culprits = {r for c in same for r in c.culprits}
        victims = {r for c in same for r in c.victims} - culprits
        rest = names([r for c in others for r in c.culprits])
        times = "1 other place" if len(others) == 1 else f"{len(others)} other places"
        folded.append(
            replace(
                first,
                sentence=f"{first.sentence} (the same in {times}: {rest})",
                culprits=tuple(culprits),
                victims=tuple(victims),
            )
        )
    return folded


# -- what each rank does -----------------------------------------------------------------


def _rank_views(
    scene: Scene, world: int, findings: Sequence[Finding]
) -> tuple[RankView, ...]:
    roles: dict[int, str] = {}
    for finding in findings:
        if finding.severity == "note" and finding is not findings[0]:
            continue
        for role, ranks in (("culprit", finding.culprits), ("victim", finding.victims)):
            for rank in ranks:
                if roles.get(rank) != "culprit":
                    roles[rank] = role
    last = max([world, *(r + 1 for r in scene.states)])
    return tuple(_rank_view(scene, rank, roles.get(rank, "")) for rank in range(last))


def _rank_view(scene: Scene, rank: int, role: str) -> RankView:
    state = scene.states.get(rank)
    if state is None:
        return RankView(rank, Life.MISSING.value, "no black box", None, role)
    text, since = doing(scene, rank)
    run = scene.schedule(rank)
    return RankView(
        rank=rank,
        state=state.life.value,
        doing=text,
        since_s=_round(since),
        role=role,
        host=state.log.host,
        pid=state.log.pid,
        stages=run.stages if run is not None else (),
        step=state.last_step.step if state.last_step is not None else None,
        last_record_s=_round((scene.now_ns - state.last_ns) / 1e9),
        pending=len(scene.graph.pending[rank]),
    )


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 3)


# -- ops that are not complete -----------------------------------------------------------

_REASONS = ("unmatched", "mismatch", "in call", "stuck")


def _pending(scene: Scene, mismatched: set[tuple[int, int]]) -> tuple[OpView, ...]:
    views = []
    for rank, records in scene.graph.pending.items():
        state = scene.states[rank]
        # The waits of a rank that raised ended with it; what it left unmatched counts.
        is_over = state.life is Life.RAISED and not state.is_echo
        views += [
            _op_view(scene, rank, r, mismatched)
            for r in records
            if not is_over or scene.graph.is_unposted(rank, r)
        ]
    return tuple(sorted(views, key=lambda v: _REASONS.index(v.reason)))


def _op_view(
    scene: Scene, rank: int, record: Record, mismatched: set[tuple[int, int]]
) -> OpView:
    reason, detail = _reason(scene, rank, record, mismatched)
    return OpView(
        rank=rank,
        direction="isend" if record.direction is Direction.SEND else "irecv",
        peer=record.peer,
        edge=edge_text(rank, record),
        label=record.label,
        stage=None if record.stage == NONE else record.stage,
        microbatch=None if record.microbatch == NONE else record.microbatch,
        tensor_index=record.tensor_index,
        shape=record.signature.shape,
        dtype=record.signature.dtype,
        nbytes=record.nbytes,
        age_s=round(scene.states[rank].age_ns(record.posted_ns) / 1e9, 3),
        reason=reason,
        transport="group" if record.transport is Transport.GROUP else "pair",
        coalesced=bool(record.flags & Flag.COALESCED),
        batch=record.batch,
        batch_ops=tuple(op_text(r) for r in scene.batch(rank, record)),
        k=record.k,
        group=record.group.label if record.group is not None else "",
        desc=record.text,
        step=record.step if record.step > 0 else None,
        detail=detail,
    )


def _reason(
    scene: Scene, rank: int, record: Record, mismatched: set[tuple[int, int]]
) -> tuple[str, str]:
    in_call = record.returned_ns == 0
    where = "the host is inside the call" if in_call else ""
    if scene.graph.is_unposted(rank, record):
        owed = f"r{record.peer} has not posted {owed_text(rank, record)}"
        return "unmatched", f"{owed}; {where}" if where else owed
    if (rank, record.seq) in mismatched:
        return "mismatch", where
    if in_call:
        return "in call", ""
    return "stuck", ""


# -- who waits for whom ------------------------------------------------------------------


def _waits(scene: Scene) -> tuple[WaitEdge, ...]:
    edges: list[WaitEdge] = []
    for node in scene.graph.edges:
        if isinstance(node, int):
            edges += dict.fromkeys(
                WaitEdge(node, holder, _why(node, op, holder))
                for edge, holder in scene.graph.waits_on(node)
                for op in (edge.op,)
            )
        if len(edges) > _MAX_WAITS:
            break
    return tuple(sorted(edges, key=lambda e: (e.waiter, e.holder)))


def _why(waiter: int, op: Record, holder: int) -> str:
    if op.kind is Kind.COLLECTIVE:
        return f"r{waiter} is in {op.text} #{op.k}, which r{holder} has not entered"
    if op.peer == holder:
        return f"r{waiter} waits for {op_text(op)}"
    return f"r{waiter} sets up the communicator of {op_text(op)}, and r{holder} has not come"


def _chain(
    scene: Scene, findings: Sequence[Finding], culprits: set[int]
) -> tuple[str, ...]:
    """From the farthest victim to the culprit and, if it is in one, around its cycle."""
    if not findings:
        return ()
    goals = culprits or set(findings[0].victims[:1])
    outgoing: dict[int, list[tuple[int, str]]] = {}
    incoming: dict[int, list[tuple[int, str]]] = {}
    direct: dict[int, list[tuple[int, str]]] = {}
    for node in scene.graph.edges:
        if isinstance(node, int):
            for edge, holder in scene.graph.waits_on(node):
                why = _why(node, edge.op, holder)
                outgoing.setdefault(node, []).append((holder, why))
                incoming.setdefault(holder, []).append((node, why))
                if edge.op.kind is Kind.OP and edge.op.peer == holder:
                    direct.setdefault(holder, []).append((node, why))
    # Op by op tells more than "has not come to the set-up", so that way goes first.
    lines, last = _to_goal(direct, goals)
    if not lines:
        lines, last = _to_goal(incoming, goals)
    around = _onward(outgoing, last, goals)
    if around:
        lines += [line for line in around if line not in lines]
    elif last in scene.states:
        text, since = doing(scene, last)
        lasting = f" for {since:.1f} s" if since is not None else ""
        lines.append(f"r{last}: {text}{lasting}")
    else:
        lines.append(f"r{last}: no black box")
    if len(lines) > _MAX_CHAIN:
        cut = len(lines) - _MAX_CHAIN
        lines = [*lines[:8], f"… {cut} more …", *lines[8 + cut :]]
    return tuple(lines)


def _to_goal(
    incoming: Mapping[int, list[tuple[int, str]]], goals: set[int]
) -> tuple[list[str], int]:
    """The longest of the shortest ways that lead to a goal, and the goal it reaches."""
    following: dict[int, tuple[int, str]] = {}
    todo = deque(sorted(goals))
    farthest = todo[0] if todo else NONE
    while todo:
        holder = todo.popleft()
        for waiter, why in incoming.get(holder, []):
            if waiter not in following and waiter not in goals:
                following[waiter] = (holder, why)
                farthest = waiter
                todo.append(waiter)
    lines = []
    rank = farthest
    while rank in following:
        rank, why = following[rank]
        lines.append(why)
    return lines, rank


def _onward(
    outgoing: Mapping[int, list[tuple[int, str]]], start: int, goals: set[int]
) -> list[str]:
    """Whom the culprit waits for itself: around the cycle, back to where it began."""
    lines: list[str] = []
    rank = start
    seen: set[int] = set()
    while rank not in seen and rank in outgoing and len(lines) < _MAX_CHAIN:
        seen.add(rank)
        ways = outgoing[rank]
        rank, why = next(
            (w for w in ways if w[0] in goals and w[0] not in seen), ways[0]
        )
        lines.append(why)
    return lines
