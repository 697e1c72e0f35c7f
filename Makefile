# Two commands are all you need: `make run` and `make test`. Both set everything up by themselves, in .venv.

PYTHON ?= python3
CONFIG ?=
ARGS ?=
# More than two cores need: a test of a whole workflow waits for half of its time.
JOBS ?= 4
GPU_PYTHON ?= 3.12
GPU_MACHINE ?= x86_64
GPU_DEVICE ?= NVIDIA H200
# A Python with torch for CUDA, of the version GPU_PYTHON: then the bundle carries compiled code for GPU_DEVICE.
CUDA_PYTHON ?=
BIN := .venv/bin
# `--snakefile` ends the list of files that `--configfile` takes, so that targets may follow in ARGS.
SNAKEMAKE = PATH="$(CURDIR)/$(BIN):$$PATH" "$(BIN)/snakemake" $(if $(CONFIG),--configfile "$(CONFIG)") --snakefile Snakefile
# Fails where the configuration cannot be read, and prints its results folder.
RESULTS_FOLDER = "$(BIN)/python" -m spider.config.schema "$(or $(CONFIG),config.yaml)"
# One call for all, so that pip finds the core that the extras need.
EXTRAS := $(patsubst %/pyproject.toml,--editable %,$(wildcard extras/*/pyproject.toml))
PIP_INSTALL := "$(BIN)/python" -m pip install --quiet --disable-pip-version-check --use-pep517 --constraint constraints.txt

.PHONY: help run test test-long lint format ui report findings gpu-bundle clean

help:
	@echo "make run      train and evaluate what config.yaml says (CONFIG=presets/smoke.yaml for another)"
	@echo "make test     run the tests"
	@echo "make test-long  run the tests that take minutes"
	@echo "make lint     check style, types and the Snakefile"
	@echo "make ui       look at all runs in MLflow"
	@echo "make report   write report.html into the results folder: Snakemake's report of the last run (CONFIG=... as for run)"
	@echo "make findings  check one by one that other software still surprises as findings/ says: minutes each, a network"
	@echo "make gpu-bundle  collect in build/gpu-bundle what a machine with a GPU and no network lacks (docs/gpu.md)"
	@echo "make clean    remove everything that was made, after asking"

run: .venv/run-ready
	@$(RESULTS_FOLDER) >/dev/null
	@$(SNAKEMAKE) $(ARGS)

test: .venv/dev-ready
	@"$(BIN)/python" -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: .venv/dev-ready
	@"$(BIN)/python" -m pytest -m long $(ARGS)

lint: .venv/dev-ready
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/snakefmt" --check Snakefile workflow rules extras
	@"$(BIN)/mypy"
	@test ! -x "$(BIN)/hadolint" || "$(BIN)/hadolint" Dockerfile

format: .venv/dev-ready
	@"$(BIN)/ruff" check --fix --quiet .
	@"$(BIN)/ruff" format --quiet .
	@"$(BIN)/snakefmt" Snakefile workflow rules extras

ui: .venv/run-ready
	@"$(BIN)/spider" $(if $(CONFIG),--config "$(CONFIG)") track ui $(ARGS)

report: .venv/run-ready
	@results=$$($(RESULTS_FOLDER)) && $(SNAKEMAKE) --report "$$results/report.html"

findings:
	@status=0; for script in findings/*.sh; do \
		echo "$$script"; bash "$$script" || { echo "$$script: not as it says (status $$?)"; status=1; }; \
	done; exit $$status

gpu-bundle: .venv/run-ready
	@"$(BIN)/python" benchmarks/gpu/bundle.py --python $(GPU_PYTHON) --machine $(GPU_MACHINE) \
		--device "$(GPU_DEVICE)" $(if $(CUDA_PYTHON),--cuda-python "$(CUDA_PYTHON)")

clean:
	@printf "Remove results/, .snakemake/ and .venv/, trained models included? [y/N] "; \
	read answer; if [ "$$answer" = y ]; then rm -rf results .snakemake .venv; fi

.venv/run-ready: pyproject.toml constraints.txt $(wildcard extras/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Spider needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@test -x "$(BIN)/python" || $(PYTHON) -m venv .venv
	@echo "Installing Spider and its dependencies into .venv (some minutes, once)"
	@$(PIP_INSTALL) --editable . $(EXTRAS)
	@mkdir -p build && "$(BIN)/spider" config schema > build/config.schema.json
	@touch $@

.venv/dev-ready: .venv/run-ready
	@$(PIP_INSTALL) --editable '.[dev]' $(EXTRAS)
	@touch $@
