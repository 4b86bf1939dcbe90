"""Configuration files of a local cluster, and the programs that it needs."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from common.system.errors import UserError
from slurm.local_cluster import slurm_conf
from slurm.local_cluster.slurm_conf import Plan
from tests.harness.commands.processes import write_script
from tests.unit.slurm.local_cluster.cluster_command import PLAN


def list_lines(plan: Plan) -> list[str]:
    """Return the lines of slurm.conf."""
    return slurm_conf.make_slurm_conf(plan).splitlines()


def read_settings(plan: Plan) -> dict[str, str]:
    """Return the settings of slurm.conf. No key may be repeated, not even in another spelling."""
    settings: dict[str, str] = {}
    for line in list_lines(plan):
        if line.startswith(("NodeName", "PartitionName")):
            continue
        key, _, value = line.partition("=")
        assert key.lower() not in {earlier_key.lower() for earlier_key in settings}
        settings[key] = value
    return settings


def test_slurm_conf_contains_hosts_partitions_and_folders_of_the_plan() -> None:
    lines = list_lines(PLAN)
    assert "NodeName=node[1-3] CPUs=2 RealMemory=1000 State=UNKNOWN" in lines
    main, high = (line for line in lines if line.startswith("PartitionName="))
    assert "Default=YES" in main
    assert "PreemptMode=REQUEUE" in main
    assert "GraceTime=0" in main
    assert "PreemptMode=OFF" in high
    assert int(high.partition("PriorityTier=")[2].split()[0]) > 1

    settings = read_settings(PLAN)
    assert settings["SlurmUser"] == settings["SlurmdUser"] == "me"
    assert settings["FirstJobId"] == "5000"
    for setting in settings.values():
        assert setting.startswith("/tmp/c/") or not setting.startswith("/tmp")


def test_conf_replaces_a_line_in_any_spelling_and_adds_others() -> None:
    lines = ["killwait=30", "GraceTime=7", "SlurmctldParameters=preempt_send_user_signal", "SchedulerParameters=a=1,b"]
    plan = replace(PLAN, settings=slurm_conf.parse_slurm_conf_settings(lines))
    settings = read_settings(plan)
    assert settings["killwait"] == "30"
    assert "KillWait" not in settings
    assert settings["SlurmctldParameters"] == "preempt_send_user_signal"
    assert settings["SchedulerParameters"] == "a=1,b"
    assert "GraceTime" not in settings


def test_the_grace_time_is_a_property_of_the_main_partition() -> None:
    lines = list_lines(replace(PLAN, settings={"gracetime": "7"}))
    assert any(line.startswith("PartitionName=main") and line.endswith("GraceTime=7") for line in lines)


def test_munge_and_the_database_add_their_settings() -> None:
    minimal = read_settings(PLAN)
    assert minimal["AuthType"] == "auth/none"
    assert "socket" not in minimal["AuthInfo"]
    assert minimal["AccountingStorageType"] == "accounting_storage/none"
    assert "munge" not in slurm_conf.make_slurmdbd_conf(PLAN)

    with_munge = replace(PLAN, auth="munge")
    full = read_settings(replace(with_munge, database=True))
    assert full["AuthType"] == "auth/munge"
    assert full["CredType"] == "cred/munge"
    assert full["AuthInfo"].endswith("socket=/tmp/c/run/munge.sock")
    assert full["AccountingStoragePass"] == "/tmp/c/run/munge.sock"
    assert full["AccountingStorageHost"] == "ctl"
    assert "AuthInfo=socket=/tmp/c/run/munge.sock" in slurm_conf.make_slurmdbd_conf(with_munge)


def test_every_host_has_a_different_address() -> None:
    addresses = {}
    for line in slurm_conf.make_hosts_file(PLAN).splitlines():
        address, name = line.split()
        addresses[name] = address
    assert set(addresses) == {"localhost", "ctl", "node1", "node2", "node3"}
    assert len(set(addresses.values())) == 5
    del addresses["localhost"]
    assert not any(address.startswith("127.") for address in addresses.values())


def test_job_ids_are_never_reused() -> None:
    now = 1735689600 + 3600 * 24 * 365
    assert slurm_conf.choose_first_job_id(0, now) > 3_000_000  # also after the folder was deleted
    assert slurm_conf.choose_first_job_id(3_200_000, now) == 3_201_000
    assert slurm_conf.choose_first_job_id(0, now + 10) == slurm_conf.choose_first_job_id(0, now) + 1


@pytest.mark.parametrize(
    "line", ["KillWait", "KillWait=", "=5", "A=1\nB=2", "A=1 B=2", "A=1#", "NodeName=x", "include=/x"]
)
def test_invalid_conf_lines_are_refused(line: str) -> None:
    with pytest.raises(UserError, match="--conf"):
        slurm_conf.parse_slurm_conf_settings([line])


@pytest.mark.parametrize("folder", ["/tmp/a b", "/tmp/a#b", "/tmp/" + "x" * 90])
def test_folders_that_slurm_cannot_use_are_refused(folder: str) -> None:
    with pytest.raises(UserError, match="set CLUSTER_DIR"):
        slurm_conf.check_cluster_folder(Path(folder))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    folder = tmp_path / "sbin"
    folder.mkdir()
    monkeypatch.setattr(slurm_conf, "ADMIN_PATH", "")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_missing_programs_are_reported_with_their_packages(programs: Path) -> None:
    with pytest.raises(UserError, match=r"slurmctld, .*apt-get install slurm-wlm iproute2 util-linux$"):
        slurm_conf.check_programs("none", False)
    for names in (slurm_conf.PACKAGES | slurm_conf.MUNGE_PACKAGES).values():
        for name in names:
            (programs / name).touch(mode=0o755)
    slurm_conf.check_programs("munge", False)
    with pytest.raises(UserError, match=r"mariadbd, .*slurmdbd not found; .* mariadb-server slurmdbd$"):
        slurm_conf.check_programs("none", True)
    (programs / "ip").unlink()
    (programs / "munged").unlink()
    with pytest.raises(UserError, match=r"^ip not found; .* apt-get install iproute2$"):
        slurm_conf.check_programs("none", False)
    with pytest.raises(UserError, match=r"^ip, munged not found; .* apt-get install iproute2 munge$"):
        slurm_conf.check_programs("munge", False)


def test_munge_is_used_only_if_slurm_lacks_the_plugins_for_none(programs: Path) -> None:
    (programs / "slurmctld").touch(mode=0o755)
    plugins = programs.parent / "lib" / "x86_64-linux-gnu" / "slurm-wlm"
    plugins.mkdir(parents=True)
    assert slurm_conf.choose_auth() == "munge"
    (plugins / "auth_none.so").touch()
    assert slurm_conf.choose_auth() == "munge"
    (plugins / "cred_none.so").touch()
    assert slurm_conf.choose_auth() == "none"


SCONTROL = """test "$1 $2 $3" = "-o show job" || exit 1
job7='JobId=7 JobName=a=b JobState=COMPLETED Reason=None NodeList=node[1-2] NumNodes=2'
case $4 in
  7) echo "$job7" ;;
  8) echo 'JobId=8 ArrayJobId=8 ArrayTaskId=2-5 JobName=x JobState=PENDING NodeList= NumNodes=1'
     echo 'JobId=9 ArrayJobId=8 ArrayTaskId=1 JobName=x JobState=RUNNING NodeList=node1 NumNodes=1' ;;
  '') echo "$job7"; echo 'JobId=10 JobName=y JobState=PENDING NodeList=(null)' ;;
  *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac"""


ROWS_BY_OPTIONS = [
    ("-j 7", ["7|COMPLETED|node[1-2]"]),
    ("-j8", ["8_[2-5]|PENDING|None assigned", "8_1|RUNNING|node1"]),
    ("-j 7,404 -j 7", ["7|COMPLETED|node[1-2]"] * 2),
    ("--jobs=404", []),
    ("", ["7|COMPLETED|node[1-2]", "10|PENDING|None assigned"]),
]


@pytest.mark.parametrize("options, rows", ROWS_BY_OPTIONS)
def test_the_replacement_for_sacct_prints_the_rows_of_sacct(options: str, rows: list[str], tmp_path: Path) -> None:
    write_script(tmp_path / "scontrol", SCONTROL)
    sacct = tmp_path / "sacct"
    sacct.write_text(slurm_conf.SACCT_SCRIPT)
    sacct.chmod(0o755)
    command = [str(sacct), "-o", "JobID,State,NodeList", "--parsable2", *options.split()]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == ["JobID|State|NodeList", *rows]

    command = [str(sacct), "-n", "-X", "-P", *options.split(), "-o", "State"]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [row.split("|")[1] for row in rows]
