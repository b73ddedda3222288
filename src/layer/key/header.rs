use std::sync::Once;

use http::HeaderName;
use http::header::{AUTHORIZATION, COOKIE, HeaderMap, PROXY_AUTHORIZATION};
use http::request::Parts;

use super::KeyExtractor;
use crate::limiter::{KeyError, ProjectId};
use crate::trace::event;

const DEFAULT: HeaderName = HeaderName::from_static("x-project-id");

/// Takes the id from a header; made by [`header`](header()). The default is `x-project-id`.
#[derive(Debug)]
pub struct Header {
    /// The name, or what is wrong with it.
    name: Result<HeaderName, &'static str>,
    complained: Once,
}

/// Takes the id from the header of this name.
///
/// There must be exactly one value: with two, or a comma in one, the request is refused, since a
/// proxy that adds a header to the client's own would otherwise decide by accident who is limited.
/// Blanks around the value do not count.
///
/// Secrets are not ids: ids get into the names of keys. With `authorization`, `proxy-authorization`
/// and `cookie`, and with a text that is no header name at all, every request that asks for its id is
/// answered with [`KeyError::Unusable`], which makes a 500, and the log says so once as an error.
/// Take the id from an [`extension`](super::extension()) that authentication has set, or from a
/// closure.
///
/// ```
/// use tower_slots::{ConcurrencyLimitLayer, key::header};
///
/// let layer = ConcurrencyLimitLayer::in_memory(10).key(header("x-tenant"));
/// ```
#[must_use]
pub fn header(name: impl AsRef<str>) -> Header {
    let name = HeaderName::from_bytes(name.as_ref().as_bytes())
        .map_err(|_| "the key's header has an impossible name")
        .and_then(|name| {
            if [AUTHORIZATION, PROXY_AUTHORIZATION, COOKIE].contains(&name) {
                Err("the key's header holds secrets, which cannot serve as project ids")
            } else {
                Ok(name)
            }
        });
    Header { name, complained: Once::new() }
}

impl Default for Header {
    fn default() -> Self {
        Self { name: Ok(DEFAULT), complained: Once::new() }
    }
}

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Option<ProjectId>, KeyError> {
        match &self.name {
            Ok(name) => only_value(&parts.headers, name).map(Some),
            Err(_problem) => {
                self.complained.call_once(|| event!(error, "{_problem}: every request is refused"));
                Err(KeyError::Unusable)
            }
        }
    }
}

fn only_value(headers: &HeaderMap, name: &HeaderName) -> Result<ProjectId, KeyError> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().ok_or(KeyError::Missing)?;
    if values.next().is_some() {
        return Err(KeyError::Duplicate);
    }
    let text = std::str::from_utf8(value.as_bytes()).map_err(|_| KeyError::NotText)?;
    let text = text.trim_matches([' ', '\t']);
    if text.contains(',') {
        return Err(KeyError::Duplicate);
    }
    if text.chars().any(char::is_control) {
        return Err(KeyError::NotText);
    }
    ProjectId::new(text)
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
    }
}
