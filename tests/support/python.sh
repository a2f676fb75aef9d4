# Sourced by tests/*/run: sets `python` to an interpreter that has the packages of requirements.txt,
# and CARRICK_BIN to an absolute path. Where Python or its packages cannot be had, the suite (named
# by the caller in `suite`) is reported as skipped, by name.

support="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$support/../.." && pwd)"
target="${CARGO_TARGET_DIR:-$root/target}"
scratch="$target/tests"
export PYTHONPATH="$support" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export CARRICK_BIN="${CARRICK_BIN:-$target/release/carrick}"

skip_suite() {
  echo "SKIPPED $suite: $1"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
}

# install PACKAGE…: from Debian, where we may; otherwise the caller finds them missing, and says so.
install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  echo "$suite: installing $* (Debian, once)"
  local get=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends)
  "${get[@]}" "$@" >"$scratch/apt.log" 2>&1 ||
    { apt-get update -q >>"$scratch/apt.log" 2>&1 && "${get[@]}" "$@" >>"$scratch/apt.log" 2>&1; } ||
    echo "$suite: apt-get failed, see $scratch/apt.log"
}

if [ ! -x "$CARRICK_BIN" ]; then
  echo "$suite: no program at $CARRICK_BIN; build it with: cargo build --release" >&2
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
fi
CARRICK_BIN="$(cd "$(dirname "$CARRICK_BIN")" && pwd)/$(basename "$CARRICK_BIN")"

mkdir -p "$scratch"
# Debian's python3 comes without venv.
python3 -c 'import ensurepip' 2>/dev/null || install python3 python3-venv
command -v python3 >/dev/null || skip_suite "python3 is not installed"
venv="$scratch/venv-$(cat "$support/requirements.txt" <(python3 --version) | sha256sum | cut -c1-12)"
python="$venv/bin/python"
(
  flock 9 # two suites may start at once; the second finds the work done
  [ -e "$venv/ready" ] && exit 0
  echo "$suite: installing the Python packages (once)"
  python3 -m venv --clear "$venv" &&
    "$python" -m pip install --quiet --disable-pip-version-check --no-input --retries 3 \
      --requirement "$support/requirements.txt" &&
    touch "$venv/ready"
) 9>"$scratch/venv.lock" || skip_suite "the Python packages could not be installed"
