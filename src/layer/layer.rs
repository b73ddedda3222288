use std::fmt;
use std::sync::Arc;

use http::request::Parts;
use tower_layer::Layer;

use super::body::RefusalBody;
use super::key::KeyExtractor;
use super::reject::{Problems, RejectResponse, check_problem_type};
use super::settings::Settings;
use super::{ConcurrencyLimit, Hold, OnMissing, Rejection};
use crate::error::ConfigError;
use crate::limiter::{Limit, Limiter};
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

    fn on_store(store: impl SlotStore, limit: Limit) -> Self {
        let builder = Limiter::builder(store);
        let builder = if limit == Limit::Default { builder } else { builder.limit(limit) };
        Self::new(builder.build_unchecked())
    }

    /// Where the project id of a request comes from. Default: the header `x-project-id`.
    ///
    /// See [`key`](crate::key) for what there is.
    pub fn key(self, key: impl KeyExtractor) -> Self {
        self.with(|settings| settings.key = Arc::new(key))
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

    /// Makes the answer to refused requests. Default: a problem document, see the
    /// [module's documentation](crate::layer).
    ///
    /// The hook's answer goes out as it is, status included. If its body fails, it ends there.
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
        Ok(self.with(|settings| settings.problems = problems))
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
