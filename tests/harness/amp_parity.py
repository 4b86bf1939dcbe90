"""Train many cases of amp_accum of one world size in one launch, for test_amp.py and test_pitfalls.py to compare.

    python -m tests.harness.amp_parity OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with one of MISTAKES, which is then made in the script itself; or with one of PLANTS, something
infinite on the last process; or with `count`, which counts what ddp really exchanges.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from common import config, data, optim, scaling
from common.folder import Folder
from common.footprint import Footprint
from common.launch import World
from common.prepare import Prepared
from common.run import Run
from common.training import Training
from configs.amp_accum import Config
from experiments import amp_accum
from tests.harness.ddp_parity import in_processes, whole
from tests.harness.processes import ROOT

CASE = {
    "data.name": "digits",
    "data.train_limit": "500",  # 83 microbatches of 6: twenty windows of 4 in an epoch, and one of 3
    "data.test_limit": "101",
    "precision": "fp32",
    "dtype": "float64",
    "launch.threads": "1",
    "batch": "24",
    "eval_batch": "16",
    "optim.lr": "0.05",
    "optim.base_batch": "24",
    "optim.warmup": "5",
    "optim.decay": "cosine",
    "clip": "2",
    "epochs": "2",
    "steps": "30",
    "seed": "7",
}
QUICK = CASE | {"model": "mlp", "dtype": "float32", "data.train_limit": "2000", "batch": "32", "optim.base_batch": "32"}
QUICK |= {"optim.lr": "0.02", "clip": "0.5", "epochs": "10", "steps": "200"}

CLEAN = """\
        with model.no_sync() if waits and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
            with autocast(cfg, x.device):
                loss = F.cross_entropy(model(laid_out(cfg, x)), y)
"""
OUTSIDE = """\
        with autocast(cfg, x.device):
            loss = F.cross_entropy(model(laid_out(cfg, x)), y)
        with model.no_sync() if waits and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
"""
# each as the text of the script, and what a mistake makes of it
MISTAKES = {
    "no_divisor": ("loss = loss / len(window)", "loss = loss / 1"),
    "same_divisor": ("loss = loss / len(window)", "loss = loss / cfg.accumulate"),
    "last_window_dropped": ("batches(windows)", "batches(w for w in windows if len(w) == cfg.accumulate)"),
    "clip_before_unscale": ("    scaler.unscale_(optimizer)", "    pass"),
    "forward_outside": (CLEAN, OUTSIDE),
    "scaler_for_bf16": ('fp16 = cfg.precision == "fp16"', "fp16 = cfg.precision in HALF"),
    "old_spelling": ("GradScaler(device.type, cfg.init_scale,", "torch.cuda.amp.GradScaler(cfg.init_scale,"),
}
PLANTS = ("inf_gradient", "nan_loss")
AT = 10  # the microbatch that is spoilt: the second of step 3


def script(mistake: str) -> Any:
    """The experiment, with a mistake in it if one is named."""
    if mistake not in MISTAKES:
        return amp_accum
    text = (ROOT / "experiments" / "amp_accum.py").read_text()
    right, wrong = MISTAKES[mistake]
    assert text.count(right) == 1, f"{mistake}: the script has changed"
    module = types.ModuleType("mistaken")
    exec(compile(text.replace(right, wrong), f"amp_accum with {mistake}", "exec"), module.__dict__)
    return module


def settings(text: str) -> tuple[Config, str]:
    """The settings of a case, and what is special about it, if anything."""
    words = text.split(",")
    special = words.pop(0) if "=" not in words[0] else ""
    assert special in ("", "count", *MISTAKES, *PLANTS)
    chosen = dict(word.split("=") for word in words)
    return config.resolve(Config, [(QUICK if chosen.get("model") == "mlp" else CASE) | chosen]), special


def plant(special: str, model: nn.Module, world: World) -> None:
    """Make the gradient or the loss of microbatch AT infinite, on the last process only."""
    if world.rank != world.size - 1:
        return
    passed = [0]

    def spoil(value: Any) -> Any:
        passed[0] += 1
        return value * float("inf") if passed[0] == AT else value

    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if special == "inf_gradient":
        next(inner.parameters()).register_hook(spoil)
    else:
        inner.register_forward_pre_hook(lambda _, x: (spoil(x[0]),))


def counted(model: nn.Module, sent: list[int]) -> None:
    """Let ddp add up the bytes that it exchanges."""

    def exchange(bucket: Any) -> Any:
        sent[0] += bucket.buffer().numel() * bucket.buffer().element_size()
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    assert isinstance(model, DistributedDataParallel)
    model.register_comm_hook(None, lambda state, bucket: exchange(bucket))  # ddp takes no postponed annotations


def train(cfg: Config, special: str, world: World, prepared: Prepared, folder: Folder) -> dict[str, Any]:
    """One case on this process; on rank 0 its columns, full state and scores."""
    torch.manual_seed(1234)
    it = script(special)
    train_set, test_set = data.load(prepared, cfg.data)
    model = it.wrap(cfg, it.build(cfg, train_set, world), world)
    optimizer = optim.make(model.parameters(), cfg.optim, scaled=cfg.precision == "fp16")
    scaler = it.make_scaler(cfg, world.device)
    dtype = getattr(torch, cfg.dtype)
    share = (world.rank, world.size)
    windows = data.Windows(
        data.Loader(train_set, cfg.microbatch, cfg.seed, world.device, dtype, block=3, share=share), cfg.accumulate
    )
    run = Run(cfg, folder, world, prepared)
    run.averaged, run.total = True, cfg.steps
    run.training = Training([model], optimizer, windows, world, replicated=True, scaler=scaler)
    sent, states = [0], []
    if special in PLANTS:
        plant(special, model, world)
    if special in ("count", "forward_outside"):
        counted(model, sent)
    step, stop, times = 0, cfg.steps, scaling.StepTimes(model, world.device)
    while step < cfg.steps:
        stop = step + 1 if special in PLANTS else cfg.steps  # step by step, to see what each changes
        step = it.train_epoch(cfg, model, optimizer, scaler, windows, run, Footprint(world.device), times, step, stop)
        states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    run.flush()
    scores = it.evaluate(cfg, model, test_set, world)
    state = whole(model)
    equal = torch.tensor([float(sum(v.double().sum() for v in state.values()))], dtype=torch.float64)
    sums = [torch.zeros_like(equal) for _ in range(world.size)]
    dist.all_gather(sums, equal)
    if not world.is_main:
        return {}
    rows = [row for row in folder.metrics() if "loss" in row]
    return {name: [row[name] for row in rows] for name in ("skipped", "bytes_sent", "samples")} | {
        "losses": [float("nan") if row["loss"] is None else row["loss"] for row in rows],
        "state": state,
        "scores": scores,
        "sums": [float(s) for s in sums],
        "exchanged": sent[0],
        "moved": [bool((b != a).any()) for a, b in itertools.pairwise(states)],
        "scale": scaler.get_scale(),
    }


if __name__ == "__main__":
    sys.exit(in_processes(settings, train, *sys.argv[1:]))
