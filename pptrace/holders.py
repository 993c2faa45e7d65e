"""The rank that others wait for and that waits for nobody: slow, idle, gone, unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pptrace import verdicts
from pptrace.cycles import collective_cause, set_up_cause
from pptrace.records import NONE, Direction, Flag, Kind, Record
from pptrace.scene import (
    CYCLE_NS,
    PATIENCE_NS,
    Cause,
    Scene,
    Side,
    began_ns,
    behind_text,
    clock_text,
    doing,
    group_place,
    headline,
    hubs_at,
    label_key,
    names,
    now_line,
    op_evidence,
    op_text,
    owed_text,
    place_text,
    seconds_text,
    short_text,
    stack_lines,
    victims_of,
    waiting_ops,
    waiting_text,
)
from pptrace.states import Life, RankState
from pptrace.waitfor import Root, Why

__all__ = [
    "died",
    "doubtful",
    "explain_single",
    "is_doubtful",
    "is_unknown",
    "missing_file",
    "nothing_wrong",
    "raised",
    "traceback_lines",
    "untrusted",
]

_RAISED_AT = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_CHAINED = re.compile(r"\n(?:The above exception was|During handling of)")


def explain_single(scene: Scene, root: Root, rank: int) -> Cause | None:
    """The cause at one rank that waits for nobody, by what it is doing; None if fine."""
    state = scene.states[rank]
    blocked = scene.graph.blocked(rank)
    if blocked and not state.is_over:
        if any(r.flags & Flag.ANY_SOURCE for r in blocked):
            return untrusted(scene, root)
        return nothing_wrong(scene, root)
    if not root.incoming:
        return None
    for_set_up = _needs_more_than_peers(scene, root)
    if state.life is Life.EXITED:
        return set_up_cause(scene, root) if for_set_up else _exited(scene, root, state)
    if state.life is Life.DISABLED:
        return untrusted(scene, root)
    if state.action is not None or state.step is not None:
        return _straggler(scene, root, state)
    if for_set_up:
        return set_up_cause(scene, root)
    if state.last_step is not None:
        return _between_steps(scene, root, state)
    if any(e.why is Why.UNPOSTED for e in root.incoming):
        return _not_posted(scene, root, state)
    if hubs_at(root, "collective"):
        return _not_entered(scene, root)
    return set_up_cause(scene, root)


def _needs_more_than_peers(scene: Scene, root: Root) -> bool:
    """Whether a group's set-up lacks ranks that no waiting op is about."""
    peers = {e.op.peer for e in root.incoming if e.why is Why.UNPOSTED}
    return any(
        not peers.issuperset(scene.graph.missing(hub))
        for hub in hubs_at(root, "set-up")
    )


def _root_cause(
    scene: Scene,
    root: Root,
    state: RankState,
    code: str,
    severity: str,
    sentence: str,
    evidence: Sequence[str] = (),
) -> Cause:
    ops = list(waiting_ops(root))
    waiters = [(e.waiter, e.op) for e in root.incoming]
    place: object = None
    fold: tuple[object, ...] = ()
    if ops:
        fold, place = group_place(ops[0][1], (state.rank,))
        fold = (label_key(*(op for _, op in ops)), *fold)
    lines = [op_evidence(scene, rank, op) for rank, op in ops[:6]]
    return Cause(
        code,
        severity,
        sentence,
        (state.rank,),
        victims_of(scene, root, (state.rank,)),
        (*lines, *evidence),
        at_ns=began_ns(scene, waiters),
        fold=fold,
        place=place,
    )


def _straggler(scene: Scene, root: Root, state: RankState) -> Cause:
    text, since = doing(scene, state.rank)
    lasting = f" for {seconds_text(since)}" if since is not None else ""
    sentence = (
        f"r{state.rank} is {_liveness(state)} and {text}{lasting}: a straggler, not a"
        f" deadlock; {waiting_text(root, state.rank)}"
    )
    return _root_cause(
        scene, root, state, verdicts.STRAGGLER, "note", sentence, stack_lines(state)
    )


def _liveness(state: RankState) -> str:
    if state.life is Life.TERMINATED:
        return f"alive until it was ended by {state.log.terminated_by or 'a signal'}"
    return "alive"


def _between_steps(scene: Scene, root: Root, state: RankState) -> Cause:
    assert state.last_step is not None
    quiet = max(0, state.until_ns - state.last_ns) / 1e9
    sentence = (
        f"r{state.rank} is {_liveness(state)} but outside the schedule for"
        f" {seconds_text(quiet)}, after step {state.last_step.step} (data iterator,"
        f" optimizer or other host code), not in communication;"
        f" {waiting_text(root, state.rank)}"
    )
    return _root_cause(
        scene,
        root,
        state,
        verdicts.BETWEEN_STEPS,
        "warning",
        sentence,
        stack_lines(state),
    )


def _not_posted(scene: Scene, root: Root, state: RankState) -> Cause:
    waiter, op = min(waiting_ops(root), key=lambda item: scene.wall_ns(*item))
    is_send = op.direction is Direction.SEND
    code = verdicts.RECV_NOT_POSTED if is_send else verdicts.SEND_NOT_POSTED
    call = ""
    if op.returned_ns == 0:
        low, high = sorted((waiter, op.peer))
        first = f"the first op of pair {low}:{high}" if op.k == 0 else "the call"
        call = f" is blocked inside the call ({first}) and"
    text, since = short_text(scene, state.rank), doing(scene, state.rank)[1]
    lasting = f" for {seconds_text(since)}" if since is not None else ""
    sentence = (
        f"r{waiter}{call} waits in {op_text(op)} for {seconds_text(scene.age_s(waiter, op))},"
        f" and r{state.rank} has not posted {owed_text(waiter, op)}: it is"
        f" {_liveness(state)} and {text}{lasting}"
    )
    return _root_cause(
        scene, root, state, code, "warning", sentence, stack_lines(state)
    )


def _exited(scene: Scene, root: Root, state: RankState) -> Cause:
    ops = list(waiting_ops(root))
    owed = ", ".join(owed_text(w, op) for w, op in ops[:6])
    if ops and all(e.why is Why.GONE for e in root.incoming):
        sentence = (
            f"r{state.rank} finished normally before {owed} was complete:"
            f" {waiting_text(root, state.rank)} in vain"
        )
        return _root_cause(scene, root, state, verdicts.EXITED, "error", sentence)
    collectives = [e.op for e in root.incoming if e.op.kind is Kind.COLLECTIVE]
    if not owed and collectives:
        owed = f"{collectives[0].text} #{collectives[0].k}"
    count = "" if len(ops) < 2 else f"{len(ops)} unmatched ops, "
    sentence = (
        f"r{state.rank} finished normally and owes {count}{owed}:"
        f" {waiting_text(root, state.rank)} in vain"
    )
    return _root_cause(scene, root, state, verdicts.EXITED, "error", sentence)


def _not_entered(scene: Scene, root: Root) -> Cause:
    hub = hubs_at(root, "collective")[0]
    entered = scene.graph.collectives(hub)
    group = scene.graph.groups[hub.group]
    missing = [r for r in scene.graph.missing(hub) if r in scene.states]
    name = next((r.text for r in entered.values()), "a collective")
    sentence = (
        f"{name} #{hub.k} of group {group.label} was entered by {names(list(entered))} but"
        f" not by {names(missing)}: "
        + "; ".join(f"r{r} {short_text(scene, r)}" for r in missing[:4])
    )
    cause = collective_cause(
        scene, root, verdicts.COLLECTIVE_NOT_ENTERED, sentence, missing
    )
    cause.severity = "warning"
    return cause


def nothing_wrong(scene: Scene, root: Root) -> Cause:
    """Everything has its partner: in set-up on both sides, or no mismatch at all."""
    ranks = [r for r in root.ranks if r in scene.states]
    held = [(r, b) for r in ranks for b in scene.graph.blocked(r) if b.kind is Kind.OP]
    calls = [(r, b) for r, b in held if b.returned_ns == 0]
    victims = victims_of(scene, root, ())
    if calls and len(calls) == len(held):
        rank, op = calls[0]
        low, high = sorted((rank, op.peer))
        since = clock_text(scene.wall_ns(rank, op))
        sentence = (
            f"r{low} and r{high} are both inside the call since {since}"
            f" ({op_text(op)} on r{rank}): the set-up of pair ({low}, {high}) is in"
            " progress, no op is missing"
        )
        return Cause(
            verdicts.SETUP_IN_PROGRESS,
            "warning",
            sentence,
            (),
            victims,
            tuple(op_evidence(scene, *side) for side in calls[:4]),
            at_ns=began_ns(scene, calls),
            fold=("in call", min(low, high)),
            place=None,
        )
    records = held or [(e.waiter, e.op) for e in root.incoming]
    return Cause(
        verdicts.NO_MISMATCH,
        "warning",
        "",
        (),
        victims,
        tuple(
            op_evidence(scene, *s) if s[1].kind is Kind.OP else now_line(scene, s[0])
            for s in records[:4]
        ),
        at_ns=began_ns(scene, records),
    )


def is_unknown(root: Root) -> bool:
    """Whether only guesses lead to a root, for want of counts that can be trusted."""
    edges = root.inside or root.incoming
    if root.is_cycle:
        return any(e.why is Why.UNKNOWN for e in edges)
    return bool(edges) and all(e.why is Why.UNKNOWN for e in edges)


def untrusted(scene: Scene, root: Root) -> Cause:
    """Counts cannot be trusted: say what is known and why that is not enough."""
    ranks = sorted({*root.ranks, *(e.waiter for e in root.incoming)})
    waiting = waiting_text(root, NONE) or f"{names(ranks)} are stuck"
    ops = list(waiting_ops(root))
    return _undetermined(scene, ranks, ops, waiting, victims_of(scene, root, ()))


def doubtful(scene: Scene, ranks: Sequence[int]) -> Cause:
    """Everything seems posted on both sides, but counts cannot be trusted."""
    waiting = f"{names(ranks)} wait for ops that seem to be posted on both sides"
    ops = [(r, op) for r in ranks for op in scene.graph.pending[r]]
    return _undetermined(scene, ranks, ops, waiting, tuple(ranks))


def is_doubtful(scene: Scene, ranks: Iterable[int]) -> bool:
    """Whether counts of what these ranks have pending cannot be trusted."""
    ops = [(r, op) for r in ranks for op in scene.graph.pending[r]]
    return bool(_doubts(scene, ranks, ops))


def _doubts(scene: Scene, ranks: Iterable[int], ops: Iterable[Side]) -> list[str]:
    """Why counts of these ranks, or of the channels of these ops, may be wrong."""
    found = [
        f"r{r}: {scene.states[r].log.incomplete}"
        for r in ranks
        if r in scene.states and scene.states[r].log.incomplete
    ]
    for rank, op in ops:
        if op.group is not None and not op.flags & Flag.ANY_SOURCE:
            found += filter(None, [scene.views[op.channel(rank)].incomplete])
    return list(dict.fromkeys(found))


def _undetermined(
    scene: Scene,
    ranks: Sequence[int],
    ops: Sequence[Side],
    waiting: str,
    victims: tuple[int, ...],
) -> Cause:
    known = [r for r in ranks if r in scene.states]
    reasons = _doubts(scene, known, ops)
    sentence = f"undetermined: {waiting}"
    if reasons:
        sentence += f", but counts of ops cannot be trusted ({'; '.join(reasons[:3])})"
    else:
        sentence += ", but what the other side has posted is not known"
    return Cause(
        verdicts.UNDETERMINED,
        "warning",
        sentence,
        (),
        victims,
        tuple(now_line(scene, r) for r in known[:6]),
        ("run again with pptrace enabled on all ranks before the first op",),
        scene.now_ns,
    )


def missing_file(scene: Scene, root: Root, rank: int) -> Cause | None:
    """What is waited for from a rank whose black box is not here."""
    waiters = [scene.age_s(e.waiter, e.op) * 1e9 for e in root.incoming]
    limit = PATIENCE_NS if scene.trigger else CYCLE_NS
    if max(waiters, default=0.0) < limit:
        return None
    sentence = (
        f"undetermined: {waiting_text(root, rank)}, and the black box of r{rank} is not"
        " here, so what it has posted is not known"
    )
    lines = [op_evidence(scene, w, op) for w, op in list(waiting_ops(root))[:4]]
    return Cause(
        verdicts.UNDETERMINED,
        "warning",
        sentence,
        (),
        victims_of(scene, root, ()),
        tuple(lines),
        (f"the black box of r{rank} would settle it (rank{rank:05d}.pptrace)",),
        scene.now_ns,
    )


def traceback_lines(rank: int, exception: Record | None) -> tuple[str, ...]:
    """Where an exception was raised, and its whole text, as evidence."""
    if exception is None or "\n" not in exception.text:
        return ()
    first = _CHAINED.split(exception.text)[0]  # the root cause is printed first
    frames = _RAISED_AT.findall(first)
    where = [f"r{rank} raised at {p}:{n} in {name}" for p, n, name in frames[-1:]]
    return (*where, f"r{rank} raised:\n{exception.text.strip()}")


def _owed(scene: Scene, rank: int, doing_now: Record | None) -> list[Side]:
    """Ops of others that this rank has not answered: it owes their partners.

    First those of the microbatch it was at, then the oldest.
    """
    owed = [
        *scene.unmatched_at(rank, Direction.SEND),
        *scene.unmatched_at(rank, Direction.RECV),
    ]
    label = doing_now.label if doing_now is not None else ""
    return sorted(owed, key=lambda item: (item[1].label != label, scene.wall_ns(*item)))


def raised(scene: Scene, state: RankState) -> Cause:
    """A rank ended in an exception of its own."""
    rank, exception = state.rank, state.exception
    victims = tuple(sorted(set(scene.graph.victims((rank,))) - {rank}))
    place = place_text(exception)
    owed = _owed(scene, rank, exception)
    sentence = f"r{rank} raised {headline(exception)}"
    sentence += f" in {place}" if place else ""
    sentence += f" at {clock_text(state.until_ns)}"
    if owed:
        sentence += f" before posting {owed_text(*owed[0])}"
    if victims:
        sentence += f"; {names(victims)} {'is a victim' if len(victims) == 1 else 'are victims'}"
    code = verdicts.RAISED
    found = re.search(r"Expecting (\d+) (\w+) but got (\d+)", headline(exception))
    if found:
        code = verdicts.BATCH_TOO_SMALL
        sentence = (
            f"r{rank}'s batch gives {found[3]} chunks for n={found[1]} microbatches"
            f" ({headline(exception)}), at {clock_text(state.until_ns)}"
        ) + behind_text(victims)
    lines = [f"waiting: {op_evidence(scene, *item)}" for item in owed[:4]]
    stage = exception.stage if exception else NONE
    return Cause(
        code,
        "error",
        sentence,
        (rank,),
        victims,
        (*traceback_lines(rank, exception), *lines),
        at_ns=state.until_ns,
        fold=(headline(exception), stage, place),
        place=rank,
    )


def died(scene: Scene, state: RankState) -> Cause:
    """A rank's process is gone without a word."""
    rank, log = state.rank, state.log
    victims = tuple(sorted(set(scene.graph.victims((rank,))) - {rank}))
    owed = _owed(scene, rank, state.action)
    process = f"pid {log.pid} on {log.host or 'an unknown host'}"
    how = "is gone without a word"
    if log.terminated_by:
        how = f"was ended by {log.terminated_by}"
    elif log.alive is None:
        how = "gives no sign of life any more"
    text = doing(scene, rank)[0].removeprefix("was: ")
    last = (scene.now_ns - state.last_ns) / 1e9
    sentence = (
        f"r{rank} ({process}) {how}: last record {seconds_text(last)} ago, {text}"
    )
    if owed:
        sentence += f"; it owes {', '.join(owed_text(*item) for item in owed[:3])}"
    sentence += behind_text(victims)
    lines = [f"waiting: {op_evidence(scene, *item)}" for item in owed[:4]]
    return Cause(
        verdicts.DIED,
        "error",
        sentence,
        (rank,),
        victims,
        (*lines, *stack_lines(state)),
        at_ns=state.until_ns,
        fold=(log.host, state.until_ns // 5_000_000_000),
        place=rank,
    )
