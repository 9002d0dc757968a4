# Each target is complete on a fresh machine with Python 3.11 or newer: it makes .venv and installs.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test lint bench

demo: $(INSTALLED)
	$(BIN)/shardwise demo --zero 3 $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# DeepSpeed takes minutes to install and to start; without it the peers' table says that it is absent.
bench: $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e ".[bench]"
	-$(BIN)/python -m pip install -c constraints.txt -e ".[peers]"
	$(BIN)/python -m benchmarks.host_overhead
	$(BIN)/python -m benchmarks.tensor_overhead
	$(BIN)/python -m benchmarks.numerics
	$(BIN)/python -m benchmarks.norms
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.segments
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.cpu_step
	$(BIN)/python -m benchmarks.disk_engine
	$(BIN)/python -m benchmarks.disk_training

# torch first and alone: it is most of the download, and its version decides the rest.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,testing,hf]"
	touch $@
