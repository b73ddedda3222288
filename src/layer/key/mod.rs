//! Who is limited: where the project id of a request comes from.
//!
//! | extractor | takes the id from |
//! |---|---|
//! | [`header(name)`](header()) | a request header; the default is `x-project-id` |
//! | [`extension::<T>(read)`](extension()) | what an outer layer, such as authentication, put into the request's extensions |
//! | a closure | anything in the request's head |
//!
//! A header is what the client says it is. Where projects must not take each other's slots, limit
//! behind authentication, by what that has found out.
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

mod everyone;
mod extension;
mod header;

use http::request::Parts;

pub(super) use self::everyone::Everyone;
pub use self::extension::{Extension, ReadId, extension};
pub use self::header::{Header, header};
use crate::limiter::{KeyError, ProjectId};

/// Finds the project id of a request.
///
/// Implemented for every closure `Fn(&Parts) -> Result<Option<K>, KeyError>` where `K` is a `String`,
/// a `&'static str` or a [`ProjectId`]; see the [module's documentation](self) for what is shipped.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot extract a project id",
    label = "not a `KeyExtractor`",
    note = "a closure must be `Fn(&http::request::Parts) -> Result<Option<K>, KeyError>` with its argument's \
            type written out, where `K` is `String`, `&'static str` or `ProjectId`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// The id, or `None` if this request is not limited.
    ///
    /// # Errors
    ///
    /// The request's id is missing or unusable. [`KeyError::Missing`] and [`KeyError::Empty`] are
    /// answered as [`OnMissing`](crate::OnMissing) says, all others refuse the request.
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError>;
}

impl<F, K> KeyExtractor for F
where
    F: Fn(&Parts) -> Result<Option<K>, KeyError> + Send + Sync + 'static,
    K: IntoProjectId,
{
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        self(parts)?.map(K::into_project_id).transpose()
    }
}

/// What a closure may return as a project id.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot become a project id",
    note = "return a `String`, a `&'static str` or a `ProjectId`"
)]
pub trait IntoProjectId {
    /// The id.
    ///
    /// # Errors
    ///
    /// [`KeyError::Empty`] and [`KeyError::TooLong`].
    fn into_project_id(self) -> Result<ProjectId, KeyError>;
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
}

impl IntoProjectId for &'static str {
    fn into_project_id(self) -> Result<ProjectId, KeyError> {
        ProjectId::new(self)
    }
}
