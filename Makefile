# On a fresh machine `make demo` and `make test` install what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-all judges quick check bench soak fuzz mutants docs install browser clean
SUDO   := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)
.DEFAULT_GOAL := test
export PYTHON
# Each of the thousands of processes that the tests and the demo start would compile what it imports, were Python told to
# write no bytecode: `import torch` takes twice as long then.
export PYTHONDONTWRITEBYTECODE :=

install: $(STAMP)

$(STAMP): pyproject.toml constraints/tests.txt
	@scripts/install.sh $(VENV) tests 'everything: torch, DeepSpeed, Ray and the tools of the tests (about 2 minutes)' \
		-e '.[all]' --group dev
	@touch $@

# The demo needs less than the tests. After `make install` it needs nothing more.
DEMO_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo)

$(VENV)/.installed-demo: pyproject.toml constraints/users.txt
	@scripts/install.sh $(VENV) users 'torch, DeepSpeed, Ray and transformers (about 1 minute)' -e '.[train,serve]'
	@touch $@

demo: $(DEMO_STAMP)
	@$(BIN)/python -m inference.demo

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# ruff, mypy and the files of tests that are marked as quick, about one minute on 2 cores; every package has some.
quick: check
	$(BIN)/python -m pytest -m quick -q -n 2 --dist loadfile

# The documentation as a site, in site/. A broken link or a page that the navigation lacks is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'site/index.html; to search, serve it: $(BIN)/python -m http.server -d site'

# The page of the inference service and the documentation are tested in a real Chromium, which Debian and Ubuntu have as a package.
browser:
	@command -v chromium >/dev/null || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends chromium; } || \
		echo 'Chromium is not installed and could not be: tests/inference/serving/http/test_page.py and tests/docs will fail; install it by hand.'

# Two processes at a time, each with whole files of tests, so that what a file's tests share is made once, in the
# order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20

# Most tests, every format there and back: 6 to 10 minutes on 2 cores.
test: $(STAMP)
	$(PYTEST) -m 'not extended'

# Where there is a newer Python, an environment with the newest frameworks, which need one.
JUDGES := .venv-judges
PYENVS := $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python $(HOME)/.pyenv/versions/3.12*/bin/python)
NEWER  := $(shell for each in python3.13 python3.12 $(PYENVS); do $$each -c '' 2>/dev/null && echo $$each && break; done)

# All tests except those of the soak, about 25 minutes on 2 cores. With ONLY=extended, without what `make test` runs.
test-all: check browser $(if $(NEWER),$(JUDGES)/.installed)
	$(PYTEST) $(if $(ONLY),-m $(ONLY))

$(JUDGES)/.installed: pyproject.toml constraints/judges.txt
	@PYTHON=$(NEWER) scripts/install.sh $(JUDGES) judges 'the newest frameworks (about 2 minutes)' -e '.[all]' --group dev
	@touch $@

# The tests marked `judges` again, in that environment: the newest frameworks write the checkpoints and load ours.
judges: $(if $(NEWER),$(JUDGES)/.installed)
	@$(if $(NEWER),$(JUDGES)/bin/python -m pytest -m judges -q -n 2 --dist loadfile,\
		echo 'Not run: the newest frameworks need Python 3.12 or 3.13, which this machine lacks.')

# All tests, and all of what `make test-all` has a sample of: the full matrix of formats and world sizes, with its
# table, every recipe, every damage to every layout of the corpus, the casts of all 2**32 float32 patterns, a kill at every
# system call that writes, random trees around a destination, kills of conversions on Ray and of training runs, every
# strategy of training, the examples on Ray, both notebooks, a minute of 64 clients of the service, a minute of
# checkpoints that are replaced under it, 20,000 hostile files and a million mutated ones under real loaders, a million
# pickles beside both of CPython's unpicklers, and every extra installed from the package index. Some hours.
soak: $(STAMP) judges
	$(BIN)/python -m pytest --soak -q --timeout=3600

# A million damaged checkpoints through every reader, in as many processes as there are processors; a quarter of an
# hour of one. ARGS as `python -m tests.end_to_end.fuzzing --help` says.
fuzz: $(STAMP)
	$(BIN)/python -m tests.end_to_end.fuzzing $(ARGS)

# How many small faults in the converter the tests notice: 150 changed operators, constants and return values, each with
# the tests that pass it. About an hour and a half on 2 cores. ARGS as `python -m scripts.mutants --help` says.
mutants: $(STAMP)
	$(BIN)/python -m scripts.mutants $(ARGS)

# Against the peers and cp: hours at its full size. Goes on where it was stopped; ARGS as `python -m benchmarks --help` says.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(JUDGES) demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
