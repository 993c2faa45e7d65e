"""One line of a log in words: what NCCL's watchdog, NCCL and the launcher mean by it.

`recognise` takes a line apart into a `Fact`; `explain_line` says it in words. The forms
are those that torch 2.1 to 2.13 and NCCL 2.18 to 2.30 print.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["BATCH_NUMEL", "Fact", "Sort", "explain_line", "recognise", "signal_name"]

BATCH_NUMEL = 18446744073709551615
"""size_t(-1): what stands in place of a number of elements if the work is a batch."""
_MAX_LINE = 8192
_UNKNOWN = -2
"""A number that the line does not give; -1 is one that lines do give."""


class Sort(str, Enum):
    """What a line reports."""

    TIMEOUT = "time-out"
    """The watchdog gave up on a work."""
    STATUS = "status"
    """Which works of a group were enqueued and completed when it gave up."""
    MONITOR = "monitor"
    """The watchdog itself did not move."""
    DUMP = "dump"
    """Another rank, or this one, asked for the dumps."""
    END = "end"
    """The process takes itself down."""
    NCCL = "nccl"
    """A warning of NCCL's own."""
    EXIT = "exit"
    """The launcher saw a process end."""
    STOP = "stop"
    """The launcher ends the other processes."""
    EXCEPTION = "exception"
    """The last line of a Python traceback."""
    KERNEL = "kernel"
    """The operating system killed a process."""
    NOTE = "note"
    """Something else worth a word."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What one line says. Numbers that it does not give are -2."""

    sort: Sort
    words: str
    """The line explained."""
    group: str = ""
    """Name of the process group, if the line gives one."""
    desc: str = ""
    group_rank: int = _UNKNOWN
    seq: int = _UNKNOWN
    op: str = ""
    numel: tuple[int, int] = (_UNKNOWN, _UNKNOWN)
    timeout_ms: int = _UNKNOWN
    ran_ms: int = _UNKNOWN
    enqueued: int = _UNKNOWN
    completed: int = _UNKNOWN
    peer: int = _UNKNOWN
    """The rank that a line names as the origin."""
    local_rank: int = _UNKNOWN
    pid: int = _UNKNOWN
    exit_code: int | None = None
    is_echo: bool = False
    """It repeats that another rank ended, or that nothing moved."""

    @property
    def is_p2p(self) -> bool:
        """Whether the work it is about is a send, a receive or a batch of them."""
        return self.op in _P2P


def explain_line(text: str) -> str | None:
    """One line of a log in words; None if nothing is known of it."""
    fact = recognise(text)
    return fact.words if fact is not None else None


def recognise(text: str) -> Fact | None:
    """Take a line apart; None if it is of no known form."""
    text = text[:_MAX_LINE]
    for pattern, make in _FORMS:
        found = pattern.search(text)
        if found is not None:
            return make(found)
    return None


def signal_name(exit_code: int) -> str:
    """``SIGKILL`` for -9 (and for 137, as shells say it); empty if it is no signal."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


# -- words -------------------------------------------------------------------------

_P2P = {
    "COALESCED": "a batch of isends and irecvs (or of collectives)",
    "SEND": "a single isend",
    "RECV": "a single irecv",
}
_COLLECTIVES = {
    "ALLREDUCE": "all_reduce", "BROADCAST": "broadcast", "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor", "REDUCE": "reduce",
    "REDUCE_SCATTER": "reduce_scatter", "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all_single", "GATHER": "gather",
    "SCATTER": "scatter", "BARRIER": "barrier",
}  # fmt: skip
_ENDS = {
    "SIGKILL": "killed from outside: the out-of-memory killer, the scheduler or a user",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full /dev/shm",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "it aborted itself: most often NCCL's watchdog after a time-out, then it"
    " is a victim",
    "SIGTERM": "ended by the launcher or the scheduler, because another rank failed or"
    " time was up: a victim",
    "SIGINT": "interrupted by a user",
}


def _number(found: re.Match[str], name: str) -> int:
    text = found.groupdict().get(name)
    return int(text) if text else _UNKNOWN


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:g} s"


def _group_words(fact: Fact) -> str:
    name = fact.desc or fact.group
    where = f" of group {name}" if name else ""
    if fact.group_rank != _UNKNOWN:
        where += f" (rank {fact.group_rank} within the group, not the global rank)"
    return where


def _work_words(fact: Fact) -> str:
    if fact.op in _P2P:
        return _P2P[fact.op]
    return _COLLECTIVES.get(fact.op, fact.op) or "a work"


def _timeout(found: re.Match[str]) -> Fact:
    group = _GROUP.search(found.string)
    fact = Fact(
        Sort.TIMEOUT, "", group=(group["guid"] or group["id"]) if group else "",
        desc=(group["desc"] or "") if group else "", group_rank=_number(found, "rank"),
        seq=_number(found, "seq"), op=found["op"] or "",
        numel=(_number(found, "into"), _number(found, "out")),
        timeout_ms=_number(found, "limit"), ran_ms=_number(found, "ran"),
    )  # fmt: skip
    whose = _GLOBAL.search(found.string[: found.start()])
    words = f"NCCL's watchdog of r{whose[1]}" if whose else "NCCL's watchdog"
    words += f"{_group_words(fact)} gave up on "
    words += f"work {fact.seq}, " if fact.seq != _UNKNOWN else ""
    words += _work_words(fact)
    if fact.ran_ms != _UNKNOWN:
        words += f", after {_seconds(fact.ran_ms)}"
    if fact.timeout_ms != _UNKNOWN:
        words += f" (the limit is {_seconds(fact.timeout_ms)})"
    words += "."
    if fact.op == "COALESCED":
        words += (
            " A batch is one work for the watchdog: the line has no peer, no size and no"
            " direction in it."
        )
        if BATCH_NUMEL in fact.numel:
            words += (
                f" NumelIn={BATCH_NUMEL} is size_t(-1) and means just that: a batch."
            )
    elif fact.op in _COLLECTIVES and fact.numel[0] not in {_UNKNOWN, BATCH_NUMEL}:
        words += (
            f" It has {fact.numel[0]} elements going in, {fact.numel[1]} coming out."
        )
    if fact.seq == 1:
        words += (
            " Work 1 is the first of its group: look at how the group is used first."
        )
    words += (
        " This rank waited; it need not be the one at fault. Works of a group are"
        " numbered from 1, P2P and collectives each for themselves."
    )
    if "terminated with exception" in found.string:
        words += (
            " The process ends with it (SIGABRT), and the launcher ends the others."
        )
    return replace(fact, words=words)


def _status(found: re.Match[str]) -> Fact:
    fact = Fact(
        Sort.STATUS, "", group=found["guid"] or found["id"] or "",
        desc=found["desc"] or "", group_rank=_number(found, "rank"),
        seq=_number(found, "seq"), enqueued=_number(found, "enqueued"),
        completed=_number(found, "completed"),
    )  # fmt: skip
    words = (
        f"Work {fact.seq}{_group_words(fact)} failed or timed out. Enqueued last:"
        f" {fact.enqueued}, completed last: {fact.completed}"
    )
    if fact.completed in {-1, 0} and fact.seq == 1:
        words += (
            ", which says that the first work of this group never finished: look at how"
            " the group is used first (all ranks of it? the same kind of call on both"
            " sides?)."
        )
    elif fact.enqueued > fact.seq:
        words += (
            f": the host went on and enqueued {fact.enqueued - fact.seq} more behind it"
        )
        words += ", so it was not blocked in the call."
    else:
        words += ": nothing was enqueued behind it."
    return replace(fact, words=words)


def _terminated(found: re.Match[str]) -> Fact:
    fact = Fact(
        Sort.END, "", group=found["guid"] or found["id"] or "",
        desc=found["desc"] or "", group_rank=_number(found, "rank"),
    )  # fmt: skip
    words = (
        f"The watchdog thread{_group_words(fact)} threw the error that follows it in"
        " the line; that ends the process (SIGABRT), and the launcher ends the others."
    )
    return replace(fact, words=words)


def _dump(found: re.Match[str]) -> Fact:
    peer = _number(found, "peer")
    who = "this rank itself" if peer == _UNKNOWN else f"rank {peer}"
    words = (
        f"{who[0].upper()}{who[1:]} timed out and asked all ranks for their Flight"
        f" Recorder dumps; the ranks that print this hear of it. {who[0].upper()}{who[1:]}"
        " is the first whose time-out was noticed, not necessarily the one at fault."
    )
    return Fact(
        Sort.DUMP, words, peer=peer,
        enqueued=_number(found, "enqueued"), completed=_number(found, "completed"),
    )  # fmt: skip


def _stuck_watchdog(found: re.Match[str]) -> Fact:
    return Fact(
        Sort.MONITOR,
        f"The watchdog thread itself did not move for {found['seconds']} s: it hangs in a"
        " CUDA or NCCL call, or cannot get Python's lock (GIL). Another thread holds"
        " something; a Python stack of the process (py-spy) shows which.",
    )


def _truncated(found: re.Match[str]) -> Fact:
    return Fact(
        Sort.NCCL,
        f"While setting up a connection, one side sent {found['got']} bytes where the"
        f" other expected {found['want']}: the two ranks were in different calls."
        " Typical: a batch with only one direction meets a batch with both on a new pair"
        " communicator, ranks that use different groups or versions, or another order of"
        " first uses. An error, not a hang: this rank and its peer end with it.",
    )


def _warning(found: re.Match[str]) -> Fact:
    text = found["text"].strip()
    return Fact(Sort.NCCL, f"A warning of NCCL's own: {text[:300]}")


def _nccl_error(found: re.Match[str]) -> Fact:
    code = found["code"]
    return Fact(Sort.NCCL, _NCCL_ERRORS[code], is_echo=code in _ECHOES)


_ECHOES = ("ncclRemoteError", "ncclSystemError", "ncclInternalError")
_NCCL_ERRORS = {
    "ncclRemoteError": "NCCL lost the connection to another rank: most often that rank"
    " ended first. An echo; look for the rank that failed before.",
    "ncclSystemError": "A system call failed inside NCCL: network, shared memory or"
    " limits; or the other side of a connection ended. The NCCL WARN before it says"
    " which.",
    "ncclInternalError": "NCCL's own checks failed: often ranks in different calls, or a"
    " mismatch of versions. The NCCL WARN before it says more.",
    "ncclUnhandledCudaError": "A CUDA call failed inside NCCL: look for the first CUDA"
    " error on this rank.",
    "ncclInvalidUsage": "NCCL was called wrongly: two ranks on one GPU, or arguments"
    " that differ between ranks.",
    "ncclInvalidArgument": "An argument was refused by NCCL.",
}


def _exit(found: re.Match[str]) -> Fact:
    code = int(found["code"])
    return Fact(
        Sort.EXIT, _exit_words(code), exit_code=code, pid=_number(found, "pid"),
        local_rank=_number(found, "local"),
    )  # fmt: skip


def _exit_words(code: int) -> str:
    name = signal_name(code)
    if name:
        return f"A process ended by {name}: {_ENDS.get(name, 'a signal')}."
    if code == 0:
        return "A process ended normally."
    return (
        f"A process ended with exit code {code}: a Python exception, or `sys.exit`. Its"
        " own log has the traceback."
    )


def _received(found: re.Match[str]) -> Fact:
    code = -int(found["number"])
    words = _exit_words(code)
    return Fact(Sort.EXIT, words, exit_code=code, pid=_number(found, "pid"))


def _stop(found: re.Match[str]) -> Fact:
    return Fact(
        Sort.STOP,
        f"The launcher ends process {found['pid']} with {found['name']} because another"
        " one failed: a victim.",
        pid=_number(found, "pid"),
    )


def _killed(found: re.Match[str]) -> Fact:
    return Fact(
        Sort.KERNEL,
        f"The kernel ran out of memory and killed process {found['pid']}.",
        pid=_number(found, "pid"),
    )


def _microbatches(found: re.Match[str]) -> Fact:
    return Fact(
        Sort.EXCEPTION,
        f"The batch of this rank gives {found['got']} chunks for {found['want']}"
        " microbatches: it has fewer rows than there are microbatches, typically the last"
        " batch of an epoch (`drop_last=True`).",
    )


def _memory(_: re.Match[str]) -> Fact:
    return Fact(
        Sort.EXCEPTION,
        "This rank ran out of GPU memory. If it catches the error and goes on, it is one"
        " op behind its peers from there on.",
    )


def _lost_peer(_: re.Match[str]) -> Fact:
    return Fact(
        Sort.EXCEPTION,
        "The other side of a connection has gone: an echo. The rank that ended first is"
        " the one to look at.",
        is_echo=True,
    )


def _too_late(_: re.Match[str]) -> Fact:
    return Fact(
        Sort.EXCEPTION,
        "A communication call did not end in time. This rank waited; it need not be the"
        " one at fault.",
        is_echo=True,
    )


def _store(_: re.Match[str]) -> Fact:
    return Fact(
        Sort.EXCEPTION,
        "The job's store did not answer: its host (rank 0, or the launcher's) has ended"
        " or never came. Mostly an echo of another failure.",
        is_echo=True,
    )


def _exception(found: re.Match[str]) -> Fact:
    return Fact(
        Sort.EXCEPTION,
        f"A Python exception, {found['name'].rpartition('.')[2]}; the traceback above it"
        " says where.",
    )


def _fixed(sort: Sort, words: str) -> Callable[[re.Match[str]], Fact]:
    return lambda _: Fact(sort, words)


# -- forms -------------------------------------------------------------------------

_PG = (
    r"\[PG (?:ID )?(?P<id>[^\]\s]{1,200}) "
    r"(?:PG GUID (?P<guid>[^\]\s(]{1,200})(?:\((?P<desc>[^)\]]{0,200})\))? )?"
    r"Rank (?P<rank>\d{1,9})\]\s{0,4}"
)

_GROUP = re.compile(_PG)
_GLOBAL = re.compile(r"\[rank(\d{1,9})\]")

_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Fact]], ...] = tuple(
    (re.compile(pattern), make)
    for pattern, make in (
        (
            (
                r"(?:\[Rank (?P<rank>\d{1,9})\] )?Watchdog caught collective operation"
                r" timeout: WorkNCCL\((?:SeqNum=(?P<seq>\d{1,19}), )?OpType=(?P<op>\w{1,60})"
                r"(?:, (?:NumelIn=(?P<into>\d{1,20})|TensorShape=\[[^\]]{0,200}\]))?"
                r"(?:, NumelOut=(?P<out>\d{1,20}))?"
                r"(?:, Timeout\(ms\)=(?P<limit>\d{1,18}))?"
                r"(?:\) ran for (?P<ran>\d{1,18}) milliseconds)?"
            ),
            _timeout,
        ),
        (
            _PG + r"(?:Process group|NCCL) watchdog thread terminated with exception",
            _terminated,
        ),
        (
            _PG + r"(?:Timeout at NCCL work|Exception \(either an error or timeout\)"
            r" detected by watchdog at work|failure detected by watchdog at work"
            r" sequence id): (?P<seq>-?\d{1,18})(?:,| PG status:) last enqueued (?:NCCL "
            r")?work: (?P<enqueued>-?\d{1,18}), last completed (?:NCCL )?work:"
            r" (?P<completed>-?\d{1,18})",
            _status,
        ),
        (
            (
                r"Received a (?:global )?dump signal due to a collective timeout from\s{1,4}"
                r"(?:this local rank|rank (?P<peer>\d{1,9}))(?:.{0,100}?Last enqueued NCCL"
                r" work: (?P<enqueued>-?\d{1,18}), last completed NCCL work:"
                r" (?P<completed>-?\d{1,18}))?"
            ),
            _dump,
        ),
        (
            (
                r"watchdog got stuck for (?P<seconds>\d{1,9}) seconds without making"
                r" progress"
            ),
            _stuck_watchdog,
        ),
        (
            r"Heartbeat monitor timed out",
            _fixed(
                Sort.MONITOR,
                "The watchdog thread gave no sign of life: it hangs in a CUDA or NCCL"
                " call, or another thread holds Python's lock (GIL). The process dumps"
                " and ends.",
            ),
        ),
        (
            (
                r"taking the entire process down|Some NCCL operations have failed or timed"
                r" out"
            ),
            _fixed(
                Sort.END,
                "After a time-out or an error the watchdog ends this process, since its"
                " results could be wrong. The line that matters is the time-out or"
                " error before it.",
            ),
        ),
        (
            r"Stack trace of the failed collective not found",
            _fixed(
                Sort.NOTE,
                "Flight Recorder is off, so torch cannot say where the op was issued:"
                " set TORCH_FR_BUFFER_SIZE=2000 (older torch:"
                " TORCH_NCCL_TRACE_BUFFER_SIZE=2000).",
            ),
        ),
        (
            r"preparing to dump debug info",
            _fixed(
                Sort.NOTE,
                "This rank writes its Flight Recorder dump now; `pptrace report --fr`"
                " reads it.",
            ),
        ),
        (
            r"terminate called after throwing an instance of 'c10::DistBackendError'",
            _fixed(
                Sort.END,
                "The watchdog's error left its thread, so the process aborts (SIGABRT)."
                " A victim of the time-out or error before it.",
            ),
        ),
        (
            (
                r"[Mm]essage truncated ?: receiv(?:ed|ing) (?P<got>\d{1,18})"
                r"(?:,\d{1,18})? bytes instead of (?P<want>\d{1,18})"
            ),
            _truncated,
        ),
        (
            r"Mismatched collective detected",
            _fixed(
                Sort.NCCL,
                "NCCL saw different collectives, or sizes, on the ranks of one"
                " communicator: the ranks issue them in another order.",
            ),
        ),
        (r"NCCL WARN (?P<text>.{1,2000})", _warning),
        (rf"\b(?P<code>{'|'.join(_NCCL_ERRORS)})\b", _nccl_error),
        (
            (
                r"failed \(exitcode: (?P<code>-?\d{1,6})\) local_rank: (?P<local>\d{1,6})"
                r" \(pid: (?P<pid>\d{1,9})\)"
            ),
            _exit,
        ),
        (
            r"^\s{0,8}exitcode\s{1,4}: (?P<code>-?\d{1,6}) \(pid: (?P<pid>\d{1,9})\)",
            _exit,
        ),
        (
            r"Signal (?P<number>\d{1,3}) \(\w{1,20}\) received by PID (?P<pid>\d{1,9})",
            _received,
        ),
        (
            r"Sending process (?P<pid>\d{1,9}) closing signal (?P<name>\w{1,20})",
            _stop,
        ),
        (
            r"Root Cause \(first observed failure\)",
            _fixed(
                Sort.NOTE,
                "The launcher's own guess at the cause: the process whose end it saw"
                " first, within its node. After a hang that is the rank whose watchdog"
                " was quickest, not the one at fault.",
            ),
        ),
        (r"Killed process (?P<pid>\d{1,9})", _killed),
        (
            r"Expecting (?P<want>\d{1,9}) \w{1,40} but got (?P<got>\d{1,9})",
            _microbatches,
        ),
        (r"CUDA out of memory|OutOfMemoryError", _memory),
        (
            r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited|was aborted on",
            _lost_peer,
        ),
        (
            (
                r"Timed out waiting \d{1,12} ?ms for|[Tt]imed out after \d{1,12} ?ms"
                r"|DistBackendError.{0,200}(?:[Ww]atchdog|timed out|timeout|aborted)"
            ),
            _too_late,
        ),
        (
            (
                r"DistStoreError|DistNetworkError|socket (?:has )?timed? ?out|TCPStore.{0,80}"
                r"(?:timed out|timeout)"
            ),
            _store,
        ),
        (
            (
                r"^(?:\[[^\]]{1,40}\]:\s?){0,3}(?P<name>(?:\w{1,80}\.){0,10}\w{0,80}(?:Error"
                r"|Exception|Exit|Interrupt))(?::|$)"
            ),
            _exception,
        ),
        (
            rf"\b{BATCH_NUMEL}\b",
            _fixed(
                Sort.NOTE,
                f"{BATCH_NUMEL} is size_t(-1): the work is a batch, for which NCCL's"
                " process group knows no number of elements.",
            ),
        ),
    )
)
