# Development tasks. `make demo` and `make test` need only Python 3.11 and pip.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROTOS := $(wildcard protos/baton/v1/*.proto)

.PHONY: setup demo test test-all chaos chaos-ranks chaos-versions fuzz compose-test bench-engine bench-serve gpu lint format docs wheel protos lock clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/protos.py $(PROTOS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing into $(VENV) (torch is the large part)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python -c constraints.txt helm-sdkpy
	@touch $@

demo: $(STAMP)
	@$(BIN)/baton demo

# Unit and contract tests in parallel, one thread each; then clusters, two at a time, also after
# failures of the first.
test: $(STAMP)
	@status=0; \
	$(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 1)) --dist worksteal tests/unit tests/contract tests/chaos || status=1; \
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -p no:schemathesis tests/gpu tests/cluster tests/compose tests/helm || status=1; \
	exit $$status

# Also long tests: chaos for ten minutes, with workers of several ranks for five each way, with two
# versions for five, and the containers.
test-all: test chaos chaos-ranks chaos-versions compose-test

fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

chaos: $(STAMP)
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

chaos-ranks: $(STAMP)
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) --prefill-tp 2
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) --decode-tp 2

chaos-versions: $(STAMP)
	@$(BIN)/python -m tests.chaos --versions --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

compose-test: $(STAMP)
	@BATON_COMPOSE_TEST=1 $(BIN)/python -m pytest tests/compose

# Comparisons with other engines, if installed: docs/comparison.md. For example
# make bench-engine RIVALS=~/rivals/venv LLAMA_CPP=~/rivals/llama.cpp SHAPE=L ROUNDS=3 JSON=engine.json
BENCH_ARGS = --shape $(or $(SHAPE),M) --rivals "$(RIVALS)" --llama-cpp "$(LLAMA_CPP)" \
	$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(CPUS),--cpus $(CPUS)) $(if $(JSON),--json $(JSON)) \
	$(ARGS)

bench-engine: $(STAMP)
	@$(BIN)/python -m benchmarks engine $(BENCH_ARGS)

bench-serve: $(STAMP)
	@$(BIN)/python -m benchmarks serve $(BENCH_ARGS)

# On a machine with an NVIDIA GPU: correctness and speed of kernels, engine and cluster, in 8 minutes.
# It uses the virtual environment's Python if that sees a GPU, else any with torch and triton.
# For example  make gpu SHAPE=1B MINUTES=4 JSON=figures.json ARGS="--only speed,engine"
GPU_ARGS = $(if $(SHAPE),--shape $(SHAPE)) $(if $(MINUTES),--minutes $(MINUTES)) \
	$(if $(JSON),--json $(JSON)) $(ARGS)
SEES_GPU = import sys, torch; sys.exit(not torch.cuda.is_available())
NO_TORCH = import sys, importlib.util as util; sys.exit(util.find_spec("torch") is not None)

gpu:
	@python=$(PYTHON); \
	if [ '$(origin PYTHON)' = file ] && [ -x $(BIN)/python ] && \
	   { $(BIN)/python -c '$(SEES_GPU)' 2>/dev/null || $$python -c '$(NO_TORCH)'; }; \
	then python=$(BIN)/python; fi; \
	exec $$python -m benchmarks gpu $(GPU_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy router prefill_worker decode_worker kvtransfer baton scripts benchmarks
	$(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/reference.py --check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation's site in build/site; broken links and anchors are errors.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# build/dist/*.whl with native kernels for all CPUs of this architecture, which need no compiler.
wheel: $(STAMP)
	@$(BIN)/python -m baton.engine.kernels.native.library
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .
	@$(BIN)/python -m wheel tags --remove --platform-tag linux_$$(uname -m) build/dist/*-none-any.whl

# The stubs in baton/v1, which `make setup` generates, too.
protos: $(STAMP)
	@$(BIN)/python scripts/protos.py

# Locks the image's libraries with hashes, all but torch, after a change of pyproject.toml or
# constraints.txt. Needs torch's CPU index, or CUDA's libraries are locked as well.
LOCK = PIP_CONSTRAINT=constraints.txt PIP_EXTRA_INDEX_URL="$$PIP_EXTRA_INDEX_URL $(TORCH_INDEX)" \
	build/lock/bin/pip-compile --quiet --generate-hashes --strip-extras --no-header --no-annotate \
	--no-emit-options --constraint constraints.txt

lock:
	@$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet pip-tools
	@$(LOCK) --extra worker,gateway --unsafe-package torch --unsafe-package baton-serving \
		--output-file compose/requirements.txt pyproject.toml
	@$(LOCK) --allow-unsafe --only-build-deps --build-deps-for wheel \
		--output-file compose/build-requirements.txt pyproject.toml

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache dist build
