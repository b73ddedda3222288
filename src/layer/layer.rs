use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderValue, StatusCode};
use tower_layer::Layer;

use super::body::RefusalBody;
use super::key::{AsyncKeyExtractor, Everyone, KeyExtractor};
use super::reject::{Problems, RejectResponse, check_problem_type};
use super::settings::{Key, Settings};
use super::{ConcurrencyLimit, Hold, OnMissing, RateLimitFields, Rejection};
use crate::error::ConfigError;
use crate::limiter::{Limit, Limiter};
use crate::semaphore::Semaphore;
#[cfg(feature = "redis")]
use crate::store::redis::RedisStore;
use crate::store::{MemoryStore, SlotStore};

/// Limits how many requests of each project are in flight at once.
///
/// A cheap clone. All clones, and all services made from them, share one limiter and with it one
/// limit, however often a framework applies the layer.
///
/// ```
/// use tower_slots::ConcurrencyLimitLayer;
///
/// // 10 requests in flight per `x-project-id`, in this process.
/// let layer = ConcurrencyLimitLayer::in_memory(10);
/// ```
///
/// See the [module's documentation](crate::layer) for what it does with a request.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is put on a service"]
pub struct ConcurrencyLimitLayer {
    settings: Arc<Settings>,
}

impl ConcurrencyLimitLayer {
    /// A layer that takes its slots from `limiter`, for requests with a header `x-project-id`.
    pub fn new(limiter: Limiter) -> Self {
        Self { settings: Arc::new(Settings::new(limiter)) }
    }

    /// A layer with a limiter of its own, whose slots are in this process's memory.
    ///
    /// With [`Limit::Default`] it is the limit of a limiter that was told none: 10.
    pub fn in_memory(limit: impl Into<Limit>) -> Self {
        Self::on_store(MemoryStore::new(), limit.into())
    }

    /// A layer with a limiter of its own, whose slots are in Redis, shared by the fleet.
    ///
    /// With [`Limit::Default`] it is the limit of a limiter that was told none: 10.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    pub fn redis(store: impl Into<RedisStore>, limit: impl Into<Limit>) -> Self {
        Self::on_store(store.into(), limit.into())
    }

    /// A layer that limits what this process runs at once, whoever asks, and nothing else.
    ///
    /// All requests share the semaphore; no request needs an id.
    ///
    /// ```
    /// use tower_slots::{ConcurrencyLimitLayer, semaphore::Semaphore};
    ///
    /// # fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = ConcurrencyLimitLayer::bulkhead_only(Semaphore::builder(64).build()?);
    /// # Ok(()) }
    /// # run().unwrap();
    /// ```
    pub fn bulkhead_only(semaphore: Semaphore) -> Self {
        let limiter = Limiter::builder(MemoryStore::new()).name("bulkhead").limit(Limit::Unlimited);
        Self::new(limiter.build_unchecked()).key(Everyone::default()).bulkhead(semaphore)
    }

    fn on_store(store: impl SlotStore, limit: Limit) -> Self {
        let builder = Limiter::builder(store);
        let builder = if limit == Limit::Default { builder } else { builder.limit(limit) };
        Self::new(builder.build_unchecked())
    }

    /// Where the project id of a request comes from. Default: the header `x-project-id`.
    ///
    /// See [`key`](crate::key) for what there is.
    pub fn key(self, key: impl KeyExtractor) -> Self {
        self.with(|settings| settings.key = Key::Now(Arc::new(key)))
    }

    /// Where the project id of a request comes from, if finding out takes a wait. It replaces
    /// [`key`](Self::key).
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_slots::{ConcurrencyLimitLayer, KeyError};
    ///
    /// async fn project_of(token: String) -> Result<Option<String>, KeyError> {
    ///     Ok(Some(token)) // … asks somebody …
    /// }
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10).key_async(|parts: &Parts| {
    ///     let token = parts.headers.get("x-token").and_then(|token| token.to_str().ok()).map(str::to_owned);
    ///     async move { project_of(token.ok_or(KeyError::Missing)?).await }
    /// });
    /// ```
    pub fn key_async(self, key: impl AsyncKeyExtractor) -> Self {
        self.with(|settings| settings.key = Key::Later(Arc::new(key)))
    }

    /// What becomes of requests without an id. Default [`OnMissing::Refuse`].
    pub fn on_missing(self, policy: OnMissing) -> Self {
        self.with(|settings| settings.on_missing = policy)
    }

    /// How many slots a request takes, all or none. Default 1.
    ///
    /// A weight that can never be admitted (0, more than the project's limit or the limiter's
    /// [`max_weight`](crate::LimiterBuilder::max_weight)) is refused with 400.
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_slots::ConcurrencyLimitLayer;
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10)
    ///     .weight(|parts: &Parts| if parts.uri.path() == "/batch" { 5 } else { 1 });
    /// ```
    pub fn weight(self, weigh: impl Fn(&Parts) -> u32 + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.weigh = Some(Arc::new(weigh)))
    }

    /// Which requests pass without a slot and without being asked for an id: health checks. Default:
    /// none. CORS preflights always do. A second call replaces the first.
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_slots::ConcurrencyLimitLayer;
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10).skip(|parts: &Parts| parts.uri.path() == "/health");
    /// ```
    pub fn skip(self, exempt: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.exempt = Some(Arc::new(exempt)))
    }

    /// Until when a request holds its slot. Default [`Hold::Body`].
    pub fn hold(self, hold: Hold) -> Self {
        self.with(|settings| settings.hold = hold)
    }

    /// Puts a local semaphore in front of the limiter: a cap on what this process runs at once, of
    /// all projects together.
    ///
    /// A request takes a permit of its weight first, and its slot then; if the slot is refused, the
    /// permit goes back. The permit lives exactly as long as the slot. A full bulkhead is not the
    /// caller's fault: 503. Once the semaphore is [closed](Semaphore::close), requests are refused at
    /// once, those in flight go on, and [`wait_idle`](Semaphore::wait_idle) tells when they are done.
    ///
    /// For a cap per project within one process, use a limiter over a [`MemoryStore`].
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_slots::{ConcurrencyLimitLayer, Limiter, MemoryStore, semaphore::Semaphore};
    ///
    /// # fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// // 10 of each project (over the fleet, with a `RedisStore`), 64 of all together in this process.
    /// let limiter = Limiter::builder(MemoryStore::new()).limit(10).build()?;
    /// let layer = ConcurrencyLimitLayer::new(limiter)
    ///     .bulkhead(Semaphore::builder(64).max_waiters(128).build()?)
    ///     .bulkhead_wait(Duration::from_millis(200));
    /// # Ok(()) }
    /// # run().unwrap();
    /// ```
    pub fn bulkhead(self, semaphore: Semaphore) -> Self {
        self.with(|settings| settings.bulkhead = Some(semaphore))
    }

    /// How long a request waits in the [bulkhead](Self::bulkhead)'s queue, in the order of arrival, if
    /// that has room. Default: not at all.
    pub fn bulkhead_wait(self, most: Duration) -> Self {
        self.with(|settings| settings.bulkhead_wait = Some(most))
    }

    /// The status that answers a full [bulkhead](Self::bulkhead). Default 503.
    pub fn bulkhead_status(self, status: StatusCode) -> Self {
        self.with(|settings| settings.bulkhead_status = status)
    }

    /// Makes the answer to refused requests. Default: one in the request's protocol, see the
    /// [module's documentation](crate::layer).
    ///
    /// The hook's answer goes out as it is, status included, whatever the request's protocol. If its
    /// body fails, it ends there.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Response, request::Parts};
    /// use http_body_util::Full;
    /// use tower_slots::{ConcurrencyLimitLayer, Rejection};
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10).on_reject(|rejection: &Rejection, _parts: &Parts| {
    ///     let mut response = Response::new(Full::new(Bytes::from_static(b"try again later")));
    ///     *response.status_mut() = rejection.status();
    ///     response
    /// });
    /// ```
    pub fn on_reject<R>(self, hook: impl Fn(&Rejection, &Parts) -> R + Send + Sync + 'static) -> Self
    where
        R: RejectResponse,
    {
        self.with(|settings| {
            settings.on_reject = Some(Arc::new(move |rejection, parts| {
                hook(rejection, parts).into_response().map(RefusalBody::hook)
            }));
        })
    }

    /// Says when a refused request should be tried again, in place of the limiter's estimate. At least
    /// a second.
    ///
    /// It is asked about refusals that may end by waiting, which are those with a
    /// [`Rejection::retry_after`]: that is the estimate. Its answer takes the estimate's place there,
    /// in `Retry-After` and in `RetryInfo`, rounded up to whole seconds.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::request::Parts;
    /// use tower_slots::{ConcurrencyLimitLayer, Rejection};
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10).retry_after(|rejection: &Rejection, parts: &Parts| {
    ///     let estimate = rejection.retry_after().unwrap_or_default();
    ///     if parts.uri.path() == "/reports" { Duration::from_secs(60) } else { estimate }
    /// });
    /// ```
    pub fn retry_after(self, hook: impl Fn(&Rejection, &Parts) -> Duration + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.answers.retry_after = Some(Arc::new(hook)))
    }

    /// Answers an id that is missing or unusable with 401 and this `WWW-Authenticate`, rather than with
    /// 400: for ids that are credentials, or come from them. In gRPC and Connect it is UNAUTHENTICATED.
    ///
    /// ```
    /// use http::HeaderValue;
    /// use tower_slots::ConcurrencyLimitLayer;
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10).challenge(HeaderValue::from_static("Bearer"));
    /// ```
    pub fn challenge(self, challenge: HeaderValue) -> Self {
        self.with(|settings| settings.answers.challenge = Some(challenge))
    }

    /// Tells clients their limit, and what is left of it, in RateLimit header fields. Default: not.
    ///
    /// They are added to what an admitted request is answered, and to 429s, where nothing is left. They
    /// never stand in a 400 or 401, in the answer of an [`on_reject`](Self::on_reject) hook, in gRPC's
    /// refusals, or where nobody has counted: without a limit, while an outage lets all pass, and in
    /// [`shadow`](Self::shadow). In an outage under [`OnOutage::Local`](crate::OnOutage::Local) they
    /// tell this process's share. Fields of others stay.
    ///
    /// ```
    /// use tower_slots::{ConcurrencyLimitLayer, layer::RateLimitFields};
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10).rate_limit_fields(RateLimitFields::DraftIetf11);
    /// ```
    pub fn rate_limit_fields(self, revision: RateLimitFields) -> Self {
        self.with(|settings| settings.answers.fields = Some(revision))
    }

    /// The `type` of the problem document that answers a project at its limit: a URI. Default
    /// `https://iana.org/assignments/http-problem-types#quota-exceeded`, whose registration is still
    /// a draft.
    ///
    /// # Errors
    ///
    /// It is empty, or holds anything but printable ASCII without spaces, quotes and backslashes.
    pub fn problem_type(self, uri: impl AsRef<str>) -> Result<Self, ConfigError> {
        let uri = uri.as_ref();
        check_problem_type(uri)?;
        let problems = Problems::with_type(uri, self.limiter().name());
        Ok(self.with(|settings| settings.answers.problems = problems))
    }

    /// Refuses nobody, but counts who would have been: to see what a limit would do. Default `false`.
    ///
    /// What would be refused, for whatever reason, passes without a slot, counts as
    /// `result="would_reject"`, and is a debug event.
    pub fn shadow(self, on: bool) -> Self {
        self.with(|settings| settings.shadow = on)
    }

    /// The limiter behind this layer.
    #[must_use]
    pub fn limiter(&self) -> &Limiter {
        &self.settings.limiter
    }

    /// Clones and services made before keep what they have.
    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

impl<S> Layer<S> for ConcurrencyLimitLayer {
    type Service = ConcurrencyLimit<S>;

    fn layer(&self, inner: S) -> ConcurrencyLimit<S> {
        ConcurrencyLimit::new(Arc::clone(&self.settings), inner)
    }
}

impl fmt::Debug for ConcurrencyLimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { limiter, on_missing, hold, shadow, .. } = &*self.settings;
        f.debug_struct("ConcurrencyLimitLayer")
            .field("limiter", limiter)
            .field("on_missing", on_missing)
            .field("hold", hold)
            .field("shadow", shadow)
            .finish_non_exhaustive()
    }
}
