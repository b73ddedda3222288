//! Who is limited: where the project id of a request comes from.
//!
//! | who is asking | extractor | takes the id from |
//! |---|---|---|
//! | known by authentication | [`extension::<T>(read)`](extension()) | what an outer layer put into the request's extensions |
//! | says so itself | [`header(name)`](header()) | a request header; the default is `x-project-id` |
//! | an API key, a token | [`header("authorization").hashed(secret)?`](KeyExtractor::hashed) | a secret, of which only a keyed hash is kept |
//! | `/projects/{id}/…` | [`path_segment(n)`](path_segment) | a segment of the path |
//! | `?project={id}` | [`query_param(name)`](query_param) | a parameter of the query |
//! | a domain per project | [`host()`](host()), [`subdomain(n)`](subdomain) | the host that is asked, a label of it |
//! | anyone, directly | [`peer_ip()`](peer_ip) | the address of the connection |
//! | anyone, through proxies | [`trusted_proxy_ip(proxies)`](trusted_proxy_ip) | `X-Forwarded-For`, as far as it can be believed |
//! | one or the other | [`first_of((a, b, …))`](first_of()) | the first of several that finds an id |
//! | anything in the request's head | a closure | see below |
//! | what takes a wait | [`key_async(closure)`](crate::ConcurrencyLimitLayer::key_async) | an [`AsyncKeyExtractor`], which can be [`hashed`](AsyncKeyExtractor::hashed) too |
//! | an extractor of axum | `key_async(extract::<T>(read))` (feature `axum`) | any `FromRequestParts` |
//!
//! Headers, paths, queries and hosts are what the client says they are. Where projects must not take
//! each other's slots, nor one client have as many ids as it likes, limit behind authentication, by what
//! that has found out.
//!
//! What carries no id is answered as [`OnMissing`](crate::OnMissing) says; what carries two, or one that
//! is no text of 1 to 128 bytes, is refused. Where the server cannot know, for want of a layer or of the
//! connection's address, the log says so once as an error.
//!
//! A closure returns a [`ProjectId`] or what can become one, `Ok(None)` for a request that is not
//! limited, or a [`KeyError`]:
//!
//! ```
//! use http::request::Parts;
//! use tower_slots::{ConcurrencyLimitLayer, KeyError};
//!
//! let layer = ConcurrencyLimitLayer::in_memory(10).key(|parts: &Parts| {
//!     let path = parts.uri.path();
//!     let Some(rest) = path.strip_prefix("/projects/") else { return Ok(None) };
//!     let id = rest.split('/').next().ok_or(KeyError::Missing)?;
//!     Ok(Some(id.to_owned()))
//! });
//! ```

/// A [`KeyExtractor`] by what the type's `find` finds: as an id, and below a hash.
macro_rules! extracts_what_it_finds {
    ($type:ty) => {
        impl $crate::layer::key::KeyExtractor for $type {
            fn extract(&self, parts: &Parts) -> Result<Option<$crate::ProjectId>, KeyError> {
                self.find(parts)?.into_id().map(Some)
            }

            fn extract_unhashed<'p>(&self, parts: &'p Parts) -> Result<Option<Unhashed<'p>>, KeyError> {
                self.find(parts).map(Some)
            }
        }
    };
}

mod everyone;
mod extension;
#[cfg(feature = "axum")]
mod extract;
mod first_of;
#[cfg(feature = "hashed")]
mod hashed;
mod header;
mod host;
mod later;
mod network;
mod path;
mod peer;
mod proxy;
mod query;
mod text;
mod unhashed;

use http::request::Parts;

pub(super) use self::everyone::Everyone;
pub use self::extension::{Extension, ReadId, extension};
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::extract::{Extract, extract};
pub use self::first_of::{FirstOf, IntoExtractors, first_of};
#[cfg(feature = "hashed")]
#[cfg_attr(docsrs, doc(cfg(feature = "hashed")))]
pub use self::hashed::Hashed;
pub use self::header::{Header, header};
pub use self::host::{Host, Subdomain, host, subdomain};
pub(super) use self::later::Asked;
pub use self::later::{AsyncKeyExtractor, KeyFuture};
pub use self::path::{PathSegment, path_segment};
pub use self::peer::{PeerAddr, PeerIp, peer_ip};
pub use self::proxy::{TrustedProxies, TrustedProxyIp, trusted_proxy_ip};
pub use self::query::{QueryParam, query_param};
pub use self::unhashed::Unhashed;
#[cfg(feature = "hashed")]
use crate::error::ConfigError;
use crate::limiter::{KeyError, ProjectId};

/// Finds the project id of a request.
///
/// Implemented for every closure `Fn(&Parts) -> Result<Option<K>, KeyError>` where `K` is a `String`,
/// a `&'static str` or a [`ProjectId`]; see the [module's documentation](self) for what is shipped.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot extract a project id",
    label = "not a `KeyExtractor`",
    note = "a closure must be `Fn(&http::request::Parts) -> Result<Option<K>, KeyError>` with its argument's \
            type written out, where `K` is `String`, `&'static str` or `ProjectId`",
    note = "an extractor that waits (an `AsyncKeyExtractor`) goes to `key_async` instead of `key`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// The id, or `None` if this request is not limited.
    ///
    /// # Errors
    ///
    /// The request's id is missing or unusable. [`KeyError::Missing`] and [`KeyError::Empty`] are
    /// answered as [`OnMissing`](crate::OnMissing) says, all others refuse the request.
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError>;

    /// The text that [`hashed`](Self::hashed) makes the id of. It may be a secret, and longer than an id.
    ///
    /// Default: the id itself.
    ///
    /// # Errors
    ///
    /// As for [`extract`](Self::extract).
    fn extract_unhashed<'p>(&self, parts: &'p Parts) -> Result<Option<Unhashed<'p>>, KeyError> {
        Ok(self.extract(parts)?.map(Unhashed::from))
    }

    /// Makes the id of a hash of what this extractor finds: for API keys and other secrets, and for what
    /// is longer than an id (up to 8 KiB).
    ///
    /// The id is 32 hexadecimal digits: 128 bits of an HMAC-SHA256 under `secret`, which is the same in
    /// the whole fleet and stays the same. Below, [`header`](header()) also takes `authorization` (in any
    /// spelling of its scheme, such as `bearer`), `proxy-authorization` and `cookie` (all of it, so that
    /// it changes with any cookie: better take one by a closure).
    ///
    /// A key that nobody has issued gets slots of its own too: only authentication tells them apart.
    ///
    /// # Errors
    ///
    /// The secret is empty.
    ///
    /// ```
    /// use http::Request;
    /// use tower_slots::{ConcurrencyLimitLayer, key::{KeyExtractor, header}};
    ///
    /// # fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let key = header("authorization").hashed("a secret of this service")?;
    ///
    /// let (parts, ()) = Request::get("/").header("authorization", "Bearer sk-51Hx").body(())?.into_parts();
    /// assert_eq!(key.extract(&parts)?.as_deref(), Some("66436e5cc18212d1b087d448f9743d98"));
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10).key(key);
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

impl<F, K> KeyExtractor for F
where
    F: Fn(&Parts) -> Result<Option<K>, KeyError> + Send + Sync + 'static,
    K: IntoProjectId,
{
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        self(parts)?.map(K::into_project_id).transpose()
    }

    fn extract_unhashed<'p>(&self, parts: &'p Parts) -> Result<Option<Unhashed<'p>>, KeyError> {
        self(parts)?.map(K::into_unhashed).transpose()
    }
}

impl KeyExtractor for Box<dyn KeyExtractor> {
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        (**self).extract(parts)
    }

    fn extract_unhashed<'p>(&self, parts: &'p Parts) -> Result<Option<Unhashed<'p>>, KeyError> {
        (**self).extract_unhashed(parts)
    }
}

/// What a closure may return as a project id.
///
/// `None` is an id that is missing, and an error is what is wrong with it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot become a project id",
    note = "return a `String`, a `&'static str` or a `ProjectId`, or an `Option` or `Result<_, KeyError>` of one"
)]
pub trait IntoProjectId: Sized {
    /// The id.
    ///
    /// # Errors
    ///
    /// [`KeyError::Empty`] and [`KeyError::TooLong`], and what was wrong before.
    fn into_project_id(self) -> Result<ProjectId, KeyError>;

    /// The text below a [hash](KeyExtractor::extract_unhashed). Default: the id.
    ///
    /// # Errors
    ///
    /// As for [`into_project_id`](Self::into_project_id).
    fn into_unhashed(self) -> Result<Unhashed<'static>, KeyError> {
        self.into_project_id().map(Unhashed::from)
    }
}

impl IntoProjectId for ProjectId {
    fn into_project_id(self) -> Result<ProjectId, KeyError> {
        Ok(self)
    }
}

impl IntoProjectId for String {
    fn into_project_id(self) -> Result<ProjectId, KeyError> {
        ProjectId::new(self)
    }

    fn into_unhashed(self) -> Result<Unhashed<'static>, KeyError> {
        Unhashed::new(self)
    }
}

impl IntoProjectId for &'static str {
    fn into_project_id(self) -> Result<ProjectId, KeyError> {
        ProjectId::new(self)
    }

    fn into_unhashed(self) -> Result<Unhashed<'static>, KeyError> {
        Unhashed::new(self)
    }
}

impl<K: IntoProjectId> IntoProjectId for Option<K> {
    fn into_project_id(self) -> Result<ProjectId, KeyError> {
        self.ok_or(KeyError::Missing)?.into_project_id()
    }

    fn into_unhashed(self) -> Result<Unhashed<'static>, KeyError> {
        self.ok_or(KeyError::Missing)?.into_unhashed()
    }
}

impl<K: IntoProjectId> IntoProjectId for Result<K, KeyError> {
    fn into_project_id(self) -> Result<ProjectId, KeyError> {
        self?.into_project_id()
    }

    fn into_unhashed(self) -> Result<Unhashed<'static>, KeyError> {
        self?.into_unhashed()
    }
}
