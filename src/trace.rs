//! Log events that cost nothing, not even their arguments, without the `tracing` feature.

macro_rules! event {
    ($level:ident, $($arg:tt)+) => {{
        #[cfg(feature = "tracing")]
        ::tracing::$level!(target: "tower_slots", $($arg)+);
    }};
}

pub(crate) use event;

/// Lets one event a minute through, of a kind that may come in thousands.
#[derive(Default)]
pub(crate) struct Sparingly(std::sync::Mutex<Option<std::time::Instant>>);

impl Sparingly {
    pub(crate) fn due(&self) -> bool {
        let now = std::time::Instant::now();
        let mut last = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let due = last.is_none_or(|last| now - last >= std::time::Duration::from_secs(60));
        if due {
            *last = Some(now);
        }
        due
    }
}
