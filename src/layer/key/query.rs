use std::borrow::Cow;

use http::request::Parts;
use percent_encoding::percent_decode;

use super::{Unhashed, text};
use crate::limiter::KeyError;

/// Takes the id from a parameter of the query; made by [`query_param`].
#[derive(Debug, Clone)]
pub struct QueryParam(Cow<'static, str>);

/// Takes the id from the parameter of the query with this name.
///
/// Name and value are decoded as a form is: `%20` and `+` are blanks. A parameter that is given twice
/// refuses the request.
///
/// ```
/// use http::Request;
/// use tower_slots::key::{KeyExtractor, query_param};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let (parts, ()) = Request::get("/runs?page=2&project=acme+eu").body(())?.into_parts();
/// let id = query_param("project").extract(&parts)?;
/// assert_eq!(id.as_deref(), Some("acme eu"));
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[must_use]
pub fn query_param(name: impl Into<Cow<'static, str>>) -> QueryParam {
    QueryParam(name.into())
}

impl QueryParam {
    fn find<'p>(&self, parts: &'p Parts) -> Result<Unhashed<'p>, KeyError> {
        let pairs = parts.uri.query().unwrap_or_default().split('&');
        let mut values = pairs
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .filter(|(name, _)| !name.is_empty() && *form_decoded(name) == *self.0.as_bytes())
            .map(|(_, value)| value);
        let value = values.next().ok_or(KeyError::Missing)?;
        if values.next().is_some() {
            return Err(KeyError::Duplicate);
        }
        text::from_bytes(form_decoded(value))
    }
}

fn form_decoded(text: &str) -> Cow<'_, [u8]> {
    if text.contains('+') {
        let blanks = text.replace('+', " ");
        Cow::Owned(percent_decode(blanks.as_bytes()).collect())
    } else {
        percent_decode(text.as_bytes()).into()
    }
}

extracts_what_it_finds!(QueryParam);

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::layer::key::KeyExtractor;

    fn project(uri: &str) -> Result<String, KeyError> {
        let (parts, ()) = Request::get(uri).body(()).expect("a valid request").into_parts();
        Ok(query_param("project id").extract(&parts)?.map(|id| id.to_string()).unwrap_or_default())
    }

    #[test]
    fn names_and_values_are_decoded() {
        assert_eq!(project("/?project+id=a%2Bb+c"), Ok("a+b c".into()));
        assert_eq!(project("/?x=1&&project%20id=a=b&y"), Ok("a=b".into()));
        assert_eq!(project("/?project+id=z%C3%BCrich,basel"), Ok("zürich,basel".into()));
    }

    #[test]
    fn exactly_one_value_is_an_id() {
        assert_eq!(project("/"), Err(KeyError::Missing));
        assert_eq!(project("/?"), Err(KeyError::Missing));
        assert_eq!(project("/?projectid=a&project=b"), Err(KeyError::Missing));
        assert_eq!(project("/?project+id"), Err(KeyError::Empty));
        assert_eq!(project("/?project+id="), Err(KeyError::Empty));
        assert_eq!(project("/?project+id=a&project%20id=a"), Err(KeyError::Duplicate));
        assert_eq!(project("/?project+id&project+id=a"), Err(KeyError::Duplicate));
        assert_eq!(project("/?project+id=%FE"), Err(KeyError::NotText));
        assert_eq!(project("/?project+id=a%0Ab"), Err(KeyError::NotText));
    }
}
