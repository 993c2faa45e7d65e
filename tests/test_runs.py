"""`pptrace.runs`: which files make a run, and what becomes of those that do not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pptrace import blackbox
from pptrace.blackbox import BlackBox
from pptrace.errors import InputError
from pptrace.records import Kind
from pptrace.runs import load_run
from synthetic import RUN_START_WALL_NS, SECOND, one_f_one_b

__all__: list[str] = []


def _make_run(folder: Path, ranks: int = 4) -> Path:
    folder.mkdir(parents=True)
    one_f_one_b(folder, ranks=ranks, microbatches=2).finish(idle_ns=12 * SECOND)
    return folder


def _rename_run(
    folder: Path, name: str, *, started_s: int = 0, attempt: int = 0
) -> Path:
    """Give the black boxes in ``folder`` another run, attempt and start."""
    for file in folder.rglob("*.pptrace"):
        data = bytearray(file.read_bytes())
        identity = list(blackbox._IDENTITY.unpack_from(data))
        identity[14] = attempt
        identity[17] = RUN_START_WALL_NS + started_s * SECOND
        identity[20] = name.encode()
        blackbox._IDENTITY.pack_into(data, 0, *identity)
        file.write_bytes(data)
    return folder


def _set_heartbeat(file: Path, later_s: int) -> None:
    data = bytearray(file.read_bytes())
    for offset in (blackbox._O_HEARTBEAT, blackbox._O_HEARTBEAT_WALL):
        value = blackbox._U64.unpack_from(data, offset)[0] + later_s * SECOND
        blackbox._U64.pack_into(data, offset, value)
    file.write_bytes(data)


def test_a_folder_of_black_boxes_is_a_run(tmp_path: Path) -> None:
    """Every rank is there, in order, and there is nothing to complain about."""
    folder = _make_run(tmp_path / "run", ranks=11)
    run = load_run(folder)
    assert list(run.logs) == list(range(11))
    assert run.path == folder
    assert run.problems == ()
    assert all(log.records for log in run.logs.values())


def test_tail_limits_the_records_read(tmp_path: Path) -> None:
    """With a tail, each rank has only its newest records."""
    folder = _make_run(tmp_path / "run")
    whole, tail = load_run(folder), load_run(folder, tail=3)
    assert len(whole.logs[0].records) > 3
    for rank, log in tail.logs.items():
        assert log.records == whole.logs[rank].records[-3:]


def test_progress_is_told_file_by_file(tmp_path: Path) -> None:
    """The caller hears how many files were read, of how many."""
    heard: list[tuple[int, int]] = []
    load_run(_make_run(tmp_path / "run"), progress=lambda *a: heard.append(a))
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_of_an_output_directory_the_newest_run_is_read(tmp_path: Path) -> None:
    """Newest is what started last, whatever folders are called or touched."""
    for name, started_s in (("20261201-a", 100), ("20261201-b", 300), ("zz", 200)):
        _rename_run(_make_run(tmp_path / name), name, started_s=started_s)
    os.utime(tmp_path / "20261201-b", (0, 0))
    run = load_run(tmp_path)
    assert run.path == tmp_path / "20261201-b"
    assert {log.run for log in run.logs.values()} == {"20261201-b"}
    assert run.problems == ()


def test_a_newer_folder_with_nothing_readable_is_passed_over(tmp_path: Path) -> None:
    """A run that died before its first header does not hide the one before it."""
    _rename_run(_make_run(tmp_path / "good"), "good")
    (tmp_path / "stillborn").mkdir()
    (tmp_path / "stillborn" / "rank00000.pptrace").write_bytes(bytes(8192))
    run = load_run(tmp_path)
    assert run.path == tmp_path / "good"
    [problem] = run.problems
    assert problem.startswith("stillborn: ")


def test_folders_of_nodes_are_one_run(tmp_path: Path) -> None:
    """Black boxes gathered into a folder per node belong together."""
    folder = _rename_run(_make_run(tmp_path / "node0"), "one")
    (tmp_path / "node1").mkdir()
    for rank in (2, 3):
        name = blackbox.file_name(rank)
        shutil.move(folder / name, tmp_path / "node1" / name)
    run = load_run(tmp_path)
    assert list(run.logs) == [0, 1, 2, 3]
    assert run.path == tmp_path
    assert run.problems == ()


def test_one_file_is_enough(tmp_path: Path) -> None:
    """A single black box can be given; the other ranks are said to be missing."""
    folder = _make_run(tmp_path / "run")
    run = load_run(folder / "rank00002.pptrace")
    assert list(run.logs) == [2]
    assert run.path == folder
    assert run.problems == ("no black box of ranks 0-1,3 (1 of 4 are here)",)


def test_missing_ranks_are_named_compactly(tmp_path: Path) -> None:
    """Ranks without a file are one line, as ranges."""
    folder = _make_run(tmp_path / "run", ranks=12)
    for rank in (3, 4, 5, 9):
        (folder / blackbox.file_name(rank)).unlink()
    run = load_run(folder)
    assert run.problems == ("no black box of ranks 3-5,9 (8 of 12 are here)",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too short"),
        (b"PPTRACE\0" + bytes(40), "too short"),
        (b"\x89PNG" * 4096, "not a pptrace black box"),
        (b"PPTRACE\0" + b"\xff" * 8192, "has format version"),
    ],
)
def test_a_foreign_file_costs_only_itself(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    """One line names the file and says why; all other ranks are used."""
    folder = _make_run(tmp_path / "run")
    (folder / "rank00001.pptrace").write_bytes(content)
    run = load_run(folder)
    assert list(run.logs) == [0, 2, 3]
    assert run.problems[0].startswith("rank00001.pptrace: ")
    assert reason in run.problems[0]
    assert len(run.problems) == 2  # the other: rank 1 is missing


def test_a_damaged_file_costs_only_itself(tmp_path: Path) -> None:
    """A header that leads the decoder astray is a problem, not a crash."""
    folder = _make_run(tmp_path / "run")
    file = folder / "rank00001.pptrace"
    data = bytearray(file.read_bytes())
    data[4098] = 77  # the first channel's transport: there is no such one
    file.write_bytes(data)
    run = load_run(folder)
    assert list(run.logs) == [0, 2, 3]
    assert "is damaged" in run.problems[0]


def test_a_rank_beyond_reason_is_damage(tmp_path: Path) -> None:
    """A header that claims two thousand million ranks costs no time and no memory."""
    folder = _make_run(tmp_path / "run")
    file = folder / "rank00001.pptrace"
    data = bytearray(file.read_bytes())
    identity = list(blackbox._IDENTITY.unpack_from(data))
    identity[12] = 2**31 - 1
    blackbox._IDENTITY.pack_into(data, 0, *identity)
    file.write_bytes(data)
    run = load_run(folder)
    assert list(run.logs) == [0, 2, 3]
    assert "is damaged" in run.problems[0]


def test_what_is_left_of_a_truncated_file_is_used(tmp_path: Path) -> None:
    """A file cut off in its ring is named; its rank is still there."""
    folder = _make_run(tmp_path / "run")
    file = folder / "rank00001.pptrace"
    os.truncate(file, file.stat().st_size - 1000 * 128)
    run = load_run(folder)
    assert list(run.logs) == [0, 1, 2, 3]
    assert run.problems == (
        "rank00001.pptrace: was cut off, its last 128000 bytes are missing",
    )
    assert run.logs[1].records
    assert run.logs[1].incomplete == ""


def test_counts_of_a_file_cut_in_its_tables_are_not_trusted(tmp_path: Path) -> None:
    """Where channels are missing, silence is no proof: the rank says so."""
    folder = _make_run(tmp_path / "run")
    os.truncate(folder / "rank00001.pptrace", 5000)
    log = load_run(folder).logs[1]
    assert "cut off" in log.incomplete


def test_things_that_cannot_be_read_cost_only_themselves(tmp_path: Path) -> None:
    """Folders, pipes and dangling links with our suffix are problems, never waits."""
    folder = _make_run(tmp_path / "run")
    for rank in (0, 1, 2):
        (folder / blackbox.file_name(rank)).unlink()
    (folder / "rank00000.pptrace").mkdir()
    os.mkfifo(folder / "rank00001.pptrace")
    (folder / "rank00002.pptrace").symlink_to(tmp_path / "nowhere")
    run = load_run(folder)
    assert list(run.logs) == [3]
    assert [p.partition(": ")[2] for p in run.problems[:3]] == [
        "is not a regular file"
    ] * 3


def test_of_two_files_for_one_rank_the_livelier_is_used(tmp_path: Path) -> None:
    """The later heartbeat wins, whatever the file is called, and it is said."""
    folder = _make_run(tmp_path / "run")
    copy = folder / "rank00003 (1).pptrace"
    shutil.copy(folder / "rank00003.pptrace", copy)
    same = load_run(folder)
    assert same.logs[3].path.endswith("rank00003.pptrace")
    _set_heartbeat(copy, 60)
    run = load_run(folder)
    assert run.logs[3].path == str(copy)
    [problem] = run.problems
    assert problem.startswith("rank 3 has 2 files: used rank00003 (1).pptrace")
    assert "rank00003.pptrace" in problem


def test_attempts_of_a_job_do_not_mix(tmp_path: Path) -> None:
    """Of a restarted job the last attempt is read, even where it lacks a rank."""
    old = _make_run(tmp_path / "attempt0")
    new = _make_run(tmp_path / "attempt1")
    _rename_run(old, "job", attempt=0)
    _rename_run(new, "job", attempt=1, started_s=500)
    (new / "rank00002.pptrace").unlink()
    (tmp_path / "rank00007.pptrace").write_bytes(b"makes this folder the run's own")
    run = load_run(tmp_path)
    assert list(run.logs) == [0, 1, 3]
    assert {log.attempt for log in run.logs.values()} == {1}
    said = [p for p in run.problems if "left out" in p]
    assert said == [
        "left out 4 files (ranks 0-3) of attempt 0; attempt 1 started later"
    ]


def test_two_runs_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    """Ranks of an older, larger run are not taken for ranks of the newer one."""
    folder = _make_run(tmp_path / "run", ranks=6)
    _rename_run(folder, "old")
    newer = _rename_run(_make_run(tmp_path / "new", ranks=2), "new", started_s=9)
    for file in newer.iterdir():
        shutil.move(file, folder / file.name)
    run = load_run(folder)
    assert list(run.logs) == [0, 1]
    assert run.problems == ("left out 4 files (ranks 2-5) of run old; new is newer",)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.absolute, "does not exist"),
        (Path.mkdir, "is empty"),
        (os.mkfifo, "is neither a folder nor a file"),
        (lambda path: path.write_text("x"), "is too short"),
        (
            lambda path: (path.mkdir(), (path / "loss.csv").write_text("1")),
            "has no black box",
        ),
        (
            lambda path: (path.mkdir(), (path / "rank00000.pptrace").write_text("1")),
            "has no usable black box; rank00000.pptrace: is too short",
        ),
        (
            lambda path: (
                path.mkdir(),
                (path / "run").mkdir(),
                (path / "run" / "rank00000.pptrace").write_text("1"),
            ),
            "has no usable black box; rank00000.pptrace: is too short",
        ),
    ],
)
def test_unusable_input_is_one_clear_line(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    """The error names the path, the reason and what to do, in one line."""
    path = tmp_path / "some: place"
    make(path)
    with pytest.raises(InputError, match=reason) as caught:
        load_run(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_copy_is_as_old_as_its_last_sign_of_life(tmp_path: Path) -> None:
    """Ages in a directory from elsewhere do not grow while it lies in a drawer."""
    run = load_run(_make_run(tmp_path / "run"))
    heartbeat = max(log.heartbeat_wall_ns for log in run.logs.values())
    assert run.now_wall_ns == heartbeat
    assert all(log.alive is None for log in run.logs.values())


def test_ages_of_a_living_process_refer_to_now(tmp_path: Path) -> None:
    """While a process of the run lives here, its clock runs on."""
    with_box = BlackBox(tmp_path / "rank00000.pptrace", rank=0, world_size=1)
    with_box.record(time.monotonic_ns(), Kind.NOTE)
    before = time.time_ns()
    run = load_run(tmp_path)
    with_box.close()
    assert run.logs[0].alive is True
    assert before <= run.now_wall_ns <= time.time_ns()
