"""The verdicts: a stable code, a name, an explanation and a remedy for every class.

Codes never change their meaning and are never reused. `pptrace explain CODE` prints
`explain`; ``docs/verdicts.md`` is `to_markdown` written to a file.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from pptrace.errors import InputError

__all__ = ["VERDICTS", "Verdict", "explain", "to_markdown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a code stands for, wherever it appears."""

    code: str
    name: str
    meaning: str
    """One sentence."""
    explanation: str
    """Why it happens and how it was recognised; paragraphs."""
    remedy: tuple[str, ...]
    """What to change, most useful first."""


TRANSPORT_SPLIT = "PPT001"
FIRST_USE = "PPT002"
GROUP_SETUP = "PPT003"
SETUP_IN_PROGRESS = "PPT004"
GROUPING = "PPT005"
BATCH_CYCLE = "PPT006"
RECV_NOT_POSTED = "PPT010"
SEND_NOT_POSTED = "PPT011"
SENDS_FACE = "PPT012"
RECVS_FACE = "PPT013"
WAIT_CYCLE = "PPT014"
ORDER_DIFFERS = "PPT015"
MISSING_OP = "PPT016"
WRONG_GROUP = "PPT020"
WRONG_RANK = "PPT021"
WRONG_TAG = "PPT022"
CONFIG_DIFFERS = "PPT023"
RUN_NOT_STARTED = "PPT024"
STARTUP_NOT_JOINED = "PPT025"
REFUSED = "PPT026"
LEFT_THE_PLAN = "PPT027"
COLLECTIVE_VS_P2P = "PPT030"
COLLECTIVE_NOT_ENTERED = "PPT031"
COLLECTIVE_ORDER = "PPT032"
SIZE_DIFFERS = "PPT040"
DTYPE_DIFFERS = "PPT041"
SHAPE_DIFFERS = "PPT042"
STRIDES_DIFFER = "PPT043"
RAISED = "PPT050"
SKIPPED = "PPT051"
DIED = "PPT052"
EXITED = "PPT053"
BATCH_TOO_SMALL = "PPT054"
STRAGGLER = "PPT060"
BETWEEN_STEPS = "PPT061"
NO_MISMATCH = "PPT070"
UNDETERMINED = "PPT071"
ENDED_FROM_OUTSIDE = "PPT072"

_ALL = (
    Verdict(
        TRANSPORT_SPLIT,
        "transport split",
        "A send and the receive meant for it ride different communicators, so they"
        " never meet.",
        """
        On NCCL with a lazily initialised process group, ops of a coalesced batch
        (`batch_isend_irecv`) ride the group's communicator, and single `isend`/`irecv`
        calls ride a 2-rank communicator of their pair. torch 2.13 and later issues the
        ops of `_batch_p2p` one by one when they are all sends or all receives, and
        coalesced when they are mixed. So a send inside a mixed batch never matches a
        lone receive.

        Schedule1F1B holds back the last warm-up send and fuses it with the first
        backward receive: `{isend F, irecv B}`. With fewer microbatches than stages
        (n < S) the next rank still posts a lone receive for that F. gloo has no such
        split, which is why the same job passes on CPU.

        Recognised by two ops of the same label facing each other on the same pair of
        ranks and the same group, unmatched on both sides, one on the group's transport
        and one on the pair's.
        """,
        (
            (
                "use `pptrace.schedules.Schedule1F1B`: the same schedule, correct for any"
                " number of microbatches"
            ),
            "use at least as many microbatches as stages (n ≥ S)",
            "use `ScheduleGPipe`, which never mixes sends and receives",
            "hand-written code: batch the op on both sides, or on neither",
        ),
    ),
    Verdict(
        FIRST_USE,
        "first-use rendezvous deadlock",
        "Two ranks are inside the call that sets up an edge, and each needs the other"
        " to come with an op it would only post later.",
        """
        The first time an edge (a direction between two ranks) is used on a NCCL
        communicator, the call itself is a rendezvous on the host: every new edge of the
        batch waits for its peer to be in a call with the mirror edge, and only then for
        a second handshake. A batch `{send F0, receive B0}` therefore cannot even start
        before the peer comes with its send of B0, while the peer, inside a lone
        `{receive F0}`, waits for the second handshake.

        With 1F1B on torch ≤ 2.8 this is what happens with one microbatch on a fresh
        group.
        """,
        (
            "use `pptrace.schedules.Schedule1F1B`",
            "use at least as many microbatches as stages (n ≥ S), or `ScheduleGPipe`",
            "use each edge once, in both directions, before the first step (preconnect)",
        ),
    ),
    Verdict(
        GROUP_SETUP,
        "group set-up incomplete",
        "The first batched P2P of a lazily initialised group needs all of its ranks,"
        " and some never came.",
        """
        A process group without `device_id=` creates its communicator at its first
        batched P2P or collective, and creating it needs every rank of the group inside
        such a call. Ranks that came first are blocked inside the call: they never
        enqueued a work, so neither the watchdog nor Flight Recorder shows them.
        """,
        (
            (
                "run one collective on the group on all of its ranks before the first step"
                " (for example `dist.barrier(group=...)`)"
            ),
            (
                'pass `device_id=torch.device("cuda", local_rank)` to'
                " `init_process_group`, which sets groups up at creation"
            ),
            "use a group that has only the ranks that communicate",
        ),
    ),
    Verdict(
        SETUP_IN_PROGRESS,
        "set-up in progress on both sides",
        "Both sides of a pair are inside the call that sets up their communicator; no"
        " op is missing.",
        """
        Both ranks have entered the first op of their pair and neither call has
        returned. Nothing is unmatched, so the fault lies below: the set-up is kept from
        finishing by something else the devices are doing (collectives of another group
        issued in another order on the two sides, a full queue, a blocked allocation) or
        by the network.
        """,
        (
            "set the pair up before the first step, while nothing else is in flight",
            "issue collectives and the first P2P in the same order on all ranks",
            "look at the bootstrap network: `NCCL_DEBUG=INFO`, `NCCL_SOCKET_IFNAME`",
        ),
    ),
    Verdict(
        GROUPING,
        "grouping asymmetry",
        "One side of an edge issues its ops as one batch, the other one by one.",
        """
        A batch is one kernel and, at first use, one rendezvous: it does not start
        before all of its ops can. The other side issues the same ops separately and
        waits in between, so it never reaches the op that would let the batch start.
        NCCL leaves the behaviour of grouped against separate ops undefined.
        """,
        (
            "batch the same ops on both sides (`batch_isend_irecv`), or on neither",
            "pipeline schedules: `pptrace.schedules.Schedule1F1B` never mixes",
        ),
    ),
    Verdict(
        BATCH_CYCLE,
        "cycle through batch boundaries",
        "Ranks wait for each other in a circle because ops to different peers share"
        " a batch.",
        """
        Each batch starts or ends as a whole. An op that could go on is held by another
        op of the same batch, and following those from rank to rank leads back to the
        start. Typical for skip connections, whose tensor to a far stage shares the
        batch of the tensor to the next stage.
        """,
        (
            "issue the ops to different peers in batches of their own",
            "give skip connections a process group of their own",
        ),
    ),
    Verdict(
        RECV_NOT_POSTED,
        "receive not posted",
        "A rank waits in a send whose receive the other rank has not posted.",
        """
        The receiver is alive and blocked in nothing that pptrace records: it is in
        host code, or it waits for something outside torch.distributed that the sender
        would do only after the send. Sends are rendezvous: do not count on buffering.
        """,
        (
            "see what the receiver does (its Python stack) and post the receive first",
            "do not make the receive depend on what the sender does after its send",
        ),
    ),
    Verdict(
        SEND_NOT_POSTED,
        "send not posted",
        "A rank waits in a receive whose send the other rank has not posted.",
        """
        The sender is alive and blocked in nothing that pptrace records. Its counters
        say that it never posted the send.
        """,
        ("see what the sender does (its Python stack), and why it skips the send",),
    ),
    Verdict(
        SENDS_FACE,
        "sends face each other",
        "Ranks wait in sends to each other, each ahead of its own receive.",
        """
        Every send needs the receive of the other side, and every receive stands behind
        a send, in program order or in the queue of one communicator. Small messages may
        hide this where a transport buffers; NCCL P2P is a rendezvous.
        """,
        (
            (
                "put the send and the receive into one batch on both sides"
                " (`batch_isend_irecv`)"
            ),
            "or let one side receive first",
        ),
    ),
    Verdict(
        RECVS_FACE,
        "receives face each other",
        "Ranks wait in receives from each other, each ahead of its own send.",
        "Every receive needs a send that the other rank posts only after its receive.",
        ("let one side send first, or put both ops into one batch on both sides",),
    ),
    Verdict(
        WAIT_CYCLE,
        "wait cycle",
        "Ranks wait for each other in a circle: their programs order the ops"
        " differently.",
        """
        Each rank of the circle waits for an op that the next one posts only after the
        op it waits for itself.
        """,
        ("compare the order of ops on the ranks of the circle, listed in the report",),
    ),
    Verdict(
        ORDER_DIFFERS,
        "order differs",
        "The two sides of a channel post the same ops in another order.",
        """
        NCCL ignores tags: the k-th send pairs with the k-th receive. Up to some k both
        sides agree; there the sender sends one thing and the receiver expects another,
        and what each expects comes later on the other side.
        """,
        (
            "order the ops alike on both sides; the evidence names the first difference",
            "multi-stage schedules: build the action lists of all ranks from one table",
        ),
    ),
    Verdict(
        MISSING_OP,
        "missing or extra op",
        "One side of a channel posts fewer ops than the other expects.",
        """
        Typical: several tensors per microbatch of which one needs no gradient, so that
        one side sends fewer than the other receives; or one side leaves out a
        microbatch. Everything after the missing op is paired with the wrong partner.
        """,
        (
            "send and receive the same number of tensors on both sides",
            (
                "a tensor that needs no gradient: detach it and leave it out on both"
                " sides, or send zeros"
            ),
        ),
    ),
    Verdict(
        WRONG_GROUP,
        "different groups",
        "A send and the receive meant for it were issued on different process groups.",
        "Each group has communicators of its own; ops of different groups never match.",
        ("pass the same `group=` on both sides",),
    ),
    Verdict(
        WRONG_RANK,
        "wrong rank",
        "An op names a peer that never takes part; the rank in a group was used as a"
        " global rank.",
        """
        `P2POp.peer`, `src` and `dst` are global ranks, also for ops of a subgroup; the
        rank within the group is `group_peer`, `group_src`, `group_dst`.
        """,
        (
            (
                "pass `group_src=`/`group_dst=` for ranks within the group, or translate"
                " with `dist.get_global_rank(group, r)`"
            ),
        ),
    ),
    Verdict(
        WRONG_TAG,
        "different tags",
        "A send and the receive meant for it carry different tags on gloo.",
        "gloo pairs by (group, source, destination, tag); NCCL ignores the tag.",
        ("use the same tag on both sides, or none",),
    ),
    Verdict(
        CONFIG_DIFFERS,
        "configuration differs",
        "Ranks of one pipeline run with different settings.",
        """
        All ranks of a pipeline must agree on the schedule, the number of microbatches
        and the stages. A rank with more microbatches than its neighbour waits for ones
        that were never scheduled. This is checked before anything else.
        """,
        ("give all ranks of the pipeline the same configuration",),
    ),
    Verdict(
        RUN_NOT_STARTED,
        "schedule run not started",
        "Some ranks of a pipeline are in a run of the schedule that the others never"
        " started.",
        """
        `step()` and `eval()` must be called on all ranks of the pipeline equally often.
        From torch 2.13 a new schedule object already blocks in its start-up vote.
        """,
        ("call `step()`/`eval()` on every rank of the pipeline, or on none",),
    ),
    Verdict(
        STARTUP_NOT_JOINED,
        "start-up exchange not joined",
        "A rank takes part in the start-up exchange of shapes and its neighbour does"
        " not.",
        """
        Before the first microbatch, stages without static shapes exchange them. If one
        stage was given shapes and its neighbours were not, one side sends or expects
        metadata that the other never posts.
        """,
        ("give shapes to all stages of the pipeline, or to none",),
    ),
    Verdict(
        REFUSED,
        "refused by torch",
        "torch refuses to construct the schedule with these numbers.",
        """
        Said by `pptrace check` before any process starts: the schedule's own
        constructor raises. Some schedules need the number of microbatches to be a
        multiple of the ranks, or at least the number of stages.
        """,
        ("choose numbers the schedule accepts; the sentence quotes its reason",),
    ),
    Verdict(
        LEFT_THE_PLAN,
        "left the plan",
        "A rank posted another op than its schedule's plan has at that place.",
        """
        The checker's plan of the same schedule, stages and microbatches is laid beside
        the ops that each rank recorded in its current step. The rank named is the one
        whose first deviation comes earliest. Said only where nothing else explains the
        run: in a hang that is explained, deviations are consequences.
        """,
        (
            (
                "look at what the rank did before the op: a schedule changed at run time,"
                " a stage that makes its ops conditionally, an exception that was caught"
            ),
        ),
    ),
    Verdict(
        COLLECTIVE_VS_P2P,
        "collective versus P2P",
        "A rank is in a collective that another enters only after an op which the"
        " first one posts after the collective.",
        """
        The circle goes through a collective or barrier and through P2P ops. Either the
        two stand in another order on the two ranks, or one rank skipped the collective
        and went on.
        """,
        (
            "put the collective at the same place of the program on all ranks",
            "a rank without anything to contribute must enter the collective, too",
        ),
    ),
    Verdict(
        COLLECTIVE_NOT_ENTERED,
        "collective not entered by all",
        "A collective was entered by some ranks of the group only.",
        "The missing ranks are blocked in nothing that pptrace records.",
        ("enter the collective on every rank of the group, or use a smaller group",),
    ),
    Verdict(
        COLLECTIVE_ORDER,
        "collectives in another order",
        "Ranks of one group issue their collectives in different orders.",
        """
        The k-th collective of a group must be the same on all ranks. Two threads that
        share a group (a checkpoint thread and the main one) are the usual reason.
        """,
        (
            "give each thread a process group of its own",
            "issue the collectives of one group in the same order on all ranks",
        ),
    ),
    Verdict(
        SIZE_DIFFERS,
        "payload size differs",
        "A send and its receive have different numbers of elements.",
        """
        NCCL does not check: a longer receive returns with its tail untouched, a longer
        send may hang or overwrite; gloo terminates the process. No watchdog line
        appears.
        """,
        (
            "make the batch divisible by the number of microbatches (`drop_last=True`)",
            "shapes that change from step to step: pad them, or make a new schedule",
        ),
    ),
    Verdict(
        DTYPE_DIFFERS,
        "dtype differs",
        "A send and its receive have different dtypes.",
        "The bytes are copied as they are: the receiver reads garbage without an error.",
        ("use the same dtype on both sides (autocast on one side only?)",),
    ),
    Verdict(
        SHAPE_DIFFERS,
        "shape differs",
        "A send and its receive have the same number of elements in other shapes.",
        "The elements arrive in another arrangement without an error.",
        ("use the same shape on both sides",),
    ),
    Verdict(
        STRIDES_DIFFER,
        "strides differ",
        "A send and its receive have the same shape in other memory layouts.",
        "NCCL copies memory as it lies: the receiver sees a permuted tensor.",
        ("call `.contiguous()` before sending, and receive into a contiguous tensor",),
    ),
    Verdict(
        RAISED,
        "rank raised",
        "A rank raised an exception; those that wait for it are victims.",
        """
        The others time out minutes later, and the communication library is blamed. The
        exception and where it was raised stand in the evidence. Errors that are only
        the echo of another rank's end (connection closed, time-out) do not count as a
        cause.
        """,
        ("fix the exception on the named rank; ignore the time-outs of the others",),
    ),
    Verdict(
        SKIPPED,
        "skipped after an exception",
        "A rank caught an exception and went on, leaving out ops its peers wait for.",
        "From there on it is behind by those ops: every later one meets the wrong"
        " partner, or none.",
        (
            (
                "do not continue after an exception inside a step; or let all ranks of the"
                " pipeline skip the step together"
            ),
        ),
    ),
    Verdict(
        DIED,
        "rank died",
        "A rank's process is gone without a word.",
        """
        It ended neither normally nor by an exception: SIGKILL, the out-of-memory
        killer, a crash in native code, or a lost host. Its black box holds what it did
        last.
        """,
        (
            (
                "look at the host's kernel log (`dmesg`) for the out-of-memory killer, and"
                " at the scheduler's"
            ),
            "a crash in native code: run with `python -X faulthandler`",
        ),
    ),
    Verdict(
        EXITED,
        "exited owing an op",
        "A rank ended normally although others wait for an op of its.",
        "Its program was over: the peers expect more than it was written to do.",
        ("let both sides post the same ops; the evidence lists the ones left over",),
    ),
    Verdict(
        BATCH_TOO_SMALL,
        "batch smaller than microbatches",
        "A rank's batch has fewer rows than there are microbatches.",
        """
        The schedule splits the batch into n microbatches; a batch with fewer rows gives
        fewer chunks and the schedule refuses it. Typical for the last batch of an
        epoch.
        """,
        (
            "drop the last incomplete batch (`drop_last=True`) or use fewer microbatches",
        ),
    ),
    Verdict(
        STRAGGLER,
        "straggler",
        "A rank is alive and computing for long while others wait: slow, not"
        " deadlocked.",
        """
        The rank everyone waits for is inside an action and its process runs. A slow
        kernel, compilation, garbage collection, swapping, a debugger. This is a note:
        no op is missing.
        """,
        ("look at the Python stack of the named rank",),
    ),
    Verdict(
        BETWEEN_STEPS,
        "between steps",
        "A rank is outside the schedule (data iterator, optimizer, checkpoint) while"
        " others wait for it.",
        """
        It finished its last step, started no new one, and is in no communication that
        pptrace records.
        """,
        (
            (
                "look at the Python stack of the named rank: data loader, checkpoint,"
                " logging"
            ),
            "let all ranks draw the same number of batches",
        ),
    ),
    Verdict(
        NO_MISMATCH,
        "no logical mismatch found",
        "Everything pending has its partner on the other side; the reason lies below"
        " the program.",
        """
        Ruled out: missing or extra ops, wrong order, group or rank, transport split,
        incomplete set-up, dead or raised ranks. Left: the network, a GPU that does not
        make progress, very large and unequal batches (NCCL before 2.30 splits them
        differently per rank), another library on the same device.
        """,
        (
            "`NCCL_DEBUG=INFO`, link and GPU health of the named ranks",
            "batches of hundreds of ops: issue them in chunks",
        ),
    ),
    Verdict(
        UNDETERMINED,
        "undetermined",
        "What was recorded does not suffice for a verdict.",
        """
        A rank's black box is missing, or its counts cannot be trusted (pptrace enabled
        late, disabled, or a hook that switched itself off). The report says what is
        known and which file would settle it.
        """,
        ("collect the files named in the evidence and run `pptrace report` again",),
    ),
    Verdict(
        ENDED_FROM_OUTSIDE,
        "ended from outside",
        "The job was ended by a signal while it was making progress.",
        "The launcher, the scheduler or a user ended it; nothing was stuck.",
        ("look at the launcher's or scheduler's log for the reason",),
    ),
)

VERDICTS: dict[str, Verdict] = {verdict.code: verdict for verdict in _ALL}
"""Every verdict by its code, in order."""


def explain(code: str) -> str:
    """The page of one code, as text.

    Raises:
        InputError: there is no such code.
    """
    verdict = VERDICTS.get(code.strip().upper())
    if verdict is None:
        raise InputError(
            code, "is not a verdict code", f"codes are {', '.join(VERDICTS)}"
        )
    return "\n".join(
        [
            f"{verdict.code}: {verdict.name}",
            "",
            verdict.meaning,
            "",
            _paragraphs(verdict),
            "",
            "What to do:",
            *(f"  - {line}" for line in verdict.remedy),
        ]
    )


def _paragraphs(verdict: Verdict) -> str:
    blocks = textwrap.dedent(verdict.explanation).strip().split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(b.split()), 80) for b in blocks)


def to_markdown() -> str:
    """All pages as one Markdown document (``docs/verdicts.md``)."""
    lines = [
        "# Verdicts",
        "",
        (
            "Generated from `pptrace/verdicts.py`; do not edit. `pptrace explain CODE`"
            " prints one page."
        ),
        "",
        "| code | name | meaning |",
        "|---|---|---|",
        *(f"| [{v.code}](#{v.code.lower()}) | {v.name} | {v.meaning} |" for v in _ALL),
    ]
    for verdict in _ALL:
        lines += [
            "",
            f'<a id="{verdict.code.lower()}"></a>',
            f"## {verdict.code}: {verdict.name}",
            "",
            verdict.meaning,
            "",
            _paragraphs(verdict),
            "",
            "What to do:",
            "",
            *(f"- {line}" for line in verdict.remedy),
        ]
    return "\n".join(lines) + "\n"
