"""Check that commands print at most one line about a damaged file of a run, and overwrite nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.runs.folder import RunFolder
from slurm.reports import status_cache
from tests.harness.commands import in_process_calls
from tests.harness.runs.synthetic_runs import SyntheticRun

RUN_FILES = (
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


VALUES_OF_OTHER_TYPES = {
    dict: "text",
    list: 7,
    str: {"a": 1},
    int: "seven",
    float: [1.5],
    bool: "no",
    type(None): [None],
}
"""For each JSON type, a value of another type."""


def read_first_object(content: bytes) -> Any:
    """Parse a JSON file, or the first line of a file of JSON lines. Raises ValueError."""
    has_json_lines = content[:1] == b"{" and b"}\n{" in content
    return json.loads(content.splitlines()[0] if has_json_lines else content)


def replace_values_by_null(content: bytes) -> bytes:
    """Replace every value of a JSON object by null."""
    try:
        nulls = dict.fromkeys(read_first_object(content))
        return json.dumps(nulls).encode() + b"\n"
    except (ValueError, TypeError):
        return b"null: null\n"


def replace_values_by_other_types(content: bytes) -> bytes:
    """Replace every value of a JSON object by a value of another type."""
    try:
        fields = read_first_object(content).items()
    except (ValueError, AttributeError):
        return b"seed: [1]\ndata: 5\n"
    replaced = {name: VALUES_OF_OTHER_TYPES[type(field)] for name, field in fields}
    return json.dumps(replaced).encode() + b"\n"


def drop_keys(content: bytes) -> bytes:
    """Remove every second key of a JSON object and of the objects in it."""
    try:
        remaining = drop_every_second_key(read_first_object(content))
        return json.dumps(remaining).encode() + b"\n"
    except ValueError:
        return b"seed: 0\n"


def drop_every_second_key(content: Any) -> Any:
    if isinstance(content, list):
        return [drop_every_second_key(child) for child in content]
    if isinstance(content, dict):
        return {key: drop_every_second_key(content[key]) for key in list(content)[::2]}
    return content


Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "garbage": lambda content: bytes(range(256)) * 3,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "a list": lambda content: b'[1, "two", null]\n',
    "nulls": replace_values_by_null,
    "other types": replace_values_by_other_types,
    "missing names": drop_keys,
}


def compute_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 hash of each file of the runs in a folder."""
    digests = {}
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name != status_cache.FILE_NAME:
            name = str(path.relative_to(folder))
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def check_commands_on_damaged_run(source: RunFolder, name: str, damage: str, tmp_path: Path) -> None:
    """Damage the file `name` in a copy of a finished run, and call every command that reads runs."""
    runs = tmp_path / "runs"
    run = runs / source.path.name
    shutil.copytree(source.path, run, ignore=shutil.ignore_patterns("code"))
    (run / "attempts/0001/changed.json").write_text('{"optim.lr": ["0.1", "0.2"]}')
    (run / name).write_bytes(DAMAGES[damage]((run / name).read_bytes()))
    check_all_commands(run)


RUN_COMMANDS = {
    "status": "status --json=1 -- {}",
    "logs": "logs -- {}",
    "cancel": "cancel -- {}",
    "doctor": "doctor --run={}",
    "rerun": "rerun -- {}",
    "resume": "exp --resume={} --launch=local --dry-run=1",
    "evaluate": "evaluate -- {}",
    "export": "export -- {}",
}
"""The commands with the argument RUN, with {} instead of the run."""


def check_all_commands(run: Path) -> None:
    """Call every command that reads runs, and check that it prints at most one error and writes nothing."""
    runs = run.parent
    SyntheticRun("ddp_multinode", 1, 20).write(runs)  # a second, undamaged run
    digests = compute_digests(runs)
    runs_option = f"--runs-folder={runs}"
    commands = {
        "status of all": ["status", runs_option],
        "compare": ["compare", runs_option, "--json=1", f"--page={runs.parent / 'page.html'}"],
        "prune": ["prune-runs", runs_option],
        "sync": ["sync", runs_option, "--dry-run=1"],
    }
    for name, template in RUN_COMMANDS.items():
        arguments = template.split(" ")
        commands[name] = [argument.replace("{}", str(run)) for argument in arguments]

    for name, arguments in commands.items():
        process = in_process_calls.call_verb(*arguments, status=None)
        assert process.returncode in (0, 1, 2, 3), (name, process)
        errors = [line for line in process.stderr.splitlines() if not line.startswith("WARNING")]
        assert len(errors) <= 1, (name, process.stderr)
        assert "Traceback" not in process.stdout + process.stderr, (name, process.stderr)
        if process.returncode == 2:
            assert errors and errors[0].startswith("error: "), (name, process.stderr)
        assert compute_digests(runs) == digests, f"{name} has written into a run"
    table = in_process_calls.call_verb("status", runs_option).stdout
    assert "ddp_multinode-2026" in table, "the undamaged run is missing in the table"
    assert "FINISHED" in table
