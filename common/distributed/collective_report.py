"""Report of collectives: nccl-tests' table of time and bandwidth, the fitted lines, and the bytes that ranks send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from common.distributed.collectives import Point, Side, compute_bus_factor, compute_sent_bytes
from common.distributed.transport.cost import Line, Lines, fit_line, predict_seconds
from common.runs.result import Facts

HEAD = f"{'us':>10}  {'[lowest..highest]':<21}{'GB/s':>7}{'bus GB/s':>10}{'line, us':>11}"
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
    """Bytes that each rank sent, headers left out, the median over the rounds; 0 where that is not known."""
    passed: tuple[float, ...]
    """Bytes that left each rank's network interface, likewise."""

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

    `table` float64 [rounds, points, sides, ranks, 3] has seconds, bytes sent, and bytes that left the interface.
    Seconds are 0 where nothing was measured.
    """

    points: Sequence[Point]
    sides: Mapping[str, Side]
    table: Tensor
    links: Mapping[str, Line] = field(default_factory=dict)
    """The line of the link between two ranks, by name, measured while no other one was used."""

    @property
    def ranks(self) -> int:
        return self.table.shape[3]

    @property
    def cells(self) -> list[Cell]:
        """The measured points, by size within each operation and type."""
        found = []
        for i, point in enumerate(self.points):
            for j, side in enumerate(self.sides):
                rounds = self.table[:, i, j]
                done = rounds[(rounds[..., 0] > 0).all(1)]
                if len(done):
                    seconds, sent, passed = done[..., 0].amax(1), *done[..., 1:].quantile(0.5, dim=0).T
                    found.append(Cell(point, side, *(tuple(one.tolist()) for one in (seconds, sent, passed))))
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

    def predict_seconds(self, cell: Cell, lines: Mapping[tuple[str, str], Line]) -> float | None:
        """Return the seconds of an all-reduce, predicted from its algorithm and the line of the links under it."""
        side = self.sides[cell.side]
        line, algorithm = lines.get((f"sendrecv {cell.point.dtype}", side.link)), side.choose_algorithm(cell.point)
        if line is None or algorithm is None:
            return None
        return predict_seconds(algorithm, Lines(line), side.compute_vector_bytes(cell.point))

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
        width = max(map(len, self.sides))
        for name, cells in self.group_cells().items():
            told = [f"{'bytes':>13}  {'side':<{width}}{HEAD}"]
            told += [format_cell(cell, width, self.ranks, lines.get((name, cell.side))) for cell in cells]
            for cell in {cell.side: cell for cell in cells}.values():  # the largest of each side
                fitted, predicted = lines.get((name, cell.side)), self.predict_seconds(cell, lines)
                words = [format_line(fitted)] if fitted else []
                words += [f"{predicted * 1e6:,.1f} us for the last size by the line of its links"] if predicted else []
                told += [f"{cell.side}: {'; '.join(words)}"] if words else []
            rows[name] = "\n".join(told)
        links = [f"ranks {link}: {format_line(line)}" for link, line in self.links.items()]
        return rows | ({"links": "\n".join(links)} if links else {}) | {"bytes sent": self._format_bytes()}

    def _format_bytes(self) -> str:
        """Say what ranks sent of the largest size of each operation, and what they must send."""
        told = []
        for name, cells in self.group_cells().items():
            for cell in {cell.side: cell for cell in cells}.values():
                must = compute_sent_bytes(cell.point, self.sides[cell.side], self.ranks)
                words = [f"sent {join_megabytes(cell.sent)}"] if any(cell.sent) else []
                if sum(cell.passed) > 0.5 * sum(must):  # else they went through memory
                    words += [f"through the interface {join_megabytes(cell.passed)}"]
                if words:
                    words = [f"MB {words[0]}", *words[1:], f"computed {join_megabytes(must)}"]
                    told.append(f"{name}, {cell.point.nbytes:,} bytes, {cell.side}: {'; '.join(words)}")
        return "\n".join(told) or "not known"

    def result(self) -> Facts:
        """Return what was measured for result.json, and as outcome how many results were compared with exact ones."""
        cells, lines = self.cells, self.fit_lines()
        largest = {cell.side: cell for cell in cells if cell.point.op == "all_reduce"}
        measured: dict[str, Any] = {
            "points": [convert_cell_to_json(cell, self.ranks) for cell in cells],
            "lines": {f"{name} {side}": line._asdict() for (name, side), line in lines.items()},
            "links": {link: line._asdict() for link, line in self.links.items()},
        }
        for side, cell in largest.items():
            bus = compute_bus_factor(cell.point.op, self.ranks) * cell.bandwidth
            measured[f"all_reduce_{side}_bus_gb_per_s"] = bus / 1e9
        return Facts(outcome={"exact_results": sum(len(cell.seconds) for cell in cells)}, measured=measured)


def join_megabytes(counts: Sequence[float]) -> str:
    """Return bytes of each rank in MB (1e6 bytes): one number where all are equal."""
    words = [f"{count / 1e6:,.2f}" for count in counts]
    return ", ".join(words) if len(set(words)) > 1 else f"{words[0]} by each rank"


def format_cell(cell: Cell, width: int, ranks: int, line: Line | None) -> str:
    """Return a line of the table."""
    times = [1e6 * one for one in (cell.time, min(cell.seconds), max(cell.seconds))]
    spread, bus = f"[{times[1]:,.1f}..{times[2]:,.1f}]", compute_bus_factor(cell.point.op, ranks) * cell.bandwidth
    fitted = f"{1e6 * line.predict_seconds(cell.point.nbytes):,.1f}" if line else ""
    return (
        f"{cell.point.nbytes:>13,}  {cell.side:<{width}}{times[0]:>10,.1f}  {spread:<21}"
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
    rates = {"bytes_per_second": cell.bandwidth, "bus_bytes_per_second": bus}
    times = {"seconds": cell.time, "least": min(cell.seconds), "most": max(cell.seconds)}
    return found | times | rates | {"bytes_sent": list(cell.sent), "interface_bytes": list(cell.passed)}
