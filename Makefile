# make demo   the main job on the embedded engine          make test       what every change must pass, under 15 minutes
# make check  ruff, mypy, import-linter                     make test-all   all of it, before something is called done
# make screenshots   the README's pictures, from a running demo
# make versions   the tap in older SGLangs, on the CPU
# make demo-ssh   the demo on a host behind a private sshd on loopback, with the link cut three times

PYTHON ?= python3
CONSOLE := .venv/bin/python
ENGINE := .venv-engine/bin/python
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo demo-ssh screenshots check test test-all versions console engine clean

demo: console engine
	.venv/bin/layertap demo

demo-ssh: console engine
	$(CONSOLE) tests/sshd/demo.py

screenshots: console engine
	PYTHONPATH=tests/tui:tests/unit $(CONSOLE) tests/tui/screenshots.py tests/tui/screenshots

check: console
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: console engine
	$(CONSOLE) -m pytest -m "not slow" -n 4 --dist loadfile tests/unit tests/tui tests/sshd
	$(CONSOLE) -m pytest -m "not slow" -n 2 --dist loadfile tests/end_to_end
	PYTHONPATH=. $(ENGINE) -m pytest -m "not slow" -n 2 --dist loadfile tests/engine tests/gpu

test-all: console engine
	$(CONSOLE) -m pytest -n 4 --dist loadfile tests/unit tests/tui tests/sshd
	$(CONSOLE) -m pytest tests/end_to_end
	PYTHONPATH=. $(ENGINE) -m pytest tests/engine tests/gpu tests/trainers

versions: engine
	$(ENGINE) tests/versions

# The console's environment, with everything that the checks and its tests need.
console: .venv/ready
.venv/ready: pyproject.toml tests/requirements.txt
	$(PYTHON) -m venv .venv
	$(CONSOLE) $(PIP) -e . -r tests/requirements.txt
	touch $@

# SGLang on a plain CPU, apart from the console: nothing of Layertap is installed in it.
engine: .venv-engine/ready
.venv-engine/ready: backends/embedded/requirements.txt
	$(PYTHON) -m venv .venv-engine
	$(ENGINE) $(PIP) --only-binary :all: -r backends/embedded/requirements.txt
	$(ENGINE) $(PIP) --no-deps sglang==0.5.23
	$(ENGINE) $(PIP) "pytest>=8.4,<9" "pytest-timeout>=2.3,<3" "pytest-xdist>=3.6,<4"
	touch $@

clean:
	rm -rf .venv .venv-engine .venv-versions layertap-demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
