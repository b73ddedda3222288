use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moka::sync::Cache;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::ProjectId;
use crate::metrics::{Lookup, Meters};
use crate::store::Terms;
use crate::trace::event;

type BoxError = Box<dyn Error + Send + Sync>;

/// The most slots of one id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// So many. With 0 the id is paused: everyone is refused.
    Max(u32),
    /// No limit: requests pass without a call to the store.
    Unlimited,
    /// The limiter's own [`limit`](crate::LimiterBuilder::limit): a source's answer for ids that it
    /// does not know.
    Default,
}

impl From<u32> for Limit {
    fn from(most: u32) -> Self {
        Self::Max(most)
    }
}

impl PartialEq<u32> for Limit {
    fn eq(&self, most: &u32) -> bool {
        *self == Self::Max(*most)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Max(most) => most.fmt(f),
            Self::Unlimited => f.write_str("unlimited"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// Looks up the limit of an id: a plan table, a billing service.
///
/// Implemented for every `Fn(ProjectId) -> impl Future<Output = impl LimitAnswer>`; see
/// [`LimitAnswer`] for what such a future may return. Answers are cached, see
/// [`LimiterBuilder::limit_cache`](crate::LimiterBuilder::limit_cache).
pub trait LimitSource: Send + Sync + 'static {
    /// The limit of `id`.
    ///
    /// Runs in a task of its own: a caller that gives up does not cancel it.
    fn limit(&self, id: ProjectId) -> impl Future<Output = Result<Limit, BoxError>> + Send + 'static;
}

impl<F, Fut> LimitSource for F
where
    F: Fn(ProjectId) -> Fut + Send + Sync + 'static,
    Fut: Future<Output: LimitAnswer> + Send + 'static,
{
    fn limit(&self, id: ProjectId) -> impl Future<Output = Result<Limit, BoxError>> + Send + 'static {
        let answer = self(id);
        async move { answer.await.into_limit() }
    }
}

/// What a closure that serves as a [`LimitSource`] may return.
///
/// A [`Limit`]; a number, where 0 and less mean "use the default" (to pause an id, return
/// [`Limit::Max(0)`](Limit::Max)); an `Option` of these, where `None` means the default; a `Result`
/// of these.
pub trait LimitAnswer {
    /// The limit, or why there is none.
    ///
    /// # Errors
    ///
    /// The source's own.
    fn into_limit(self) -> Result<Limit, BoxError>;
}

impl LimitAnswer for Limit {
    fn into_limit(self) -> Result<Limit, BoxError> {
        Ok(self)
    }
}

macro_rules! numeric_answer {
    ($($number:ty)+) => {$(
        impl LimitAnswer for $number {
            fn into_limit(self) -> Result<Limit, BoxError> {
                #[allow(unused_comparisons, clippy::absurd_extreme_comparisons, reason = "unsigned types too")]
                if self <= 0 {
                    return Ok(Limit::Default);
                }
                Ok(Limit::Max(u32::try_from(self).unwrap_or(u32::MAX)))
            }
        }
    )+};
}

numeric_answer!(i32 i64 u32 u64 usize);

impl<T: LimitAnswer> LimitAnswer for Option<T> {
    fn into_limit(self) -> Result<Limit, BoxError> {
        self.map_or(Ok(Limit::Default), T::into_limit)
    }
}

impl<T: LimitAnswer, E: Into<BoxError>> LimitAnswer for Result<T, E> {
    fn into_limit(self) -> Result<Limit, BoxError> {
        self.map_err(Into::into)?.into_limit()
    }
}

type BoxLookup = Pin<Box<dyn Future<Output = Result<Limit, BoxError>> + Send>>;
pub(super) type ErasedSource = Box<dyn Fn(ProjectId) -> BoxLookup + Send + Sync>;

/// How long a caller waits for a lookup at the most. The lookup itself goes on.
const LOOKUP_WAIT: Duration = Duration::from_secs(1);
/// How soon a failed lookup is tried again, where the cache's own time is not shorter still.
const RETRY_FAILED: Duration = Duration::from_secs(1);

/// The limits of all ids: the default, and the source's answers with their cache.
pub(super) struct Limits {
    default: Limit,
    source: Option<Source>,
}

struct Source {
    lookup: Arc<ErasedSource>,
    cache: Cache<ProjectId, Arc<Entry>>,
    fresh_for: Duration,
}

#[derive(Default)]
struct Entry(Mutex<EntryState>);

#[derive(Default)]
struct EntryState {
    /// The last good answer, kept beyond its time for when the source fails.
    known: Option<Limit>,
    fresh_until: Option<Instant>,
    /// The newest lookup brought an error.
    failed: bool,
    /// Closes when the lookup in flight is done.
    running: Option<watch::Receiver<()>>,
}

impl Entry {
    fn lock(&self) -> MutexGuard<'_, EntryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EntryState {
    fn fresh(&self) -> Option<Limit> {
        let fresh = self.fresh_until.is_some_and(|until| Instant::now() < until);
        fresh.then_some(self.known.unwrap_or(Limit::Default))
    }
}

impl Limits {
    pub(super) fn fixed(default: Limit) -> Self {
        Self { default, source: None }
    }

    pub(super) fn with_source(
        default: Limit,
        source: ErasedSource,
        fresh_for: Duration,
        entries: u64,
    ) -> Self {
        let cache = Cache::new(entries);
        Self { default, source: Some(Source { lookup: Arc::new(source), cache, fresh_for }) }
    }

    /// The limit, if no lookup is needed.
    pub(super) fn known(&self, id: &str, meters: &Meters) -> Option<Limit> {
        let Some(source) = &self.source else { return Some(self.default) };
        let limit = source.cache.get(id)?.lock().fresh()?;
        meters.limit_lookups.get(Lookup::Hit).add(1);
        Some(self.or_default(limit))
    }

    /// The limit, from the source where it is not known.
    pub(super) async fn resolve(&self, id: ProjectId, terms: &Terms) -> Limit {
        let Some(source) = &self.source else { return self.default };
        self.or_default(source.resolve(id, &terms.meters).await)
    }

    pub(super) fn invalidate(&self, id: &str) {
        if let Some(source) = &self.source {
            source.cache.invalidate(id);
        }
    }

    fn or_default(&self, limit: Limit) -> Limit {
        if limit == Limit::Default { self.default } else { limit }
    }
}

impl Source {
    async fn resolve(&self, id: ProjectId, meters: &Meters) -> Limit {
        let entry = self.cache.get_with(id.clone(), Arc::default);
        let (mut done, task) = {
            let mut state = entry.lock();
            if let Some(limit) = state.fresh() {
                meters.limit_lookups.get(Lookup::Hit).add(1);
                return limit;
            }
            // A lookup whose task died with its runtime has closed its channel too.
            match state.running.clone().filter(|running| running.has_changed().is_ok()) {
                Some(done) => (done, None),
                None => {
                    let (guard, done) = watch::channel(());
                    state.running = Some(done.clone());
                    (done, Some(tokio::spawn(self.look_up(id, Arc::clone(&entry), guard))))
                }
            }
        };
        // The channel only ever closes; whoever started the task gets its panic.
        let waited = timeout(LOOKUP_WAIT, async {
            match task {
                Some(task) => match task.await {
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    _ => {}
                },
                None => while done.changed().await.is_ok() {},
            }
        })
        .await;
        let state = entry.lock();
        let result = match state.known {
            Some(_) if waited.is_ok() && !state.failed => Lookup::Miss,
            Some(_) => Lookup::Stale,
            None => Lookup::Error,
        };
        meters.limit_lookups.get(result).add(1);
        state.known.unwrap_or(Limit::Default)
    }

    fn look_up(
        &self,
        id: ProjectId,
        entry: Arc<Entry>,
        done: watch::Sender<()>,
    ) -> impl Future<Output = ()> + use<> {
        let lookup = Arc::clone(&self.lookup);
        let fresh_for = self.fresh_for;
        async move {
            let answer = lookup(id).await;
            let mut state = entry.lock();
            state.failed = answer.is_err();
            let fresh_for = if state.failed { fresh_for.min(RETRY_FAILED) } else { fresh_for };
            state.fresh_until = Some(Instant::now() + fresh_for);
            state.running = None;
            match answer {
                Ok(limit) => state.known = Some(limit),
                Err(_error) => {
                    event!(warn, error = %_error, "limit source failed: the last known limit stays, else the default");
                }
            }
            drop((state, done));
        }
    }
}

pub(super) fn erase(source: impl LimitSource) -> ErasedSource {
    Box::new(move |id| Box::pin(source.limit(id)))
}
