# Sourced by ./test: starts the real servers that tests need, each on a private port with a private
# data folder, and stops them by process id.
#
#   postgres_start FOLDER   sets POSTGRES_URL; on failure returns 1 with the reason in POSTGRES_WHY
#   servers_stop            stops what was started; safe to call again

POSTGRES_URL=
POSTGRES_WHY=
_postgres_pid=
_postgres_home=

# Where the server programs are: Debian keeps them off the PATH. The newest wins.
_postgres_programs() {
  local found
  found=$(ls -d /usr/lib/postgresql/*/bin/postgres 2>/dev/null | sort -V | tail -n 1)
  [ -n "$found" ] || found=$(command -v postgres) || return 1
  dirname "$found"
}

_postgres_install() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    POSTGRES_WHY="it is not installed (Debian: apt-get install postgresql)"
    return 1
  fi
  echo "installing PostgreSQL (Debian package, once)"
  # The package would start a server of its own on the well-known port.
  mkdir -p /etc/postgresql-common/createcluster.d
  echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/carrick-test.conf
  export DEBIAN_FRONTEND=noninteractive
  local install=(apt-get install -y -q --no-install-recommends postgresql)
  "${install[@]}" >"$1/apt.log" 2>&1 ||
    { apt-get update -q >>"$1/apt.log" 2>&1 && "${install[@]}" >>"$1/apt.log" 2>&1; } ||
    { POSTGRES_WHY="apt-get cannot install it (see $1/apt.log)" && return 1; }
}

# What to put before a server program: it refuses to run as root, so root becomes the user of its
# package. A list and no function, so that the process in the background is the server itself.
_as_postgres=()
[ "$(id -u)" = 0 ] &&
  _as_postgres=(env -C / setpriv --reuid postgres --regid postgres --init-groups --)

_free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

postgres_start() {
  local logs=$1 programs password port log
  mkdir -p "$logs"
  programs=$(_postgres_programs) || {
    _postgres_install "$logs" || return 1
    programs=$(_postgres_programs) || { POSTGRES_WHY="its package has no server" && return 1; }
  }
  if [ "$(id -u)" = 0 ] && ! id postgres >/dev/null 2>&1; then
    POSTGRES_WHY="it does not run as root, and there is no user named postgres"
    return 1
  fi

  # Not below the repository: that may be in a home folder where the other user may not go.
  _postgres_home=$(mktemp -d "${TMPDIR:-/tmp}/carrick-postgres.XXXXXX")
  log=$logs/postgres.log
  password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  printf '%s\n' "$password" >"$_postgres_home/password"
  [ "$(id -u)" = 0 ] && chown -R postgres: "$_postgres_home"
  if ! "${_as_postgres[@]}" "$programs/initdb" -D "$_postgres_home/data" -U postgres -E UTF8 --locale C \
    -A scram-sha-256 --pwfile "$_postgres_home/password" --no-sync >"$log" 2>&1; then
    POSTGRES_WHY="initdb fails (see $log)"
    return 1
  fi

  local try
  for try in 1 2 3; do # somebody else may take the port in between
    port=$(_free_port) || { POSTGRES_WHY="no free port (python3 is needed)" && return 1; }
    # fsync off: the tests kill our processes, never the machine; those that need it set up their own.
    "${_as_postgres[@]}" "$programs/postgres" -D "$_postgres_home/data" -p "$port" -k "$_postgres_home" \
      -c listen_addresses=127.0.0.1 -c max_connections=200 -c fsync=off >>"$log" 2>&1 </dev/null &
    _postgres_pid=$!
    disown # bash would report its end; we watch the process itself
    local waited
    for waited in $(seq 150); do # 30 s
      if PGPASSWORD=$password "$programs/psql" -X -q -h 127.0.0.1 -p "$port" -U postgres \
        -c 'SELECT 1' postgres >/dev/null 2>&1; then
        POSTGRES_URL="postgres://postgres:$password@127.0.0.1:$port/postgres"
        return 0
      fi
      kill -0 "$_postgres_pid" 2>/dev/null || break
      sleep 0.2
    done
    _postgres_stop
  done
  POSTGRES_WHY="it does not start (see $log)"
  return 1
}

_postgres_stop() {
  [ -n "$_postgres_pid" ] || return 0
  # Fast shutdown; then without asking.
  kill -INT "$_postgres_pid" 2>/dev/null
  local waited
  for waited in $(seq 100); do
    kill -0 "$_postgres_pid" 2>/dev/null || break
    [ "$waited" = 100 ] && kill -KILL "$_postgres_pid" 2>/dev/null
    sleep 0.1
  done
  _postgres_pid=
}

servers_stop() {
  _postgres_stop
  [ -n "$_postgres_home" ] && rm -rf "$_postgres_home"
  _postgres_home=
  return 0
}
