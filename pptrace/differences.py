"""What the two sides of an op, or the ranks of a pipeline, do not agree on.

Settings, payloads and labels differ whether or not somebody waits already, so they are
looked for apart from the wait-for graph.
"""

from __future__ import annotations

from pptrace import causes, verdicts
from pptrace.matching import ChannelView, Pair
from pptrace.records import Pass, Record, ScheduleRun, Signature
from pptrace.scene import Cause, Scene, edge_text, names, op_text

__all__ = ["mismatches", "payloads", "settings", "silent_conflicts"]


# -- settings --------------------------------------------------------------------------


def settings(scene: Scene) -> list[Cause]:
    """Settings that the ranks of one pipeline do not share."""
    pipelines: dict[object, dict[int, list[ScheduleRun]]] = {}
    for rank, state in scene.states.items():
        for run in state.log.schedules:
            pipelines.setdefault(run.group, {}).setdefault(rank, []).append(run)
    found = []
    for key, members in pipelines.items():
        cause = _pipeline_config(scene, key, members)
        if cause is not None:
            found.append(cause)
    return found


_SETTINGS = (
    ("schedule", lambda run: run.name),
    ("n_microbatches", lambda run: run.n_microbatches),
    ("number of stages", lambda run: run.num_stages),
    ("stage→rank map", lambda run: tuple(sorted(run.stage_to_rank.items()))),
)


def _pipeline_config(
    scene: Scene, key: object, members: dict[int, list[ScheduleRun]]
) -> Cause | None:
    shared = min(map(len, members.values()))
    for place in range(shared):
        for name, get in _SETTINGS:
            values: dict[object, list[int]] = {}
            for rank, runs in members.items():
                value = get(runs[place])
                if value or (value == 0 and name != "number of stages"):
                    values.setdefault(value, []).append(rank)
            if len(values) > 1:
                return _differs(scene, key, members, name, values)
    return None


def _differs(
    scene: Scene,
    key: object,
    members: dict[int, list[ScheduleRun]],
    name: str,
    values: dict[object, list[int]],
) -> Cause:
    most = max(map(len, values.values()))
    odd = [r for ranks in values.values() if len(ranks) < most for r in ranks]
    culprits = tuple(sorted(odd or members))
    said = ", ".join(
        f"{names(ranks)}: {name} {value}"
        for value, ranks in sorted(values.items(), key=lambda item: item[1])
    )
    kind = next(iter(members.values()))[0].name
    sentence = f"the ranks of one pipeline ({kind}) disagree on {name}: {said}"
    waiting = _first_unscheduled(scene, members) if name == "n_microbatches" else ""
    held = {r for r in members if scene.graph.edges.get(r)}
    held |= set(scene.graph.victims(culprits))
    return Cause(
        verdicts.CONFIG_DIFFERS,
        "error",
        sentence + waiting,
        culprits,
        tuple(sorted(held - set(culprits))),
        tuple(
            f"r{r}: {_run_text(runs[-1])}" for r, runs in sorted(members.items())[:8]
        ),
        fold=(name, tuple(map(str, values))),
        place=key,
        nodes=tuple(members),
    )


def _run_text(run: ScheduleRun) -> str:
    return (
        f"{run.name}, n_microbatches={run.n_microbatches}, {run.num_stages} stages"
        + (f", own stages {', '.join(map(str, run.stages))}" if run.stages else "")
        + (f", {run.metadata} metadata" if run.metadata else "")
    )


def _first_unscheduled(scene: Scene, members: dict[int, list[ScheduleRun]]) -> str:
    """An op that waits for a microbatch its peer never scheduled."""
    for rank in sorted(members):
        for record in scene.graph.pending.get(rank, []):
            runs = members.get(record.peer)
            if runs and record.microbatch >= runs[-1].n_microbatches:
                return (
                    f"; r{rank} waits for {op_text(record)}, and r{record.peer}"
                    f" scheduled {runs[-1].n_microbatches} microbatches"
                )
    return ""


# -- payloads --------------------------------------------------------------------------


def mismatches(scene: Scene) -> list[tuple[Pair, str]]:
    """First pair of each channel whose payloads differ, with the kind of difference."""
    found = []
    for view in scene.views.values():
        for pair in view.pairs():
            code = _difference(pair.send.record, pair.recv.record)
            if code:
                found.append((pair, code))
                break
    return found


def _difference(send: Record, recv: Record) -> str:
    a, b = send.signature, recv.signature
    if send.numel != recv.numel:
        return verdicts.SIZE_DIFFERS
    if a.dtype and b.dtype and a.dtype != b.dtype:
        return verdicts.DTYPE_DIFFERS
    if a.shape != b.shape:
        # A flat buffer on one side is common and harmless: the elements keep their order.
        both = len(a.shape) > 1 and len(b.shape) > 1
        squeezed = _squeeze(a.shape) == _squeeze(b.shape)
        return verdicts.SHAPE_DIFFERS if both and not squeezed else ""
    if _layout(a) != _layout(b):
        return verdicts.STRIDES_DIFFER
    return ""


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _layout(signature: Signature) -> tuple[int, ...]:
    """Strides that matter: those of dimensions with more than one element."""
    pairs = zip(signature.shape, signature.strides, strict=False)
    return tuple(stride for size, stride in pairs if size > 1)


def payloads(scene: Scene) -> list[Cause]:
    """Pairs whose payloads differ, one cause a channel; also where nothing hangs."""
    found = []
    for pair, code in mismatches(scene):
        if causes.first_conflict(scene.views[pair.channel]) is not None:
            continue  # the two are not meant for each other: said elsewhere
        found.append(_payload(scene, pair, code, _count(scene.views[pair.channel])))
    return found


def _count(view: ChannelView) -> tuple[int, int]:
    """Pairs of a channel that differ, and pairs seen."""
    pairs = list(view.pairs())
    differ = [p for p in pairs if _difference(p.send.record, p.recv.record)]
    return len(differ), len(pairs)


def _payload(scene: Scene, pair: Pair, code: str, counts: tuple[int, int]) -> Cause:
    send, recv = pair.send.record, pair.recv.record
    src, dst = pair.channel.src, pair.channel.dst
    sent, expected = (_payload_text(r, code) for r in (send, recv))
    step = f" in step {send.step}" if send.step > 0 else ""
    sentence = (
        f"{op_text(send)} of r{src} has {sent} but {op_text(recv)} of r{dst} expects"
        f" {expected}{step}"
    )
    if code == verdicts.SIZE_DIFFERS:
        sentence += f": {_size_text(send, recv)}"
    differ, seen = counts
    evidence = (
        f"{differ} of {seen} pairs seen on this channel differ; the first is k={pair.k}",
        f"r{src}: {op_text(send)}, {sent}, {edge_text(src, send)}",
        f"r{dst}: {op_text(recv)}, {expected}, {edge_text(dst, recv)}",
    )
    stuck = not scene.graph.is_complete(dst, recv) and _is_waited_long(scene, dst, recv)
    return Cause(
        code,
        "error" if stuck and code == verdicts.SIZE_DIFFERS else "warning",
        sentence,
        (src,),
        (dst,),
        evidence,
        at_ns=scene.wall_ns(src, send),
        fold=(send.label, sent, expected),
        place=pair.channel,
    )


def _size_text(send: Record, recv: Record) -> str:
    text = "nothing checks this on NCCL, the data is wrong or the op hangs"
    a, b = send.signature.shape, recv.signature.shape
    if a[:1] != b[:1] and a[1:] == b[1:] and send.pass_ is not Pass.UNKNOWN:
        text += (
            "; perhaps the batch does not divide evenly into microbatches, or its size"
            " changed"
        )
    return text


def _is_waited_long(scene: Scene, rank: int, record: Record) -> bool:
    return scene.age_s(rank, record) > (0.2 if scene.trigger else 5.0)


def _payload_text(record: Record, code: str) -> str:
    text = f"{record.signature} ({record.numel} elements, {record.nbytes} bytes)"
    if code == verdicts.STRIDES_DIFFER:
        text += f" strides {record.signature.strides}"
    return text


def silent_conflicts(scene: Scene, *, is_hang_explained: bool) -> list[Cause]:
    """Pairs that mean different things although nothing hangs on them.

    Where a hang is explained, a pair that has not been exchanged proves nothing: on
    CUDA hosts run ahead of the hang, and what they post there pairs up by chance.
    """
    found = []
    for view in scene.views.values():
        src, dst = view.channel.src, view.channel.dst
        if (src, dst) in scene.blamed or view.incomplete:
            continue
        pair = causes.first_conflict(view)
        if pair is not None and is_hang_explained:
            done = pair.send.record.done_ns or pair.recv.record.done_ns
            pair = pair if done else None
        if pair is not None:
            cause = causes.divergence(scene, view, pair)
            cause.severity = "warning"
            found.append(cause)
    return found
