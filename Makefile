# Three sets of exact versions: requirements.lock is what running needs, requirements-test.lock what
# the tests need on top, requirements-docs.lock what the site needs on top of those. Targets install what they need into .venv when a lock is newer.
# Without a GPU, PyTorch's CPU build saves most of the download:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON      ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN  := $(VENV)/bin
RUN  := $(VENV)/.installed
TEST := $(VENV)/.installed-test
DOCS := $(VENV)/.installed-docs
# Python compiles a module when it is first imported; compiling all of them takes a minute. Where
# the environment forbids keeping the result, as in many containers, every start of every command
# would compile PyTorch anew, for 7 of its 11 seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP  := $(BIN)/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# A file's tests stay together: what they share is made once.
TWO := --numprocesses 2 --dist loadfile

.PHONY: setup demo test test-slow coverage check format lint types bench pages gallery docs dist release clean

setup: $(RUN)

$(RUN): requirements.lock pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --requirement requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $(RUN)

$(TEST): $(RUN) requirements-test.lock
	$(PIP) --requirement requirements-test.lock
	touch $(TEST)

$(DOCS): $(TEST) requirements-docs.lock
	$(PIP) --requirement requirements-docs.lock
	touch $(DOCS)

demo: $(RUN)            ## fine-tune ConViT, DeiT and CvT on photographs, write demo/report.html
	$(BIN)/locality demo

test: $(TEST)           ## the fast tests: what one wants before a commit
	$(PYTEST) $(TWO)

test-slow: $(DOCS)      ## processes, browser, compiler, whole experiments, the site
	$(PYTEST) $(TWO) -m slow

coverage: $(DOCS)       ## both with line coverage, which nearly doubles their time
	$(PYTEST) $(TWO) --cov --cov-report=term:skip-covered -m "slow or not slow"

check: format lint types test   ## before a commit; continuous integration adds test-slow

format: $(TEST)
	$(BIN)/ruff format --check .

lint: $(TEST)
	$(BIN)/ruff check .

types: $(TEST)
	$(BIN)/mypy

bench: $(TEST)          ## speed and memory against timm and transformers, written to benchmarks/results
	$(BIN)/python benchmarks/run.py

pages: $(RUN)           ## docs/findings.md, docs/results/ and the README's findings from the records in results/
	$(BIN)/python -m locality_papers.pages

gallery: $(DOCS)        ## the pictures of docs/gallery.md, in docs/gallery/; needs chromium
	$(BIN)/python docs/gallery.py

docs: $(DOCS)           ## the pages of docs/ and a reference of every public name, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(TEST)           ## an sdist and, from it, a wheel, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

DRY ?= 1
release: dist docs      ## wheel, sdist, site, and checks of a release; with DRY= a tag, too
	DRY=$(DRY) .ci/release

clean:
	rm -rf $(VENV) demo site build dist .pytest_cache .mypy_cache .ruff_cache .coverage*
