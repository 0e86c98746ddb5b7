//! Adaptive PEBS records that the interpreter stores: their size and their pages.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::MsrConfig;
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Memory, ModelPlatform, MsrHandler, NoDevices, NoInterrupts, Vcpu};
use hindsight_regs::msr;
use std::sync::Arc;

const RAM: usize = 0x20_0000;
const CODE: u64 = 0x5000;
const STACK: u64 = 0x8_0000;
const AREA: u64 = 0x10_0000;
const BUFFER: u64 = 0x11_0000;
/// All groups, with the 256 LBR entries that MSR_PEBS_DATA_CFG can ask for.
const LARGEST: u64 = 0xff00_000f;
/// A basic record with general registers.
const REGISTERS: u64 = 2;
const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;

/// Takes one record of fixed counter 0 at an address; returns its bytes.
///
/// Fixed counter 1 overflows at the same instruction and requests an interrupt.
fn record(data_config: u64, at: u64, debugctl: u64, pages: u64) -> Vec<u8> {
    let memory = Arc::new(Memory::allocate(&[(0, RAM as u64)]).unwrap());
    for (table, entry) in [(0x1000, 0x2003_u64), (0x2000, 0x3003), (0x3000, 0x4003)] {
        assert!(memory.write(table, &entry.to_le_bytes()));
    }
    for page in 0..pages {
        let entry = page << 12 | 3;
        assert!(memory.write(0x4000 + 8 * page, &entry.to_le_bytes()));
    }
    // l: dec ecx; jnz l; hlt
    assert!(memory.write(CODE, &[0xff, 0xc9, 0x75, 0xfc, 0xf4]));
    for (field, value) in [
        (0x20, at),
        (0x28, at),
        (0x30, at + 0x8000),
        (0x38, at + 0x8000),
    ] {
        assert!(memory.write(AREA + field, &u64::to_le_bytes(value)));
    }
    let config = MsrConfig::new(Facilities::INTERP_DEFAULT, 1_000_000_000);
    let model = CpuModel::IcelakeServer;
    let mut platform = ModelPlatform::new(model, config, NoDevices, NoInterrupts::default());
    for (index, value) in [
        (msr::IA32_DS_AREA, AREA),
        (msr::MSR_PEBS_DATA_CFG, data_config),
        (msr::IA32_FIXED_CTR_CTRL, 1 << 32 | 0xb3),
        (msr::IA32_FIXED_CTR0, (1 << 48) - 10),
        (msr::IA32_FIXED_CTR0 + 1, (1 << 48) - 10),
        (msr::IA32_DEBUGCTL, debugctl),
        (msr::IA32_PEBS_ENABLE, 1 << 32),
        (msr::IA32_PERF_GLOBAL_CTRL, 3 << 32),
    ] {
        platform.wrmsr(index, value).unwrap();
    }
    let mut vcpu = Vcpu::new(Arc::clone(&memory));
    let mut state = CpuState::long_mode(0x1000, CODE, STACK);
    state.gpr[1] = 100;
    vcpu.load(&state);
    assert_eq!(vcpu.run(&mut platform, 10_000), Exit::Halted);
    let mut index = [0; 8];
    assert!(memory.read(AREA + 0x28, &mut index));
    let len = u64::from_le_bytes(index) - at;
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    assert!(memory.read(at, &mut bytes));
    bytes
}

/// The size in the record's format word.
fn size(record: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([record[6], record[7]]))
}

#[test]
fn record_may_be_longer_than_a_page() {
    let aligned = record(LARGEST, BUFFER, 0, 512);
    assert_eq!((aligned.len(), size(&aligned)), (0x19d0, 0x19d0));
    let across_three_pages = record(LARGEST, BUFFER + 0xf00, 0, 512);
    assert_eq!(across_three_pages, aligned);
}

#[test]
fn record_whose_last_page_is_missing_is_not_stored() {
    let mapped = (BUFFER >> 12) + 2;
    assert_eq!(record(LARGEST, BUFFER + 0xf00, 0, mapped), []);
}

#[test]
fn record_has_its_groups_if_an_interrupt_freezes_the_counters() {
    let free = record(REGISTERS, BUFFER, 0, 512);
    let frozen = record(REGISTERS, BUFFER, FREEZE_PERFMON_ON_PMI, 512);
    assert_eq!((free.len(), size(&free)), (0xb0, 0xb0));
    assert_eq!((frozen.len(), size(&frozen)), (0xb0, 0xb0));
}
