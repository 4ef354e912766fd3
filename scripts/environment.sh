# Sourced by quickstart, test and docs: `prepare_environment EXTRA ...` makes the virtual environment, extends it by the named
# extras of pyproject.toml, or reuses it. Its interpreter is then $python. environment.py does the work and reads the variables:
# HF_ZERO_VENV (another folder than .venv), HF_ZERO_TORCH (cpu or cuda), PYTHON (the interpreter to make it with).

root=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HF_ZERO_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python

# Print the newest Python that the pins support, or that of PYTHON. A pyenv shim of a version that is not selected exists but does
# not run, and on Debian `python3 -m venv` fails without the package that has ensurepip.
find_interpreter() {
    local candidates=(python3.14 python3.13 python3.12 python3.11 python3) candidate version other="" bare=""
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null </dev/null) || continue
        case $version in
            3.14.1) ;; # networkx and torchvision refuse it
            3.11.* | 3.12.* | 3.13.* | 3.14.*)
                if "$candidate" -c 'import bz2, ctypes, ensurepip, lzma, ssl, venv' >/dev/null 2>&1 </dev/null; then
                    echo "$candidate"
                    return
                fi
                bare=${bare:-$candidate lacks ensurepip, ssl, ctypes, bz2 or lzma: apt-get install python${version%.*}-venv, or set PYTHON}
                continue
                ;;
        esac
        other=${other:-$candidate is $version}
    done
    echo "environment: ${bare:-no Python 3.11 to 3.14 (3.14.1 excepted) among ${candidates[*]}${other:+ ($other)}; install one, or set PYTHON to its path}" >&2
    return 1
}

prepare_environment() {
    local interpreter
    if [ -n "${PYTHON:-}" ] || ! interpreter=$("$python" -c 'import sys; print(sys._base_executable)' 2>/dev/null </dev/null); then
        interpreter=$(find_interpreter) || return
    fi
    "$interpreter" "$root/scripts/environment.py" "$venv" "$@"
}
