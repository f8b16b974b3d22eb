# Sourced by the scripts beside it: finds a Python, makes $VENV (.venv, if the script sets no other) and keeps it equal to requirements/*.txt.

MIN_MINOR=12
VENV=.venv

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

has_uv() { command -v uv >/dev/null; }

# True when the command really is a Python new enough (a pyenv shim may exist and yet fail) that can make an environment.
is_usable_python() {
    local needs=sys
    has_uv || needs="sys, venv, ensurepip"
    "$1" -c "import $needs; sys.exit(not (sys.version_info[:2] >= (3, $MIN_MINOR)))" >/dev/null 2>&1
}

# Prints the path of a Python, newest tested versions first.
find_python() {
    local candidate pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in "${PYTHON:-}" python3.12 python3.13 python3.14 python3 python \
        "$pyenv_root"/versions/3.1[2-9]*/bin/python3 /usr/local/bin/python3.1[2-9] /opt/homebrew/bin/python3.1[2-9]; do
        if [ -n "$candidate" ] && is_usable_python "$candidate"; then
            "$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))'
            return
        fi
    done
    if has_uv; then
        # uv knows more places, and may install a Python of its own.
        candidate=$(uv python find ">=3.$MIN_MINOR" 2>/dev/null) && is_usable_python "$candidate" && { echo "$candidate"; return; }
        say "no Python 3.$MIN_MINOR or newer found; asking uv to install one ..."
        uv python install "3.$MIN_MINOR" >&2 && uv python find "3.$MIN_MINOR" && return
    fi
    fail "no Python 3.$MIN_MINOR or newer (with its venv module) found on PATH, under pyenv or through uv. Install one, or point PYTHON at it:
    Debian, Ubuntu: apt-get install python3 python3-venv     pyenv: pyenv install 3.$MIN_MINOR     uv: uv python install 3.$MIN_MINOR"
}

# As jaxserve itself decides it: /proc alone may be a container's view of a host whose GPU it was not given.
has_nvidia_driver() {
    [ -e /dev/nvidiactl ] || [ -e /dev/nvidia0 ] && return
    { [ -e /proc/driver/nvidia/version ] || [ -e /dev/dxg ]; } && ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'
}

# Installs into $VENV with uv, or else with the environment's pip.
install() {
    if has_uv; then
        uv pip install --quiet --python "$VENV/bin/python" "$@"
    else
        # An environment that uv made has no pip.
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null
        "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@"
    fi
}

# ensure_environment PART...: $VENV holds jaxserve and the requirements of core and of every PART (cuda12, gates, dev).
# A stamp for each part (hash of its lock, pyproject.toml and the Python) makes the second time quick.
ensure_environment() {
    local part python stamp missing=()
    if [ -x "$VENV/bin/python" ] && ! is_usable_python "$VENV/bin/python"; then
        say "$VENV holds no usable Python any more: making it anew"
        rm -rf "$VENV"
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python)
        say "making $VENV with $("$python" --version) ($python)"
        if has_uv; then
            uv venv --quiet --python "$python" "$VENV"
        else
            "$python" -m venv "$VENV"
        fi || { rm -rf "$VENV"; fail "making $VENV failed; see above."; }
    fi
    for part in core "$@"; do
        stamp=$({ "$VENV/bin/python" --version; cat "requirements/$part.txt" pyproject.toml; } | cksum)
        [ "$(cat "$VENV/.installed-$part" 2>/dev/null)" = "$stamp" ] || missing+=("$part=$stamp")
    done
    [ ${#missing[@]} -eq 0 ] && return
    for part in "${missing[@]}"; do
        # The files of the parts hold core too; installing core alone first would only take longer.
        [ "${part%%=*}" = core ] && [ $# -gt 0 ] && [ ${#missing[@]} -gt 1 ] && continue
        say "installing requirements/${part%%=*}.txt (a minute or two the first time) ..."
        install --require-hashes -r "requirements/${part%%=*}.txt" || fail "installing requirements/${part%%=*}.txt failed; see above."
    done
    # Editable, and built with the locked tools.
    install --no-deps --no-build-isolation --editable . || fail "installing jaxserve itself into $VENV failed; see above."
    for part in "${missing[@]}"; do
        printf '%s\n' "${part#*=}" >"$VENV/.installed-${part%%=*}"
    done
}
