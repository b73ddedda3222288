//! Every metric: its name, unit, description and labels, once.
//!
//! Handles are made when a limiter is built, against the recorder that is installed then.

use crate::error::StoreErrorKind;
use crate::labels::closed_set;

closed_set! {
    /// What became of a request.
    pub(crate) enum Outcome {
        Admitted = "admitted",
        Rejected = "rejected",
        Skipped = "skipped",
        FailOpen = "fail_open",
        FailClosed = "fail_closed",
        LocalAdmitted = "local_admitted",
        LocalRejected = "local_rejected",
        InvalidKey = "invalid_key",
        BulkheadRejected = "bulkhead_rejected",
        WouldReject = "would_reject",
    }
}

closed_set! {
    /// What an acquire came to, as the store saw it.
    pub(crate) enum Acquired {
        Granted = "granted",
        Refused = "refused",
        Error = "error",
    }
}

closed_set! {
    /// How a hold ended.
    pub(crate) enum End {
        Dropped = "dropped",
        Completed = "completed",
        Error = "error",
        Upgraded = "upgraded",
        Lost = "lost",
        MaxHold = "max_hold",
    }
}

closed_set! {
    /// What a renewal came to.
    pub(crate) enum Renewal {
        Renewed = "renewed",
        Reasserted = "reasserted",
        Lost = "lost",
        Error = "error",
    }
}

closed_set! {
    /// What a release came to.
    pub(crate) enum Released {
        Confirmed = "confirmed",
        Retried = "retried",
        Lapsed = "lapsed",
    }
}

closed_set! {
    /// How a limit was found.
    pub(crate) enum Lookup {
        Hit = "hit",
        Miss = "miss",
        Error = "error",
        Stale = "stale",
    }
}

closed_set! {
    /// What a store was asked to do.
    pub(crate) enum Operation {
        Acquire = "acquire",
        Release = "release",
        Renew = "renew",
        Count = "count",
        Drain = "drain",
    }
}

closed_set! {
    /// Whether a store is asked.
    pub(crate) enum Breaker {
        Closed = "closed",
        HalfOpen = "half_open",
        Open = "open",
    }
}

pub(crate) use imp::{Counter, Gauge, Histogram};

/// One handle per value of a closed label.
pub(crate) struct Family<T>(Box<[T]>);

impl<T> Family<T> {
    pub(crate) fn get(&self, value: impl Into<usize>) -> &T {
        &self.0[value.into()]
    }
}

macro_rules! meters {
    ($($field:ident: $kind:ident $([$($label:literal in $set:ty),+])?, $name:literal, $unit:ident, $help:literal;)+) => {
        /// The handles of one limiter, labelled with its name as `policy`.
        pub(crate) struct Meters { $(pub(crate) $field: meters!(@type $kind $([$($label),+])?),)+ }

        impl Meters {
            pub(crate) fn new(policy: &'static str) -> Self {
                $(imp::$kind::describe(concat!("tower_slots_", $name), imp::unit!($unit), $help);)+
                Self { $($field: meters!(@make policy, $kind, concat!("tower_slots_", $name) $(, $($label in $set),+)?),)+ }
            }
        }
    };
    (@type $kind:ident) => { $kind };
    (@type $kind:ident [$label:literal]) => { Family<$kind> };
    (@type $kind:ident [$outer:literal, $inner:literal]) => { Family<Family<$kind>> };
    (@make $policy:ident, $kind:ident, $name:expr) => { imp::$kind::new($name, &[("policy", $policy)]) };
    (@make $policy:ident, $kind:ident, $name:expr, $label:literal in $set:ty) => {
        Family(<$set>::LABELS.iter().map(|value| imp::$kind::new($name, &[("policy", $policy), ($label, *value)])).collect())
    };
    (@make $policy:ident, $kind:ident, $name:expr, $outer:literal in $a:ty, $inner:literal in $b:ty) => {
        Family(<$a>::LABELS.iter().map(|a| {
            Family(<$b>::LABELS.iter().map(|b| {
                imp::$kind::new($name, &[("policy", $policy), ($outer, *a), ($inner, *b)])
            }).collect())
        }).collect())
    };
}

meters! {
    requests: Counter["result" in Outcome], "requests_total", Count, "Requests by what became of them.";
    active_slots: Gauge, "active_slots", Count, "Slots held by this process.";
    hold_seconds: Histogram["end" in End], "slot_hold_seconds", Seconds, "Time from acquire to release.";
    acquire_seconds: Histogram["result" in Acquired], "acquire_seconds", Seconds, "Time to the store's answer.";
    utilization: Histogram, "utilization_ratio", Count, "Slots in use over the limit, at each acquire.";
    reused: Counter, "slots_reused_total", Count, "Requests served by a slot that this process had kept.";
    lost: Counter, "slots_lost_total", Count, "Slots gone before their holder released them.";
    reasserted: Counter, "slots_reasserted_total", Count, "Slots put into the store that did not have them: it had lost its data, or was down when they were admitted.";
    expired: Counter, "slots_expired_total", Count, "Slots whose lease ran out, evicted by a call of this process.";
    renewals: Counter["result" in Renewal], "renewals_total", Count, "Renewals of held slots.";
    releases: Counter["result" in Released], "releases_total", Count, "Releases sent to the store.";
    release_backlog: Gauge, "release_backlog", Count, "Releases not yet confirmed by the store.";
    store_errors: Counter["operation" in Operation, "error" in StoreErrorKind], "store_errors_total", Count, "Calls that the store could not answer.";
    store_up: Gauge, "store_up", Count, "1 while the store answers, 0 while it is not asked.";
    breaker_state: Gauge, "breaker_state", Count, "0 closed, 1 half open, 2 open.";
    limit_lookups: Counter["result" in Lookup], "limit_lookups_total", Count, "Limits by where they came from.";
    upgrade_unheld: Counter, "upgrade_unheld_total", Count, "Upgraded connections whose slot nobody kept.";
    batch_size: Histogram, "batch_size", Count, "Slots taken and given back by one call to the store.";
}

#[cfg(feature = "metrics")]
mod imp {
    use ::metrics::{KeyName, Label, Level, Metadata, SharedString, Unit, with_recorder};

    static METADATA: Metadata<'static> = Metadata::new("tower_slots", Level::INFO, Some(module_path!()));

    fn key(name: &'static str, labels: &[(&'static str, &'static str)]) -> ::metrics::Key {
        let labels: Vec<Label> =
            labels.iter().map(|(name, value)| Label::from_static_parts(name, value)).collect();
        ::metrics::Key::from_parts(name, labels)
    }

    macro_rules! kind {
        ($kind:ident, $describe:ident, $register:ident) => {
            pub(crate) struct $kind(::metrics::$kind);

            impl $kind {
                pub(super) fn describe(name: &'static str, unit: Unit, help: &'static str) {
                    with_recorder(|r| {
                        r.$describe(KeyName::from_const_str(name), Some(unit), SharedString::const_str(help))
                    });
                }

                pub(super) fn new(name: &'static str, labels: &[(&'static str, &'static str)]) -> Self {
                    Self(with_recorder(|r| r.$register(&key(name, labels), &METADATA)))
                }
            }
        };
    }

    kind!(Counter, describe_counter, register_counter);
    kind!(Gauge, describe_gauge, register_gauge);
    kind!(Histogram, describe_histogram, register_histogram);

    impl Counter {
        pub(crate) fn add(&self, n: u64) {
            self.0.increment(n);
        }
    }

    impl Gauge {
        pub(crate) fn set(&self, value: f64) {
            self.0.set(value);
        }

        pub(crate) fn add(&self, n: f64) {
            self.0.increment(n);
        }
    }

    impl Histogram {
        pub(crate) fn record(&self, value: f64) {
            self.0.record(value);
        }
    }

    macro_rules! unit {
        ($unit:ident) => {
            ::metrics::Unit::$unit
        };
    }
    pub(super) use unit;
}

#[cfg(not(feature = "metrics"))]
mod imp {
    macro_rules! kind {
        ($kind:ident, $($method:ident($arg:ty)),+) => {
            pub(crate) struct $kind;

            impl $kind {
                pub(super) fn describe(_name: &'static str, _unit: (), _help: &'static str) {}

                pub(super) fn new(_name: &'static str, _labels: &[(&'static str, &'static str)]) -> Self {
                    Self
                }

                $(pub(crate) fn $method(&self, _: $arg) {})+
            }
        };
    }

    kind!(Counter, add(u64));
    kind!(Gauge, set(f64), add(f64));
    kind!(Histogram, record(f64));

    macro_rules! unit {
        ($unit:ident) => {
            ()
        };
    }
    pub(super) use unit;
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use super::*;

    #[test]
    fn families_carry_every_label_value() {
        let meters = Meters::new("test");
        meters.requests.get(Outcome::WouldReject).add(1);
        meters.store_errors.get(Operation::Drain).get(StoreErrorKind::Other).add(1);
    }
}
