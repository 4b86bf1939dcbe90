"""`make exp`: check a name and its settings, then start the experiment. Imports no torch.

    python -m slurm.submit [--nodes=N] [--args="key=value ..."] -- NAME

Everything that can be refused is refused here, at once, also on a login node where importing torch
from a network disk takes half a minute.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys

from common import config, schedules, tracking
from common.config import ROOT, UserError

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def checked_name(name: str) -> str:
    """The name of an existing experiment. Raises UserError with the nearest right one."""
    known = config.names()
    if not name:
        raise UserError(f"NAME is missing; write make exp NAME={known[0]} (experiments: {', '.join(known)})")
    if not NAME.fullmatch(name) or name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"no experiment {name!r}{hint} (experiments: {', '.join(known)})")
    return name


def checked_nodes(text: str) -> int:
    """A positive number of nodes."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) == 0:
        raise UserError(f"NODES={text!r} is no positive number; write NODES=1 or more")
    return int(text)


def split_arguments(text: str) -> list[str]:
    """ARGS as a shell would split it, without a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"ARGS={text!r} cannot be split into words: {error}") from None


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="make exp", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--args", default="", help="settings, as one string")
    given = parser.parse_args(arguments)
    name = checked_name(given.name)
    words = split_arguments(given.args)
    if given.nodes:
        words.append(f"launch.nodes={checked_nodes(given.nodes)}")
    settings = config.load(config.schema_of(name), words)
    schedules.preflight(settings)
    tracking.asked_mode(settings)
    if settings.launch.nodes > 1:
        print(f"{settings.launch.nodes} nodes are laid out as local processes on this machine", flush=True)
    script = ROOT / "experiments" / f"{name}.py"
    os.execv(sys.executable, [sys.executable, str(script), *words])


if __name__ == "__main__":
    with config.user_errors():
        main(sys.argv[1:])
