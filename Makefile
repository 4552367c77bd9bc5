# What a person types: `make demo` (from nothing to a running engine), `make test`, `make lint`, `make docs`.
# PYTHON is used once, to make .venv; everything is installed there and nowhere else.

PYTHON ?= python3
VENV ?= .venv
OUT ?= out/demo
# Each worker has half of the files, and takes from the other what is left: what a file makes once is made once.
PYTEST_OPTIONS ?= -n 2 --dist worksteal

COVERED := out/coverage
BIN := $(VENV)/bin
# Python compiles what is imported, and keeps it (whatever the environment says): each of the many processes that import
# torch would compile it anew, for seconds. pip would compile ten times as much, for minutes.
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
TORCH := $(shell grep '^torch==' constraints.txt)
TRITON := $(shell grep '^nvidia-pytriton==' constraints.txt)

.PHONY: demo test test-all coverage lint docs wheels format clean

demo: $(VENV)/.runs
	PATH="$(abspath $(BIN)):$$PATH" sh demo/run.sh $(OUT)
	@printf '\nNext: . $(BIN)/activate\n      tide-export --help\n'

test: $(VENV)/.tests
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_OPTIONS)  # one thread per worker: more would starve each other

# Whatever is exhaustive too: before a release, and after a change of tide_export/trace, cpp/ops or plugins.
test-all: $(VENV)/.tests
	TIDE_TEST_ALL=1 OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_OPTIONS)

# What the tests of `make test` run of each folder, Python and C++: in a clone of the last commit whose library counts (GCC)
# and which has no traces yet. tools/checks/coverage_table.py $(COVERED) prints the table once more.
coverage: $(VENV)/.tests
	rm -rf $(COVERED)
	git clone -q . $(COVERED)
	ln -s $(abspath $(VENV)) $(COVERED)/.venv
	cd $(COVERED) && export TIDE_CXXFLAGS="--coverage -O1 -fprofile-update=atomic" PYTHONPATH=$(abspath $(COVERED)) \
		TIDE_TEST_STORE= OMP_NUM_THREADS=1; \
		.venv/bin/python setup.py -q build_ext --inplace || exit 1; \
		.venv/bin/pytest $(PYTEST_OPTIONS) --cov --cov-report=json; failed=$$?; \
		.venv/bin/python tools/checks/coverage_table.py . && exit $$failed

lint: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.tests
	$(BIN)/python docs/generated.py
	$(BIN)/python tools/checks/prose.py
	$(BIN)/mkdocs build --strict

# For each machine, by the compiler in PyPI's ziglang, which brings the C library of each.
wheels:
	for machine in x86_64 aarch64; do \
		TIDE_WHEEL=$$machine $(PYTHON) -m pip wheel --no-deps --wheel-dir out/wheels . || exit; \
	done

format: $(VENV)/.tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out build

# The stamps are younger than pyproject.toml and constraints.txt, so a changed dependency installs again and nothing else
# does. torch goes first and exactly pinned: a looser pin would fetch several GB of CUDA libraries.
# nvidia-pytriton is there for the tritonserver in it, without what its Python asks for (numpy 1).
$(VENV)/.torch: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tide_export needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.runs: $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[export,cpu]'
	touch $@

# After the demo's, where both are asked for: two pips at once would spoil the environment.
$(VENV)/.tests: $(VENV)/.torch | $(if $(filter demo,$(MAKECMDGOALS)),$(VENV)/.runs)
	$(PIP) -c constraints.txt -e '.[export,cpu,test]'
	$(PIP) --no-deps $(TRITON)
	touch $@
