"""Checkpoints in processes of their own, for test_checkpointer_two_ranks.py and test_checkpoint_fuzz.py to look at.

python -m tests.harness.checkpoints two OUT        the cases of two processes, in one launch; a JSON file for each rank
python -m tests.harness.checkpoints kill OUT SEED  starts one after the other, each killed in the middle of saving
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.checkpoint import state_dicts, storage
from common.checkpoint.checkpointer import Checkpointer, CheckpointState
from common.checkpoint.loading import LoadedCheckpoint
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training import optimizers
from configs.shared import Checkpoint, Launch, Optim
from tests.harness.processes import wait_until

ROUNDS = 20  # starts that are killed
NUMBERS = 400_000  # in the tensor that they are saving
SETTINGS = Checkpoint(retries=0)


def state_of(step: int, rank: int = 0, size: int = 1, numbers: int = 8) -> CheckpointState:
    """Something to save whose every value tells the step and, where it is a rank's own, the rank."""
    name, value = f"layer{rank}.weight", torch.arange(numbers) + 1000.0 * step + 100 * rank
    momentum = {"momentum_buffer": -value, "step": torch.tensor(float(step))}
    return CheckpointState(
        {name: value}, {name: momentum}, {"epoch": step, "size": size}, {"mine": torch.tensor([step, rank])}
    )


def right(loaded: LoadedCheckpoint, rank: int | None, numbers: int = 8) -> bool:
    """Whether what was loaded is what its step saved, to the last value."""
    parts = [state_of(loaded.step, r, loaded.processes, numbers) for r in range(loaded.processes)]
    model = {name: value for part in parts for name, value in part.model.items()}
    memory = {name: value for part in parts for name, value in part.optimizer.items()}
    if loaded.model.keys() != model.keys() or loaded.optimizer.keys() != memory.keys():
        return False
    same = all(torch.equal(loaded.model[name], model[name]) for name in model)
    same &= all(torch.equal(loaded.optimizer[name][key], memory[name][key]) for name in memory for key in memory[name])
    same &= loaded.common == parts[0].common
    return same and (rank is None or torch.equal((loaded.local or {})["mine"], parts[rank].local["mine"]))


class Case:
    """One run folder in which a case happens, and what this process was told."""

    def __init__(self, world: World, path: Path, name: str) -> None:
        self.world, self.said = world, list[str]()
        if world.is_main:
            folder = RunFolder(path / name)
            folder.path.mkdir()
            folder.claim_attempt().record_parent_attempt(None, 0)
        world.broadcast(None)
        self.folder = RunFolder(path / name, 1)
        self.checkpoints = self.start()

    def start(self, world: World | None = None) -> Checkpointer:
        return Checkpointer(self.folder, Ranks(world or self.world), SETTINGS, self.said.append)

    def save(self, *steps: int) -> list[bool]:
        return [self.checkpoints.save(step, state_of(step, self.world.rank, self.world.size)) for step in steps]

    def files(self) -> list[str]:
        return self.world.broadcast(sorted(path.name for path in storage.get_checkpoints_dir(self.folder).glob("*")))


# ---- two processes


def round_trip(case: Case) -> Any:
    saved = case.save(100, 200)
    loaded = case.checkpoints.load()
    assert loaded is not None
    return {
        "saved": saved,
        "step": loaded.step,
        "right": right(loaded, case.world.rank),
        "exact": loaded.resumes_exactly,
    }


def one_rank_cannot_write(case: Case) -> Any:
    """The limit is the kernel's: it refuses rank 1's file as a full disk would."""
    case.save(1)
    if case.world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    failed = case.save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    files = case.files()
    return {"failed": failed, "files": files, "healed": case.save(3), "after": case.files()}


def rank_0_cannot_begin(case: Case) -> Any:
    if case.world.is_main:
        storage.get_checkpoints_dir(case.folder).write_text("in the way")
    return {"failed": case.save(1)}


def one_rank_sees_less(case: Case) -> Any:
    """Rank 1 cannot read the newest one: with agreement all take the older, without they part."""
    case.save(1, 2)
    read = storage.read_verified_rank_file

    def blind(checkpoint: storage.CheckpointPath, manifest: storage.Manifest, rank: int) -> bytes:
        if checkpoint.step == 2 and case.world.rank == 1:
            raise storage.InvalidCheckpoint("rank-0.pt is missing")
        return read(checkpoint, manifest, rank)

    class Alone(World):
        """Every rank takes its own word for everybody's."""

        is_main = True

        def all_gather(self, value: Any) -> list[Any]:
            return [value]

        def broadcast(self, value: Any) -> Any:
            return value

    storage.read_verified_rank_file = blind
    agreed = case.checkpoints.load()
    said, case.said = case.said, []
    parted = case.start(Alone(**vars(case.world))).load()
    storage.read_verified_rank_file = read
    assert agreed and parted
    case.said = said
    return {"agreed": agreed.step, "right": right(agreed, case.world.rank), "parted": parted.step}


def both_give_a_name(case: Case) -> Any:
    try:
        case.checkpoints.save(1, state_of(1, 0, 2))
    except ValueError as error:
        return {"error": str(error), "files": case.files()}
    return None


def sharded(case: Case) -> Any:
    """FSDP2 with Adam: two steps, save, a third; then the third once more out of the checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (case.world.size,)))
        return model, optimizers.build_optimizer(model.parameters(), Optim(name="adam", lr=0.1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()

    def everything(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> tuple[Any, Any]:
        named = list(model.named_parameters())
        return state_dicts.gather_full_tensors(named, keep), state_dicts.collect_optimizer_state(optimizer, named, keep)

    one = build(1)
    for _ in range(2):
        step(*one)
    kept = everything(*one, keep=case.world.is_main)
    case.checkpoints.save(2, CheckpointState(*kept, {}))
    step(*one)
    loaded, other = case.checkpoints.load(), build(2)
    assert loaded is not None
    named = list(other[0].named_parameters())
    state_dicts.load_tensors(named, loaded.model)
    state_dicts.load_optimizer_state(other[1], named, loaded.optimizer)
    step(*other)
    return {"equal": str(everything(*one)) == str(everything(*other)), "sizes": [len(part) for part in kept]}


CASES = (round_trip, one_rank_cannot_write, rank_0_cannot_begin, one_rank_sees_less, both_give_a_name, sharded)


def two(out: Path) -> int:
    def body(place: RankInfo) -> None:
        with rendezvous.join_world(place, Launch(device="cpu", threads=1, step_timeout=20)) as world:
            found: dict[str, Any] = {}
            for work in CASES:
                case = Case(world, out, work.__name__)
                found[work.__name__] = {"found": work(case), "said": case.said}
            of_one = Checkpointer(
                RunFolder(out / "of_one", 2), Ranks(world), SETTINGS, (said := list[str]()).append
            ).load()
            assert of_one is not None
            whole = right(of_one, None) and of_one.local is None and not of_one.resumes_exactly
            found["of_one"] = {"found": {"step": of_one.step, "whole": whole}, "said": said}
            (out / f"rank-{world.rank}.json").write_text(json.dumps(found))

    return local_launcher.run_ranks(body, 2, 1, lambda: None)


# ---- killed in the middle


def endless(folder: RunFolder, notes: Path) -> None:
    """One start: go on where the last one was, and save every step until killed."""
    place = RankInfo(master=str(Path(tempfile.mkdtemp()) / "store"))
    with rendezvous.join_world(place, Launch(device="cpu", threads=1)) as world:
        folder, said = folder.claim_attempt(), list[str]()
        checkpoints = Checkpointer(folder, Ranks(world), SETTINGS, said.append)
        newest = newest_of(folder)
        loaded = checkpoints.load()
        step = loaded.step if loaded else 0
        folder.record_parent_attempt(loaded.attempt if loaded else None, step)
        note = {"newest": newest, "step": step, "said": said, "right": loaded is None or right(loaded, 0, NUMBERS)}
        with open(notes, "a") as file:
            file.write(json.dumps(note | {"left": len(storage.list_staging_dirs(folder))}) + "\n")
        while True:
            step += 1
            checkpoints.save(step, state_of(step, numbers=NUMBERS))


def kill(out: Path, seed: str) -> int:
    folder, notes, chance = RunFolder(out / "run"), out / "notes", random.Random(seed)
    folder.path.mkdir()
    for number in range(ROUNDS + 1):
        pid = os.fork()
        if pid == 0:
            try:
                endless(folder, notes)
            finally:
                os._exit(1)
        wait_until(lambda number=number: has_lines(notes, number + 1), "it saves", pause=0.002)  # type: ignore[misc]
        if number % 3 == 0:  # every third one saves something, however slow the disk is
            newest = json.loads(notes.read_text().splitlines()[number])["step"]
            wait_until(lambda newest=newest: newest_of(folder) > newest, "it has saved", pause=0.002)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0


def has_lines(file: Path, count: int) -> bool:
    return file.exists() and file.read_text().count("\n") >= count


def newest_of(folder: RunFolder) -> int:
    return max((checkpoint.step for checkpoint in storage.list_resumable_checkpoints(folder)), default=0)


if __name__ == "__main__":
    sys.exit(two(Path(sys.argv[2])) if sys.argv[1] == "two" else kill(Path(sys.argv[2]), sys.argv[3]))
