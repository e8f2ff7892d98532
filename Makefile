# Each target does all the set-up it needs: a virtual environment in .venv, from pip alone.
PYTHON ?= $(firstword $(shell command -v python3.12 python3.11 python3))
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-clients check bench clean

demo: $(VENV)/.installed  ## speak a sentence through a real local server, print its TTFA
	$(BIN)/plosive say "Hello! I am Plosive, and this sentence left the server while it was still being spoken." --out demo.wav

test: check  ## lint, types, layering, then all tests that need no GPU
	PYTHONASYNCIODEBUG=1 $(BIN)/pytest -m "not gpu"

test-clients: $(VENV)/clients/.installed  ## the agent frameworks (large), in an environment of their own
	$(VENV)/clients/bin/pytest -W default tests_clients

check: $(VENV)/.installed-dev  ## ruff, ruff format, mypy --strict, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_layering.py tests/test_docs.py

bench: $(VENV)/.installed  ## latency sweep on this machine: c = 1, 2, 4
	$(BIN)/python -m bench_ttfa

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A CPU build of torch where one is to be had: a tenth of the size, and all that the demo needs.
$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/pip install --quiet torch==2.13.0 || $(BIN)/pip install --quiet "torch>=2.11"
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/clients/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m venv $(VENV)/clients
	$(VENV)/clients/bin/pip install --quiet torch==2.13.0 || $(VENV)/clients/bin/pip install --quiet "torch>=2.11"
	$(VENV)/clients/bin/pip install --quiet --editable ".[dev,pipecat,livekit]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
