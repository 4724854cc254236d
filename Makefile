# Two commands for a newcomer: `make demo` and `make test`. Everything lives in .venv.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint bench clean

demo: $(STAMP)
	$(BIN)/gradsync demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/engine/main.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/gradsync/kernels/native/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing gradsync and PyTorch into $(VENV) (the first time takes a minute or two)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
