"""Errors and stacks in the logs of ranks. This module does not import torch.

A rank writes its own log, and SLURM writes the output of each task of a job to another file.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system import foreign_text
from common.system.causes import Cause
from common.system.text import read_end_of_file

# The time and text of an error in the log of a rank.
LOGGED_ERROR = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?:ERROR|CRITICAL) (.*)", re.MULTILINE)
# The last line of a traceback.
RAISED_ERROR = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b.*", re.MULTILINE)
# The last line of a traceback of an exception class of this project.
PROJECT_EXCEPTION = re.compile(r"^(common|configs|experiments|slurm)\.")
PRINTED_ERROR = re.compile(r"^error: (.*)", re.MULTILINE)
# The stacks of all threads, which the module faulthandler prints if a step takes too long.
STACK_DUMP = re.compile(r"^Timeout \(.*\)!\n((?:.+\n|\n(?=Thread|Current))*)", re.MULTILINE)
THREAD = re.compile(r"^(?:Current thread|Thread) .*\n", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)', re.MULTILINE)
PROJECT_FILE = re.compile(r"^(?!.*/(site|dist)-packages/).*/(common|slurm|experiments)/([\w/]+/)?\w+\.py$")
# The task numbers, such as 0,2-3, and how the tasks ended.
TASK_ENDING = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)", re.MULTILINE)
FIRST_FORMAT_WITH_CAUSES = 2  # ranks of runs with an older format do not record the causes of their failures
JOB_START = "Starting with JobEnvironment"  # Submitit logs this text at each start of a job, in the same file


@dataclasses.dataclass(frozen=True)
class LoggedError:
    """First error in the log of a rank."""

    time: str
    """Time of the error as text, or an empty string if the time is unknown."""
    text: str
    """Message of the error, or an empty string if the log contains no error."""
    exception: str
    """Last line of the traceback, or an empty string if there is no traceback."""


def read_job_log(folder: RunFolder, rank: int) -> str:
    """Return a rank's output since the latest start of the job.

    Returns an empty string if the run has no job.
    """
    job = provenance.read_metadata(folder).get("job")
    if not job:
        return ""
    logs = Path(job.get("logs") or folder.path / "submit")
    return read_end_of_file(logs / f"{job['id']}_{rank}_log.out").rpartition(JOB_START)[2]


def parse_task_exit_reasons(text: str) -> dict[int, str]:
    """Return how ranks ended according to srun's messages in `text`, by rank."""
    exit_reasons: dict[int, str] = {}
    for numbers, exit_reason in TASK_ENDING.findall(text):
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                exit_reasons.setdefault(rank, exit_reason)
    return exit_reasons


def find_first_error(log: str) -> LoggedError:
    """Return the first error in a log. Warnings and messages from W&B do not count as errors."""
    match = LOGGED_ERROR.search(log)
    if match:
        time_of_error, text = match.groups()
        raised = RAISED_ERROR.search(log, match.end())
        exception = raised[0] if raised else ""
        if raised and raised[0].split(":")[0] not in text:
            text += f" {raised[0]}"
        return LoggedError(time_of_error, text, exception)
    printed = PRINTED_ERROR.search(log)
    if printed:
        return LoggedError("", printed[1], "")
    raised = RAISED_ERROR.search(log)
    return LoggedError("", raised[0], raised[0]) if raised else LoggedError("", "", "")


def find_stack_position(log: str) -> str:
    """Return the code lines that the main thread was executing in the newest stack dump.

    The text contains the innermost stack frame and the two innermost frames of this project, such as
    `stage_messages.py:81 send`. Returns an empty string if the log contains no stack dump.
    """
    dumps = STACK_DUMP.findall(log)
    if not dumps:
        return ""
    main_thread = THREAD.split(dumps[-1])[-1]  # faulthandler prints the main thread last
    frames = FRAME.findall(main_thread)
    project_frames = [frame for frame in frames if PROJECT_FILE.match(frame[0])]
    selected = dict.fromkeys(frames[:1] + project_frames[:2])  # without duplicates
    return " < ".join(f"{Path(path).name}:{line} {name}" for path, line, name in selected)


def records_causes(folder: RunFolder) -> bool:
    """Return whether the source code that a run executes records the causes of failures."""
    metadata_format = provenance.read_metadata(folder).get("format")
    return isinstance(metadata_format, int) and metadata_format >= FIRST_FORMAT_WITH_CAUSES


def classify_logged_error(folder: RunFolder, error: LoggedError) -> Cause:
    """Return the cause of an error in a log.

    A rank without a record may have been ended by an error of Python or of a library, whose message is in a traceback.
    Messages of this project are searched only in logs of older versions, which did not record causes.
    """
    if not records_causes(folder):
        return foreign_text.classify_recorded_text(error.text)
    if PROJECT_EXCEPTION.match(error.exception):
        return Cause.OTHER
    return foreign_text.classify_text(error.exception)
