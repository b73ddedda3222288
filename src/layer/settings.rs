use std::sync::{Arc, Once};
use std::time::Duration;

use http::header::ACCESS_CONTROL_REQUEST_METHOD;
use http::request::Parts;
use http::{Method, Response, StatusCode};

use super::body::RefusalBody;
use super::key::{AsyncKeyExtractor, Header, KeyExtractor};
use super::reject::Answers;
use super::{Hold, OnMissing, Rejection};
use crate::limiter::{Acquire, KeyError, Limiter, ProjectId, Slot};
use crate::semaphore::Semaphore;

pub(super) type Weigh = dyn Fn(&Parts) -> u32 + Send + Sync;
pub(super) type Exempt = dyn Fn(&Parts) -> bool + Send + Sync;
pub(super) type OnReject = dyn Fn(&Rejection, &Parts) -> Response<RefusalBody> + Send + Sync;

/// Who says whose request it is.
#[derive(Clone)]
pub(super) enum Key {
    Now(Arc<dyn KeyExtractor>),
    Later(Arc<dyn AsyncKeyExtractor>),
}

/// All that the services of one layer share.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) limiter: Limiter,
    pub(super) key: Key,
    pub(super) on_missing: OnMissing,
    pub(super) weigh: Option<Arc<Weigh>>,
    pub(super) exempt: Option<Arc<Exempt>>,
    pub(super) hold: Hold,
    pub(super) bulkhead: Option<Semaphore>,
    /// How long a request may queue for a permit; `None`: not at all.
    pub(super) bulkhead_wait: Option<Duration>,
    /// The answer where the bulkhead is full.
    pub(super) bulkhead_status: StatusCode,
    pub(super) on_reject: Option<Arc<OnReject>>,
    pub(super) answers: Answers,
    pub(super) shadow: bool,
    pub(super) unheld_warning: Arc<Once>,
}

impl Settings {
    pub(super) fn new(limiter: Limiter) -> Self {
        Self {
            answers: Answers::new(limiter.name()),
            limiter,
            key: Key::Now(Arc::new(Header::default())),
            on_missing: OnMissing::Refuse,
            weigh: None,
            exempt: None,
            hold: Hold::Body,
            bulkhead: None,
            bulkhead_wait: None,
            bulkhead_status: StatusCode::SERVICE_UNAVAILABLE,
            on_reject: None,
            shadow: false,
            unheld_warning: Arc::new(Once::new()),
        }
    }

    /// Whether the request passes without being asked for an id: a health check has none.
    pub(super) fn passes(&self, parts: &Parts) -> bool {
        is_preflight(parts) || self.exempt.as_ref().is_some_and(|exempt| exempt(parts))
    }

    /// Who is limited, or `None` if this request is not.
    pub(super) fn who(
        &self,
        found: Result<Option<ProjectId>, KeyError>,
    ) -> Result<Option<ProjectId>, KeyError> {
        match found {
            Err(error @ (KeyError::Missing | KeyError::Empty)) => match &self.on_missing {
                OnMissing::Refuse => Err(error),
                OnMissing::Skip => Ok(None),
                OnMissing::Shared(id) => Ok(Some(id.clone())),
            },
            found => found,
        }
    }

    pub(super) fn how(&self, parts: &Parts) -> Acquire {
        let weight = self.weigh.as_ref().map_or(1, |weigh| weigh(parts));
        if self.shadow { Acquire::weight(weight).shadow() } else { Acquire::weight(weight) }
    }

    pub(super) fn answer(&self, rejection: Rejection, parts: &Parts) -> Response<RefusalBody> {
        let rejection = self.answers.adjust(rejection, parts);
        let mut response = match &self.on_reject {
            Some(hook) => hook(&rejection, parts),
            None => self.answers.answer(&rejection, parts),
        };
        response.extensions_mut().insert(rejection);
        response
    }

    /// Tells an admitted request's client what is left, if it is to be told. In shadow there is no
    /// limit to tell of.
    pub(super) fn announce<B>(&self, slot: &Slot, response: &mut Response<B>) {
        if !self.shadow {
            self.answers.admitted(self.limiter.name(), slot, response);
        }
    }
}

/// A browser's question whether it may ask: it cannot carry an id.
fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}
