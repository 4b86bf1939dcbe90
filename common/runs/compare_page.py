"""One page for a browser with the curves of several runs. It holds everything and asks no network. Imports no torch.

A click on a run in the legend hides it in all plots; the buttons choose what the curves are drawn against.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative, sample_colorscale
from plotly.subplots import make_subplots

from common.runs.metric_curves import Curve, RunCurves

DASH = {"finished": "solid", "running": "dot", "pending": "dot"}  # everything else is broken off: dash
HEIGHT, GAP = 330, 85  # pixels of one row of plots, and between two
ROOM = 16  # bars whose names find room under them

MISSING = "-"  # where a run has no such number
MARK = '<meta name="generator" content="make compare">'  # only a file with it is overwritten


@dataclass(frozen=True)
class ComparedRun:
    """One run as the page shows it."""

    key: str
    """What tells it from all others: its id."""
    label: str
    state: str
    curves: RunCurves
    columns: dict[str, str]
    """Head and text of its line in the first table."""
    settings: dict[str, str]
    """Those in which the runs differ."""
    waiting: float | None = None
    """Share of the time that processes wait for each other."""
    memory: float | None = None
    """Peak of the process that takes most, in MB."""
    links: dict[str, str] = field(default_factory=dict)
    """Words and relative addresses."""

    @property
    def name(self) -> str:
        return self.label if self.state == "finished" else f"{self.label} ({self.state})"


def choose_colours(count: int) -> list[str]:
    """Return `count` colours, distinct as far as there are so many."""
    if count <= len(qualitative.D3):
        return list(qualitative.D3[:count])
    return list(sample_colorscale("Turbo", [0.04 + 0.92 * i / (count - 1) for i in range(count)]))


def draw_curve(run: ComparedRun, curve: Curve, colour: str, shown: str, spread: bool) -> go.Scatter:
    """Draw a curve against steps; samples and seconds travel along for the buttons."""
    beside = np.column_stack([curve.at, curve.low, curve.high])
    hover = f"step %{{customdata[0]:,}}, %{{customdata[1]:,}} samples, %{{customdata[2]:.1f}} s<br>%{{y:{shown}}}"
    hover += f"<br>%{{customdata[3]:{shown}}} to %{{customdata[4]:{shown}}}" if spread else ""
    return go.Scatter(
        x=curve.at[:, 0],
        y=curve.value,
        customdata=beside,
        name=html.escape(run.name),
        legendgroup=html.escape(run.key),
        showlegend=False,
        mode="lines" if len(curve) > 30 else "lines+markers",
        line={"color": colour, "width": 1.6, "dash": DASH.get(run.state, "dash")},
        marker={"size": 5},
        hovertemplate=f"<b>%{{fullData.name}}</b><br>{hover}<extra></extra>",
    )


def draw_bar(run: ComparedRun, value: float, colour: str, shown: str) -> go.Bar:
    """Draw one number of a run as a bar."""
    key = html.escape(run.key)
    return go.Bar(
        x=[key],
        y=[value],
        name=html.escape(run.name),
        legendgroup=key,
        showlegend=False,
        marker={"color": colour},
        hovertemplate=f"<b>%{{fullData.name}}</b><br>%{{y:{shown}}}<extra></extra>",
    )


@dataclass
class Panel:
    """One plot: a trace for each run that has something to show in it."""

    title: str
    traces: list[go.Scatter | go.Bar]
    format: str = ""
    """Of the numbers at its vertical axis."""
    curves: bool = True


def build_panels(runs: Sequence[ComparedRun]) -> list[Panel]:
    """Return the plots that have something to show."""
    drawn = list(zip(runs, choose_colours(len(runs)), strict=True))

    def curves(of: Any, shown: str, spread: bool = False) -> list[go.Scatter | go.Bar]:
        return [draw_curve(r, of(r), c, shown, spread) for r, c in drawn if of(r) is not None and len(of(r))]

    def bars(of: Any, shown: str) -> list[go.Scatter | go.Bar]:
        return [draw_bar(r, of(r), c, shown) for r, c in drawn if of(r) is not None]

    found = [
        Panel("training loss", curves(lambda r: r.curves.loss, ".4g", True)),
        Panel("test accuracy", curves(lambda r: r.curves.tests.get("test_accuracy"), ".2%"), ".1%"),
        Panel("test loss", curves(lambda r: r.curves.tests.get("test_loss"), ".4g")),
        Panel("samples a second", curves(lambda r: r.curves.speed, ",.0f", True)),
        Panel("share of the time waited for other processes", bars(lambda r: r.waiting, ".1%"), ".0%", False),
        Panel("peak memory where most was taken, MB", bars(lambda r: r.memory, ",.0f"), "", False),
    ]
    return [panel for panel in found if panel.traces]


def build_figure(runs: Sequence[ComparedRun]) -> go.Figure | None:
    """Draw all plots in one figure, so that they share a legend; None where no run has anything to draw."""
    found = build_panels(runs)
    if not found:
        return None
    rows = (len(found) + 1) // 2
    spaces = {"vertical_spacing": GAP / HEIGHT / rows, "horizontal_spacing": 0.08}
    plot = make_subplots(rows, 2, subplot_titles=[panel.title for panel in found], **spaces)
    named: set[str] = set()
    for at, panel in enumerate(found):
        where = {"row": at // 2 + 1, "col": at % 2 + 1}
        for trace in panel.traces:
            trace.showlegend = trace.legendgroup not in named
            named.add(trace.legendgroup)
            plot.add_trace(trace, **where)
        plot.update_yaxes(tickformat=panel.format or None, **where)
        if panel.curves:
            plot.update_xaxes(title_text="step", title_standoff=4, **where)
        else:
            names = {"tickvals": [trace.x[0] for trace in panel.traces]}  # the end of the id is told under a bar
            names["ticktext"] = [trace.name.partition(" ")[0] for trace in panel.traces]
            plot.update_xaxes(type="category", **names, showticklabels=len(panel.traces) <= ROOM, **where)
    plot.update_layout(
        template="plotly_white",
        height=HEIGHT * rows + 60,
        margin={"l": 60, "r": 20, "t": 40, "b": 40},
        legend={"title": "click hides, double click shows alone", "groupclick": "togglegroup", "tracegroupgap": 0},
        hovermode="closest",
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    return plot


def format_cell(text: str) -> str:
    """Return a table cell as HTML."""
    return f"<td>{html.escape(text)}</td>"


def format_header(words: Sequence[str]) -> str:
    """Return a table's header row as HTML."""
    return "<tr>" + "".join(f"<th>{html.escape(word)}</th>" for word in words) + "</tr>"


def format_runs_table(runs: Sequence[ComparedRun]) -> str:
    """Return the table of final numbers and links as HTML, one row per run."""
    names = list(dict.fromkeys(name for run in runs for name, text in run.columns.items() if text != MISSING))
    lines = [format_header(["run", "state", *names, "files"])]
    for run, colour in zip(runs, choose_colours(len(runs)), strict=True):
        links = " ".join(f'<a href="{html.escape(to)}">{html.escape(word)}</a>' for word, to in run.links.items())
        mark = f'<span class="mark" style="background:{colour}"></span>'
        state = f'<span class="state {html.escape(run.state)}">{html.escape(run.state)}</span>'
        cells = "".join(format_cell(run.columns.get(name, MISSING)) for name in names)
        lines.append(f"<tr><td>{mark}{html.escape(run.label)}</td><td>{state}</td>{cells}<td>{links}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


def format_settings_table(runs: Sequence[ComparedRun], differing: Sequence[str]) -> str:
    """Return the table of settings in which runs differ as HTML, one row per run."""
    if not differing:
        return "<p>The runs have the same settings.</p>"
    lines = [format_header(["run", *differing])]
    for run, colour in zip(runs, choose_colours(len(runs)), strict=True):
        mark = f'<span class="mark" style="background:{colour}"></span>'
        cells = "".join(format_cell(run.settings.get(key, MISSING)) for key in differing)
        lines.append(f"<tr><td>{mark}{html.escape(run.label)}</td>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def render_page(runs: Sequence[ComparedRun], differing: Sequence[str]) -> str:
    """Return the whole page as HTML."""
    plot = build_figure(runs)
    drawn = "<p>No run has begun to train yet.</p>"
    if plot is not None:
        unused = ["sendChartToCloud", "select2d", "lasso2d"]  # nothing leaves this page
        settings = {"responsive": True, "displaylogo": False, "plotlyServerURL": "", "modeBarButtonsToRemove": unused}
        drawn = BUTTONS + plot.to_html(
            config=settings, include_plotlyjs=True, full_html=False, div_id="plots", post_script=CHOOSE
        )
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{MARK}<title>{len(runs)} runs compared</title>
<style>{STYLE}</style></head><body>
<h1>{len(runs)} runs compared</h1>
<p class="note">Made {made}. A point of a curve is the mean of some consecutive steps, with the lowest and highest of
them beside the pointer. Dotted: still running. Dashed: ended early.</p>
{drawn}
<h2>Results</h2><div class="wide">{format_runs_table(runs)}</div>
<h2>What differs in the settings</h2><div class="wide">{format_settings_table(runs, differing)}</div>
<script>{SORT}</script></body></html>
"""


STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222 }
h1 { font-size: 22px; margin: 0 } h2 { font-size: 17px; margin: 28px 0 8px }
.note { color: #666; margin: 4px 0 16px }
.wide { overflow-x: auto }
table { border-collapse: collapse } th, td { padding: 4px 12px 4px 0; text-align: left; white-space: nowrap }
th { border-bottom: 1px solid #bbb; cursor: pointer; font-weight: 600 } td { border-bottom: 1px solid #eee }
td { font-variant-numeric: tabular-nums }
.mark { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 8px }
.state { padding: 1px 7px; border-radius: 8px; background: #f8d7d7 }
.state.finished { background: #dff0df } .state.running, .state.pending { background: #dbe7fb }
button { font: inherit; border: 1px solid #bbb; background: #fff; padding: 3px 12px; cursor: pointer }
button.on { background: #2b5fa8; border-color: #2b5fa8; color: #fff }
.buttons span { color: #666; margin: 0 6px 0 18px } .buttons span:first-child { margin-left: 0 }
"""
BUTTONS = """<div class="buttons"><span>curves against</span><button data-x="0" class="on">step</button><button
data-x="1">samples</button><button data-x="2">seconds</button><span>loss</span><button
data-y="linear" class="on">linear</button><button data-y="log">logarithmic</button></div>"""
CHOOSE = """
const plot = document.getElementById('{plot_id}'), names = ['step', 'samples', 'seconds'];
const lines = plot.data.flatMap((trace, i) => trace.type === 'scatter' ? [i] : []);
const axis = (letter, i) => plot.data[i][letter + 'axis'].replace(letter, letter + 'axis');
const titles = Object.fromEntries(plot.layout.annotations.map((a, i) => [a.text, i ? 'yaxis' + (i + 1) : 'yaxis']));
document.querySelectorAll('.buttons button').forEach(button => button.onclick = () => {
  const {x, y} = button.dataset, kind = x === undefined ? 'y' : 'x';
  document.querySelectorAll(`button[data-${kind}]`).forEach(other => other.classList.toggle('on', other === button));
  if (kind === 'x') {
    const layout = lines.flatMap(i => [[axis('x', i) + '.title.text', names[x]], [axis('x', i) + '.autorange', true]]);
    const along = lines.map(i => plot._fullData[i].customdata.map(row => row[x]));
    Plotly.update(plot, {x: along}, Object.fromEntries(layout), lines);
  } else {
    Plotly.relayout(plot, Object.fromEntries(['training loss', 'test loss'].filter(name => titles[name])
      .flatMap(name => [[titles[name] + '.type', y], [titles[name] + '.autorange', true]])));
  }
});
"""
SORT = """
document.querySelectorAll('th').forEach(head => head.onclick = () => {
  const table = head.closest('table'), column = head.cellIndex, up = head.dataset.up !== '1';
  const key = row => { const text = row.cells[column].innerText, n = parseFloat(text.replace(/,/g, ''));
    return isNaN(n) ? [1, text] : [0, n]; };
  const order = (a, b) => a[0] - b[0] || (a[1] < b[1] ? -1 : a[1] > b[1] ? 1 : 0);
  const rows = [...table.rows].slice(1).sort((a, b) => (up ? 1 : -1) * order(key(a), key(b)));
  head.dataset.up = up ? '1' : '0';
  rows.forEach(row => row.parentNode.appendChild(row));
});
"""
