"""What torch's own analyser says of dumps, beside what pptrace says.

``python tests/fr_versus_torch.py`` prints the table of ``docs/flight_recorder.md``.
torch's needs a package that it does not depend on (tabulate); a stand-in is given.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fr_synthetic import Ring, write_dumps
from pptrace import runs
from pptrace.diagnosis import diagnose
from pptrace.dryrun import dry_run
from pptrace.programs import load
from pptrace.semantics import Host
from test_flight_recorder import _HEALTHY, _hung_pair, _j1, _write

__all__ = ["judgement_of_torch", "main"]

_CASES = Path(__file__).parent / "cases"
_ANALYSER = (
    "import sys, types\n"
    "module = types.ModuleType('tabulate')\n"
    "module.tabulate = lambda rows, headers=(), **_: '\\n'.join(map(str, rows))\n"
    "sys.modules['tabulate'] = module\n"
    "from torch.distributed.flight_recorder.fr_trace import main\n"
    "main([sys.argv[1], '-p', 'nccl_trace_rank_'])\n"
)


def judgement_of_torch(folder: Path) -> str:
    """What torch's analyser makes of a folder of dumps, in a few words."""
    done = subprocess.run(
        [sys.executable, "-c", _ANALYSER, str(folder)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    parts = []
    if "MISMATCH" in said:
        parts.append("`MISMATCH`")
    culprits = sorted(set(re.findall(r"Culprit rank (\d+)", said)))
    if culprits:
        parts.append(f"culprit rank {', '.join(culprits)}")
    if "Not all ranks joining" in said:
        missing = sorted(set(re.findall(r"missing ranks: \{([\d, ]+)\}", said)))
        parts.append(f"not all ranks joined: {'; '.join(missing)} missing")
    if "cannot decide" in said:
        parts.append("cannot decide")
    if done.returncode:
        parts.append(f"`{done.stderr.strip().splitlines()[-1][:90]}`")
    return ("; ".join(parts) or "nothing") + f" (exit {done.returncode})"


def _judgement_of_pptrace(folder: Path) -> str:
    run = runs.load_run(folder)
    report = diagnose(run.logs, now_wall_ns=run.now_wall_ns)
    if report.verdict is None:
        return f"nothing (exit {report.exit_code})"
    ranks = ", ".join(f"r{r}" for r in report.verdict.culprits) or "nobody"
    return f"{report.verdict.code} {report.verdict.name}: {ranks} (exit {report.exit_code})"


def _rings(make: Callable[[], Sequence[Ring]]) -> Callable[[Path], None]:
    return lambda folder: _write(list(make()), folder)


def _case(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        run = dry_run(
            load(_CASES / f"{name}.pp").plan(), host=Host.ASYNC, preconnected=True
        )
        write_dumps(run.logs, folder, at_ns=run.now_wall_ns, version="2.10")

    return write


_ROWS: tuple[tuple[str, str, Callable[[Path], None]], ...] = (
    *((name, "healthy", _rings(make)) for name, make in _HEALTHY.items()),
    ("J1: r1 waits for a second send", "r0 owes it", _rings(_j1)),
    (
        "J2: the same, rings wrapped",
        "r0 owes it",
        _rings(lambda: _hung_pair(17, 50, is_batched=False)),
    ),
    ("A1: 1F1B, n < S", "r0 batches its send", _case("a1_split")),
    ("C1: two sends face each other", "r0 and r1", _case("c1")),
    ("D2: group rank as global rank", "r3", _case("d2")),
    ("F1: float32 into bfloat16", "r0 and r1 disagree", _case("f1_dtype")),
    ("F1: 3 elements into 5", "r0 and r1 disagree", _case("f1_short")),
    ("G1: r1 raised, so it has no dump", "r1", _case("g1")),
    ("I2: collectives in another order", "r0 and r1", _case("i2")),
)


def main() -> None:
    """Print the table."""
    print("| dumps of | truth | torch's analyser | pptrace |")
    print("|---|---|---|---|")
    for name, truth, write in _ROWS:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            torchs = judgement_of_torch(Path(folder))
            ours = _judgement_of_pptrace(Path(folder))
        print(f"| {name} | {truth} | {torchs} | {ours} |", flush=True)


if __name__ == "__main__":
    main()
