//! Filters: which events of a topic a reader is told of.

/// Which events a reader wants, by type and by subject. An empty filter lets everything through.
///
/// A pattern is the text itself, or the beginning of one with `*` at its end. Patterns of one kind
/// are alternatives; both kinds must agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Patterns of the type.
    pub types: Vec<String>,
    /// Patterns of the subject; an event without a subject fits none.
    pub subjects: Vec<String>,
}

impl Filter {
    /// Whether everything fits.
    pub fn is_empty(&self) -> bool {
        self.types.is_empty() && self.subjects.is_empty()
    }

    /// Whether an event of this type and subject fits.
    ///
    /// ```
    /// # use carrick_edge::feed::Filter;
    /// let filter = Filter { types: vec!["order.*".into()], ..Filter::default() };
    /// assert!(filter.fits("order.placed.v1", None));
    /// assert!(!filter.fits("refund.paid.v1", Some("order.7")));
    /// ```
    pub fn fits(&self, ty: &str, subject: Option<&str>) -> bool {
        let fits = |patterns: &[String], text: &str| {
            patterns.is_empty() || patterns.iter().any(|pattern| matches(pattern, text))
        };
        fits(&self.types, ty)
            && (self.subjects.is_empty() || subject.is_some_and(|text| fits(&self.subjects, text)))
    }
}

/// Whether a text is the pattern, or begins as the pattern does before its `*`.
pub fn matches(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => text.starts_with(start),
        None => pattern == text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_must_agree_and_a_missing_subject_fits_no_pattern() {
        let filter = Filter {
            types: vec!["order.placed.v1".to_owned(), "refund.*".to_owned()],
            subjects: vec!["7".to_owned(), "8*".to_owned()],
        };
        assert!(filter.fits("order.placed.v1", Some("7")));
        assert!(filter.fits("refund.paid.v2", Some("81")));
        assert!(!filter.fits("order.placed.v1", Some("71")));
        assert!(!filter.fits("order.placed.v12", Some("7")));
        assert!(!filter.fits("refund.paid.v2", None));
        assert!(Filter::default().fits("anything", None));
    }
}
