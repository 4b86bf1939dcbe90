"""Runs with a damaged file, and the commands that read them: one line at most, and nothing is overwritten."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.runs.folder import RunFolder
from tests.harness import inside
from tests.harness.made_runs import Made

FILES = (
    "config.yaml",
    "meta.json",
    "result.json",
    "model.json",
    "model.safetensors",
    "attempts/0001/metrics.jsonl",
    "attempts/0001/heartbeat-0.json",
    "attempts/0001/world.json",
    "attempts/0001/attempt.json",
    "attempts/0001/checkpoints/step-00000040/manifest.json",
    "attempts/0001/checkpoints/step-00000040/rank-0.pt",
    "attempts/0001/changed.json",
)


def null_values(content: bytes) -> bytes:
    """A JSON object with null under each of its names; of a file of lines, its first one."""
    try:
        text = content.splitlines()[0] if content[:1] == b"{" and b"}\n{" in content else content
        return json.dumps(dict.fromkeys(json.loads(text))).encode() + b"\n"
    except (ValueError, TypeError):
        return b"null: null\n"


def other_types(content: bytes) -> bytes:
    """A JSON object, or the first line of a file of lines, with a value of another type under each of its names."""
    try:
        text = content.splitlines()[0] if content[:1] == b"{" and b"}\n{" in content else content
        others = {dict: "text", list: 7, str: {"a": 1}, int: "seven", float: [1.5], bool: "no", type(None): [None]}
        return json.dumps({name: others[type(value)] for name, value in json.loads(text).items()}).encode() + b"\n"
    except (ValueError, AttributeError):
        return b"seed: [1]\ndata: 5\n"


def drop_keys(content: bytes) -> bytes:
    """A JSON object, or the first line of a file of lines, without every second name, also in the objects in it."""

    def drop(value: Any) -> Any:
        if isinstance(value, list):
            return [drop(item) for item in value]
        return {name: drop(value[name]) for name in list(value)[::2]} if isinstance(value, dict) else value

    try:
        text = content.splitlines()[0] if content[:1] == b"{" and b"}\n{" in content else content
        return json.dumps(drop(json.loads(text))).encode() + b"\n"
    except ValueError:
        return b"seed: 0\n"


Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "garbage": lambda content: bytes(range(256)) * 3,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "a list": lambda content: b'[1, "two", null]\n',
    "nulls": null_values,
    "other types": other_types,
    "missing names": drop_keys,
}


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_commands(source: RunFolder, name: str, damage: str, tmp_path: Path) -> None:
    """Damage the file `name` in a copy of a finished run, and call every command that reads runs."""
    runs = tmp_path / "runs"
    run = runs / source.path.name
    shutil.copytree(source.path, run, ignore=shutil.ignore_patterns("code"))
    (run / "attempts/0001/changed.json").write_text('{"optim.lr": ["0.1", "0.2"]}')
    (run / name).write_bytes(DAMAGES[damage]((run / name).read_bytes()))
    call_all(run)


OF_A_RUN = {
    "status": "status --json=1 -- {}",
    "logs": "logs -- {}",
    "cancel": "cancel -- {}",
    "doctor": "doctor --run={}",
    "rerun": "rerun -- {}",
    "resume": "exp --resume={} --launch=local --dry-run=1",
    "evaluate": "evaluate -- {}",
    "export": "export -- {}",
}
"""The commands that take RUN."""


def call_all(run: Path) -> None:
    """Call every command that reads runs, on this one and on all beside it: one line at most, nothing is written."""
    runs = run.parent
    Made("ddp_multinode", 1, 20).write(runs)  # a sound one beside it
    before, given = digests(runs), f"--runs-folder={runs}"
    calls = {
        "status of all": ["status", given],
        "compare": ["compare", given, "--json=1", f"--page={runs.parent / 'page.html'}"],
        "prune": ["prune-runs", given],
        "sync": ["sync", given, "--dry-run=1"],
    }
    calls |= {what: [word.replace("{}", str(run)) for word in text.split(" ")] for what, text in OF_A_RUN.items()}
    for what, words in calls.items():
        done = inside.run_verb(*words)
        assert done.returncode in (0, 1, 2, 3), (what, done)
        errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        assert len(errors) <= 1 and "Traceback" not in done.stdout + done.stderr, (what, done.stderr)
        if done.returncode == 2:
            assert errors and errors[0].startswith("error: "), (what, done.stderr)
        assert digests(runs) == before, f"{what} has written into a run"
    listed = inside.run_verb("status", given).stdout
    assert "ddp_multinode-2026" in listed and listed.count("FINISHED") >= 1, "the sound run is listed all the same"
