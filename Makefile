# `make demo` and `make test` set up everything they need in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo check core test tests compiled test-all test-compiled test-torch test-machines fuzz sanitize lint
.PHONY: style types
.PHONY: bench bench-compare docs gpu-check clean

# torch first and pinned: anything looser brings several GB of CUDA packages. The extension is
# compiled while pip downloads.
$(VENV)/installed: pyproject.toml setup.py $(shell find csrc -type f)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0 "setuptools>=77" wheel ninja numpy
	FASTKD_REQUIRE_EXT=1 $(BIN)/python setup.py --quiet build_ext --inplace & built=$$!; \
	  FASTKD_NO_EXT=1 $(BIN)/python -m pip install --quiet --no-build-isolation -e ".[test,demo]" \
	  "triton==3.7.*" && wait $$built
	touch $@

demo: $(VENV)/installed
	$(BIN)/fastkd demo

lint: style types

style: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# What a change needs: style, types and the suite's core.
check: style
	$(MAKE) --jobs 2 --keep-going types core

core: $(VENV)/installed
	$(BIN)/python -m tools.check $(ARGS)

# All at once: each leaves cores idle while it starts and ends, or waits for other processes.
test: style
	$(MAKE) --jobs 3 --keep-going types tests compiled

# Bytecode of all that the tests import. Without it each of their five processes would compile the
# same modules of a new environment at the same time, for half a minute each.
$(VENV)/bytecode: $(VENV)/installed
	-PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests bench --collect-only > /dev/null
	touch $@

# One process more than cores, since tests wait for the commands that they start; each process has
# one thread. Python may keep what it compiles.
# Of the benchmarks a tiny form of each, checked and not timed. What asserts no value and takes long
# is left to test-all: THOROUGH=thorough.
THOROUGH ?= not thorough
tests: $(VENV)/bytecode
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests bench --benchmark-disable \
	  -m "$(THOROUGH)" -n $$(($$(env -u OMP_NUM_THREADS nproc) + 1)) --dist worksteal

# What starts kernels, on compiled code that tools/ptx executes: ARGS="--capability 90 -k masks".
COMPILED := $(addprefix tests/test_,relation.py knn.py projection.py \
  soft_targets.py values.py edges.py layouts.py derivatives.py) tests/kernels tests/ptx
test-compiled: $(VENV)/installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tools.executed.plugin \
	  -n $$(env -u OMP_NUM_THREADS nproc) --dist worksteal $(COMPILED) $(ARGS)

# Of those tests a few of each kernel, with one set of parameters each, by half as many processes as
# cores; and the tests of tools/ptx, which run here only.
CHOSEN := block_edges or cold or small_rests or six_layers or rows_of_many or ptx
compiled: $(VENV)/bytecode
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tools.executed.plugin \
	  -p tools.spread -m "not thorough" -k "($(CHOSEN)) and not (compil or graph or sizes)" \
	  --dist worksteal -n $$((($$(env -u OMP_NUM_THREADS nproc) + 1) / 2)) $(COMPILED)

# Beside the tests installs, sanitizers, the site, and every form of the kernels, for three
# architectures.
test-all: test
	$(MAKE) tests THOROUGH=thorough
	$(MAKE) test-compiled ARGS="--capability 80"
	$(MAKE) test-compiled ARGS="--capability 90"
	$(BIN)/python -W ignore -m tests.ptx.forms --capability 80
	$(BIN)/python -W ignore -m tests.ptx.forms --capability 90
	$(BIN)/python -m tools.compile_report --every
	$(BIN)/python -m tools.cuda_source

# The suite's core against other torches: make test-torch VERSION=2.15.0 [ARGS="--transformers 5.0.0"]
test-torch: $(VENV)/installed
	$(BIN)/python -m tools.versions $(VERSION) $(ARGS)

# The losses' tests as other processors run them: all, or ARGS="--turn" or "--setting mkl-avx2" [-k ...].
test-machines: $(VENV)/installed
	$(BIN)/python -m tools.machines $(ARGS)

# Random calls against oracles in float64, for as long as asked.
SECONDS ?= 600
fuzz: $(VENV)/installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# The extension's CPU code under AddressSanitizer, UBSan and ThreadSanitizer, for longer than in test,
# and its operators, called from Python, under the first two.
sanitize: $(VENV)/installed
	SANITIZE_ROUNDS=50 $(BIN)/python -m pytest -q tests/test_row_kernels.py -k sanitizers
	$(BIN)/python -m tests.sanitize --rounds 5

# The packages that fastkd is compared with.
$(VENV)/peers: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[bench]" \
	  || echo "some packages are missing; their rows in the tables are"
	touch $@

# Every loss once and the headline groups four times more, a process and a file each; what is there
# of this commit is kept, so an interrupted run continues. One thread: make bench OMP_NUM_THREADS=1.
BENCH_CHANGED = $(shell git diff --quiet HEAD -- fastkd kernels csrc 'bench/*.py' || echo +)
BENCH_RUN = runs/bench/$(shell git rev-parse --short HEAD)$(BENCH_CHANGED)-$(or $(OMP_NUM_THREADS),$(shell nproc))
BENCH_FILES = $(patsubst bench/test_%.py,$(BENCH_RUN)/%.json,$(wildcard bench/test_*.py)) \
  $(foreach n,1 2 3 4,$(BENCH_RUN)/headline-$(n).json)
BENCH = $(BIN)/python -m pytest --benchmark-quiet --benchmark-max-time=0.3 --benchmark-min-rounds=3

bench: $(VENV)/peers $(BENCH_FILES)
	$(BIN)/python -m bench.report $(BENCH_FILES)

$(BENCH_RUN)/headline-%.json: | $(VENV)/peers
	mkdir -p $(@D)
	$(BENCH) bench -m headline --benchmark-json=$@

$(BENCH_RUN)/%.json: bench/test_%.py | $(VENV)/peers
	mkdir -p $(@D)
	$(BENCH) $< --benchmark-json=$@

# Is this tree slower than another commit: make bench-compare REF=HEAD~1 [ARGS="--runs 7"]
bench-compare: $(VENV)/installed
	$(BIN)/python -m bench.compare $(REF) $(ARGS)

# The site needs neither the extension nor the packages of the tests.
$(VENV)/docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0 "setuptools>=77" wheel
	FASTKD_NO_EXT=1 $(BIN)/python -m pip install --quiet --no-build-isolation -e ".[docs]"
	touch $@

# The site, in build/site: warnings and links to nowhere are errors, and no network is asked.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# On a CUDA machine, with the torch and triton of $(PYTHON); no virtual environment is made.
# ARGS="--minutes 9", then ARGS="--minutes 5 --resume": two commands of one lease of 15 minutes.
gpu-check:
	$(PYTHON) -m tools.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info fastkd/*.so
