use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moka::sync::Cache;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use super::ProjectId;
use crate::metrics::{Lookup as Found, Meters};
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

/// How long a lookup keeps callers waiting. It goes on meanwhile, and they take what is known.
const LOOKUP_WAIT: Duration = Duration::from_secs(1);
/// When a lookup is given up, as failed: one lost answer must not pin a limit for ever.
const LOOKUP_TIME: Duration = Duration::from_secs(10);
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
    /// The lookups in flight. Apart from the cache, which may evict an entry at any time.
    running: Arc<Running>,
    fresh_for: Duration,
}

#[derive(Default)]
struct Entry(Mutex<EntryState>);

#[derive(Default)]
struct EntryState {
    /// The last good answer, kept beyond its time for when the source fails.
    known: Option<Limit>,
    fresh_until: Option<Instant>,
    /// The newest lookup has brought an answer.
    answered: bool,
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

#[derive(Default)]
struct Running(Mutex<HashMap<ProjectId, Lookup>>);

impl Running {
    fn lock(&self) -> MutexGuard<'_, HashMap<ProjectId, Lookup>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lookup in flight.
#[derive(Clone)]
struct Lookup {
    entry: Arc<Entry>,
    since: Instant,
    /// Closes when the lookup is over.
    over: watch::Receiver<()>,
}

/// Ends a lookup, also when it panics or its runtime goes away.
struct Ending {
    running: Arc<Running>,
    id: ProjectId,
    entry: Arc<Entry>,
    _over: watch::Sender<()>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        let mut running = self.running.lock();
        // After an `invalidate` another one may run in its place.
        if running.get(&self.id).is_some_and(|lookup| Arc::ptr_eq(&lookup.entry, &self.entry)) {
            running.remove(&self.id);
        }
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
        let (lookup, cache) = (Arc::new(source), Cache::new(entries));
        Self { default, source: Some(Source { lookup, cache, running: Arc::default(), fresh_for }) }
    }

    /// The limit, if no lookup is needed.
    pub(super) fn known(&self, id: &str, meters: &Meters) -> Option<Limit> {
        let Some(source) = &self.source else { return Some(self.default) };
        let limit = source.cache.get(id)?.lock().fresh()?;
        meters.limit_lookups.get(Found::Hit).add(1);
        Some(self.or_default(limit))
    }

    /// The limit, from the source where it is not known.
    pub(super) async fn resolve(&self, id: ProjectId, terms: &Terms) -> Limit {
        let Some(source) = &self.source else { return self.default };
        self.or_default(source.resolve(id, &terms.meters).await)
    }

    pub(super) fn invalidate(&self, id: &str) {
        if let Some(source) = &self.source {
            source.running.lock().remove(id);
            source.cache.invalidate(id);
        }
    }

    fn or_default(&self, limit: Limit) -> Limit {
        if limit == Limit::Default { self.default } else { limit }
    }
}

impl Source {
    async fn resolve(&self, id: ProjectId, meters: &Meters) -> Limit {
        let (lookup, ending) = {
            let mut running = self.running.lock();
            match running.get(&id).cloned() {
                Some(lookup) => (lookup, None),
                None => {
                    let entry = self.cache.get_with(id.clone(), Arc::default);
                    let mut state = entry.lock();
                    if let Some(limit) = state.fresh() {
                        meters.limit_lookups.get(Found::Hit).add(1);
                        return limit;
                    }
                    state.answered = false;
                    drop(state);
                    let (sender, over) = watch::channel(());
                    let lookup = Lookup { entry: Arc::clone(&entry), since: Instant::now(), over };
                    running.insert(id.clone(), lookup.clone());
                    (lookup, Some(Ending { running: Arc::clone(&self.running), id, entry, _over: sender }))
                }
            }
        };
        let Lookup { entry, since, mut over } = lookup;
        let task = ending.map(|ending| tokio::spawn(self.look_up(ending)));
        // The channel only ever closes; whoever started the task gets its panic.
        let wait = async {
            match task {
                Some(task) => match task.await {
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    _ => {}
                },
                None => while over.changed().await.is_ok() {},
            }
        };
        // Answered or not: what is known decides.
        let _ = timeout_at(since + LOOKUP_WAIT, wait).await;
        let state = entry.lock();
        let found = match state.known {
            Some(_) if state.answered => Found::Miss,
            Some(_) => Found::Stale,
            None => Found::Error,
        };
        meters.limit_lookups.get(found).add(1);
        state.known.unwrap_or(Limit::Default)
    }

    fn look_up(&self, ending: Ending) -> impl Future<Output = ()> + use<> {
        let lookup = Arc::clone(&self.lookup);
        let fresh_for = self.fresh_for;
        async move {
            let answer = timeout(LOOKUP_TIME, async { lookup(ending.id.clone()).await }).await;
            let answer = answer.unwrap_or_else(|_| Err("no answer in time".into()));
            let mut state = ending.entry.lock();
            state.answered = answer.is_ok();
            let fresh_for = if state.answered { fresh_for } else { fresh_for.min(RETRY_FAILED) };
            state.fresh_until = Some(Instant::now() + fresh_for);
            match answer {
                Ok(limit) => state.known = Some(limit),
                Err(_error) => {
                    event!(warn, error = %_error, "limit source failed: the last known limit stays, else the default");
                }
            }
        }
    }
}

pub(super) fn erase(source: impl LimitSource) -> ErasedSource {
    Box::new(move |id| Box::pin(source.limit(id)))
}
