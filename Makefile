# Two commands: `make demo` and `make test`. Each makes its own .venv and installs what it needs.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python3.13; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
# An editable install compiles the native libraries.
INSTALLED = pyproject.toml constraints.txt hatch_build.py \
	$(addprefix src/batchloom/,core/native.py batches/assembly/kernel.c text/words.c)

# make test PYTEST_ARGS="-p randomly" runs the tests in a random order, as CI does.
# Two processes: each imports what it tests, and with the processes and servers of tests they keep two cores busy.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
# Processes that tests start read compiled modules instead of compiling them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-slow golden explore mutants lint docs bench clean

demo: .venv/.demo
	$(BIN)/batchloom demo

# The fast tier. Files run side by side.
test: .venv/.test lint
	$(PYTEST)

# Everything: long kill series, every framework on two processes, properties with all their examples.
test-all: .venv/.test lint
	$(PYTEST) --tier all

# The slow tier, or one part of it: make test-slow SLICE=3/8.
test-slow: .venv/.test
	$(PYTEST) --tier slow $(if $(SLICE),--slice $(SLICE))

# Bytes of stores, plans, batches, states and outputs against what earlier versions gave.
golden: .venv/.test
	$(BIN)/python -m pytest -q tests/golden

# Search for inputs that break a property, with new seeds: make explore MINUTES=20.
explore: .venv/.test
	$(BIN)/python tests/explore.py --minutes $(or $(MINUTES),20)

# Plant faults one by one, and see that a test fails for each: make mutants ARGS="--list".
mutants: .venv/.test
	$(BIN)/python tests/mutation/run.py $(ARGS)

lint: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in docs/_build: a broken link or a page outside the navigation is an error.
docs: .venv/.test
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs docs/_build
	@echo "Open docs/_build/index.html"

bench: .venv-bench/.bench
	for b in chart load first_batch pack share read prepare chain dedup quality; do .venv-bench/bin/python bench/$$b.py --peers || exit 1; done

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "batchloom needs Python 3.11 or newer; install it, or give make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/.demo: .venv/bin/python $(INSTALLED)
	@echo "Installing batchloom and torch into .venv: about a minute, longer on a slow network."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

.venv/.test: .venv/bin/python $(INSTALLED)
	@echo "Installing batchloom and what its tests need into .venv: about a minute, longer on a slow network."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable '.[all]'
# They want older versions of what is tested beside them; the tests read files of axolotl, which import the last two.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchtitan axolotl mistral-common pydantic-extra-types pycountry colorama addict
	touch $@ .venv/.demo

# A virtual environment of its own: a peer brings torchvision, which breaks transformers beside a CPU torch.
.venv-bench/.bench: $(INSTALLED)
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --upgrade pip
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt --group bench --editable '.[all]'
# It wants an older google-cloud-storage than gcsfs; what is measured of it needs neither.
	.venv-bench/bin/python -m pip install --quiet --constraint constraints.txt --no-deps mosaicml-streaming==0.13.0 python-snappy cramjam Brotli zstd
	touch $@

clean:
	rm -rf .venv .venv-bench demo
