//! Headers of packets. VIRTIO 1.2, "Socket Device", "Device Operation".
//!
//! The crate virtio-vsock reads only packets of one or two descriptors. A driver may divide a packet as
//! it likes ("Message Framing"), and Linux does for large ones, so headers are read from chains here.

/// Bytes of a header.
pub(super) const HEADER_LEN: usize = 44;

/// The type of connections that carry a stream of bytes.
pub(super) const TYPE_STREAM: u16 = 1;

/// The sender of a SHUTDOWN packet receives no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1 << 0;
/// The sender of a SHUTDOWN packet sends no more.
pub(super) const SHUTDOWN_SEND: u32 = 1 << 1;
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// Operations.
pub(super) mod op {
    pub const REQUEST: u16 = 1;
    pub const RESPONSE: u16 = 2;
    pub const RST: u16 = 3;
    pub const SHUTDOWN: u16 = 4;
    pub const RW: u16 = 5;
    pub const CREDIT_UPDATE: u16 = 6;
    pub const CREDIT_REQUEST: u16 = 7;
}

/// The header of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PacketHeader {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    /// Bytes of data after the header.
    pub len: u32,
    pub socket_type: u16,
    pub op: u16,
    pub flags: u32,
    /// Bytes of the sender's receive buffer.
    pub buf_alloc: u32,
    /// Bytes that the sender has received and consumed so far, modulo 2^32.
    pub fwd_cnt: u32,
}

/// The four bytes at `at`.
fn word(bytes: &[u8; HEADER_LEN], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

impl PacketHeader {
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let quad = |at| u64::from(word(bytes, at + 4)) << 32 | u64::from(word(bytes, at));
        let [a, b, c, d] = word(bytes, 28).to_le_bytes();
        Self {
            src_cid: quad(0),
            dst_cid: quad(8),
            src_port: word(bytes, 16),
            dst_port: word(bytes, 20),
            len: word(bytes, 24),
            socket_type: u16::from_le_bytes([a, b]),
            op: u16::from_le_bytes([c, d]),
            flags: word(bytes, 32),
            buf_alloc: word(bytes, 36),
            fwd_cnt: word(bytes, 40),
        }
    }

    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.socket_type.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The packet that resets the connection of this packet, which its receiver does not have.
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            socket_type: self.socket_type,
            op: op::RST,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let bytes: [u8; HEADER_LEN] = std::array::from_fn(|at| at.to_le_bytes()[0]);
        let header = PacketHeader::from_bytes(&bytes);
        let expected = PacketHeader {
            src_cid: 0x0706_0504_0302_0100,
            dst_cid: 0x0f0e_0d0c_0b0a_0908,
            src_port: 0x1312_1110,
            dst_port: 0x1716_1514,
            len: 0x1b1a_1918,
            socket_type: 0x1d1c,
            op: 0x1f1e,
            flags: 0x2322_2120,
            buf_alloc: 0x2726_2524,
            fwd_cnt: 0x2b2a_2928,
        };
        assert_eq!(header, expected);
        assert_eq!(header.to_bytes(), bytes);
    }
}
