use std::any::type_name;
use std::fmt;
use std::sync::Once;

use http::request::Parts;

use super::{IntoProjectId, KeyExtractor};
use crate::limiter::{KeyError, ProjectId};
use crate::trace::event;

type Read<T> = Box<dyn Fn(&T) -> Result<ProjectId, KeyError> + Send + Sync>;

/// Takes the id from the request's extensions; made by [`extension`](extension()).
pub struct Extension<T> {
    read: Read<T>,
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
    Extension { read: Box::new(move |value| read(value).into_project_id()), complained: Once::new() }
}

/// Reads the id out of a `T`: every `Fn(&T) -> K` where `K` is a `String`, a `&'static str` or a
/// [`ProjectId`].
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

impl<T: Send + Sync + 'static> KeyExtractor for Extension<T> {
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        match parts.extensions.get::<T>() {
            Some(value) => (self.read)(value).map(Some),
            None => {
                self.complained.call_once(|| {
                    event!(
                        error,
                        extension = type_name::<T>(),
                        "no such extension to take the project id from: is the layer that sets it outside of this one?"
                    );
                });
                Err(KeyError::Missing)
            }
        }
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
}
