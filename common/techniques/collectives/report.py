"""Report of the collectives benchmark: times, bandwidths, fitted lines, and sent bytes.

Times and bandwidths are reported in a table like that of nccl-tests (github.com/NVIDIA/nccl-tests).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from common.backend.cost import MessageTimeLine, MessageTimeLines, fit_message_time_line, predict_seconds
from common.runs.result import ReportData
from common.techniques.collectives.measurement import (
    CollectivePoint,
    CollectiveVariant,
    compute_bus_factor,
    compute_sent_bytes,
)

HEAD = f"{'us':>10}  {'[lowest..highest]':<21}{'GB/s':>7}{'bus GB/s':>10}{'line, us':>11}"
CURVE_SEGMENTS = 60  # number of line segments that draw a fitted line, which is curved on logarithmic axes
Curve = list[tuple[float, float, float]]


@dataclass(frozen=True)
class CollectiveCell:
    """Measurements of one variant (`side`) for one combination of operation, data type, and size."""

    point: CollectivePoint
    side: str
    seconds: tuple[float, ...]
    """Time of the slowest rank in each round, in seconds."""
    sent: tuple[float, ...]
    """Number of bytes sent by each rank, excluding message headers (median over the rounds); 0 if unknown."""
    interface: tuple[float, ...]
    """Number of bytes sent through the interface of each rank (median over the rounds); 0 if unknown."""

    @property
    def time(self) -> float:
        """Median time over the rounds, in seconds."""
        return median(self.seconds)

    @property
    def bandwidth(self) -> float:
        """Algorithm bandwidth in bytes per second: the size of the vector divided by the time."""
        return self.point.nbytes / self.time

    def compute_bus_bandwidth(self, ranks: int) -> float:
        """Return the bus bandwidth in bytes per second for the given number of ranks."""
        return compute_bus_factor(self.point.op, ranks) * self.bandwidth

    def to_dict(self, ranks: int) -> dict[str, Any]:
        """Return the measurements as a dictionary for result.json."""
        return {
            "op": self.point.op,
            "dtype": self.point.dtype,
            "bytes": self.point.nbytes,
            "side": self.side,
            "seconds": self.time,
            "least": min(self.seconds),
            "most": max(self.seconds),
            "bytes_per_second": self.bandwidth,
            "bus_bytes_per_second": self.compute_bus_bandwidth(ranks),
            "bytes_sent": list(self.sent),
            "interface_bytes": list(self.interface),
        }


@dataclass(frozen=True)
class CollectiveReport:
    """Report of one run of the collectives benchmark.

    `table` is a float64 tensor [rounds, points, sides, ranks, 3]. The last dimension of `table` contains the time in
    seconds, the number of bytes sent, and the number of bytes sent through the network interface. A time of 0 indicates
    a missing measurement.
    """

    points: Sequence[CollectivePoint]
    sides: Mapping[str, CollectiveVariant]
    table: Tensor
    links: Mapping[str, MessageTimeLine] = field(default_factory=dict)
    """Fitted line of each link between two ranks, by link name such as `0 - 1`."""

    @property
    def ranks(self) -> int:
        return self.table.shape[3]

    @property
    def cells(self) -> list[CollectiveCell]:
        """All cells that have measurements, ordered by size within each operation and data type."""
        cells = []
        for i, point in enumerate(self.points):
            for j, side in enumerate(self.sides):
                rounds = self.table[:, i, j]
                rounds = rounds[(rounds[..., 0] > 0).all(1)]
                if not len(rounds):
                    continue
                seconds = rounds[..., 0].amax(1).tolist()
                sent, interface = rounds[..., 1:].quantile(0.5, dim=0).T.tolist()
                cells.append(CollectiveCell(point, side, tuple(seconds), tuple(sent), tuple(interface)))
        return cells

    def group_cells(self) -> dict[str, list[CollectiveCell]]:
        """Return the measured cells, grouped by operation and data type."""
        groups: dict[str, list[CollectiveCell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.point.name, []).append(cell)
        return groups

    def fit_lines(self) -> dict[tuple[str, str], MessageTimeLine]:
        """Fit `t = alpha + beta n` to the median times t of each variant for vectors of n bytes.

        Each combination of operation, data type, and variant gets a line if it was measured at two or more sizes.
        """
        times: dict[tuple[str, str], dict[int, float]] = {}
        for cell in self.cells:
            times.setdefault((cell.point.name, cell.side), {})[cell.point.nbytes] = cell.time
        return {key: fit_message_time_line(list(by_size.items())) for key, by_size in times.items() if len(by_size) > 1}

    def predict_seconds(self, cell: CollectiveCell, lines: Mapping[tuple[str, str], MessageTimeLine]) -> float | None:
        """Predict the time of an all-reduce, in seconds, from the algorithm and the link speeds of a variant.

        Return None if the algorithm is unknown or the links have not been measured.
        """
        side = self.sides[cell.side]
        line = lines.get((f"sendrecv {cell.point.dtype}", side.link_variant))
        algorithm = side.choose_algorithm(cell.point)
        if line is None or algorithm is None:
            return None
        return predict_seconds(algorithm, MessageTimeLines(line), side.compute_vector_bytes(cell.point))

    def list_curves(self) -> dict[str, tuple[dict[str, Curve], dict[str, tuple[str, Curve]]]]:
        """Return the measured and the fitted curves of all variants, grouped by operation and data type.

        A curve is a list of points (bytes, microseconds, 0). A fitted curve has a label of its own.
        """
        lines = self.fit_lines()
        curves = {}
        for name, cells in self.group_cells().items():
            measured: dict[str, Curve] = {}
            for cell in cells:
                measured.setdefault(cell.side, []).append((cell.point.nbytes, 1e6 * cell.time, 0.0))
            fitted: dict[str, tuple[str, Curve]] = {}
            for side, curve in measured.items():
                if line := lines.get((name, side)):
                    fitted_curve = sample_fitted_line(line, curve[0][0], curve[-1][0])
                    fitted[side] = (format_fitted_line(line), fitted_curve)
            curves[name] = (measured, fitted)
        return curves

    def rows(self) -> dict[str, str]:
        """Return the title and the text of each row of the final table."""
        lines = self.fit_lines()
        width = max(map(len, self.sides))
        rows = {}
        for name, cells in self.group_cells().items():
            row = [f"{'bytes':>13}  {'side':<{width}}{HEAD}"]
            row += [format_cell(cell, width, self.ranks, lines.get((name, cell.side))) for cell in cells]
            for cell in select_largest_sizes(cells):
                notes = []
                if line := lines.get((name, cell.side)):
                    notes.append(format_fitted_line(line))
                if predicted := self.predict_seconds(cell, lines):
                    notes.append(f"{predicted * 1e6:,.1f} us predicted from link speeds for the largest size")
                if notes:
                    row.append(f"{cell.side}: {'; '.join(notes)}")
            rows[name] = "\n".join(row)
        if self.links:
            links = [f"ranks {link}: {format_fitted_line(line)}" for link, line in self.links.items()]
            rows["links"] = "\n".join(links)
        rows["bytes sent"] = self._format_bytes()
        return rows

    def _format_bytes(self) -> str:
        """Compare the number of bytes sent with the computed number, at the largest size of each operation."""
        rows = []
        for name, cells in self.group_cells().items():
            for cell in select_largest_sizes(cells):
                computed = compute_sent_bytes(cell.point, self.sides[cell.side], self.ranks)
                counts = []
                if any(cell.sent):
                    counts.append(f"sent {join_megabytes(cell.sent)}")
                if sum(cell.interface) > 0.5 * sum(computed):  # otherwise, messages went through shared memory
                    counts.append(f"through the network interface {join_megabytes(cell.interface)}")
                if counts:
                    counts.append(f"computed {join_megabytes(computed)}")
                    rows.append(f"{name}, {cell.point.nbytes:,} bytes, {cell.side}: {'; '.join(counts)}")
        return "\n".join(rows) or "unknown"

    def result(self) -> ReportData:
        """Return the measurements for result.json.

        The outcome is the number of results that were verified to be exact.
        """
        cells = self.cells
        lines = self.fit_lines()
        measured: dict[str, Any] = {
            "points": [cell.to_dict(self.ranks) for cell in cells],
            "lines": {f"{name} {side}": line._asdict() for (name, side), line in lines.items()},
            "links": {link: line._asdict() for link, line in self.links.items()},
        }
        all_reduces = [cell for cell in cells if cell.point.op == "all_reduce"]
        for cell in select_largest_sizes(all_reduces):
            measured[f"all_reduce_{cell.side}_bus_gb_per_s"] = cell.compute_bus_bandwidth(self.ranks) / 1e9
        exact_results = sum(len(cell.seconds) for cell in cells)
        return ReportData(outcome={"exact_results": exact_results}, measured=measured)


def select_largest_sizes(cells: Sequence[CollectiveCell]) -> list[CollectiveCell]:
    """Return, for each variant, the cell with the largest size; `cells` must be ordered by size."""
    return list({cell.side: cell for cell in cells}.values())


def sample_fitted_line(line: MessageTimeLine, smallest: float, largest: float) -> Curve:
    """Return logarithmically spaced points (bytes, microseconds, 0) of a fitted line."""
    curve = []
    for i in range(CURVE_SEGMENTS + 1):
        nbytes = smallest * (largest / smallest) ** (i / CURVE_SEGMENTS)
        curve.append((nbytes, 1e6 * line.predict_seconds(nbytes), 0.0))
    return curve


def join_megabytes(counts: Sequence[float]) -> str:
    """Format the byte counts of all ranks in MB (1e6 bytes), as a single number if all counts are equal."""
    numbers = [f"{count / 1e6:,.2f}" for count in counts]
    return f"{', '.join(numbers)} MB" if len(set(numbers)) > 1 else f"{numbers[0]} MB per rank"


def format_cell(cell: CollectiveCell, width: int, ranks: int, line: MessageTimeLine | None) -> str:
    """Format the measurements of a cell as one line of the table."""
    spread = f"[{1e6 * min(cell.seconds):,.1f}..{1e6 * max(cell.seconds):,.1f}]"
    fitted = f"{1e6 * line.predict_seconds(cell.point.nbytes):,.1f}" if line else ""
    return (
        f"{cell.point.nbytes:>13,}  {cell.side:<{width}}{1e6 * cell.time:>10,.1f}  {spread:<21}"
        f"{cell.bandwidth / 1e9:>7.3f}{cell.compute_bus_bandwidth(ranks) / 1e9:>10.3f}{fitted:>11}"
    )


def format_fitted_line(line: MessageTimeLine) -> str:
    """Format a fitted line, such as `100.0 us + bytes / 1 GB/s`."""
    latency = f"{line.alpha * 1e6:.1f} us"
    return f"{latency} + bytes / {1e-9 / line.beta:.3g} GB/s" if line.beta else f"{latency} for any size"
