"""The command line as a user meets it: real processes, real files, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fr_synthetic import Ring
from pptrace import cli, runs
from pptrace.blackbox import BlackBox, file_name
from pptrace.records import Direction, Group, Kind, Pass, Transport
from synthetic import SECOND, one_f_one_b

__all__: list[str] = []

_TIMEOUT_S = 60


def _environment(**changes: str) -> dict[str, str]:
    unwanted = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONUNBUFFERED")
    unwanted += ("PPTRACE", "PPTRACE_DIR")
    kept = {k: v for k, v in os.environ.items() if k not in unwanted}
    return kept | {"TERM": "xterm-256color"} | changes


def _pptrace(
    *args: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "pptrace", *map(str, args)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=_TIMEOUT_S,
        check=False,
        cwd=cwd,
        env=env or _environment(),
    )


def _in_terminal(command: list[str], env: dict[str, str]) -> str:
    """Output of a command whose stdout and stderr are a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while select.select([master], [], [], deadline - time.monotonic())[0]:
            try:
                part = os.read(master, 65536)
            except OSError:  # the last one who held the terminal has gone
                break
            if not part:
                break
            shown += part
    finally:
        os.close(master)
        process.kill()
        process.wait()
    return shown.decode()


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of torch's 1F1B on 4 ranks that hung: 2 microbatches are too few."""
    folder = tmp_path_factory.mktemp("hung") / "20261201-141552-7"
    folder.mkdir()
    one_f_one_b(folder, ranks=4, microbatches=2).finish(idle_ns=12 * SECOND)
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job with enough microbatches: it ended well."""
    folder = tmp_path_factory.mktemp("healthy")
    one_f_one_b(folder, ranks=4, microbatches=4).finish()
    return folder


# -- report ------------------------------------------------------------------------


def test_a_hang_is_a_finding(hung: Path) -> None:
    """The verdict comes first, on stdout; the exit code says that there is one."""
    done = _pptrace("report", hung)
    assert done.returncode == 1, done.stderr
    assert re.match(r"ERROR PPT\d{3} .+: culprit r0", done.stdout)
    assert "pptrace trace" in done.stdout
    assert done.stderr == ""


def test_a_healthy_run_is_none(healthy: Path) -> None:
    """Nothing wrong: exit code 0, and no verdict is made up."""
    done = _pptrace("report", healthy)
    assert done.returncode == 0, done.stdout
    assert "ERROR" not in done.stdout


def test_the_output_directory_stands_for_its_newest_run(hung: Path) -> None:
    """Without DIR, PPTRACE_DIR is taken, and of it the newest run."""
    with_dir = _pptrace("report", hung.parent, "--json")
    without = _pptrace(
        "report", "--json", env=_environment(PPTRACE_DIR=str(hung.parent))
    )
    assert json.loads(with_dir.stdout)["run"] == str(hung)
    assert json.loads(without.stdout)["run"] == str(hung)


def test_json_holds_the_whole_report(hung: Path) -> None:
    """It parses, and says the same as the text and the exit code."""
    done = _pptrace(
        "report", hung, "--json", env=_environment(PYTHONIOENCODING="ascii")
    )
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 1
    assert report["findings"][0]["culprits"] == [0]
    assert [view["rank"] for view in report["ranks"]] == [0, 1, 2, 3]
    assert report["pending"]


def test_what_is_left_of_a_run_is_used(hung: Path, tmp_path: Path) -> None:
    """Foreign, truncated and doubled files are one line each beside the verdict."""
    folder = shutil.copytree(hung, tmp_path / "copy")
    (folder / "rank00003.pptrace").write_bytes(b"not ours" * 1000)
    os.truncate(folder / "rank00002.pptrace", 100)
    shutil.copy(folder / "rank00001.pptrace", folder / "rank00001 (1).pptrace")
    done = _pptrace("report", folder)
    assert done.returncode == 1, done.stderr
    assert "PPT" in done.stdout.splitlines()[0]
    problems = done.stdout.partition("Problems with the input")[2]
    assert "rank00003.pptrace: is not a pptrace black box" in problems
    assert "rank00002.pptrace: is too short" in problems
    assert "rank 1 has 2 files" in problems
    assert "Traceback" not in done.stdout + done.stderr


_WRITER = """
import sys, time
from pptrace.blackbox import BlackBox, RETURNED, WAIT
from pptrace.records import Direction, Group, Kind, Pass, Status, Transport

box = BlackBox(sys.argv[1], rank=1, world_size=2, run="job")
box.group(Group(1, "pp", "", (0, 1), "nccl"))
channel = box.channel(1, Transport.PAIR, Direction.SEND, 0, 0, 0)
now = time.monotonic_ns()
box.record(now, Kind.ACTION, pass_=Pass.F, stage=1, microbatch=0, step=1)
box.set_status(Status.RUNNING)
box.heartbeat(1, Pass.F, 1, 0, 1)
print("ready", flush=True)
sys.stdin.read()
"""


def _waiting_rank(path: Path) -> BlackBox:
    """A rank 0 in this process that waits for B0 of rank 1."""
    box = BlackBox(path, rank=0, world_size=2, run="job")
    box.group(Group(1, "pp", "", (0, 1), "nccl"))
    channel = box.channel(1, Transport.PAIR, Direction.RECV, 0, 1, 1)
    now = time.monotonic_ns()
    box.record(
        now, Kind.OP, direction=Direction.RECV, transport=Transport.PAIR,
        pass_=Pass.B, group=1, peer=1, group_peer=1, batch=1, batch_size=1, step=1,
        stage=0, microbatch=0, channel=channel,
    )  # fmt: skip
    box.set_posted(channel, 1)
    box.heartbeat(1, Pass.B, 0, 0, 1)
    return box


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run whose rank 1 was killed in F0, and whose rank 0, this process, lives."""
    box = _waiting_rank(tmp_path / file_name(0))
    command = [sys.executable, "-c", _WRITER, str(tmp_path / file_name(1))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
        finally:
            child.send_signal(signal.SIGKILL)
    yield tmp_path, child.pid
    box.close()


def test_the_dead_are_told_from_the_living(killed: tuple[Path, int]) -> None:
    """A killed rank is the culprit, named with its pid; the one that waits lives."""
    folder, pid = killed
    done = _pptrace("report", folder, "--json")
    report = json.loads(done.stdout)
    states = {view["rank"]: view["state"] for view in report["ranks"]}
    assert states == {0: "alive", 1: "dead"}
    assert report["findings"][0]["culprits"] == [1]
    text = _pptrace("report", folder).stdout
    assert re.match(r"ERROR PPT\d{3} .+: culprit r1", text)
    assert re.search(rf"r1 +culprit +dead .*pid {pid}", " ".join(text.split()))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        ("", "is too short for a black box"),
        ("a" * 5000, "is not a pptrace black box"),
        ([], "is empty"),
        (["loss.csv"], "has no black box"),
        (["rank00000.pptrace"], "has no usable black box"),
    ],
)
@pytest.mark.parametrize("command", ["report", "trace"])
def test_unusable_input_is_one_line_and_exit_code_2(
    tmp_path: Path, command: str, content: str | list[str] | None, reason: str
) -> None:
    """It names the path and the reason on stderr; there is no traceback."""
    path = tmp_path / "input"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.mkdir()
        for name in content:
            (path / name).write_text("x")
    done = _pptrace(command, path)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"pptrace: {path}: ")
    assert reason in line


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    """Control characters of a path are shown, not sent."""
    done = _pptrace("report", tmp_path / "x\x1b[2J\ny")
    assert "x\\x1b[2J\\ny: does not exist" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", [[], ["reprot"], ["report", "--width", "7"]])
def test_wrong_usage_is_exit_code_2(args: list[str]) -> None:
    """Argparse's own errors keep to our exit codes."""
    done = _pptrace(*args)
    assert done.returncode == 2
    assert "usage: pptrace" in done.stderr


# -- Flight Recorder dumps and logs --------------------------------------------------


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Dumps of a job in which r0 owes r1 a second send, and r2 waits for r1."""
    rings = [Ring(rank, {"0": range(3)}) for rank in range(3)]
    rings[0].send(1)
    rings[1].recv(0)
    rings[1].recv(0, done=False)
    rings[2].recv(1, done=False)
    folder = tmp_path / "dumps"
    folder.mkdir()
    for ring in rings:
        ring.write(folder)
    return folder


def test_dumps_are_reported_alone_or_by_name(dumps: Path, tmp_path: Path) -> None:
    """As DIR or with --fr, whatever lies in the default folder."""
    for arguments in ([dumps], ["--fr", *sorted(dumps.iterdir())], ["--fr", dumps]):
        done = _pptrace("report", *arguments, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert re.match(r"WARNING PPT011 .+: culprit r0, victims r1-r2", done.stdout)
        assert done.stderr == ""
    traced = _pptrace("trace", dumps)
    assert "wrote" in traced.stdout


def test_dumps_and_logs_go_with_black_boxes(hung: Path, tmp_path: Path) -> None:
    """The verdict of the black boxes stays; the lines stand in its evidence."""
    log = tmp_path / "rank0.log"
    log.write_text(_WATCHDOG)
    before = json.loads(_pptrace("report", hung, "--json").stdout)["findings"][0]
    done = _pptrace("report", hung, "--json", "--logs", str(tmp_path / "*.log"))
    after = json.loads(done.stdout)["findings"][0]
    assert (after["code"], after["sentence"]) == (before["code"], before["sentence"])
    assert any("a batch" in line for line in after["evidence"])


def test_logs_alone_give_what_they_support(tmp_path: Path) -> None:
    """Undetermined, explained, and with the way on; exit code 1."""
    (tmp_path / "job.log").write_text(_WATCHDOG)
    done = _pptrace("report", "--logs", "job.log", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("WARNING PPT071 undetermined")
    text = " ".join(done.stdout.split())
    assert "from logs alone" in text
    assert "size_t(-1)" in text
    assert "pptrace report --fr" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--logs", "none*.log"], "no such file"),
        (["--fr", "none"], "none: cannot be read"),
        (["--fr", "bomb"], "would import posix.system: refused"),
    ],
)
def test_unusable_dumps_and_logs_are_one_line(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    """As for black boxes: the name, the reason, exit code 2."""
    (tmp_path / "bomb").write_bytes(b"\x80\x02cposix\nsystem\nX\x02\0\0\0ls\x85R.")
    done = _pptrace("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert reason in line


_WATCHDOG = (
    "[rank0]:[E111 06:46:36.515025591 ProcessGroupNCCL.cpp:628] [Rank 0] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=15, OpType=COALESCED,"
    " NumelIn=18446744073709551615, NumelOut=18446744073709551615, Timeout(ms)=600000)"
    " ran for 600053 milliseconds before timing out.\n"
)


def test_a_line_of_a_log_is_explained() -> None:
    """The whole line is the argument; an unknown one is said to be so."""
    done = _pptrace("explain", _WATCHDOG)
    assert done.returncode == 0, done.stderr
    assert "size_t(-1)" in " ".join(done.stdout.split())
    done = _pptrace("explain", "what is the matter with my job")
    assert done.returncode == 2
    assert "is no line that pptrace knows" in done.stderr


# -- what it costs -----------------------------------------------------------------

_UNWANTED = ("torch", "perfetto", "google", "opentelemetry")
_ASKED_FOR = ("pptrace.flight_recorder", "pptrace.logs", "pptrace.lines")


def test_report_imports_nothing_heavy(hung: Path) -> None:
    """Start-up stays short: no torch, no trace writer, no reader of what is not there."""
    code = (
        "import sys; from pptrace.cli import main; main(sys.argv[1:]);"
        "print('LOADED', *sys.modules, *{n.partition('.')[0] for n in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(hung)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert "numpy" in loaded
    assert not set(loaded) & {*_UNWANTED, *_ASKED_FOR}


# -- where the output goes ---------------------------------------------------------


def test_colour_is_for_terminals(hung: Path) -> None:
    """A terminal gets colour, unless it was asked not to; a pipe never does."""
    command = [sys.executable, "-m", "pptrace", "report", str(hung), "--width", "90"]
    coloured = _in_terminal(command, _environment())
    assert re.search(r"\x1b\[[0-9;]*41mERROR\x1b\[0m", coloured)
    without = _in_terminal(command, _environment(NO_COLOR="1"))
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]m", without)
    bare = _in_terminal([*command, "--no-color"], _environment())
    assert "\x1b" not in bare
    piped = _pptrace("report", hung, "--width", "90").stdout
    assert bare.replace("\r\n", "\n") == piped


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_width_is_kept(hung: Path, width: int) -> None:
    """Lines wrap at --width, and where nobody says, at COLUMNS."""
    asked = _pptrace("report", hung, "--width", str(width)).stdout
    told = _pptrace("report", hung, env=_environment(COLUMNS=str(width))).stdout
    assert asked == told
    lines = [line for line in asked.splitlines() if "pptrace " not in line]
    assert max(map(len, lines)) <= width


def test_an_ascii_locale_is_no_obstacle(hung: Path) -> None:
    """Arrows become ``->`` where the encoding has none."""
    done = _pptrace("report", hung, env=_environment(PYTHONIOENCODING="ascii"))
    assert done.returncode == 1, done.stderr
    assert done.stdout.isascii()
    assert "r0->r1" in done.stdout


def test_a_reader_that_leaves_is_no_error(hung: Path) -> None:
    """``pptrace report | head`` ends without a word on stderr."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "pptrace", "report", str(hung)],
        stdout=write,
        stderr=subprocess.PIPE,
        env=_environment(),
        timeout=_TIMEOUT_S,
        check=False,
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


def test_output_that_cannot_be_written_is_said(hung: Path) -> None:
    """A full disk behind stdout is one line and exit code 2, not success."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pptrace", "report", str(hung)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            timeout=_TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "No space left" in line


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, hung: Path) -> None:
    """Ctrl-C ends a command with the shell's code for it."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "load_run", interrupted)
    assert cli.main(["report", str(hung)]) == 130


_BUSY = """
from pptrace.cli import _Busy
busy = _Busy("reading black boxes", after_s=0.0)
with busy as step:
    step(1, 4)
    busy._timer.join()
    step(3, 4)
"""


def test_long_work_shows_a_bar_in_a_terminal_only() -> None:
    """Progress goes to stderr if someone can see it, and leaves nothing behind."""
    started, never = "busy._timer.join()", "assert busy._timer.ident is None"
    shown = _in_terminal([sys.executable, "-c", _BUSY], _environment())
    assert "reading black boxes" in shown
    piped = subprocess.run(
        [sys.executable, "-c", _BUSY.replace(started, never)],
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    assert piped.stdout + piped.stderr == b""


# -- other commands ----------------------------------------------------------------


def test_trace_writes_where_it_says(hung: Path, tmp_path: Path) -> None:
    """By default beside the black boxes, else where -o says, and how to open it."""
    folder = shutil.copytree(hung, tmp_path / "run")
    done = _pptrace("trace", folder)
    assert done.returncode == 0, done.stderr
    written = folder / "job.pftrace.gz"
    assert f"wrote {written}: 4 ranks, " in done.stdout
    assert "ui.perfetto.dev" in done.stdout
    assert written.read_bytes()[:2] == b"\x1f\x8b"
    elsewhere = tmp_path / "other.pftrace"
    done = _pptrace("trace", folder, "-o", elsewhere)
    assert done.returncode == 0, done.stderr
    assert elsewhere.read_bytes()[:2] != b"\x1f\x8b"


def test_trace_says_why_it_cannot_write(hung: Path, tmp_path: Path) -> None:
    """A folder that is not there, or a black box's name, is one line."""
    done = _pptrace("trace", hung, "-o", tmp_path / "no" / "x.pftrace.gz")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "cannot be written: No such file or directory" in line
    before = (hung / "rank00000.pptrace").read_bytes()
    done = _pptrace("trace", hung, "-o", hung / "rank00000.pptrace")
    assert done.returncode == 2
    assert (hung / "rank00000.pptrace").read_bytes() == before


def test_explain_knows_the_verdict_of_a_report(hung: Path) -> None:
    """The code that a report shows can be explained, in any case of letters."""
    code = json.loads(_pptrace("report", hung, "--json").stdout)["findings"][0]["code"]
    done = _pptrace("explain", code.lower())
    assert done.returncode == 0, done.stderr
    assert code in done.stdout
    assert len(done.stdout.splitlines()) > 3
    assert code in _pptrace("explain").stdout


def test_explain_offers_codes_like_an_unknown_one() -> None:
    """A slip of the finger is answered with what was probably meant."""
    done = _pptrace("explain", "PTP001")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "PTP001" in line
    assert "PPT001" in line


def test_version_and_help() -> None:
    """Both answer; help of every command has an example and the exit codes."""
    assert re.fullmatch(r"pptrace \d+\.\d+\.\d+\n", _pptrace("--version").stdout)
    for command in ("report", "trace", "explain"):
        assert command in _pptrace("--help").stdout
        text = _pptrace(command, "--help").stdout
        assert f"pptrace {command}" in text
        assert "exit codes: 0" in text


def test_the_surface_of_the_command_line_is_meant() -> None:
    """Commands and options change only together with this list."""
    found = {
        name: sorted(o for a in sub._actions for o in a.option_strings if o[:2] == "--")
        for action in cli._parser([])._actions
        if isinstance(action.choices, dict)
        for name, sub in action.choices.items()
    }
    assert found == {
        "report": ["--fr", "--help", "--json", "--logs", "--no-color", "--width"],
        "trace": ["--help", "--output"],
        "explain": ["--help"],
        "check": [
            "--csv",
            "--eager",
            "--forward-only",
            "--help",
            "--host",
            "--json",
            "--metadata",
            "--microbatches",
            "--no-color",
            "--pp",
            "--preconnect",
            "--rule",
            "--schedule",
            "--stages",
            "--start-up",
            "--sweep",
            "--width",
        ],
        "run-program": [
            "--help",
            "--json",
            "--limit",
            "--no-color",
            "--out",
            "--width",
        ],
        "schedule": [
            "--arrows",
            "--csv",
            "--help",
            "--microbatches",
            "--no-color",
            "--pp",
            "--stages-per-rank",
            "--svg",
            "--width",
        ],
    }
