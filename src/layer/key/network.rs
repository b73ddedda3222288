use std::net::IpAddr;

use crate::error::ConfigError;

/// A range of addresses: `10.0.0.0/8`, `fd00::/8`, or a single address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Network {
    first: IpAddr,
    prefix: u32,
}

impl Network {
    pub(super) fn parse(text: &str) -> Result<Self, ConfigError> {
        let (first, prefix) = match text.split_once('/') {
            Some((first, prefix)) => (first, Some(prefix)),
            None => (text, None),
        };
        let first: IpAddr =
            first.parse().map_err(|_| problem("not an ip address with or without a /prefix"))?;
        if first.to_canonical() != first {
            return Err(problem("an ipv4 range in ipv6 form: write it as an ipv4 range"));
        }
        let bits = width(first);
        let prefix = match prefix {
            None => bits,
            Some(prefix) => number(prefix)
                .filter(|prefix| *prefix <= bits)
                .ok_or(problem("the /prefix is not 0 to 32 for ipv4, 0 to 128 for ipv6"))?,
        };
        let network = Self { first, prefix };
        if network.masked(first) != number_of(first) {
            return Err(problem(
                "the address has bits set behind its /prefix: write the range's first address",
            ));
        }
        Ok(network)
    }

    /// `address` must be canonical: no IPv4 address in IPv6 form.
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.first.is_ipv4() == address.is_ipv4() && self.masked(address) == number_of(self.first)
    }

    fn masked(&self, address: IpAddr) -> u128 {
        let behind = width(address) - self.prefix;
        number_of(address) & u128::MAX.checked_shl(behind).unwrap_or(0)
    }
}

const fn problem(problem: &'static str) -> ConfigError {
    ConfigError::new("trusted_proxy_ip", problem)
}

fn width(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn number_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    }
}

/// Digits only: no sign.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(network: &str, address: &str) -> bool {
        let network = Network::parse(network).expect(network);
        network.contains(address.parse().expect(address))
    }

    #[test]
    fn ranges_contain_what_shares_their_prefix() {
        assert!(has("10.0.0.0/8", "10.255.0.1"));
        assert!(!has("10.0.0.0/8", "11.0.0.0"));
        assert!(has("192.0.2.7", "192.0.2.7") && !has("192.0.2.7", "192.0.2.6"));
        assert!(has("0.0.0.0/0", "203.0.113.1") && !has("0.0.0.0/0", "::"));
        assert!(has("fd00::/8", "fdff::1") && !has("fd00::/8", "fe00::"));
        assert!(has("::/0", "2001:db8::1") && !has("::/0", "10.0.0.1"));
        assert!(has("2001:db8::1/128", "2001:db8::1"));
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in ["", "/8", "10.0.0.0/", "10.0.0.0/33", "::/129", "10.0.0.0/+8", "10.0.0.0/8/8", "10.1/16"]
        {
            assert!(Network::parse(text).is_err(), "{text}");
        }
        assert!(Network::parse("10.0.0.1/8").is_err());
        assert!(Network::parse("::ffff:10.0.0.0/104").is_err());
        assert!(Network::parse("2001:db8::1/64").is_err());
        assert!(Network::parse("0.0.0.0/4294967296").is_err());
    }
}
