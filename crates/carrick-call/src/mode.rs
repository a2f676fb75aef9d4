//! Whether a policy acts.

use serde::Deserialize;

/// Whether a policy acts on what it decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// It decides, counts and acts.
    #[default]
    Enforce,
    /// It decides and counts, and lets the call through: a way to learn what it would do.
    Observe,
}

impl Mode {
    /// Whether a refusal is to be acted on.
    pub fn enforces(self) -> bool {
        self == Self::Enforce
    }
}
