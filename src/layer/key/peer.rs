use std::any::type_name;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Once;

use http::request::Parts;

use super::Unhashed;
use crate::limiter::KeyError;
use crate::trace::event;

/// The address at the other end of a request's connection: an extension for [`peer_ip`] to find.
///
/// Servers that do not put one of their own into the request insert this one, per connection:
///
/// ```
/// use std::net::SocketAddr;
/// use http::Request;
/// use tower_slots::key::PeerAddr;
///
/// /// In a service that was made for one connection, with the address from `accept()`.
/// fn tag<B>(mut request: Request<B>, peer: SocketAddr) -> Request<B> {
///     request.extensions_mut().insert(PeerAddr(peer));
///     request
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// Takes the id from the address of the connection; made by [`peer_ip`].
#[derive(Debug)]
pub struct PeerIp {
    peer: Peer,
}

/// Takes the id from the IP address at the other end of the connection.
///
/// The id is the address without its port. An IPv6 address counts with its whole /64 (as
/// `2001:db8:1:2::/64`), since a single client has all of it, and an IPv4 address in IPv6 form
/// (`::ffff:192.0.2.1`) as the IPv4 address it is.
///
/// **Behind a proxy this is the proxy's address**, so that the whole site shares one client's slots:
/// use [`trusted_proxy_ip`](super::trusted_proxy_ip) there.
///
/// The address is a [`PeerAddr`] in the request's extensions or, with the `axum` feature, axum's
/// `ConnectInfo<SocketAddr>`, which `into_make_service_with_connect_info::<SocketAddr>()` sets (in
/// tests `MockConnectInfo`). For another type see [`peer_from`](PeerIp::peer_from). Without any, a
/// request counts as one without an id, and the log says so once as an error: the server is not set
/// up to tell.
///
/// ```
/// use http::Request;
/// use tower_slots::key::{KeyExtractor, PeerAddr, peer_ip};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let (mut parts, ()) = Request::new(()).into_parts();
/// parts.extensions.insert(PeerAddr("[2001:db8:1:2:3:4:5:6]:50000".parse()?));
/// let id = peer_ip().extract(&parts)?;
/// assert_eq!(id.as_deref(), Some("2001:db8:1:2::/64"));
/// # Ok(()) }
/// # run().unwrap();
/// ```
#[must_use]
pub fn peer_ip() -> PeerIp {
    PeerIp { peer: Peer::default() }
}

impl PeerIp {
    /// Takes the address from the extension `T` instead, where that has one: a `ConnectInfo` of your
    /// own, or tonic's `TcpConnectInfo`.
    ///
    /// ```
    /// use std::net::SocketAddr;
    /// use tower_slots::{ConcurrencyLimitLayer, key::peer_ip};
    ///
    /// #[derive(Clone)]
    /// struct Connection { peer: SocketAddr, encrypted: bool }
    ///
    /// let layer = ConcurrencyLimitLayer::in_memory(10)
    ///     .key(peer_ip().peer_from::<Connection>(|connection| Some(connection.peer.ip())));
    /// ```
    #[must_use]
    pub fn peer_from<T>(self, read: impl Fn(&T) -> Option<IpAddr> + Send + Sync + 'static) -> Self
    where
        T: Send + Sync + 'static,
    {
        Self { peer: Peer::from(read) }
    }

    fn find<'p>(&self, parts: &'p Parts) -> Result<Unhashed<'p>, KeyError> {
        Unhashed::new(id_of(self.peer.address(parts)?))
    }
}

extracts_what_it_finds!(PeerIp);

/// One client's id, of whose addresses there may be many.
pub(super) fn id_of(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => {
            let network = Ipv6Addr::from(u128::from(address) & (u128::MAX << 64));
            format!("{network}/64")
        }
    }
}

type Read = Box<dyn Fn(&Parts) -> Option<Option<IpAddr>> + Send + Sync>;

/// Where the address of the connection stands.
pub(super) struct Peer {
    /// The outer option is whether the extension is there, the inner one whether it has an address.
    read: Read,
    extension: &'static str,
    complained: Once,
}

impl Default for Peer {
    fn default() -> Self {
        let extension = if cfg!(feature = "axum") {
            "PeerAddr or ConnectInfo<SocketAddr>"
        } else {
            type_name::<PeerAddr>()
        };
        Self { read: Box::new(|parts| usual(parts).map(Some)), extension, complained: Once::new() }
    }
}

impl Peer {
    pub(super) fn from<T>(read: impl Fn(&T) -> Option<IpAddr> + Send + Sync + 'static) -> Self
    where
        T: Send + Sync + 'static,
    {
        Self {
            read: Box::new(move |parts| parts.extensions.get::<T>().map(&read)),
            extension: type_name::<T>(),
            complained: Once::new(),
        }
    }

    pub(super) fn address(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        match (self.read)(parts) {
            Some(address) => address.ok_or(KeyError::Missing),
            None => {
                self.complained.call_once(|| {
                    event!(
                        error,
                        extension = self.extension,
                        "no such extension to take the connection's address from: with axum, serve by \
                         `into_make_service_with_connect_info::<SocketAddr>()`; elsewhere, insert a `PeerAddr`"
                    );
                });
                Err(KeyError::Missing)
            }
        }
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Peer").field(&self.extension).finish()
    }
}

fn usual(parts: &Parts) -> Option<IpAddr> {
    let own = parts.extensions.get::<PeerAddr>().map(|peer| peer.0);
    own.or_else(|| axums(parts)).map(|address| address.ip())
}

#[cfg(feature = "axum")]
fn axums(parts: &Parts) -> Option<SocketAddr> {
    use ::axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

    let real = parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
    real.or_else(|| parts.extensions.get::<MockConnectInfo<SocketAddr>>().map(|mock| mock.0))
}

#[cfg(not(feature = "axum"))]
fn axums(_: &Parts) -> Option<SocketAddr> {
    None
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::layer::key::KeyExtractor;

    #[test]
    fn one_client_has_one_id() {
        let id = |address: &str| id_of(address.parse().expect("an address"));
        assert_eq!(id("192.0.2.1"), "192.0.2.1");
        assert_eq!(id("::ffff:192.0.2.1"), "192.0.2.1");
        assert_eq!(id("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
        assert_eq!(id("2001:db8:1:2:ffff::"), "2001:db8:1:2::/64");
        assert_eq!(id("2001:db8:1:3::"), "2001:db8:1:3::/64");
    }

    #[test]
    fn an_extension_of_ones_own_is_read() {
        struct Unix;
        let of_unix = peer_ip().peer_from::<Unix>(|_| None);
        let (mut parts, ()) = Request::new(()).into_parts();
        assert_eq!(of_unix.extract(&parts), Err(KeyError::Missing));
        assert!(of_unix.peer.complained.is_completed());

        let of_unix = peer_ip().peer_from::<u8>(|last| (*last > 0).then(|| [192, 0, 2, *last].into()));
        parts.extensions.insert(0_u8);
        assert_eq!(of_unix.extract(&parts), Err(KeyError::Missing));
        assert!(!of_unix.peer.complained.is_completed());
        parts.extensions.insert(7_u8);
        assert_eq!(
            of_unix.extract(&parts).map(|id| id.map(|id| id.to_string())),
            Ok(Some("192.0.2.7".into()))
        );
    }
}
