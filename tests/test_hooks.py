"""The hooks: what is recorded, what the user's program notices of it (nothing)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launch import run_folder, torchrun, write_script
from pptrace import blackbox
from pptrace.records import Direction, Flag, Kind, Pass, Record, Status, Transport

PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.line = nn.Linear(width, width)
    def forward(self, x):
        return torch.tanh(self.line(x))

def make_stage(width=8):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    return PipelineStage(Block(width), rank, size, torch.device("cpu"))

def one_step(schedule, x, y):
    losses = []
    if dist.get_rank() == 0:
        schedule.step(x)
    elif dist.get_rank() == dist.get_world_size() - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    return losses
"""


def in_child(body: str, tmp_path: Path, **environment: str) -> str:
    """Run Python code in a process of its own; its standard output."""
    script = write_script(tmp_path, textwrap.dedent(body), "child.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env=None if not environment else {"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def ops(records: list[Record], pass_: Pass) -> list[Record]:
    """The ops of one pass, in order."""
    return [r for r in records if r.kind is Kind.OP and r.pass_ is pass_]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[int, blackbox.RankLog]:
    """The black boxes of a healthy 1F1B run: 3 ranks, 4 microbatches, 2 steps."""
    return healthy_run(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[int, blackbox.RankLog]:
    """The same run with the NCCL rules emulated."""
    return healthy_run(tmp_path_factory.mktemp("emulated"), PPTRACE_EMULATE="nccl")


def healthy_run(folder: Path, **environment: str) -> dict[int, blackbox.RankLog]:
    """Run it; the black boxes by rank."""
    script = write_script(
        folder,
        "pptrace.enable(os.environ['OUT'])\n"
        + PIPELINE
        + """
dist.init_process_group("gloo")
schedule = Schedule1F1B(make_stage(), 4, loss_fn=nn.functional.mse_loss)
for _ in range(2):
    one_step(schedule, torch.randn(8, 8), torch.randn(8, 8))
dist.barrier()
dist.destroy_process_group()
""",
    )
    job = torchrun(script, 3, OUT=str(folder / "out"), **environment)
    assert job.returncode == 0, job.output
    run = run_folder(folder / "out")
    return {rank: blackbox.read(run / blackbox.file_name(rank)) for rank in range(3)}


@pytest.mark.multirank
class TestWhatIsRecorded:
    """A healthy run of a real schedule, as its black boxes show it."""

    def test_every_op_has_its_meaning(
        self, healthy: dict[int, blackbox.RankLog]
    ) -> None:
        """Stage, microbatch, F or B, peer, desc and payload of each op are there."""
        log = healthy[1]
        forward = [
            r
            for r in ops(log.records, Pass.F)
            if r.step == 1 and r.direction is Direction.RECV
        ]
        assert [(r.stage, r.microbatch, r.peer) for r in forward] == [
            (1, m, 0) for m in range(4)
        ]
        first = forward[0]
        assert first.signature.shape == (2, 8)
        assert first.signature.dtype == "float32"
        assert (first.numel, first.nbytes) == (16, 64)
        assert first.text == "fwd_recv"
        assert first.group is not None
        assert first.group.ranks == (0, 1, 2)
        backward = ops(log.records, Pass.B)
        assert {r.text for r in backward} >= {"bwd_send", "fwd_send_bwd_recv"}

    def test_every_op_is_followed_to_its_end(
        self, healthy: dict[int, blackbox.RankLog]
    ) -> None:
        """Posted, returned, waited on and done are known of every op, in that order."""
        for log in healthy.values():
            for r in (r for r in log.records if r.kind is Kind.OP):
                assert 0 < r.posted_ns <= r.returned_ns <= r.wait_ns
                assert r.wait_ns <= r.waited_ns <= r.done_ns

    def test_k_counts_up_on_both_sides_alike(
        self, healthy: dict[int, blackbox.RankLog]
    ) -> None:
        """On each channel both ranks count 0, 1, 2, ... and meet at the same label."""
        for sender, receiver in ((0, 1), (1, 2), (2, 1), (1, 0)):
            sides = []
            for rank, peer, direction in (
                (sender, receiver, Direction.SEND),
                (receiver, sender, Direction.RECV),
            ):
                sides.append(
                    [
                        (r.k, r.pass_, r.microbatch, r.numel)
                        for r in healthy[rank].records
                        if r.kind is Kind.OP
                        and r.peer == peer
                        and r.direction is direction
                    ]
                )
            assert sides[0] == sides[1]
            assert [k for k, *_ in sides[0]] == list(range(len(sides[0])))

    def test_actions_steps_and_collectives_are_there(
        self, healthy: dict[int, blackbox.RankLog]
    ) -> None:
        """Each step has its chunks; the barrier after the steps is in the timeline."""
        log = healthy[2]
        steps = [r for r in log.records if r.kind is Kind.STEP]
        assert [(r.step, r.microbatch, r.text) for r in steps] == [
            (1, 4, "Schedule1F1B"),
            (2, 4, "Schedule1F1B"),
        ]
        actions = [
            (r.pass_, r.microbatch)
            for r in log.records
            if r.kind is Kind.ACTION and r.step == 2
        ]
        assert sorted(actions) == sorted(
            (p, m) for p in (Pass.F, Pass.B) for m in range(4)
        )
        assert [r.text for r in log.records if r.kind is Kind.COLLECTIVE] == ["barrier"]
        assert log.status is Status.EXITED
        assert log.schedules[0].num_stages == 3

    def test_start_up_exchange_is_marked(
        self, healthy: dict[int, blackbox.RankLog]
    ) -> None:
        """The votes and shapes before the first microbatch are labelled metadata."""
        meta = ops(healthy[0].records, Pass.META)
        assert meta
        assert all(r.label == "metadata" and r.step == 1 for r in meta)

    def test_gloo_has_one_transport(self, healthy: dict[int, blackbox.RankLog]) -> None:
        """Without emulation no op claims a pair communicator on gloo."""
        transports = {r.transport for r in healthy[0].records if r.kind is Kind.OP}
        assert transports == {Transport.GROUP}


@pytest.mark.multirank
class TestUnderEmulation:
    """What emulation adds to the records of a healthy run."""

    def test_mixed_batches_ride_the_group(
        self, emulated: dict[int, blackbox.RankLog]
    ) -> None:
        """Lone ops ride pair communicators, mixed batches the group's, as on NCCL."""
        chunks = [r for p in (Pass.F, Pass.B) for r in ops(emulated[1].records, p)]
        rides = {(r.text, r.transport, bool(r.flags & Flag.COALESCED)) for r in chunks}
        assert rides == {
            ("fwd_recv", Transport.PAIR, False),
            ("fwd_send", Transport.PAIR, False),
            ("bwd_recv", Transport.PAIR, False),
            ("bwd_send", Transport.PAIR, False),
            ("fwd_send_bwd_recv", Transport.GROUP, True),
            ("bwd_send_fwd_recv", Transport.GROUP, True),
        }

    def test_each_batch_is_posted_once(
        self, emulated: dict[int, blackbox.RankLog]
    ) -> None:
        """No work is dropped unseen, and each is waited for by those who posted it."""
        for log in emulated.values():
            posted = [r for r in log.records if r.kind is Kind.OP]
            assert all(r.done_ns for r in posted)
            assert not [r for r in posted if r.flags & Flag.DROPPED]


class TestPatches:
    """What enable changes in the process, and that disable takes it all back."""

    def test_disable_restores_the_very_same_objects(self, tmp_path: Path) -> None:
        """Every attribute that enable replaced is the original again, and was replaced."""
        out = in_child(
            """
            import torch.distributed.pipelining as pp
            from torch.distributed.pipelining import schedules, stage
            from torch.distributed import distributed_c10d as c10d
            owners = [schedules, stage, c10d, dist, dist.ProcessGroup, dist.Work]
            for module in (schedules, stage):
                owners += [v for v in vars(module).values() if isinstance(v, type)]
            def picture():
                return {(id(o), n): v for o in owners for n, v in vars(o).items()}
            before = picture()
            pptrace.enable("out")
            pptrace.enable("out")
            during = picture()
            pptrace.disable()
            after = picture()
            changed = [k for k in before if during[k] is not before[k]]
            print(len(changed), all(after[k] is before[k] for k in before))
            print(dist.isend is before[id(dist), "isend"], after.keys() == before.keys())
            """,
            tmp_path,
        )
        changed, restored = out.splitlines()[0].split()
        assert int(changed) > 20
        assert restored == "True"
        assert out.splitlines()[1] == "True True"

    def test_references_by_name_are_traced_and_restored(self, tmp_path: Path) -> None:
        """A custom schedule's own ``_batch_p2p`` name is hooked, before and after."""
        (tmp_path / "early.py").write_text(
            "from torch.distributed.pipelining.schedules import _batch_p2p\n"
        )
        (tmp_path / "later.py").write_text(
            "from torch.distributed.pipelining.schedules import _batch_p2p\n"
        )
        out = in_child(
            """
            import early
            from torch.distributed.pipelining import schedules
            kept = [schedules._batch_p2p]  # not a module's name: stays the original
            pptrace.enable("out")
            import later
            print(early._batch_p2p is kept[0], later._batch_p2p is kept[0])
            print(early._batch_p2p is schedules._batch_p2p)
            pptrace.disable()
            print(early._batch_p2p is kept[0], later._batch_p2p is kept[0])
            """,
            tmp_path,
        )
        assert out.splitlines() == ["False False", "True", "True True"]

    def test_wrappers_look_like_what_they_wrap(self, tmp_path: Path) -> None:
        """Name, module and signature of a hooked function are the original's."""
        out = in_child(
            """
            import inspect
            from torch.distributed.pipelining import schedules
            stage = schedules._PipelineStageBase
            def look():
                found = []
                for f in (schedules._batch_p2p, dist.batch_isend_irecv,
                          stage.forward_one_chunk, stage.backward_one_chunk,
                          schedules.PipelineScheduleSingle.step):
                    found.append((f.__name__, f.__module__, str(inspect.signature(f))))
                return found
            before = look()
            pptrace.enable("out")
            print(look() == before)
            """,
            tmp_path,
        )
        assert out.strip() == "True"

    def test_another_tools_patch_is_left_alone(self, tmp_path: Path) -> None:
        """A patch somebody put over ours survives disable, and is reported."""
        out = in_child(
            """
            from torch.distributed.pipelining import schedules
            pptrace.enable("out")
            theirs = lambda *a, **k: None
            schedules._batch_p2p = theirs
            pptrace.disable()
            print(schedules._batch_p2p is theirs)
            """,
            tmp_path,
        )
        assert "True" in out
        assert "_batch_p2p was replaced by someone else" in out

    def test_environment_variable_switches_on(self, tmp_path: Path) -> None:
        """PPTRACE=1 at import is enable(); without it nothing is patched."""
        body = """
            from torch.distributed.pipelining import schedules
            print(hasattr(schedules._batch_p2p, "__wrapped__"))
            """
        assert "False" in in_child(body, tmp_path)
        assert "True" in in_child(body, tmp_path, PPTRACE="1")


@pytest.mark.multirank
class TestTrainingIsUntouched:
    """Results, failures and other processes are as without pptrace."""

    def test_fifty_steps_are_bit_identical(self, tmp_path: Path) -> None:
        """Losses and parameters after 50 steps: off, on and off again are equal."""
        script = write_script(
            tmp_path,
            PIPELINE
            + """
dist.init_process_group("gloo")

def train():
    schedule = Schedule1F1B(make_stage(), 4, loss_fn=nn.functional.mse_loss)
    module = schedule._stage.submod
    optimizer = torch.optim.AdamW(module.parameters())
    torch.manual_seed(7)
    result = []
    for _ in range(50):
        optimizer.zero_grad()
        result += one_step(schedule, torch.randn(8, 8), torch.randn(8, 8))
        optimizer.step()
    return result + list(module.parameters())

def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))

off = train()
pptrace.enable(os.environ["OUT"])
on = train()
pptrace.disable()
again = train()
result = (dist.get_rank(), len(off) > 0, same(off, on), same(off, again))
sys.stdout.write("RESULT {} {} {} {}\\n".format(*result))  # one write: ranks share it
dist.destroy_process_group()
""",
        )
        job = torchrun(script, 2, OUT=str(tmp_path / "out"))
        assert job.returncode == 0, job.output
        results = sorted(
            line for line in job.output.splitlines() if line.startswith("RESULT")
        )
        assert results == ["RESULT 0 True True True", "RESULT 1 True True True"]

    def test_a_failing_hook_costs_a_warning_only(self, tmp_path: Path) -> None:
        """Each hook that breaks inside pptrace is off, says so once, training goes on."""
        script = write_script(
            tmp_path,
            PIPELINE
            + """
pptrace.enable(os.environ["OUT"])
from pptrace.hooks.recorder import Recorder
def broken(*a, **k):
    raise ZeroDivisionError("planted")
for name in ("post", "begin_action", "begin_step", "collective", "wait_begins"):
    setattr(Recorder, name, broken)
dist.init_process_group("gloo")
schedule = Schedule1F1B(make_stage(), 2, loss_fn=nn.functional.mse_loss)
for _ in range(3):
    losses = one_step(schedule, torch.randn(8, 8), torch.randn(8, 8))
dist.barrier()
print("TRAINED", dist.get_rank())
dist.destroy_process_group()
""",
        )
        job = torchrun(script, 2, OUT=str(tmp_path / "out"))
        assert job.returncode == 0, job.output
        assert job.output.count("TRAINED") == 2
        for hook in ("p2p", "chunk", "step", "collective"):
            assert job.output.count(f"hook '{hook}' failed and is off") == 2
        log = blackbox.read(run_folder(tmp_path / "out") / blackbox.file_name(0))
        assert "failed and is off" in log.incomplete

    def test_forked_children_do_not_write(self, tmp_path: Path) -> None:
        """A data loader's worker leaves its parent's black box alone."""
        out = in_child(
            """
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            pptrace.enable("out")
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            dist.barrier()
            pid = os.fork()
            if pid == 0:
                from pptrace.hooks.state import active
                os._exit(0 if active("p2p") is None else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            from pptrace.hooks.state import active
            print(active("p2p") is not None)
            """,
            tmp_path,
        )
        assert out.splitlines()[:2] == ["0", "True"]

    def test_what_forked_children_do_is_not_the_ranks(self, tmp_path: Path) -> None:
        """A child's end, by exit or by SIGTERM, leaves no trace in the rank's files."""
        out = in_child(
            """
            import atexit, signal, subprocess
            pptrace.enable("out")
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            for end in ("exit", "term"):
                pid = os.fork()
                if pid == 0:
                    if end == "exit":
                        atexit._run_exitfuncs()  # gloo's own end hangs in a fork
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
                os.waitpid(pid, 0)
            from pptrace import blackbox
            log = blackbox.read(pptrace.run_folder() / blackbox.file_name(0))
            print(log.status.name, repr(log.stacks))
            code = "import pptrace, os; print('boxes', len(os.listdir('out')))"
            env = os.environ | {"PPTRACE": "1", "PPTRACE_DIR": "out", "RANK": "0",
                                "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            print(subprocess.check_output([sys.executable, "-c", code], env=env, text=True))
            """,
            tmp_path,
        )
        assert out.splitlines()[:2] == ["RUNNING ''", "boxes 1"]

    def test_the_users_signal_handler_survives_disable(self, tmp_path: Path) -> None:
        """A handler for SIGTERM set while pptrace was on is still there after it."""
        out = in_child(
            """
            import signal
            pptrace.enable("out")
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=1)
            signal.signal(signal.SIGTERM, lambda *_: print("HANDLED"))
            pptrace.disable()
            os.kill(os.getpid(), signal.SIGTERM)
            print("STILL HERE")
            """,
            tmp_path,
        )
        assert out.split("\n")[:2] == ["HANDLED", "STILL HERE"]

    def test_keyword_calls_of_the_binding_work(self, tmp_path: Path) -> None:
        """``ProcessGroup.send(..., dstRank=)`` is a legal call and recorded."""
        script = write_script(
            tmp_path,
            """
            pptrace.enable(os.environ["OUT"])
            dist.init_process_group("gloo")
            group = dist.distributed_c10d._get_default_group()
            x = torch.ones(3)
            if dist.get_rank() == 0:
                group.send(tensors=[x], dstRank=1, tag=0).wait()
            else:
                group.recv([x], srcRank=0, tag=0).wait()
            dist.destroy_process_group()
            """,
        )
        job = torchrun(script, 2, OUT=str(tmp_path / "out"))
        assert job.returncode == 0, job.output
        log = blackbox.read(run_folder(tmp_path / "out") / blackbox.file_name(1))
        assert [(r.peer, r.done_ns > 0) for r in log.records] == [(0, True)]

    def test_a_black_box_is_never_written_over(self, tmp_path: Path) -> None:
        """A second job of the same parent process gets a folder of its own."""
        script = write_script(
            tmp_path,
            """
            pptrace.enable(os.environ["OUT"])
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=1)
            print(pptrace.run_folder().name)
            """,
        )
        env = os.environ | {
            "OUT": str(tmp_path / "out"),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
        }
        names = [
            subprocess.check_output(
                [sys.executable, str(script)], env=env, text=True, timeout=60
            )
            for _ in range(2)
        ]
        assert names[1].strip() == names[0].strip() + ".2"

    def test_an_unwritable_folder_costs_a_warning_only(self, tmp_path: Path) -> None:
        """Where no black box can be made, training runs untraced and is told so."""
        (tmp_path / "out").write_text("a file where the folder should be")
        out = in_child(
            """
            pptrace.enable("out")
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            dist.barrier()
            print("TRAINED")
            pptrace.disable()
            """,
            tmp_path,
        )
        assert "TRAINED" in out
        assert "training goes on untraced" in out


@pytest.mark.multirank
class TestCountsThatCannotBeTrusted:
    """Channels whose counts may be wrong say so in the black box."""

    def test_enabled_after_a_schedule_had_run(self, tmp_path: Path) -> None:
        """Late is late only where ops may have been missed."""
        script = write_script(
            tmp_path,
            PIPELINE
            + """
dist.init_process_group("gloo")
schedule = Schedule1F1B(make_stage(), 2, loss_fn=nn.functional.mse_loss)
if dist.get_rank() == 0:
    pass
x, y = torch.randn(8, 8), torch.randn(8, 8)
if os.environ["WHEN"] == "late":
    one_step(schedule, x, y)
pptrace.enable(os.environ["OUT"])
one_step(schedule, x, y)
if os.environ["WHEN"] == "off":
    pptrace.disable()
one_step(schedule, x, y)
dist.destroy_process_group()
""",
        )
        reasons = {}
        for when in ("early", "late", "off"):
            job = torchrun(script, 2, OUT=str(tmp_path / when), WHEN=when)
            assert job.returncode == 0, job.output
            folder = run_folder(tmp_path / when)
            reasons[when] = blackbox.read(folder / blackbox.file_name(1)).incomplete
        assert reasons["early"] == ""
        assert "after a process group had been used" in reasons["late"]
        assert "disable() was called" in reasons["off"]


@pytest.mark.multirank
class TestNamesAndPlaces:
    """Which folder a run gets, however its ranks were started."""

    @pytest.mark.parametrize("on", ["0 1", "1"])
    def test_spawned_ranks_share_a_folder(self, tmp_path: Path, on: str) -> None:
        """No torchrun, a file store; also where rank 0 runs without pptrace."""
        out = in_child(
            f"""
            import torch.multiprocessing as mp
            def main(rank):
                if str(rank) in "{on}".split():
                    pptrace.enable("out")
                dist.init_process_group(
                    "gloo", init_method="file://" + os.getcwd() + "/store",
                    rank=rank, world_size=2)
                x = torch.ones(3)
                dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
                dist.destroy_process_group()
            if __name__ == "__main__":
                mp.spawn(main, nprocs=2)
                print("DONE")
            """,
            tmp_path,
        )
        assert "DONE" in out
        names = sorted(p.name for p in run_folder(tmp_path / "out").glob("*.pptrace"))
        assert names == [blackbox.file_name(int(rank)) for rank in on.split()]
