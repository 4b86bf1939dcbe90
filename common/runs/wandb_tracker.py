"""Weights & Biases, second: a process of its own follows metrics.jsonl and passes it on.

    python -m common.runs.wandb_tracker RUN_FOLDER ATTEMPT MODE REASON    (started by the run; ends when stdin closes)

Training never waits for W&B and cannot fail with it, and a rank that is killed takes no record along:
this process outlives it, passes on what is in the file, and closes the W&B run as failed. Whether
there is an account and whether its host answers is found out before wandb.init, because a failing
online init takes a minute and a half. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.core import config, network
from common.core.errors import UserError, first_line
from common.runs import result as summary
from common.runs.folder import MODEL, MODEL_FACTS, Folder, read_json, write_json
from configs.shared import Experiment

MODES = ("auto", "online", "offline", "disabled")
FORWARDED = "passed_on.json"  # in an attempt's folder: how many of its rows W&B has got
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
SERVICE = "WANDB_SERVICE"  # how wandb finds the helper process of an earlier wandb
POLL = 0.3  # seconds between two looks at the metrics file
REACH = 3.0  # seconds for the W&B host to answer
INIT = 20.0  # seconds for an online wandb.init


def read_requested_mode(settings: Experiment) -> str:
    """One of MODES. Raises UserError for a WANDB_MODE that is none of them."""
    mode = os.environ.get("WANDB_MODE") or settings.wandb.mode
    mode = {"run": "online", "dryrun": "offline"}.get(mode, mode)  # W&B's older names
    if mode not in MODES:
        raise UserError(f"WANDB_MODE={mode} is unknown; use {', '.join(MODES)}, or unset it")
    return mode


class Tracker:
    """The tracking process as its owner sees it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Folder) -> None:
        self.process, self.folder = process, folder

    @classmethod
    def start(cls, settings: Experiment, folder: Folder) -> Tracker | None:
        """Start tracking, or return None where it is switched off or has no room to start."""
        mode = read_requested_mode(settings)
        if mode == "disabled":
            return None
        # observability is W&B's own telemetry: ten seconds at the end where the host does not answer
        environ = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"} | os.environ
        for name in ("WANDB_MODE", SERVICE):
            environ.pop(name, None)
        try:
            (folder.path / "wandb").mkdir(exist_ok=True)
            with open(folder.attempt / "logs" / "tracker.log", "wb") as log:
                process = subprocess.Popen(
                    build_command(folder, mode),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    start_new_session=True,  # Ctrl-C is not for it, and its group can be ended as one
                )
        except OSError as error:
            print(f"W&B: nothing is tracked: {error}", flush=True)
            return None
        return cls(process, folder)

    def finish(self, timeout: float) -> str:
        """Let it pass on the rest; returns one line on where the W&B run is."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        log = self.folder.attempt / "logs" / "tracker.log"
        try:
            whole = self.process.wait(timeout + 1) == 0  # it ends itself after `timeout`
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            whole = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        status = read_json(self.folder.path / "wandb" / "status.json")
        if not status:
            return f"W&B: nothing was tracked; see {log}"
        reason = f" ({status['reason']})" if status.get("reason") else ""
        rest = "" if whole else f"; not complete after {timeout:g} s, see {log}"
        if status["mode"] == "online":
            return f"W&B: {status['url']}{rest}"
        words = shlex.quote(shlex.quote(self.folder.reference))  # RUNS is split into words
        return f"W&B: offline{reason}; send it with: make sync RUNS={words}{rest}"


def build_command(folder: Folder, mode: str, reason: str = "") -> list[str]:
    return [sys.executable, "-m", "common.runs.wandb_tracker", str(folder.path), str(folder.number), mode, reason]


def choose_mode(asked: str) -> tuple[str, str]:
    """online or offline, and why not online. Bounded by a few REACH, whatever the host does."""
    import wandb

    if asked == "offline":
        return "offline", ""
    try:
        settings = wandb.setup().settings
        if settings.mode != "online":
            return "offline", f"`wandb {settings.mode}` was set on this machine"
        if not wandb.login(prompt=False, verify=False):
            return "offline", "no W&B account is configured"
        silent = network.probe_url(settings.base_url, REACH)
        if silent:
            return "offline", f"{settings.base_url} does not answer: {silent}"
        wandb.Api(timeout=round(REACH))  # raises unless the host knows the key
    except Exception as error:  # noqa: BLE001 (a malformed or refused key, an unreadable netrc: train on)
        return "offline", f"W&B does not accept the account: {first_line(error)}"
    return "online", ""


def require_account() -> None:
    """Raise UserError, with the reason, unless there is a W&B account whose host answers."""
    os.environ.pop("WANDB_MODE", None)  # it is about runs
    mode, why = choose_mode("online")
    if mode != "online":
        raise UserError(
            f"nothing is sent to W&B: {why} (an account is named by .venv/bin/wandb login or WANDB_API_KEY)"
        )


def load_run_config(folder: Folder) -> Experiment:
    return config.build_config(
        config.import_schema(folder.experiment), [config.read_config_file(folder.path / "config.yaml")]
    )


def init_wandb_run(folder: Folder, mode: str) -> Any:
    """wandb.init with the run's own id, name, configuration and tags."""
    import wandb

    settings = load_run_config(folder)
    name = config.experiment_name(type(settings))
    meta = read_json(folder.path / "meta.json")
    facts = {"experiment": name, "world_size": settings.processes}
    facts["meta"] = meta | {"git": meta.get("git", {}).get("sha")}
    kept = folder.path / "wandb" / "id.json"
    own = read_json(kept).get("id") or secrets.token_hex(4)
    write_json(kept, {"id": own})  # first: a start that is killed meanwhile leaves it to the next one
    run = wandb.init(
        project=settings.wandb.project,
        entity=settings.wandb.entity or None,
        group=settings.wandb.group or None,
        name=folder.path.name,
        id=own,
        resume="allow",
        dir=str(folder.path),
        mode=mode,  # type: ignore[arg-type]
        tags=[name, f"data:{settings.data.name}", f"world_size:{settings.processes}", *settings.wandb.tags],
        config=dataclasses.asdict(settings) | facts,
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


def wait_for_owner_exit(folder: Folder, closed: threading.Event, seconds: float) -> None:
    """Tell when stdin closes, however the owner ended, and end this process `seconds` later, whatever it is at."""
    sys.stdin.read()
    if not folder.result:  # the owner was killed: its ranks end a moment after it, and may still write
        time.sleep(POLL)
    closed.set()
    time.sleep(seconds)
    kill_children()
    os._exit(1)


def follow_rows(path: Path, closed: threading.Event) -> Iterator[dict[str, Any] | None]:
    """The rows of a growing file; None whenever there is no more for now. Ends when `closed`, after the last row."""
    position, rest = 0, ""
    while True:
        last = closed.wait(POLL)
        if path.exists():
            with open(path) as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split("\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # cut off by a full disk
                continue
            yield row
        if last:
            return
        yield None


def main(path: str, attempt: str, mode: str, reason: str) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):  # SLURM signals every process of a job; our end is stdin's
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # training goes first
    ctypes.CDLL(None).prctl(SUBREAPER, 1)  # what W&B's helpers leave behind becomes our child
    folder = Folder(Path(path), int(attempt))
    closed = threading.Event()
    threading.Thread(
        target=wait_for_owner_exit, args=(folder, closed, load_run_config(folder).wandb.finish_timeout), daemon=True
    ).start()
    run: Any = None
    passed_on = read_forwarded_rows(folder)
    pictures = MediaForwarder(folder)
    count = noted = 0
    for row in follow_rows(folder.metrics_file, closed):
        if row is None:
            if run is not None:
                pictures.pass_on(run)
            if count > noted:
                record_forwarded(folder, count)
                noted = count
            continue
        if run is None:  # only now, so that the import does not compete with the first step
            run = connect_wandb(folder, mode, reason)
        if row_key(row) not in passed_on:  # else a step that was done again, to the bit
            run.log(row)
        count += 1
    if run is None:
        run = connect_wandb(folder, mode, reason)
    record_forwarded(folder, count)
    pictures.pass_on(run)
    result = folder.result
    log_model_artifact(run, folder)
    run.summary.update(summary.parse(result).columns() | {"restarts": len(folder.attempts()) - 1})
    run.finish(exit_code=int(result.get("exit_status", 1)))
    shut_down_wandb()


class MediaForwarder:
    """The images and histograms of a start that W&B has not got yet, as media.jsonl lists them."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.position = folder, 0

    def pass_on(self, run: Any) -> None:
        """Log those that have come since; what is cut off comes with the next call, what is damaged is left out."""
        try:
            text = (self.folder.attempt / "media.jsonl").read_text()
        except OSError:
            return
        whole = text[self.position : text.rfind("\n") + 1]
        self.position += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                item = json.loads(line)
                run.log({str(item["name"]): self.load(item), "global_step": item["global_step"]})

    def load(self, item: dict[str, Any]) -> Any:
        import wandb

        file = self.folder.attempt / "media" / Path(item["file"]).name
        if item["kind"] == "image":
            return wandb.Image(str(file))
        content = json.loads(file.read_text())
        return wandb.Histogram(np_histogram=(content["counts"], content["edges"]))


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row says but for the time: a step that is done again with other settings says something else."""
    return tuple(sorted((name, value) for name, value in row.items() if name != "time"))


def record_forwarded(folder: Folder, rows: int) -> None:
    """Keep for later starts how many rows W&B has got of this one."""
    with contextlib.suppress(UserError):  # a full disk: they then come twice
        write_json(folder.attempt / FORWARDED, {"rows": rows})


def read_forwarded_rows(folder: Folder) -> set[tuple[Any, ...]]:
    """The rows of earlier starts that their tracking processes have passed on."""
    known: set[tuple[Any, ...]] = set()
    for attempt in folder.attempts():
        count = read_json(attempt.attempt / FORWARDED).get("rows")
        if attempt.number < folder.number and isinstance(count, int):
            known |= {row_key(row) for row in itertools.islice(attempt.own_rows(), count)}
    return known


def log_model_artifact(run: Any, folder: Folder) -> None:
    """Give W&B the trained model as an artifact: by reference to the run folder until it is uploaded."""
    import wandb

    files = [folder.path / name for name in (MODEL, MODEL_FACTS)]
    settings = load_run_config(folder)
    if not (settings.wandb.model and folder.result.get("state") == "finished" and all(map(Path.is_file, files))):
        return
    facts = read_json(files[1])
    artifact = wandb.Artifact(
        f"{folder.path.name}-model", type="model", metadata={key: facts.get(key) for key in ("class", "step", "scores")}
    )
    for file in files:
        artifact.add_file(str(file), policy="immutable", skip_cache=True)  # no second copy on this disk
    run.log_artifact(artifact)


def connect_wandb(folder: Folder, asked: str, reason: str) -> Any:
    """The W&B run; a failing online start is followed by an offline one in a fresh process."""
    mode, why = choose_mode(asked)
    reason = reason or why
    try:
        run = init_wandb_run(folder, mode)
    except Exception as error:  # whatever W&B says, training is recorded offline
        if mode == "offline":
            raise
        kill_children()
        os.environ.pop(SERVICE, None)
        os.execv(sys.executable, build_command(folder, "offline", f"W&B refused the run: {first_line(error)}"))
    place = {"id": run.id, "mode": mode, "reason": reason, "url": run.url, "dir": str(Path(run.dir).parent)}
    write_json(folder.path / "wandb" / "status.json", place)
    return run


def shut_down_wandb() -> None:
    """Let W&B's helper end, and leave none of its own helpers behind."""
    import wandb

    wandb.teardown()
    kill_children()


def kill_children() -> None:
    """Kill the processes that W&B started, and those that they started."""
    while pids := list_children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # W&B waits for its own
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def list_children() -> list[int]:
    """The processes that any thread of this one started."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may end while we look
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
