"""Mistakes as developers make them, each a small change of product code that runs on a CPU.

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
    caught_by: str
    """Test file or test id that fails with the mistake; the fastest one that names the changed behavior."""


COMMON_MISTAKES = [
    Mistake(
        "order-without-epoch",  # every epoch in the order of the first
        "common/data/loader.py",
        'seeds.make_generator(seed, "order", epoch)',
        'seeds.make_generator(seed, "order")',
        caught_by="tests/unit/data/test_loader.py::test_the_order_depends_on_seed_and_epoch_only",
    ),
    Mistake(
        "last-window-dropped",  # an epoch's last microbatches are no step
        "common/data/loader.py",
        "return -(-self.epoch_samples // self.step_samples)",
        "return self.epoch_samples // self.step_samples",
        caught_by="tests/pitfalls/test_pitfalls_amp.py"
        "::test_a_step_every_n_batches_leaks_the_last_window_into_the_next_epoch",
    ),
    Mistake(
        "last-test-batch-dropped",
        "common/training/evaluate.py",
        "for start in range(0, count, size))",
        "for start in range(0, count - size + 1, size))",
        caught_by="tests/unit/training/test_evaluate.py::test_the_last_partial_batch_is_evaluated",
    ),
    Mistake(
        "norm-gradient-not-summed",  # the backward of synchronised BatchNorm sees this process's loss alone
        "common/techniques/data_parallel/sync_batchnorm.py",
        "        dist.all_reduce(gradients)\n",
        "",
        caught_by="tests/unit/techniques/data_parallel/test_sync_batchnorm.py"
        "::test_synchronised_norms_equal_one_process_and_refuse_a_single_value",
    ),
    Mistake(
        "losses-summed",  # the mean over ranks without its division
        "common/measure/metrics_log.py",
        "[value / len(values) for value in values]",
        "values",
        caught_by="tests/unit/measure/test_metrics_log_rows.py"
        "::test_values_of_single_steps_and_ranks_are_written[averaged-0.5]",
    ),
    Mistake(
        "evaluation-without-flush",  # its row comes before those of the steps that it is about
        "common/measure/metrics_log.py",
        "        self.flush()\n        if self.ranks.current.is_main:\n            self.writer",
        "        if self.ranks.current.is_main:\n            self.writer",
        caught_by="tests/unit/measure/test_metrics_log_rows.py"
        "::test_an_evaluation_is_written_after_the_steps_before_it",
    ),
    Mistake(
        "checkpoint-not-synced",
        "common/checkpoint/rank_file.py",
        "        os.fsync(file.fileno())\n    return ManifestEntry(",
        "    return ManifestEntry(",
        caught_by="tests/unit/checkpoint/test_checkpointer.py::test_all_files_are_on_the_disk_before_the_rename",
    ),
    Mistake(
        "one-checkpoint-fewer",
        "common/checkpoint/storage.py",
        "        if complete < max(2, keep):\n            kept",
        "        if complete < max(2, keep) - 1:\n            kept",
        caught_by="tests/unit/checkpoint/test_checkpointer.py::test_the_newest_checkpoints_and_the_best_one_are_kept",
    ),
    Mistake(
        "buffers-averaged-over-all",  # not over the replicas of a stage alone
        "common/checkpoint/train_state.py",
        "average_tensors(floating, peers.group, self.shard_weight)",
        "average_tensors(floating, None, self.shard_weight)",
        caught_by="tests/parity/test_replicas.py"
        "::test_two_replicas_of_two_stages_equal_one_process[mode=pipelined schedule=1f1b]",
    ),
    Mistake(
        "loss-divided-by-stages",
        "common/techniques/pipeline/executor.py",
        "return loss / self.microbatches if self.microbatches > 1 else loss",
        "return loss / self.stage_count if self.microbatches > 1 else loss",
        caught_by="tests/unit/techniques/pipeline/test_executor.py",
    ),
    Mistake(
        "library-share-of-call",  # of the microbatches in one call, not in the batch
        "common/techniques/pipeline/torch_engine.py",
        "loss_fn=self._scale_loss,",
        "loss_fn=lambda output, target: self.loss(output, target) / self.call_microbatches,",
        caught_by="tests/unit/techniques/pipeline/test_executor.py",
    ),
    Mistake(
        "one-more-in-flight",  # 1F1B keeps one microbatch's activations too many
        "common/techniques/pipeline/interleaved_schedules.py",
        "in_flight[stage] >= stages - stage:",
        "in_flight[stage] > stages - stage:",
        caught_by="tests/unit/techniques/pipeline/test_schedules.py"
        "::test_1f1b_stores_at_most_one_microbatch_per_following_stage",
    ),
    Mistake(
        "backward-in-forward-order",  # GPipe with several stages in a process
        "common/techniques/pipeline/schedules.py",
        'for stage in reversed(local_stages):\n            actions += [Action("B"',
        'for stage in local_stages:\n            actions += [Action("B"',
        caught_by="tests/unit/techniques/pipeline/test_schedules.py"
        "::test_two_stages_per_rank_shorten_the_bubble_of_gpipe",
    ),
    Mistake(
        "slot-stays-full",  # from the second step on, no stage waits for a message
        "common/techniques/pipeline/shared_memory.py",
        "        self.full.remove(number)\n",
        "",
        caught_by="tests/unit/techniques/pipeline/test_stage_messages.py"
        "::test_messages_arrive_through_every_transport[memory]",
    ),
    Mistake(
        "warmup-from-zero",
        "common/training/learning_rate.py",
        "return peak * (step + 1) / cfg.warmup",
        "return peak * step / cfg.warmup",
        caught_by="tests/unit/training/test_learning_rate.py::test_warm_up_cosine_and_the_linear_scaling_rule",
    ),
    Mistake(
        "buffers-sent-in-forwards",  # rank 0's BatchNorm statistics replace those of the others
        "common/techniques/data_parallel/ddp.py",
        "    return {name: False}",
        "    return {name: True}",
        caught_by="tests/unit/techniques/data_parallel/test_ddp.py::test_each_rank_keeps_its_own_batch_statistics",
    ),
    Mistake(
        "saves-by-last-look",  # the clock of saving starts again at every look
        "common/checkpoint/save_or_stop_vote.py",
        "<= now - self.saved_at",
        "<= now - self.voted_at",
        caught_by="tests/unit/checkpoint/test_save_or_stop_vote.py",
    ),
    Mistake(
        "killed-rank-ignored",  # only exit statuses count, not signals
        "common/ranks/rank_monitor.py",
        "if child.exit_code not in (0, EXIT_RESUMABLE)]",
        "if (child.exit_code or 0) > 0 and child.exit_code != EXIT_RESUMABLE]",
        caught_by="tests/unit/ranks/test_local_launcher.py::test_a_killed_rank_is_named",
    ),
    Mistake(
        "preparing-not-alone",
        "common/data/sources.py",
        "fcntl.flock(handle, fcntl.LOCK_EX)",
        "fcntl.flock(handle, fcntl.LOCK_SH)",
        caught_by="tests/unit/data/test_prepare.py::test_processes_that_start_together_prepare_a_data_set_once",
    ),
    Mistake(
        "environment-in-meta",  # with API keys in it
        "common/runs/provenance.py",
        "for name, text in os.environ.items() if name.startswith(prefixes)}",
        "for name, text in os.environ.items()}",
        caught_by="tests/commands/test_tracking.py::test_the_api_key_is_in_no_file_and_no_command_line",
    ),
    Mistake(
        "new-id-in-tracking",  # a resumed run is another one in W&B
        "common/runs/tracking/wandb_run.py",
        'run_id = read_json(id_file).get("id") or secrets.token_hex(4)',
        "run_id = secrets.token_hex(4)",
        caught_by="tests/commands/test_tracking.py::test_a_second_start_keeps_the_id",
    ),
    Mistake(
        "largest-value-refused",
        "common/config/config_keys.py",
        "number > key.high\n",
        "number >= key.high\n",
        caught_by="tests/unit/config/test_config_keys.py::test_bounds_are_accepted_and_numbers_beyond_are_refused",
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
        caught_by="tests/unit/models/test_networks.py"
        "::test_a_resnet_with_weights_of_torchvision_has_its_outputs[resnet50-64]",
    ),
]
SLURM_MISTAKES = [
    Mistake(
        "requeued-without-limit",
        "slurm/scheduling/requeue.py",
        "0 if status in REQUESTED_STOP_STATUSES else count_failures_without_checkpoint(folder)",
        "count_failures_without_checkpoint(folder) if status in REQUESTED_STOP_STATUSES else 0",
        caught_by="tests/unit/slurm/scheduling/test_requeue.py"
        "::test_a_run_fails_after_too_many_starts_without_a_checkpoint",
    ),
    Mistake(
        "signal-is-success",  # the exit status of a job that a signal ended
        "slurm/reports/logs.py",
        "return code or (128 + signal_number if 0 < signal_number < 32 else 1)",
        "return code",
        caught_by="tests/unit/slurm/reports/test_logs.py::test_slurm_knows_the_exit_status_of_a_job_without_a_result",
    ),
    Mistake(
        "array-task-off-by-one",
        "slurm/scheduling/sbatch.py",
        "$((SLURM_ARRAY_TASK_ID + 1))p",
        "$((SLURM_ARRAY_TASK_ID))p",
        caught_by="tests/unit/slurm/scheduling/test_sbatch.py::test_each_task_of_an_array_finds_its_run",
    ),
    Mistake(
        "launcher-words-inherited",  # a job begins as a rank of the torchrun around it
        "slurm/scheduling/scheduler.py",
        "if not k.startswith(ALLOCATION_VARIABLE_PREFIXES) and k not in LAUNCHER_VARIABLES\n",
        "if not k.startswith(ALLOCATION_VARIABLE_PREFIXES)\n",
        caught_by="tests/unit/slurm/scheduling/test_scheduler.py::test_jobs_inherit_no_variables_of_another_launcher",
    ),
    Mistake(
        "sweep-ignores-failures",
        "slurm/launch/sweep.py",
        "                has_failed |= process.returncode != 0 and state != REFUSED\n",
        "",
        caught_by="tests/commands/test_sweep.py::test_a_failed_point_is_run_again_only_on_request",
    ),
    Mistake(
        "prunes-what-can-go-on",  # checkpoints of unfinished runs that nobody named
        "slurm/reports/prune_runs.py",
        'if state != "FINISHED" and not is_named:',
        "if state not in status.FINAL_STATES and not is_named:",
        caught_by="tests/commands/test_prune.py::test_nothing_is_deleted_by_default",
    ),
    Mistake(
        "missing-steps-are-equal",
        "slurm/launch/rerun.py",
        "return is_comparable and not differing and not missing_steps",
        "return is_comparable and not differing",
        caught_by="tests/commands/test_rerun.py::test_a_repetition_with_other_steps_is_not_equal",
    ),
    Mistake(
        "first-error-without-time",  # one whose time is not known is taken for the first
        "slurm/reports/diagnosis.py",
        "key=lambda rank: (not rank.error_time, rank.error_time))",
        "key=lambda rank: rank.error_time)",
        caught_by="tests/commands/test_doctor.py::test_an_error_without_a_time_is_not_the_first",
    ),
    Mistake(
        "any-process-of-that-pid",
        "common/system/processes.py",
        'return int(stat[19]) == self.start and stat[0] not in "ZX"',
        'return stat[0] not in "ZX"',
        caught_by="tests/unit/system/test_processes_identity.py",
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
        caught_by="tests/pitfalls/test_pitfalls_amp.py::test_clipping_before_unscaling_clips_the_scale",
    ),
    Mistake(
        "gradients-not-zeroed",
        "experiments/ddp_multinode.py",
        "            optimizer.zero_grad()\n",
        "",
        caught_by="tests/experiments/test_parity_of_engines.py::test_ddp_fsdp_and_synchronised_norms_equal_one_process",
    ),
    Mistake(
        "rate-never-set",  # neither warm-up nor decay
        "common/training/loop.py",
        "        learning_rate.set_learning_rate(state.optimizer, rate)\n",
        "",
        caught_by="tests/unit/training/test_run.py::test_the_learning_rate_is_set_before_a_step",
    ),
    Mistake(
        "replicas-norms-differ",  # each replica evaluates with its own BatchNorm statistics
        "common/training/evaluate.py",
        "            average_buffers(stage, peers.group)\n",
        "            pass\n",
        caught_by="tests/parity/test_replicas.py"
        "::test_two_replicas_of_two_stages_equal_one_process[mode=pipelined schedule=1f1b]",
    ),
    Mistake(
        "unequal-shares-count-alike",  # in the last, ragged batch
        "experiments/resnet_dataparallel.py",
        'run.loss(forward(step.x), step.y, reduction="sum") / step.mean_shard',
        "run.loss(forward(step.x), step.y)",
        caught_by="tests/experiments/test_resnet_dataparallel.py::test_ddp_with_synchronised_norms_equals_one_process",
    ),
]
MISTAKES = [*COMMON_MISTAKES, *SLURM_MISTAKES, *EXPERIMENT_MISTAKES]
