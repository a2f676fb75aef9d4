//! The tables of the inbox: a public contract, which any language writes with plain SQL. What each
//! column means is told in `docs/tables.md`.

use carrick_store::schema::{Component, Migration};

/// The inbox's tables.
///
/// ```
/// # #[cfg(feature = "rusqlite")] {
/// let mut conn = rusqlite::Connection::open_in_memory().unwrap();
/// carrick_store::schema::sqlite::migrate(&mut conn, &carrick_message::inbox::COMPONENT).unwrap();
/// let first = conn
///     .execute(
///         "INSERT INTO carrick_inbox (handler, source, id) VALUES ('ledger', '/shop', '1')
///          ON CONFLICT DO NOTHING",
///         (),
///     )
///     .unwrap();
/// assert_eq!(first, 1, "0 would be a duplicate");
/// # }
/// ```
pub const COMPONENT: Component = Component {
    name: "inbox",
    migrations: &[Migration { version: 1, name: "inbox", sqlite: SQLITE, postgres: POSTGRES }],
};

// With its row numbers, which grow with time: the oldest rows are found without an index on the
// time, which would cost every insert.
const SQLITE: &str = "
CREATE TABLE carrick_inbox (
    handler    TEXT NOT NULL,
    source     TEXT NOT NULL,
    id         TEXT NOT NULL,
    seen_at    TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    token      INTEGER NOT NULL DEFAULT 0,
    held_until TEXT,
    PRIMARY KEY (handler, source, id),
    CONSTRAINT carrick_inbox_handler_has_1_to_200_bytes CHECK (
        length(CAST(handler AS BLOB)) BETWEEN 1 AND 200)
);
CREATE TABLE carrick_inbox_version (
    handler TEXT NOT NULL,
    key     TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (handler, key)
) WITHOUT ROWID;
";

const POSTGRES: &str = "
CREATE TABLE carrick_inbox (
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    token      bigint      NOT NULL DEFAULT 0,
    held_until timestamptz,
    handler    text        NOT NULL,
    source     text        NOT NULL,
    id         text        NOT NULL,
    PRIMARY KEY (handler, source, id),
    CONSTRAINT carrick_inbox_handler_has_1_to_200_bytes CHECK (
        octet_length(handler) BETWEEN 1 AND 200)
);
CREATE INDEX carrick_inbox_seen ON carrick_inbox (seen_at);
CREATE TABLE carrick_inbox_version (
    version bigint NOT NULL,
    handler text   NOT NULL,
    key     text   NOT NULL,
    PRIMARY KEY (handler, key)
) WITH (fillfactor = 80);
";
