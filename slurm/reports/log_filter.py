"""Remove the messages of Submitit and srun that say nothing about a run from the log of its job."""

from __future__ import annotations

import re

# srun prints how each rank has ended. The exit statuses 2 and 75 follow from messages that ranks have printed before.
NOISE = re.compile(
    r"submitit INFO \("
    r"|submitit WARNING \(.*\) - Bypassing signal "
    r"|srun: (?:launch/slurm: |Terminating StepId|Force Terminated StepId)"
    r"|srun: (?:Job step aborted: |got SIGCONT|forcing job termination)"
    r"|srun: error: \S+: tasks? [\d,-]+: Exited with exit code (?:2|75)$"
    r"|slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*"
)


class LogFilter:
    """Filter for a log that is read in parts of any length."""

    def __init__(self) -> None:
        self.incomplete_line = ""

    def select_lines(self, text: str, *, is_last: bool) -> str:
        """Return the lines of the next part of a log without noise.

        An incomplete line is returned together with the part that completes the line, or if the part `is_last`.
        """
        lines = (self.incomplete_line + text).splitlines(keepends=True)
        self.incomplete_line = ""
        if lines and not is_last and not lines[-1].endswith("\n"):
            self.incomplete_line = lines.pop()
        return "".join(line for line in lines if not NOISE.match(line))
