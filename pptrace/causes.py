"""From a root of the wait-for graph to its cause: the verdict, in schedule terms.

`explain` takes one root (a cycle, or a rank that waits for nobody) and says what is
wrong there. What explains more comes first: two ops that face each other on different
communicators explain the cycle they make, a skipped op explains the one that is missing
now. What is left is told by the shape of the cycle (`pptrace.cycles`) or by what the
one rank is doing (`pptrace.holders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pptrace import verdicts
from pptrace.cycles import collective_order, explain_cycle
from pptrace.holders import (
    explain_single,
    is_unknown,
    missing_file,
    nothing_wrong,
    traceback_lines,
    untrusted,
)
from pptrace.matching import ChannelView, Pair
from pptrace.records import Channel, Direction, Flag, Kind, Pass, Record, Transport
from pptrace.scene import (
    CYCLE_NS,
    PATIENCE_NS,
    Cause,
    Scene,
    Side,
    activity,
    asymmetry_text,
    batch_text,
    began_ns,
    blocked_ns,
    few_microbatches,
    few_remedy,
    group_place,
    headline,
    is_text,
    label_key,
    names,
    now_line,
    op_evidence,
    op_text,
    owed_text,
    phase_of,
    place_text,
    record_text,
    same_thing,
    victims_of,
    waiting_ops,
)
from pptrace.states import Life, is_host_blocked
from pptrace.waitfor import Hub, Root, Why

__all__ = ["divergence", "explain", "first_conflict"]

_SLOW_NS = 5_000_000_000
"""A rank that others wait for is worth a word after this long."""


def explain(scene: Scene, root: Root) -> Cause | None:
    """The cause at one root; None if nothing there is wrong (yet)."""
    ranks = root.ranks
    single = ranks[0] if len(ranks) == 1 and not root.is_cycle else None
    if single is not None:
        state = scene.states.get(single)
        if state is None:
            return missing_file(scene, root, single)
        if state.life is Life.RAISED and not state.is_echo:
            return None  # has a cause of its own, whoever waits for it
        if state.life is Life.DEAD:
            return None
    if not _is_settled(scene, root, single):
        return None
    for look in (
        _facing,
        _wrong_rank,
        collective_order,
        _skipped,
        _diverged,
        _sibling,
        _run_not_started,
        _start_up,
    ):
        cause = look(scene, root)
        if cause is not None:
            return cause
    if is_unknown(root):
        return untrusted(scene, root)
    if root.is_cycle:
        return explain_cycle(scene, root)
    if single is not None:
        return explain_single(scene, root, single)
    return nothing_wrong(scene, root)


def _is_settled(scene: Scene, root: Root, single: int | None) -> bool:
    """Whether it has stood long enough not to be a healthy moment."""
    if root.is_cycle:
        records = [(e.waiter, e.op) for e in root.inside]
        if all(
            is_host_blocked(r) and scene.states[rank].threads == 1
            for rank, r in records
        ):
            return True  # nobody in it can post anything: no need to wait
        limit = PATIENCE_NS if scene.trigger else CYCLE_NS
        return min(scene.age_s(rank, r) for rank, r in records) * 1e9 >= limit
    waiters = [scene.age_s(e.waiter, e.op) * 1e9 for e in root.incoming]
    waited = max(waiters, default=0.0)
    limit = PATIENCE_NS if scene.trigger else _SLOW_NS
    if single is None:
        own = [scene.states[r] for r in root.ranks if r in scene.states]
        waited = max([waited, *(blocked_ns(scene, s) for s in own)])
        return waited >= max(limit, CYCLE_NS)
    state = scene.states[single]
    is_certain = any(e.why not in (Why.GONE, Why.UNKNOWN) for e in root.incoming)
    if state.is_over and is_certain:
        return True
    if state.is_over or state.life is Life.DISABLED:
        return waited >= limit
    quiet = state.until_ns - state.last_ns
    if scene.graph.blocked(single):
        # Nothing is missing: it may move on at any moment.
        return max(waited, blocked_ns(scene, state)) >= max(limit, CYCLE_NS)
    if scene.trigger and state.action is None and state.step is None:
        limit = CYCLE_NS  # more than a note: that takes a little longer
    if not scene.trigger:
        slowest = max(
            [
                state.longest_ns,
                *(scene.states[e.waiter].longest_ns for e in root.incoming),
            ]
        )
        limit = max(limit, min(3 * slowest, 600_000_000_000))
    return waited >= limit and quiet >= limit


def _facing(scene: Scene, root: Root) -> Cause | None:
    """A send and a receive of the same thing on different communicators."""
    for rank, waiting in waiting_ops(root):
        for record in scene.graph.kernel(rank, waiting):
            if record.group is None or not scene.graph.is_unposted(rank, record):
                continue
            is_send = record.direction is Direction.SEND
            ends = (rank, record.peer) if is_send else (record.peer, rank)
            other = Direction.RECV if is_send else Direction.SEND
            for peer, facing in scene.unmatched(*ends, other):
                if same_thing(record, facing):
                    return _face_to_face(scene, root, (rank, record), (peer, facing))
    return None


def _face_to_face(scene: Scene, root: Root, a: Side, b: Side) -> Cause | None:
    (rank_a, op_a), (rank_b, op_b) = a, b
    assert op_a.group is not None
    assert op_b.group is not None
    evidence = (op_evidence(scene, *a), op_evidence(scene, *b))
    began = began_ns(scene, (a, b))
    fold, place = group_place(op_a, sorted((rank_a, rank_b)))
    fold = (label_key(op_a, op_b), *fold)
    if op_a.group.key != op_b.group.key:
        culprits = tuple(sorted((rank_a, rank_b)))
        sentence = (
            f"r{rank_a} posts {op_text(op_a)} on group {op_a.group.label} and r{rank_b}"
            f" {op_text(op_b)} on group {op_b.group.label}: ops of different groups"
            f" never match{_absent(scene, a, b)}"
        )
        return Cause(
            verdicts.WRONG_GROUP,
            "error",
            sentence,
            culprits,
            victims_of(scene, root, culprits),
            evidence,
            at_ns=began,
            fold=fold,
            place=place,
        )
    if op_a.transport is op_b.transport:
        if op_a.tag == op_b.tag:
            return None
        culprits = tuple(sorted((rank_a, rank_b)))
        sentence = (
            f"r{rank_a} posts {op_text(op_a)} with tag {op_a.tag} and r{rank_b}"
            f" {op_text(op_b)} with tag {op_b.tag}: gloo pairs by tag"
        )
        return Cause(
            verdicts.WRONG_TAG,
            "error",
            sentence,
            culprits,
            victims_of(scene, root, culprits),
            evidence,
            at_ns=began,
            fold=fold,
            place=place,
        )
    mixed, lone = (a, b) if op_a.transport is Transport.GROUP else (b, a)
    return _transport_split(scene, root, mixed, lone, fold, place)


def _absent(scene: Scene, a: Side, b: Side) -> str:
    """In a wrong group: who else is missing in its set-up."""
    for rank, record in (a, b):
        for edge in scene.graph.edges.get(rank, []):
            if edge.why is Why.SET_UP and isinstance(edge.target, Hub) and record.group:
                came = sorted(scene.graph.comers(edge.target.group))
                return (
                    f"; on group {record.group.label} only {names(came)} of"
                    f" {len(record.group.ranks)} ranks joined"
                )
    return ""


def _transport_split(
    scene: Scene,
    root: Root,
    mixed: Side,
    lone: Side,
    fold: tuple[object, ...],
    place: object,
) -> Cause:
    (rank, op), (peer, single) = mixed, lone
    assert op.group is not None
    few = few_microbatches(scene, (rank, peer))
    is_send = op.direction is Direction.SEND
    verb, what = (
        ("fuses the send of", "receives it")
        if is_send
        else ("fuses the receive of", "sends it")
    )
    batch = scene.batch(rank, op)
    inside = f"the batch {batch_text(scene, rank, op)}"
    if len({r.direction for r in batch}) > 1:
        inside = f"the mixed batch {batch_text(scene, rank, op)}"
    low, high = sorted((rank, peer))
    sentence = (
        f"r{rank} {verb} {op.label} into {inside}, which rides the communicator of group"
        f" {op.group.label}, but r{peer} {what} with a lone {op_text(single)}, which"
        f" rides the pair communicator {low}:{high}: on NCCL the two never meet"
    )
    remedy = verdicts.VERDICTS[verdicts.TRANSPORT_SPLIT].remedy[3:]
    if few is not None:
        sentence += f", because {asymmetry_text(few)}"
        remedy = few_remedy(few)
    return Cause(
        verdicts.TRANSPORT_SPLIT,
        "error",
        sentence,
        (rank,),
        victims_of(scene, root, (rank,)),
        (op_evidence(scene, *mixed), op_evidence(scene, *lone)),
        remedy,
        began_ns(scene, (mixed, lone)),
        fold,
        place,
    )


def _wrong_rank(scene: Scene, root: Root) -> Cause | None:
    """A rank in a group that was used as a global rank."""
    for rank, record in waiting_ops(root):
        if not scene.graph.is_unposted(rank, record):
            continue
        is_send = record.direction is Direction.SEND
        facing = Direction.RECV if is_send else Direction.SEND
        for other, theirs in scene.unmatched_at(rank, facing):
            group = theirs.group
            if (
                group is None
                or other == record.peer
                or other not in group.ranks
                or group.ranks.index(other) != record.peer
                or not same_thing(record, theirs)
                or (record.numel, record.signature.dtype)
                != (theirs.numel, theirs.signature.dtype)
            ):
                continue
            way = "sends to" if is_send else "receives from"
            theirs_way = "receives from" if is_send else "sends to"
            sentence = (
                f"r{rank} {way} r{record.peer} ({op_text(record)}), which never"
                f" {'receives from' if is_send else 'sends to'} it, while r{other}"
                f" {theirs_way} r{rank} and stays unmatched: {record.peer} is the rank of"
                f" r{other} within group {group.label}, used as a global rank"
            )
            evidence = (
                op_evidence(scene, rank, record),
                op_evidence(scene, other, theirs),
            )
            began = began_ns(scene, ((rank, record), (other, theirs)))
            return Cause(
                verdicts.WRONG_RANK,
                "error",
                sentence,
                (rank,),
                victims_of(scene, root, (rank,)),
                evidence,
                at_ns=began,
            )
    return None


def first_conflict(view: ChannelView) -> Pair | None:
    """The first pair of a channel whose two sides mean different things."""
    for pair in view.pairs():
        a, b = pair.send.record, pair.recv.record
        if Pass.UNKNOWN in (a.pass_, b.pass_) or same_thing(a, b):
            continue
        return pair
    return None


def _channels(scene: Scene, root: Root) -> Iterator[ChannelView]:
    """Channels between the ranks of a root and those that wait at it."""
    seen: set[Channel] = set()
    for rank, record in waiting_ops(root):
        if record.group is None or record.flags & Flag.ANY_SOURCE:
            continue
        channel = record.channel(rank)
        back = channel._replace(src=channel.dst, dst=channel.src)
        for each in (channel, back):
            if each not in seen and each in scene.views:
                seen.add(each)
                yield scene.views[each]


def _diverged(scene: Scene, root: Root) -> Cause | None:
    conflicts = [
        (scene.wall_ns(pair.recv.rank, pair.recv.record), view, pair)
        for view in _channels(scene, root)
        if (pair := first_conflict(view)) is not None and not view.incomplete
    ]
    if not conflicts:
        return None
    _, view, pair = min(conflicts, key=lambda c: (c[0], c[2].k))
    cause = divergence(scene, view, pair)
    cause.victims = victims_of(scene, root, cause.culprits)
    return cause


def divergence(scene: Scene, view: ChannelView, pair: Pair) -> Cause:
    """Say how the two sides of a channel went apart at their first conflict."""
    send, recv = pair.send.record, pair.recv.record
    src, dst = pair.channel.src, pair.channel.dst
    scene.blamed.add((src, dst))
    sent, expected = send.label, recv.label
    sends = Counter(op.record.label for op in view.sends.values())
    recvs = Counter(op.record.label for op in view.recvs.values())
    at = f"the op k={pair.k} from r{src} to r{dst}"
    code, culprits = verdicts.MISSING_OP, tuple(sorted((src, dst)))
    if Pass.META in (send.pass_, recv.pass_):
        code = verdicts.STARTUP_NOT_JOINED
        quiet, busy = (dst, src) if send.pass_ is Pass.META else (src, dst)
        culprits = (quiet,)
        why = f"r{busy} takes part in the start-up exchange of shapes and r{quiet} does not"
    elif sends[expected] < recvs[expected] and sends[sent] <= recvs[sent]:
        culprits = (src,)
        why = f"r{src} left out a send of {expected}"
        if sends[expected]:
            why = (
                f"r{dst} expects {recvs[expected]} tensors for {expected} and r{src}"
                f" sends {sends[expected]}: index {recv.tensor_index} is missing"
            )
        skipped = _skip_before(scene, src, send)
        if skipped is not None:
            return _skip_cause(
                scene, src, skipped, f"isend {expected}→r{dst}", recv, dst
            )
    elif recvs[sent] < sends[sent] and recvs[expected] <= sends[expected]:
        culprits = (dst,)
        why = f"r{dst} left out a receive of {sent}"
        skipped = _skip_before(scene, dst, recv)
        if skipped is not None:
            return _skip_cause(scene, dst, skipped, f"irecv {sent}←r{src}", send, src)
    else:
        code = verdicts.ORDER_DIFFERS
        why = "the two sides order their ops differently"
    step = f" in step {recv.step}" if recv.step > 0 else ""
    sentence = (
        f"{at} is {sent} for the sender and {expected} for the receiver, the first"
        f" difference between the two{step}: {why}"
    )
    sides = (pair.send.rank, send), (pair.recv.rank, recv)
    fold, place = group_place(send, culprits)
    return Cause(
        code,
        "error",
        sentence,
        culprits,
        evidence=tuple(op_evidence(scene, *side) for side in sides),
        at_ns=began_ns(scene, sides),
        fold=(sent, expected, *fold),
        place=place,
    )


def _skip_before(scene: Scene, rank: int, record: Record) -> Record | None:
    """The exception a rank went on after, before it posted ``record``."""
    survived = [e for e in scene.states[rank].survived if e.seq < record.seq]
    return survived[-1] if survived else None


def _skip_cause(
    scene: Scene, rank: int, exception: Record, op: str, waiting: Record, waiter: int
) -> Cause:
    place = place_text(exception)
    sentence = (
        f"r{rank} went on after {headline(exception)}"
        + (f" in {place}" if place else "")
        + f" and skipped {op}: from there on it is behind by that op, and r{waiter}"
        f" waits for {record_text(waiting, scene, waiter)}"
    )
    fold, where = group_place(waiting, (rank,))
    return Cause(
        verdicts.SKIPPED,
        "error",
        sentence,
        (rank,),
        evidence=(
            *traceback_lines(rank, exception),
            op_evidence(scene, waiter, waiting),
        ),
        at_ns=scene.wall_ns(rank, exception),
        fold=(headline(exception), *fold),
        place=where,
    )


def _skipped(scene: Scene, root: Root) -> Cause | None:
    """A rank of the root that went on after an exception and owes an op now."""
    for edge in (*root.inside, *root.incoming):
        holder = edge.op.peer
        if edge.why is not Why.UNPOSTED or holder not in scene.states:
            continue
        state, waiter = scene.states[holder], scene.states[edge.waiter]
        if not state.survived or waiter.survived:
            continue
        conflict = _earlier_conflict(scene, root)
        if conflict is not None:
            return conflict
        owed = owed_text(edge.waiter, edge.op)
        cause = _skip_cause(
            scene, holder, state.survived[0], owed, edge.op, edge.waiter
        )
        cause.victims = victims_of(scene, root, cause.culprits)
        return cause
    return None


def _earlier_conflict(scene: Scene, root: Root) -> Cause | None:
    cause = _diverged(scene, root)
    return cause if cause is not None and cause.code == verdicts.SKIPPED else None


def _sibling(scene: Scene, root: Root) -> Cause | None:
    """An op is missing whose siblings of the same microbatch have come."""
    for rank, record in waiting_ops(root):
        if record.pass_ in (Pass.UNKNOWN, Pass.META) or record.k == 0:
            continue
        if not scene.graph.is_unposted(rank, record):
            continue
        view = scene.views[record.channel(rank)]
        is_send = record.direction is Direction.SEND
        mine, theirs = (view.sends, view.recvs) if is_send else (view.recvs, view.sends)
        want = (phase_of(record.pass_), record.microbatch, record.step)
        expected = [
            op.record
            for op in mine.values()
            if (phase_of(op.record.pass_), op.record.microbatch, op.record.step) == want
        ]
        came = [theirs[r.k].record for r in expected if r.k in theirs]
        came = [r for r in came if same_thing(r, record)]
        if not came or any(r.returned_ns == 0 for r in came):
            continue
        return _fewer_tensors(scene, root, (rank, record), len(expected), len(came))
    return None


def _fewer_tensors(
    scene: Scene, root: Root, side: Side, expected: int, came: int
) -> Cause:
    rank, record = side
    peer = record.peer
    verbs = (
        ("sends", "receives")
        if record.direction is Direction.SEND
        else ("expects", "sends")
    )
    sentence = (
        f"r{rank} {verbs[0]} {expected} tensors for {record.label} and r{peer}"
        f" {verbs[1]} {came}: index {record.tensor_index} has no partner"
        f" ({owed_text(rank, record)} was never posted)"
    )
    fold, place = group_place(record, (peer,))
    return Cause(
        verdicts.MISSING_OP,
        "error",
        sentence,
        (peer,),
        victims_of(scene, root, (peer,)),
        (op_evidence(scene, rank, record), now_line(scene, peer)),
        at_ns=began_ns(scene, (side,)),
        fold=(record.label, record.stage, *fold),
        place=place,
    )


def _run_not_started(scene: Scene, root: Root) -> Cause | None:
    """Waiters are in a run of the schedule that the rank they wait for never began."""
    for edge in (*root.inside, *root.incoming):
        if edge.why is not Why.UNPOSTED or edge.op.peer not in scene.states:
            continue
        waiter, holder = scene.states[edge.waiter], scene.states[edge.op.peer]
        step, last = waiter.step, holder.last_step
        if step is None or last is None or holder.step is not None:
            continue
        in_collective = any(
            r.kind is Kind.COLLECTIVE for r in scene.graph.blocked(holder.rank)
        )
        is_other = (step.text, step.flags & Flag.EVAL) != (
            last.text,
            last.flags & Flag.EVAL,
        )
        if last.step >= step.step or not (
            holder.life is Life.EXITED or (in_collective and is_other)
        ):
            continue
        what = "evaluation run" if step.flags & Flag.EVAL else "run"
        vote = " (in its start-up exchange)" if edge.op.pass_ is Pass.META else ""
        runs = "1 run" if last.step == 1 else f"{last.step} runs"
        sentence = (
            f"r{waiter.rank} is in schedule {what} {step.step} of {step.text}{vote}"
            f" waiting for {op_text(edge.op)}; r{holder.rank} started only {runs} and"
            f" {'has exited' if holder.life is Life.EXITED else is_text(activity(scene, holder)[0])}"
        )
        fold, place = group_place(edge.op, (holder.rank,))
        return Cause(
            verdicts.RUN_NOT_STARTED,
            "error",
            sentence,
            (holder.rank,),
            victims_of(scene, root, (holder.rank,)),
            (op_evidence(scene, edge.waiter, edge.op), now_line(scene, holder.rank)),
            at_ns=began_ns(scene, ((edge.waiter, edge.op),)),
            fold=fold,
            place=place,
        )
    return None


def _start_up(scene: Scene, root: Root) -> Cause | None:
    """Metadata that the other side, already past its start-up, never posts."""
    for edge in (*root.inside, *root.incoming):
        op, state = edge.op, scene.states.get(edge.op.peer)
        if edge.why is not Why.UNPOSTED or op.pass_ is not Pass.META or state is None:
            continue
        past = next(
            (r for r in scene.graph.blocked(state.rank) if r.kind is Kind.OP),
            state.action,
        )
        if (
            state.step is None
            or past is None
            or past.pass_ in (Pass.META, Pass.UNKNOWN)
        ):
            continue
        modes = {
            r: run.metadata
            for r in (edge.waiter, state.rank)
            if (run := scene.schedule(r))
        }
        differ = ""
        if len(set(modes.values())) == 2:
            differ = (
                " (" + ", ".join(f"r{r}: {mode}" for r, mode in modes.items()) + ")"
            )
        sentence = (
            f"r{edge.waiter} takes part in the start-up exchange of shapes"
            f" ({op_text(op)}) and r{state.rank} does not{differ}: it"
            f" {is_text(activity(scene, state)[0])}"
        )
        return Cause(
            verdicts.STARTUP_NOT_JOINED,
            "error",
            sentence,
            (state.rank,),
            victims_of(scene, root, (state.rank,)),
            (op_evidence(scene, edge.waiter, op), now_line(scene, state.rank)),
            at_ns=began_ns(scene, ((edge.waiter, op),)),
        )
    return None
