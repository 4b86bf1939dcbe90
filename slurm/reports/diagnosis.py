"""The diagnosis of a run that failed or hangs, from its folder. Imports no torch.

The first error of all ranks, the last step of each, where ranks stood when one waited too long, which one is slow, and
the likely cause in one line.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

from common.checkpoint import storage
from common.core.errors import DIVERGENCE, NO_VALID_CHECKPOINT, SOURCE_ERROR
from common.core.text import format_duration, read_tail
from common.distributed.elastic.generations import describe_generations
from common.runs import provenance
from common.runs.folder import Folder
from slurm.reports import status
from slurm.reports.heartbeats import Heartbeat, describe_slow_rank, find_slow_rank, read_heartbeats
from slurm.reports.selection import parse_float, read_settings, read_step_timeout
from slurm.reports.status import OVER

ERROR = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?:ERROR|CRITICAL) (.*)", re.MULTILINE)
RAISED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b.*", re.MULTILINE)  # a traceback's last line
STACKS = re.compile(r"^Timeout \(.*\)!\n((?:.+\n|\n(?=Thread|Current))*)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)', re.MULTILINE)
OWN = re.compile(r"^(?!.*/(site|dist)-packages/).*/(common|slurm|experiments)/([\w/]+/)?\w+\.py$")  # our source
ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)", re.MULTILINE)  # how tasks ended
SILENT = 60.0  # seconds without a sign of life of a run that hangs, at least
BEGIN = "Starting with JobEnvironment"  # Submitit's first words at each attempt of a job, whose output is appended
WELL = "nothing wrong is seen; it runs"
PEER = re.compile(  # errors of one rank whose cause is another one, as gloo, NCCL and builtin tell them
    r"(closed|reset) by peer|Connection refused|Broken pipe|timed out|pair closure|(did|does) not answer"
    r"|closed its connection|connection with rank|neither sent nor took",
    re.I,
)
SHORTAGE = "no more threads or processes can be started"
MEMORY, DIVERGED = "out of memory", "training diverged"
CAUSES = (
    (r"out of memory|MemoryError|oom.kill|Cannot allocate memory",
     f"{MEMORY}; lower batch, raise the number of microbatches, or ask for more with cluster.memory_gb"),
    (SHORTAGE, f"{SHORTAGE}; raise ulimit -u or pids.max of a control group, or lower launch.threads or data.workers"),
    (r"No space left|disk is full|quota", "the disk is full; free space, or set runs=<elsewhere>"),
    (r"read-only|Read-only", "the disk is read-only; set runs=<elsewhere>"),
    (DIVERGENCE, f"{DIVERGED}; lower optim.lr, or set clip where there is one"),
    (r"is damaged|other data than", "the data are not what they were"),
    (r"TIMEOUT|time limit", "the job's time limit; raise cluster.time, or make exp RESUME=<id>"),
    (r"NODE_FAIL", "a host failed; make exp RESUME=<id>"),
    (r"OUT_OF_ME", f"{MEMORY}; ask for more with cluster.memory_gb"),
    (r"ModuleNotFoundError|ImportError", "a package is missing there; make doctor NODES=2"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rank:
    """The facts that one rank left in the run folder."""

    beat: Heartbeat
    seen: float
    """Its newest sign of life, seconds since 1970."""
    when: str
    """Of its first error."""
    error: str
    stands: str
    """Its innermost lines of code when a step took too long."""
    ended: str = ""
    """How it ended, in srun's words, such as Killed."""

    @property
    def name(self) -> str:
        return f"rank {self.beat.rank} on {self.beat.host}"

    @property
    def age(self) -> float:
        """Seconds since its last sign of life."""
        return max(0.0, time.time() - self.seen)

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("beat", "seen")}
        return dataclasses.asdict(self.beat) | own | {"age": self.age}


def read_job_log(folder: Folder, rank: int) -> str:
    """Read what SLURM kept of a rank's output since the newest start of the job; empty without a job."""
    job = provenance.read_metadata(folder).get("job")
    if not job:
        return ""
    logs = Path(job.get("logs") or folder.path / "submit")
    return read_tail(logs / f"{job['id']}_{rank}_log.out").rpartition(BEGIN)[2]


def find_endings(text: str) -> dict[int, str]:
    """Find how tasks ended, by rank, in srun's words."""
    found: dict[int, str] = {}
    for numbers, words in ENDED.findall(text):
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            found |= {rank: words for rank in range(int(first), int(last or first) + 1) if rank not in found}
    return found


def find_last_sign_of_life(attempt: Folder) -> float:
    """Find the newest sign of life of an attempt without its heartbeats, in seconds since 1970."""
    names = ("attempt.json", "world.json", "logs")
    paths = [*(attempt.attempt / name for name in names), *attempt.attempt.glob("logs/rank-*.log")]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def find_first_error(text: str) -> tuple[str, str]:
    """Find the time and text of the first error in a log; messages of W&B and warnings are no errors."""
    match = ERROR.search(text)
    if match:
        raised = RAISED.search(text, match.end())
        words = match[2] if not raised or raised[0].split(":")[0] in match[2] else f"{match[2]} {raised[0]}"
        return match[1], words
    said = re.search(r"^error: (.*)", text, re.MULTILINE)
    raised = RAISED.search(text)
    return "", said[1] if said else raised[0] if raised else ""


def find_stack_position(text: str) -> str:
    """Find the innermost lines of the project in the newest stack dump, and the function that they called."""
    dumps = STACKS.findall(text)
    threads = re.split(r"^(?:Current thread|Thread) .*\n", dumps[-1], flags=re.MULTILINE) if dumps else []
    frames = FRAME.findall(threads[-1]) if threads else []  # the main thread comes last
    if not frames:
        return ""
    own = [frame for frame in frames if OWN.match(frame[0])]
    chosen = [*frames[:1], *[frame for frame in own[:2] if frame is not frames[0]]]
    return " < ".join(f"{Path(path).name}:{line} {name}" for path, line, name in chosen)


def read_ranks(folder: Folder) -> list[Rank]:
    """Read the facts of all ranks of the newest attempt."""
    found = []
    endings = find_endings(read_job_log(folder, 0))  # srun writes where rank 0 does
    for attempt in folder.attempts()[-1:]:
        first = find_last_sign_of_life(attempt)
        for beat in read_heartbeats(attempt):
            text = f"{read_tail(attempt.log_file(beat.rank))}\n{read_job_log(folder, beat.rank)}"
            ended = endings.get(beat.rank, "")
            found.append(Rank(beat, beat.time or first, *find_first_error(text), find_stack_position(text), ended))
    return found


def list_failed_ranks(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks with an error, the earliest first."""
    return sorted((rank for rank in ranks if rank.error), key=lambda rank: (not rank.when, rank.when))


def find_known_cause(detail: str, own: list[Rank]) -> str:
    """Find a known cause with its remedy; empty where there is none."""
    for pattern, words in CAUSES:
        who = next((rank.name for rank in own if re.search(pattern, rank.error)), "")
        if who or re.search(pattern, detail):
            return f"{who}: {words}" if who else words
    return ""


def find_no_answer_message(errors: list[Rank]) -> str:
    """Find the message of the first rank that reports another one as not answering."""
    return next((rank.error for rank in errors if "did not answer within" in rank.error), "")


def describe_lost_ranks(ranks: list[Rank], errors: list[Rank]) -> str:
    """Describe the ranks that ended without an error, where the others only lost their connection."""
    silent = [rank for rank in ranks if not rank.error]
    if not (errors and silent):
        return ""
    unknown = "killed, out of memory, or its host failed"
    ends = ", ".join(f"{rank.name} ended without an error message ({rank.ended or unknown})" for rank in silent)
    return f"{ends}, and the others lost it"


def describe_exit(folder: Folder) -> str:
    """Describe how all ranks ended, where none of them left an error."""
    code = folder.result.get("exit_status")
    how = "killed, or the machine failed"
    if isinstance(code, int):
        is_signal = 128 < code < 128 + signal.NSIG
        how = f"signal {signal.strsignal(code - 128) or code - 128}" if is_signal else f"exit status {code}"
    return f"its ranks ended without an error message: {how}"


def judge_running(ranks: list[Rank], last_step: int, allowed: float) -> str:
    """Judge a running run, which may be silent for so many seconds; a rank without heartbeat has just started."""
    if not ranks or min(rank.age for rank in ranks) < allowed:
        return describe_slow_rank([rank.beat for rank in ranks]) or WELL
    behind = min(ranks, key=lambda rank: (rank.beat.step, rank.seen))
    return f"it hangs after step {last_step}: {behind.name} has shown nothing for {format_duration(behind.age)}"


def find_cause(folder: Folder, state: str, detail: str, ranks: list[Rank]) -> str:
    """Find the likely cause in one line; empty for a run that is well, or whose state says all."""
    if state == "FINISHED":
        return describe_slow_rank([rank.beat for rank in ranks])
    if state == "CANCELLED":
        return ""
    if state == "RUNNING":
        return judge_running(ranks, status.read_last_step(folder), max(SILENT, read_step_timeout(folder)))
    errors = list_failed_ranks(ranks)
    own = [rank for rank in errors if not PEER.search(rank.error)]
    first = f"{own[0].name} failed first: {own[0].error}" if own else ""
    last = errors[0].error if errors else describe_exit(folder)
    killed = detail if "was killed by" in detail else ""
    return (
        find_known_cause(detail, own)
        or first
        or find_no_answer_message(errors)
        or killed
        or describe_lost_ranks(ranks, errors)
        or detail
        or last
    )


def examine_run(folder: Folder) -> dict[str, Any]:
    """Collect all facts about a run, for people and programs."""
    state, detail = status.read_state(folder)
    ranks = read_ranks(folder)
    errors = list_failed_ranks(ranks)
    first = errors[0].to_dict() if errors else None
    slow = find_slow_rank([rank.beat for rank in ranks])
    return {
        "run": folder.path.name,
        "state": state.lower(),
        "detail": detail,
        "attempts": len(folder.attempts()),
        "step": status.read_last_step(folder),
        "ranks": [rank.to_dict() for rank in ranks],
        "first_error": first,
        "ranks_changed": [line for attempt in folder.attempts()[-1:] for line in describe_generations(attempt)],
        "straggler": slow.rank if slow else None,
        "cause": find_cause(folder, state, detail, ranks),
    }


def find_next_command(folder: Folder, cause: str) -> str:
    """Return the command to continue with; another one where this source or these settings failed."""
    again = f"make exp RESUME={folder.reference}"
    if re.search(SOURCE_ERROR, cause):
        return provenance.advise_new_run(folder)
    if NO_VALID_CHECKPOINT in cause:
        return f"{again} after removing {folder.path}/attempts/*/checkpoints: it then begins anew"
    rate = parse_float(read_settings(folder).get("optim.lr", ""))
    if DIVERGED in cause:
        return f'{again} ARGS="optim.lr={(rate or 0) / 2:g}", with a lower rate than {rate or 0:g}'
    if MEMORY in cause:
        job = provenance.read_metadata(folder).get("job")
        more = f'{again} ARGS="cluster.memory_gb=..."' if job else f"{again} on a machine with more memory"
        return f"{more}, or a new run with a smaller batch or model: it would end in the same way here"
    was_saved = storage.list_resumable_checkpoints(folder) or storage.list_lost_checkpoints(folder)
    return again if was_saved else f"{again}; no checkpoint found, it restarts from step 0"


def print_diagnosis(folder: Folder, as_json: bool) -> int:
    """Print the diagnosis; returns the exit status: as JSON, for scripts, 1 for a run that is not well."""
    found = examine_run(folder)
    if as_json:
        print(json.dumps(found, indent=2))
        return 0 if found["state"] in ("finished", "pending") or found["cause"] == WELL else 1
    print(f"{found['run']} is {found['state'].upper()}" + (f": {found['detail']}" if found["detail"] else ""))
    print(f"  last step  {found['step']}")
    for rank in found["ranks"]:
        age = f"{format_duration(rank['age'])} ago"
        early = f"  {rank['before_backward'] * 1e3:.1f} ms until backward" if rank["before_backward"] else ""
        print(f"  rank {rank['rank']:<3}  {rank['host']:<12}  heartbeat at step {rank['step']:>7}  {age:>10}{early}")
        if rank["stands"]:
            print(f"            stood at {rank['stands']}")
    for line in found["ranks_changed"]:
        print(f"  ranks changed: {line}")
    if found["first_error"]:
        first = found["first_error"]
        print(f"  first error  {first['when']} rank {first['rank']} on {first['host']}: {first['error']}")
    if found["cause"]:
        print(f"  likely cause  {found['cause']}")
    if found["state"].upper() in OVER and found["state"] != "finished":
        print(f"  go on  {find_next_command(folder, found['cause'])}")
    return 0
