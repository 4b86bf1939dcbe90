"""Draw a pipeline schedule.

python -m common.techniques.pipeline gpipe 2 4            GPipe for 2 ranks and 4 microbatches
python -m common.techniques.pipeline mine.py:f 2 4 2      a custom schedule with 2 stages per rank
"""

from __future__ import annotations

import argparse

from common.system.errors import UserError, exit_on_user_error
from common.techniques.pipeline.schedules import (
    SCHEDULES,
    compute_bubble,
    compute_makespan,
    format_timeline,
    make_schedule,
    simulate_schedule,
)
from configs.pipeline import PipelineConfig


def main() -> None:
    """Print a pipeline schedule as a text diagram with one line per rank."""
    parser = argparse.ArgumentParser(prog="python -m common.techniques.pipeline", description=main.__doc__)
    parser.add_argument("schedule", help=f"schedule to print: {', '.join(SCHEDULES)} or FILE.py:function")
    for name in ("ranks", "microbatches"):
        help_text = f"number of {name}, from 1 to 64"
        parser.add_argument(name, type=int, choices=range(1, 65), metavar=name, help=help_text)
    parser.add_argument("each", type=int, nargs="?", default=1, choices=range(1, 9), help="number of stages per rank")
    args = parser.parse_args()
    stages = args.ranks * args.each
    settings = PipelineConfig(
        schedule=args.schedule, stages=stages, stages_per_process=args.each, microbatches=args.microbatches
    )
    try:
        settings.check_schedule()
    except ValueError as error:
        raise UserError(str(error)) from None
    spans = simulate_schedule(make_schedule(settings), stages)
    for rank, line in enumerate(format_timeline(spans, width=round(compute_makespan(spans)))):
        print(f"rank {rank} |{line}|")
    print(f"idle share {compute_bubble(spans):.1%}  (a forward takes 1 unit of time, and a backward takes 2 units)")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
