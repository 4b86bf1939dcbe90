"""Weights & Biases, second: a process of its own follows metrics.jsonl and passes it on.

    python -m common.tracking RUN_FOLDER ATTEMPT MODE REASON     (started by the run; ends when its stdin closes)

Training never waits for W&B and cannot fail with it, and a rank that is killed takes no record along:
this process outlives it, passes on what is in the file, and closes the W&B run as failed. Whether
there is an account and whether its host answers is found out before wandb.init, because a failing
online init takes a minute and a half. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.folder import Folder, read_json, write_json
from configs.shared import Experiment

POLL = 0.3  # seconds between two looks at the metrics file
REACH = 3.0  # seconds for the W&B host to answer
INIT = 20.0  # seconds for an online wandb.init


class Tracker:
    """The tracking process as its owner sees it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Folder) -> None:
        self.process, self.folder = process, folder

    @classmethod
    def start(cls, settings: Experiment, folder: Folder) -> Tracker | None:
        """Start tracking, or return None where it is switched off."""
        mode = os.environ.get("WANDB_MODE") or settings.wandb.mode
        if mode in ("disabled", "dryrun-disabled"):
            return None
        (folder.path / "wandb").mkdir(exist_ok=True)
        with open(folder.attempt / "logs" / "tracker.log", "wb") as log:
            process = subprocess.Popen(
                command(folder, mode),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is not for it, and its group can be ended as one
            )
        return cls(process, folder)

    def finish(self, timeout: float) -> str:
        """Let it pass on the rest; returns one line on where the W&B run is."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        late = ""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = f" (not finished after {timeout:.0f} s)"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        status = read_json(self.folder.path / "wandb" / "status.json")
        if not status:
            return f"W&B: nothing was tracked{late}; see {self.folder.attempt / 'logs' / 'tracker.log'}"
        reason = f" ({status['reason']})" if status.get("reason") else ""
        if status["mode"] == "online":
            return f"W&B: {status['url']}{late}"
        return f"W&B: offline{reason}{late}; upload with: wandb sync {status['dir']}"


def command(folder: Folder, mode: str, reason: str = "") -> list[str]:
    return [sys.executable, "-m", "common.tracking", str(folder.path), str(folder.number), mode, reason]


def choose_mode(asked: str) -> tuple[str, str]:
    """online or offline, and why not online."""
    import wandb

    if asked == "offline":
        return "offline", ""
    try:
        if not wandb.login(prompt=False):
            return "offline", "no W&B account is configured"
    except Exception as error:  # noqa: BLE001 (a malformed key, an unreadable netrc: train on)
        return "offline", f"W&B refuses the account: {str(error).splitlines()[0]}"
    url = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(url, timeout=REACH).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        return "offline", f"{url} does not answer: {getattr(error, 'reason', None) or error}"
    return "online", ""


def open_run(folder: Folder, mode: str) -> Any:
    """wandb.init with the run's own id, name, configuration and tags."""
    import wandb
    import yaml

    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    meta = read_json(folder.path / "meta.json")
    name = folder.path.name.rsplit("-", 3)[0]
    known = read_json(folder.path / "wandb" / "status.json").get("id")
    run = wandb.init(
        project=settings["wandb"]["project"],
        entity=settings["wandb"]["entity"] or None,
        group=settings["wandb"]["group"] or None,
        name=folder.path.name,
        id=known or secrets.token_hex(4),
        resume="allow",
        dir=str(folder.path),
        mode=mode,  # type: ignore[arg-type]
        tags=[name, f"data:{settings['data']['name']}", *settings["wandb"]["tags"]],
        config=settings | {"experiment": name, "meta": meta | {"git": meta.get("git", {}).get("sha")}},
        settings=wandb.Settings(
            console="off",
            quiet=True,
            init_timeout=INIT,
            x_transaction_log_flush_interval=1.0,
            save_code=False,
            disable_git=True,
        ),
    )
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    return run


def follow(path: Path) -> Iterator[dict[str, Any] | None]:
    """The rows of a growing file; None whenever there is no more for now. Ends with stdin, after the last row."""
    position, rest = 0, ""
    while True:
        closed = bool(select.select([sys.stdin], [], [], POLL)[0])
        if path.exists():
            with open(path) as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split("\n")
        for line in lines:
            yield json.loads(line)
        if closed:
            return
        yield None


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """The numbers and words of a result, for the W&B summary."""
    return {name: value for name, value in tree.items() if isinstance(value, int | float | str)}


def main(path: str, attempt: str, mode: str, reason: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job's end signals every process of it; our end is stdin's
    os.nice(10)  # training goes first
    folder = Folder(Path(path), int(attempt))
    run: Any = None
    for row in follow(folder.metrics_file):
        if row is None:
            continue
        if run is None:  # only now, so that the import does not compete with the first step
            run = connect(folder, mode, reason)
        run.log(row)
    if run is None:
        run = connect(folder, mode, reason)
    result = folder.result
    run.summary.update(flat(result))
    run.finish(exit_code=int(result.get("exit_status", 1)))


def connect(folder: Folder, asked: str, reason: str) -> Any:
    """The W&B run; a failing online start is followed by an offline one in a fresh process."""
    mode, why = choose_mode(asked)
    reason = reason or why
    try:
        run = open_run(folder, mode)
    except Exception as error:  # whatever W&B says, training is recorded offline
        if mode == "offline":
            raise
        words = (str(error).splitlines() or [type(error).__name__])[0]
        os.environ.pop("WANDB_MODE", None)
        os.execv(sys.executable, command(folder, "offline", f"W&B refused the run: {words}"))
    place = {"id": run.id, "mode": mode, "reason": reason, "url": run.url, "dir": str(Path(run.dir).parent)}
    write_json(folder.path / "wandb" / "status.json", place)
    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
