# Each target does all the set-up it needs: a virtual environment in .venv, from pip alone.
# The first of these that runs and is new enough; `make demo PYTHON=...` chooses another.
PYTHON ?= $(shell for python in python3.12 python3.11 python3 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS := $(VENV)/clients
INSTALL := -m pip --disable-pip-version-check install --quiet
export OMP_NUM_THREADS ?= 1

.PHONY: demo help test test-gpu test-clients browser screenshots check bench clean

demo: $(VENV)/.installed  ## speak a sentence through a real local server, print its TTFA
	@echo "Starting a server of its own and saying a sentence ..."
	@$(BIN)/plosive say --local --out demo.wav \
		"Hello! I am Plosive, and this sentence left the server while it was still being spoken."
	@echo "TTFA is text sent to first audio packet. Listen to demo.wav; for more: source $(BIN)/activate"

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

test: check  ## lint, types, layering, then all tests that need no GPU
	PYTHONASYNCIODEBUG=1 $(BIN)/pytest -rs -m "not gpu"

test-gpu: $(VENV)/.installed-dev  ## the tests that need a CUDA device, then the gates of 8 bits
	$(BIN)/pytest -m gpu
	$(BIN)/python -m bench_ttfa.gate_quantised
	$(BIN)/python -m bench_ttfa.gate_quantised --model embedded:s2-pro --streams 64 --kv fp8
	$(BIN)/python -m bench_ttfa.gate_quantised --model random:s2-pro

test-clients: $(CLIENTS)/.installed  ## the agent frameworks (large), in an environment of their own
	$(CLIENTS)/bin/python -m pytest -W default tests_clients

browser:  ## Debian's chromium for the tests of the page, as root; without it they are skipped
	@tests/page/install_browser.sh

screenshots: $(VENV)/.installed-dev browser  ## the page's pictures in docs/page/, taken anew
	@$(BIN)/python -m tests.page.screenshots

check: $(VENV)/.installed-dev  ## ruff, ruff format, mypy --strict, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_layering.py tests/test_docs.py

bench: $(VENV)/.installed  ## latency sweep on this machine: c = 1, 2, 4
	@$(BIN)/python -m bench_ttfa

# The pinned torch is the tested one. The stamps are written last: a set-up that was cut short
# starts again.
$(VENV)/.installed: pyproject.toml
	$(if $(PYTHON),,$(error Plosive needs Python 3.11 or newer; name one with make PYTHON=...))
	@echo "Setting up $(VENV) with $(PYTHON): 1 to 5 GB, some minutes the first time ..."
	@$(BIN)/python -m pip --version > /dev/null 2>&1 \
		|| { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python $(INSTALL) torch==2.13.0 || $(BIN)/python $(INSTALL) "torch>=2.11"
	@$(BIN)/python $(INSTALL) --editable ".[server]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Adding the development tools ..."
	@$(BIN)/python $(INSTALL) --editable ".[server,dev]"
	@touch $@

# The frameworks pin what they need; all else, torch above all, is taken from the other environment.
$(CLIENTS)/.installed: $(VENV)/.installed-dev
	@echo "Setting up the agent frameworks in $(CLIENTS) ..."
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/server.pth"
	@$(CLIENTS)/bin/python $(INSTALL) --editable ".[server,dev,pipecat,livekit]" \
		"livekit-plugins-fishaudio>=1.8"
	@touch $@

clean:  ## the environments and caches away
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
