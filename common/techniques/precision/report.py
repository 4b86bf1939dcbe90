"""Report of the amp_accum experiment, which measures the costs of mixed precision and gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.amp import GradScaler

from common.measure.memory import MemoryMeter
from common.runs.folder import RunFolder
from common.runs.result import ReportData
from common.system.text import format_count
from common.training.run_context import RunContext
from configs.amp_accum import Config
from configs.networks import get_network_name

FINAL_STEPS = 20
"""Number of steps at the end of a run over which the loss is averaged to obtain the final loss."""


@dataclass
class PrecisionReport:
    """Report on the number of bytes sent, the memory used, the number of skipped steps, and the final loss.

    The bytes, the skipped steps, and the loss are computed from metrics.jsonl and include earlier attempts of the run.
    """

    cfg: Config
    folder: RunFolder
    device: str
    """Type of the device: cpu or cuda."""
    peak_bytes: Sequence[int]
    """Peak memory of each rank in bytes, in addition to the memory of the model."""
    scale: float
    """The loss scale after the last step; 1 if the loss is not scaled."""

    @classmethod
    def gather(cls, cfg: Config, run: RunContext, footprint: MemoryMeter, scaler: GradScaler) -> PrecisionReport:
        """Create the report with the peak memory of all ranks. All ranks must call this method."""
        peaks = run.world.gather(footprint.peak_bytes)
        return cls(cfg, run.folder, run.device.type, peaks, scaler.get_scale())

    @cached_property
    def outcome(self) -> dict[str, Any]:
        """Values in result.json that are the same if the run is repeated.

        The values are the mean number of bytes that a rank sends per step, the number of skipped steps, the precision
        that the device actually used, and the final loss.
        """
        rows = [row for row in self.folder.read_metrics() if "loss" in row]
        losses = [row["loss"] for row in rows[-FINAL_STEPS:] if row["loss"] is not None]
        precision = self.cfg.precision
        if precision == "tf32" and self.device == "cpu":
            precision = "fp32"
        bytes_sent = sum(row["bytes_sent"] for row in rows)
        skipped = sum(row["skipped"] for row in rows)
        return {
            "bytes_sent": bytes_sent / len(rows),
            "steps_skipped": int(skipped),
            "computed_in": precision,
            "final_loss": sum(losses) / len(losses) if losses else None,
        }

    def rows(self) -> dict[str, str]:
        """Return the rows of the final table."""
        cfg = self.cfg
        outcome = self.outcome
        scale = f", loss scale {self.scale:g}" if cfg.precision == "fp16" else ""
        counts = [format_count(cfg.accumulate, "microbatch")]
        if cfg.batch_plan.weights:  # the shards are unequal
            counts.append(format_count(cfg.batch // cfg.accumulate, "sample"))
        else:
            counts.append(format_count(cfg.processes, "rank"))
            counts.append(format_count(cfg.batch_plan.microbatch, "sample"))
        return {
            "step": f"batch {cfg.batch} = {' x '.join(counts)}",
            "precision": f"{outcome['computed_in']}, {get_network_name(cfg.model)}{scale}",
            "steps skipped": str(outcome["steps_skipped"]),
            "training memory": f"{max(self.peak_bytes) / 1e6:.1f} MB beyond the model, on the rank that uses the most",
            "sent": f"{outcome['bytes_sent'] / 1e6:.2f} MB of gradients per rank and step",
        }

    def result(self) -> ReportData:
        """Return the values that are stored in result.json."""
        return ReportData(outcome=self.outcome, measured={"training_bytes": max(self.peak_bytes)})
