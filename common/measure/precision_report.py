"""Report of amp_accum: the cost of a precision and of accumulated gradients, from the rows of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.core.text import format_count
from common.runs.folder import Folder
from common.runs.result import Facts
from configs.amp_accum import Config

FINAL = 20  # last steps, whose mean loss is the final one


@dataclass
class PrecisionReport:
    """Bytes sent and held, steps skipped, and the final loss of a run, earlier attempts included."""

    cfg: Config
    folder: Folder
    device: str
    """Type of the device: cpu or cuda."""
    held: Sequence[int]
    """Bytes that each rank held at most beyond the model."""
    scale: float
    """The loss scale after the last step; 1 without scaling."""

    @cached_property
    def outcome(self) -> dict[str, Any]:
        """Bytes sent by a rank in a step (mean), steps skipped, the precision used, and the mean loss at the end."""
        rows = [row for row in self.folder.metrics() if "loss" in row]
        final = [row["loss"] for row in rows[-FINAL:] if row["loss"] is not None]
        return {
            "bytes_sent": sum(row["bytes_sent"] for row in rows) / len(rows),
            "steps_skipped": int(sum(row["skipped"] for row in rows)),
            "computed_in": "fp32" if self.cfg.precision == "tf32" and self.device == "cpu" else self.cfg.precision,
            "final_loss": sum(final) / len(final) if final else None,
        }

    def rows(self) -> dict[str, str]:
        """Return the rows of the final table."""
        cfg, outcome = self.cfg, self.outcome
        scale = f", scale {self.scale:g}" if cfg.precision == "fp16" else ""
        counts = [(cfg.accumulate, "microbatch"), (cfg.processes, "rank"), (cfg.batch_plan.microbatch, "sample")]
        if cfg.batch_plan.weights:
            counts[1:] = [(cfg.batch // cfg.accumulate, "sample")]
        sizes = " x ".join(format_count(count, noun) for count, noun in counts)
        return {
            "step": f"batch {cfg.batch} = {sizes}",
            "precision": f"{outcome['computed_in']}, {cfg.model}{scale}",
            "steps skipped": str(outcome["steps_skipped"]),
            "training memory": f"{max(self.held) / 1e6:.1f} MB beyond the model, on the rank that takes most",
            "sent": f"{outcome['bytes_sent'] / 1e6:.2f} MB of gradients by each rank in a step",
        }

    def result(self) -> Facts:
        """Return what goes into result.json."""
        return Facts(outcome=self.outcome, measured={"training_bytes": max(self.held)})
