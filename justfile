# `just --list` shows what there is; `.ci/run` runs the same steps on a new machine.

# what a commit must pass
all: lint types tests docs wheels members core

# make or refresh .venv
sync:
    uv sync

# format the code
fmt:
    uv run ruff check --fix
    uv run ruff format

# style and import rules
lint:
    uv run ruff check
    uv run ruff format --check
    uv run lint-imports

# mypy, strict
types:
    uv run mypy

# every test
tests *args:
    uv run pytest -n 2 --dist loadfile {{ args }}

# functions in memory only: a few seconds
unit *args:
    uv run pytest -n 2 --dist loadfile tests/unit {{ args }}

# both sides of the wire, and the bucket
contract *args:
    uv run pytest -n 2 --dist loadfile tests/contract {{ args }}

# whole runs
e2e *args:
    uv run pytest -n 2 --dist loadfile tests/e2e {{ args }}

# links, names, commands and words of the documentation
docs:
    uv run python tools/check_docs.py

# build all wheels and use them
wheels *args:
    uv run python tools/check_wheels.py {{ args }}

# each member with its own dependencies only
members *args:
    uv run python tools/check_members.py {{ args }}

# core with the oldest dependencies and on other Pythons
core:
    uv run python tools/check_core.py --lowest
    uv run python tools/check_core.py --python 3.12
    uv run python tools/check_core.py --python 3.13

# resolve anew, up to exclude-newer
pins *args:
    python tools/refresh_constraints.py {{ args }}

# raise one member's version, write its changelog, commit, tag: just release cwtrain-core minor
release member bump:
    #!/usr/bin/env bash
    set -euo pipefail
    test -z "$(git status --porcelain)" || { echo "the checkout is not clean" >&2; exit 1; }
    uv version --package {{ member }} --bump {{ bump }} --frozen
    version=$(uv version --package {{ member }} --short --frozen)
    uv run --group release towncrier build --yes --config pyproject.toml --dir packages/{{ member }} --version "$version"
    python tools/refresh_constraints.py
    git add -A
    git commit -m "release: {{ member }} $version"
    git tag "{{ member }}-v$version"
