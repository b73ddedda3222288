use std::net::{Ipv4Addr, Ipv6Addr};

use http::header::HOST;
use http::request::Parts;

use super::Unhashed;
use crate::limiter::KeyError;

/// Takes the id from the host that is asked; made by [`host`].
#[derive(Debug, Clone, Copy)]
pub struct Host(());

/// Takes the id from the host that is asked, for services with a domain per project.
///
/// That is the URI's authority (HTTP/2 and later always have one), and the `Host` header otherwise,
/// in lower case, without a port and without the dot that may end it. Two `Host` headers, or one that
/// names another host than the URI, refuse the request. No header of a proxy is asked.
///
/// A client can send any host. Have a proxy, a router or a list of hosts refuse those you do not
/// serve, or each of them gets slots of its own.
///
/// ```
/// use http::Request;
/// use tower_slots::key::{KeyExtractor, host};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let (parts, ()) = Request::get("/").header("host", "Acme.example:8080").body(())?.into_parts();
/// let id = host().extract(&parts)?;
/// assert_eq!(id.as_deref(), Some("acme.example"));
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[must_use]
pub fn host() -> Host {
    Host(())
}

impl Host {
    fn find<'p>(&self, parts: &'p Parts) -> Result<Unhashed<'p>, KeyError> {
        asked_host(parts).and_then(Unhashed::new)
    }
}

extracts_what_it_finds!(Host);

/// Takes the id from a label of the host; made by [`subdomain`].
#[derive(Debug, Clone)]
pub struct Subdomain {
    n: usize,
    /// In lower case, without dots at its ends.
    domain: Option<String>,
}

/// Takes the id from a label of the [`host`], counted from the left and from 0: the 0th of
/// `acme.eu.example.com` is `acme`, the 1st is `eu`.
///
/// Without [`under`](Subdomain::under) all labels count: the 0th of `example.com` is `example`. An
/// address such as `127.0.0.1` has none, and is a request without an id.
///
/// ```
/// use http::Request;
/// use tower_slots::key::{KeyExtractor, subdomain};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let key = subdomain(0).under("example.com");
/// let (parts, ()) = Request::get("/").header("host", "acme.example.com").body(())?.into_parts();
/// assert_eq!(key.extract(&parts)?.as_deref(), Some("acme"));
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[must_use]
pub fn subdomain(n: usize) -> Subdomain {
    Subdomain { n, domain: None }
}

impl Subdomain {
    /// Counts only the labels in front of this domain; hosts that are not in it carry no id.
    #[must_use]
    pub fn under(self, domain: impl AsRef<str>) -> Self {
        let domain = domain.as_ref().trim_matches('.').to_ascii_lowercase();
        Self { domain: Some(domain), ..self }
    }

    fn find<'p>(&self, parts: &'p Parts) -> Result<Unhashed<'p>, KeyError> {
        let host = asked_host(parts)?;
        if is_address(&host) {
            return Err(KeyError::Missing);
        }
        let labels = match &self.domain {
            None => host.as_str(),
            Some(domain) => {
                let rest = host.strip_suffix(domain.as_str()).ok_or(KeyError::Missing)?;
                rest.strip_suffix('.').ok_or(KeyError::Missing)?
            }
        };
        let label = labels.split('.').nth(self.n).ok_or(KeyError::Missing)?;
        Unhashed::new(label.to_owned())
    }
}

extracts_what_it_finds!(Subdomain);

/// The one host that the request names.
fn asked_host(parts: &Parts) -> Result<String, KeyError> {
    let mut headers = parts.headers.get_all(HOST).iter();
    let header = headers.next();
    if headers.next().is_some() {
        return Err(KeyError::Duplicate);
    }
    let header = header.map(|value| std::str::from_utf8(value.as_bytes()).map_err(|_| KeyError::NotText));
    let header = header.transpose()?.map(str::trim).map(normal);
    match (parts.uri.authority(), header) {
        (None, None) => Err(KeyError::Missing),
        (None, Some(header)) => header,
        (Some(uri), None) => normal(uri.as_str()),
        (Some(uri), Some(header)) => {
            let host = normal(uri.as_str())?;
            if header? == host { Ok(host) } else { Err(KeyError::Duplicate) }
        }
    }
}

/// The host of `host[:port]` in its one spelling.
fn normal(authority: &str) -> Result<String, KeyError> {
    if authority.contains(',') {
        return Err(KeyError::Duplicate);
    }
    let host = without_port(authority);
    if let Some(address) = host.strip_prefix('[') {
        let address = address.strip_suffix(']').and_then(|address| address.parse::<Ipv6Addr>().ok());
        return address.map(|address| format!("[{address}]")).ok_or(KeyError::Malformed);
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    match host {
        "" => Err(KeyError::Empty),
        _ if host.bytes().all(plain) => Ok(host.to_ascii_lowercase()),
        _ => Err(KeyError::Malformed),
    }
}

fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => authority,
    }
}

fn is_address(host: &str) -> bool {
    host.starts_with('[') || host.parse::<Ipv4Addr>().is_ok()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::layer::key::KeyExtractor;

    fn parts(uri: &str, hosts: &[&[u8]]) -> Parts {
        let mut request = Request::get(uri);
        for host in hosts {
            request = request.header(HOST, *host);
        }
        request.body(()).expect("a valid request").into_parts().0
    }

    fn found(key: &impl KeyExtractor, uri: &str, hosts: &[&[u8]]) -> Result<String, KeyError> {
        Ok(key.extract(&parts(uri, hosts))?.map(|id| id.to_string()).unwrap_or_default())
    }

    fn of_header(host: &str) -> Result<String, KeyError> {
        found(&super::host(), "/", &[host.as_bytes()])
    }

    #[test]
    fn a_host_has_one_spelling() {
        for host in ["acme.example", "ACME.Example", "acme.example:443", "acme.example.", " acme.example.:1 "]
        {
            assert_eq!(of_header(host), Ok("acme.example".into()), "{host}");
        }
        assert_eq!(of_header("[2001:DB8:0::1]:80"), Ok("[2001:db8::1]".into()));
        assert_eq!(of_header("127.0.0.1:80"), Ok("127.0.0.1".into()));
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for host in
            ["user@acme", "a:80:90", "a/b", "a%2eb", "[::1", "[zz]", "{a}", "::1", "a b", "z\u{fc}rich"]
        {
            assert_eq!(of_header(host), Err(KeyError::Malformed), "{host}");
        }
        assert_eq!(of_header("a,b"), Err(KeyError::Duplicate));
        assert_eq!(of_header(""), Err(KeyError::Empty));
        assert_eq!(of_header(":80"), Err(KeyError::Empty));
        assert_eq!(found(&host(), "/", &[b"\xff"]), Err(KeyError::NotText));
    }

    #[test]
    fn uri_and_header_must_name_the_same_host() {
        assert_eq!(found(&host(), "http://Acme.example:1/", &[]), Ok("acme.example".into()));
        assert_eq!(found(&host(), "http://acme.example:1/", &[b"acme.example"]), Ok("acme.example".into()));
        assert_eq!(found(&host(), "http://acme.example/", &[b"other.example"]), Err(KeyError::Duplicate));
        assert_eq!(found(&host(), "/", &[b"a", b"a"]), Err(KeyError::Duplicate));
        assert_eq!(found(&host(), "/", &[]), Err(KeyError::Missing));
    }

    #[test]
    fn labels_count_from_the_left() {
        let label = |n, host: &str| found(&subdomain(n), "/", &[host.as_bytes()]);
        assert_eq!(label(0, "Acme.eu.example.com:80"), Ok("acme".into()));
        assert_eq!(label(1, "acme.eu.example.com"), Ok("eu".into()));
        assert_eq!(label(2, "example.com"), Err(KeyError::Missing));
        assert_eq!(label(0, "127.0.0.1"), Err(KeyError::Missing));
        assert_eq!(label(0, "[::1]:80"), Err(KeyError::Missing));
        assert_eq!(label(0, ".example.com"), Err(KeyError::Empty));
    }

    #[test]
    fn labels_in_front_of_a_domain() {
        let label = |host: &str| found(&subdomain(0).under(".Example.com"), "/", &[host.as_bytes()]);
        assert_eq!(label("acme.example.com"), Ok("acme".into()));
        for other in ["example.com", "acme.example.org", "acmeexample.com", "com"] {
            assert_eq!(label(other), Err(KeyError::Missing), "{other}");
        }
    }

    #[test]
    fn unhashed_is_the_same_text() {
        let parts = parts("/", &[b"acme.example"]);
        let unhashed = host().extract_unhashed(&parts).expect("a host");
        assert_eq!(unhashed, Unhashed::new("acme.example").ok());
    }
}
