use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use http::request::Parts;

#[cfg(feature = "hashed")]
use super::Hashed;
use super::{IntoProjectId, Unhashed};
#[cfg(feature = "hashed")]
use crate::error::ConfigError;
use crate::limiter::{KeyError, ProjectId};

/// What [`AsyncKeyExtractor::extract`] returns and, with [`Unhashed`],
/// [`extract_unhashed`](AsyncKeyExtractor::extract_unhashed).
pub type KeyFuture<'p, K = ProjectId> =
    Pin<Box<dyn Future<Output = Result<Option<K>, KeyError>> + Send + 'p>>;

/// Finds the project id of a request where that takes a wait: a session to be looked up, a token to be
/// verified.
///
/// Implemented for every closure `Fn(&Parts) -> impl Future<Output = Result<Option<K>, KeyError>>` where
/// the future is `Send + 'static`, so that it takes with it what it needs of the request, and `K` is as
/// for a [`KeyExtractor`](super::KeyExtractor). Bound the wait: nothing else does.
///
/// ```
/// use http::request::Parts;
/// use tower_slots::{ConcurrencyLimitLayer, KeyError, key::AsyncKeyExtractor};
///
/// # #[derive(Clone)] struct Sessions;
/// # impl Sessions { async fn project(&self, _: &[u8]) -> Option<String> { None } }
/// fn by_session(sessions: Sessions) -> impl AsyncKeyExtractor {
///     move |parts: &Parts| {
///         let (sessions, token) = (sessions.clone(), parts.headers.get("x-session").cloned());
///         async move {
///             let token = token.ok_or(KeyError::Missing)?;
///             sessions.project(token.as_bytes()).await.ok_or(KeyError::Missing).map(Some)
///         }
///     }
/// }
///
/// let layer = ConcurrencyLimitLayer::in_memory(10).key_async(by_session(Sessions));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot extract a project id",
    label = "not an `AsyncKeyExtractor`",
    note = "a closure must be `Fn(&http::request::Parts) -> F` with its argument's type written out, where the \
            future `F` is `Send + 'static` (it borrows nothing from the request) and yields \
            `Result<Option<K>, KeyError>`, where `K` is `String`, `&'static str` or `ProjectId`",
    note = "an extractor that does not wait goes to `key` instead of `key_async`"
)]
pub trait AsyncKeyExtractor: Send + Sync + 'static {
    /// The id, or `None` if this request is not limited.
    ///
    /// What it changes in the request's head, the inner service sees. If the request is given up, the
    /// future is dropped. Its errors are those of
    /// [`KeyExtractor::extract`](super::KeyExtractor::extract).
    fn extract<'p>(&'p self, parts: &'p mut Parts) -> KeyFuture<'p>;

    /// The text that [`hashed`](Self::hashed) makes the id of. It may be a secret, and longer than an id.
    ///
    /// Default: the id itself. Its errors are those of [`extract`](Self::extract).
    fn extract_unhashed<'p>(&'p self, parts: &'p mut Parts) -> KeyFuture<'p, Unhashed<'static>> {
        let found = self.extract(parts);
        Box::pin(async move { Ok(found.await?.map(Unhashed::from)) })
    }

    /// Makes the id of a hash of what this extractor finds, as
    /// [`KeyExtractor::hashed`](super::KeyExtractor::hashed) does.
    ///
    /// # Errors
    ///
    /// The secret is empty.
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_slots::{ConcurrencyLimitLayer, KeyError, key::AsyncKeyExtractor};
    ///
    /// # async fn owner_of(token: String) -> Option<String> { Some(token) }
    /// # fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let by_owner = |parts: &Parts| {
    ///     let token = parts.headers.get("x-token").and_then(|token| token.to_str().ok()).map(str::to_owned);
    ///     async move { Ok(Some(owner_of(token.ok_or(KeyError::Missing)?).await)) }
    /// };
    /// let layer = ConcurrencyLimitLayer::in_memory(10).key_async(by_owner.hashed("a secret of this service")?);
    /// # Ok(()) }
    /// # run().unwrap();
    /// ```
    #[cfg(feature = "hashed")]
    #[cfg_attr(docsrs, doc(cfg(feature = "hashed")))]
    fn hashed(self, secret: impl AsRef<[u8]>) -> Result<Hashed<Self>, ConfigError>
    where
        Self: Sized,
    {
        Hashed::new(self, secret.as_ref())
    }
}

impl<F, K, Fut> AsyncKeyExtractor for F
where
    F: Fn(&Parts) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Option<K>, KeyError>> + Send + 'static,
    K: IntoProjectId,
{
    fn extract<'p>(&'p self, parts: &'p mut Parts) -> KeyFuture<'p> {
        let found = self(parts);
        Box::pin(async move { found.await?.map(K::into_project_id).transpose() })
    }

    fn extract_unhashed<'p>(&'p self, parts: &'p mut Parts) -> KeyFuture<'p, Unhashed<'static>> {
        let found = self(parts);
        Box::pin(async move { found.await?.map(K::into_unhashed).transpose() })
    }
}

/// A question under way, with the head of the request that it is about.
pub(in crate::layer) struct Asked(Pin<Box<dyn Future<Output = Answered> + Send>>);

type Answered = (Parts, Result<Option<ProjectId>, KeyError>);

impl Asked {
    pub(in crate::layer) fn new(key: Arc<dyn AsyncKeyExtractor>, mut parts: Parts) -> Self {
        Self(Box::pin(async move {
            let found = key.extract(&mut parts).await;
            (parts, found)
        }))
    }
}

impl Future for Asked {
    type Output = Answered;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<Answered> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asked").finish_non_exhaustive()
    }
}
