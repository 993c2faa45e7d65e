"""From a root of the wait-for graph to its cause: the verdict, in schedule terms.

`explain` takes one root (a cycle, or a rank that waits for nobody) and says what is
wrong there. What explains more comes first: two ops that face each other on different
communicators explain the cycle they make, a skipped op explains the one that is missing
now.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pptrace import verdicts
from pptrace.matching import ChannelView, Pair
from pptrace.records import (
    NONE,
    Channel,
    Direction,
    Flag,
    Kind,
    Pass,
    Record,
    ScheduleRun,
    Transport,
)
from pptrace.waitfor import (
    Edge,
    Hub,
    Life,
    RankState,
    Root,
    Stream,
    WaitFor,
    Why,
    is_host_blocked,
)

__all__ = ["Cause", "Scene", "batch_text", "doing", "edge_text", "explain", "op_text"]

_PATIENCE_NS = 200_000_000
"""With an alarm behind it: the job has already waited long enough."""
_CYCLE_NS = 2_000_000_000
"""Age of a cycle that hosts could still leave (CUDA's waits do not block them)."""
_SLOW_NS = 5_000_000_000
"""A rank that others wait for is worth a word after this long."""


@dataclass(slots=True)
class Cause:
    """A finding in the making; ``fold`` is equal for the same fault of replicas."""

    code: str
    severity: str
    sentence: str
    culprits: tuple[int, ...]
    victims: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()
    at_ns: int = 0
    """Wall time at which it began."""
    fold: tuple[object, ...] = ()
    place: object = None
    """What tells one replica from another; equal places are never folded."""
    nodes: tuple[object, ...] = ()
    """Where in the graph its victims hang on."""


@dataclass(slots=True)
class Scene:
    """Everything known of a run, with what the explanations look up."""

    states: dict[int, RankState]
    graph: WaitFor
    views: Mapping[Channel, ChannelView]
    now_ns: int
    trigger: str = ""
    blamed: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of ranks whose divergence has been reported."""
    _batches: dict[int, dict[int, list[Record]]] = field(default_factory=dict)
    _facing: dict[tuple[int, int, Direction], list[tuple[int, Record]]] | None = None

    def batch(self, rank: int, record: Record) -> list[Record]:
        """All ops of the batch of ``record``, complete ones too."""
        if not record.batch:
            return [record]
        index = self._batches.get(rank)
        if index is None:
            index = self._batches[rank] = {}
            for r in self.states[rank].log.records:
                if r.kind is Kind.OP and r.batch:
                    index.setdefault(r.batch, []).append(r)
        return index.get(record.batch) or [record]

    def unmatched(
        self, src: int, dst: int, direction: Direction
    ) -> list[tuple[int, Record]]:
        """Pending sends (or receives) from src to dst without a partner."""
        if self._facing is None:
            self._facing = {}
            for rank, records in self.graph.pending.items():
                for r in records:
                    if r.group is not None and self.graph.is_unposted(rank, r):
                        is_send = r.direction is Direction.SEND
                        ends = (rank, r.peer) if is_send else (r.peer, rank)
                        key = (*ends, r.direction)
                        self._facing.setdefault(key, []).append((rank, r))
        return self._facing.get((src, dst, direction), [])

    def unmatched_at(self, end: int, direction: Direction) -> list[tuple[int, Record]]:
        """Pending sends to ``end`` (or receives from it) without a partner."""
        self.unmatched(end, end, direction)
        assert self._facing is not None
        at = 1 if direction is Direction.SEND else 0
        return [
            item
            for key, items in self._facing.items()
            if key[2] is direction and key[at] == end
            for item in items
        ]

    def schedule(self, rank: int) -> ScheduleRun | None:
        """The schedule the rank is in, or was in last."""
        state = self.states.get(rank)
        if state is None or not state.log.schedules:
            return None
        step = state.last_step
        if step is not None:
            for run in reversed(state.log.schedules):
                if (run.name, run.n_microbatches) == (step.text, step.microbatch):
                    return run
        return state.log.schedules[-1]

    def age_s(self, rank: int, record: Record) -> float:
        """How long an op has been waited for, or is posted, in seconds."""
        state = self.states[rank]
        return state.age_ns(record.wait_ns or record.posted_ns) / 1e9

    def wall_ns(self, rank: int, record: Record) -> int:
        """Wall time at which a record began."""
        return self.states[rank].log.to_wall_ns(record.posted_ns)


# -- words ---------------------------------------------------------------------------


def op_text(record: Record) -> str:
    """``isend F1→r1``; a second tensor of a microbatch reads ``B0[1]``."""
    is_send = record.direction is Direction.SEND
    index = f"[{record.tensor_index}]" if record.tensor_index else ""
    peer = f"r{record.peer}" if record.peer >= 0 else "any rank"
    arrow = "→" if is_send else "←"
    return f"{'isend' if is_send else 'irecv'} {record.label}{index}{arrow}{peer}"


def edge_text(rank: int, record: Record) -> str:
    """``r3←r1 (group pp=[1,3]: 1←0)``: global ranks first, the group's if different."""
    arrow = "→" if record.direction is Direction.SEND else "←"
    peer = f"r{record.peer}" if record.peer >= 0 else "any rank"
    text = f"r{rank}{arrow}{peer}"
    group = record.group
    if group is None or rank not in group.ranks:
        return text
    mine = group.ranks.index(rank)
    if (mine, record.group_peer) == (rank, record.peer):
        return text
    ranks = ",".join(map(str, group.ranks[:16])) + (",…" if len(group.ranks) > 16 else "")
    return f"{text} (group {group.label}=[{ranks}]: {mine}{arrow}{record.group_peer})"


def batch_text(scene: Scene, rank: int, record: Record) -> str:
    """``{isend F1→r1, irecv B0←r1}``."""
    ops = [op_text(r) for r in scene.batch(rank, record)]
    more = f", … ({len(ops)} ops)" if len(ops) > 8 else ""
    return "{" + ", ".join(ops[:8]) + more + "}"


def names(ranks: Sequence[int], word: str = "and") -> str:
    """``r1``, ``r1 and r2``, ``r1-r14``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts: list[str] = []
    for first, last in runs:
        if last - first < 3:
            parts += [f"r{r}" for r in range(first, last + 1)]
        else:
            parts.append(f"r{first}-r{last}")
    if len(parts) > 6:
        return ", ".join(parts[:5]) + f", … ({len(ordered)} ranks)"
    return ", ".join(parts[:-1]) + f" {word} {parts[-1]}" if len(parts) > 1 else parts[0]


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _clock(wall_ns: int) -> str:
    moment = datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.timezone.utc)
    return f"{moment:%H:%M:%S} UTC"


def _place(record: Record | None) -> str:
    """``F0 of stage 1 (step 2)``."""
    if record is None or record.pass_ is Pass.UNKNOWN:
        text = ""
    elif record.pass_ is Pass.META:
        text = "the start-up exchange"
    else:
        text = record.label
    if text and record is not None and record.stage != NONE and record.pass_ != Pass.META:
        text += f" of stage {record.stage}"
    if record is not None and record.step > 0:
        text = f"{text} (step {record.step})" if text else f"step {record.step}"
    return text


def _their_op(record: Record) -> str:
    """The partner of an op, from the side that owes it: ``irecv F0←r1``."""
    is_send = record.direction is Direction.SEND
    return f"{'irecv' if is_send else 'isend'} {record.label}" + (
        f"[{record.tensor_index}]" if record.tensor_index else ""
    )


def owed_text(waiter: int, record: Record) -> str:
    """What the peer of a waiting op owes: ``isend F0→r2``."""
    arrow = "←" if record.direction is Direction.SEND else "→"
    return f"{_their_op(record)}{arrow}r{waiter}"


def _record_text(record: Record, scene: Scene, rank: int) -> str:
    if record.kind is Kind.COLLECTIVE:
        group = record.group.label if record.group else "?"
        thread = f" (thread {record.thread})" if scene.states[rank].threads > 1 else ""
        return f"{record.text} #{record.k} of group {group}{thread}"
    text = op_text(record)
    if record.flags & Flag.COALESCED and len(scene.batch(rank, record)) > 1:
        text += f" of the batch {batch_text(scene, rank, record)}"
    return text


def doing(scene: Scene, rank: int) -> tuple[str, float | None]:
    """What a rank is doing or did last: a phrase, and for how many seconds."""
    state = scene.states[rank]
    if state.life is Life.RAISED:
        head = _headline(state.exception)
        record = state.exception
        place = _place(record)
        age = state.log.to_wall_ns(record.posted_ns) if record else state.until_ns
        text = f"raised {head}" + (f" in {place}" if place else "")
        return text, (scene.now_ns - age) / 1e9
    if state.life is Life.EXITED:
        return "exited normally", (scene.now_ns - state.until_ns) / 1e9
    text, record = _activity(scene, state)
    since = state.age_ns(record.wait_ns or record.posted_ns) / 1e9 if record else None
    if record is None or record.done_ns:
        since = max(0.0, (state.until_ns - state.last_ns) / 1e9)
    if state.life is Life.DEAD:
        return f"was: {text}", (scene.now_ns - state.last_ns) / 1e9
    return text, since


def _activity(scene: Scene, state: RankState) -> tuple[str, Record | None]:
    blocked = scene.graph.blocked(state.rank)
    if blocked:
        first = min(blocked, key=lambda r: r.wait_ns or r.posted_ns)
        what = _record_text(first, scene, state.rank)
        if first.kind is Kind.COLLECTIVE:
            return f"in {what}", first
        if first.returned_ns == 0:
            return f"inside the call of {what}", first
        return f"waits for {what}", first
    if state.action is not None:
        return f"in {_place(state.action)}", state.action
    if state.step is not None:
        where = f"in step {state.step.step} of {state.step.text}"
        return f"{where}, outside any recorded call", None
    if state.last_step is not None:
        return f"between steps, after step {state.last_step.step}", None
    if state.last_record is None:
        return "has posted nothing yet", None
    return "outside any recorded call", None


def is_text(text: str) -> str:
    """An activity as a predicate: ``is in F0``, ``waits for B0←r1``."""
    return f"is {text}" if text.startswith(("in", "between", "outside")) else text


def _headline(exception: Record | None) -> str:
    if exception is None:
        return "an exception"
    head = exception.text.partition("\n")[0].strip() or "an exception"
    return head if len(head) <= 200 else head[:199] + "…"


def _stack(state: RankState) -> tuple[str, ...]:
    """Where the main thread is, from the stacks saved at detection or death."""
    blocks = re.split(r"\n\s*\n|(?=^(?:Current t|T)hread 0x)", state.log.stacks, flags=re.M)
    frames: list[str] = []
    for block in blocks:
        found = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', block)
        if found and not any("pptrace" in path and "monitor" in path for path, _, _ in found):
            frames = [f"{path}:{line} in {name}" for path, line, name in found]
    own = [f for f in frames if "/torch/" not in f and "/pptrace/" not in f]
    top = frames[:1]
    near = own[:1]
    return tuple(f"stack of r{state.rank}: {f}" for f in dict.fromkeys([*top, *near]))


def _op_evidence(scene: Scene, rank: int, record: Record) -> str:
    """One line: who, what, on which communicator, since when."""
    group = record.group.label if record.group else "?"
    if record.transport is Transport.GROUP:
        rides = f"the communicator of group {group}"
    else:
        low, high = sorted((rank, record.peer))
        rides = f"the pair communicator {low}:{high} of group {group}"
    state = _op_state(record, _seconds(scene.age_s(rank, record)))
    batch = ""
    if len(scene.batch(rank, record)) > 1:
        batch = f" in {batch_text(scene, rank, record)}"
        batch += "" if record.flags & Flag.COALESCED else " (issued one by one)"
    desc = f", {record.text}" if record.text else ""
    return (
        f"r{rank}: {op_text(record)}{batch}, {edge_text(rank, record)}, k={record.k} on"
        f" {rides}{desc}, {state}"
    )


def _op_state(record: Record, age: str) -> str:
    if record.done_ns:
        return "complete"
    if record.returned_ns == 0:
        return f"in the call for {age}"
    return f"waited on for {age}" if record.wait_ns else f"posted {age} ago"


def _few_microbatches(scene: Scene, ranks: Iterable[int]) -> ScheduleRun | None:
    """The schedule of these ranks if it has fewer microbatches than stages."""
    for rank in ranks:
        run = scene.schedule(rank)
        if run is not None and 0 < run.n_microbatches < run.num_stages:
            return run
    return None


def _behind(victims: Sequence[int]) -> str:
    if not victims:
        return ""
    verb = "waits" if len(victims) == 1 else "wait"
    return f"; {names(victims)} {verb} behind it"


# -- explaining a root -----------------------------------------------------------------


def explain(scene: Scene, root: Root) -> Cause | None:
    """The cause at one root; None if nothing there is wrong (yet)."""
    ranks = root.ranks
    single = ranks[0] if len(ranks) == 1 and not root.is_cycle else None
    if single is not None:
        state = scene.states.get(single)
        if state is None:
            return _missing_file(scene, root, single)
        if state.life is Life.RAISED and not state.is_echo:
            return None  # has a cause of its own, whoever waits for it
        if state.life is Life.DEAD:
            return None
    if not _is_settled(scene, root, single):
        return None
    for look in (
        _facing,
        _wrong_rank,
        _collective_order,
        _skipped,
        _diverged,
        _sibling,
        _run_not_started,
        _start_up,
    ):
        cause = look(scene, root)
        if cause is not None:
            return cause
    if _is_unknown(scene, root):
        return _untrusted(scene, root)
    if root.is_cycle:
        return _cycle(scene, root)
    if single is not None:
        return _single(scene, root, single)
    return _nothing_wrong(scene, root)


def _is_settled(scene: Scene, root: Root, single: int | None) -> bool:
    """Whether it has stood long enough not to be a healthy moment."""
    if root.is_cycle:
        records = [(e.waiter, e.op) for e in root.inside]
        if all(
            is_host_blocked(r) and scene.states[rank].threads == 1
            for rank, r in records
        ):
            return True  # nobody in it can post anything: no need to wait
        limit = _PATIENCE_NS if scene.trigger else _CYCLE_NS
        return min(scene.age_s(rank, r) for rank, r in records) * 1e9 >= limit
    waiters = [scene.age_s(e.waiter, e.op) * 1e9 for e in root.incoming]
    waited = max(waiters, default=0.0)
    limit = _PATIENCE_NS if scene.trigger else _SLOW_NS
    if single is None:
        own = [scene.states[r] for r in root.ranks if r in scene.states]
        waited = max([waited, *(_blocked_ns(scene, s) for s in own)])
        return waited >= limit
    state = scene.states[single]
    is_certain = any(e.why is not Why.GONE for e in root.incoming)
    if state.is_over and is_certain:
        return True
    if state.is_over or state.life is Life.DISABLED:
        return waited >= limit
    quiet = state.until_ns - state.last_ns
    if scene.graph.blocked(single):
        return max(waited, _blocked_ns(scene, state)) >= limit
    if not scene.trigger:
        slowest = max([state.longest_ns, *(scene.states[e.waiter].longest_ns for e in root.incoming)])
        limit = max(limit, min(3 * slowest, 600_000_000_000))
    return waited >= limit and quiet >= limit


def _blocked_ns(scene: Scene, state: RankState) -> float:
    ages = [scene.age_s(state.rank, r) * 1e9 for r in scene.graph.blocked(state.rank)]
    return max(ages, default=0.0)


def _waiting_ops(root: Root) -> Iterator[tuple[int, Record]]:
    """The ops that are waited for at a root: (rank, op), each once."""
    seen = set()
    for edge in (*root.inside, *root.incoming):
        if edge.op.kind is Kind.OP and (edge.waiter, edge.op.seq) not in seen:
            seen.add((edge.waiter, edge.op.seq))
            yield edge.waiter, edge.op


def _began(scene: Scene, ops: Iterable[tuple[int, Record]]) -> int:
    return min((scene.wall_ns(rank, r) for rank, r in ops), default=scene.now_ns)


def _group_place(record: Record, ranks: Iterable[int]) -> tuple[tuple[object, ...], object]:
    """What replicas share (positions in the group) and what tells them apart."""
    group = record.group
    if group is None:
        return (), None
    places = tuple(group.ranks.index(r) if r in group.ranks else r for r in ranks)
    return (len(group.ranks), places), group.key


def _victims(scene: Scene, root: Root, culprits: Iterable[int]) -> tuple[int, ...]:
    guilty = set(culprits)
    held = {*root.ranks, *scene.graph.victims(root.nodes)}
    return tuple(sorted(r for r in held - guilty if r in scene.states))


# -- ops that face each other and never meet ------------------------------------------


def _facing(scene: Scene, root: Root) -> Cause | None:
    """A send and a receive of the same thing on different communicators."""
    for rank, waiting in _waiting_ops(root):
        for record in scene.graph.kernel(rank, waiting):
            if record.group is None or not scene.graph.is_unposted(rank, record):
                continue
            is_send = record.direction is Direction.SEND
            ends = (rank, record.peer) if is_send else (record.peer, rank)
            other = Direction.RECV if is_send else Direction.SEND
            for peer, facing in scene.unmatched(*ends, other):
                if _same_thing(record, facing):
                    return _face_to_face(scene, root, (rank, record), (peer, facing))
    return None


def _same_thing(a: Record, b: Record) -> bool:
    """Whether two ops can be meant for each other, by their labels."""
    if Pass.UNKNOWN in (a.pass_, b.pass_):
        return True
    return (_phase(a.pass_), a.microbatch) == (_phase(b.pass_), b.microbatch)


def _phase(pass_: Pass) -> Pass:
    return Pass.B if pass_ is Pass.I else pass_


_Side = tuple[int, Record]


def _face_to_face(scene: Scene, root: Root, a: _Side, b: _Side) -> Cause | None:
    (rank_a, op_a), (rank_b, op_b) = a, b
    assert op_a.group is not None
    assert op_b.group is not None
    evidence = (_op_evidence(scene, *a), _op_evidence(scene, *b))
    began = _began(scene, (a, b))
    fold, place = _group_place(op_a, sorted((rank_a, rank_b)))
    fold = (_labels(op_a, op_b), *fold)
    if op_a.group.key != op_b.group.key:
        culprits = tuple(sorted((rank_a, rank_b)))
        sentence = (
            f"r{rank_a} posts {op_text(op_a)} on group {op_a.group.label} and r{rank_b}"
            f" {op_text(op_b)} on group {op_b.group.label}: ops of different groups"
            f" never match{_absent(scene, a, b)}"
        )
        return Cause(
            verdicts.WRONG_GROUP, "error", sentence, culprits,
            _victims(scene, root, culprits), evidence, at_ns=began, fold=fold, place=place,
        )  # fmt: skip
    if op_a.transport is op_b.transport:
        if op_a.tag == op_b.tag:
            return None
        culprits = tuple(sorted((rank_a, rank_b)))
        sentence = (
            f"r{rank_a} posts {op_text(op_a)} with tag {op_a.tag} and r{rank_b}"
            f" {op_text(op_b)} with tag {op_b.tag}: gloo pairs by tag"
        )
        return Cause(
            verdicts.WRONG_TAG, "error", sentence, culprits,
            _victims(scene, root, culprits), evidence, at_ns=began, fold=fold, place=place,
        )  # fmt: skip
    mixed, lone = (a, b) if op_a.transport is Transport.GROUP else (b, a)
    return _transport_split(scene, root, mixed, lone, fold, place)


def _labels(*records: Record) -> tuple[object, ...]:
    return tuple(sorted((r.pass_, r.microbatch, r.stage) for r in records))


def _absent(scene: Scene, a: _Side, b: _Side) -> str:
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
    mixed: _Side,
    lone: _Side,
    fold: tuple[object, ...],
    place: object,
) -> Cause:
    (rank, op), (peer, single) = mixed, lone
    assert op.group is not None
    few = _few_microbatches(scene, (rank, peer))
    is_send = op.direction is Direction.SEND
    verb, what = ("fuses the send of", "receives it") if is_send else (
        "fuses the receive of", "sends it")  # fmt: skip
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
        sentence += f", because {_asymmetric(few)}"
        remedy = _few_remedy(few)
    return Cause(
        verdicts.TRANSPORT_SPLIT, "error", sentence, (rank,),
        _victims(scene, root, (rank,)),
        (_op_evidence(scene, *mixed), _op_evidence(scene, *lone)),
        remedy, _began(scene, (mixed, lone)), fold, place,
    )  # fmt: skip


def _asymmetric(run: ScheduleRun) -> str:
    n, stages = run.n_microbatches, run.num_stages
    return (
        f"n={n} < S={stages}: with fewer microbatches than stages neighbouring ranks"
        f" of {run.name} batch differently"
    )


def _few_remedy(run: ScheduleRun) -> tuple[str, ...]:
    stages = run.num_stages
    return (
        "use `pptrace.schedules.Schedule1F1B` in place of torch's: the same schedule,"
        f" correct for n={run.n_microbatches} too",
        f"or use n ≥ S: at least {stages} microbatches for {stages} stages",
        "or use `ScheduleGPipe`, which never mixes sends and receives",
    )


def _wrong_rank(scene: Scene, root: Root) -> Cause | None:
    """A rank in a group that was used as a global rank."""
    for rank, record in _waiting_ops(root):
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
                or not _same_thing(record, theirs)
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
            evidence = (_op_evidence(scene, rank, record), _op_evidence(scene, other, theirs))
            began = _began(scene, ((rank, record), (other, theirs)))
            return Cause(
                verdicts.WRONG_RANK, "error", sentence, (rank,),
                _victims(scene, root, (rank,)), evidence, at_ns=began,
            )  # fmt: skip
    return None


# -- what went apart earlier -----------------------------------------------------------


def first_conflict(view: ChannelView) -> Pair | None:
    """The first pair of a channel whose two sides mean different things."""
    for pair in view.pairs():
        a, b = pair.send.record, pair.recv.record
        if Pass.UNKNOWN in (a.pass_, b.pass_) or _same_thing(a, b):
            continue
        return pair
    return None


def _channels(scene: Scene, root: Root) -> Iterator[ChannelView]:
    """Channels between the ranks of a root and those that wait at it."""
    seen: set[Channel] = set()
    for rank, record in _waiting_ops(root):
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
    cause.victims = _victims(scene, root, cause.culprits)
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
            return _skip_cause(scene, src, skipped, f"isend {expected}→r{dst}", recv, dst)
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
    fold, place = _group_place(send, culprits)
    return Cause(
        code, "error", sentence, culprits,
        evidence=tuple(_op_evidence(scene, *side) for side in sides),
        at_ns=_began(scene, sides), fold=(sent, expected, *fold), place=place,
    )  # fmt: skip


def _skip_before(scene: Scene, rank: int, record: Record) -> Record | None:
    """The exception a rank went on after, before it posted ``record``."""
    survived = [e for e in scene.states[rank].survived if e.seq < record.seq]
    return survived[-1] if survived else None


def _skip_cause(
    scene: Scene, rank: int, exception: Record, op: str, waiting: Record, waiter: int
) -> Cause:
    place = _place(exception)
    sentence = (
        f"r{rank} went on after {_headline(exception)}"
        + (f" in {place}" if place else "")
        + f" and skipped {op}: from there on it is behind by that op, and r{waiter}"
        f" waits for {_record_text(waiting, scene, waiter)}"
    )
    fold, where = _group_place(waiting, (rank,))
    return Cause(
        verdicts.SKIPPED, "error", sentence, (rank,),
        evidence=(*_traceback(rank, exception), _op_evidence(scene, waiter, waiting)),
        at_ns=scene.wall_ns(rank, exception), fold=(_headline(exception), *fold), place=where,
    )  # fmt: skip


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
        cause = _skip_cause(scene, holder, state.survived[0], owed, edge.op, edge.waiter)
        cause.victims = _victims(scene, root, cause.culprits)
        return cause
    return None


def _earlier_conflict(scene: Scene, root: Root) -> Cause | None:
    cause = _diverged(scene, root)
    return cause if cause is not None and cause.code == verdicts.SKIPPED else None


def _sibling(scene: Scene, root: Root) -> Cause | None:
    """An op is missing whose siblings of the same microbatch have come."""
    for rank, record in _waiting_ops(root):
        if record.pass_ in (Pass.UNKNOWN, Pass.META) or record.k == 0:
            continue
        if not scene.graph.is_unposted(rank, record):
            continue
        view = scene.views[record.channel(rank)]
        is_send = record.direction is Direction.SEND
        mine, theirs = (view.sends, view.recvs) if is_send else (view.recvs, view.sends)
        want = (_phase(record.pass_), record.microbatch, record.step)
        expected = [
            op.record
            for op in mine.values()
            if (_phase(op.record.pass_), op.record.microbatch, op.record.step) == want
        ]
        came = [theirs[r.k].record for r in expected if r.k in theirs]
        came = [r for r in came if _same_thing(r, record)]
        if not came or any(r.returned_ns == 0 for r in came):
            continue
        return _fewer_tensors(scene, root, (rank, record), len(expected), len(came))
    return None


def _fewer_tensors(
    scene: Scene, root: Root, side: _Side, expected: int, came: int
) -> Cause:
    rank, record = side
    peer = record.peer
    verbs = ("sends", "receives") if record.direction is Direction.SEND else (
        "expects", "sends")  # fmt: skip
    sentence = (
        f"r{rank} {verbs[0]} {expected} tensors for {record.label} and r{peer}"
        f" {verbs[1]} {came}: index {record.tensor_index} has no partner"
        f" ({owed_text(rank, record)} was never posted)"
    )
    fold, place = _group_place(record, (peer,))
    return Cause(
        verdicts.MISSING_OP, "error", sentence, (peer,), _victims(scene, root, (peer,)),
        (_op_evidence(scene, rank, record), _now_line(scene, peer)),
        at_ns=_began(scene, (side,)), fold=(record.label, record.stage, *fold), place=place,
    )  # fmt: skip


def _now_line(scene: Scene, rank: int) -> str:
    text, since = doing(scene, rank)
    lasting = f" for {_seconds(since)}" if since is not None else ""
    return f"r{rank}: {text}{lasting}"


# -- steps and start-up ----------------------------------------------------------------


def _run_not_started(scene: Scene, root: Root) -> Cause | None:
    """Waiters are in a run of the schedule that the rank they wait for never began."""
    for edge in (*root.inside, *root.incoming):
        if edge.why is not Why.UNPOSTED or edge.op.peer not in scene.states:
            continue
        waiter, holder = scene.states[edge.waiter], scene.states[edge.op.peer]
        step, last = waiter.step, holder.last_step
        if step is None or last is None or holder.step is not None:
            continue
        in_collective = any(r.kind is Kind.COLLECTIVE for r in scene.graph.blocked(holder.rank))
        is_other = (step.text, step.flags & Flag.EVAL) != (last.text, last.flags & Flag.EVAL)
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
            f" {'has exited' if holder.life is Life.EXITED else is_text(_activity(scene, holder)[0])}"
        )
        fold, place = _group_place(edge.op, (holder.rank,))
        return Cause(
            verdicts.RUN_NOT_STARTED, "error", sentence, (holder.rank,),
            _victims(scene, root, (holder.rank,)),
            (_op_evidence(scene, edge.waiter, edge.op), _now_line(scene, holder.rank)),
            at_ns=_began(scene, ((edge.waiter, edge.op),)), fold=fold, place=place,
        )  # fmt: skip
    return None


def _start_up(scene: Scene, root: Root) -> Cause | None:
    """Metadata that the other side, already past its start-up, never posts."""
    for edge in (*root.inside, *root.incoming):
        op, state = edge.op, scene.states.get(edge.op.peer)
        if edge.why is not Why.UNPOSTED or op.pass_ is not Pass.META or state is None:
            continue
        past = next(
            (r for r in scene.graph.blocked(state.rank) if r.kind is Kind.OP), state.action
        )
        if state.step is None or past is None or past.pass_ in (Pass.META, Pass.UNKNOWN):
            continue
        modes = {r: run.metadata for r in (edge.waiter, state.rank) if (run := scene.schedule(r))}
        differ = ""
        if len(set(modes.values())) == 2:
            differ = " (" + ", ".join(f"r{r}: {mode}" for r, mode in modes.items()) + ")"
        sentence = (
            f"r{edge.waiter} takes part in the start-up exchange of shapes"
            f" ({op_text(op)}) and r{state.rank} does not{differ}: it"
            f" {is_text(_activity(scene, state)[0])}"
        )
        return Cause(
            verdicts.STARTUP_NOT_JOINED, "error", sentence, (state.rank,),
            _victims(scene, root, (state.rank,)),
            (_op_evidence(scene, edge.waiter, op), _now_line(scene, state.rank)),
            at_ns=_began(scene, ((edge.waiter, op),)),
        )  # fmt: skip
    return None


# -- collectives -----------------------------------------------------------------------


def _hubs(root: Root, kind: str) -> list[Hub]:
    nodes = [n for e in (*root.inside, *root.incoming) for n in (e.source, e.target)]
    found = dict.fromkeys(n for n in (*root.nodes, *nodes) if isinstance(n, Hub))
    return [hub for hub in found if hub.kind == kind]


def _collective_order(scene: Scene, root: Root) -> Cause | None:
    """The k-th collective of a group is not the same everywhere, or two cross."""
    hubs = sorted(_hubs(root, "collective"), key=lambda h: h.k)
    for hub in hubs:
        entered = scene.graph.collectives(hub)
        by_name: dict[str, list[int]] = {}
        for rank, record in entered.items():
            by_name.setdefault(record.text, []).append(rank)
        if len(by_name) > 1:
            return _crossed(scene, root, hub, by_name)
    ranks_in = {hub: set(scene.graph.collectives(hub)) for hub in hubs}
    if len(hubs) > 1 and root.is_cycle and not any(
        e.why in (Why.UNPOSTED, Why.IN_CALL, Why.SET_UP, Why.BEHIND) for e in root.inside
    ):
        parts = []
        for hub in hubs:
            group = scene.graph.groups[hub.group].label
            inside = sorted(ranks_in[hub] & set(root.ranks))
            name = next(iter(scene.graph.collectives(hub).values())).text
            parts.append(f"{names(inside)} in {name} #{hub.k} of group {group}")
        sentence = "collectives wait for each other: " + ", ".join(parts)
        return _collective_cause(scene, root, verdicts.COLLECTIVE_ORDER, sentence, root.ranks)
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
        f"collective #{hub.k} of group {group.label} is " + " but ".join(parts)
        + ": the ranks issue the collectives of one group in different orders"
    )
    return _collective_cause(scene, root, verdicts.COLLECTIVE_ORDER, sentence, culprits)


def _collective_cause(
    scene: Scene, root: Root, code: str, sentence: str, culprits: Iterable[int]
) -> Cause:
    guilty = tuple(sorted(culprits))
    lines = [_now_line(scene, r) for r in sorted({*guilty[:4], *root.ranks[:4]}) if r in scene.states]
    records = [(e.waiter, e.op) for e in (*root.inside, *root.incoming)]
    return Cause(
        code, "error", sentence, guilty, _victims(scene, root, guilty), tuple(lines),
        at_ns=_began(scene, records),
    )  # fmt: skip


def _mixed_cycle(scene: Scene, root: Root) -> Cause:
    """A cycle through a collective and P2P ops."""
    hub = min(_hubs(root, "collective"), key=lambda h: h.k)
    entered = scene.graph.collectives(hub)
    group = scene.graph.groups[hub.group]
    missing = [r for r in scene.graph.missing(hub) if r in root.ranks]
    late = [r for r in scene.graph.late(hub) if r in root.ranks]
    name = next((r.text for r in entered.values()), "a collective")
    inside = sorted(r for r in entered if r not in missing and r not in late)
    parts = [f"r{rank} {_instead(scene, rank)}" for rank in missing[:4]]
    parts += [f"r{rank} has queued it behind {_first(scene, rank)}" for rank in late[:4]]
    ahead = _ahead(scene, missing, inside)
    others = [r for r in (*missing, *late)]
    verb = "is" if len(inside) == 1 else "are"
    not_in = "not entered" if missing else "not begun"
    sentence = (
        (f"{names(inside)} {verb} in " if inside else "nobody can begin ")
        + f"{name} #{hub.k} of group {group.label}, which {names(others)}"
        f" ha{'s' if len(others) == 1 else 've'} {not_in}: {', '.join(parts)}, whose"
        f" partner comes only after it{ahead}"
    )
    odd = ahead or len(inside) > len(others)
    culprits = set(others) if odd else {*others, *(set(inside) & set(root.ranks))}
    cause = _collective_cause(
        scene, root, verdicts.COLLECTIVE_VS_P2P, sentence, culprits
    )
    cause.fold = (name, hub.k, len(group.ranks))
    cause.place = group.key
    return cause


def _instead(scene: Scene, rank: int) -> str:
    """What a rank does in place of entering a collective."""
    blocked = [r for r in scene.graph.blocked(rank) if r.kind is Kind.OP]
    if blocked:
        return f"waits for {_record_text(blocked[0], scene, rank)}"
    return is_text(_activity(scene, scene.states[rank])[0])


def _first(scene: Scene, rank: int) -> str:
    """The oldest op that a rank's streams cannot get past."""
    pending = scene.graph.pending[rank]
    return _record_text(pending[0], scene, rank) if pending else "its compute stream"


def _ahead(scene: Scene, missing: Sequence[int], inside: Sequence[int]) -> str:
    """Whether the missing ranks are a step further: then they left it out."""
    steps = {s.step for r in inside if (s := scene.states[r].last_step) is not None}
    for rank in missing:
        last = scene.states[rank].last_step
        if last is not None and steps and last.step > max(steps):
            return f"; r{rank} left it out and is in step {last.step} already"
    return ""


# -- cycles ------------------------------------------------------------------------------


def _cycle(scene: Scene, root: Root) -> Cause:
    if _hubs_inside(root, "collective"):
        return _mixed_cycle(scene, root)
    if _hubs_inside(root, "set-up"):
        return _set_up(scene, root)
    truncated = [e for e in root.inside if e.why is Why.IN_CALL and isinstance(e.target, int)]
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
        (r for r in scene.graph.kernel(fused, theirs) if scene.graph.is_unposted(fused, r)),
        theirs,
    )
    few = _few_microbatches(scene, root.ranks)
    because = f"; {_asymmetric(few)}" if few else ""
    batch = batch_text(scene, fused, theirs)
    fold, place = _group_place(edge.op, (fused, lone))
    common = dict(
        evidence=(_op_evidence(scene, fused, missing), _op_evidence(scene, lone, edge.op)),
        at_ns=_began(scene, ((fused, missing), (lone, edge.op))),
        fold=(_labels(edge.op, missing), *fold),
        place=place,
        remedy=_few_remedy(few) if few else (),
    )
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
            verdicts.GROUPING, "error", sentence, culprits,
            _victims(scene, root, culprits), **common,
        )  # type: ignore[arg-type]  # fmt: skip
    sentence = (
        f"r{fused} is inside the call that first uses its edges with r{lone}, with"
        f" {batch}, and r{lone} answers with the lone {op_text(edge.op)}: the set-up of"
        f" {owed_text(fused, missing)} needs r{lone} in a call that it would make only"
        f" after {op_text(edge.op)}{because}"
    )
    return Cause(
        verdicts.FIRST_USE, "error", sentence, (fused,),
        _victims(scene, root, (fused,)), **common,
    )  # type: ignore[arg-type]  # fmt: skip


def _around(scene: Scene, root: Root) -> list[tuple[int, Edge, int]]:
    """One way around a cycle: (rank, edge of its op, next rank)."""
    ranks = set(root.ranks)
    start = root.ranks[0]
    path: list[tuple[int, Edge, int]] = []
    seen: dict[int, int] = {}
    rank = start
    while rank not in seen:
        seen[rank] = len(path)
        step = next(((e, r) for e, r in scene.graph.waits_on(rank) if r in ranks), None)
        if step is None:
            return path
        path.append((rank, step[0], step[1]))
        rank = step[1]
    return path[seen[rank] :]


def _batch_cycle(scene: Scene, root: Root) -> Cause:
    around = _around(scene, root)
    order = "→".join(f"r{rank}" for rank, _, _ in around) + f"→r{around[0][0]}"
    wide = [
        (rank, e.op)
        for rank, e, _ in around
        if len({r.peer for r in scene.batch(rank, e.op) if e.op.flags & Flag.COALESCED}) > 1
    ]
    shared = ", ".join(f"r{rank}'s {batch_text(scene, rank, op)}" for rank, op in wide)
    sentence = f"the ranks wait for each other through batch boundaries, {order}"
    if wide:
        far = max(wide[0][1:], key=lambda r: r.seq)
        sentence += f": ops to different peers share a batch ({shared}), so {op_text(far)} holds the others"
    culprits = tuple(sorted({rank for rank, _ in wide} or set(root.ranks)))
    return Cause(
        verdicts.BATCH_CYCLE, "error", sentence, culprits,
        _victims(scene, root, culprits),
        tuple(_op_evidence(scene, rank, e.op) for rank, e, _ in around),
        at_ns=_began(scene, ((rank, e.op) for rank, e, _ in around)),
    )  # fmt: skip


def _plain_cycle(scene: Scene, root: Root) -> Cause:
    around = _around(scene, root)
    kinds = {e.op.direction for _, e, _ in around}
    culprits = tuple(sorted({rank for rank, _, _ in around}))
    ops = [f"r{rank} in {op_text(e.op)}" for rank, e, _ in around]
    if kinds == {Direction.SEND}:
        code = verdicts.SENDS_FACE
        word = "two sends wait for each other" if len(ops) == 2 else "sends wait for each other in a ring"
        tail = "each rank posts its receive only after its send"
    elif kinds == {Direction.RECV}:
        code = verdicts.RECVS_FACE
        word = "two receives wait for each other" if len(ops) == 2 else "receives wait for each other in a ring"
        tail = "each rank posts its send only after its receive"
    else:
        code = verdicts.WAIT_CYCLE
        word = "the ranks wait for each other in a circle"
        tail = "each waits for an op that the next posts only later"
    missing = ", ".join(
        f"{owed_text(rank, e.op)} of r{holder}" for rank, e, holder in around[:4]
    )
    sentence = f"{word}: {', '.join(ops)}; {tail} (missing: {missing})"
    fold, place = _group_place(around[0][1].op, culprits)
    return Cause(
        code, "error", sentence, culprits, _victims(scene, root, culprits),
        tuple(_op_evidence(scene, rank, e.op) for rank, e, _ in around),
        at_ns=_began(scene, ((rank, e.op) for rank, e, _ in around)),
        fold=(_labels(*(e.op for _, e, _ in around)), *fold), place=place,
    )  # fmt: skip


def _set_up(scene: Scene, root: Root) -> Cause:
    """The first batched op of a group, entered by some of its ranks only."""
    hub = _hubs(root, "set-up")[0]
    group = scene.graph.groups[hub.group]
    came = sorted(scene.graph.comers(hub.group))
    missing = scene.graph.missing(hub)
    known = [r for r in missing if r in scene.states]
    instead = "; ".join(f"r{r} {_short(scene, r)}" for r in known[:4])
    sentence = (
        f"the first batched P2P on group {group.label} was entered by {names(came)} only;"
        f" {names(missing)} never came"
        + (f" ({instead})" if instead else "")
        + ": setting up a lazily initialised group's communicator needs all of its"
        f" {len(group.ranks)} ranks"
    )
    culprits = tuple(missing)
    waiting = [(e.waiter, e.op) for e in (*root.inside, *root.incoming) if e.why is Why.SET_UP]
    lines = list(dict.fromkeys(_op_evidence(scene, rank, op) for rank, op in waiting))[:4]
    few = _few_microbatches(scene, came)
    fold, place = _group_place(waiting[0][1], culprits)
    return Cause(
        verdicts.GROUP_SETUP, "error", sentence, culprits,
        _victims(scene, root, culprits), (*lines, *(_now_line(scene, r) for r in known[:4])),
        _few_remedy(few) if few else (), _began(scene, waiting), fold, place,
    )  # fmt: skip


def _short(scene: Scene, rank: int) -> str:
    return is_text(doing(scene, rank)[0])


# -- one rank that everybody waits for ---------------------------------------------------


def _single(scene: Scene, root: Root, rank: int) -> Cause | None:
    state = scene.states[rank]
    blocked = scene.graph.blocked(rank)
    if blocked and not state.is_over:
        if any(r.flags & Flag.ANY_SOURCE for r in blocked):
            return _untrusted(scene, root)
        return _nothing_wrong(scene, root)
    if not root.incoming:
        return None
    for_set_up = _needs_more_than_peers(scene, root)
    if state.life is Life.EXITED:
        return _set_up(scene, root) if for_set_up else _exited(scene, root, state)
    if state.life is Life.DISABLED:
        return _untrusted(scene, root)
    if state.action is not None or state.step is not None:
        return _straggler(scene, root, state)
    if for_set_up:
        return _set_up(scene, root)
    if state.last_step is not None:
        return _between_steps(scene, root, state)
    if any(e.why is Why.UNPOSTED for e in root.incoming):
        return _not_posted(scene, root, state)
    if _hubs(root, "collective"):
        return _not_entered(scene, root)
    return _set_up(scene, root)


def _needs_more_than_peers(scene: Scene, root: Root) -> bool:
    """Whether a group's set-up lacks ranks that no waiting op is about."""
    peers = {e.op.peer for e in root.incoming if e.why is Why.UNPOSTED}
    return any(
        not peers.issuperset(scene.graph.missing(hub)) for hub in _hubs(root, "set-up")
    )


def _waiting_text(root: Root, rank: int, limit: int = 4) -> str:
    """``r1 waits for F0←r0``, for each rank that waits here."""
    parts = []
    for waiter, op in _waiting_ops(root):
        if waiter != rank:
            parts.append(f"r{waiter} waits for {op_text(op)}")
    parts += [
        f"r{e.waiter} is in {e.op.text} #{e.op.k}"
        for e in root.incoming
        if e.op.kind is Kind.COLLECTIVE and e.waiter != rank
    ]
    parts = list(dict.fromkeys(parts))
    more = [f"and {len(parts) - limit} more"] if len(parts) > limit else []
    return ", ".join([*parts[:limit], *more])


def _root_cause(
    scene: Scene,
    root: Root,
    state: RankState,
    code: str,
    severity: str,
    sentence: str,
    evidence: Sequence[str] = (),
) -> Cause:
    ops = list(_waiting_ops(root))
    waiters = [(e.waiter, e.op) for e in root.incoming]
    place: object = None
    fold: tuple[object, ...] = ()
    if ops:
        fold, place = _group_place(ops[0][1], (state.rank,))
        fold = (_labels(*(op for _, op in ops)), *fold)
    lines = [_op_evidence(scene, rank, op) for rank, op in ops[:6]]
    return Cause(
        code, severity, sentence, (state.rank,), _victims(scene, root, (state.rank,)),
        (*lines, *evidence), at_ns=_began(scene, waiters), fold=fold, place=place,
    )  # fmt: skip


def _straggler(scene: Scene, root: Root, state: RankState) -> Cause:
    text, since = doing(scene, state.rank)
    lasting = f" for {_seconds(since)}" if since is not None else ""
    sentence = (
        f"r{state.rank} is {_liveness(state)} and {text}{lasting}: a straggler, not a"
        f" deadlock; {_waiting_text(root, state.rank)}"
    )
    return _root_cause(
        scene, root, state, verdicts.STRAGGLER, "note", sentence, _stack(state)
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
        f" {_seconds(quiet)}, after step {state.last_step.step} (data iterator,"
        f" optimizer or other host code), not in communication;"
        f" {_waiting_text(root, state.rank)}"
    )
    return _root_cause(
        scene, root, state, verdicts.BETWEEN_STEPS, "warning", sentence, _stack(state)
    )


def _not_posted(scene: Scene, root: Root, state: RankState) -> Cause:
    waiter, op = min(_waiting_ops(root), key=lambda item: scene.wall_ns(*item))
    is_send = op.direction is Direction.SEND
    code = verdicts.RECV_NOT_POSTED if is_send else verdicts.SEND_NOT_POSTED
    call = ""
    if op.returned_ns == 0:
        low, high = sorted((waiter, op.peer))
        first = f"the first op of pair {low}:{high}" if op.k == 0 else "the call"
        call = f" is blocked inside the call ({first}) and"
    text, since = _short(scene, state.rank), doing(scene, state.rank)[1]
    lasting = f" for {_seconds(since)}" if since is not None else ""
    sentence = (
        f"r{waiter}{call} waits in {op_text(op)} for {_seconds(scene.age_s(waiter, op))},"
        f" and r{state.rank} has not posted {owed_text(waiter, op)}: it is"
        f" {_liveness(state)} and {text}{lasting}"
    )
    return _root_cause(scene, root, state, code, "warning", sentence, _stack(state))


def _exited(scene: Scene, root: Root, state: RankState) -> Cause:
    ops = list(_waiting_ops(root))
    owed = ", ".join(owed_text(w, op) for w, op in ops[:6])
    if ops and all(e.why is Why.GONE for e in root.incoming):
        sentence = (
            f"r{state.rank} finished normally before {owed} was complete:"
            f" {_waiting_text(root, state.rank)} in vain"
        )
        return _root_cause(scene, root, state, verdicts.EXITED, "error", sentence)
    collectives = [e.op for e in root.incoming if e.op.kind is Kind.COLLECTIVE]
    if not owed and collectives:
        owed = f"{collectives[0].text} #{collectives[0].k}"
    count = "" if len(ops) < 2 else f"{len(ops)} unmatched ops, "
    sentence = (
        f"r{state.rank} finished normally and owes {count}{owed}:"
        f" {_waiting_text(root, state.rank)} in vain"
    )
    return _root_cause(scene, root, state, verdicts.EXITED, "error", sentence)


def _not_entered(scene: Scene, root: Root) -> Cause:
    hub = _hubs(root, "collective")[0]
    entered = scene.graph.collectives(hub)
    group = scene.graph.groups[hub.group]
    missing = [r for r in scene.graph.missing(hub) if r in scene.states]
    name = next((r.text for r in entered.values()), "a collective")
    sentence = (
        f"{name} #{hub.k} of group {group.label} was entered by {names(list(entered))} but"
        f" not by {names(missing)}: "
        + "; ".join(f"r{r} {_short(scene, r)}" for r in missing[:4])
    )
    cause = _collective_cause(scene, root, verdicts.COLLECTIVE_NOT_ENTERED, sentence, missing)
    cause.severity = "warning"
    return cause


# -- nothing to be found, or not enough known --------------------------------------------


def _nothing_wrong(scene: Scene, root: Root) -> Cause:
    ranks = [r for r in root.ranks if r in scene.states]
    held = [(r, b) for r in ranks for b in scene.graph.blocked(r) if b.kind is Kind.OP]
    calls = [(r, b) for r, b in held if b.returned_ns == 0]
    victims = _victims(scene, root, ())
    if calls and len(calls) == len(held):
        rank, op = calls[0]
        low, high = sorted((rank, op.peer))
        since = _clock(scene.wall_ns(rank, op))
        sentence = (
            f"r{low} and r{high} are both inside the call since {since}"
            f" ({op_text(op)} on r{rank}): the set-up of pair ({low}, {high}) is in"
            " progress, no op is missing"
        )
        return Cause(
            verdicts.SETUP_IN_PROGRESS, "warning", sentence, (), victims,
            tuple(_op_evidence(scene, *side) for side in calls[:4]),
            at_ns=_began(scene, calls), fold=("in call", min(low, high)), place=None,
        )  # fmt: skip
    records = held or [(e.waiter, e.op) for e in root.incoming]
    return Cause(
        verdicts.NO_MISMATCH, "warning", "", (), victims,
        tuple(_op_evidence(scene, *s) if s[1].kind is Kind.OP else _now_line(scene, s[0]) for s in records[:4]),
        at_ns=_began(scene, records),
    )  # fmt: skip


def _is_unknown(scene: Scene, root: Root) -> bool:
    edges = root.inside or root.incoming
    if root.is_cycle:
        return any(e.why is Why.UNKNOWN for e in edges)
    return bool(edges) and all(e.why is Why.UNKNOWN for e in edges)


def _untrusted(scene: Scene, root: Root) -> Cause:
    """Counts cannot be trusted: say what is known and why that is not enough."""
    ranks = sorted({*root.ranks, *(e.waiter for e in root.incoming)})
    reasons = [
        f"r{r}: {scene.states[r].log.incomplete}"
        for r in ranks
        if r in scene.states and scene.states[r].log.incomplete
    ]
    waiting = _waiting_text(root, NONE)
    sentence = f"undetermined: {waiting or names(ranks) + ' are stuck'}"
    if reasons:
        sentence += f", but counts of ops cannot be trusted ({'; '.join(reasons[:3])})"
    else:
        sentence += ", but what the other side has posted is not known"
    lines = [_now_line(scene, r) for r in ranks[:6] if r in scene.states]
    settle = "run again with pptrace enabled on all ranks before the first op"
    return Cause(
        verdicts.UNDETERMINED, "warning", sentence, (), _victims(scene, root, ()),
        tuple(lines), (settle,), scene.now_ns,
    )  # fmt: skip


def _missing_file(scene: Scene, root: Root, rank: int) -> Cause | None:
    waiters = [scene.age_s(e.waiter, e.op) * 1e9 for e in root.incoming]
    limit = _PATIENCE_NS if scene.trigger else _CYCLE_NS
    if max(waiters, default=0.0) < limit:
        return None
    sentence = (
        f"undetermined: {_waiting_text(root, rank)}, and the black box of r{rank} is not"
        " here, so what it has posted is not known"
    )
    lines = [_op_evidence(scene, w, op) for w, op in list(_waiting_ops(root))[:4]]
    return Cause(
        verdicts.UNDETERMINED, "warning", sentence, (), _victims(scene, root, ()),
        tuple(lines), (f"the black box of r{rank} would settle it (rank{rank:05d}.pptrace)",),
        scene.now_ns,
    )  # fmt: skip


# -- ranks that ended ----------------------------------------------------------------------


def _traceback(rank: int, exception: Record | None) -> tuple[str, ...]:
    if exception is None or "\n" not in exception.text:
        return ()
    return (f"r{rank} raised:\n{exception.text.strip()}",)


def _owed(scene: Scene, rank: int) -> list[tuple[int, Record]]:
    """Ops of others that this rank has not answered: it owes their partners."""
    owed = [
        *scene.unmatched_at(rank, Direction.SEND),
        *scene.unmatched_at(rank, Direction.RECV),
    ]
    return sorted(owed, key=lambda item: scene.wall_ns(*item))


def raised(scene: Scene, state: RankState) -> Cause:
    """A rank ended in an exception of its own."""
    rank, exception = state.rank, state.exception
    victims = tuple(sorted(set(scene.graph.victims((rank,))) - {rank}))
    place = _place(exception)
    owed = _owed(scene, rank)
    sentence = f"r{rank} raised {_headline(exception)}"
    sentence += f" in {place}" if place else ""
    sentence += f" at {_clock(state.until_ns)}"
    if owed:
        sentence += f" before posting {owed_text(*owed[0])}"
    if victims:
        sentence += f"; {names(victims)} {'is a victim' if len(victims) == 1 else 'are victims'}"
    code = verdicts.RAISED
    found = re.search(r"Expecting (\d+) (\w+) but got (\d+)", _headline(exception))
    if found:
        code = verdicts.BATCH_TOO_SMALL
        sentence = (
            f"r{rank}'s batch gives {found[3]} chunks for n={found[1]} microbatches"
            f" ({_headline(exception)}), at {_clock(state.until_ns)}"
        ) + _behind(victims)
    lines = [f"waiting: {_op_evidence(scene, *item)}" for item in owed[:4]]
    stage = exception.stage if exception else NONE
    return Cause(
        code, "error", sentence, (rank,), victims,
        (*_traceback(rank, exception), *lines), at_ns=state.until_ns,
        fold=(_headline(exception), stage, place), place=rank,
    )  # fmt: skip


def died(scene: Scene, state: RankState) -> Cause:
    """A rank's process is gone without a word."""
    rank, log = state.rank, state.log
    victims = tuple(sorted(set(scene.graph.victims((rank,))) - {rank}))
    owed = _owed(scene, rank)
    process = f"pid {log.pid} on {log.host or 'an unknown host'}"
    how = "is gone without a word"
    if log.terminated_by:
        how = f"was ended by {log.terminated_by}"
    elif log.alive is None:
        how = "gives no sign of life any more"
    text = doing(scene, rank)[0].removeprefix("was: ")
    last = (scene.now_ns - state.last_ns) / 1e9
    sentence = f"r{rank} ({process}) {how}: last record {_seconds(last)} ago, {text}"
    if owed:
        sentence += f"; it owes {', '.join(owed_text(*item) for item in owed[:3])}"
    sentence += _behind(victims)
    lines = [f"waiting: {_op_evidence(scene, *item)}" for item in owed[:4]]
    return Cause(
        verdicts.DIED, "error", sentence, (rank,), victims, (*lines, *_stack(state)),
        at_ns=state.until_ns, fold=(log.host, state.until_ns // 5_000_000_000), place=rank,
    )  # fmt: skip
