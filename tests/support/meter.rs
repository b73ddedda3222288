//! What the crate measures.

use std::collections::HashMap;
use std::sync::Mutex;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tower_slots::Limiter;

/// Builds a limiter under a recorder of its own.
pub fn recorded(build: impl FnOnce() -> Limiter) -> (Limiter, Meter) {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    (metrics::with_local_recorder(&recorder, build), Meter { snapshotter, seen: Mutex::default() })
}

/// What was measured so far. A snapshot has only what came since the last one.
pub struct Meter {
    snapshotter: Snapshotter,
    seen: Mutex<HashMap<String, Vec<f64>>>,
}

impl Meter {
    /// All that was ever touched: `name` or `name{label}`, without the crate's prefix and the policy;
    /// sums for counters and gauges, all values for histograms.
    pub fn read(&self) -> HashMap<String, Vec<f64>> {
        let mut seen = self.seen.lock().expect("no panic under this lock");
        for (key, _, _, value) in self.snapshotter.snapshot().into_vec() {
            let key = key.key();
            let name = key.name().strip_prefix("tower_slots_").expect("the crate's prefix").to_owned();
            let labels = key.labels().filter(|label| label.key() != "policy");
            let labels: Vec<_> = labels.map(|label| label.value().to_owned()).collect();
            let name = if labels.is_empty() { name } else { format!("{name}{{{}}}", labels.join(",")) };
            let values = seen.entry(name).or_default();
            let mut sum = |more: f64| *values = vec![values.first().unwrap_or(&0.0) + more];
            match value {
                DebugValue::Counter(more) => sum(more as f64),
                DebugValue::Gauge(more) => sum(more.into_inner()),
                DebugValue::Histogram(more) => values.extend(more.into_iter().map(|value| value.0)),
            }
        }
        seen.clone()
    }

    /// The sum of a counter or gauge.
    pub fn sum(&self, name: &str) -> f64 {
        self.read().get(name).and_then(|values| values.first().copied()).unwrap_or(0.0)
    }
}
