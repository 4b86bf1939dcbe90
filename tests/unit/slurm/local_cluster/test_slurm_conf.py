"""The local cluster's files, checks and messages: what can be told without starting one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.system.errors import UserError
from common.system.processes import Process
from slurm.arguments import parse_count
from slurm.local_cluster import cli, cluster, namespaces, slurm_conf
from slurm.local_cluster.slurm_conf import Plan
from slurm.reports.status import find_scheduler
from slurm.scheduling.scheduler import choose_scheduler
from tests.harness import warm
from tests.harness.warm import ROOT

PLAN = Plan("local", Path("/tmp/c"), 3, 2, 1000, "me", 1000, 100, "none", False, 5000, {})


def lines(plan: Plan) -> list[str]:
    return slurm_conf.make_slurm_conf(plan).splitlines()


def values(plan: Plan) -> dict[str, str]:
    """Each key once, and never in two spellings."""
    pairs = [line.partition("=") for line in lines(plan) if not line.startswith(("NodeName", "PartitionName"))]
    assert len({key.lower() for key, _, _ in pairs}) == len(pairs)
    return {key: value for key, _, value in pairs}


def tool(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, as a fork of a warm process."""
    return warm.execute([sys.executable, "-m", "slurm", "cluster", *words], env=os.environ | environ, timeout=60)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit status 2 and one line that says all of `words`."""
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_hosts_partitions_and_state_lie_where_the_plan_says() -> None:
    text = lines(PLAN)
    assert "NodeName=node[1-3] CPUs=2 RealMemory=1000 State=UNKNOWN" in text
    main, high = (line for line in text if line.startswith("PartitionName="))
    assert "Default=YES" in main and "PreemptMode=REQUEUE" in main and "GraceTime=0" in main
    assert "PreemptMode=OFF" in high and int(high.partition("PriorityTier=")[2].split()[0]) > 1
    known = values(PLAN)
    assert known["SlurmUser"] == known["SlurmdUser"] == "me"
    assert known["FirstJobId"] == "5000"
    assert all(value.startswith("/tmp/c/") for value in known.values() if value.startswith("/tmp"))


def test_conf_replaces_a_line_in_any_spelling_and_adds_others() -> None:
    settings = slurm_conf.parse_slurm_conf_settings(
        ["killwait=30", "GraceTime=7", "SlurmctldParameters=preempt_send_user_signal", "SchedulerParameters=a=1,b"]
    )
    known = values(replace(PLAN, settings=settings))
    assert known["killwait"] == "30" and "KillWait" not in known
    assert known["SlurmctldParameters"] == "preempt_send_user_signal"
    assert known["SchedulerParameters"] == "a=1,b"
    assert "GraceTime" not in known
    assert any(line.startswith("PartitionName=main") and line.endswith("GraceTime=7") for line in lines(PLAN_GRACE))


PLAN_GRACE = replace(PLAN, settings={"gracetime": "7"})


def test_munge_and_database_bring_their_lines() -> None:
    plain = values(PLAN)
    assert plain["AuthType"] == "auth/none" and "socket" not in plain["AuthInfo"]
    assert plain["AccountingStorageType"] == "accounting_storage/none"
    full = values(replace(PLAN, auth="munge", database=True))
    assert full["AuthType"] == "auth/munge" and full["CredType"] == "cred/munge"
    assert full["AuthInfo"].endswith("socket=/tmp/c/run/munge.sock")
    assert full["AccountingStoragePass"] == "/tmp/c/run/munge.sock"
    assert full["AccountingStorageHost"] == "ctl"
    assert "AuthInfo=socket=/tmp/c/run/munge.sock" in slurm_conf.make_slurmdbd_conf(replace(PLAN, auth="munge"))
    assert "munge" not in slurm_conf.make_slurmdbd_conf(PLAN)


def test_every_host_name_has_its_own_address() -> None:
    rows = {name: address for address, name in map(str.split, slurm_conf.make_hosts_file(PLAN).splitlines())}
    assert set(rows) == {"localhost", "ctl", "node1", "node2", "node3"}
    assert len(set(rows.values())) == 5
    assert not any(rows[name].startswith("127.") for name in rows if name != "localhost")


def test_job_ids_never_come_twice() -> None:
    later = 1735689600 + 3600 * 24 * 365
    assert slurm_conf.choose_first_job_id(0, later) > 3_000_000  # also after the folder was deleted
    assert slurm_conf.choose_first_job_id(3_200_000, later) == 3_201_000
    assert slurm_conf.choose_first_job_id(0, later + 10) == slurm_conf.choose_first_job_id(0, later) + 1


@pytest.mark.parametrize("nodes", ["0", "-1", "abc", "65", "1.5", "٣", "1\n", "$(touch x)", "99999999999"])
def test_bad_node_counts_are_refused(nodes: str) -> None:
    refused_text = f"NODES must be an integer from 1 to 64 (got {nodes!r})"
    with pytest.raises(UserError) as caught:
        parse_count("NODES", nodes, 64)
    assert str(caught.value) == refused_text


@pytest.mark.parametrize(
    "line", ["KillWait", "KillWait=", "=5", "A=1\nB=2", "A=1 B=2", "A=1#", "NodeName=x", "include=/x"]
)
def test_bad_conf_lines_are_refused(line: str) -> None:
    with pytest.raises(UserError, match="--conf"):
        slurm_conf.parse_slurm_conf_settings([line])


@pytest.mark.parametrize("name", ["A", "1a", "a b", "../x", "a-b", "a" * 40, "$(id)"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="starting with a letter"):
        cluster.find_cluster_folder(name)


def test_the_folder_follows_the_environment() -> None:
    mine = f"cluster-{os.getuid()}-local"
    assert cluster.find_cluster_folder("local", {}) == Path("/tmp", mine)
    assert cluster.find_cluster_folder("local", {"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7", mine)
    assert cluster.find_cluster_folder("local", {"XDG_RUNTIME_DIR": "/x", "CLUSTER_DIR": "/y"}) == Path("/y", mine)


@pytest.mark.parametrize("folder", ["/tmp/a b", "/tmp/a#b", "/tmp/" + "x" * 90])
def test_folders_that_slurm_cannot_use_are_refused(folder: str) -> None:
    with pytest.raises(UserError, match="set CLUSTER_DIR"):
        slurm_conf.check_cluster_folder(Path(folder))


def test_a_folder_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slurm_conf, "check_cluster_folder", lambda folder: folder)  # pytest's paths may be long
    monkeypatch.setenv("CLUSTER_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    cluster.find_cluster_folder("local").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="another user"), cli.lock_cluster_folder("local"):
        pass
    assert not any((tmp_path / "elsewhere").iterdir())


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slurm_conf, "ADMIN_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"slurmctld, .*apt-get install slurm-wlm iproute2 util-linux$"):
        slurm_conf.check_programs("none", False)
    for names in (slurm_conf.PACKAGES | slurm_conf.MUNGE_PACKAGES).values():
        for name in names:
            (tmp_path / name).touch(mode=0o755)
    slurm_conf.check_programs("munge", False)
    with pytest.raises(UserError, match=r"mariadbd, .*slurmdbd not found; .* mariadb-server slurmdbd$"):
        slurm_conf.check_programs("none", True)
    (tmp_path / "ip").unlink()
    (tmp_path / "munged").unlink()
    with pytest.raises(UserError, match=r"^ip not found; .* apt-get install iproute2$"):
        slurm_conf.check_programs("none", False)
    with pytest.raises(UserError, match=r"^ip, munged not found; .* apt-get install iproute2 munge$"):
        slurm_conf.check_programs("munge", False)


def test_munge_is_used_only_where_slurm_cannot_do_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugins = tmp_path / "lib" / "x86_64-linux-gnu" / "slurm-wlm"
    for folder in (tmp_path / "sbin", plugins):
        folder.mkdir(parents=True)
    (tmp_path / "sbin" / "slurmctld").touch(mode=0o755)
    monkeypatch.setattr(slurm_conf, "ADMIN_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path / "sbin"))
    assert slurm_conf.choose_auth() == "munge"
    (plugins / "auth_none.so").touch()
    assert slurm_conf.choose_auth() == "munge"
    (plugins / "cred_none.so").touch()
    assert slurm_conf.choose_auth() == "none"


def test_refused_namespaces_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(name: str, *_: object) -> None:
        raise OSError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(namespaces, "call_libc", denied)
    with pytest.raises(UserError, match=r"kernel.apparmor_restrict_unprivileged_userns=0, or run this command as root"):
        namespaces.unshare_namespaces("user")
    with pytest.raises(UserError, match=r"sysctl|--privileged"):
        namespaces.mount_path("none", "/", None, 0)


@pytest.mark.parametrize(
    "words",
    [["status"], ["shell"], ["exec", "true"], ["node", "1", "true"], ["cut", "1"], ["preempt"], ["requeue", "1"]],
)
def test_verbs_without_a_cluster_say_how_to_start_one(words: list[str], tmp_path: Path) -> None:
    refused(tool(*words, CLUSTER_DIR=str(tmp_path)), "cluster local is not up", "make cluster-up")


def test_down_without_a_cluster_is_no_error(tmp_path: Path) -> None:
    done = tool("down", CLUSTER_DIR=str(tmp_path))
    assert done.returncode == 0 and "is not up" in done.stdout
    done = tool("down", "--name=nosuch", CLUSTER_DIR=str(tmp_path))
    assert done.returncode == 2 and done.stderr == "error: cluster nosuch is not up; no cluster is up\n"
    assert not any(tmp_path.iterdir())


def test_inside_a_cluster_no_verb_touches_it(tmp_path: Path) -> None:
    inner = f"{tmp_path}/cluster-{os.getuid()}-local/slurm.conf"
    refused(tool("up", CLUSTER_DIR=str(tmp_path), SLURM_CONF=inner), "inside cluster local")


def test_starting_imports_nothing_heavy() -> None:
    code = "import sys, slurm.local_cluster.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "omegaconf", "yaml", "submitit", "wandb"} & set(done.stdout.split())


def test_only_the_recorded_process_is_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleep:
        true = Process.identify(sleep.pid)
        true.save(tmp_path / "holder")
        assert Process.load(tmp_path / "holder") == true
        recycled = true._replace(start=true.start - 1)
        assert not recycled.is_alive()
        recycled.kill()
        assert sleep.poll() is None
        true.kill()
        assert sleep.wait(timeout=5) == -9
    assert Process.load(tmp_path / "holder") is None
    true.kill()  # gone already: nothing to do


def test_programs_use_the_only_cluster_that_is_up_and_ask_where_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_DIR", str(tmp_path))

    def set_up(name: str, process: Process) -> None:
        folder = cluster.find_cluster_folder(name)
        folder.mkdir()
        replace(PLAN, name=name, folder=folder).save()
        process.save(folder / "holder")

    here = Process.identify(os.getpid())
    assert cluster.choose_running_cluster() is None
    set_up("over", here._replace(start=here.start - 1))
    assert choose_scheduler("local") is None and cluster.choose_running_cluster() is None
    set_up("mine", here)
    done = tool("down", "--name=nosuch", CLUSTER_DIR=str(tmp_path))
    assert done.returncode == 2 and done.stderr == "error: cluster nosuch is not up; running clusters: mine\n"
    found = choose_scheduler("auto")
    assert found and found.local and (found.name, found.local.plan.name) == ("the local cluster mine", "mine")
    assert find_scheduler({"job": {"scheduler": found.name}}) == found
    assert find_scheduler({"job": {"scheduler": "the local cluster"}}) is None, "one of another name"
    set_up("other", here)
    with pytest.raises(UserError, match="clusters are up: mine, other; choose one, such as LAUNCH=slurm:mine "):
        choose_scheduler("auto")
    found = choose_scheduler("slurm:other")
    assert found and found.local and (found.name, found.local.plan.name) == ("the local cluster other", "other")
    with pytest.raises(UserError, match="cluster over is not up; start it with: make cluster-up NAME=over"):
        choose_scheduler("slurm:over")
    for unknown in ("slurm:", "local:mine", "mine"):
        with pytest.raises(UserError, match=f"LAUNCH={unknown} is unknown; use auto, local, slurm, or slurm:NAME"):
            choose_scheduler(unknown)
    set_up("local", here)
    found = choose_scheduler("slurm")
    assert found and (found.name, find_scheduler({"job": {"scheduler": found.name}})) == ("the local cluster", found)


def test_commands_enter_as_the_caller() -> None:
    process = Process(4711, 1)
    as_root = cluster.Cluster(replace(PLAN, uid=0, gid=0), process).build_command(["id"], cwd="/x")
    assert as_root[:2] == ["nsenter", "--target=4711"] and "--user" not in as_root and as_root[-1] == "id"
    as_user = cluster.Cluster(PLAN, process).build_command(["id"], cwd="/x")
    assert "--preserve-credentials" in as_user
    assert {"--map-user=1000", "--map-group=100", "--chdir=/x", "SLURM_CONF=/tmp/c/slurm.conf"} <= set(as_user)


SCONTROL = """#!/bin/sh
test "$1 $2 $3" = "-o show job" || exit 1
plain='JobId=7 JobName=a=b JobState=COMPLETED Reason=None NodeList=node[1-2] NumNodes=2'
case $4 in
  7) echo "$plain" ;;
  8) echo 'JobId=8 ArrayJobId=8 ArrayTaskId=2-5 JobName=x JobState=PENDING NodeList= NumNodes=1'
     echo 'JobId=9 ArrayJobId=8 ArrayTaskId=1 JobName=x JobState=RUNNING NodeList=node1 NumNodes=1' ;;
  '') echo "$plain"; echo 'JobId=10 JobName=y JobState=PENDING NodeList=(null)' ;;
  *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (["-j", "7"], ["7|COMPLETED|node[1-2]"]),
        (["-j8"], ["8_[2-5]|PENDING|None assigned", "8_1|RUNNING|node1"]),
        (["-j", "7,404", "-j", "7"], ["7|COMPLETED|node[1-2]"] * 2),
        (["--jobs=404"], []),
        ([], ["7|COMPLETED|node[1-2]", "10|PENDING|None assigned"]),
    ],
)
def test_the_sacct_stand_in_answers_like_sacct(asked: list[str], rows: list[str], tmp_path: Path) -> None:
    for name, text in {"sacct": slurm_conf.SACCT_SCRIPT, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    argv = [str(tmp_path / "sacct"), "-o", "JobID,State,NodeList", "--parsable2", *asked]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["JobID|State|NodeList", *rows]
