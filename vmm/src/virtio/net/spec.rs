//! Which network a guest has: `user[,hostfwd=PROTO:[ADDRESS]:PORT-:PORT]...` or `none`.

use std::fmt;
use std::net::Ipv4Addr;

/// A port of the host whose traffic is forwarded to a port of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortForward {
    /// UDP; TCP otherwise.
    pub udp: bool,
    /// The host's address; all of them if there is none.
    pub address: Option<Ipv4Addr>,
    /// The host's port.
    pub host: u16,
    /// The guest's port.
    pub guest: u16,
}

/// The network of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetSpec {
    /// None.
    None,
    /// A network by passt, which needs no privileges.
    User(Vec<PortForward>),
}

impl PortForward {
    fn parse(text: &str) -> Option<Self> {
        let (host, guest) = text.split_once('-')?;
        let (protocol, host) = host.split_once(':')?;
        let (address, port) = host.rsplit_once(':')?;
        let address = match address {
            "" => None,
            address => Some(address.parse().ok()?),
        };
        Some(Self {
            udp: match protocol {
                "tcp" => false,
                "udp" => true,
                _ => return None,
            },
            address,
            host: port.parse().ok()?,
            guest: guest.strip_prefix(':')?.parse().ok()?,
        })
    }
}

impl NetSpec {
    /// Parses a network.
    ///
    /// # Errors
    ///
    /// The word is no network.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        match parts.next() {
            Some("none") if text == "none" => Ok(Self::None),
            Some("user") => {
                let forwards = parts.map(|part| {
                    let forward = part.strip_prefix("hostfwd=").and_then(PortForward::parse);
                    forward.ok_or_else(|| {
                        format!("{part} is no forwarded port such as hostfwd=tcp::2222-:22")
                    })
                });
                Ok(Self::User(forwards.collect::<Result<_, _>>()?))
            }
            _ => Err(format!("{text} is no network: use user or none")),
        }
    }
}

impl fmt::Display for NetSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::User(forwards) = self else {
            return f.write_str("none");
        };
        f.write_str("user")?;
        for forward in forwards {
            let protocol = if forward.udp { "udp" } else { "tcp" };
            let address = forward.address.map(|address| address.to_string());
            let address = address.unwrap_or_default();
            let PortForward { host, guest, .. } = forward;
            write!(f, ",hostfwd={protocol}:{address}:{host}-:{guest}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_ports_read_back() {
        for text in [
            "none",
            "user",
            "user,hostfwd=tcp::2222-:22,hostfwd=udp:127.0.0.1:53-:5353",
        ] {
            assert_eq!(NetSpec::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn other_words_are_no_networks() {
        for text in [
            "",
            "tap",
            "none,x",
            "user,",
            "user,hostfwd=tcp:22",
            "user,hostfwd=x::1-:2",
        ] {
            assert!(NetSpec::parse(text).is_err(), "{text:?}");
        }
    }
}
