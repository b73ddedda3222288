//! `google.rpc.RetryInfo` and `google.rpc.Status` on the wire: the few lines of Protobuf that it takes,
//! rather than a code generator and a runtime.

/// The name of the message; behind `type.googleapis.com/` in an `Any`.
pub(super) const RETRY_INFO: &str = "google.rpc.RetryInfo";

/// The most that a `google.protobuf.Duration` may say: 10,000 years.
const MOST_SECONDS: u64 = 315_576_000_000;

/// The wire types in use here.
const VARINT: u64 = 0;
const LENGTH_DELIMITED: u64 = 2;

/// `RetryInfo { retry_delay = 1: Duration { seconds = 1 } }`
pub(super) fn retry_info(seconds: u64) -> Vec<u8> {
    let mut delay = Vec::new();
    put_number(&mut delay, 1, seconds.min(MOST_SECONDS));
    let mut info = Vec::new();
    put_bytes(&mut info, 1, &delay);
    info
}

/// `Status { code = 1, message = 2, details = 3: [Any { type_url = 1, value = 2 }] }`
pub(super) fn status(code: u8, message: &str, seconds: u64) -> Vec<u8> {
    let mut detail = Vec::new();
    put_bytes(&mut detail, 1, format!("type.googleapis.com/{RETRY_INFO}").as_bytes());
    put_bytes(&mut detail, 2, &retry_info(seconds));
    let mut status = Vec::new();
    put_number(&mut status, 1, u64::from(code));
    put_bytes(&mut status, 2, message.as_bytes());
    put_bytes(&mut status, 3, &detail);
    status
}

fn put_number(out: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(out, (field << 3) | VARINT);
    put_varint(out, value);
}

fn put_bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    put_varint(out, (field << 3) | LENGTH_DELIMITED);
    put_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Seven bits a byte, the lowest first; all bytes but the last have the high bit.
fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tonic_types::StatusExt;

    use super::*;

    #[test]
    fn varints() {
        let cases: [(u64, &[u8]); 5] = [
            (0, &[0]),
            (127, &[0x7f]),
            (128, &[0x80, 1]),
            (300, &[0xac, 2]),
            (u64::MAX, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
        ];
        for (value, expected) in cases {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            assert_eq!(out, expected, "{value}");
        }
    }

    #[test]
    fn another_implementation_reads_it() {
        for (seconds, read) in [(1, 1), (30, 30), (300, 300), (u64::MAX, MOST_SECONDS)] {
            let details = status(8, "concurrency limit reached", seconds);
            let status = tonic::Status::with_details(tonic::Code::ResourceExhausted, "", details.into());
            let details = status.check_error_details().expect("a google.rpc.Status");
            let info = details.retry_info().expect("a RetryInfo");
            assert_eq!(info.retry_delay, Some(Duration::from_secs(read)));
        }
    }
}
