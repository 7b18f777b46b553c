# Sourced by the other scripts, from the root of the repository.
#
# make_venv EXTRAS: make the virtual environment $FXTRT_VENV (default .venv) unless it is there, install the project
# from its own files with the given extras unless that was done since its requirements last changed, and set $python.
#
# The versions are those that the tests passed with, of constraints/pythonX.Y.txt; scripts/lock renews that file. For a
# Python that has none they are the newest that pyproject.toml allows. FXTRT_CONSTRAINTS names another file; empty: none.
make_venv() {
  local extras=$1 venv=${FXTRT_VENV:-.venv}
  if [ ! -x "$venv/bin/python" ]; then
    echo "making the virtual environment $venv"
    "${PYTHON:-python3}" -m venv "$venv"
  fi
  python=$venv/bin/python
  local version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  constraints=${FXTRT_CONSTRAINTS-constraints/python$version.txt}
  if [ -n "$constraints" ] && [ ! -e "$constraints" ]; then
    echo "there is no $constraints: installing the newest versions that pyproject.toml allows"
    constraints=
  fi
  local stamp="$venv/.installed-$extras" state
  state="$PWD $(cat pyproject.toml ${constraints:+"$constraints"} | cksum)"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
    echo "installing the project and its dependencies (the first time this takes a while: torch alone is large)"
    "$python" -m pip install ${constraints:+--constraint "$constraints"} --editable ".[$extras]"
    echo "$state" > "$stamp"
  fi
}
