//! The port to which the handlers in low memory report calls of a BIOS, which does not exist here.

use hindsight_devices::Device;

/// Warns of the first call of each vector.
#[derive(Debug, Default)]
pub(super) struct BiosCalls {
    /// The vectors that were reported, a bit each.
    reported: [u64; 4],
}

impl BiosCalls {
    /// The warning for a call of `vector`; `None` after the first one.
    fn warning(&mut self, vector: u8) -> Option<String> {
        let (word, bit) = (usize::from(vector / 64), 1 << (vector % 64));
        if self.reported[word] & bit != 0 {
            return None;
        }
        self.reported[word] |= bit;
        Some(match exception(vector) {
            Some(name) => format!(
                "the guest has no handler for exception {vector} ({name}) in real mode, which now \
                 returns to the instruction"
            ),
            None => format!(
                "the guest calls interrupt {vector:#x} ({}) of the BIOS: there is no BIOS, and the \
                 call fails",
                service(vector)
            ),
        })
    }
}

impl Device for BiosCalls {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        if let Some(text) = data.first().and_then(|&vector| self.warning(vector)) {
            tracing::warn!("{text}");
        }
    }
}

/// The name of an exception that real-mode code raises.
const fn exception(vector: u8) -> Option<&'static str> {
    Some(match vector {
        0 => "divide error",
        1 => "debug",
        3 => "breakpoint",
        4 => "overflow",
        6 => "invalid opcode",
        7 => "no coprocessor",
        _ => return None,
    })
}

/// What a BIOS or DOS serves at `vector`.
const fn service(vector: u8) -> &'static str {
    match vector {
        0x05 => "print screen",
        0x10 => "video",
        0x11 => "equipment list",
        0x12 => "memory size",
        0x13 => "disk",
        0x14 => "serial port",
        0x15 => "system services",
        0x16 => "keyboard",
        0x17 => "printer",
        0x18 => "boot failure",
        0x19 => "boot",
        0x1a => "time and PCI",
        0x20..=0x2f => "DOS",
        _ => "no known service",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_call_of_each_vector_is_named() {
        let mut calls = BiosCalls::default();
        assert!(calls.warning(0x13).unwrap().contains("0x13 (disk)"));
        assert!(calls.warning(0x10).unwrap().contains("0x10 (video)"));
        assert!(calls.warning(6).unwrap().contains("6 (invalid opcode)"));
        assert_eq!(calls.warning(0x13), None);
        let all = (0..=u8::MAX).filter(|&vector| calls.warning(vector).is_some());
        assert_eq!(all.count(), 253);
    }

    #[test]
    fn accesses_of_every_size_are_taken() {
        let mut calls = BiosCalls::default();
        for size in [1, 2, 4] {
            let mut data = vec![0; size];
            calls.write(0, &data);
            calls.read(0, &mut data);
            assert_eq!(data, vec![0xff; size]);
        }
    }
}
