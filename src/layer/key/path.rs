use http::request::Parts;

use super::{Unhashed, text};
use crate::limiter::KeyError;

/// Takes the id from a segment of the path; made by [`path_segment`].
#[derive(Debug, Clone, Copy)]
pub struct PathSegment(usize);

/// Takes the id from the segment of the path with this number, counted from 0.
///
/// The segment is percent-decoded, so that `%2F` is a slash within an id. A path without such a
/// segment is a request without an id.
///
/// It is the path as this layer sees it: inside a nested router of axum, the prefix is gone.
///
/// ```
/// use http::Request;
/// use tower_slots::key::{KeyExtractor, path_segment};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let (parts, ()) = Request::get("/projects/acme%2Feu/runs").body(())?.into_parts();
/// let id = path_segment(1).extract(&parts)?;
/// assert_eq!(id.as_deref(), Some("acme/eu"));
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[must_use]
pub fn path_segment(n: usize) -> PathSegment {
    PathSegment(n)
}

impl PathSegment {
    fn find<'p>(&self, parts: &'p Parts) -> Result<Unhashed<'p>, KeyError> {
        let segments = parts.uri.path().strip_prefix('/').ok_or(KeyError::Missing)?;
        let segment = segments.split('/').nth(self.0).ok_or(KeyError::Missing)?;
        text::decoded(segment)
    }
}

extracts_what_it_finds!(PathSegment);

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::layer::key::KeyExtractor;

    fn segment(n: usize, path: &str) -> Result<String, KeyError> {
        let (parts, ()) = Request::builder().uri(path).body(()).expect("a valid request").into_parts();
        Ok(path_segment(n).extract(&parts)?.map(|id| id.to_string()).unwrap_or_default())
    }

    #[test]
    fn segments_are_counted_before_they_are_decoded() {
        assert_eq!(segment(0, "/acme"), Ok("acme".into()));
        assert_eq!(segment(1, "/a%2Fb/c"), Ok("c".into()));
        assert_eq!(segment(0, "/a%2Fb/c?d=/e"), Ok("a/b".into()));
        assert_eq!(segment(0, "/%7Bz%C3%BCrich%7D"), Ok("{zürich}".into()));
        assert_eq!(segment(0, "/%zz"), Ok("%zz".into()));
    }

    #[test]
    fn what_is_not_there_is_missing() {
        assert_eq!(segment(1, "/acme"), Err(KeyError::Missing));
        assert_eq!(segment(0, "*"), Err(KeyError::Missing));
        assert_eq!(segment(0, "example.com:443"), Err(KeyError::Missing));
        assert_eq!(segment(1, "/acme/"), Err(KeyError::Empty));
        assert_eq!(segment(0, "/"), Err(KeyError::Empty));
    }

    #[test]
    fn what_is_not_text_is_refused() {
        for path in ["/%FF", "/a%00b", "/a%0D%0Ab", "/%C2%85"] {
            assert_eq!(segment(0, path), Err(KeyError::NotText), "{path}");
        }
        assert_eq!(segment(0, &format!("/{}", "x".repeat(129))), Err(KeyError::TooLong));
    }
}
