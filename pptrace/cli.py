"""The command line: one class per command, composed here from all three rooms.

Nothing heavy is imported before a command needs it, and torch never is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pptrace.errors import InputError, PptraceError

if TYPE_CHECKING:
    from pptrace.logs import LogEvidence
    from pptrace.report import Report
    from pptrace.runs import Run

__all__ = ["main"]

_EXIT_CODES = "exit codes: 0 nothing wrong, 1 findings, 2 unusable input"
_UNUSABLE, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141
_LONGEST_CODE = 10
"""What `pptrace explain` gets beyond this is a line of a log."""
_PIPE_WIDTH = 100
"""Columns where nobody can say how wide the reader's screen is."""


class _Command(Protocol):
    """One command: its name is the class's, its help the class's docstring."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit code."""


class _Report:
    """Say why a job hangs: the culprit, what is missing, and what to change.

    DIR is a run's folder, or the output directory (then its newest run), or one black
    box, or a folder of Flight Recorder dumps. Its files may come from processes that
    live or died, from another machine, and some may be missing. torch is not needed.
    With --fr or --logs, DIR may be left out: then they are all there is.

    Examples:
      pptrace report pptrace-out
      pptrace report pptrace-out --json | jq '.findings[0]'
      pptrace report --fr /tmp/nccl_trace_rank_* --logs 'logs/rank*.log'
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        _add_folder(parser)
        parser.add_argument(
            "--fr",
            nargs="+",
            action="extend",
            default=[],
            type=Path,
            metavar="PATH",
            help="Flight Recorder dumps, or folders of them",
        )
        parser.add_argument(
            "--logs",
            nargs="+",
            action="extend",
            default=[],
            metavar="GLOB",
            help="logs of the job: one mixed file or one per rank, and the JSON of"
            " ncclras",
        )
        parser.add_argument(
            "--json", action="store_true", help="the whole report as JSON"
        )
        parser.add_argument(
            "--width",
            type=_width,
            metavar="N",
            help="wrap at N columns; default: the terminal's",
        )
        parser.add_argument(
            "--no-color",
            action="store_true",
            help="no colour or bold; NO_COLOR in the environment, and a pipe, do too",
        )

    def run(self, args: argparse.Namespace) -> int:
        evidence = _read_logs(args.logs) if args.logs else None
        run = _load(args.folder, args.fr, evidence)
        report = _diagnose(run, evidence)
        if args.json:
            _write(report.to_json() + "\n", encoding="utf-8")
        else:
            _write_report(report, width=args.width, in_color=not args.no_color)
        return report.exit_code


class _Trace:
    """Write a trace of all ranks on one time axis, to look at in Perfetto.

    One group of tracks per rank: its actions, its isends and irecvs, arrows from a send
    to its receive; what hangs stays open. DIR is as for report.

    Examples:
      pptrace trace pptrace-out
      pptrace trace pptrace-out -o job.pftrace.gz
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        _add_folder(parser)
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help="default: job.pftrace.gz in the run's folder; without .gz it is "
            "not compressed",
        )

    def run(self, args: argparse.Namespace) -> int:
        from pptrace.blackbox import SUFFIX

        run = _load(args.folder)
        output: Path = args.output or run.path / "job.pftrace.gz"
        if output.suffix == SUFFIX:
            raise InputError(output, "is a black box's name, it stays as it is")
        report = _diagnose(run)
        with _Busy("writing the trace"):
            from pptrace.viewers import perfetto

            stats = perfetto.write_trace(run.logs, output, report)
        for problem in run.problems:
            _complain(problem)
        ranks = "1 rank" if len(run.logs) == 1 else f"{len(run.logs)} ranks"
        _write(
            f"wrote {output}: {ranks}, {stats.slices:,} slices of which "
            f"{stats.open_slices:,} never end, {stats.flows:,} arrows, "
            f"{stats.nbytes / 1e3:,.0f} kB\n"
            f"open it: drag the file into https://ui.perfetto.dev\n"
        )
        return 0


class _Explain:
    """Explain a verdict by its code, or a line of a log, in words.

    A code: what it means, why it happens, what helps. A line: what NCCL's watchdog,
    NCCL or the launcher mean by it. Without CODE, list all codes.

    Examples:
      pptrace explain PPT001
      pptrace explain '[Rank 1] Watchdog caught collective operation timeout: ...'
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "code", nargs="?", metavar="CODE", help="such as PPT001, or a line of a log"
        )

    def run(self, args: argparse.Namespace) -> int:
        import difflib

        from pptrace.verdicts import VERDICTS, explain

        if args.code and len(args.code) > _LONGEST_CODE:
            return self._explain_line(args.code)

        if args.code is None:
            lines = (f"{v.code}  {v.name}: {v.meaning}" for v in VERDICTS.values())
            _write("\n".join(lines) + "\n")
            return 0
        code = args.code.strip().upper()
        if code not in VERDICTS:
            near = difflib.get_close_matches(code, VERDICTS, n=3, cutoff=0.5)
            advice = "`pptrace explain` lists all codes"
            if near:
                advice = f"perhaps {' or '.join(near)}; {advice}"
            raise InputError(args.code, "is not a verdict code", advice)
        _write(explain(code) + "\n")
        return 0

    def _explain_line(self, line: str) -> int:
        import textwrap

        from pptrace.lines import explain_line

        words = explain_line(line)
        if words is None:
            advice = "known are lines of NCCL, its watchdog, torchrun and tracebacks"
            raise InputError(line[:60], "is no line that pptrace knows", advice)
        _write(textwrap.fill(words, 88) + "\n")
        return 0


_COMMANDS: tuple[type[_Command], ...] = (_Report, _Trace, _Explain)

_LATER = {
    "check": ("pptrace.commands_check", "Check"),
    "run-program": ("pptrace.commands_check", "RunProgram"),
    "schedule": ("pptrace.commands_schedule", "Schedule"),
}
"""Commands of other modules, loaded only if one is asked for: a report starts fast."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. The script and ``-m`` end up here."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name the locale cannot show
            stream.reconfigure(errors="backslashreplace")
    args = _parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
    command: _Command = args.command()
    try:
        code = command.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        _drop_output()
        return _BROKEN_PIPE
    except PptraceError as error:
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        _drop_output()
        _complain(str(error))
        return _UNUSABLE
    return code


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands; in full only of those that ``argv`` can mean."""
    parser = argparse.ArgumentParser(
        prog="pptrace",
        description="Says why a pipeline-parallel PyTorch job hangs.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    meant = argv[0] if argv else ""
    for command in _COMMANDS:
        _add_command(commands, command.__name__.strip("_").lower(), command)
    for name, (module, attribute) in _LATER.items():
        if meant == name or meant not in _names():
            found = getattr(importlib.import_module(module), attribute)
            _add_command(commands, name, found)
    return parser


def _names() -> set[str]:
    return {command.__name__.strip("_").lower() for command in _COMMANDS} | {*_LATER}


def _add_command(commands: Any, name: str, command: type[_Command]) -> None:
    text = inspect.getdoc(command) or ""
    sub = commands.add_parser(
        name,
        help=text.partition("\n")[0],
        description=text,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(command=command)
    command().prepare_parser(sub)


class _Version(argparse.Action):
    """``--version``, looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        try:
            version = metadata.version("pptrace")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        _write(f"pptrace {version}\n")
        parser.exit()


# -- arguments ---------------------------------------------------------------------


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="a run's folder, the output directory or one black box; default: "
        "PPTRACE_DIR, else pptrace-out",
    )


def _width(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 40 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 40 to 1000")
    return int(text)


# -- what commands share -----------------------------------------------------------


def _load(
    folder: Path | None,
    dumps: Sequence[Path] = (),
    evidence: LogEvidence | None = None,
) -> Run:
    with _Busy("reading black boxes") as step:
        from pptrace import runs

        if folder is not None or not (dumps or evidence):
            folder = folder or Path(os.environ.get("PPTRACE_DIR") or "pptrace-out")
            return runs.load_run(folder, progress=step, dumps=dumps)
        if dumps:
            return runs.load_dumps(dumps)
        assert evidence is not None
        path = Path(evidence.files[0]).parent
        return runs.Run(path, {}, (), evidence.written_ns)


def _read_logs(patterns: Sequence[str]) -> LogEvidence:
    with _Busy("reading logs"):
        from pptrace import logs

        return logs.read(patterns)


def _diagnose(run: Run, evidence: LogEvidence | None = None) -> Report:
    with _Busy("looking for the cause"):
        from pptrace import diagnosis

        ranks = run.logs
        if evidence is not None:
            from pptrace import log_findings

            ranks = log_findings.combine(ranks, evidence)
        report = diagnosis.diagnose(
            ranks,
            now_wall_ns=run.now_wall_ns,
            run=str(run.path) if run.logs else "",
            problems=run.problems,
        )
        if any(run.path.glob("plan-*.json")):
            from pptrace.progress import add_progress

            report = add_progress(report, run.logs, run.path)
        if evidence is not None:
            report = log_findings.annotate(report, evidence, run.logs)
        return report


def _write_report(report: Report, *, width: int | None, in_color: bool) -> None:
    from rich.console import Console

    from pptrace.viewers import terminal

    streams = (sys.stdin, sys.stdout, sys.stderr)
    is_seen = any(stream is not None and stream.isatty() for stream in streams)
    if width is None and not is_seen and "COLUMNS" not in os.environ:
        width = _PIPE_WIDTH
    console = Console(width=width, color_system="auto" if in_color else None)
    with console.capture() as capture:  # rich's own answer to a broken pipe is exit 1
        terminal.render(report, console)
    _write(capture.get())


def _write(text: str, encoding: str | None = None) -> None:
    if encoding and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding=encoding)
    print(text, end="")


def _complain(message: str) -> None:
    """One line on stderr, whatever a file or its name put into the message."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    print(f"pptrace: {line}", file=sys.stderr)


def _drop_output() -> None:
    """Let the interpreter's last flush of stdout fail no more."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class _Busy:
    """A progress bar on stderr, where one can be seen, for work of over a second."""

    def __init__(self, what: str, *, after_s: float = 1.0) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._timer = threading.Timer(after_s, self._show)
        self._timer.daemon = True
        self._bar: Any = None
        self._is_over = False
        self._progress: tuple[int, int | None] = (0, None)

    def __enter__(self) -> Callable[[int, int], None]:
        if sys.stderr is not None and sys.stderr.isatty():
            self._timer.start()
        return self._step

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._bar is not None:
                self._bar.stop()

    def _step(self, done: int, total: int) -> None:
        """Say how far the work is."""
        self._progress = (done, total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        bar = Progress(console=Console(stderr=True), transient=True)
        with self._lock:
            if self._is_over:
                return
            done, total = self._progress
            bar.add_task(self._what, completed=done, total=total)
            bar.start()
            self._bar = bar
