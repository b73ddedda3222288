use std::borrow::Cow;
use std::sync::Once;

use http::HeaderName;
use http::header::{AUTHORIZATION, COOKIE, HeaderMap, PROXY_AUTHORIZATION};
use http::request::Parts;

use super::{KeyExtractor, Unhashed, text};
use crate::limiter::{KeyError, ProjectId};
use crate::trace::event;

const DEFAULT: HeaderName = HeaderName::from_static("x-project-id");

/// Takes the id from a header; made by [`header`](header()). The default is `x-project-id`.
#[derive(Debug)]
pub struct Header {
    /// The name, or `None` if it is none.
    name: Option<HeaderName>,
    complained: Once,
}

/// Takes the id from the header of this name.
///
/// There must be exactly one value: with two, or a comma in one, the request is refused, since a
/// proxy that adds a header to the client's own would otherwise decide by accident who is limited.
/// Blanks around the value do not count.
///
/// Secrets are not ids: ids get into the names of keys. `authorization`, `proxy-authorization` and
/// `cookie` serve only below [`hashed`](KeyExtractor::hashed). Otherwise, and with a text that is no
/// header name at all, every request that asks for its id is answered with [`KeyError::Unusable`], which
/// makes a 500, and the log says so once as an error.
///
/// ```
/// use tower_slots::{ConcurrencyLimitLayer, key::header};
///
/// let layer = ConcurrencyLimitLayer::in_memory(10).key(header("x-tenant"));
/// ```
#[must_use]
pub fn header(name: impl AsRef<str>) -> Header {
    Header { name: HeaderName::from_bytes(name.as_ref().as_bytes()).ok(), complained: Once::new() }
}

impl Default for Header {
    fn default() -> Self {
        Self { name: Some(DEFAULT), complained: Once::new() }
    }
}

impl Header {
    fn name(&self) -> Result<&HeaderName, KeyError> {
        self.name.as_ref().ok_or_else(|| self.unusable("the key's header has an impossible name"))
    }

    fn unusable(&self, _problem: &'static str) -> KeyError {
        self.complained.call_once(|| event!(error, "{_problem}: every request is refused"));
        KeyError::Unusable
    }
}

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        let name = self.name()?;
        if is_secret(name) {
            return Err(
                self.unusable("the key's header holds secrets, which serve as project ids only hashed")
            );
        }
        listed(only_value(&parts.headers, name)?)?.into_id().map(Some)
    }

    fn extract_unhashed<'p>(&self, parts: &'p Parts) -> Result<Option<Unhashed<'p>>, KeyError> {
        let name = self.name()?;
        let value = only_value(&parts.headers, name)?;
        if is_secret(name) { credentials(value).map(Some) } else { listed(value).map(Some) }
    }
}

fn is_secret(name: &HeaderName) -> bool {
    [AUTHORIZATION, PROXY_AUTHORIZATION, COOKIE].contains(name)
}

fn only_value<'p>(headers: &'p HeaderMap, name: &HeaderName) -> Result<&'p str, KeyError> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().ok_or(KeyError::Missing)?;
    if values.next().is_some() {
        return Err(KeyError::Duplicate);
    }
    // Of what is trimmed, a header's value can have blanks and tabs alone.
    text::visible(value.as_bytes().trim_ascii())
}

/// A value that may be a list, and must not be one.
fn listed(value: &str) -> Result<Unhashed<'_>, KeyError> {
    if value.contains(',') { Err(KeyError::Duplicate) } else { Unhashed::new(value) }
}

/// `scheme credentials` in one spelling: the scheme's case and the blanks behind it are the client's to
/// choose, and must not give it another id.
fn credentials(value: &str) -> Result<Unhashed<'_>, KeyError> {
    match value.split_once(' ') {
        None => Unhashed::new(value),
        Some((scheme, rest)) => {
            let text = format!("{} {}", scheme.to_ascii_lowercase(), rest.trim_start_matches(' '));
            Unhashed::new(Cow::Owned(text))
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn extract(from: &Header, headers: &[(&str, &[u8])]) -> Result<Option<String>, KeyError> {
        let mut request = Request::builder();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("a valid request").into_parts();
        Ok(from.extract(&parts)?.map(|id| id.to_string()))
    }

    #[test]
    fn exactly_one_value_is_an_id() {
        let from = header("X-Tenant");
        assert_eq!(extract(&from, &[("x-tenant", b" acme\t")]), Ok(Some("acme".into())));
        assert_eq!(extract(&from, &[("x-tenant", "zürich".as_bytes())]), Ok(Some("zürich".into())));
        assert_eq!(extract(&from, &[("x-tenant", b"a"), ("x-tenant", b"a")]), Err(KeyError::Duplicate));
        assert_eq!(extract(&from, &[("x-tenant", b"a,b")]), Err(KeyError::Duplicate));
        assert_eq!(extract(&from, &[("x-tenant", b"a\tb")]), Err(KeyError::NotText));
        assert_eq!(extract(&from, &[("x-tenant", b"  ")]), Err(KeyError::Empty));
        assert_eq!(extract(&from, &[("x-project-id", b"a")]), Err(KeyError::Missing));
    }

    #[test]
    fn secrets_and_impossible_names_are_no_source_of_ids() {
        for name in ["Authorization", "proxy-authorization", "cookie", "", "two words"] {
            let from = header(name);
            assert_eq!(extract(&from, &[("cookie", b"a")]), Err(KeyError::Unusable), "{name}");
        }
        let (parts, ()) = Request::new(()).into_parts();
        assert_eq!(header("").extract_unhashed(&parts), Err(KeyError::Unusable));
        assert_eq!(header("cookie").extract_unhashed(&parts), Err(KeyError::Missing));
    }

    #[test]
    fn below_a_hash_secrets_and_long_values_are_read() {
        let unhashed = |name: &str, value: &str| {
            let (parts, ()) = Request::get("/").header(name, value).body(()).expect("valid").into_parts();
            let found = header(name).extract_unhashed(&parts);
            found.map(|text| text.map(|text| text.as_str().to_owned()).unwrap_or_default())
        };
        for spelling in ["Bearer k1,2", "bearer k1,2", "BEARER   k1,2 "] {
            assert_eq!(unhashed("authorization", spelling), Ok("bearer k1,2".into()));
        }
        assert_eq!(unhashed("authorization", "Raw-Key"), Ok("Raw-Key".into()));
        assert_eq!(unhashed("x-key", "Two Words"), Ok("Two Words".into()));
        assert_eq!(unhashed("x-key", "a,b"), Err(KeyError::Duplicate));
        assert_eq!(unhashed("x-key", &"x".repeat(8192)).map(|text| text.len()), Ok(8192));
        assert_eq!(unhashed("x-key", &"x".repeat(8193)), Err(KeyError::TooLong));
    }
}
