# Sourced by quickstart and test: makes the virtual environment, or reuses it, and leaves its interpreter in $python.
# HF_ZERO_VENV names another place for it, PYTHON another interpreter to make it with.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HF_ZERO_VENV:-$root/.venv}
python=$venv/bin/python

# The pinned versions need Python 3.11. A pyenv shim of a version that is not selected exists but does not run.
find_interpreter() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python 3.11 or newer with venv among: ${PYTHON:-python3.11 python3 python3.12 python3.13}; install one, or set PYTHON" >&2
    return 1
}

prepare_environment() {
    local stamp=$venv/hf-zero-requirements wanted interpreter
    wanted=$(cd "$root" && cat constraints.txt pyproject.toml setup.py scripts/environment.sh kernels/cpu/* && echo "$root") || return
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        echo "environment: $venv (as it was)"
        return
    fi
    interpreter=$(find_interpreter) || return
    echo "environment: installing into $venv (minutes, once) ..."
    rm -f "$stamp"
    "$interpreter" -m venv "$venv" || return
    # torch first and pinned: an open range would pick the newest build with its several gigabytes of CUDA. -qq leaves errors.
    "$python" -m pip install -qq --no-input "$(grep '^torch==' "$root/constraints.txt")" -c "$root/constraints.txt" || return
    "$python" -m pip install -qq --no-input -e "$root[test]" -c "$root/constraints.txt" || return
    printf '%s\n' "$wanted" >"$stamp"
    echo "environment: ready after ${SECONDS} s"
}
