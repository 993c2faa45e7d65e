"""Made-up runs: real black box files of ranks that never existed, for tests.

Everything is written through `pptrace.blackbox.BlackBox` and read back with
`pptrace.blackbox.read`, so a test sees exactly what it would see of a real job, without
torch, without processes and with times it chose itself.

Times are *true* nanoseconds since the start of the run, the same for all ranks. A
`Host` says what its own clocks make of them.

The short way is a program per rank in the notation of the pipeline literature::

    run = SyntheticRun(tmp_path, 2)
    run.play({0: "F0; S F0>1; R B0<1; B0", 1: "R F0<0; F0; B0; S B0>0"})
    logs = run.finish()

and the shortest `one_f_one_b`, which hangs for ``microbatches < ranks`` just as torch's
does where lone and mixed ops ride different communicators. What a program cannot say
is added with `SyntheticRun.action`, `op`, `collective`, `exception`, `note`, `status`.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pptrace import blackbox
from pptrace.blackbox import BlackBox
from pptrace.records import (
    Direction,
    Flag,
    Group,
    Kind,
    Pass,
    RankLog,
    ScheduleRun,
    Status,
    Transport,
)

__all__ = ["MS", "RUN_START_WALL_NS", "SECOND", "Host", "SyntheticRun", "one_f_one_b"]

MS = 1_000_000
SECOND = 1_000_000_000
RUN_START_WALL_NS = 1_750_000_000 * SECOND
"""True wall time at which every made-up run starts."""


@dataclass(frozen=True)
class Host:
    """A machine: its name and what its two clocks show when the run starts."""

    name: str = "node0"
    uptime_ns: int = 5_000 * SECOND
    """Monotonic time at the start of the run."""
    wall_skew_ns: int = 0
    """How far its wall clock is ahead of the true time."""

    @property
    def boot_id(self) -> str:
        """Made up, so no reader takes the ranks for processes of this machine."""
        return f"boot of {self.name}"


@dataclass
class _Op:
    """One op in play: where it is recorded and what it pairs with."""

    seq: int
    channel: int
    key: tuple[Transport, int, int]
    direction: Direction
    k: int
    posted_ns: int


@dataclass
class _Batch:
    """Ops that one wait waits for."""

    ops: list[_Op]
    wait_ns: int = 0


@dataclass
class _Player:
    """One rank on its way through its program."""

    rank: int
    program: Iterator[str]
    clock_ns: int = 0
    waiting: _Batch | None = None
    sends: _Batch | None = None
    """The last batch of sends alone, waited on before the next one."""
    step_seq: int = 0
    is_over: bool = False


@dataclass
class _RankState:
    """What one rank's black box is told, beside the box itself."""

    box: BlackBox
    host: Host
    channels: dict[tuple[Transport, Direction, int], tuple[int, int]] = field(
        default_factory=dict
    )
    done: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    status: tuple[Status, int] = (Status.RUNNING, 0)
    heartbeat_ns: int | None = None
    step: int = 0


class SyntheticRun:
    """Black boxes of ``world_size`` ranks in ``folder``, all in one process group.

    Args:
        folder: where the files go; must exist.
        world_size: number of ranks.
        hosts: the host of each rank; one host for all by default.
        rule: ``split`` (lone ops ride pair communicators, mixed batches the group's) or
            ``coalesced`` (all ride the group's).
        latency_ns: from the later of two posts to the completion of both ops.
        compute_ns: duration of an F; every other action takes twice as long.
        slots: capacity of each ring.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        *,
        hosts: Sequence[Host] | None = None,
        rule: str = "split",
        backend: str = "nccl",
        latency_ns: int = MS // 20,
        compute_ns: int = MS,
        slots: int = 1024,
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.rule = rule
        self.latency_ns = latency_ns
        self.compute_ns = compute_ns
        self.group = Group(1, "pp", "pipeline", tuple(range(world_size)), backend)
        self.end_ns = 0
        """Latest time recorded so far."""
        self._posted: dict[tuple[object, Direction], list[_Op]] = defaultdict(list)
        self._batches: list[tuple[int, _Batch]] = []
        self._ranks: list[_RankState] = []
        for rank in range(world_size):
            box = BlackBox(
                folder / blackbox.file_name(rank),
                rank=rank,
                world_size=world_size,
                run="synthetic",
                slots=slots,
            )
            box.group(self.group)
            self._ranks.append(_RankState(box, hosts[rank] if hosts else Host()))

    # -- single records ------------------------------------------------------------

    def action(
        self,
        rank: int,
        pass_: Pass,
        microbatch: int,
        begin_ns: int,
        end_ns: int = 0,
        *,
        stage: int | None = None,
        flags: Flag = Flag(0),
    ) -> int:
        """Record an action; ``end_ns`` 0 leaves it open. Returns the record's seq."""
        state = self._ranks[rank]
        seq = state.box.record(
            self._at(rank, begin_ns),
            Kind.ACTION,
            flags=flags,
            pass_=pass_,
            stage=rank if stage is None else stage,
            microbatch=microbatch,
            step=state.step,
        )
        self.set_times(rank, seq, done=end_ns)
        return seq

    def op(
        self,
        rank: int,
        direction: Direction,
        peer: int,
        posted_ns: int,
        done_ns: int = 0,
        *,
        transport: Transport = Transport.GROUP,
        pass_: Pass = Pass.UNKNOWN,
        microbatch: int = -1,
        tensor_index: int = 0,
        tag: int = 0,
        batch: tuple[int, int, int] | None = None,
        shape: tuple[int, ...] = (2, 8),
        flags: Flag = Flag.CONTIGUOUS,
        desc: str = "",
    ) -> int:
        """Record an op with the next k of its channel; return the record's seq.

        ``batch`` is (number, index, size) of the batch it belongs to; alone by default.
        """
        state = self._ranks[rank]
        box = state.box
        channel, k = self._next_k(state, transport, direction, tag, peer)
        number, index, size = batch or (box.next_batch(), 0, 1)
        numel = 1
        for extent in shape:
            numel *= extent
        seq = box.record(
            self._at(rank, posted_ns),
            Kind.OP,
            flags=flags,
            direction=direction,
            transport=transport,
            pass_=pass_,
            tensor_index=tensor_index,
            group=self.group.index,
            peer=peer,
            group_peer=peer,
            batch=number,
            batch_index=index,
            batch_size=size,
            k=k,
            tag=tag,
            step=state.step,
            stage=rank,
            microbatch=microbatch,
            signature=box.signature(shape, "float32", (*shape[1:], 1)),
            numel=numel,
            nbytes=4 * numel,
            text=box.text(desc),
            channel=channel,
        )
        box.set_posted(channel, k + 1)
        self.set_times(rank, seq, done=done_ns)
        if done_ns:
            self._count_done(rank, channel)
        return seq

    def collective(self, rank: int, name: str, begin_ns: int, end_ns: int = 0) -> int:
        """Record a collective of the group; ``end_ns`` 0 leaves it open."""
        state = self._ranks[rank]
        seq = state.box.record(
            self._at(rank, begin_ns),
            Kind.COLLECTIVE,
            group=self.group.index,
            step=state.step,
            text=state.box.text(name),
        )
        self.set_times(rank, seq, returned=end_ns, done=end_ns)
        return seq

    def exception(self, rank: int, message: str, at_ns: int) -> None:
        """Record an exception that left a hooked call and with it the step."""
        self._say(rank, Kind.EXCEPTION, message, at_ns)
        self.status(rank, Status.RAISED, at_ns)

    def note(self, rank: int, message: str, at_ns: int) -> None:
        """Record something pptrace says of itself."""
        self._say(rank, Kind.NOTE, message, at_ns)

    def status(self, rank: int, status: Status, at_ns: int) -> None:
        """Say what became of the rank."""
        self._ranks[rank].status = (status, at_ns)
        self.end_ns = max(self.end_ns, at_ns)

    def heartbeat(self, rank: int, at_ns: int) -> None:
        """Let the rank's last sign of life be here and not at the end of the run."""
        self._ranks[rank].heartbeat_ns = at_ns

    def schedule(self, rank: int, schedule: ScheduleRun) -> int:
        """Describe a schedule in the rank's black box; return its id."""
        return self._ranks[rank].box.schedule(schedule)

    def step(self, rank: int, begin_ns: int, *, schedule: int = 0) -> int:
        """Begin the rank's next step; later records of the rank belong to it."""
        state = self._ranks[rank]
        state.step += 1
        seq = state.box.record(
            self._at(rank, begin_ns), Kind.STEP, step=state.step, text=schedule
        )
        self.end_ns = max(self.end_ns, begin_ns)
        return seq

    def set_times(
        self,
        rank: int,
        seq: int,
        *,
        returned: int = 0,
        wait: int = 0,
        waited: int = 0,
        done: int = 0,
    ) -> None:
        """Set times of a record that became known later; 0 leaves one as it is."""
        for offset, at in (
            (blackbox.RETURNED, returned),
            (blackbox.WAIT, wait),
            (blackbox.WAITED, waited),
            (blackbox.DONE, done),
        ):
            if at:
                self._ranks[rank].box.set_time(seq, offset, self._at(rank, at))

    # -- programs ------------------------------------------------------------------

    def play(
        self, programs: Mapping[int, str], *, schedules: Sequence[int] = ()
    ) -> None:
        """Let ranks run programs until all have ended or none can go on.

        A program is a list separated by ``;`` of: ``F0`` (an action of the rank's own
        stage), ``S F0>1`` and ``R B0<1`` (an op of a label with a peer, ``x`` for no
        label), ``{S F0>1, R B0<1}`` (a batch), ``step`` and ``end`` (of a step),
        ``raise MESSAGE`` and ``stop`` (go no further, saying nothing). What has a
        receive in it is waited on at once; sends alone before the next sends alone and
        at the end. Sends are rendezvous.
        """
        players = [
            _Player(rank, (part.strip() for part in text.split(";") if part.strip()),
                    clock_ns=self.end_ns)
            for rank, text in programs.items()
        ]  # fmt: skip
        while any(self._advance(player, schedules) for player in players):
            pass
        for rank, batch in self._batches:
            done = self._completion(batch)
            for op in batch.ops if done else ():
                self.set_times(rank, op.seq, done=done)
                self._count_done(rank, op.channel)
        self._batches.clear()

    def finish(self, *, idle_ns: int = 0) -> dict[int, RankLog]:
        """Write the headers, close the files and read all of them back.

        Every rank gives its last sign of life ``idle_ns`` after the last record of the
        run, unless `heartbeat` said otherwise.
        """
        end = self.end_ns + idle_ns
        for state in self._ranks:
            self._write_header(
                state, end if state.heartbeat_ns is None else state.heartbeat_ns
            )
            state.box.close()
        paths = [state.box.path for state in self._ranks]
        return {rank: blackbox.read(path) for rank, path in enumerate(paths)}

    # -- inside --------------------------------------------------------------------

    def _at(self, rank: int, true_ns: int) -> int:
        self.end_ns = max(self.end_ns, true_ns)
        return self._ranks[rank].host.uptime_ns + true_ns

    def _say(self, rank: int, kind: Kind, message: str, at_ns: int) -> None:
        state = self._ranks[rank]
        state.box.record(
            self._at(rank, at_ns),
            kind,
            step=state.step,
            stage=rank,
            text=state.box.text(message),
        )

    def _next_k(
        self,
        state: _RankState,
        transport: Transport,
        direction: Direction,
        tag: int,
        peer: int,
    ) -> tuple[int, int]:
        key = (transport, direction, peer)
        channel, k = state.channels.get(key) or (
            state.box.channel(self.group.index, transport, direction, tag, peer, peer),
            0,
        )
        state.channels[key] = (channel, k + 1)
        return channel, k

    def _count_done(self, rank: int, channel: int) -> None:
        state = self._ranks[rank]
        state.done[channel] += 1
        state.box.set_done(channel, state.done[channel])

    def _completion(self, batch: _Batch) -> int:
        """When all ops of the batch were complete; 0 if one has no partner yet."""
        latest = 0
        for op in batch.ops:
            other = Direction.RECV if op.direction is Direction.SEND else Direction.SEND
            partners = self._posted[op.key, other]
            if op.k >= len(partners):
                return 0
            latest = max(latest, op.posted_ns, partners[op.k].posted_ns)
        return latest + self.latency_ns

    def _advance(self, player: _Player, schedules: Sequence[int]) -> bool:
        """Go one instruction further; say whether that was possible."""
        if player.waiting is not None:
            done = self._completion(player.waiting)
            if not done:
                return False
            player.clock_ns = max(player.clock_ns, done)
            for op in player.waiting.ops:
                self.set_times(player.rank, op.seq, waited=player.clock_ns)
            player.waiting = None
            return True
        instruction = None if player.is_over else next(player.program, None)
        if instruction is not None:
            return self._execute(player, instruction, schedules)
        player.is_over = True
        return self._wait_for_sends(player)

    def _wait_for_sends(self, player: _Player) -> bool:
        if player.sends is None:
            return False
        self._wait(player, player.sends)
        player.sends = None
        return True

    def _wait(self, player: _Player, batch: _Batch) -> None:
        player.waiting = batch
        for op in batch.ops:
            self.set_times(player.rank, op.seq, wait=player.clock_ns)

    def _execute(
        self, player: _Player, instruction: str, schedules: Sequence[int]
    ) -> bool:
        rank, word = player.rank, instruction.partition(" ")[0]
        if word == "step":
            player.step_seq = self.step(
                rank, player.clock_ns, schedule=schedules[rank] if schedules else 0
            )
        elif word == "end":
            if player.sends is not None:  # a step ends when its sends have
                player.program = itertools.chain(["end"], player.program)
                return self._wait_for_sends(player)
            self.set_times(rank, player.step_seq, done=player.clock_ns)
        elif word == "raise":
            self.exception(rank, instruction.partition(" ")[2], player.clock_ns)
            player.is_over, player.sends = True, None
        elif word == "stop":
            player.is_over, player.sends = True, None
        elif match := re.fullmatch(r"([FBIW])(\d+)", instruction):
            begin = player.clock_ns
            player.clock_ns += self.compute_ns * (1 if match[1] == "F" else 2)
            self.action(rank, Pass[match[1]], int(match[2]), begin, player.clock_ns)
        else:
            self._post(player, instruction.strip("{}").split(","))
        return True

    def _post(self, player: _Player, texts: Sequence[str]) -> None:
        ops = [_parse_op(text) for text in texts]
        is_mixed = len({direction for direction, *_ in ops}) == 2
        if not is_mixed and ops[0][0] is Direction.SEND and player.sends is not None:
            player.program = itertools.chain(
                ["{" + ",".join(texts) + "}"], player.program
            )
            self._wait_for_sends(player)
            return
        is_coalesced = is_mixed or self.rule == "coalesced"
        transport = Transport.GROUP if is_coalesced else Transport.PAIR
        flags = Flag.CONTIGUOUS | (Flag.COALESCED if is_coalesced else Flag(0))
        number = self._ranks[player.rank].box.next_batch()
        batch = _Batch([])
        for index, (direction, pass_, microbatch, peer) in enumerate(ops):
            seq = self.op(
                player.rank, direction, peer, player.clock_ns, transport=transport,
                pass_=pass_, microbatch=microbatch, flags=flags,
                batch=(number, index, len(ops)), desc="batch" if is_mixed else "lone",
            )  # fmt: skip
            batch.ops.append(self._enter(player, transport, direction, peer, seq))
        player.clock_ns += 5_000
        for op in batch.ops:
            self.set_times(player.rank, op.seq, returned=player.clock_ns)
        self._batches.append((player.rank, batch))
        if any(direction is Direction.RECV for direction, *_ in ops):
            self._wait(player, batch)
        else:
            player.sends = batch

    def _enter(
        self,
        player: _Player,
        transport: Transport,
        direction: Direction,
        peer: int,
        seq: int,
    ) -> _Op:
        is_send = direction is Direction.SEND
        key = (
            transport,
            player.rank if is_send else peer,
            peer if is_send else player.rank,
        )
        channel, posted = self._ranks[player.rank].channels[transport, direction, peer]
        op = _Op(seq, channel, key, direction, posted - 1, player.clock_ns)
        self._posted[key, direction].append(op)
        return op

    def _write_header(self, state: _RankState, heartbeat_ns: int) -> None:
        """Give the box the made-up host's identity and clocks.

        This reaches into the layout: the writer itself only knows the real clocks.
        """
        box_map, host = state.box._map, state.host
        identity = list(blackbox._IDENTITY.unpack_from(box_map))
        identity[16] = host.uptime_ns
        identity[17] = RUN_START_WALL_NS + host.wall_skew_ns
        identity[18] = host.boot_id.encode()
        identity[19] = host.name.encode()
        blackbox._IDENTITY.pack_into(box_map, 0, *identity)
        status, status_ns = state.status
        struct.pack_into(
            "<4Q",
            box_map,
            blackbox._O_STATUS,
            int(status),
            host.uptime_ns + status_ns,
            host.uptime_ns + heartbeat_ns,
            RUN_START_WALL_NS + heartbeat_ns + host.wall_skew_ns,
        )


def _parse_op(text: str) -> tuple[Direction, Pass, int, int]:
    match = re.fullmatch(r"\s*([SR]) (?:([FBIW])(\d+)|x)([<>])(\d+)\s*", text)
    assert match is not None, f"not an op: {text!r}"
    direction = Direction.SEND if match[1] == "S" else Direction.RECV
    assert (match[4] == ">") == (match[1] == "S"), f"arrow points back: {text!r}"
    pass_ = Pass[match[2]] if match[2] else Pass.UNKNOWN
    return direction, pass_, int(match[3] or -1), int(match[5])


def one_f_one_b(
    folder: Path,
    ranks: int = 4,
    microbatches: int = 8,
    *,
    steps: int = 1,
    hosts: Sequence[Host] | None = None,
    rule: str = "split",
    slots: int = 1024,
) -> SyntheticRun:
    """Play 1F1B, one stage per rank; hangs for microbatches < ranks under ``split``.

    The run is not finished, so more can be recorded; call ``finish`` for the logs.
    """
    run = SyntheticRun(folder, ranks, hosts=hosts, rule=rule, slots=slots)
    schedules = [
        run.schedule(
            rank,
            ScheduleRun(
                name="Schedule1F1B",
                n_microbatches=microbatches,
                num_stages=ranks,
                stages=(rank,),
                stage_to_rank={r: r for r in range(ranks)},
                group=run.group.key,
            ),
        )
        for rank in range(ranks)
    ]
    programs = {
        rank: "; ".join(
            ["step", *_one_f_one_b_program(rank, ranks, microbatches), "end"] * steps
        )
        for rank in range(ranks)
    }
    run.play(programs, schedules=schedules)
    return run


def _one_f_one_b_program(stage: int, stages: int, microbatches: int) -> list[str]:
    """One rank's step: a warm-up of forwards, then backward and forward in turn.

    The last send of the warm-up is held back for the first backward's receive.
    """
    has_next, has_previous = stage < stages - 1, stage > 0
    program: list[str] = []

    def post(*ops: str | bool) -> None:
        if wanted := [op for op in ops if op]:
            program.append("{" + ",".join(map(str, wanted)) + "}")

    def forward(microbatch: int) -> None:
        program.append(f"F{microbatch}")

    warm_up = min(microbatches, stages - stage)
    for m in range(warm_up):
        if m:
            post(has_next and f"S F{m - 1}>{stage + 1}")
        post(has_previous and f"R F{m}<{stage - 1}")
        forward(m)
    last_send = f"S F{warm_up - 1}>{stage + 1}"
    for b in range(microbatches):
        f = warm_up + b
        post(has_next and last_send, has_next and f"R B{b}<{stage + 1}")
        program.append(f"B{b}")
        sent = has_previous and f"S B{b}>{stage - 1}"
        if f < microbatches:
            post(sent, has_previous and f"R F{f}<{stage - 1}")
            forward(f)
            last_send = f"S F{f}>{stage + 1}"
        else:
            post(sent)
            last_send = ""
    return program
