# Each target sets up what it needs; a second run repeats no set-up.
PY := .venv/bin/python
BIN := .venv/bin
CORE := $(addprefix tests/,test_routing.py test_sequence.py test_layer.py test_tokens.py test_sparse.py models/test_classifier.py)
PLAIN := RAYTRACED_KERNELS=plain $(PY) -m pytest -p no:cacheprovider $(CORE)
KERNELS := tests/kernels/test_sequence_triton.py
# where it is set, every process that a test starts would compile the whole package again
unexport PYTHONDONTWRITEBYTECODE
# a hard limit, beside that of every test; several times what the tests take on two cores
LIMIT := $(if $(shell command -v timeout),timeout --foreground --verbose --kill-after=30 2400)

.PHONY: demo test test-whole lint lint-and-plain test-slow test-sanitizers test-data test-triton test-gpu test-mutants bench reproduce guard screenshots reference tables notebooks docs wheels test-packages clean

demo: .venv/installed
	$(BIN)/raytraced train

# Two at a time: while one waits for a process or a disk, the other has its core.
test: .venv/ready
	@$(MAKE) --no-print-directory -j2 test-whole lint-and-plain

test-whole:
	$(LIMIT) $(PY) -m pytest -n 2 --dist worksteal

lint-and-plain: lint
	@$(PLAIN) > .venv/plain.log 2>&1 || failed=1; \
	echo "the core again without the compiled kernels: the plain path is the definition"; \
	cat .venv/plain.log; test -z "$$failed"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-slow: .venv/wheels-ready test-sanitizers
	$(PY) -m pytest -m slow

# the compiled kernels with every memory access and undefined operation checked (GCC), against the plain path; some minutes
SANITIZED := $(addprefix tests/kernels/test_,sequence_cpp.py experts_cpp.py raytrace_cpp.py raytrace_gradients.py early_exit_cpp.py convolution_cpp.py) tests/store/test_stored_experts.py
test-sanitizers: .venv/ready
	rm -rf build/sanitizers
	RAYTRACED_SANITIZE=1 $(PY) setup.py -q build --build-base build/sanitizers/objects --build-lib build/sanitizers/lib
	PYTHONPATH=build/sanitizers/lib ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	$(PY) -m pytest -n 0 -p no:cacheprovider $(SANITIZED)

# the built packages, installed into empty environments, each extra on its own, with and without a compiler; half an hour
test-packages: .venv/wheels-ready
	$(PY) -m pytest -m slow tests/test_packages.py

test-data: .venv/ready
	$(PY) -m pytest -m data

# the GPU kernels on a CPU: in Triton's interpreter against the plain path, then compiled for three GPUs that need not be there
test-triton: .venv/gpu-ready
	TRITON_INTERPRET=1 $(PY) -m pytest $(KERNELS)
	$(PY) -m pytest tests/kernels/test_triton_compiles.py

# on a machine with a GPU and a PyTorch for it: every kernel against the plain path there, then its speed
test-gpu: .venv/ready
	@$(PY) -c "import sys, torch; torch.cuda.is_available() or sys.exit('no GPU, or a PyTorch without CUDA: see docs/guides/gpu.md')"
	@$(PY) -c "import sys, importlib.util as i; i.find_spec('triton') or sys.exit('no triton: pip install .[gpu]')"
	$(PY) -m pytest tests/kernels
	$(PY) -m experiments.benchmark --only gpu --output benchmarks/gpu

# one small fault at a time in the core, until a test notices; continues where it was stopped; see docs/testing.md
test-mutants: .venv/ready
	nice -n 15 $(PY) tests/mutants.py $(ARGS)

# speed and memory as ratios, into benchmarks/, e.g. make bench ARGS="--only step"; see docs/lab/speed.md
bench: .venv/bench-ready
	$(PY) -m experiments.benchmark $(ARGS)

# e.g. make reproduce ARGS="--quick"; see docs/paper/reproduce.md
reproduce: .venv/ready
	$(PY) -m experiments.reproduce $(ARGS)

# losses, weights and logits, to compare with those of another version; e.g. make guard ARGS="after.json --against before.json"
guard: .venv/ready
	$(PY) -m experiments.guard $(ARGS)

# the README's animation, from the page in an installed Chromium
screenshots: .venv/ready
	$(PY) docs/screenshots.py

# docs/reference/*.md from the docstrings
reference: .venv/ready
	$(PY) docs/reference.py

# the tables of docs/ and README.md that are computed from the code or from results/
tables: .venv/ready
	PYTHONPATH=. $(PY) tests/test_docs.py

# the outputs of docs/notebooks/*.ipynb, by running them
notebooks: .venv/ready
	$(PY) docs/site.py

# the site, into build/site: open build/site/index.html
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# an sdist and a wheel for every Python, into dist/; the wheel says which Linux it needs
wheels: .venv/wheels-ready
	rm -rf dist build/wheels
	$(PY) -m build --outdir build/wheels
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir dist build/wheels/*.whl
	mv build/wheels/*.tar.gz dist

# What the demo needs and no more; pip shows its progress.
.venv/installed: pyproject.toml constraints.txt setup.py $(wildcard src/raytraced/kernels/cpu/*)
	@echo "setting up .venv: PyTorch and some small packages, then the compiled kernels; a minute or two"
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[plots]'
	touch $@

.venv/ready: .venv/installed
	@echo "adding what the tests need"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv/gpu-ready: .venv/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gpu]'
	touch $@

# the libraries that our top-2 is measured against; constraints.txt keeps torch the one that is there
.venv/bench-ready: .venv/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

.venv/docs-ready: .venv/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

.venv/wheels-ready: .venv/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[wheels]'
	touch $@

clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
