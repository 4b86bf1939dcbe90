# Commands for users and CI. Targets with settings are verbs of one command line, whose help explains each setting:
# .venv/bin/python -m slurm exp --help
# That command line receives the variables from make's command line unchanged, and checks them. GIVEN contains the names
# of these variables. `override X := $(value X)` prevents make from expanding their values.
SHELL := /bin/sh
PYTHON ?= python3
override GIVEN := $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $v))),$v))
$(foreach v,$(filter-out GIVEN,$(GIVEN)) PYTHON,$(eval override $v := $$(value $v)))
# Do not export MAKECMDGOALS itself: a make that a recipe starts would read it as its own goals.
override GOALS := $(MAKECMDGOALS)
export GIVEN GOALS PYTHON $(GIVEN)
override given = $(if $(filter $1,$(GIVEN)),"$$$1")
override PY := .venv/bin/python
override READY := .venv/.ready
override FAST := tests/unit tests/experiments tests/pitfalls tests/commands
override VERBS := exp rerun evaluate export sample sweep doctor status logs note archive cancel compare sync dashboard leet prune-runs tour \
  new-experiment check-optimizer cluster-up cluster-down cluster-status cluster-shell
# Verbs that report on runs or cancel them also work if .venv is older than requirements.txt.
override REPORTS := status logs note archive cancel compare sync dashboard leet prune-runs cluster-down cluster-status \
  cluster-shell $(if $(filter RUN,$(GIVEN)),doctor)
override ONLY_REPORTS := $(if $(filter-out $(REPORTS),$(or $(MAKECMDGOALS),help)),no,yes)

.DEFAULT_GOAL := help
.PHONY: $(VERBS) help test test-all test-slurm test-gpu verify lint bench tables requirements clean .settings

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

$(READY): requirements.txt
	@if cmp -s requirements.txt $(READY); then touch $(READY); exit 0; fi; \
	if [ $(ONLY_REPORTS) = yes ] && [ -e $(READY) ] && $(PY) -c 'import slurm.reports.compare, slurm.reports.doctor, slurm.reports.wandb_sync' 2>/dev/null; then \
	  echo "note: requirements.txt has changed; the next command other than a report will update .venv" >&2; exit 0; \
	fi; \
	"$$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "error: $$PYTHON is missing or older than Python 3.11; set PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	"$$PYTHON" -m slurm --make --check || exit; \
	if grep -qsF "$$(readlink -f .venv)/" /proc/[0-9]*/maps; then \
	  echo "error: requirements.txt has changed while processes use .venv; stop them (make status, make cancel RUN=<id>) or wait for them to finish, then retry" >&2; exit 1; \
	fi; \
	if [ -e .venv ] && timeout 15 squeue --noheader --me --format='%A %Z' 2>/dev/null | grep -v "^$${SLURM_JOB_ID:-none} " | cut -d ' ' -f 2- | grep -qxF "$$(pwd -P)"; then \
	  echo "error: requirements.txt has changed while jobs of this folder use .venv; cancel them (make status, make cancel RUN=<id>) or wait for them to finish, then retry" >&2; exit 1; \
	fi; \
	MAKEFLAGS= $(MAKE) --no-print-directory --silent .environment

.PHONY: .environment
.environment:
	@"$$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $$PYTHON has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up .venv (needed only once; downloads about 3 GB)"
	@rm -rf .venv  # not `venv --clear`, which would empty the linked folder if .venv is a link
	@"$$PYTHON" -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@cp requirements.txt $(READY)

$(VERBS): $(READY)
	@$(PY) -m slurm --make $@

exp:  ## run an experiment: NAME=mnist_pipeline [NODES=2] [ARGS="key=value ..."] [LAUNCH= CLUSTER= FOLLOW=1 DRY_RUN=1 STRICT=1], or resume a run: RESUME=<id>
rerun:  ## repeat a run with its own settings and source, and compare the results bit for bit: RUN=<id> [ARGS="key=value ..."] [LAUNCH= CLUSTER=]
evaluate:  ## evaluate the trained model of a finished run in one process: RUN=<id> [ARGS="data.root=..."]
export:  ## export the trained model for other programs: RUN=<id> [FORMAT=safetensors|torch.export|onnx]
sample:  ## continue a text with the model of a run: RUN=<id> TEXT="def " [TEMPERATURE=1] [TOP_K=40] [SEED=0]
sweep:  ## run the points of a grid that are missing or can be resumed: GRID=configs/sweeps/<file>.yaml [FAILED=1 ARGS= LAUNCH= CLUSTER= FOLLOW=1 DRY_RUN=1], or compare all strategies of an experiment: GRID=configs/sweeps/strategies.py NAME= RANKS=4 [ROUNDS=5]
doctor:  ## check every host before a long job [NODES=2 ARGS="runs=... data.cache=..." LAUNCH= CLUSTER=], or find out why a run failed or hangs: RUN=<id> [JSON=1]
status:  ## show the state of the newest 20 runs, of all runs (ALL=1), or of one run: RUN=<id> [WAIT=seconds] [FOLLOW=1] [JSON=1]
logs:  ## show the output of rank 0 of a run: RUN=<id> [FOLLOW=1] [RAW=1]
note:  ## replace the notes of a run: RUN=<id> TEXT="..."
archive:  ## leave runs out of status and compare: RUNS="<id> <id>", or NAME= LAST= WHERE= SWEEP= [UNDO=1]
cancel:  ## stop a run: RUN=<id>
compare:  ## compare runs in a table and on an HTML page: the newest ten runs, or [RUNS="<id> <id>" NAME= LAST=5 WHERE="strategy=ddp test_accuracy>=0.98" SWEEP=<id>] [SORT=-test_accuracy] [GROUP=seed] [FOLLOW=1] [ALL=1] [PAGE=<file>] [JSON=1]
sync:  ## send data of ended runs that W&B does not have yet: all runs, or [RUNS= NAME= LAST= WHERE= SWEEP=] [DRY_RUN=1]
dashboard:  ## save a W&B workspace for comparing runs [PROJECT=entity/project] [DRY_RUN=1]
leet:  ## open W&B's terminal viewer on all runs, or [RUNS= NAME= LAST= WHERE= SWEEP=]
prune-runs:  ## list files that ended runs no longer need, or delete them with DELETE=1 [RUNS= NAME= LAST= WHERE= DRY_RUN=1]
tour:  ## run every experiment at its smallest size and compare the runs
new-experiment:  ## create the files of a new experiment that is ready to train: NAME=my_mlp
check-optimizer:  ## test a custom optimizer with schedules, checkpoints, skipped steps and shards: FILE=lion.py:Lion
cluster-up:  ## start a real SLURM cluster on this machine [NODES=2] [NAME=local] [RATE=200mbit] [DELAY=5ms] [DB=1 for accounting]
cluster-down:  ## stop a local cluster [NAME=local]
cluster-status:  ## show the hosts of a local cluster and their states [NAME=local]
cluster-shell:  ## open a shell on the controller of a local cluster, for sbatch, srun, squeue and sinfo [NAME=local]

.settings: $(READY)  # rejects variables that none of the targets accepts
	@$(PY) -m slurm --make --check

# Tests start thousands of processes. They write bytecode files, so that only the first process compiles a module.
test test-all test-slurm test-gpu verify: export PYTHONDONTWRITEBYTECODE =

test: .settings  ## run the fast tests, which need no network, SLURM or W&B account [TESTS="tests/unit/config -k 'a or b'"]
	@PYTEST_ADDOPTS="$$PYTEST_ADDOPTS "$(call given,TESTS) $(PY) -m pytest -o testpaths="$(FAST)" $(if $(filter TESTS,$(GIVEN)),,-m "not slow") --numprocesses 4 --dist worksteal

test-all: .settings  ## run the fast tests and slower ones: parity, recovery, compiler, export, browser, W&B host
	@$(PY) -m pytest $(FAST) tests/parity tests/recovery tests/complete -m "not omitted" --numprocesses 4 --dist worksteal
	@$(PY) -m tests.harness.verification.changed_clone

test-slurm: .settings  ## run the tests that need a real SLURM cluster
	@$(PY) -m pytest tests/cluster --numprocesses 4 --dist worksteal

test-gpu: .settings  ## run the tests that need an NVIDIA GPU; one GPU is enough
	@$(PY) -m pytest tests/gpu --numprocesses 6 --dist worksteal

verify: .settings  ## run every case of every list, all campaigns, planted mistakes and lint, without a time limit; continues if repeated
	@$(PY) -m tests.harness.verification.verify

lint: .settings  ## check the code with ruff (lint and format), mypy, readability rules and import-linter
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m tests.readability
	@$(PY) -m tests.readability.assignments
	@$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-cache --no-logo

bench: .settings  ## run comparison benchmarks within a time budget, and show which goals are met [NAME=ddp_multinode] [MINUTES=5]
	@$(PY) -m tests.benchmarks --minutes=$(call given,MINUTES) -- ""$(call given,NAME)

tables: .settings  ## update the measured tables and figures of the pages from tests/benchmarks/recorded/
	@$(PY) -m tests.benchmarks.tables

requirements: .settings  ## update the pinned dependencies in requirements.txt from pyproject.toml
	@$(PY) -m uv pip compile --universal --python-version 3.11 --extra dev --extra bench --extra dashboard --extra quantise --extra tokenizer --upgrade --quiet \
	  --annotation-style line --custom-compile-command "make requirements" pyproject.toml > .requirements.new
	@echo "-e .  # the project itself, so that scripts find its packages" >> .requirements.new
	@mv .requirements.new requirements.txt

clean:  ## delete .venv and caches, but keep runs and data
	$(if $(filter-out PYTHON,$(GIVEN)),$(error make clean has no settings))rm -rf .venv .pytest_cache .ruff_cache .mypy_cache *.egg-info
