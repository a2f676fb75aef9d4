//! Schema: versioned, forward-only migrations.
