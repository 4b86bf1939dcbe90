# Everything a person or CI runs. Variables reach Python as arguments, as they were written, and are checked there.
# Only those of the command line count (WSL, for one, has a NAME in its environment), and each target knows its own.
# `override X := $(value X)` keeps make from expanding what a value contains; "$$X" keeps the shell from it.
SHELL := /bin/sh
override CHOICE := RUNS NAME LAST WHERE SWEEP
override KNOWN-exp := NAME NODES ARGS LAUNCH CLUSTER FOLLOW DRY_RUN STRICT RESUME
override KNOWN-rerun := RUN ARGS LAUNCH CLUSTER
override KNOWN-sweep := GRID ARGS LAUNCH CLUSTER FAILED FOLLOW DRY_RUN
override KNOWN-evaluate := RUN ARGS
override KNOWN-export := RUN FORMAT
override KNOWN-doctor := NODES ARGS LAUNCH CLUSTER RUN JSON
override KNOWN-status := RUN WAIT JSON
override KNOWN-logs := RUN FOLLOW
override KNOWN-cancel := RUN
override KNOWN-compare := $(CHOICE) PAGE JSON
override KNOWN-sync := $(CHOICE) DRY_RUN
override KNOWN-dashboard := PROJECT DRY_RUN
override KNOWN-leet := $(CHOICE)
override KNOWN-prune-runs := RUNS NAME LAST WHERE DRY_RUN
override KNOWN-cluster-up := NAME NODES DB
override KNOWN-cluster-down := NAME
override KNOWN-cluster-status := NAME
override KNOWN-cluster-shell := NAME
override KNOWN-test := TESTS
override KNOWN-bench := NAME MINUTES
override GIVEN := $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $v))),$v))
override KNOWN := PYTHON $(foreach target,$(MAKECMDGOALS),$(KNOWN-$(target)))
override UNKNOWN := $(filter-out $(KNOWN),$(GIVEN))
$(if $(UNKNOWN),$(error make $(MAKECMDGOALS) has no setting $(UNKNOWN); it has $(strip $(KNOWN))))
PYTHON ?= python3
override SETTINGS := $(sort $(filter-out $(GIVEN),$(foreach v,$(filter KNOWN-%,$(.VARIABLES)),$($v))))
$(foreach v,$(SETTINGS),$(eval override $v :=))
$(foreach v,$(GIVEN) PYTHON,$(eval override $v := $$(value $v)))
export $(SETTINGS) $(GIVEN) PYTHON
override PY := .venv/bin/python
override READY := .venv/.ready
override FAST := tests/unit tests/experiments tests/pitfalls tests/commands

.DEFAULT_GOAL := help
.PHONY: help exp rerun evaluate export sweep doctor status logs cancel compare sync dashboard leet prune-runs tour \
  cluster-up cluster-down cluster-status cluster-shell test test-all test-slurm lint bench tables requirements clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

$(READY): requirements.txt
	@if cmp -s requirements.txt $(READY); then touch $(READY); exit 0; fi; \
	if grep -qsF "$$(readlink -f .venv)/" /proc/[0-9]*/maps; then \
	  echo "error: requirements.txt has changed, and processes still use .venv; end them, or wait (make status), then again" >&2; exit 1; \
	fi; \
	MAKEFLAGS= $(MAKE) --no-print-directory --silent .environment

.PHONY: .environment
.environment:
	@"$$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "error: $$PYTHON is missing or older than Python 3.11; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $$PYTHON has no venv; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up .venv (once; downloads about 3 GB)"
	@rm -rf .venv  # not `venv --clear`: where .venv is a link, that would empty the folder behind it
	@"$$PYTHON" -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@cp requirements.txt $(READY)

exp: $(READY)  ## run an experiment: NAME=mnist_pipeline [NODES=2] [ARGS="key=value ..."] [LAUNCH= CLUSTER= FOLLOW=1 DRY_RUN=1 STRICT=1] or RESUME=<id>
	@$(PY) -m slurm.launch.submit --nodes="$$NODES" --args="$$ARGS" --launch="$$LAUNCH" --cluster="$$CLUSTER" \
	  --follow="$$FOLLOW" --dry-run="$$DRY_RUN" --strict="$$STRICT" --resume="$$RESUME" -- "$$NAME"

rerun: $(READY)  ## repeat a run from its own settings and source, and compare to the bit: RUN=<id> [ARGS="key=value ..."] [LAUNCH= CLUSTER=]
	@$(PY) -m slurm.launch.rerun --args="$$ARGS" --launch="$$LAUNCH" --cluster="$$CLUSTER" -- "$$RUN"

evaluate: $(READY)  ## measure the trained model of a finished run again, in one process: RUN=<id> [ARGS="data.root=..."]
	@$(PY) -m slurm.reports.trained_model --args="$$ARGS" -- evaluate "$$RUN"

export: $(READY)  ## write the trained model for other programs: RUN=<id> [FORMAT=safetensors|torch.export|onnx]
	@$(PY) -m slurm.reports.trained_model --format="$$FORMAT" -- export "$$RUN"

sweep: $(READY)  ## every point of a grid as a run of its own; again, only what is missing: GRID=configs/sweeps/<file>.yaml [FAILED=1 ARGS= LAUNCH= CLUSTER= FOLLOW=1 DRY_RUN=1]
	@$(PY) -m slurm.launch.sweep --args="$$ARGS" --launch="$$LAUNCH" --cluster="$$CLUSTER" --failed="$$FAILED" \
	  --follow="$$FOLLOW" --dry-run="$$DRY_RUN" -- "$$GRID"

doctor: $(READY)  ## look at every host before a long job [NODES=2 ARGS="runs=... data.cache=..." LAUNCH= CLUSTER=], or at a run that failed or hangs: RUN=<id> [JSON=1]
	@$(PY) -m slurm.reports.doctor --nodes="$$NODES" --args="$$ARGS" --launch="$$LAUNCH" --cluster="$$CLUSTER" \
	  --run="$$RUN" --json="$$JSON"

status: $(READY)  ## how runs are doing [RUN=<id>] [WAIT=seconds] [JSON=1]
	@$(PY) -m slurm.reports.status --wait="$$WAIT" --json="$$JSON" -- status "$$RUN"

logs: $(READY)  ## what rank 0 of a run said: RUN=<id> [FOLLOW=1]
	@$(PY) -m slurm.reports.status --follow="$$FOLLOW" -- logs "$$RUN"

cancel: $(READY)  ## end a run: RUN=<id>
	@$(PY) -m slurm.reports.status -- cancel "$$RUN"

compare: $(READY)  ## runs side by side, here and in a browser: the newest ten, or [RUNS="<id> <id>" NAME= LAST=5 WHERE="strategy=ddp" SWEEP=<id>] [PAGE=<file>] [JSON=1]
	@$(PY) -m slurm.reports.compare --pick="$$RUNS" --name="$$NAME" --last="$$LAST" --where="$$WHERE" --sweep="$$SWEEP" \
	  --page="$$PAGE" --json="$$JSON"

sync: $(READY)  ## send to W&B what runs without a network left, each once and in order: all, or [RUNS= NAME= LAST= WHERE= SWEEP=] [DRY_RUN=1]
	@$(PY) -m slurm.reports.wandb_sync sync --pick="$$RUNS" --name="$$NAME" --last="$$LAST" --where="$$WHERE" --sweep="$$SWEEP" \
	  --dry-run="$$DRY_RUN"

dashboard: $(READY)  ## make the W&B workspace for comparing runs [PROJECT=entity/project] [DRY_RUN=1]
	@$(PY) -m slurm.reports.wandb_dashboard --project="$$PROJECT" --dry-run="$$DRY_RUN"

leet: $(READY)  ## W&B's viewer in the terminal, on all runs or [RUNS= NAME= LAST= WHERE= SWEEP=]
	@$(PY) -m slurm.reports.wandb_sync leet --pick="$$RUNS" --name="$$NAME" --last="$$LAST" --where="$$WHERE" --sweep="$$SWEEP"

prune-runs: $(READY)  ## show what runs that are over can do without; DRY_RUN=0 frees it [RUNS= NAME= LAST= WHERE=]
	@$(PY) -m slurm.reports.prune_runs --pick="$$RUNS" --name="$$NAME" --last="$$LAST" --where="$$WHERE" --dry-run="$$DRY_RUN"

tour: $(READY)  ## every experiment at its smallest, then all of them side by side
	@$(PY) -m slurm.launch.tour

cluster-up: $(READY)  ## start a real SLURM cluster on this machine [NODES=2] [NAME=local] [DB=1, with accounting]
	@$(PY) -m slurm.local_cluster.cli up --name="$$NAME" --nodes="$$NODES" --db="$$DB"

cluster-down: $(READY)  ## end it [NAME=local]
	@$(PY) -m slurm.local_cluster.cli down --name="$$NAME"

cluster-status: $(READY)  ## its hosts and their state [NAME=local]
	@$(PY) -m slurm.local_cluster.cli status --name="$$NAME"

cluster-shell: $(READY)  ## a shell on its controller: sbatch, srun, squeue, sinfo [NAME=local]
	@$(PY) -m slurm.local_cluster.cli shell --name="$$NAME"

test: $(READY)  ## the fast tests: no network, no SLURM, no account [TESTS="tests/unit/core -k name"]
	@$(PY) -m pytest $${TESTS:-$(FAST)} --numprocesses 2 --dist worksteal

test-all: $(READY)  ## these, and every combination: parity, recovery, compiler, export, browser, W&B host
	@$(PY) -m pytest $(FAST) tests/parity tests/recovery tests/complete --numprocesses 2 --dist worksteal

test-slurm: $(READY)  ## the tests that need a real SLURM cluster
	@$(PY) -m pytest tests/cluster --numprocesses 4 --dist worksteal

lint: $(READY)  ## ruff (lint and format), mypy, and the order of imports
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-cache --no-logo

bench: $(READY)  ## measure side by side, within a budget, and show goals met or missed [NAME=ddp_multinode] [MINUTES=5]
	@$(PY) -m tests.benchmarks --minutes="$$MINUTES" -- "$$NAME"

tables: $(READY)  ## write the measured tables and figures of the pages from tests/benchmarks/recorded/
	@$(PY) -m tests.benchmarks.tables

requirements: $(READY)  ## pin all dependencies of pyproject.toml anew into requirements.txt
	@$(PY) -m uv pip compile --universal --python-version 3.11 --extra dev --extra bench --extra dashboard --extra quantise --upgrade --quiet \
	  --annotation-style line --custom-compile-command "make requirements" pyproject.toml > .requirements.new
	@echo "-e .  # the project itself, so that scripts find its packages" >> .requirements.new
	@mv .requirements.new requirements.txt

clean:  ## delete .venv and caches (runs and data stay)
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache *.egg-info
