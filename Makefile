# Each target sets up what it needs; a second run repeats no set-up.
PY := .venv/bin/python
BIN := .venv/bin
CORE := $(addprefix tests/,test_routing.py test_sequence.py test_layer.py test_tokens.py test_sparse.py models/test_classifier.py)

.PHONY: demo test lint test-slow test-data test-mutants bench reproduce clean

demo: .venv/installed
	$(BIN)/raytraced train

test: .venv/ready lint
	$(PY) -m pytest -n 2
	@echo "the core again without the compiled operations: the plain path is the definition"
	RAYTRACED_OPERATIONS=plain $(PY) -m pytest -n 2 $(CORE)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-slow: .venv/ready
	$(PY) -m pytest -m slow

test-data: .venv/ready
	$(PY) -m pytest -m data

# one small fault at a time in the core, until a test notices; goes on where it was stopped; see docs/testing.md
test-mutants: .venv/ready
	nice -n 15 $(PY) tests/mutants.py $(ARGS)

bench: .venv/bench-ready
	$(BIN)/raytraced benchmark

# e.g. make reproduce ARGS="--quick"; see docs/reproduce.md
reproduce: .venv/ready
	$(BIN)/raytraced reproduce $(ARGS)

# What the demo needs and no more; pip shows its progress.
.venv/installed: pyproject.toml constraints.txt setup.py $(wildcard src/raytraced/operations/cpu/*)
	@echo "setting up .venv: PyTorch and some small packages, then the compiled operations; a minute or two"
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/ready: .venv/installed
	@echo "adding what the tests need"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# the libraries that our top-2 is measured against; constraints.txt keeps torch the one that is there
.venv/bench-ready: .venv/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
