"""The rules of P2P: each class of hang as a small program, and the schedules' tables.

Names like A2 are the cases of public reports the programs retell.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_programs import (
    gpipe,
    group_of,
    one_f_one_b,
    parse,
    programs,
    start_up,
)
from pptrace.records import Direction, Group, Transport
from pptrace.semantics import (
    TRUNCATED,
    Blocked,
    Communicator,
    Host,
    Kernel,
    KernelOp,
    KernelState,
    Law,
    Message,
    Obstacle,
    RankMachine,
    Rule,
    transport_of,
)
from pptrace.simulation import (
    At,
    EventKind,
    Fail,
    Post,
    Simulation,
    Spawn,
    Step,
    Sync,
    Wait,
    _HostThread,
    _Simulator,
    simulate,
)

Schedule = Callable[[Group, int, int, Rule], Iterable[Step]]

HOSTS = pytest.mark.parametrize("host", list(Host))
S, R = Direction.SEND, Direction.RECV


def run(texts: dict[int, str], *, eager: bool = False, **options: object) -> Simulation:
    """Simulate programs in the one-line notation."""
    return simulate(programs(texts, eager=eager), **options)  # type: ignore[arg-type]


def at(result: Simulation) -> dict[int, At]:
    """Where the first host thread of each rank stands."""
    return {host.rank: host.at for host in result.hosts if host.thread == 0}


def obstacles(result: Simulation) -> dict[int, tuple[Obstacle, tuple[int, ...]]]:
    """The first obstacle of each rank and the ranks it waits for."""
    found: dict[int, tuple[Obstacle, tuple[int, ...]]] = {}
    for blocked in result.blocked:
        found.setdefault(blocked.rank, (blocked.obstacle, blocked.ranks))
    return found


def verdict(result: Simulation) -> str:
    """One letter: ``.`` clean, ``E`` a call failed, ``X`` hangs, ``?`` ops are left."""
    if result.is_clean:
        return "."
    if result.errors:
        return "E"
    return "X" if result.is_deadlock else "?"


def row(
    schedule: Schedule,
    stages: int,
    rule: Rule,
    host: Host,
    *,
    eager: bool = False,
    dynamic: bool | None = None,
) -> str:
    """Verdicts of a schedule for 1 to 10 microbatches, one letter each."""

    def program(group: Group, rank: int, n: int) -> Iterator[Step]:
        if dynamic is not None:
            yield from start_up(group, rank, dynamic=dynamic)
        yield from schedule(group, rank, n, rule)

    letters = ""
    for n in range(1, 11):
        group = group_of(*range(stages), eager=eager)
        steps = {rank: program(group, rank, n) for rank in range(stages)}
        letters += verdict(simulate(steps, host=host))
    return letters


def failing_below(n: int, letter: str = "X") -> str:
    """The row of a schedule that fails for fewer than ``n`` microbatches."""
    return (letter * (n - 1)).ljust(10, ".")


# -- schedules ---------------------------------------------------------------------


@HOSTS
@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_split_lazy_1f1b_hangs_exactly_below_the_number_of_stages(
    stages: int, dynamic: bool | None, host: Host
) -> None:
    """Torch 2.13, lazy group: n < S hangs, whatever went before the first step."""
    found = row(one_f_one_b, stages, Rule.SPLIT, host, dynamic=dynamic)
    assert found == failing_below(stages)


@pytest.mark.parametrize("stages", [3, 4, 5, 6])
def test_coalesced_1f1b_hangs_at_one_microbatch_if_waits_do_not_block(
    stages: int,
) -> None:
    """Torch 2.8 on CUDA: deadlock at n = 1 alone, by first use of edges."""
    assert row(one_f_one_b, stages, Rule.COALESCED, Host.ASYNC) == failing_below(2)


@pytest.mark.parametrize("stages", [3, 4, 5, 6])
def test_coalesced_1f1b_hangs_below_the_number_of_stages_if_waits_block(
    stages: int,
) -> None:
    """Torch 2.8 emulated on gloo: deadlock for every n < S."""
    found = row(one_f_one_b, stages, Rule.COALESCED, Host.BLOCKING)
    assert found == failing_below(stages)


@HOSTS
def test_coalesced_1f1b_on_two_stages_fails_as_truncated(host: Host) -> None:
    """A one-sided first batch on a 2-rank communicator is an error, not a hang."""
    found = row(one_f_one_b, 2, Rule.COALESCED, host)
    assert found == failing_below(2, "E")


@HOSTS
def test_used_edges_let_coalesced_1f1b_pass(host: Host) -> None:
    """Without first use nothing is left of the coalesced rule's hang."""
    group = group_of(*range(4))
    steps = {r: one_f_one_b(group, r, 1, Rule.COALESCED) for r in range(4)}
    assert verdict(simulate(steps, host=host, preconnected=True)) == "."


@HOSTS
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_gpipe_never_hangs(stages: int, eager: bool, rule: Rule, host: Host) -> None:
    """E5: a schedule that never mixes directions passes under every rule."""
    for dynamic in (None, False, True):
        found = row(gpipe, stages, rule, host, eager=eager, dynamic=dynamic)
        assert found == "." * 10


# -- transport ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coalesced", "eager", "expected"),
    [
        (True, False, Transport.GROUP),
        (True, True, Transport.GROUP),
        (False, True, Transport.GROUP),
        (False, False, Transport.PAIR),
    ],
)
def test_only_single_ops_of_lazy_groups_ride_a_pair(
    coalesced: bool, eager: bool, expected: Transport
) -> None:
    """The table of what can match what."""
    assert transport_of(coalesced=coalesced, eager=eager) is expected


@pytest.mark.parametrize(
    ("directions", "split"), [([S], False), ([R, R], False), ([S, R], True)]
)
def test_split_rule_coalesces_mixed_batches_alone(
    directions: list[Direction], split: bool
) -> None:
    """The coalesced rule coalesces everything, the split rule what is mixed."""
    assert Rule.SPLIT.coalesces(directions) is split
    assert Rule.COALESCED.coalesces(directions)


def test_a_pair_is_the_same_communicator_on_both_ranks() -> None:
    """Whoever names it first, it is named lower rank first."""
    group = group_of(0, 5, 7)
    ours = Communicator.of(group, Transport.PAIR, 7, 5)
    theirs = Communicator.of(group_of(0, 5, 7, index=9), Transport.PAIR, 5, 7)
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert ours.label == "pp=[0,5,7] pair 5:7"
    assert ours != Communicator.of(group, Transport.GROUP)


# -- A: first use ------------------------------------------------------------------


@HOSTS
@pytest.mark.parametrize("dynamic", [False, True])
def test_a1_names_the_two_transports(dynamic: bool, host: Host) -> None:
    """1F1B, 4 stages, 2 microbatches: a fused send faces a lone receive."""
    group = group_of(*range(4))

    def program(rank: int) -> Iterator[Step]:
        yield from start_up(group, rank, dynamic=dynamic)
        yield from one_f_one_b(group, rank, 2, Rule.SPLIT)

    result = simulate({rank: program(rank) for rank in range(4)}, host=host)
    fused = next(b.kernel for b in result.blocked if b.rank == 0)
    lone = next(b.kernel for b in result.blocked if b.rank == 1)
    assert [(op.direction, op.peer, op.label) for op in fused.ops] == [
        (S, 1, "F1"),
        (R, 1, "B0"),
    ]
    assert [(op.direction, op.peer, op.label) for op in lone.ops] == [(R, 0, "F1")]
    assert fused.communicator.transport is Transport.GROUP
    assert lone.communicator.transport is Transport.PAIR
    assert {*fused.ops, *lone.ops} <= set(result.unmatched)


@HOSTS
def test_a2_waits_for_the_ranks_that_never_came(host: Host) -> None:
    """The first batch of a new group needs all of its ranks, not the two of the edge."""
    result = run({0: "{S1}", 1: "{R0}", 2: "", 3: ""}, host=host)
    assert result.is_deadlock
    assert at(result) == {0: At.CALL, 1: At.CALL, 2: At.ENDED, 3: At.ENDED}
    assert obstacles(result) == {
        0: (Obstacle.COMMUNICATOR, (2, 3)),
        1: (Obstacle.COMMUNICATOR, (2, 3)),
    }
    assert not result.unmatched  # the ops face each other: set-up is what is missing


@pytest.mark.parametrize("others", ["barrier", "{R0}"])
def test_a2_passes_once_all_ranks_have_been_in_a_call(others: str) -> None:
    """A collective counts as use of the group's communicator, and so does a batch."""
    if others == "barrier":
        texts = dict.fromkeys(range(4), "barrier")
        texts[0] += " {S1}"
        texts[1] += " {R0}"
    else:
        texts = {0: "{S1,S2,S3}", 1: others, 2: others, 3: others}
    assert run(texts).is_clean


def test_a2_passes_on_an_eager_group_and_for_single_ops() -> None:
    """Eager groups are set up already; a pair needs its two ranks alone."""
    assert run({0: "{S1}", 1: "{R0}", 2: ""}, eager=True).is_clean
    assert run({0: "S1", 1: "R0", 2: ""}).is_clean


@HOSTS
def test_a3_sees_set_up_inside_a_cycle_of_collectives(host: Host) -> None:
    """PP 2 by DP 2: first P2P between all-gathers issued in another order."""
    texts = {
        0: "@dp01:all_gather @pp02:S2",
        1: "@pp13:S3 @dp01:all_gather",
        2: "@pp02:R0 @dp23:all_gather",
        3: "@dp23:all_gather @pp13:R1",
    }
    groups = [
        group_of(0, 1, name="dp01"),
        group_of(2, 3, name="dp23"),
        group_of(0, 2, name="pp02"),
        group_of(1, 3, name="pp13"),
    ]
    result = simulate(programs(texts, *groups), host=host)
    assert obstacles(result) == {
        0: (Obstacle.COMMUNICATOR, (1,)),
        1: (Obstacle.COMMUNICATOR, (3,)),
        2: (Obstacle.COMMUNICATOR, (0,)),
        3: (Obstacle.COMMUNICATOR, (2,)),
    }
    assert all(state is At.CALL for state in at(result).values())


@HOSTS
def test_a4_sender_is_held_in_its_first_call(host: Host) -> None:
    """r1 receives only after a signal that r0 gives after its send."""
    result = run({0: "S1 !1", 1: "?0 R0"}, host=host)
    assert at(result) == {0: At.CALL, 1: At.SIGNAL}
    assert obstacles(result) == {0: (Obstacle.COMMUNICATOR, (1,))}


def test_a4_passes_if_the_edge_is_used_and_the_host_goes_on() -> None:
    """Once the edge is used, an asynchronous host gets past its send."""
    texts = {0: "S1 S1~ !1 W", 1: "R0 ?0 R0"}
    assert run(texts, host=Host.ASYNC).is_clean
    assert run({0: "S1 S1 !1", 1: "R0 ?0 R0"}, host=Host.BLOCKING).is_deadlock


@HOSTS
def test_a5_two_ops_are_unmatched_and_one_rank_has_ended(host: Host) -> None:
    """3 ranks: a receive nobody sends, a send nobody receives, r1 done."""
    result = run({0: "R1 R1", 1: "S0", 2: "S1"}, host=host)
    assert at(result)[1] is At.ENDED
    assert [(op.channel.src, op.channel.dst, op.k) for op in result.unmatched] == [
        (1, 0, 1),
        (2, 1, 0),
    ]


@HOSTS
def test_a6_isend_never_returns(host: Host) -> None:
    """A first isend nobody receives keeps the host inside the call."""
    result = run({0: "S1~", 1: ""}, host=host)
    assert at(result) == {0: At.CALL, 1: At.ENDED}
    assert result.blocked[0].in_call
    assert [op.k for op in result.unmatched] == [0]


def test_an_isend_on_a_used_edge_returns_and_is_left() -> None:
    """Nothing hangs, but an op nobody receives is no clean end either."""
    result = run({0: "S1 S1~", 1: "R0"}, host=Host.BLOCKING)
    assert verdict(result) == "?"
    assert obstacles(result) == {0: (Obstacle.PARTNER, (1,))}
    assert result.unmatched == result.pending == result.blocked[0].ops


def test_second_phase_waits_for_the_peers_own_first() -> None:
    """A rank whose edge was exchanged is still held while its peer's other is not."""
    result = run({0: "{S1,S2}", 1: "{R0}", 2: ""}, eager=True)
    assert obstacles(result) == {
        0: (Obstacle.EXCHANGE, (2,)),
        1: (Obstacle.CONFIRM, (0,)),
    }


def test_used_edges_skip_set_up_beside_new_ones() -> None:
    """A batch waits for the mirrors of its new edges, not of the used ones."""
    texts = {0: "{S1} {S1,S2}", 1: "{R0} R0", 2: "{R0}"}
    assert run(texts, eager=True).is_clean


# -- B, C: batching and order ------------------------------------------------------


@HOSTS
def test_b1_on_a_lazy_group_is_a_transport_split(host: Host) -> None:
    """Grouped on r0, separate on r1: two communicators, each set up by one rank."""
    result = run({0: "{S1,R1}", 1: "S0 R0"}, host=host)
    assert obstacles(result) == {
        0: (Obstacle.COMMUNICATOR, (1,)),
        1: (Obstacle.COMMUNICATOR, (0,)),
    }
    first, second = (blocked.kernel.communicator for blocked in result.blocked)
    assert first.transport is not second.transport


@HOSTS
def test_b1_on_one_communicator_of_two_ranks_is_truncated(host: Host) -> None:
    """The side that offers less than it is offered gets the error."""
    result = run({0: "{S1,R1}", 1: "S0 R0"}, eager=True, host=host)
    assert [(error.rank, error.error) for error in result.errors] == [(1, TRUNCATED)]
    assert obstacles(result) == {0: (Obstacle.EXCHANGE, (1,))}


@HOSTS
def test_b1_on_a_larger_group_hangs_in_first_use_alone(host: Host) -> None:
    """Three ranks: a rendezvous that cannot end; on used edges it just runs."""
    texts = {0: "{S1,R1}", 1: "S0 R0", 2: ""}
    result = run(texts, eager=True, host=host)
    assert obstacles(result) == {
        0: (Obstacle.EXCHANGE, (1,)),
        1: (Obstacle.CONFIRM, (0,)),
    }
    assert run(texts, eager=True, host=host, preconnected=True).is_clean


def test_a_broken_communicator_fails_later_calls_too() -> None:
    """After the error nothing can be posted there; other communicators work."""
    group = group_of(0, 1, eager=True)
    other = group_of(0, 1, name="dp", eager=True)

    def program(rank: int, text: str) -> Iterator[Step]:
        for step in parse(rank, text, group):  # a thread each: the first may be stuck
            if isinstance(step, Post):
                yield Spawn([step])
        yield from parse(rank, "barrier", other)

    steps = {0: program(0, "{S1,R1} barrier"), 1: program(1, "S0 barrier")}
    result = simulate(steps)
    assert [(error.rank, error.error) for error in result.errors] == [
        (1, TRUNCATED),
        (1, TRUNCATED),
    ]
    assert at(result)[1] is At.ENDED


def test_nothing_waits_for_a_kernel_whose_call_failed() -> None:
    """Another thread's wait on it, given before it failed, is over."""
    group = group_of(0, 1, eager=True)
    post, wait = parse(1, "{S0}", group)
    steps: dict[int, list[Step]] = {
        0: parse(0, "{S1,R1}", group),
        1: [Spawn([post]), Spawn([wait, *parse(1, "F0", group)])],
    }
    result = simulate(steps)
    assert [error.thread for error in result.errors] == [1]
    assert not result.undrained
    assert EventKind.COMPUTED in {event.kind for event in result.events}


def test_b2_is_a_cycle_through_batch_boundaries() -> None:
    """Skip connection: 0 waits for 2, 2 for 1, 1 for 0, until the edges are used."""
    texts = {0: "{S1,S2}", 1: "R0 F0 S2", 2: "{R0,R1}"}
    result = run(texts, eager=True, host=Host.BLOCKING)
    assert obstacles(result) == {
        0: (Obstacle.CONFIRM, (2,)),
        1: (Obstacle.PARTNER, (0,)),
        2: (Obstacle.EXCHANGE, (1,)),
    }
    assert run(texts, eager=True, host=Host.ASYNC).is_clean
    assert run(texts, eager=True, host=Host.BLOCKING, preconnected=True).is_clean


@HOSTS
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("preconnected", [False, True])
def test_b3_and_c1_sends_that_face_each_other_wait_for_ever(
    preconnected: bool, eager: bool, host: Host
) -> None:
    """Each send stands before the receive the other needs, on every transport."""
    texts = {0: "S1 R1", 1: "S0 R0"}
    result = run(texts, eager=eager, host=host, preconnected=preconnected)
    assert result.is_deadlock
    assert {rank for rank, _ in obstacles(result).items()} == {0, 1}
    expected = Obstacle.PARTNER if preconnected else Obstacle.EXCHANGE
    assert obstacles(result)[0] == (expected, (1,))


@HOSTS
def test_b3_fused_on_both_sides_passes(host: Host) -> None:
    """The remedy: one batch on both sides."""
    assert run({0: "{S1,R1}", 1: "{S0,R0}"}, host=host).is_clean


@HOSTS
def test_b4_a_lone_send_faces_a_mixed_batch(host: Host) -> None:
    """Lazy: transport split. Eager: first use. On used edges the receive may follow."""
    texts = {0: "S1 R1", 1: "{R0,S0}", 2: "", 3: ""}
    lazy = run(texts, host=host)
    assert obstacles(lazy) == {
        0: (Obstacle.COMMUNICATOR, (1,)),
        1: (Obstacle.COMMUNICATOR, (0, 2, 3)),
    }
    eager = run(texts, eager=True, host=host)
    assert obstacles(eager) == {
        0: (Obstacle.CONFIRM, (1,)),
        1: (Obstacle.EXCHANGE, (0,)),
    }
    assert run(texts, eager=True, host=host, preconnected=True).is_clean


@HOSTS
def test_one_communicator_runs_its_kernels_in_order(host: Host) -> None:
    """A kernel behind one that never matches waits, though its partner is there."""
    result = run({0: "R1~ S2~ W", 1: "", 2: "R0"}, eager=True, preconnected=True)
    assert [b.obstacle for b in result.blocked if b.rank == 0] == [
        Obstacle.PARTNER,
        Obstacle.ORDER,
    ]
    assert result.blocked[1].behind is result.blocked[0].kernel
    assert [(op.peer, op.direction) for op in result.unmatched] == [(1, R)]
    lazy = run({0: "R1~ S2~ W", 1: "", 2: "R0"}, preconnected=True, host=host)
    assert at(lazy)[2] is At.ENDED  # two pairs: no order between them


def test_a_matched_op_is_stuck_with_the_batch_that_holds_it() -> None:
    """The batch is not done before all match; the partner's kernel is."""
    result = run({0: "{S1,R2}", 1: "R0", 2: ""}, eager=True, preconnected=True)
    batch = result.blocked[0].kernel
    assert [op.matched for op in batch.ops] == [True, False]
    assert batch.state is KernelState.RUNNING
    assert at(result)[1] is At.ENDED
    assert [op.peer for op in result.pending] == [2]


def test_kernels_wait_for_what_the_compute_stream_waited_for() -> None:
    """CUDA: an op posted after a wait does not run before what was waited on is done."""
    groups = [group_of(0, 1, eager=True), group_of(0, 2, name="dp", eager=True)]
    texts = {0: "R1 F0 @dp:S2", 1: "", 2: "@dp:R0"}
    result = simulate(programs(texts, *groups), preconnected=True)
    assert at(result)[0] is At.ENDED  # the host is past everything
    assert result.undrained == (0, 2)
    by_rank = {b.kernel.ops[0].direction: b for b in result.blocked if b.rank == 0}
    assert by_rank[S].obstacle is Obstacle.COMPUTE
    assert by_rank[S].behind is by_rank[R].kernel
    assert EventKind.COMPUTED not in {event.kind for event in result.events}
    free = {0: "R1~ @dp:S2 W", 1: "", 2: "@dp:R0"}
    assert at(simulate(programs(free, *groups), preconnected=True))[2] is At.ENDED


def test_sizes_never_block() -> None:
    """F1: 12 bytes sent, 20 expected, and the other way round: both match."""
    assert run({0: "S1x12 S1x20", 1: "R0x20 R0x12"}).is_clean


def test_k_counts_ops_per_channel() -> None:
    """The k-th send of a channel pairs with its k-th receive, whatever lies between."""
    steps = programs({0: "S1 S2 S1 {S1,S1}", 1: "R0 R0 {R0,R0}", 2: "R0"}, eager=True)
    assert simulate(steps).is_clean
    posted = [step.kernel for step in steps[0] if isinstance(step, Post)]
    assert [op.k for kernel in posted for op in kernel.ops] == [0, 0, 1, 2, 3]


# -- collectives, threads, hosts ---------------------------------------------------


@HOSTS
def test_e3_a_barrier_and_a_send_in_another_order(host: Host) -> None:
    """r0 is in the barrier, r1 in a receive that r0 posts only after it."""
    result = run({0: "barrier S1", 1: "R0 barrier"}, eager=True, host=host)
    assert result.is_deadlock
    assert obstacles(result)[0] == (Obstacle.MEMBERS, (1,))


def test_collectives_and_ops_share_the_order_of_a_communicator() -> None:
    """An un-awaited receive nobody sends holds up the barrier posted after it."""
    result = run({0: "R1~ barrier", 1: "barrier"}, eager=True, preconnected=True)
    assert obstacles(result)[1] == (Obstacle.MEMBERS, (0,))
    assert run({0: "barrier~ S1 W", 1: "barrier~ R0 W"}, eager=True).is_clean


def test_i2_different_collectives_in_one_place_never_end() -> None:
    """all_gather first on r0, barrier first on r1; a nameless one pairs with any."""
    texts = {0: "all_gather barrier", 1: "barrier all_gather", 2: "barrier all_gather"}
    result = run(texts)
    assert obstacles(result) == {
        0: (Obstacle.MEMBERS, (1, 2)),
        1: (Obstacle.MEMBERS, (0,)),
        2: (Obstacle.MEMBERS, (0,)),
    }
    group = group_of(0, 1)
    nameless = Kernel(Communicator.of(group, Transport.GROUP), collective="")
    steps = {0: [Post(nameless), Wait(nameless)], 1: parse(1, "barrier", group)}
    assert simulate(steps).is_clean


def test_a_second_thread_queues_behind_the_first_in_set_up() -> None:
    """Set-up of a communicator is one call at a time, even for two host threads."""
    group = group_of(0, 1, 2)
    first, second = (
        next(step for step in parse(0, "{S1}", group) if isinstance(step, Post))
        for _ in range(2)
    )
    steps = {0: [Spawn([second]), first], 1: [], 2: []}
    result = simulate(steps)
    assert [(b.obstacle, b.behind) for b in result.blocked] == [
        (Obstacle.COMMUNICATOR, None),
        (Obstacle.CALL, first.kernel),
    ]
    assert [(host.thread, host.at) for host in result.hosts if host.rank == 0] == [
        (0, At.CALL),
        (1, At.CALL),
    ]


def test_a_raising_rank_is_no_deadlock_but_its_partners_are() -> None:
    """G1: r1 raises before it sends; r2 waits for it."""
    group = group_of(0, 1, 2)
    steps: dict[int, list[Step]] = {
        0: parse(0, "S1", group),
        1: [*parse(1, "R0", group), Fail("ValueError: x"), *parse(1, "S2", group)],
        2: parse(2, "R1", group),
    }
    result = simulate(steps)
    assert at(result) == {0: At.ENDED, 1: At.RAISED, 2: At.CALL}
    assert [(e.rank, e.error, e.begun) for e in result.errors] == [
        (1, "ValueError: x", 3)
    ]
    assert [op.channel.dst for op in result.unmatched] == [2]


def test_sync_and_host_waits_block_an_asynchronous_host() -> None:
    """A barrier and a synchronize hold the host on CUDA as well."""
    group = group_of(0, 1, eager=True)
    for last in (Sync(), None):
        steps = parse(0, "R1", group)
        if last is None:
            (post, wait) = steps
            assert isinstance(wait, Wait)
            steps = [post, Wait(wait.kernel, on_host=True)]
        else:
            steps.append(last)
        stuck = simulate({0: steps, 1: []}, preconnected=True)
        assert at(stuck)[0] is At.WAIT
    steps = [*parse(0, "R1", group), Sync(), *parse(0, "S1", group)]
    assert simulate({0: steps, 1: parse(1, "S0 R0", group)}).is_clean


def test_a_rank_without_a_program_takes_part_in_nothing() -> None:
    """Its partners wait for it, and are told so."""
    group = group_of(0, 1)
    result = simulate({0: parse(0, "S1", group)})
    assert obstacles(result) == {0: (Obstacle.COMMUNICATOR, (1,))}
    assert len(result.unmatched) == 1


def test_events_follow_cause_and_effect() -> None:
    """Posted before returned before matched before done before what waited for it."""
    result = run({0: "S1 B0", 1: "R0 F0"}, host=Host.ASYNC)
    kinds = [event.kind.value for event in result.events if event.rank == 1]
    assert kinds == ["posted", "returned", "matched", "done", "computed"]


def test_an_unknown_peer_is_refused() -> None:
    """An op must stay inside its group."""
    with pytest.raises(ValueError, match="no peer 7"):
        run({0: "{S7}", 1: ""})


# -- each rule is needed -----------------------------------------------------------


def _fused_after_start_up() -> dict[int, Iterable[Step]]:
    """A1 after dynamic start-up: every communicator and edge is used."""
    group = group_of(*range(4))

    def program(rank: int) -> Iterator[Step]:
        yield from start_up(group, rank, dynamic=True)
        yield from one_f_one_b(group, rank, 1, Rule.SPLIT)

    return {rank: program(rank) for rank in range(4)}


def _coalesced() -> dict[int, Iterable[Step]]:
    """A1 on torch 2.8: one transport, communicator set up, edges new."""
    group = group_of(*range(4))
    return {rank: one_f_one_b(group, rank, 1, Rule.COALESCED) for rank in range(4)}


def _two_of_four() -> dict[int, Iterable[Step]]:
    """A2."""
    return dict(programs({0: "{S1}", 1: "{R0}", 2: "", 3: ""}))


@HOSTS
@pytest.mark.parametrize(
    ("law", "case"),
    [
        (Law.TRANSPORT, _fused_after_start_up),
        (Law.SET_UP, _two_of_four),
        (Law.FIRST_USE, _coalesced),
    ],
    ids=["A1-transport", "A2-set-up", "A1-first-use"],
)
def test_each_case_hangs_by_exactly_one_rule(
    law: Law, case: Callable[[], dict[int, Iterable[Step]]], host: Host
) -> None:
    """It hangs; it passes without its rule; it hangs without the other two."""
    assert simulate(case(), host=host).is_deadlock
    assert simulate(case(), host=host, _without=law).is_clean
    others = Law.TRANSPORT | Law.SET_UP | Law.FIRST_USE
    assert simulate(case(), host=host, _without=others & ~law).is_deadlock


# -- the outcome depends on no timing ----------------------------------------------


class _Shuffled(_Simulator):
    """Takes the next host or message at random; each pair's messages stay in order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.pairs: dict[tuple[int, int], deque[Message]] = {}

    def send(self, peer: int, message: Message, op: KernelOp | None) -> None:
        del op
        self.pairs.setdefault((message.source, peer), deque()).append(message)

    def run(self) -> None:
        while True:
            choices: list[_HostThread | tuple[int, int]] = [*self.runnable]
            choices += [pair for pair, queue in self.pairs.items() if queue]
            if not choices:
                return
            choice = self.random.choice(choices)
            if isinstance(choice, tuple):
                self.machines[choice[1]].receive(self.pairs[choice].popleft())
            else:
                self.runnable.remove(choice)
                self._run_host(choice)


def _shuffled(
    steps: dict[int, list[Step]], seed: int, host: Host, preconnected: bool
) -> Simulation:
    simulator = _Shuffled(seed)
    for rank, program in steps.items():
        machine = RankMachine(rank, simulator, host=host, preconnected=preconnected)
        simulator.machines[rank] = machine
        simulator.start(machine, program)
    simulator.run()
    return simulator.outcome()


def _fingerprint(
    result: Simulation,
) -> tuple[object, object, object, object]:
    def told(blocked: Blocked) -> tuple[object, ...]:
        ops = tuple((op.channel, op.k) for op in blocked.ops)
        return (blocked.rank, blocked.obstacle, ops, blocked.ranks)

    return (
        [(host.rank, host.at, host.begun, host.error) for host in result.hosts],
        sorted(map(repr, map(told, result.blocked))),
        [(op.channel, op.direction, op.k) for op in result.unmatched],
        result.undrained,
    )


RANKS = 4


@st.composite
def random_texts(draw: st.DrawFn) -> dict[int, str]:
    """Programs that mostly fit together: edges put on both sides, then disturbed."""
    words: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["edge", "edge", "edge", "swap", "ring", "all"]))
        i, j = draw(st.permutations(range(RANKS)))[:2]
        wait = draw(st.sampled_from(["", "", "~"]))
        if kind == "all":
            for rank in range(RANKS):
                words[rank].append("barrier")
        elif kind == "ring":
            for rank in range(RANKS):
                after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
                words[rank].append(f"{{S{after},R{before}}}{wait}")
        elif kind == "swap":
            words[i].append(f"{{S{j},R{j}}}{wait}")
            words[j] += draw(
                st.sampled_from([[f"{{S{i},R{i}}}"], [f"R{i}", f"S{i}"], [f"{{R{i}}}"]])
            )
        else:
            batched = draw(st.booleans())
            words[i].append((f"{{S{j}}}" if batched else f"S{j}") + wait)
            if draw(st.integers(0, 9)):
                words[j].append(f"{{R{i}}}" if batched else f"R{i}")
    return {rank: " ".join([*found, "W"]) for rank, found in words.items()}


@settings(max_examples=150, deadline=None)
@given(
    texts=random_texts(),
    seed=st.integers(0, 2**32),
    host=st.sampled_from(Host),
    eager=st.booleans(),
    preconnected=st.booleans(),
)
def test_one_run_decides(
    texts: dict[int, str], seed: int, host: Host, eager: bool, preconnected: bool
) -> None:
    """Any order of hosts and messages leaves every rank at the same place."""
    once = simulate(programs(texts, eager=eager), host=host, preconnected=preconnected)
    again = _shuffled(programs(texts, eager=eager), seed, host, preconnected)
    assert _fingerprint(once) == _fingerprint(again)
