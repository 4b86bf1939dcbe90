"""The wording of recorded tables in the pages.

Records are never edited. This module maps the text of their rows, columns and facts to the text that pages show and
that newer records contain. Any other text is shown as it was recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REWORDED_PATTERNS = (
    (r"\b(ms|us|kB|sent) a step\b", r"\1 per step"),
    (r"\bsent by a (\w+)", r"sent per \1"),
    (r"ynchronised\b", "ynchronized"),
    (r"eparametris", "eparametriz"),
    (r"\bon (\d+)mbit\b", r"at \1 Mbit/s"),
    (r"\b(\d+)mbit\b", r"\1 Mbit/s"),
    (r"\b(\d+)gbit\b", r"\1 Gbit/s"),
    (r"^points below", "percentage points below"),
    (r"/ 2 \(p - 1\) n$", "/ (2 (p - 1) n)"),
    (r"\baccumulating\b", "gradient accumulation"),
    (r" \(above 1 the pipeline pays\)", ""),
    (r"\(ideal (\d)", r"(ideal: \1"),
    (r"^share of the bound, (.+)", r"bound / \1"),
    (r"^idle share of (stage \d), (.+), %", r"% of a step that \1 is idle, \2"),
    (r"\bsplit behind\b", "split after"),
    (r"\bto keep buffers\b", "to copy buffers"),
    (r"\bto begin to average the loss\b", "to start the loss all-reduce"),
    (r"\bto wait for the mean\b", "to wait for its result"),
    (r": us added to a step$", ": us added per step"),
    (r": % of a step$", ": % added per step"),
    (r"^seconds of wall time more, (.+)", r"additional wall time, s: \1"),
)
"""Regular expressions of rows and columns of all parts."""
REWORDED_FACTS = (
    (r"threads 1 in each of (\d+) processes", r"\1 processes with 1 thread each"),
    (r"threads 1 in each of 2 runs at a time", "2 runs at a time with 1 thread each"),
    (r"threads 1 a (\w+)", r"1 thread per \1"),
    (r"threads 2 in all", "2 threads in total"),
    (r"threads as named", "numbers of threads as stated in the table"),
    (r"threads 1", "1 thread"),
    (r"threads (\d+)", r"\1 threads"),
    (r"batch (.+)", r"batch size \1"),
    (r"cable (\d+)mbit", r"links limited to \1 Mbit/s"),
    (r"other programs not known", "load from other programs not recorded"),
    (r"state (.+)", r"training state of \1"),
    (r"learning rates tried (\d+)", r"best of \1 learning rates"),
)
"""Regular expressions of whole facts of all parts, each of which older records keep as a name and a value."""
OWN_THREADS = {
    "threads 1 a process": "1 thread per process unless the table states another number",
    "threads 1 a stage": "1 thread per stage unless the table states another number",
}
"""Facts of parts in which some sides have two threads."""
STRUCK = {
    "a rank stopped for ever": "a rank stopped permanently",
    "steps redone": "steps repeated",
    "equal to the bit": "bit-identical result",
    "equal to 1e-9": "losses equal to within 1e-9",
    "the times of single runs were not kept": "the times of individual runs were not recorded",
}
"""Faults and columns of the tables of the fault suite."""
REWORDED: Mapping[str, Mapping[str, str]] = {
    "amp_accum/precisions": {
        "precision, microbatches, exchanged": "precision, microbatches, all-reduce",
        "MB beyond the model": "memory beyond the model, MB",
        "final loss, less that of the first row": "final loss minus that of the first row",
    },
    "checkpoint/save": {
        "ms: look": "ms: vote on saving and stopping",
        "ms: warm up": "ms: warm-up of DDP's buckets",
        "% of training: a checkpoint every 100 steps": "% of training time: a checkpoint every 100 steps",
        "% of training: the vote on stop requests": "% of training time: the votes on saving and stopping",
        "warm-up of DDP's buckets at a start, in steps": "warm-up of DDP's buckets / step",
    },
    "cluster/elastic": {
        "what happens": "event",
        "queued again: s to the next step": "requeued: s to the next step",
        "join": "a rank joins",
        "cable cut": "a host is disconnected",
    },
    "cluster/elastic_faults": STRUCK,
    "cluster/faults": STRUCK,
    "cluster/kills": {
        "steps done again": "steps repeated",
        "losses equal to 1e-9": "losses equal to within 1e-9",
    },
    "crossover/rates": {
        "strategy, cable": "strategy, link rate",
        "alpha + beta n, ms": "predicted ms: alpha + beta n",
        "DDP, float32 / this": "speedup over DDP, float32",
        "kB a step": "kB sent per step",
    },
    "ddp_multinode/shards": {
        "steps until a disturbance is answered": "steps until the shards are changed after a disturbance",
    },
    "ddp_multinode/step": {
        **OWN_THREADS,
        "samples/s of 2 processes / of two times one process with 1 thread": (
            "samples/s: 2 processes / (2 x 1 process with 1 thread)"
        ),
    },
    "local_sgd/accuracy": {
        "side": "strategy",
        "points below DDP at most": "percentage points below DDP, upper bound",
        "H = 32, Nesterov outside": "H = 32, outer=nesterov",
    },
    "local_sgd/cable": {
        "side": "strategy",
        "DDP, float32 / this": "speedup over DDP, float32",
        "local SGD, H = 8, outer step 4 later": "local SGD, H = 8, delay=4",
        "local SGD, H = 8 / torch's PostLocalSGD, H = 8": "step time: local SGD / torch's PostLocalSGD, H = 8",
    },
    "mnist_pipeline/loader": {
        "us a step: the same with 2 workers": "us per step: PIL transforms in a DataLoader, 2 workers",
        "the same with 2 workers / in-memory loader": "PIL transforms in a DataLoader, 2 workers / in-memory loader",
        "one fixed batch, the limit / in-memory loader": "one fixed batch (lower bound) / in-memory loader",
    },
    "mnist_pipeline/loop": {
        "this script, every loss on disk / bare loop, nothing logged": (
            "this script, all losses logged / bare loop, nothing logged"
        ),
    },
    "mnist_pipeline/schedules": OWN_THREADS,
    "mnist_pipeline/wide": OWN_THREADS,
    "mnist_pipeline/widths": OWN_THREADS | {"ms a step of 1F1B": "ms per step: 1F1B"},
    "optimizers/large_batch": {
        "batch": "batch size",
        "LARS - SGD, points": "LARS - SGD, percentage points",
    },
    "param_server/slow_cable": {
        "async, no slow cable": "async, no slow link",
        "cable 100mbit": "link of one host limited to 100 Mbit/s",
    },
    "resnet_dataparallel/strategies": {"times as fast as one thread": "speedup over one thread"},
    "resnet_modelparallel/modes": {
        "mode, microbatch": "mode, microbatch size",
        "idle share of stage 0, %": "idle time of stage 0, %",
        "of stage 1, %": "idle time of stage 1, %",
        "peak MiB of stage 0": "peak memory of stage 0, MiB",
        "of stage 1": "peak memory of stage 1, MiB",
    },
    "resnet_modelparallel/split": OWN_THREADS | {"share of the bound": "bound / pipelined"},
    "sparse_prune/criteria": {"kB compressed": "compressed file, kB"},
    "sparse_prune/linear": {"pruned": "pruned weights", "ms in CSR": "ms: CSR"},
    "sparse_prune/masks": {
        "global_unstructured / this project, equal masks but for ties": (
            "global_unstructured / this project, masks identical except for ties"
        ),
    },
    "sparse_prune/step": {
        "a bare loop with the library's reparametrisation / without": "bare loop, reparametrized / bare loop",
    },
}
"""Rows, columns, facts and notes of single parts, which take precedence over the patterns."""


def reword(name: str, text: str) -> str:
    """Return the wording of a row, column or note of the part `name`."""
    if text in REWORDED.get(name, {}):
        return REWORDED[name][text]
    for pattern, replacement in REWORDED_PATTERNS:
        text = re.sub(pattern, replacement, text)
    return text


def list_conditions(name: str, part: Mapping[str, Any]) -> list[str]:
    """Return the conditions of a measurement, and the record's note. Newer records keep facts as a list of phrases."""
    facts = part.get("facts", [])
    if isinstance(facts, dict):
        facts = [reword_fact(name, f"{fact} {value}") for fact, value in facts.items()]
    note = [reword(name, part["note"])] if "note" in part else []
    return [*facts, *note]


def reword_fact(name: str, fact: str) -> str:
    """Return the wording of a fact of an older record, such as `threads 1`."""
    if fact in REWORDED.get(name, {}):
        return REWORDED[name][fact]
    for pattern, replacement in REWORDED_FACTS:
        match = re.fullmatch(pattern, fact)
        if match:
            return match.expand(replacement)
    return fact


def reword_table(name: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part whose table has the wording of the pages."""
    table = part["table"]
    columns = [reword(name, column) for column in table["columns"]]
    rows = [row | {"what": reword(name, row["what"])} for row in table["rows"]]
    return {**part, "table": {"columns": columns, "rows": rows}}
