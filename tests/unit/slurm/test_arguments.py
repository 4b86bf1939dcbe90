"""Arguments of commands: experiment names and counts."""

from __future__ import annotations

import pytest

from common.system.errors import UserError
from slurm.arguments import check_experiment_name, parse_count


@pytest.mark.parametrize("name", ["$(id)", "`id`", "a;id", "a\n#SBATCH --uid=0", "../x", "a b"])
def test_shell_code_and_paths_are_refused_as_experiment_names(name: str) -> None:
    with pytest.raises(UserError, match="unknown experiment"):
        check_experiment_name(name)


@pytest.mark.parametrize("nodes", ["0", "-1", "abc", "65", "1.5", "٣", "1\n", "$(touch x)", "99999999999"])
def test_invalid_node_counts_are_refused(nodes: str) -> None:
    message = f"NODES must be an integer from 1 to 64 (got {nodes!r})"
    with pytest.raises(UserError) as caught:
        parse_count("NODES", nodes, 64)
    assert str(caught.value) == message
