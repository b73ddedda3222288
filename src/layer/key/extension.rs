use std::any::type_name;
use std::fmt;
use std::sync::{Arc, Once};

use http::request::Parts;

use super::{IntoProjectId, KeyExtractor, Unhashed};
use crate::limiter::{KeyError, ProjectId};
use crate::trace::event;

type Read<T, R> = Box<dyn Fn(&T) -> Result<R, KeyError> + Send + Sync>;

/// A [`ReadId`] without its type.
pub(super) struct Reader<T> {
    pub(super) id: Read<T, ProjectId>,
    pub(super) unhashed: Read<T, Unhashed<'static>>,
}

impl<T> Reader<T> {
    pub(super) fn new(read: impl ReadId<T>) -> Self {
        let read = Arc::new(read);
        let again = Arc::clone(&read);
        Self {
            id: Box::new(move |value| read(value).into_project_id()),
            unhashed: Box::new(move |value| again(value).into_unhashed()),
        }
    }
}

/// Takes the id from the request's extensions; made by [`extension`](extension()).
pub struct Extension<T> {
    read: Reader<T>,
    expected: bool,
    complained: Once,
}

/// Takes the id from what an outer layer put into the request's extensions: the right extractor
/// behind authentication.
///
/// A request without a `T` counts as one without an id. As that is mostly a layer in the wrong place,
/// the log says so once as an error.
///
/// ```
/// use tower_slots::{ConcurrencyLimitLayer, key::extension};
///
/// #[derive(Clone)]
/// struct Tenant { id: String }
///
/// let layer = ConcurrencyLimitLayer::in_memory(10)
///     .key(extension::<Tenant>(|tenant| tenant.id.clone()));
/// ```
#[must_use]
pub fn extension<T>(read: impl ReadId<T>) -> Extension<T>
where
    T: Send + Sync + 'static,
{
    Extension { read: Reader::new(read), expected: true, complained: Once::new() }
}

/// Reads the id out of a `T`: every `Fn(&T) -> K` where `K` is a `String`, a `&'static str`, a
/// [`ProjectId`], or an `Option` or `Result<_, KeyError>` of one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot read a project id out of a `{T}`",
    label = "not a `Fn(&{T}) -> K`",
    note = "a closure must be `Fn(&{T}) -> K`, where `K` is `String`, `&'static str`, `ProjectId`, or an `Option` \
            or `Result<_, KeyError>` of one"
)]
pub trait ReadId<T>: Fn(&T) -> <Self as ReadId<T>>::Id + Send + Sync + 'static {
    /// What is read.
    type Id: IntoProjectId;
}

impl<T, F, K> ReadId<T> for F
where
    F: Fn(&T) -> K + Send + Sync + 'static,
    K: IntoProjectId,
{
    type Id = K;
}

impl<T: Send + Sync + 'static> Extension<T> {
    /// Says nothing in the log where there is no such extension: for services that some use without
    /// being known, and that have another extractor behind this one.
    ///
    /// ```
    /// use tower_slots::key::{extension, first_of, peer_ip};
    ///
    /// #[derive(Clone)]
    /// struct User { name: String }
    ///
    /// let key = first_of((extension::<User>(|user| user.name.clone()).optional(), peer_ip()));
    /// ```
    #[must_use]
    pub fn optional(self) -> Self {
        Self { expected: false, ..self }
    }

    fn find<'p>(&self, parts: &'p Parts) -> Result<&'p T, KeyError> {
        let found = parts.extensions.get::<T>();
        if found.is_none() && self.expected {
            self.complained.call_once(|| {
                event!(
                    error,
                    extension = type_name::<T>(),
                    "no such extension to take the project id from: is the layer that sets it outside of this one?"
                );
            });
        }
        found.ok_or(KeyError::Missing)
    }
}

impl<T: Send + Sync + 'static> KeyExtractor for Extension<T> {
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        (self.read.id)(self.find(parts)?).map(Some)
    }

    fn extract_unhashed<'p>(&self, parts: &'p Parts) -> Result<Option<Unhashed<'p>>, KeyError> {
        (self.read.unhashed)(self.find(parts)?).map(Some)
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Extension").field(&type_name::<T>()).finish()
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[derive(Clone)]
    struct Tenant(&'static str);

    #[test]
    fn an_extension_is_read_or_missing() {
        let from = extension::<Tenant>(|tenant| tenant.0);
        let (mut parts, ()) = Request::new(()).into_parts();
        assert_eq!(from.extract(&parts), Err(KeyError::Missing));
        parts.extensions.insert(Tenant("acme"));
        assert_eq!(from.extract(&parts).map(|id| id.map(|id| id.to_string())), Ok(Some("acme".into())));
        parts.extensions.insert(Tenant(""));
        assert_eq!(from.extract(&parts), Err(KeyError::Empty));
    }

    #[test]
    fn an_optional_extension_is_not_complained_of() {
        let (parts, ()) = Request::new(()).into_parts();
        for (from, complains) in
            [(extension::<u8>(|_| "x"), true), (extension::<u8>(|_| "x").optional(), false)]
        {
            assert_eq!(from.extract(&parts), Err(KeyError::Missing));
            assert_eq!(from.complained.is_completed(), complains);
        }
    }

    #[test]
    fn what_is_read_may_be_nothing_or_wrong() {
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.extensions.insert(7_u8);
        let nothing = extension::<u8>(|_| None::<String>);
        assert_eq!(nothing.extract(&parts), Err(KeyError::Missing));
        let wrong = extension::<u8>(|_| Err::<String, _>(KeyError::NotText));
        assert_eq!(wrong.extract_unhashed(&parts), Err(KeyError::NotText));
    }
}
