# make train            make the environment, and train ENV on NPROCS ranks
# make test             make the environment, and pass all checks and tests
# make test-all         the slow tests besides
#
# Elsewhere than on a machine whose pip gives a CPU build of torch:
#   make train PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

ENV ?= Walker2d
NPROCS ?= 2
ARGS ?=
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: train test test-all lint clean

train: $(READY)
	$(BIN)/python train.py $(ENV) --nprocs $(NPROCS) $(ARGS)

test: $(READY) lint
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY) lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable ".[mpi,mujoco,plot,dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
