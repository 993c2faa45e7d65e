"""Cycles of ranks that wait for each other, told apart by what they go through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pptrace import verdicts
from pptrace.records import Direction, Flag, Kind
from pptrace.scene import (
    Cause,
    Scene,
    activity,
    asymmetry_text,
    batch_text,
    began_ns,
    few_microbatches,
    few_remedy,
    group_place,
    hubs_at,
    is_text,
    label_key,
    names,
    now_line,
    op_evidence,
    op_text,
    owed_text,
    record_text,
    short_text,
    victims_of,
)
from pptrace.waitfor import Edge, Hub, Root, Why

__all__ = ["collective_cause", "collective_order", "explain_cycle", "set_up_cause"]


def collective_order(scene: Scene, root: Root) -> Cause | None:
    """The k-th collective of a group is not the same everywhere, or two cross."""
    hubs = sorted(hubs_at(root, "collective"), key=lambda h: h.k)
    for hub in hubs:
        entered = scene.graph.collectives(hub)
        by_name: dict[str, list[int]] = {}
        for rank, record in entered.items():
            by_name.setdefault(record.text, []).append(rank)
        if len(by_name) > 1:
            return _crossed(scene, root, hub, by_name)
    ranks_in = {hub: set(scene.graph.collectives(hub)) for hub in hubs}
    if (
        len(hubs) > 1
        and root.is_cycle
        and not any(
            e.why in (Why.UNPOSTED, Why.IN_CALL, Why.SET_UP, Why.BEHIND)
            for e in root.inside
        )
    ):
        parts = []
        for hub in hubs:
            group = scene.graph.groups[hub.group].label
            inside = sorted(ranks_in[hub] & set(root.ranks))
            name = next(iter(scene.graph.collectives(hub).values())).text
            parts.append(f"{names(inside)} in {name} #{hub.k} of group {group}")
        sentence = "collectives wait for each other: " + ", ".join(parts)
        return collective_cause(
            scene, root, verdicts.COLLECTIVE_ORDER, sentence, root.ranks
        )
    return None


def _crossed(
    scene: Scene, root: Root, hub: Hub, by_name: dict[str, list[int]]
) -> Cause:
    entered = scene.graph.collectives(hub)
    group = scene.graph.groups[hub.group]
    most = max(map(len, by_name.values()))
    parts = []
    for name, ranks in sorted(by_name.items(), key=lambda item: item[1]):
        threads = sorted({entered[r].thread for r in ranks})
        thread = f" (thread {', '.join(map(str, threads))})"
        parts.append(f"{name} on {names(ranks)}{thread}")
    odd = sorted(r for ranks in by_name.values() if len(ranks) < most for r in ranks)
    culprits = odd or sorted(entered)
    sentence = (
        f"collective #{hub.k} of group {group.label} is "
        + " but ".join(parts)
        + ": the ranks issue the collectives of one group in different orders"
    )
    return collective_cause(scene, root, verdicts.COLLECTIVE_ORDER, sentence, culprits)


def collective_cause(
    scene: Scene, root: Root, code: str, sentence: str, culprits: Iterable[int]
) -> Cause:
    """A cause whose evidence is what the ranks concerned are doing."""
    guilty = tuple(sorted(culprits))
    lines = [
        now_line(scene, r)
        for r in sorted({*guilty[:4], *root.ranks[:4]})
        if r in scene.states
    ]
    records = [(e.waiter, e.op) for e in (*root.inside, *root.incoming)]
    return Cause(
        code,
        "error",
        sentence,
        guilty,
        victims_of(scene, root, guilty),
        tuple(lines),
        at_ns=began_ns(scene, records),
    )


def _mixed_cycle(scene: Scene, root: Root) -> Cause:
    """A cycle through a collective and P2P ops."""
    hub = min(hubs_at(root, "collective"), key=lambda h: h.k)
    entered = scene.graph.collectives(hub)
    group = scene.graph.groups[hub.group]
    missing = [r for r in scene.graph.missing(hub) if r in root.ranks]
    late = [r for r in scene.graph.late(hub) if r in root.ranks]
    name = next((r.text for r in entered.values()), "a collective")
    inside = sorted(r for r in entered if r not in missing and r not in late)
    parts = [f"r{rank} {_instead(scene, rank)}" for rank in missing[:4]]
    parts += [
        f"r{rank} has queued it behind {_first(scene, rank)}" for rank in late[:4]
    ]
    ahead = _ahead(scene, missing, inside)
    others = [*missing, *late]
    verb = "is" if len(inside) == 1 else "are"
    not_in = "not entered" if missing else "not begun"
    sentence = (
        (f"{names(inside)} {verb} in " if inside else "nobody can begin ")
        + f"{name} #{hub.k} of group {group.label}, which {names(others)}"
        f" ha{'s' if len(others) == 1 else 've'} {not_in}: {', '.join(parts)}, whose"
        f" partner comes only after it{ahead}"
    )
    # Who left something out cannot be told from one of the two alone, unless the ones
    # that are missing are a step further.
    owing = {h for r in others for _, h in scene.graph.waits_on(r) if h in root.ranks}
    culprits = others if ahead else {*others, *owing}
    cause = collective_cause(
        scene, root, verdicts.COLLECTIVE_VS_P2P, sentence, culprits
    )
    cause.fold = (name, hub.k, len(group.ranks))
    cause.place = group.key
    return cause


def _instead(scene: Scene, rank: int) -> str:
    """What a rank does in place of entering a collective."""
    blocked = [r for r in scene.graph.blocked(rank) if r.kind is Kind.OP]
    if blocked:
        return f"waits for {record_text(blocked[0], scene, rank)}"
    return is_text(activity(scene, scene.states[rank])[0])


def _first(scene: Scene, rank: int) -> str:
    """The oldest op that a rank's streams cannot get past."""
    pending = scene.graph.pending[rank]
    return record_text(pending[0], scene, rank) if pending else "its compute stream"


def _ahead(scene: Scene, missing: Sequence[int], inside: Sequence[int]) -> str:
    """Whether the missing ranks are a step further: then they left it out."""
    steps = {s.step for r in inside if (s := scene.states[r].last_step) is not None}
    for rank in missing:
        last = scene.states[rank].last_step
        if last is not None and steps and last.step > max(steps):
            return f"; r{rank} left it out and is in step {last.step} already"
    return ""


def explain_cycle(scene: Scene, root: Root) -> Cause:
    """The cause of a cycle, by what it goes through."""
    if _hubs_inside(root, "collective"):
        return _mixed_cycle(scene, root)
    if _hubs_inside(root, "set-up"):
        return set_up_cause(scene, root)
    truncated = [
        e for e in root.inside if e.why is Why.IN_CALL and isinstance(e.target, int)
    ]
    if truncated:
        return _through_calls(scene, root, truncated)
    return _plain_cycle(scene, root)


def _hubs_inside(root: Root, kind: str) -> bool:
    return any(isinstance(n, Hub) and n.kind == kind for n in root.nodes)


def _through_calls(scene: Scene, root: Root, held: list[Edge]) -> Cause:
    """A cycle through calls that cannot begin: first use of edges (semantics §4c)."""
    if len(root.ranks) > 2:
        return _batch_cycle(scene, root)
    edge = next((e for e in held if isinstance(e.source, int)), held[0])
    lone, fused = edge.waiter, edge.op.peer
    theirs = edge.partner or edge.op
    missing = next(
        (
            r
            for r in scene.graph.kernel(fused, theirs)
            if scene.graph.is_unposted(fused, r)
        ),
        theirs,
    )
    few = few_microbatches(scene, root.ranks)
    because = f"; {asymmetry_text(few)}" if few else ""
    batch = batch_text(scene, fused, theirs)
    fold, place = group_place(edge.op, (fused, lone))
    common: dict[str, Any] = {
        "evidence": (
            op_evidence(scene, fused, missing),
            op_evidence(scene, lone, edge.op),
        ),
        "at_ns": began_ns(scene, ((fused, missing), (lone, edge.op))),
        "fold": (label_key(edge.op, missing), *fold),
        "place": place,
        "remedy": few_remedy(few) if few else (),
    }
    if theirs.flags & Flag.COALESCED and not edge.op.flags & Flag.COALESCED:
        low, high = sorted((fused, lone))
        culprits = (low, high)
        sentence = (
            f"edge ({low}, {high}): r{fused} issues {batch} as one batch and r{lone} its"
            f" ops one by one, now {op_text(edge.op)}: the batch cannot start before"
            f" r{lone} posts {owed_text(fused, missing)}, which comes after it; NCCL"
            f" leaves grouped against separate ops undefined{because}"
        )
        return Cause(
            verdicts.GROUPING,
            "error",
            sentence,
            culprits,
            victims_of(scene, root, culprits),
            **common,
        )
    sentence = (
        f"r{fused} is inside the call that first uses its edges with r{lone}, with"
        f" {batch}, and r{lone} answers with the lone {op_text(edge.op)}: the set-up of"
        f" {owed_text(fused, missing)} needs r{lone} in a call that it would make only"
        f" after {op_text(edge.op)}{because}"
    )
    return Cause(
        verdicts.FIRST_USE,
        "error",
        sentence,
        (fused,),
        victims_of(scene, root, (fused,)),
        **common,
    )


def _around(scene: Scene, root: Root) -> list[tuple[int, Edge, int]]:
    """One way around a cycle: (rank, edge of its op, next rank)."""
    ranks = set(root.ranks)
    start = root.ranks[0]
    path: list[tuple[int, Edge, int]] = []
    seen: dict[int, int] = {}
    rank = start
    while rank not in seen:
        seen[rank] = len(path)
        step = next(
            ((e, r) for e, r in scene.graph.waits_on(rank) if r in ranks),
            _step_of_stream(root, rank),
        )
        if step is None:
            return path
        path.append((rank, step[0], step[1]))
        rank = step[1]
    return path[seen[rank] :]


def _step_of_stream(root: Root, rank: int) -> tuple[Edge, int] | None:
    """Where a cycle goes on from a rank whose host waits for something outside it."""
    for edge in root.inside:
        if edge.waiter == rank and not isinstance(edge.target, Hub):
            target = edge.target
            holder = target if isinstance(target, int) else target.rank
            if holder != rank:
                return edge, holder
    return None


def _batch_cycle(scene: Scene, root: Root) -> Cause:
    around = _around(scene, root)
    order = "→".join(f"r{rank}" for rank, _, _ in around) + f"→r{around[0][0]}"
    wide = [
        (rank, e.op)
        for rank, e, _ in around
        if len({r.peer for r in scene.batch(rank, e.op) if e.op.flags & Flag.COALESCED})
        > 1
    ]
    shared = ", ".join(f"r{rank}'s {batch_text(scene, rank, op)}" for rank, op in wide)
    sentence = f"the ranks wait for each other through batch boundaries, {order}"
    if wide:
        far = max(wide[0][1:], key=lambda r: r.seq)
        sentence += f": ops to different peers share a batch ({shared}), so {op_text(far)} holds the others"
    culprits = tuple(sorted({rank for rank, _ in wide} or set(root.ranks)))
    return Cause(
        verdicts.BATCH_CYCLE,
        "error",
        sentence,
        culprits,
        victims_of(scene, root, culprits),
        tuple(op_evidence(scene, rank, e.op) for rank, e, _ in around),
        at_ns=began_ns(scene, ((rank, e.op) for rank, e, _ in around)),
    )


def _plain_cycle(scene: Scene, root: Root) -> Cause:
    around = _around(scene, root)
    kinds = {e.op.direction for _, e, _ in around}
    culprits = tuple(sorted({rank for rank, _, _ in around}))
    ops = [f"r{rank} in {op_text(e.op)}" for rank, e, _ in around]
    if kinds == {Direction.SEND}:
        code = verdicts.SENDS_FACE
        word = (
            "two sends wait for each other"
            if len(ops) == 2
            else "sends wait for each other in a ring"
        )
        tail = "each rank posts its receive only after its send"
    elif kinds == {Direction.RECV}:
        code = verdicts.RECVS_FACE
        word = (
            "two receives wait for each other"
            if len(ops) == 2
            else "receives wait for each other in a ring"
        )
        tail = "each rank posts its send only after its receive"
    else:
        code = verdicts.WAIT_CYCLE
        word = "the ranks wait for each other in a circle"
        tail = "each waits for an op that the next posts only later"
    missing = ", ".join(
        f"{owed_text(rank, e.op)} of r{holder}" for rank, e, holder in around[:4]
    )
    sentence = f"{word}: {', '.join(ops)}; {tail} (missing: {missing})"
    fold, place = group_place(around[0][1].op, culprits)
    return Cause(
        code,
        "error",
        sentence,
        culprits,
        victims_of(scene, root, culprits),
        tuple(op_evidence(scene, rank, e.op) for rank, e, _ in around),
        at_ns=began_ns(scene, ((rank, e.op) for rank, e, _ in around)),
        fold=(label_key(*(e.op for _, e, _ in around)), *fold),
        place=place,
    )


def set_up_cause(scene: Scene, root: Root) -> Cause:
    """The first batched op of a group, entered by some of its ranks only."""
    hub = hubs_at(root, "set-up")[0]
    group = scene.graph.groups[hub.group]
    came = sorted(scene.graph.comers(hub.group))
    missing = scene.graph.missing(hub)
    known = [r for r in missing if r in scene.states]
    instead = "; ".join(f"r{r} {short_text(scene, r)}" for r in known[:4])
    sentence = (
        f"the first batched P2P on group {group.label} was entered by {names(came)} only;"
        f" {names(missing)} never came"
        + (f" ({instead})" if instead else "")
        + ": setting up a lazily initialised group's communicator needs all of its"
        f" {len(group.ranks)} ranks"
    )
    culprits = tuple(missing)
    waiting = [
        (e.waiter, e.op) for e in (*root.inside, *root.incoming) if e.why is Why.SET_UP
    ]
    lines = list(dict.fromkeys(op_evidence(scene, rank, op) for rank, op in waiting))[
        :4
    ]
    few = few_microbatches(scene, came)
    fold, place = group_place(waiting[0][1], culprits)
    return Cause(
        verdicts.GROUP_SETUP,
        "error",
        sentence,
        culprits,
        victims_of(scene, root, culprits),
        (*lines, *(now_line(scene, r) for r in known[:4])),
        few_remedy(few) if few else (),
        began_ns(scene, waiting),
        fold,
        place,
    )
