# Sourced by the other scripts, from the root of the repository.
#
# make_venv EXTRAS: make the virtual environment $FXTRT_VENV (default .venv) unless it is there, install the project
# from its own files with the given extras unless that was done since pyproject.toml last changed, and set $python.
make_venv() {
  local extras=$1 venv=${FXTRT_VENV:-.venv}
  if [ ! -x "$venv/bin/python" ]; then
    echo "making the virtual environment $venv"
    "${PYTHON:-python3}" -m venv "$venv"
  fi
  python=$venv/bin/python
  local stamp="$venv/.installed-$extras" state
  state="$PWD $(cksum < pyproject.toml)"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
    echo "installing the project and its dependencies (the first time this takes a while: torch alone is large)"
    "$python" -m pip install --editable ".[$extras]"
    echo "$state" > "$stamp"
  fi
}
