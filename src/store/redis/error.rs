//! From the client library's and the server's errors to ours, with what to do about them.

use ::redis::{ErrorKind, RedisError};

use crate::store::{StoreError, StoreErrorKind};

pub(super) fn from_redis(error: &RedisError) -> StoreError {
    if error.is_timeout() {
        return timed_out();
    }
    if let Some(code) = error.code() {
        return classify(code, &error.to_string());
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed => classify("WRONGPASS", &error.to_string()),
        ErrorKind::Io => {
            let text = error.to_string();
            let advice = about_tls(&text).unwrap_or("is the server up, and the address right?");
            StoreError::new(StoreErrorKind::Io, format!("{text}: {advice}"))
        }
        // The library has wrapped the server's error, without its code.
        _ => classify("", &error.to_string()),
    }
}

/// What to do about a handshake that failed.
fn about_tls(text: &str) -> Option<&'static str> {
    let advice = match text {
        _ if text.contains("UnknownIssuer") || text.contains("BadSignature") => {
            "an authority signed the server's certificate that is not trusted here: give its certificate with \
             TlsAddress::authority"
        }
        _ if text.contains("not valid for") => {
            "the server's certificate is for another name: use that in the address"
        }
        _ if text.contains("invalid peer certificate") => "the server needs another certificate",
        _ if text.contains("CertificateRequired") => {
            "the server asks for a client certificate: give one with TlsAddress::identity"
        }
        _ if text.contains("received fatal alert") => {
            "the server refused the handshake: does it trust the authority of our certificate?"
        }
        _ if text.contains("corrupt message") => "the server speaks no TLS at this port: use redis://",
        _ => return None,
    };
    Some(advice)
}

/// An error that a script caught, as its text: the code is the first word.
pub(super) fn classify_text(text: &str) -> StoreError {
    classify(text.split_whitespace().next().unwrap_or_default(), text)
}

fn classify(code: &str, text: &str) -> StoreError {
    use StoreErrorKind as Kind;
    let (kind, advice) = match code {
        _ if code == "NOPERM" || is_denied(text) => {
            (Kind::NoPerm, "grant the user the rights that the documentation of RedisStore lists")
        }
        "NOAUTH" | "WRONGPASS" => {
            (Kind::NoPerm, "put the right login into the url: redis://user:password@host")
        }
        "NOSCRIPT" => (Kind::NoScript, "the server forgot a script that was just sent"),
        "READONLY" => (Kind::ReadOnly, "this server is a replica: connect to the master"),
        "OOM" => (Kind::Oom, "raise maxmemory"),
        "LOADING" | "MASTERDOWN" | "BUSY" => (Kind::Loading, "the server will answer again by itself"),
        "MOVED" | "ASK" | "TRYAGAIN" | "CROSSSLOT" => {
            (Kind::Cluster, "this server is part of a cluster: connect to it with RedisStore::cluster")
        }
        "CLUSTERDOWN" => (Kind::Cluster, "its nodes do not agree or are not all up: look at CLUSTER INFO"),
        "WRONGTYPE" => (Kind::WrongType, "something else is stored under the key: choose another prefix"),
        _ => return StoreError::new(Kind::Other, text.to_owned()),
    };
    StoreError::new(kind, format!("{text} ({advice})"))
}

/// What servers say about a command or key that the user of a script, or of a database in the address,
/// lacks a right for.
fn is_denied(text: &str) -> bool {
    text.contains("has no permissions to run")
        || text.contains("ACL failure in script")
        || text.contains("The user executing the script can't")
}

pub(super) fn malformed() -> StoreError {
    StoreError::new(
        StoreErrorKind::Other,
        "the server's reply to a script has an unexpected shape: is it redis?",
    )
}

pub(super) fn connection_lost() -> StoreError {
    StoreError::new(StoreErrorKind::Io, "the connection was lost")
}

pub(super) fn timed_out() -> StoreError {
    StoreError::new(StoreErrorKind::Timeout, "no answer within the store's time-out")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_from_scripts_are_classified_by_their_code() {
        for (text, kind) in [
            ("WRONGTYPE Operation against a key holding the wrong kind of value", StoreErrorKind::WrongType),
            ("OOM command not allowed when used memory > 'maxmemory'.", StoreErrorKind::Oom),
            ("READONLY You can't write against a read only replica.", StoreErrorKind::ReadOnly),
            ("NOPERM ACL failure in script: User has no permissions", StoreErrorKind::NoPerm),
            ("ERR ACL failure in script: User has no permissions", StoreErrorKind::NoPerm),
            (
                "ERR The user executing the script can't run this command or subcommand",
                StoreErrorKind::NoPerm,
            ),
            (
                "refused to switch database: this user has no permissions to run the 'select' command",
                StoreErrorKind::NoPerm,
            ),
            ("NOAUTH Authentication required.", StoreErrorKind::NoPerm),
            ("WRONGPASS invalid username-password pair or user is disabled.", StoreErrorKind::NoPerm),
            ("NOSCRIPT No matching script. Please use EVAL.", StoreErrorKind::NoScript),
            ("LOADING Redis is loading the dataset in memory", StoreErrorKind::Loading),
            ("MASTERDOWN Link with MASTER is down", StoreErrorKind::Loading),
            ("BUSY Redis is busy running a script.", StoreErrorKind::Loading),
            ("MOVED 3999 127.0.0.1:6381", StoreErrorKind::Cluster),
            ("ASK 3999 127.0.0.1:6381", StoreErrorKind::Cluster),
            ("TRYAGAIN Multiple keys request during rehashing of slot", StoreErrorKind::Cluster),
            ("CROSSSLOT Keys in request don't hash to the same slot", StoreErrorKind::Cluster),
            ("CLUSTERDOWN The cluster is down", StoreErrorKind::Cluster),
            ("ERR something else", StoreErrorKind::Other),
            ("", StoreErrorKind::Other),
        ] {
            assert_eq!(classify_text(text).kind(), kind, "{text}");
        }
    }
    #[test]
    fn errors_of_the_library_say_what_to_do() {
        let refused = RedisError::from((ErrorKind::AuthenticationFailed, "password authentication failed"));
        let error = from_redis(&refused);
        assert_eq!(error.kind(), StoreErrorKind::NoPerm);
        assert!(error.to_string().contains("put the right login into the url"), "{error}");

        let down = RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
        let error = from_redis(&down);
        assert_eq!(error.kind(), StoreErrorKind::Io);
        assert!(error.to_string().contains("is the server up"), "{error}");

        let late = RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
        assert_eq!(from_redis(&late).kind(), StoreErrorKind::Timeout);

        let odd = RedisError::from((ErrorKind::UnexpectedReturnType, "odd"));
        assert_eq!(from_redis(&odd).kind(), StoreErrorKind::Other);
    }

    #[test]
    fn a_handshake_that_failed_has_its_own_advice() {
        for (text, advice) in [
            ("invalid peer certificate: UnknownIssuer", Some("TlsAddress::authority")),
            ("invalid peer certificate: BadSignature", Some("TlsAddress::authority")),
            ("invalid peer certificate: certificate not valid for name \"a\"", Some("is for another name")),
            ("invalid peer certificate: Expired", Some("needs another certificate")),
            ("received fatal alert: CertificateRequired", Some("TlsAddress::identity")),
            ("received fatal alert: HandshakeFailure", Some("trust the authority of our certificate")),
            ("received corrupt message of type InvalidContentType", Some("speaks no TLS")),
            ("connection refused", None),
        ] {
            let found = about_tls(text);
            assert_eq!(found.is_some(), advice.is_some(), "{text}: {found:?}");
            assert!(found.unwrap_or_default().contains(advice.unwrap_or_default()), "{text}: {found:?}");
        }
    }
}
