"""The scene of a hang: everything known of a run, and the words to say it in."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pptrace.matching import ChannelView
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
from pptrace.states import Life, RankState
from pptrace.waitfor import Hub, Root, WaitFor

__all__ = [
    "CYCLE_NS",
    "PATIENCE_NS",
    "Cause",
    "Scene",
    "Side",
    "activity",
    "asymmetry_text",
    "batch_text",
    "began_ns",
    "behind_text",
    "blocked_ns",
    "clock_text",
    "doing",
    "edge_text",
    "few_microbatches",
    "few_remedy",
    "group_place",
    "headline",
    "hubs_at",
    "is_text",
    "label_key",
    "names",
    "now_line",
    "op_evidence",
    "op_text",
    "owed_text",
    "phase_of",
    "place_text",
    "record_text",
    "same_thing",
    "seconds_text",
    "short_text",
    "stack_lines",
    "victims_of",
    "waiting_ops",
    "waiting_text",
]

PATIENCE_NS = 500_000_000
"""With an alarm behind it: the job has already waited long enough."""
CYCLE_NS = 2_000_000_000
"""Age of a cycle that hosts could still leave (CUDA's waits do not block them)."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_LIBRARY = re.compile(r"/(torch|pptrace|hooks)/")

Side = tuple[int, Record]
"""An op and the rank that posted it."""


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
    _facing: dict[tuple[int, int, Direction], list[Side]] | None = None

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

    def unmatched(self, src: int, dst: int, direction: Direction) -> list[Side]:
        """Pending sends (or receives) from src to dst without a partner."""
        return self._index().get((src, dst, direction), [])

    def unmatched_at(self, end: int, direction: Direction) -> list[Side]:
        """Pending sends to ``end`` (or receives from it) without a partner."""
        return self._index().get((NONE, end, direction), [])

    def _index(self) -> dict[tuple[int, int, Direction], list[Side]]:
        """Unmatched ops by (src, dst, direction), and by peer under (NONE, peer, …)."""
        if self._facing is None:
            self._facing = {}
            for rank, records in self.graph.pending.items():
                for r in records:
                    if r.group is None or not self.graph.is_unposted(rank, r):
                        continue
                    is_send = r.direction is Direction.SEND
                    src, dst = (rank, r.peer) if is_send else (r.peer, rank)
                    for key in ((src, dst, r.direction), (NONE, r.peer, r.direction)):
                        self._facing.setdefault(key, []).append((rank, r))
        return self._facing

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


# -- words ---------------------------------------------------------------------


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
    ranks = ",".join(map(str, group.ranks[:16])) + (
        ",…" if len(group.ranks) > 16 else ""
    )
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
    return (
        ", ".join(parts[:-1]) + f" {word} {parts[-1]}" if len(parts) > 1 else parts[0]
    )


def seconds_text(value: float) -> str:
    """``12.3 s``, ``4 min 5 s``, ``3 h 2 min``."""
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def clock_text(wall_ns: int) -> str:
    """Time of day, UTC."""
    moment = datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.timezone.utc)
    return f"{moment:%H:%M:%S} UTC"


def place_text(record: Record | None) -> str:
    """``F0 of stage 1 (step 2)``."""
    if record is None or record.pass_ is Pass.UNKNOWN:
        text = ""
    elif record.pass_ is Pass.META:
        text = "the start-up exchange"
    else:
        text = record.label
    if (
        text
        and record is not None
        and record.stage != NONE
        and record.pass_ != Pass.META
    ):
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


def record_text(record: Record, scene: Scene, rank: int) -> str:
    """An op with its batch, or a collective with its number, group and thread."""
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
        head = headline(state.exception)
        record = state.exception
        place = place_text(record)
        age = state.log.to_wall_ns(record.posted_ns) if record else state.until_ns
        text = f"raised {head}" + (f" in {place}" if place else "")
        return text, (scene.now_ns - age) / 1e9
    if state.life is Life.EXITED:
        return "exited normally", (scene.now_ns - state.until_ns) / 1e9
    text, record = activity(scene, state)
    since = state.age_ns(record.wait_ns or record.posted_ns) / 1e9 if record else None
    if record is None or record.done_ns:
        since = max(0.0, (state.until_ns - state.last_ns) / 1e9)
    if state.life is Life.DEAD:
        return f"was: {text}", (scene.now_ns - state.last_ns) / 1e9
    return text, since


def activity(scene: Scene, state: RankState) -> tuple[str, Record | None]:
    """What a rank is stuck in or busy with: a phrase and its record."""
    blocked = scene.graph.blocked(state.rank)
    if blocked:
        first = min(blocked, key=lambda r: r.wait_ns or r.posted_ns)
        what = record_text(first, scene, state.rank)
        if first.kind is Kind.COLLECTIVE:
            return f"in {what}", first
        if first.returned_ns == 0:
            return f"inside the call of {what}", first
        return f"waits for {what}", first
    if state.action is not None:
        return f"in {place_text(state.action)}", state.action
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


def headline(exception: Record | None) -> str:
    """Type and message of an exception."""
    if exception is None:
        return "an exception"
    head = exception.text.partition("\n")[0].strip() or "an exception"
    return head if len(head) <= 200 else head[:199] + "…"


def stack_lines(state: RankState) -> tuple[str, ...]:
    """Where the main thread is, from the stacks saved at detection or death.

    Its innermost frame, and the innermost that is not torch's or ours.
    """
    last: list[tuple[str, str, str]] = []
    for block in re.split(r"\n(?=.*[Tt]hread 0x)", state.log.stacks):
        frames = _FRAME.findall(block)
        if frames and frames[-1][2] == "<module>":  # only the main thread begins there
            last = frames
    own = [f for f in last if not _LIBRARY.search(f[0])]
    chosen = dict.fromkeys([*last[:1], *own[:1]])
    return tuple(
        f"stack of r{state.rank}: {path}:{line} in {name}"
        for path, line, name in chosen
    )


def op_evidence(scene: Scene, rank: int, record: Record) -> str:
    """One line: who, what, on which communicator, since when."""
    group = record.group.label if record.group else "?"
    if record.transport is Transport.GROUP:
        rides = f"the communicator of group {group}"
    else:
        low, high = sorted((rank, record.peer))
        rides = f"the pair communicator {low}:{high} of group {group}"
    state = _op_state(record, seconds_text(scene.age_s(rank, record)))
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


def now_line(scene: Scene, rank: int) -> str:
    """``r1: waits for B0←r2 for 12.3 s``."""
    text, since = doing(scene, rank)
    lasting = f" for {seconds_text(since)}" if since is not None else ""
    return f"r{rank}: {text}{lasting}"


def short_text(scene: Scene, rank: int) -> str:
    """What a rank is doing, as a predicate."""
    return is_text(doing(scene, rank)[0])


def few_microbatches(scene: Scene, ranks: Iterable[int]) -> ScheduleRun | None:
    """The schedule of these ranks if it has fewer microbatches than stages."""
    for rank in ranks:
        run = scene.schedule(rank)
        if run is not None and 0 < run.n_microbatches < run.num_stages:
            return run
    return None


def asymmetry_text(run: ScheduleRun) -> str:
    """Why fewer microbatches than stages hang."""
    n, stages = run.n_microbatches, run.num_stages
    return (
        f"n={n} < S={stages}: with fewer microbatches than stages neighbouring ranks"
        f" of {run.name} batch differently"
    )


def few_remedy(run: ScheduleRun) -> tuple[str, ...]:
    """What to change where microbatches are fewer than stages."""
    stages = run.num_stages
    return (
        (
            "use `pptrace.schedules.Schedule1F1B` in place of torch's: the same schedule,"
            f" correct for n={run.n_microbatches} too"
        ),
        f"or use n ≥ S: at least {stages} microbatches for {stages} stages",
        "or use `ScheduleGPipe`, which never mixes sends and receives",
    )


def behind_text(victims: Sequence[int]) -> str:
    """``; r2 and r3 wait behind it``."""
    if not victims:
        return ""
    verb = "waits" if len(victims) == 1 else "wait"
    return f"; {names(victims)} {verb} behind it"


# -- what waits at a root --------------------------------------------------------


def waiting_ops(root: Root) -> Iterator[tuple[int, Record]]:
    """The ops that are waited for at a root: (rank, op), each once."""
    seen = set()
    for edge in (*root.inside, *root.incoming):
        if edge.op.kind is Kind.OP and (edge.waiter, edge.op.seq) not in seen:
            seen.add((edge.waiter, edge.op.seq))
            yield edge.waiter, edge.op


def began_ns(scene: Scene, ops: Iterable[tuple[int, Record]]) -> int:
    """Wall time at which the first of some ops was posted."""
    return min((scene.wall_ns(rank, r) for rank, r in ops), default=scene.now_ns)


def group_place(
    record: Record, ranks: Iterable[int]
) -> tuple[tuple[object, ...], object]:
    """What replicas share (positions in the group) and what tells them apart."""
    group = record.group
    if group is None:
        return (), None
    places = tuple(group.ranks.index(r) if r in group.ranks else r for r in ranks)
    return (len(group.ranks), places), group.key


def victims_of(scene: Scene, root: Root, culprits: Iterable[int]) -> tuple[int, ...]:
    """Ranks held at a root, or behind it, that are not its culprits."""
    guilty = set(culprits)
    held = {*root.ranks, *scene.graph.victims(root.nodes)}
    return tuple(sorted(r for r in held - guilty if r in scene.states))


def label_key(*records: Record) -> tuple[object, ...]:
    """What the same ops of two replicas have in common."""
    return tuple(sorted((r.pass_, r.microbatch, r.stage) for r in records))


def same_thing(a: Record, b: Record) -> bool:
    """Whether two ops can be meant for each other, by their labels."""
    if Pass.UNKNOWN in (a.pass_, b.pass_):
        return True
    return (phase_of(a.pass_), a.microbatch) == (phase_of(b.pass_), b.microbatch)


def phase_of(pass_: Pass) -> Pass:
    """Forward, backward or other: gradients travel alike for B and I."""
    return Pass.B if pass_ is Pass.I else pass_


def hubs_at(root: Root, kind: str) -> list[Hub]:
    """The set-ups or collectives at a root."""
    nodes = [n for e in (*root.inside, *root.incoming) for n in (e.source, e.target)]
    found = dict.fromkeys(n for n in (*root.nodes, *nodes) if isinstance(n, Hub))
    return [hub for hub in found if hub.kind == kind]


def waiting_text(root: Root, rank: int, limit: int = 4) -> str:
    """``r1 waits for F0←r0``, for each rank that waits here."""
    parts = []
    for waiter, op in waiting_ops(root):
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


def blocked_ns(scene: Scene, state: RankState) -> float:
    """For how long a rank has been stuck; 0 if it is not."""
    ages = [scene.age_s(state.rank, r) * 1e9 for r in scene.graph.blocked(state.rank)]
    return max(ages, default=0.0)
