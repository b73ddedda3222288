//! Addresses of servers that are reached over TLS, with certificates of one's own.

use ::redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisResult, TlsCertificates,
};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::config_error;
use crate::error::ConfigError;

/// A `rediss://` address, with the certificates that connections to it need. It goes wherever an
/// address goes, such as into [`RedisStore::open`](super::RedisStore::open).
///
/// A bare `rediss://` address will do where an authority that the system trusts has signed the
/// server's certificate, and the server asks for none of the client.
///
/// rustls does the cryptography with whatever provider the process has installed as its default. If
/// there is none at the first connect, the one of `aws-lc-rs` is installed, which agrees on keys in a way
/// that is safe from quantum computers where the server can.
///
/// ```no_run
/// # fn open() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_slots::RedisStore;
/// use tower_slots::store::redis::TlsAddress;
///
/// let address = TlsAddress::new("rediss://redis.internal:6380/")?
///     .authority(std::fs::read("ca.pem")?)
///     .identity(std::fs::read("client.pem")?, std::fs::read("client-key.pem")?);
/// let store = RedisStore::open(address)?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct TlsAddress {
    address: ConnectionInfo,
    certificates: TlsCertificates,
}

impl TlsAddress {
    /// This address, with the authorities that the system trusts, and no client certificate.
    ///
    /// # Errors
    ///
    /// The address is malformed, or not one of TLS.
    pub fn new(url: impl IntoConnectionInfo) -> Result<Self, ConfigError> {
        let address = url.into_connection_info().map_err(|error| config_error(&error))?;
        if !matches!(address.addr(), ConnectionAddr::TcpTls { .. }) {
            return Err(ConfigError::new("url", "must be rediss://[user:password@]host[:port][/db]"));
        }
        Ok(Self { address, certificates: TlsCertificates { client_tls: None, root_cert: None } })
    }

    /// Trusts servers whose certificate one of these authorities has signed, instead of those that
    /// the system trusts. In PEM.
    #[must_use]
    pub fn authority(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.certificates.root_cert = Some(certificates.into());
        self
    }

    /// Shows servers this certificate, followed by those of the authorities in between, with its
    /// private key. In PEM.
    #[must_use]
    pub fn identity(mut self, certificates: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        let (client_cert, client_key) = (certificates.into(), key.into());
        self.certificates.client_tls = Some(ClientTlsConfig { client_cert, client_key });
        self
    }
}

impl IntoConnectionInfo for TlsAddress {
    fn into_connection_info(self) -> RedisResult<ConnectionInfo> {
        let TlsCertificates { client_tls, root_cert } = &self.certificates;
        let chain = client_tls.as_ref().map(|client| &client.client_cert);
        for pem in root_cert.iter().chain(chain) {
            // A text without any certificate would be taken for an empty list.
            if CertificateDer::pem_slice_iter(pem).next().is_none() {
                return Err(std::io::Error::other("no certificate in PEM").into());
            }
        }
        let client = Client::build_with_tls(self.address, self.certificates)?;
        Ok(client.get_connection_info().clone())
    }
}

/// rustls panics at the first connect of a process that has installed no provider, if it was built
/// with several or none.
pub(super) fn choose_provider() {
    if CryptoProvider::get_default().is_none() {
        // Somebody else may have been faster: then it is theirs.
        let _theirs = aws_lc_rs::default_provider().install_default();
    }
}
