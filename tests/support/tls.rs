//! A Redis server that speaks TLS, and the certificates for both sides.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use super::RedisServer;

/// An authority that signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its private key, in PEM.
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

impl Authority {
    /// A new authority.
    pub fn new() -> Self {
        let key = KeyPair::generate().expect("a key can be made");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, format!("authority {:016x}", super::random()));
        let pem = params.self_signed(&key).expect("a certificate can be signed").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Its own certificate, in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate for a server or client of that name.
    pub fn sign(&self, name: &str) -> Identity {
        let key = KeyPair::generate().expect("a key can be made");
        let params = CertificateParams::new([name.to_owned()]).expect("a name that certificates can have");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate can be signed").pem();
        Identity { certificate, key: key.serialize_pem() }
    }
}

/// A server that speaks TLS on a port of its own, beside those that its helpers use.
pub struct TlsServer {
    server: RedisServer,
    port: u16,
    folder: PathBuf,
}

impl TlsServer {
    /// A server with a certificate for 127.0.0.1 that `authority` signed, who also has to have
    /// signed those of clients; `auth_clients` is `yes` where clients must have one, else `no`.
    pub fn start(authority: &Authority, auth_clients: &str) -> Self {
        Self::with(authority, auth_clients, &[])
    }

    /// The same, with further arguments.
    pub fn with(authority: &Authority, auth_clients: &str, args: &[&str]) -> Self {
        let folder = std::env::temp_dir().join(format!("slots-tls-{:016x}", super::random()));
        fs::create_dir_all(&folder).expect("a folder for the certificates can be made");
        let identity = authority.sign(&Ipv4Addr::LOCALHOST.to_string());
        let put = |name: &str, pem: &str| write(&folder, name, pem);
        let [ca, cert, key] = [
            put("ca.pem", authority.pem()),
            put("cert.pem", &identity.certificate),
            put("key.pem", &identity.key),
        ];
        let port = super::free_port();
        let tls = [
            "--tls-port",
            &port.to_string(),
            "--tls-ca-cert-file",
            &ca,
            "--tls-cert-file",
            &cert,
            "--tls-key-file",
            &key,
            "--tls-auth-clients",
            auth_clients,
        ];
        let server = RedisServer::with(&[&tls, args].concat());
        Self { server, port, folder }
    }

    /// The port that speaks TLS.
    pub fn tls_port(&self) -> u16 {
        self.port
    }

    /// `rediss://127.0.0.1:PORT/`
    pub fn url(&self) -> String {
        format!("rediss://127.0.0.1:{}/", self.port)
    }
}

impl std::ops::Deref for TlsServer {
    type Target = RedisServer;

    fn deref(&self) -> &RedisServer {
        &self.server
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        let _best_effort = fs::remove_dir_all(&self.folder);
    }
}

/// Writes a file and returns its path.
fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("a certificate can be written");
    path.into_os_string().into_string().expect("a path in UTF-8")
}
