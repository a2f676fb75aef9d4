//! Settings of a retry budget.

use carrick_core::config::{Faults, InvalidConfig};
use serde::Deserialize;

use super::core::MAX_CAP;
use crate::Mode;

/// What retries are paid from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BudgetKind {
    /// Recent calls, each of which earns `ratio` of a retry, with a floor a second.
    #[default]
    Ratio,
    /// Calls in flight, of which `ratio` may be retries; `floor` may be at any time.
    InFlight,
    /// gRPC's tokens: `cap` of them, a failure takes one, a success brings `ratio`; none at half.
    Tokens,
}

/// Settings as an operator writes them; become a [`BudgetConfig`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct BudgetOptions {
    /// Which of the three. Default `ratio`.
    pub kind: BudgetKind,
    /// Retries for each call, in [0, 1]. Default 0.1.
    pub ratio: f64,
    /// Retries a second (with `in-flight`: at a time) that need no traffic, 0..=1000. Default 10.
    pub floor: u32,
    /// Retries that can be saved up, 1..=16 000. Default 100.
    pub cap: u32,
    /// Whether it acts. Default `enforce`.
    pub mode: Mode,
}

impl Default for BudgetOptions {
    fn default() -> Self {
        Self { kind: BudgetKind::Ratio, ratio: 0.1, floor: 10, cap: 100, mode: Mode::Enforce }
    }
}

/// Settings that a budget can rely on.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(try_from = "BudgetOptions")]
pub struct BudgetConfig {
    pub(super) options: BudgetOptions,
}

impl BudgetConfig {
    /// What was written.
    pub fn options(&self) -> &BudgetOptions {
        &self.options
    }
}

impl TryFrom<BudgetOptions> for BudgetConfig {
    type Error = InvalidConfig;

    fn try_from(options: BudgetOptions) -> Result<Self, InvalidConfig> {
        let BudgetOptions { kind: _, ratio, floor, cap, mode: _ } = options;
        let mut faults = Faults::default();
        faults.unless_value((0.0..=1.0).contains(&ratio), "ratio", "in [0, 1]", ratio);
        faults.unless_value(floor <= 1000, "floor", "0..=1000", floor);
        let range = format!("1..={MAX_CAP}");
        faults.unless_value((1..=MAX_CAP).contains(&cap), "cap", &range, cap);
        faults.into_result(Self { options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_checked_and_all_faults_are_told() {
        let options =
            BudgetOptions { ratio: f64::NAN, floor: 1001, cap: 0, ..BudgetOptions::default() };
        let faults = BudgetConfig::try_from(options).unwrap_err();
        assert_eq!(faults.faults().len(), 3, "{faults}");
        assert!(BudgetConfig::try_from(BudgetOptions::default()).is_ok());
    }
}
