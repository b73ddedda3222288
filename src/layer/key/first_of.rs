use http::request::Parts;

use super::{KeyExtractor, Unhashed};
use crate::limiter::{KeyError, ProjectId};

/// Takes the id from the first extractor that finds one; made by [`first_of`].
pub struct FirstOf {
    list: Vec<Box<dyn KeyExtractor>>,
}

/// Takes the id from the first of these extractors that finds one: a tuple of up to six, or a `Vec` or
/// an array of boxed ones.
///
/// The next is asked if one finds no id or an empty one. An id that is there and wrong refuses the
/// request: a client cannot get to another extractor by spoiling what an earlier one reads. If one says
/// that the request is not limited, then that holds.
///
/// ```
/// use http::Request;
/// use tower_slots::key::{KeyExtractor, first_of, header, query_param};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let key = first_of((header("x-tenant"), query_param("tenant")));
/// let (parts, ()) = Request::get("/?tenant=acme").body(())?.into_parts();
/// assert_eq!(key.extract(&parts)?.as_deref(), Some("acme"));
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[must_use]
pub fn first_of(extractors: impl IntoExtractors) -> FirstOf {
    FirstOf { list: extractors.into_extractors() }
}

impl FirstOf {
    fn first<'s, T>(
        &'s self,
        ask: impl Fn(&'s dyn KeyExtractor) -> Result<Option<T>, KeyError>,
    ) -> Result<Option<T>, KeyError> {
        let mut last = KeyError::Missing;
        for extractor in &self.list {
            match ask(&**extractor) {
                Err(error @ (KeyError::Missing | KeyError::Empty)) => last = error,
                found => return found,
            }
        }
        Err(last)
    }
}

impl KeyExtractor for FirstOf {
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        self.first(|extractor| extractor.extract(parts))
    }

    fn extract_unhashed<'p>(&self, parts: &'p Parts) -> Result<Option<Unhashed<'p>>, KeyError> {
        self.first(|extractor| extractor.extract_unhashed(parts))
    }
}

impl std::fmt::Debug for FirstOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FirstOf").field("extractors", &self.list.len()).finish()
    }
}

/// What [`first_of`] takes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no list of key extractors",
    note = "give a tuple of two to six extractors, or a `Vec` or an array of `Box<dyn KeyExtractor>`"
)]
pub trait IntoExtractors {
    /// The extractors in their order.
    fn into_extractors(self) -> Vec<Box<dyn KeyExtractor>>;
}

impl IntoExtractors for Vec<Box<dyn KeyExtractor>> {
    fn into_extractors(self) -> Self {
        self
    }
}

impl<const N: usize> IntoExtractors for [Box<dyn KeyExtractor>; N] {
    fn into_extractors(self) -> Vec<Box<dyn KeyExtractor>> {
        self.into()
    }
}

macro_rules! tuples {
    ($($name:ident)+) => {
        impl<$($name: KeyExtractor),+> IntoExtractors for ($($name,)+) {
            fn into_extractors(self) -> Vec<Box<dyn KeyExtractor>> {
                #[allow(non_snake_case, reason = "named as their types are")]
                let ($($name,)+) = self;
                vec![$(Box::new($name)),+]
            }
        }
    };
}

tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
tuples!(A B C D E);
tuples!(A B C D E F);

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    type Found = Result<Option<&'static str>, KeyError>;

    fn first(found: &[Found]) -> Result<Option<String>, KeyError> {
        let boxed = |found: Found| Box::new(move |_: &Parts| found) as Box<dyn KeyExtractor>;
        let list: Vec<_> = found.iter().map(|found| boxed(*found)).collect();
        let (parts, ()) = Request::new(()).into_parts();
        Ok(first_of(list).extract(&parts)?.map(|id| id.to_string()))
    }

    #[test]
    fn only_absence_goes_on_to_the_next() {
        let acme = Ok(Some("acme"));
        assert_eq!(first(&[Err(KeyError::Missing), Ok(Some("")), acme]), Ok(Some("acme".into())));
        assert_eq!(first(&[acme, Err(KeyError::Duplicate)]), Ok(Some("acme".into())));
        assert_eq!(first(&[Err(KeyError::Duplicate), acme]), Err(KeyError::Duplicate));
        assert_eq!(first(&[Err(KeyError::Malformed), acme]), Err(KeyError::Malformed));
        assert_eq!(first(&[Ok(None), acme]), Ok(None));
        assert_eq!(first(&[Err(KeyError::Missing), Ok(Some(""))]), Err(KeyError::Empty));
        assert_eq!(first(&[]), Err(KeyError::Missing));
    }
}
