"""How long `pptrace report` takes on 8 small files, beside a bare Python.

The bar: at most twice the time of a Python that imports rich and numpy. Runs of both
alternate, so a busy machine hurts both alike, and the medians are compared::

    python benchmarks/startup.py [RUNS]

With ``-X importtime`` in ``PPTRACE_STARTUP_FLAGS`` Python itself says where time goes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pptrace.blackbox import BlackBox, file_name
from pptrace.records import Direction, Group, Kind, Pass, Status, Transport

__all__: list[str] = []

_RANKS = 8
_OPS = 50
_BAR = 2.0


def _write_run(folder: Path) -> None:
    """Eight ranks that passed activations on and finished."""
    group = Group(1, "pp", "pipeline", tuple(range(_RANKS)), "nccl")
    for rank in range(_RANKS):
        box = BlackBox(folder / file_name(rank), rank=rank, world_size=_RANKS)
        box.group(group)
        shape = box.signature((4, 1024), "float32", (1024, 1))
        neighbours = ((Direction.RECV, rank - 1), (Direction.SEND, rank + 1))
        for direction, peer in neighbours:
            if not 0 <= peer < _RANKS:
                continue
            channel = box.channel(1, Transport.PAIR, direction, 0, peer, peer)
            for k in range(_OPS):
                seq = box.record(
                    time.monotonic_ns(), Kind.OP, direction=direction,
                    transport=Transport.PAIR, pass_=Pass.F, group=1, peer=peer,
                    group_peer=peer, batch=box.next_batch(), batch_size=1, k=k,
                    step=1, stage=rank, microbatch=k, signature=shape,
                    numel=4096, nbytes=16384, channel=channel,
                )  # fmt: skip
                for offset in (16, 24, 32, 40):
                    box.set_time(seq, offset, time.monotonic_ns())
                box.set_posted(channel, k + 1)
                box.set_done(channel, k + 1)
        box.set_status(Status.EXITED)
        box.heartbeat(1, Pass.F, rank, 0, 0)
        box.close()


def _seconds(command: list[str]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one run of a command."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return wall_s, usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measure, print medians and ratios; 1 if the wall-clock ratio is over the bar."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    flags = os.environ.get("PPTRACE_STARTUP_FLAGS", "").split()
    with tempfile.TemporaryDirectory() as folder:
        _write_run(Path(folder))
        bare = [sys.executable, "-c", "import rich, numpy"]
        report = [sys.executable, *flags, "-m", "pptrace", "report", folder]
        if flags:
            return subprocess.run(report, check=False, timeout=60).returncode
        # The first pair fills the caches, the byte code's among them.
        times = [(_seconds(bare), _seconds(report)) for _ in range(runs + 1)][1:]
    ratios = []
    print(f"{'':34}  wall   processor   (medians of {runs} alternating runs)")
    for column, name in enumerate(("bare Python with rich and numpy",
                                   "pptrace report, 8 files")):  # fmt: skip
        medians = [statistics.median(t[column][kind] for t in times) for kind in (0, 1)]
        ratios.append(medians)
        print(f"{name:34} {medians[0] * 1e3:4.0f} ms   {medians[1] * 1e3:4.0f} ms")
    wall, processor = (ratios[1][kind] / ratios[0][kind] for kind in (0, 1))
    print(f"{'ratio':34} {wall:7.2f}   {processor:7.2f}   (bar {_BAR:.1f})")
    return int(wall > _BAR)


if __name__ == "__main__":
    sys.exit(main())
