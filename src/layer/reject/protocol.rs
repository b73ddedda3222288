//! Which protocol a request speaks, and so in which its refusal is written.

use http::header::CONTENT_TYPE;
use http::request::Parts;

/// The protocol of a request; where there are several, with the media type of its answers.
///
/// Answers have a media type of their own, never the request's: what a client sends is not sent back.
/// They keep its codec where that is JSON, since clients compare, and take any other for Protobuf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    GrpcWeb(&'static str),
    Grpc(&'static str),
    ConnectStream(&'static str),
    ConnectUnary,
    Http,
}

impl Protocol {
    pub(super) fn of(parts: &Parts) -> Self {
        media_type(parts)
            .and_then(Self::of_media_type)
            .unwrap_or_else(|| if is_connect(parts) { Self::ConnectUnary } else { Self::Http })
    }

    /// The media types of gRPC (PROTOCOL-HTTP2.md), gRPC-Web (PROTOCOL-WEB.md) and Connect streams.
    fn of_media_type(media: &str) -> Option<Self> {
        if let Some(rest) = after(media, "application/grpc-web") {
            return Some(Self::GrpcWeb(match rest {
                _ if after(rest, "-text").is_some() => "application/grpc-web-text+proto",
                _ if is_json(rest) => "application/grpc-web+json",
                _ => "application/grpc-web+proto",
            }));
        }
        if let Some(rest) = after(media, "application/grpc").filter(|rest| is_suffix(rest)) {
            return Some(Self::Grpc(if is_json(rest) {
                "application/grpc+json"
            } else {
                "application/grpc"
            }));
        }
        let rest = after(media, "application/connect").filter(|rest| is_suffix(rest) && !rest.is_empty())?;
        Some(Self::ConnectStream(match rest {
            _ if is_json(rest) => "application/connect+json",
            _ => "application/connect+proto",
        }))
    }
}

/// Without its parameters.
fn media_type(parts: &Parts) -> Option<&str> {
    let value = parts.headers.get(CONTENT_TYPE)?.to_str().ok()?;
    value.split(';').next().map(str::trim)
}

/// What follows `prefix`, in any case: media types have none (RFC 9110, 8.3.1).
fn after<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let (start, rest) = text.split_at_checked(prefix.len())?;
    start.eq_ignore_ascii_case(prefix).then_some(rest)
}

fn is_suffix(rest: &str) -> bool {
    rest.is_empty() || rest.starts_with('+')
}

fn is_json(rest: &str) -> bool {
    rest.eq_ignore_ascii_case("+json")
}

/// A unary Connect request says so by a header, and as a `GET` in its query.
fn is_connect(parts: &Parts) -> bool {
    let by_header = parts.headers.get("connect-protocol-version").is_some_and(|version| version == "1");
    by_header || parts.uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "connect=v1"))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn protocol(media: &str, version: Option<&str>, uri: &str) -> Protocol {
        let mut request = Request::post(uri);
        if !media.is_empty() {
            request = request.header(CONTENT_TYPE, media);
        }
        if let Some(version) = version {
            request = request.header("connect-protocol-version", version);
        }
        Protocol::of(&request.body(()).expect("a valid request").into_parts().0)
    }

    #[test]
    fn the_media_type_tells() {
        let cases = [
            ("application/grpc-web", Protocol::GrpcWeb("application/grpc-web+proto")),
            ("application/grpc-web+proto", Protocol::GrpcWeb("application/grpc-web+proto")),
            ("application/grpc-web+thrift", Protocol::GrpcWeb("application/grpc-web+proto")),
            ("application/grpc-web+json", Protocol::GrpcWeb("application/grpc-web+json")),
            ("application/grpc-web-text", Protocol::GrpcWeb("application/grpc-web-text+proto")),
            ("Application/gRPC-Web-Text+proto", Protocol::GrpcWeb("application/grpc-web-text+proto")),
            ("application/grpc", Protocol::Grpc("application/grpc")),
            ("application/grpc; charset=utf-8", Protocol::Grpc("application/grpc")),
            ("application/GRPC+proto", Protocol::Grpc("application/grpc")),
            ("application/grpc+<script>", Protocol::Grpc("application/grpc")),
            ("application/grpc+json", Protocol::Grpc("application/grpc+json")),
            ("application/connect+proto", Protocol::ConnectStream("application/connect+proto")),
            ("application/connect+json", Protocol::ConnectStream("application/connect+json")),
            ("application/connect+other", Protocol::ConnectStream("application/connect+proto")),
            ("application/connect", Protocol::Http),
            ("application/grpcish", Protocol::Http),
            ("application/json", Protocol::Http),
            ("application/gr", Protocol::Http),
            ("", Protocol::Http),
        ];
        for (media, expected) in cases {
            assert_eq!(protocol(media, None, "/"), expected, "{media}");
        }
    }

    #[test]
    fn unary_connect_is_told_by_header_or_query() {
        let cases = [
            (Some("1"), "/", Protocol::ConnectUnary),
            (Some("2"), "/", Protocol::Http),
            (None, "/?connect=v1", Protocol::ConnectUnary),
            (None, "/?base64=1&connect=v1&encoding=proto", Protocol::ConnectUnary),
            (None, "/?connect=v12", Protocol::Http),
            (None, "/?disconnect=v1", Protocol::Http),
        ];
        for (version, uri, expected) in cases {
            assert_eq!(protocol("application/json", version, uri), expected, "{version:?} {uri}");
        }
    }

    #[test]
    fn the_media_type_comes_first() {
        let connect = |media| protocol(media, Some("1"), "/?connect=v1");
        assert_eq!(connect("application/grpc-web"), Protocol::GrpcWeb("application/grpc-web+proto"));
        assert_eq!(connect("application/grpc"), Protocol::Grpc("application/grpc"));
        assert_eq!(connect("application/connect+json"), Protocol::ConnectStream("application/connect+json"));
        assert_eq!(connect("application/proto"), Protocol::ConnectUnary);
    }
}
