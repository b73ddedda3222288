use std::net::{IpAddr, SocketAddr};
use std::sync::Once;

use http::header::{HeaderMap, HeaderName};
use http::request::Parts;

use super::Unhashed;
use super::network::Network;
use super::peer::{Peer, id_of};
use crate::error::ConfigError;
use crate::limiter::KeyError;
use crate::trace::event;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Which proxies stand in front of the service, for [`trusted_proxy_ip`].
#[derive(Debug, Clone)]
pub struct TrustedProxies(Trust);

#[derive(Debug, Clone)]
enum Trust {
    Hops(usize),
    Networks(Vec<Network>),
}

impl TrustedProxies {
    /// This many, one behind the other, each of which adds the address it was asked from: right where
    /// their addresses change.
    ///
    /// 1 is a single load balancer. The service must not be reachable past them: a client that asks
    /// it directly can then write the list itself. With too high a number clients choose their ids;
    /// with too low a one, all have a proxy's. 0 is [`peer_ip`](super::peer_ip()).
    #[must_use]
    pub fn hops(n: usize) -> Self {
        Self(Trust::Hops(n))
    }

    /// Those with an address in one of these ranges: right where their addresses are known. The
    /// service may be reachable past them.
    ///
    /// A range is written as in `10.0.0.0/8` or `fd00::/8`, a single address without a prefix.
    ///
    /// # Errors
    ///
    /// One is no such range, or has bits set behind its prefix.
    ///
    /// ```
    /// use tower_slots::key::TrustedProxies;
    ///
    /// assert!(TrustedProxies::networks(["10.0.0.0/8", "2001:db8::5"]).is_ok());
    /// assert!(TrustedProxies::networks(["10.0.0.1/8"]).is_err());
    /// ```
    pub fn networks<N: AsRef<str>>(ranges: impl IntoIterator<Item = N>) -> Result<Self, ConfigError> {
        let networks = ranges.into_iter().map(|range| Network::parse(range.as_ref()));
        Ok(Self(Trust::Networks(networks.collect::<Result<_, _>>()?)))
    }
}

/// Takes the id from the address that the trusted proxies have seen; made by [`trusted_proxy_ip`].
#[derive(Debug)]
pub struct TrustedProxyIp {
    trust: Trust,
    peer: Peer,
    complained: Once,
}

/// Takes the id from the client's IP address behind proxies that you trust.
///
/// Each proxy adds the address it was asked from at the right end of `X-Forwarded-For`; what stands
/// further left came from the client, who can write anything there. So the list, over all lines of the
/// header, is walked from the right: the first address to be trusted or not is the connection's own,
/// the next is what that proxy has added, and so on. The first that is not a trusted proxy is the
/// client. Nothing to its left is looked at, and nothing ever falls back to it:
///
/// - If the walk meets anything but an address (with or without a port), the request is refused.
/// - If the list ends before a client was found (the request has passed fewer proxies than
///   [`hops`](TrustedProxies::hops), or all are trusted), it counts as one without an id.
///
/// Of `Forwarded` (RFC 7239) and of headers with one address such as `X-Real-IP` it knows nothing: a
/// header that your proxy always replaces can be read with [`header`](super::header()).
///
/// Ids look as those of [`peer_ip`](super::peer_ip()), and the connection's address comes from the
/// same places. By hops it is not needed, so that the last proxy may use a Unix socket.
///
/// ```
/// use http::Request;
/// use tower_slots::key::{KeyExtractor, PeerAddr, TrustedProxies, trusted_proxy_ip};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let (mut parts, ()) = Request::get("/")
///     .header("x-forwarded-for", "192.0.2.66, 203.0.113.7, 10.0.0.2") // the client wrote the first
///     .body(())?
///     .into_parts();
/// parts.extensions.insert(PeerAddr("10.0.0.1:50000".parse()?));
///
/// let by_address = trusted_proxy_ip(TrustedProxies::networks(["10.0.0.0/8"])?);
/// assert_eq!(by_address.extract(&parts)?.as_deref(), Some("203.0.113.7"));
/// let by_number = trusted_proxy_ip(TrustedProxies::hops(2));
/// assert_eq!(by_number.extract(&parts)?.as_deref(), Some("203.0.113.7"));
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[must_use]
pub fn trusted_proxy_ip(proxies: TrustedProxies) -> TrustedProxyIp {
    TrustedProxyIp { trust: proxies.0, peer: Peer::default(), complained: Once::new() }
}

impl TrustedProxyIp {
    /// Takes the connection's address from the extension `T` instead, as
    /// [`PeerIp::peer_from`](super::PeerIp::peer_from) does.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use tower_slots::key::{TrustedProxies, trusted_proxy_ip};
    ///
    /// # fn run() -> Result<(), tower_slots::ConfigError> {
    /// let key = trusted_proxy_ip(TrustedProxies::networks(["10.0.0.0/8"])?)
    ///     .peer_from::<IpAddr>(|peer| Some(*peer));
    /// # Ok(()) }
    /// # run().unwrap();
    /// ```
    #[must_use]
    pub fn peer_from<T>(self, read: impl Fn(&T) -> Option<IpAddr> + Send + Sync + 'static) -> Self
    where
        T: Send + Sync + 'static,
    {
        Self { peer: Peer::from(read), ..self }
    }

    fn find<'p>(&self, parts: &'p Parts) -> Result<Unhashed<'p>, KeyError> {
        Unhashed::new(id_of(self.client(parts)?))
    }

    fn client(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        let client = match &self.trust {
            Trust::Hops(0) => return self.peer.address(parts),
            Trust::Hops(n) => nth_from_the_right(&parts.headers, *n),
            Trust::Networks(trusted) => first_untrusted(trusted, self.peer.address(parts)?, &parts.headers),
        };
        if client == Err(KeyError::Missing) && !parts.headers.contains_key(FORWARDED_FOR) {
            self.complained.call_once(|| {
                event!(warn, "no x-forwarded-for from a trusted proxy: does it add the client's address?");
            });
        }
        client
    }
}

extracts_what_it_finds!(TrustedProxyIp);

fn nth_from_the_right(headers: &HeaderMap, n: usize) -> Result<IpAddr, KeyError> {
    entries(headers).nth(n - 1).ok_or(KeyError::Missing).and_then(address)
}

fn first_untrusted(trusted: &[Network], peer: IpAddr, headers: &HeaderMap) -> Result<IpAddr, KeyError> {
    let is_proxy = |address| trusted.iter().any(|network| network.contains(address));
    let peer = peer.to_canonical();
    if !is_proxy(peer) {
        return Ok(peer);
    }
    for entry in entries(headers) {
        let address = address(entry)?;
        if !is_proxy(address) {
            return Ok(address);
        }
    }
    Err(KeyError::Missing)
}

/// The entries of all lines, the last first.
fn entries(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let lines = headers.get_all(FORWARDED_FOR).into_iter().rev();
    lines.flat_map(|line| line.as_bytes().rsplit(|b| *b == b','))
}

/// `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`.
fn address(entry: &[u8]) -> Result<IpAddr, KeyError> {
    let text = std::str::from_utf8(entry).map_err(|_| KeyError::Malformed)?.trim();
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let parsed = match bare {
        Some(bare) => bare.parse().map(IpAddr::V6).ok(),
        None => text.parse().ok().or_else(|| text.parse().ok().map(|address: SocketAddr| address.ip())),
    };
    parsed.map(|address: IpAddr| address.to_canonical()).ok_or(KeyError::Malformed)
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request};

    use super::*;
    use crate::layer::key::{KeyExtractor, PeerAddr};

    fn parts(peer: Option<&str>, lines: &[&[u8]]) -> Parts {
        let (mut parts, ()) = Request::new(()).into_parts();
        if let Some(peer) = peer {
            parts.extensions.insert(PeerAddr(SocketAddr::new(peer.parse().expect("an address"), 1)));
        }
        for line in lines {
            parts.headers.append(FORWARDED_FOR, HeaderValue::from_bytes(line).expect("a value"));
        }
        parts
    }

    fn by_hops(n: usize, lines: &[&[u8]]) -> Result<String, KeyError> {
        let key = trusted_proxy_ip(TrustedProxies::hops(n));
        Ok(key.extract(&parts(None, lines))?.map(|id| id.to_string()).unwrap_or_default())
    }

    fn by_network(peer: &str, lines: &[&[u8]]) -> Result<String, KeyError> {
        let trusted = TrustedProxies::networks(["10.0.0.0/8", "fd00::/8"]).expect("valid ranges");
        let key = trusted_proxy_ip(trusted);
        Ok(key.extract(&parts(Some(peer), lines))?.map(|id| id.to_string()).unwrap_or_default())
    }

    #[test]
    fn hops_count_from_the_right_over_all_lines() {
        assert_eq!(by_hops(1, &[b"6.6.6.6, 203.0.113.7"]), Ok("203.0.113.7".into()));
        assert_eq!(by_hops(1, &[b"6.6.6.6", b"203.0.113.7"]), Ok("203.0.113.7".into()));
        assert_eq!(by_hops(2, &[b"6.6.6.6,203.0.113.7", b"10.0.0.2"]), Ok("203.0.113.7".into()));
        assert_eq!(by_hops(2, &[b"203.0.113.7, unix:"]), Ok("203.0.113.7".into()));
        assert_eq!(by_hops(2, &[b"203.0.113.7"]), Err(KeyError::Missing));
        assert_eq!(by_hops(1, &[]), Err(KeyError::Missing));
        assert_eq!(by_hops(usize::MAX, &[b"1.2.3.4"]), Err(KeyError::Missing));
        assert_eq!(by_hops(0, &[b"1.2.3.4"]), Err(KeyError::Missing));
    }

    #[test]
    fn networks_are_walked_to_the_first_stranger() {
        assert_eq!(by_network("203.0.113.7", &[b"6.6.6.6"]), Ok("203.0.113.7".into()));
        assert_eq!(by_network("10.0.0.1", &[b"6.6.6.6, 203.0.113.7"]), Ok("203.0.113.7".into()));
        assert_eq!(by_network("10.0.0.1", &[b"6.6.6.6", b"203.0.113.7, 10.0.0.2"]), Ok("203.0.113.7".into()));
        assert_eq!(by_network("::ffff:10.0.0.1", &[b"::ffff:203.0.113.7"]), Ok("203.0.113.7".into()));
        assert_eq!(by_network("fd00::1", &[b"2001:db8:1:2::9"]), Ok("2001:db8:1:2::/64".into()));
        assert_eq!(by_network("10.0.0.1", &[b"10.0.0.3, 10.0.0.2"]), Err(KeyError::Missing));
        assert_eq!(by_network("10.0.0.1", &[]), Err(KeyError::Missing));
    }

    #[test]
    fn garbage_is_refused_where_the_walk_meets_it() {
        for garbage in
            ["", "unknown", "_hidden", "1.2.3", "1.2.3.4.", "[1.2.3.4]", "fe80::1%eth0", "1.2.3.4:"]
        {
            let line = format!("6.6.6.6, {garbage}");
            assert_eq!(by_hops(1, &[line.as_bytes()]), Err(KeyError::Malformed), "{garbage}");
            assert_eq!(by_network("10.0.0.1", &[line.as_bytes()]), Err(KeyError::Malformed), "{garbage}");
            let line = format!("{garbage}, 203.0.113.7");
            assert_eq!(by_hops(1, &[line.as_bytes()]), Ok("203.0.113.7".into()), "{garbage}");
            assert_eq!(by_network("10.0.0.1", &[line.as_bytes()]), Ok("203.0.113.7".into()), "{garbage}");
        }
        assert_eq!(by_hops(1, &[b"1.2.3.4\xff"]), Err(KeyError::Malformed));
        assert_eq!(by_hops(1, &[b"\xff,1.2.3.4"]), Ok("1.2.3.4".into()));
    }

    #[test]
    fn ports_do_not_count() {
        for entry in ["203.0.113.7:50000", " 203.0.113.7\t", "[::ffff:203.0.113.7]:1", "[::ffff:203.0.113.7]"]
        {
            assert_eq!(by_hops(1, &[entry.as_bytes()]), Ok("203.0.113.7".into()), "{entry}");
        }
        assert_eq!(by_hops(1, &[b"[2001:db8::1]:443"]), Ok("2001:db8::/64".into()));
    }
}
