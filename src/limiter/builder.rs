use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::id::MAX_PREFIX_BYTES;
use super::limits::{ErasedSource, Limits, erase};
use super::{Core, Limit, LimitSource, Limiter, OnOutage};
use crate::error::ConfigError;
use crate::metrics::Meters;
use crate::store::{MAX_WEIGHT, SlotStore, Terms};
use crate::trace::event;

const LEASES: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 3600);
/// Longer times mean for ever. Clocks overflow somewhere beyond.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Settings of a [`Limiter`]; see each method for its default.
#[must_use = "a builder does nothing until `build`"]
pub struct LimiterBuilder {
    store: Arc<dyn SlotStore>,
    name: &'static str,
    limit: Limit,
    source: Option<ErasedSource>,
    cache_time: Duration,
    cache_entries: u64,
    lease: Duration,
    max_hold: Option<Duration>,
    reuse: Option<Duration>,
    max_weight: u32,
    prefix: String,
    store_timeout: Duration,
    on_outage: OnOutage,
}

impl LimiterBuilder {
    pub(super) fn new(store: Arc<dyn SlotStore>) -> Self {
        Self {
            store,
            name: "concurrency",
            limit: Limit::Max(10),
            source: None,
            cache_time: Duration::from_secs(60),
            cache_entries: 100_000,
            lease: Duration::from_secs(30),
            max_hold: None,
            reuse: None,
            max_weight: MAX_WEIGHT,
            prefix: "sem:".to_owned(),
            store_timeout: Duration::from_millis(250),
            on_outage: OnOutage::Admit,
        }
    }

    /// The limiter's name: the `policy` label of metrics, and the policy in refusals. Printable
    /// ASCII without quotes and backslashes. Default `"concurrency"`.
    pub fn name(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// The limit of ids that have none of their own: a number, or a [`Limit`]. With 0 they are all
    /// refused, which makes sense beside a [`limits`](Self::limits) source. Default 10.
    pub fn limit(mut self, limit: impl Into<Limit>) -> Self {
        self.limit = limit.into();
        self
    }

    /// Where the limits of single ids come from. Default: nowhere, all have the same.
    ///
    /// One lookup per id is in flight at a time. It keeps callers waiting for a second, after which
    /// they take, as after an error, the last known limit, else the default one; after ten seconds it
    /// is given up.
    ///
    /// ```
    /// use tower_slots::{Limit, Limiter, MemoryStore, ProjectId};
    ///
    /// let limiter = Limiter::builder(MemoryStore::new())
    ///     .limit(5)
    ///     .limits(|id: ProjectId| async move {
    ///         if id.starts_with("gold-") { Limit::Max(50) } else { Limit::Default }
    ///     })
    ///     .build();
    /// assert!(limiter.is_ok());
    /// ```
    pub fn limits(mut self, source: impl LimitSource) -> Self {
        self.source = Some(erase(source));
        self
    }

    /// For how long an answer of the limit source holds, and for how many ids answers are kept.
    /// Default 60 s and 100 000 ids.
    pub fn limit_cache(mut self, time: Duration, entries: u64) -> Self {
        self.cache_time = time;
        self.cache_entries = entries;
        self
    }

    /// How long a slot outlives its last renewal: after a crash its slots are free within this time.
    /// From 1 s to 24 h, default 30 s. Held slots are renewed three times in it.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Gives a slot back after this time although its holder lives. Default: never.
    ///
    /// For clients that are gone without the server noticing. [`Slot::lost`](crate::Slot::lost)
    /// tells the holder.
    pub fn max_hold(mut self, most: Duration) -> Self {
        self.max_hold = Some(most);
        self
    }

    /// Keeps released slots in this process, each for up to this time, for the next requests of the same
    /// id and weight. Default: not at all; from 1 ms to a third of the lease.
    ///
    /// Such a request costs no round trip, and the store no work: ids with many requests that are
    /// shorter than this time gain the most. A slot stays taken in the store meanwhile, so that the limit
    /// holds as ever; but what is kept is kept from others. So a process keeps slots only while no more
    /// than half of the id's limit is in use, by what the store said within this time. It gives them back
    /// when it hears of more, when it has heard nothing for that long, and when the id is drained or the
    /// limiter shut down or dropped. What remains: for so long after the use has passed half the limit,
    /// other processes may be refused although up to half the limit is idle.
    ///
    /// A [`drain`](Limiter::drain) by another process takes kept slots along, which this one finds out
    /// with their next renewal; requests that they served meanwhile learn it by
    /// [`Slot::lost`](crate::Slot::lost). Slots are kept only where a tokio runtime runs, since a task
    /// gives them back.
    pub fn reuse(mut self, time: Duration) -> Self {
        self.reuse = Some(time);
        self
    }

    /// The most slots that one request may take, from 1 to [`MAX_WEIGHT`]. Default [`MAX_WEIGHT`].
    pub fn max_weight(mut self, most: u32) -> Self {
        self.max_weight = most;
        self
    }

    /// What the name of every key in the store begins with: up to 64 bytes of printable ASCII
    /// without spaces and braces, or nothing. Default `"sem:"`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long a request waits for the store at the most; then [`on_outage`](Self::on_outage)
    /// decides. More than 0 and less than the lease, default 250 ms.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.store_timeout = timeout;
        self
    }

    /// What becomes of requests while the store cannot answer. Default [`OnOutage::Admit`].
    pub fn on_outage(mut self, policy: OnOutage) -> Self {
        self.on_outage = policy;
        self
    }

    /// Checks the settings and builds the limiter. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// Names the first setting that cannot work.
    pub fn build(self) -> Result<Limiter, ConfigError> {
        self.check()?;
        Ok(self.build_unchecked())
    }

    /// For settings that are known to work.
    pub(crate) fn build_unchecked(self) -> Limiter {
        if self.limit == Limit::Max(0) && self.source.is_none() {
            event!(
                warn,
                policy = self.name,
                "limit 0 refuses every request: set a limit, or a source of limits"
            );
        }
        Limiter::new(self.into_core())
    }

    fn into_core(self) -> Core {
        let limits = match self.source {
            None => Limits::fixed(self.limit),
            Some(source) => {
                Limits::with_source(self.limit, source, self.cache_time.min(FOREVER), self.cache_entries)
            }
        };
        let terms = Terms {
            policy: self.name,
            lease: self.lease,
            max_hold: self.max_hold.filter(|most| *most < FOREVER),
            timeout: self.store_timeout,
            meters: Meters::new(self.name),
        };
        // Until the store says otherwise; one in memory never does.
        terms.meters.store_up.set(1.0);
        Core::new(self.store, terms, self.prefix, self.max_weight, limits, self.on_outage.into(), self.reuse)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let rules = [
            (
                is_name(self.name),
                "name",
                "must be 1 to 64 printable ascii characters without quotes and backslashes",
            ),
            (
                self.limit != Limit::Default,
                "limit",
                "must be a number or unlimited: it is the default itself",
            ),
            (self.cache_entries > 0, "limit_cache", "must keep at least one entry"),
            (LEASES.contains(&self.lease), "lease", "must be from 1 s to 24 h"),
            (self.max_hold != Some(Duration::ZERO), "max_hold", "must be more than 0"),
            (
                self.reuse.is_none_or(|time| is_reuse(time, self.lease)),
                "reuse",
                "must be from 1 ms to a third of the lease",
            ),
            ((1..=MAX_WEIGHT).contains(&self.max_weight), "max_weight", "must be from 1 to 1024"),
            (
                is_prefix(&self.prefix),
                "prefix",
                "must be up to 64 printable ascii characters without spaces and braces",
            ),
            (!self.store_timeout.is_zero(), "store_timeout", "must be more than 0"),
            (self.store_timeout < self.lease, "store_timeout", "must be less than the lease"),
            (is_share(self.on_outage), "on_outage", "the local share must be from 0 to 1"),
        ];
        match rules.into_iter().find(|(holds, ..)| !holds) {
            Some((_, field, problem)) => Err(ConfigError::new(field, problem)),
            None => Ok(()),
        }
    }
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|b| matches!(b, b' '..=b'~') && b != b'"' && b != b'\\')
}

fn is_reuse(time: Duration, lease: Duration) -> bool {
    (Duration::from_millis(1)..=lease / 3).contains(&time)
}

fn is_prefix(prefix: &str) -> bool {
    prefix.len() <= MAX_PREFIX_BYTES && prefix.bytes().all(|b| b.is_ascii_graphic() && b != b'{' && b != b'}')
}

fn is_share(policy: OnOutage) -> bool {
    match policy {
        OnOutage::Local { share } => (0.0..=1.0).contains(&share),
        OnOutage::Admit | OnOutage::Refuse => true,
    }
}

impl fmt::Debug for LimiterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimiterBuilder")
            .field("name", &self.name)
            .field("limit", &self.limit)
            .field("lease", &self.lease)
            .field("max_hold", &self.max_hold)
            .field("reuse", &self.reuse)
            .field("prefix", &self.prefix)
            .field("store_timeout", &self.store_timeout)
            .field("on_outage", &self.on_outage)
            .finish_non_exhaustive()
    }
}
