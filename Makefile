# Two commands for a newcomer: `make demo` and `make test`. Everything lives in .venv.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Where this says not to keep bytecode, every process compiles PyTorch's sources anew: two seconds each, in a thousand starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-gpu lint docs package bench clean

demo: $(STAMP)
	$(BIN)/gradsync demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# On a machine with a GPU, or with several: ranks share them over NCCL.
test-gpu: $(STAMP)
	PYTHON=$(BIN)/python tests/gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples docs/*.py
	$(BIN)/ruff format --check src tests benchmarks examples docs/*.py
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo "The site is in build/site/index.html"

# An sdist, the wheel made from it, and that wheel at work in an environment that has nothing else.
package: $(STAMP)
	rm -rf build/dist build/clean && mkdir -p build
	$(BIN)/python -m build --outdir build/dist . >build/package.log 2>&1 || { cat build/package.log; exit 1; }
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt build/dist/*.whl
	cp tests/packaging/smoke.py build/clean/ && cd build/clean && bin/python smoke.py

bench: $(STAMP)
	$(BIN)/python benchmarks/engine/main.py $(ARGS)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/gradsync/kernels/native/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing gradsync and PyTorch into $(VENV) (the first time takes a minute or two)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
