//! Performance monitoring. SDM Vol. 3B, "Architectural Performance Monitoring" and "Processor Event
//! Based Sampling (PEBS)".

/// General-purpose counters with two threads per core: CPUID.0AH:EAX\[15:8\].
pub const GP_COUNTERS: u32 = 4;
/// General-purpose counters with one thread per core.
pub const GP_COUNTERS_MAX: u32 = 8;
/// Fixed counters before Ice Lake: CPUID.0AH:EDX\[4:0\].
pub const FIXED_COUNTERS: u32 = 3;
/// The most fixed counters of any model: CPUID.0AH:EDX\[4:0\].
pub const FIXED_COUNTERS_MAX: u32 = 4;
/// The 48 bits of a counter's value.
pub const COUNTER_MASK: u64 = (1 << 48) - 1;

/// IA32_PERFEVTSELx. SDM Vol. 3B, "Architectural Performance Monitoring Version 1 Facilities".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct EventSelect(pub u64);

impl EventSelect {
    /// Count at CPL above 0.
    pub const USR: u64 = 1 << 16;
    /// Count at CPL 0.
    pub const OS: u64 = 1 << 17;
    /// Count transitions of the condition from 0 to 1.
    pub const EDGE: u64 = 1 << 18;
    /// Pin control; absent from this processor.
    pub const PIN: u64 = 1 << 19;
    /// An overflow requests an interrupt.
    pub const INT: u64 = 1 << 20;
    /// Count for all threads of the core.
    pub const ANY_THREAD: u64 = 1 << 21;
    /// The counter is on.
    pub const ENABLE: u64 = 1 << 22;
    /// Invert the comparison with the counter mask.
    pub const INVERT: u64 = 1 << 23;
    /// The bits below [`EventSelect::IN_TX`] that can be written; writes to pin control are dropped.
    pub const WRITABLE: u64 = 0xffff_ffff & !Self::PIN;
    /// Count inside transactions only.
    pub const IN_TX: u64 = 1 << 32;
    /// Exclude aborted transactions from the count; counter 2 only.
    pub const IN_TXCP: u64 = 1 << 33;
    /// PEBS records have the groups of MSR_PEBS_DATA_CFG.
    pub const ADAPTIVE_RECORD: u64 = 1 << 34;

    /// A selection of `event` with `umask` and the flags `bits`.
    pub const fn new(event: u8, umask: u8, bits: u64) -> Self {
        Self(event as u64 | (umask as u64) << 8 | bits)
    }

    /// The event select field.
    pub const fn event(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    /// The unit mask.
    pub const fn umask(self) -> u8 {
        self.0.to_le_bytes()[1]
    }

    /// The counter mask: events per cycle from which the counter adds 1; 0 adds every event.
    pub const fn cmask(self) -> u8 {
        self.0.to_le_bytes()[3]
    }

    /// Whether all of `bits` are set.
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }
}

/// The field of one fixed counter in IA32_FIXED_CTR_CTRL.
/// SDM Vol. 3B, "Architectural Performance Monitoring Version 2 Facilities".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct FixedControl(pub u64);

impl FixedControl {
    /// Count at CPL 0.
    pub const OS: u64 = 1;
    /// Count at CPL above 0.
    pub const USR: u64 = 1 << 1;
    /// Count for all threads of the core.
    pub const ANY_THREAD: u64 = 1 << 2;
    /// An overflow requests an interrupt.
    pub const PMI: u64 = 1 << 3;
    /// [`FixedControl::ANY_THREAD`] in the fields of all counters.
    pub const ANY_THREAD_OF_ALL: u64 = 0x4444;

    /// The field of fixed counter `index`, 0 to 3, in a value of IA32_FIXED_CTR_CTRL.
    pub const fn of(value: u64, index: usize) -> Self {
        debug_assert!(index < FIXED_COUNTERS_MAX as usize, "no such fixed counter");
        Self(value >> (4 * index) & 0b1111)
    }

    /// Whether all of `bits` are set.
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// The bit of IA32_FIXED_CTR_CTRL that gives the PEBS records of fixed counter `index`, 0 to 3, the
    /// groups of MSR_PEBS_DATA_CFG.
    pub const fn adaptive_record(index: usize) -> u64 {
        debug_assert!(index < FIXED_COUNTERS_MAX as usize, "no such fixed counter");
        1 << (32 + 4 * index)
    }
}

/// MSR_PERF_METRICS: fractions of slots, of which 255 are all. SDM Vol. 3B, "Performance Metrics".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Slots whose uop retired.
    pub retiring: u8,
    /// Slots lost to uops that do not retire.
    pub bad_speculation: u8,
    /// Slots for which the front end delivered no uop.
    pub frontend_bound: u8,
    /// Slots in which the back end accepted none.
    pub backend_bound: u8,
    /// Of the retiring slots, those of heavy operations. This and what follows is the second level.
    pub heavy_operations: u8,
    /// Of the slots of bad speculation, those lost to mispredicted branches.
    pub branch_mispredicts: u8,
    /// Of the frontend bound slots, those for which the fetch of instructions was late.
    pub fetch_latency: u8,
    /// Of the backend bound slots, those that waited for memory.
    pub memory_bound: u8,
}

impl Metrics {
    /// The fields of a value of the register.
    pub const fn from_bits(bits: u64) -> Self {
        let bytes = bits.to_le_bytes();
        Self {
            retiring: bytes[0],
            bad_speculation: bytes[1],
            frontend_bound: bytes[2],
            backend_bound: bytes[3],
            heavy_operations: bytes[4],
            branch_mispredicts: bytes[5],
            fetch_latency: bytes[6],
            memory_bound: bytes[7],
        }
    }

    /// The value of the register.
    pub const fn bits(self) -> u64 {
        u64::from_le_bytes([
            self.retiring,
            self.bad_speculation,
            self.frontend_bound,
            self.backend_bound,
            self.heavy_operations,
            self.branch_mispredicts,
            self.fetch_latency,
            self.memory_bound,
        ])
    }
}

/// Bits of IA32_PERF_GLOBAL_CTRL, _STATUS, _STATUS_RESET and _STATUS_SET.
/// SDM Vol. 3B, "Architectural Performance Monitoring Version 4 Facilities".
pub mod global {
    /// The first fixed counter's bit; counter `i` has the bit `FIXED + i`.
    pub const FIXED: u32 = 32;
    /// The bits of four general-purpose and three fixed counters.
    pub const COUNTERS: u64 = 0x7_0000_000f;
    /// The bits of general-purpose counters 4 to 7, where there are eight.
    pub const UPPER_COUNTERS: u64 = 0xf0;
    /// The bit of fixed counter 3, where there are four.
    pub const FIXED_3: u64 = 1 << 35;
    /// The bit of MSR_PERF_METRICS, where it exists.
    pub const PERF_METRICS: u64 = 1 << 48;
    /// LBR_FRZ: the LBR stack is frozen.
    pub const LBR_FRZ: u64 = 1 << 58;
    /// CTR_FRZ: the counters are frozen.
    pub const CTR_FRZ: u64 = 1 << 59;
    /// ASCI: an SGX enclave was entered.
    pub const ASCI: u64 = 1 << 60;
    /// An uncore counter overflowed.
    pub const UNCORE: u64 = 1 << 61;
    /// The PEBS buffer reached its threshold.
    pub const DS_BUFFER: u64 = 1 << 62;
    /// CondChgd: the state of the unit changed.
    pub const COND_CHANGED: u64 = 1 << 63;
    /// In IA32_PERF_GLOBAL_INUSE: some counter may request an interrupt.
    pub const PMI_IN_USE: u64 = 1 << 63;
    /// The writable bits of IA32_PERF_GLOBAL_STATUS_RESET.
    pub const RESETTABLE: u64 = COUNTERS | 0b11_1111 << 58;
    /// The writable bits of IA32_PERF_GLOBAL_STATUS_SET.
    pub const SETTABLE: u64 = COUNTERS | 0b1_1111 << 58;
}

/// The PEBS half of the DS buffer management area, and the record of format 3.
/// SDM Vol. 3B, "Debug Store (DS) Mechanism" and "PEBS Data Format".
pub mod pebs {
    /// Offset of the buffer base in the management area.
    pub const BASE: u64 = 0x20;
    /// Offset of the index: linear address of the next record.
    pub const INDEX: u64 = 0x28;
    /// Offset of the absolute maximum: no byte at or above it is written.
    pub const MAXIMUM: u64 = 0x30;
    /// Offset of the interrupt threshold.
    pub const THRESHOLD: u64 = 0x38;
    /// Offset of the reset value of counter 0; counter `n` has `RESET + 8 * n`.
    pub const RESET: u64 = 0x40;
    /// Offset of the reset value of fixed counter 0, where these take records.
    pub const RESET_FIXED: u64 = RESET + 8 * super::GP_COUNTERS_MAX as u64;
    /// Bytes of a record of format 3.
    pub const RECORD: usize = 200;
    /// Bit of IA32_PEBS_ENABLE that enables load latency for counter 0.
    pub const LOAD_LATENCY: u32 = 32;

    /// Offsets in a record.
    pub mod record {
        /// RFLAGS.
        pub const RFLAGS: usize = 0x00;
        /// RIP after the eventing instruction.
        pub const RIP: usize = 0x08;
        /// RAX, and then RBX, RCX, RDX, RSI, RDI, RBP, RSP, R8 to R15.
        pub const REGISTERS: usize = 0x10;
        /// The counters that overflowed: bit n for counter n.
        pub const COUNTERS: usize = 0x90;
        /// Linear address of the data.
        pub const ADDRESS: usize = 0x98;
        /// Data source encoding.
        pub const SOURCE: usize = 0xa0;
        /// Latency in core cycles.
        pub const LATENCY: usize = 0xa8;
        /// RIP of the eventing instruction.
        pub const EVENTING_RIP: usize = 0xb0;
        /// Abort information of the last transaction.
        pub const TX: usize = 0xb8;
        /// The time-stamp counter.
        pub const TSC: usize = 0xc0;
    }

    /// MSR_PEBS_DATA_CFG: the groups of a record of format 4, besides the basic group.
    /// SDM Vol. 3B, "Adaptive PEBS".
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(transparent))]
    pub struct DataConfig(pub u64);

    impl DataConfig {
        /// The memory group.
        pub const MEMORY: u64 = 1 << 0;
        /// The group of the general registers.
        pub const GPRS: u64 = 1 << 1;
        /// The group of XMM0 to XMM15.
        pub const XMMS: u64 = 1 << 2;
        /// The group of LBR entries.
        pub const LBRS: u64 = 1 << 3;
        /// The first bit of the number of LBR entries less one, bits 31:24.
        pub const LBR_ENTRIES_SHIFT: u32 = 24;
        /// The bits that can be written.
        pub const WRITABLE: u64 = 0xff00_000f;

        /// Whether a record has this group.
        pub const fn has(self, group: u64) -> bool {
            self.0 & group != 0
        }

        /// The number of LBR entries in a record, 0 to 256.
        pub const fn lbr_entries(self) -> usize {
            if self.has(Self::LBRS) {
                self.0.to_le_bytes()[3] as usize + 1
            } else {
                0
            }
        }

        /// Bytes of a record.
        pub const fn record_bytes(self) -> usize {
            let mut bytes = groups::BASIC;
            if self.has(Self::MEMORY) {
                bytes += groups::MEMORY;
            }
            if self.has(Self::GPRS) {
                bytes += groups::GPRS;
            }
            if self.has(Self::XMMS) {
                bytes += groups::XMMS;
            }
            bytes + self.lbr_entries() * groups::LBR_ENTRY
        }
    }

    /// Bytes of the groups of a record of format 4, which follow each other in this order.
    pub mod groups {
        /// Record format and size, eventing RIP, applicable counters, TSC.
        pub const BASIC: usize = 32;
        /// Address, data source, latency, abort information.
        pub const MEMORY: usize = 32;
        /// RFLAGS, RIP, RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
        pub const GPRS: usize = 144;
        /// XMM0 to XMM15.
        pub const XMMS: usize = 256;
        /// FROM, TO and INFO; the newest entry is the first.
        pub const LBR_ENTRY: usize = 24;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_select_fields_match_the_manual() {
        // Conditional branches retired at CPL 3, as rr programs them.
        let select = EventSelect::new(0xc4, 0x01, 0x51_0000);
        assert_eq!(select.0, 0x51_01c4);
        assert!(select.has(EventSelect::USR | EventSelect::INT | EventSelect::ENABLE));
        assert!(!select.has(EventSelect::OS));
        // Precise cycles, as perf programs them: INV, CMASK of 16.
        let cycles = EventSelect(0x10d3_01c0);
        assert_eq!(
            (cycles.event(), cycles.umask(), cycles.cmask()),
            (0xc0, 1, 16)
        );
        assert!(cycles.has(EventSelect::INVERT));
    }

    #[test]
    fn fixed_control_fields_are_four_bits() {
        assert_eq!(FixedControl::of(0xb30, 2), FixedControl(0xb));
        assert!(FixedControl::of(0xb30, 2).has(FixedControl::PMI | FixedControl::USR));
        assert_eq!(FixedControl::of(0xb30, 0), FixedControl(0));
    }

    #[test]
    fn global_status_masks_match_the_manual() {
        assert_eq!(global::RESETTABLE, 0xfc00_0007_0000_000f);
        assert_eq!(global::SETTABLE, 0x7c00_0007_0000_000f);
        assert_eq!(global::CTR_FRZ, 0x0800_0000_0000_0000);
        assert_eq!(global::LBR_FRZ, 0x0400_0000_0000_0000);
    }

    #[test]
    fn metrics_are_eight_bytes() {
        let metrics = Metrics {
            retiring: 1,
            bad_speculation: 2,
            frontend_bound: 3,
            backend_bound: 4,
            heavy_operations: 5,
            branch_mispredicts: 6,
            fetch_latency: 7,
            memory_bound: 8,
        };
        assert_eq!(metrics.bits(), 0x0807_0605_0403_0201);
        assert_eq!(Metrics::from_bits(0x0807_0605_0403_0201), metrics);
        assert_eq!(global::PERF_METRICS, 0x1_0000_0000_0000);
    }

    #[test]
    fn adaptive_record_has_the_bytes_of_its_groups() {
        use pebs::DataConfig;
        let rows = [
            (0, 0x20),
            (1, 0x40),
            (2, 0xb0),
            (4, 0x120),
            (8, 0x38),
            (0x1f00_0008, 0x320),
            (0x1f00_0007, 0x1d0),
            (0x1f00_000f, 0x4d0),
            (0xff00_000f, 0x19d0),
        ];
        for (value, bytes) in rows {
            assert_eq!(DataConfig(value).record_bytes(), bytes, "{value:#x}");
        }
        assert_eq!(pebs::RESET_FIXED, 0x80);
        assert_eq!(EventSelect::ADAPTIVE_RECORD, 0x4_0000_0000);
        assert_eq!(
            [0, 1, 2, 3].map(FixedControl::adaptive_record),
            [1 << 32, 1 << 36, 1 << 40, 1 << 44]
        );
    }

    #[test]
    fn tsc_is_the_last_field_of_a_record() {
        assert_eq!(pebs::record::TSC + 8, pebs::RECORD);
    }
}
