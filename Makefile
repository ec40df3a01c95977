# `make stages` and `make test` set .venv up, from the lock, on the first call.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock

.PHONY: stages test matrix check lock clean

stages: $(VENV)/.ready
	$(BIN)/pytest --gkd-stages

test: $(VENV)/.ready
	$(BIN)/pytest

# Every fault that can be injected, for real; make matrix FAULT=rank-killed for one. The
# plugin stays out of this outer run: there -k would name stages.
matrix: $(VENV)/.ready
	$(BIN)/pytest -p no:gkd matrix -n2 $(if $(FAULT),-k "$(FAULT)")

# Lint, types, layers: what needs no run.
check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/.ready: $(LOCK) pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"Python {v[0]}.{v[1]} found; 3.11 to 3.13 is needed. Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-deps -r $(LOCK) || { echo "The lock needs torch's CPU wheel (torch==2.13.0+cpu). Point pip at PyTorch's CPU wheel index (PIP_EXTRA_INDEX_URL) or at a folder that holds the wheel (PIP_FIND_LINKS)."; exit 1; }
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# Remakes the lock for all supported Pythons. Needs the network.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install -q uv
	$(VENV)-lock/bin/uv pip compile --config-file requirements/uv.toml --universal --upgrade \
	  --python-version 3.11 --override requirements/overrides.txt --no-header --quiet \
	  --no-annotate --custom-compile-command "make lock" requirements/cpu.in -o $(LOCK)
	sed -i 's/^torch==2.13.0$$/torch==2.13.0+cpu/' $(LOCK)
	sed -i '1i # Made by `make lock` from requirements/cpu.in; installed with --no-deps.' $(LOCK)
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) .gkd
