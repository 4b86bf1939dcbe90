"""Report of collectives: nccl-tests' table of time and bandwidth, the fitted lines, and the bytes that ranks send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from common.distributed.collectives import Point, compute_bus_factor, compute_least_bytes
from common.distributed.transport.algorithms import build_algorithm
from common.distributed.transport.cost import Line, Lines, fit_line, predict_seconds
from common.runs.result import Facts

HEAD = f"{'bytes':>13}  {'side':<16}{'us':>10}  {'[lowest..highest]':<21}{'GB/s':>7}{'bus GB/s':>10}{'line, us':>11}"
STOPS = 60  # of a drawn line, which is curved where both axes are logarithmic
Curve = list[tuple[float, float, float]]


@dataclass(frozen=True)
class Cell:
    """A point as one side was measured."""

    point: Point
    side: str
    seconds: tuple[float, ...]
    """Of each round: those of the slowest rank."""
    sent: tuple[float, ...]
    """Bytes that left each rank's interface, its median over the rounds; 0 where that is not known."""

    @property
    def time(self) -> float:
        """The median over the rounds in seconds."""
        return median(self.seconds)

    @property
    def bandwidth(self) -> float:
        """The algorithm bandwidth in bytes a second: the vector's bytes by the time."""
        return self.point.nbytes / self.time


@dataclass(frozen=True)
class CollectiveReport:
    """The report of a measurement.

    `table` float64 [rounds, points, sides, ranks, 2] has seconds and bytes sent, and seconds 0 where nothing was
    measured.
    """

    points: Sequence[Point]
    sides: Sequence[str]
    table: Tensor
    link: str = ""
    """The side whose messages from rank to rank are the links: what a ring costs is predicted from their line."""

    @property
    def ranks(self) -> int:
        return self.table.shape[3]

    @property
    def cells(self) -> list[Cell]:
        """What was measured, by size within each operation and type."""
        found = []
        for i, point in enumerate(self.points):
            for j, side in enumerate(self.sides):
                rounds = self.table[:, i, j]
                done = rounds[(rounds[..., 0] > 0).all(1)]
                if len(done):
                    seconds, sent = done[..., 0].amax(1), done[..., 1].quantile(0.5, dim=0)
                    found.append(Cell(point, side, tuple(seconds.tolist()), tuple(sent.tolist())))
        return found

    def group_cells(self) -> dict[str, list[Cell]]:
        """The cells of each operation and type."""
        groups: dict[str, list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.point.name, []).append(cell)
        return groups

    def fit_lines(self) -> dict[tuple[str, str], Line]:
        """Fit t = alpha + beta n to the medians, by operation with type and by side, where there are two sizes."""
        times: dict[tuple[str, str], dict[int, float]] = {}
        for cell in self.cells:
            times.setdefault((cell.point.name, cell.side), {})[cell.point.nbytes] = cell.time
        return {key: fit_line(list(found.items())) for key, found in times.items() if len(found) > 1}

    def predict_ring(self, point: Point, lines: dict[tuple[str, str], Line]) -> float | None:
        """Return the seconds of an all-reduce in a ring, predicted from the line of the links; None without one."""
        line = lines.get((f"sendrecv {point.dtype}", self.link))
        if line is None or point.op != "all_reduce":
            return None
        return predict_seconds(build_algorithm("ring", self.ranks), Lines(line), point.nbytes)

    def list_curves(self) -> dict[str, tuple[dict[str, Curve], dict[str, Curve]]]:
        """Return, for each operation and type, the medians of each side and its fitted line: (bytes, us, 0)."""
        lines, found = self.fit_lines(), {}
        for name, cells in self.group_cells().items():
            measured: dict[str, Curve] = {}
            for cell in cells:
                measured.setdefault(cell.side, []).append((cell.point.nbytes, 1e6 * cell.time, 0.0))
            fitted: dict[str, Curve] = {}
            for side, curve in measured.items():
                if line := lines.get((name, side)):
                    least, most = curve[0][0], curve[-1][0]
                    across = [least * (most / least) ** (i / STOPS) for i in range(STOPS + 1)]
                    fitted[f"{side}: {format_line(line)}"] = [(n, 1e6 * line.predict_seconds(n), 0.0) for n in across]
            found[name] = measured, fitted
        return found

    def rows(self) -> dict[str, str]:
        """Return the rows of the final table."""
        lines, rows = self.fit_lines(), {}
        for name, cells in self.group_cells().items():
            told = [HEAD] + [format_cell(cell, self.ranks, lines.get((name, cell.side))) for cell in cells]
            for side in dict.fromkeys(cell.side for cell in cells):
                told += [f"{side}: {format_line(lines[name, side])}"] if (name, side) in lines else []
            last = max(cells, key=lambda cell: cell.point.nbytes)
            ring = self.predict_ring(last.point, lines)
            told += [f"a ring of links as {self.link} has them: {ring * 1e6:,.1f} us for the last size"] if ring else []
            rows[name] = "\n".join(told)
        return rows | {"bytes sent": self._format_bytes()}

    def _format_bytes(self) -> str:
        told = []
        for cells in self.group_cells().values():
            most = max(cell.point.nbytes for cell in cells)
            for cell in (cell for cell in cells if cell.point.nbytes == most and max(cell.sent) > 0):
                sent = ", ".join(f"{count / 1e6:,.2f}" for count in cell.sent)
                told.append(
                    f"{cell.point.name}, {most:,} bytes, {cell.side}: MB by rank {sent}; the least is "
                    f"{compute_least_bytes(cell.point, self.ranks) / 1e6:,.2f}"
                )
        return "\n".join(told) or "not known"

    def result(self) -> Facts:
        """Return what was measured for result.json, and as outcome how many results were compared with exact ones."""
        cells, lines = self.cells, self.fit_lines()
        largest = {cell.side: cell for cell in cells if cell.point.op == "all_reduce"}
        measured: dict[str, Any] = {
            "points": [convert_cell_to_json(cell, self.ranks) for cell in cells],
            "lines": {f"{name} {side}": line._asdict() for (name, side), line in lines.items()},
        }
        for side, cell in largest.items():
            bus = compute_bus_factor(cell.point.op, self.ranks) * cell.bandwidth
            measured[f"all_reduce_{side}_bus_gb_per_s"] = bus / 1e9
        return Facts(outcome={"exact_results": sum(len(cell.seconds) for cell in cells)}, measured=measured)


def format_cell(cell: Cell, ranks: int, line: Line | None) -> str:
    """Return a line of the table."""
    times = [1e6 * one for one in (cell.time, min(cell.seconds), max(cell.seconds))]
    spread, bus = f"[{times[1]:,.1f}..{times[2]:,.1f}]", compute_bus_factor(cell.point.op, ranks) * cell.bandwidth
    fitted = f"{1e6 * line.predict_seconds(cell.point.nbytes):,.1f}" if line else ""
    return (
        f"{cell.point.nbytes:>13,}  {cell.side:<16}{times[0]:>10,.1f}  {spread:<21}"
        f"{cell.bandwidth / 1e9:>7.3f}{bus / 1e9:>10.3f}{fitted:>11}"
    )


def format_line(line: Line) -> str:
    """Return a fitted line in words."""
    rate = f"bytes / {1e-9 / line.beta:.3g} GB/s" if line.beta else "nothing a byte"
    return f"{line.alpha * 1e6:.1f} us + {rate}"


def convert_cell_to_json(cell: Cell, ranks: int) -> dict[str, Any]:
    """Convert a cell to what result.json holds of it."""
    found = {"op": cell.point.op, "dtype": cell.point.dtype, "bytes": cell.point.nbytes, "side": cell.side}
    bus = compute_bus_factor(cell.point.op, ranks) * cell.bandwidth
    rates = {"bytes_per_second": cell.bandwidth, "bus_bytes_per_second": bus, "bytes_sent": list(cell.sent)}
    return found | {"seconds": cell.time, "least": min(cell.seconds), "most": max(cell.seconds)} | rates
