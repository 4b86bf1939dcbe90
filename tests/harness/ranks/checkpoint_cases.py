"""Save and load checkpoints in other processes, for test_checkpointer_two_ranks.py and test_checkpoint_fuzz.py.

python -m tests.harness.ranks.checkpoint_cases OUT         execute all cases on two ranks; write a report for each rank
python -m tests.harness.ranks.checkpoint_cases OUT SEED    kill processes one after another while they save
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
from unittest import mock

import torch
from torch import nn

from common.checkpoint import state_dicts, storage
from common.checkpoint.checkpointer import Checkpointer, CheckpointState
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.train_state import TrainState
from common.ranks import rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training import optimizers
from common.training.measurement_points import MeasurementPoints
from configs.shared import Checkpoint, Launch, Optim
from tests.harness.commands.processes import wait_until
from tests.harness.ranks.programs import run_on_ranks

KILLS = 20
ELEMENTS_IN_KILLED_SAVE = 400_000
SETTINGS = Checkpoint(retries=0)


def make_state(step: int, rank: int = 0, size: int = 1, elements: int = 8) -> CheckpointState:
    """Return a state whose values depend on the step and, except for common values, on the rank."""
    name = f"layer{rank}.weight"
    weight = torch.arange(elements) + 1000.0 * step + 100 * rank
    momentum = {"momentum_buffer": -weight, "step": torch.tensor(float(step))}
    local = {"step_and_rank": torch.tensor([step, rank])}
    return CheckpointState({name: weight}, {name: momentum}, {"epoch": step, "size": size}, local)


def equals_saved_state(loaded: LoadedCheckpoint, rank: int | None, elements: int = 8) -> bool:
    """Compare a loaded checkpoint with the states of its step. `rank` is None if no local state is expected."""
    states = [make_state(loaded.step, r, loaded.processes, elements) for r in range(loaded.processes)]
    model: dict[str, torch.Tensor] = {}
    optimizer: dict[str, Any] = {}
    for state in states:
        model |= state.model
        optimizer |= state.optimizer
    if loaded.model.keys() != model.keys() or loaded.optimizer.keys() != optimizer.keys():
        return False

    tensor_pairs = [(loaded.model[name], tensor) for name, tensor in model.items()]
    for name, buffers in optimizer.items():
        tensor_pairs += [(loaded.optimizer[name][key], buffer) for key, buffer in buffers.items()]
    if rank is not None:
        local = loaded.local or {}
        tensor_pairs.append((local["step_and_rank"], states[rank].local["step_and_rank"]))
    return loaded.common == states[0].common and all(torch.equal(*pair) for pair in tensor_pairs)


class CheckpointCase:
    """The run folder of a case, and the messages of its checkpointer on this rank."""

    def __init__(self, world: World, path: Path, name: str) -> None:
        self.world = world
        self.messages: list[str] = []
        if world.is_main:
            folder = RunFolder(path / name)
            folder.path.mkdir()
            folder.claim_attempt().record_parent_attempt(None, 0)
        world.broadcast(None)
        self.folder = RunFolder(path / name, 1)
        self.checkpoints = Checkpointer(self.folder, Ranks(world), SETTINGS, self.messages.append)

    def save(self, *steps: int) -> list[bool]:
        states = {step: make_state(step, self.world.rank, self.world.size) for step in steps}
        return [self.checkpoints.save(step, state) for step, state in states.items()]

    def list_files(self) -> list[str]:
        folder = storage.get_checkpoints_dir(self.folder)
        return self.world.broadcast(sorted(path.name for path in folder.glob("*")))


# ---- two ranks


def save_and_load(case: CheckpointCase) -> Any:
    saved = case.save(100, 200)
    loaded = case.checkpoints.load()
    assert loaded is not None
    is_equal = equals_saved_state(loaded, case.world.rank)
    return {"saved": saved, "step": loaded.step, "equal": is_equal, "resumes_exactly": loaded.resumes_exactly}


def rank_1_cannot_write(case: CheckpointCase) -> Any:
    """The kernel limits the size of rank 1's file, so that writing fails as on a full disk."""
    case.save(1)
    if case.world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    saved_with_limit = case.save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    files_with_limit = case.list_files()
    return {
        "saved_with_limit": saved_with_limit,
        "files_with_limit": files_with_limit,
        "saved": case.save(3),
        "files": case.list_files(),
    }


def rank_0_cannot_create_folder(case: CheckpointCase) -> Any:
    if case.world.is_main:
        storage.get_checkpoints_dir(case.folder).write_text("a file in place of the folder")
    return {"saved": case.save(1)}


def rank_1_cannot_read_newest(case: CheckpointCase) -> Any:
    """Load on ranks that agree on the older checkpoint, and on ranks that decide without the others."""
    case.save(1, 2)
    read = storage.read_verified_rank_file

    def read_on_rank_0(checkpoint: storage.CheckpointPath, manifest: storage.Manifest, rank: int) -> bytes:
        if checkpoint.step == 2 and case.world.rank == 1:
            raise storage.InvalidCheckpoint("rank-0.pt is missing")
        return read(checkpoint, manifest, rank)

    single_rank = Ranks(case.world.make_subgroup([case.world.rank]))
    with mock.patch.object(storage, "read_verified_rank_file", read_on_rank_0):
        agreed = case.checkpoints.load()
        without_agreement = Checkpointer(case.folder, single_rank, SETTINGS, lambda message: None).load()
    assert agreed
    assert without_agreement
    is_equal = equals_saved_state(agreed, case.world.rank)
    return {"step": agreed.step, "equal": is_equal, "step_without_agreement": without_agreement.step}


def ranks_save_the_same_name(case: CheckpointCase) -> Any:
    try:
        case.checkpoints.save(1, make_state(1, 0, 2))
    except ValueError as error:
        return {"error": str(error), "files": case.list_files()}
    return None


def resume_sharded_parameters(case: CheckpointCase) -> Any:
    """FSDP2 with Adam: save after two steps, execute the third one, and repeat it from the checkpoint."""
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

    def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> tuple[Any, Any]:
        parameters = list(model.named_parameters())
        tensors = state_dicts.gather_full_tensors(parameters, keep)
        return tensors, state_dicts.collect_optimizer_state(optimizer, parameters, None if keep else ())

    model, optimizer = build(1)
    for _ in range(2):
        step(model, optimizer)
    saved = collect_state(model, optimizer, keep=case.world.is_main)
    case.checkpoints.save(2, CheckpointState(*saved, {}))
    step(model, optimizer)

    loaded = case.checkpoints.load()
    assert loaded is not None
    resumed_model, resumed_optimizer = build(2)
    parameters = list(resumed_model.named_parameters())
    state_dicts.load_tensors(parameters, loaded.model)
    state_dicts.load_optimizer_state(resumed_optimizer, parameters, loaded.optimizer)
    step(resumed_model, resumed_optimizer)
    expected = collect_state(model, optimizer)
    resumed = collect_state(resumed_model, resumed_optimizer)
    return {"equal": str(expected) == str(resumed), "sizes": [len(part) for part in saved]}


def save_divided_optimizer_state(case: CheckpointCase) -> Any:
    """Each rank has the optimizer states of some parameters. Return the names that this rank saves."""
    model = nn.Linear(2, 2, bias=False)
    model.register_parameter("only_on_rank_1", nn.Parameter(torch.ones(3)))
    model.register_parameter("on_no_rank", nn.Parameter(torch.ones(3)))
    optimizer = optimizers.build_optimizer(model.parameters(), Optim(momentum=0.9))
    for name in ["weight", "only_on_rank_1"][: 1 + case.world.rank]:
        model.get_parameter(name).grad = torch.ones_like(model.get_parameter(name))
    optimizer.step()
    optimizer.state[model.get_parameter("on_no_rank")] = {}
    points = MeasurementPoints([0])
    replicated = TrainState([model], optimizer, points, peers=Ranks(case.world))
    separate = TrainState([model], optimizer, points)
    return [list(state.collect_state().optimizer) for state in (replicated, separate)]


CASES = (
    save_and_load,
    rank_1_cannot_write,
    rank_0_cannot_create_folder,
    rank_1_cannot_read_newest,
    ranks_save_the_same_name,
    resume_sharded_parameters,
    save_divided_optimizer_state,
)


def execute_cases(out: Path, world: World) -> None:
    """Execute CASES, and load a checkpoint of one rank. Write the report of this rank."""
    report: dict[str, Any] = {}
    for execute in CASES:
        case = CheckpointCase(world, out, execute.__name__)
        report[execute.__name__] = {"result": execute(case), "messages": case.messages}
    report["saved_by_one_rank"] = load_checkpoint_of_one_rank(RunFolder(out / "saved_by_one_rank", 2), world)
    (out / f"rank-{world.rank}.json").write_text(json.dumps(report))


def load_checkpoint_of_one_rank(folder: RunFolder, world: World) -> dict[str, Any]:
    """Load a checkpoint of one rank on two ranks: it contains no local state for them."""
    messages: list[str] = []
    loaded = Checkpointer(folder, Ranks(world), SETTINGS, messages.append).load()
    assert loaded is not None
    has_no_local_state = equals_saved_state(loaded, None) and loaded.local is None and not loaded.resumes_exactly
    return {"result": {"step": loaded.step, "has_no_local_state": has_no_local_state}, "messages": messages}


# ---- killed while saving


def save_until_killed(folder: RunFolder, notes: Path) -> None:
    """Resume from the newest checkpoint, append a line to the notes, and save every step until killed."""
    rank_info = RankInfo(master=str(Path(tempfile.mkdtemp()) / "store"))
    with rendezvous.join_world(rank_info, Launch(device="cpu", threads=1)) as world:
        folder = folder.claim_attempt()
        messages: list[str] = []
        checkpoints = Checkpointer(folder, Ranks(world), SETTINGS, messages.append)
        newest = find_newest_step(folder)
        loaded = checkpoints.load()
        step = loaded.step if loaded else 0
        folder.record_parent_attempt(loaded.attempt if loaded else None, step)
        note = {
            "newest": newest,
            "step": step,
            "messages": messages,
            "equal": loaded is None or equals_saved_state(loaded, 0, ELEMENTS_IN_KILLED_SAVE),
            "staging_folders": len(storage.list_staging_dirs(folder)),
        }
        with open(notes, "a") as file:
            file.write(json.dumps(note) + "\n")
        while True:
            step += 1
            checkpoints.save(step, make_state(step, elements=ELEMENTS_IN_KILLED_SAVE))


def kill_while_saving(out: Path, seed: str) -> None:
    """Kill processes that save, one after another, at random moments."""
    folder = RunFolder(out / "run")
    folder.path.mkdir()
    notes = out / "notes"
    generator = random.Random(seed)
    notes.touch()
    for number in range(KILLS + 1):
        # every third process saves a checkpoint, even on a slow disk
        kill_one_process(folder, notes, after_checkpoint=number % 3 == 0, delay=generator.uniform(0, 0.1))


def kill_one_process(folder: RunFolder, notes: Path, after_checkpoint: bool, delay: float) -> None:
    notes_before = notes.read_text()
    step_before = find_newest_step(folder)
    pid = os.fork()
    if pid == 0:
        try:
            save_until_killed(folder, notes)
        finally:
            os._exit(1)
    wait_until(lambda: notes.read_text() != notes_before, "the process saves", pause=0.002)
    if after_checkpoint:
        wait_until(lambda: find_newest_step(folder) > step_before, "a checkpoint is saved", pause=0.002)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def find_newest_step(folder: RunFolder) -> int:
    return max((checkpoint.step for checkpoint in storage.list_resumable_checkpoints(folder)), default=0)


def main(out_name: str, *seeds: str) -> int:
    out = Path(out_name)
    if seeds:
        kill_while_saving(out, *seeds)
        return 0
    settings = Launch(device="cpu", threads=1, step_timeout=20)
    return run_on_ranks(lambda world: execute_cases(out, world), 2, settings)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
