# Every target creates .venv from requirements.lock first, when it is missing or older than the lock.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# These fork processes that train, which torch allows only where nothing has trained before.
FORKING := tests/training/test_processes.py

.PHONY: setup demo test coverage check format lint types bench clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: $(STAMP)          ## train ConViT and its DeiT twin on digits, write demo/report.html
	$(BIN)/locality demo

test: $(STAMP)          ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --ignore $(FORKING)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FORKING)

coverage: $(STAMP)      ## the same with line coverage, which nearly doubles its time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --cov --cov-report= \
	  --ignore $(FORKING)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FORKING) --cov --cov-append \
	  --cov-report=term:skip-covered

check: format lint types test   ## what continuous integration runs

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)         ## speed and memory against timm and transformers, written to benchmarks/results
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) demo build .pytest_cache .mypy_cache .ruff_cache .coverage*
