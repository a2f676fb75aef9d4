"""An application's own database, SQLite or Postgres, spoken to in plain SQL.

Statements are written once, with `?` for a parameter. Transactions are explicit; a connection
belongs to one thread.
"""

import os
import secrets
import sqlite3
import time
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from .report import Skip

BUSY_SECONDS = 30
"""How long a SQLite writer waits for its turn."""


class Conflict(Exception):
    """The database chose this transaction to give way to another: begin it again."""


class Sqlite:
    """A SQLite file, opened as an application would: WAL, and synced at each commit."""

    kind = "sqlite"

    def __init__(self, url):
        path = url.removeprefix("sqlite://")
        self.connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        self.execute("PRAGMA journal_mode = WAL")
        self.execute("PRAGMA synchronous = FULL")

    def execute(self, sql, args=()):
        """Runs one statement; returns its rows."""
        return self.connection.execute(sql, args).fetchall()

    def changed(self, sql, args=()):
        """Runs one statement; returns how many rows it touched."""
        return self.connection.execute(sql, args).rowcount

    def script(self, sql):
        """Runs several statements."""
        self.connection.executescript(sql)

    @contextmanager
    def transaction(self):
        """Commits at the end of the block; rolls back if it raises."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def close(self):
        """Closes the connection."""
        self.connection.close()


class Postgres:
    """A Postgres database through psycopg."""

    kind = "postgres"

    def __init__(self, url):
        import psycopg  # only here: SQLite needs nothing beside Python

        self.psycopg = psycopg
        self.connection = psycopg.connect(url, autocommit=True)

    def _run(self, sql, args):
        try:
            return self.connection.execute(sql.replace("?", "%s"), args or None)
        except (
            self.psycopg.errors.DeadlockDetected,
            self.psycopg.errors.SerializationFailure,
        ) as error:
            raise Conflict from error

    def execute(self, sql, args=()):
        """Runs one statement; returns its rows."""
        cursor = self._run(sql, args)
        return cursor.fetchall() if cursor.description else []

    def changed(self, sql, args=()):
        """Runs one statement; returns how many rows it touched."""
        return self._run(sql, args).rowcount

    def script(self, sql):
        """Runs several statements."""
        self.connection.execute(sql)

    @contextmanager
    def transaction(self):
        """Commits at the end of the block; rolls back if it raises."""
        self.execute("BEGIN")
        try:
            yield
        except BaseException:
            if not self.connection.closed:
                self.connection.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def close(self):
        """Closes the connection."""
        self.connection.close()


def connect(url):
    """Opens a database by its URL."""
    return Sqlite(url) if url.startswith("sqlite:") else Postgres(url)


def create(kind, scene, name):
    """Makes a new, empty database for a scene, gone at the scene's end; returns its URL."""
    if kind == "sqlite":
        return f"sqlite://{scene.folder / name}.db"
    server = postgres_server()
    own = f"carrick_{name}_{secrets.token_hex(4)}"
    admin = connect(server)
    admin.execute(f"CREATE DATABASE {own}")
    admin.close()
    scene.on_close(lambda: _drop(server, own))
    return urlunsplit(urlsplit(server)._replace(path=f"/{own}"))


def postgres_server():
    """The URL of the private Postgres that the caller of the suite started."""
    server = os.environ.get("CARRICK_TEST_POSTGRES", "")
    if not server:
        raise Skip("no Postgres (CARRICK_TEST_POSTGRES is empty)")
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise Skip("psycopg is not installed") from None
    return server


def _drop(server, name):
    admin = connect(server)
    # A killed client's backend may need a moment to notice; FORCE ends it.
    for _ in range(3):
        try:
            admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            break
        except admin.psycopg.Error:
            time.sleep(0.5)
    admin.close()
