# Every target makes its own environment first: `make train` works in a fresh clone. Pass options on in ARGS:
#   make train ARGS="--compare"        make test ARGS=tests/unit        make bench ARGS="step"
# `make test` runs what a newcomer should see pass; `make test-all` runs the rest: tests marked `slow`, and those that
# tests/slow.py lists; `make test-deep` runs more cases of the same, for whoever has changed what they are about.
VENV ?= .venv
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(name)),$(name))))
TORCH ?= torch==2.13.0
ARGS ?=

BIN := $(VENV)/bin
# As many files at a time as there are cores, because ranks wait for one another most of the time; each file has worlds
# of its own, so no more than eight.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Warnings are errors: a page in no table of contents, a link into nothing, a docstring that cannot be read.
SPHINX := -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs
BENCHMARKS := step compile host memory collectives scale optimizer muon checkpoint plan
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

.DEFAULT_GOAL := help
.PHONY: help venv train test test-all test-deep check bench gpu docs clean

help:
	@echo "make train | test | test-all | test-deep | check | bench | gpu | docs | venv | clean    (options: make train ARGS=\"...\")"

$(STAMP): pyproject.toml
	@$(BIN)/python -c "import pip" 2>/dev/null || { echo "make: creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "make: installing $(TORCH) into $(VENV) (once, a minute or two)"
	@$(PIP) "$(TORCH)"
	@echo "make: installing dshard with its development tools"
	@$(PIP) --editable ".[dev,test,cli,interop]"
	@touch $@

venv: $(STAMP)

train: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/train.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(or $(strip $(ARGS)),-m "not slow" $(SIDE_BY_SIDE))

test-all: $(STAMP)
	$(BIN)/python -m pytest $(or $(strip $(ARGS)),-m "slow and not deep" $(SIDE_BY_SIDE))

test-deep: $(STAMP)
	$(BIN)/python -m pytest $(or $(strip $(ARGS)),-m deep $(SIDE_BY_SIDE))

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
ifeq ($(strip $(ARGS)),)
	set -e; for each in $(BENCHMARKS); do OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $$each; done
else
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ARGS)
endif

# By the interpreter that has a torch for the device: that of $(VENV), or of GPU_PYTHON.
gpu:
	OMP_NUM_THREADS=1 $(or $(GPU_PYTHON),$(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu $(ARGS)

docs: $(STAMP)
	$(BIN)/python $(SPHINX)
	@echo "make: the first page is build/docs/index.html"

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
