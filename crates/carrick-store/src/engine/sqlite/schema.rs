//! The tables of the engine. They are its own: programs use the engine, people may look.
//!
//! Times are microseconds since 1970. A record's place in the log is its stream's number and its own,
//! packed into one integer key ([`place`]): an append goes to the end of its stream's part of one
//! tree, and there is no index beside it.

use crate::{
    log::Seq,
    schema::{Component, Migration},
};

pub(super) const COMPONENT: Component = Component {
    name: "store",
    migrations: &[Migration { version: 1, name: "store", sqlite: V1, postgres: "" }],
};

/// Bits of a record's number within its stream's place: a million million records a stream, and
/// eight million streams.
const SEQ_BITS: u32 = 40;

/// Where a record is in the log.
pub(super) fn place(stream: u64, seq: Seq) -> i64 {
    (stream << SEQ_BITS | seq.min((1 << SEQ_BITS) - 1)).cast_signed()
}

/// The number of the record at a place.
pub(super) fn seq(place: i64) -> Seq {
    place.cast_unsigned() & ((1 << SEQ_BITS) - 1)
}

const V1: &str = "
-- One row: which store this is.
CREATE TABLE carrick_store (epoch INTEGER NOT NULL) STRICT;
INSERT INTO carrick_store VALUES (random());

-- `last` is brought up to date when the stream is trimmed: the log knows better until then.
CREATE TABLE carrick_stream (
    id    INTEGER PRIMARY KEY,
    name  TEXT    NOT NULL UNIQUE,
    first INTEGER NOT NULL DEFAULT 1,
    last  INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE carrick_log (
    place     INTEGER PRIMARY KEY,
    stored_at INTEGER NOT NULL,
    key       TEXT,
    due       INTEGER,
    expires   INTEGER,
    body      BLOB    NOT NULL
) STRICT;

-- What came lately, a row for each commit: 24 bytes a record, which are its identity (16) and its
-- number, big-endian. The index over it is in memory.
CREATE TABLE carrick_dedupe (
    id        INTEGER PRIMARY KEY,
    stored_at INTEGER NOT NULL,
    records   BLOB    NOT NULL
) STRICT;

CREATE TABLE carrick_group (
    id        INTEGER PRIMARY KEY,
    stream_id INTEGER NOT NULL REFERENCES carrick_stream (id),
    name      TEXT    NOT NULL,
    cursor    INTEGER NOT NULL,
    fence     INTEGER NOT NULL,
    UNIQUE (stream_id, name)
) STRICT;

-- Records below a group's cursor that it has not finished with.
CREATE TABLE carrick_delivery (
    group_id         INTEGER NOT NULL,
    seq              INTEGER NOT NULL,
    leased           INTEGER NOT NULL,
    until            INTEGER NOT NULL,
    fence            INTEGER NOT NULL,
    attempt          INTEGER NOT NULL,
    first_claimed_at INTEGER NOT NULL,
    PRIMARY KEY (group_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE carrick_dead (
    group_id         INTEGER NOT NULL,
    seq              INTEGER NOT NULL,
    attempts         INTEGER NOT NULL,
    cause            TEXT    NOT NULL,
    fence            INTEGER NOT NULL,
    first_claimed_at INTEGER NOT NULL,
    buried_at        INTEGER NOT NULL,
    PRIMARY KEY (group_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE carrick_once (
    scope       TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    fingerprint BLOB    NOT NULL,
    token       INTEGER NOT NULL,
    answer      BLOB,
    ends_at     INTEGER NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX carrick_once_ends_at ON carrick_once (ends_at);
";
