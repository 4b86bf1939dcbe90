"""Forty mistakes as developers make them, each a small change of product code that runs on a CPU.

Chosen by reading the code, one concern after the other, and not by what the tests look at. Each changes what the
program does. The mistakes in a technique are in tests/benchmarks/NAME_mistakes.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A change of one file: `old`, which occurs there exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


COMMON_MISTAKES = [
    Mistake(
        "order-without-epoch",  # every epoch in the order of the first
        "common/data/loader.py",
        'seeds.make_generator(seed, "order", epoch)',
        'seeds.make_generator(seed, "order")',
    ),
    Mistake(
        "last-window-dropped",  # an epoch's last microbatches are no step
        "common/data/loader.py",
        "return -(-self.epoch_samples // self.step_samples)",
        "return self.epoch_samples // self.step_samples",
    ),
    Mistake(
        "last-test-batch-dropped",
        "common/training/evaluate.py",
        "for start in range(0, count, size))",
        "for start in range(0, count - size + 1, size))",
    ),
    Mistake(
        "norm-gradient-not-summed",  # the backward of synchronised BatchNorm sees this process's loss alone
        "common/techniques/data_parallel/sync_batchnorm.py",
        "        return AllReduce.forward(ctx, gradient)",
        "        return gradient",
    ),
    Mistake(
        "losses-summed",  # the mean over ranks without its division
        "common/measure/metrics_log.py",
        "[value / len(values) for value in values]",
        "values",
    ),
    Mistake(
        "evaluation-without-flush",  # its row comes before those of the steps that it is about
        "common/measure/metrics_log.py",
        "        self.flush()\n        if self.ranks.current.is_main:\n            self.writer",
        "        if self.ranks.current.is_main:\n            self.writer",
    ),
    Mistake(
        "checkpoint-not-synced",
        "common/checkpoint/rank_file.py",
        "        os.fsync(file.fileno())\n    return ManifestEntry(",
        "    return ManifestEntry(",
    ),
    Mistake(
        "one-checkpoint-fewer",
        "common/checkpoint/storage.py",
        "        if complete < max(2, keep):\n            kept",
        "        if complete < max(2, keep) - 1:\n            kept",
    ),
    Mistake(
        "buffers-averaged-over-all",  # not over the replicas of a stage alone
        "common/checkpoint/train_state.py",
        "average_tensors(floating, peers.group, self.shard_weight)",
        "average_tensors(floating, None, self.shard_weight)",
    ),
    Mistake(
        "loss-divided-by-stages",
        "common/techniques/pipeline/executor.py",
        "output = output / self.microbatches",
        "output = output / self.count",
    ),
    Mistake(
        "library-share-of-call",  # of the microbatches in one call, not in the batch
        "common/techniques/pipeline/torch_engine.py",
        "return self.loss(output, target) / self.microbatches",
        "return self.loss(output, target) / self.call_microbatches",
    ),
    Mistake(
        "one-more-in-flight",  # 1F1B keeps one microbatch's activations too many
        "common/techniques/pipeline/interleaved_schedules.py",
        "in_flight[stage] >= stages - stage:",
        "in_flight[stage] > stages - stage:",
    ),
    Mistake(
        "backward-in-forward-order",  # GPipe with several stages in a process
        "common/techniques/pipeline/schedules.py",
        'for stage in reversed(local_stages):\n            actions += [Action("B"',
        'for stage in local_stages:\n            actions += [Action("B"',
    ),
    Mistake(
        "slot-stays-full",  # from the second step on, no stage waits for a message
        "common/techniques/pipeline/shared_memory.py",
        "        self.full.remove(number)\n",
        "",
    ),
    Mistake(
        "warmup-from-zero",
        "common/training/learning_rate.py",
        "return peak * (step + 1) / cfg.warmup",
        "return peak * step / cfg.warmup",
    ),
    Mistake(
        "buffers-sent-in-forwards",  # rank 0's BatchNorm statistics replace those of the others
        "common/techniques/data_parallel/ddp.py",
        "    return {name: False}",
        "    return {name: True}",
    ),
    Mistake(
        "saves-by-last-look",  # the clock of saving starts again at every look
        "common/checkpoint/save_or_stop_vote.py",
        "<= now - self.saved_at",
        "<= now - self.voted_at",
    ),
    Mistake(
        "killed-rank-ignored",  # only exit statuses count, not signals
        "common/ranks/rank_monitor.py",
        "if child.exit_code not in (0, EXIT_RESUMABLE)]",
        "if (child.exit_code or 0) > 0 and child.exit_code != EXIT_RESUMABLE]",
    ),
    Mistake(
        "preparing-not-alone",
        "common/data/sources.py",
        "fcntl.flock(handle, fcntl.LOCK_EX)",
        "fcntl.flock(handle, fcntl.LOCK_SH)",
    ),
    Mistake(
        "environment-in-meta",  # with API keys in it
        "common/runs/provenance.py",
        "for name, text in os.environ.items() if name.startswith(prefixes)}",
        "for name, text in os.environ.items()}",
    ),
    Mistake(
        "new-id-in-tracking",  # a resumed run is another one in W&B
        "common/runs/tracking/wandb_run.py",
        'run_id = read_json(id_file).get("id") or secrets.token_hex(4)',
        "run_id = secrets.token_hex(4)",
    ),
    Mistake(
        "largest-value-refused",
        "common/config/config_keys.py",
        "number > key.high\n",
        "number >= key.high\n",
    ),
    Mistake(
        "stride-of-first-convolution",  # ResNet v1 instead of v1.5: the same shapes and names
        "common/models/networks.py",
        """\
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
""",
        """\
        self.conv1 = nn.Conv2d(in_channels, width, 1, stride, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
""",
    ),
]
SLURM_MISTAKES = [
    Mistake(
        "requeued-without-limit",
        "slurm/scheduling/requeue.py",
        "0 if status in REQUESTED_STOP_STATUSES else count_failures_without_checkpoint(folder)",
        "count_failures_without_checkpoint(folder) if status in REQUESTED_STOP_STATUSES else 0",
    ),
    Mistake(
        "signal-is-success",  # the exit status of a job that a signal ended
        "slurm/reports/logs.py",
        "return code or (128 + signal_number if 0 < signal_number < 32 else 1)",
        "return code",
    ),
    Mistake(
        "array-task-off-by-one",
        "slurm/scheduling/sbatch.py",
        "$((SLURM_ARRAY_TASK_ID + 1))p",
        "$((SLURM_ARRAY_TASK_ID))p",
    ),
    Mistake(
        "launcher-words-inherited",  # a job begins as a rank of the torchrun around it
        "slurm/scheduling/scheduler.py",
        "if not k.startswith(ALLOCATION_VARIABLE_PREFIXES) and k not in LAUNCHER_VARIABLES\n",
        "if not k.startswith(ALLOCATION_VARIABLE_PREFIXES)\n",
    ),
    Mistake(
        "sweep-ignores-failures",
        "slurm/launch/sweep.py",
        "                has_failed |= process.returncode != 0\n",
        "",
    ),
    Mistake(
        "prunes-what-can-go-on",  # checkpoints of unfinished runs that nobody named
        "slurm/reports/prune_runs.py",
        'if state != "FINISHED" and not (are_named and state in status.FINAL_STATES):',
        "if state not in status.FINAL_STATES:",
    ),
    Mistake(
        "missing-steps-are-equal",
        "slurm/launch/rerun.py",
        "return is_comparable and not differing and not missing_steps",
        "return is_comparable and not differing",
    ),
    Mistake(
        "first-error-without-time",  # one whose time is not known is taken for the first
        "slurm/reports/diagnosis.py",
        "key=lambda rank: (not rank.error_time, rank.error_time))",
        "key=lambda rank: rank.error_time)",
    ),
    Mistake(
        "any-process-of-that-pid",
        "common/system/processes.py",
        'return int(stat[19]) == self.start and stat[0] not in "ZX"',
        'return stat[0] not in "ZX"',
    ),
]
EXPERIMENT_MISTAKES = [
    Mistake(
        "clip-before-unscale",
        "experiments/amp_accum.py",
        """\
    scaler.unscale_(optimizer)  # once per step, before clipping
    step.clip_gradients(model.parameters(), cfg.regularization.clip)
""",
        """\
    step.clip_gradients(model.parameters(), cfg.regularization.clip)
    scaler.unscale_(optimizer)
""",
    ),
    Mistake(
        "gradients-not-zeroed",
        "experiments/ddp_multinode.py",
        "            optimizer.zero_grad()\n",
        "",
    ),
    Mistake(
        "rate-never-set",  # neither warm-up nor decay
        "common/training/loop.py",
        "        learning_rate.set_learning_rate(state.optimizer, rate)\n",
        "",
    ),
    Mistake(
        "replicas-norms-differ",  # each replica evaluates with its own BatchNorm statistics
        "common/training/evaluate.py",
        "            average_buffers(stage, peers.group)\n",
        "            pass\n",
    ),
    Mistake(
        "unequal-shares-count-alike",  # in the last, ragged batch
        "experiments/resnet_dataparallel.py",
        'run.loss(forward(step.x), step.y, reduction="sum") / step.mean_shard',
        "run.loss(forward(step.x), step.y)",
    ),
]
MISTAKES = [*COMMON_MISTAKES, *SLURM_MISTAKES, *EXPERIMENT_MISTAKES]
