use super::{Reason, Rejection};
use crate::limiter::{Limit, Origin, ProjectId, Slot};
use crate::metrics::Outcome;

/// What the current span and the log learn of a decision. Never the id itself: a short hash of it.
#[cfg_attr(not(feature = "tracing"), allow(dead_code, reason = "nobody is told"))]
pub(super) struct Decision<'a> {
    policy: &'static str,
    label: &'static str,
    id: Option<&'a ProjectId>,
    active: Option<u32>,
    limit: Option<u32>,
    refused: bool,
}

impl<'a> Decision<'a> {
    pub(super) fn admitted(policy: &'static str, id: &'a ProjectId, slot: &Slot) -> Self {
        let (outcome, active) = match slot.origin() {
            Origin::Store => (Outcome::Admitted, Some(slot.active())),
            Origin::Local => (Outcome::LocalAdmitted, Some(slot.active())),
            Origin::FailOpen => (Outcome::FailOpen, None),
            Origin::Unlimited => (Outcome::Admitted, None),
        };
        let limit = match slot.limit() {
            Limit::Max(most) => Some(most),
            Limit::Unlimited | Limit::Default => None,
        };
        Self { policy, label: outcome.label(), id: Some(id), active, limit, refused: false }
    }

    pub(super) fn skipped(policy: &'static str) -> Self {
        let label = Outcome::Skipped.label();
        Self { policy, label, id: None, active: None, limit: None, refused: false }
    }

    pub(super) fn refused(rejection: &Rejection, id: Option<&'a ProjectId>, shadow: bool) -> Self {
        let label = match rejection.reason() {
            _ if shadow => Outcome::WouldReject.label(),
            Reason::Saturated => Outcome::Rejected.label(),
            Reason::Unavailable => Outcome::FailClosed.label(),
            Reason::Key(_) => Outcome::InvalidKey.label(),
            Reason::Bulkhead => Outcome::BulkheadRejected.label(),
            Reason::Closed => "closed",
            Reason::Weight => "weight",
        };
        Self {
            policy: rejection.policy(),
            label,
            id,
            active: rejection.active(),
            limit: rejection.limit(),
            refused: true,
        }
    }

    /// Fills the fields that the current span declares; a refusal is an event too.
    #[cfg(feature = "tracing")]
    pub(super) fn record(&self) {
        let hash = self.id.map(|id| tracing::field::display(Hashed(id)));
        let span = tracing::Span::current();
        if !span.is_disabled() {
            span.record("policy", self.policy);
            span.record("decision", self.label);
            span.record("limit", self.limit);
            span.record("active", self.active);
            span.record("key_hash", &hash);
        }
        if self.refused {
            crate::trace::event!(
                debug,
                policy = self.policy,
                decision = self.label,
                limit = self.limit,
                active = self.active,
                key_hash = hash,
                "request refused"
            );
        }
    }

    #[cfg(not(feature = "tracing"))]
    pub(super) fn record(&self) {}
}

/// Hashes only where somebody looks.
#[cfg(feature = "tracing")]
struct Hashed<'a>(&'a str);

#[cfg(feature = "tracing")]
impl std::fmt::Display for Hashed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}", crate::store::short_hash(self.0))
    }
}
