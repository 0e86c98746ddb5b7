//! A virtual machine monitor whose guest has LBR, BTS and a PMU on any host.
//!
//!     cargo run -p minimal-vmm            # under KVM until the guest arms a facility
//!     cargo run -p minimal-vmm interp     # in the interpreter from the start

mod guest;
mod kvm;

use std::error::Error;
use std::sync::Arc;

use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::MsrConfig;
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Memory, ModelPlatform, MsrHandler, NoDevices, NoInterrupts, Vcpu};
use hindsight_regs::branch::bts;
use hindsight_regs::msr;

const RAM: u64 = 0x20_0000;
const PAGE_TABLES: u64 = 0x1000;
const STACK_TOP: u64 = 0x6000;
const CODE: u64 = 0x1_0000;
const BTS_BUFFER: u64 = 0x2_0000;
const BTS_END: u64 = BTS_BUFFER + 64 * 24;

fn main() -> Result<(), Box<dyn Error>> {
    let memory = Arc::new(guest_memory()?);
    // The models hold the processor's MSRs while either engine runs the guest.
    let config = MsrConfig::new(
        Facilities::LBR | Facilities::BTS | Facilities::PMU,
        1_000_000_000,
    );
    let model = CpuModel::SkylakeServer;
    let mut platform = ModelPlatform::new(model, config, NoDevices, NoInterrupts::default());
    let mut state = CpuState::long_mode(PAGE_TABLES, CODE, STACK_TOP);

    if std::env::args().nth(1).as_deref() == Some("interp") {
        println!("interpreter: the guest starts here, as requested");
    } else if let Err(error) = kvm_ioctls::Kvm::new() {
        println!("interpreter: the guest starts here, because /dev/kvm cannot be used: {error}");
    } else {
        let accesses = kvm::run(&memory, &mut platform, &mut state)?;
        let armed = platform.armed();
        println!("KVM: the guest armed {armed} by its MSR access number {accesses}");
    }

    let mut vcpu = Vcpu::new(memory.clone());
    vcpu.load(&state);
    // The limit is in core cycles, in case the guest does not halt.
    match vcpu.run(&mut platform, 1_000_000) {
        Exit::Halted => println!("interpreter: the guest halted"),
        exit => return Err(format!("the guest ended with {exit:?}").into()),
    }
    print_records(&memory, &mut platform)
}

/// RAM with page tables that map it one to one, the guest's code, and its DS area.
fn guest_memory() -> Result<Memory, Box<dyn Error>> {
    let memory = Memory::allocate(&[(0, RAM)])?;
    for (address, value) in [
        // PML4, page-directory pointers, and a page directory with one page of 2 MiB.
        (PAGE_TABLES, 0x2003),
        (0x2000, 0x3003),
        (0x3000, 0x83),
        // The BTS buffer, with a threshold that is never reached.
        (guest::DS_AREA + bts::BASE, BTS_BUFFER),
        (guest::DS_AREA + bts::INDEX, BTS_BUFFER),
        (guest::DS_AREA + bts::MAXIMUM, BTS_END),
        (guest::DS_AREA + bts::THRESHOLD, u64::MAX),
    ] {
        memory.write(address, &u64::to_le_bytes(value));
    }
    memory.write(CODE, &guest::CODE);
    Ok(memory)
}

/// Prints what the guest has counted and recorded.
fn print_records(memory: &Memory, platform: &mut impl MsrHandler) -> Result<(), Box<dyn Error>> {
    let read = |address| memory.read_u64(address).ok_or("the address is not in RAM");
    let (instructions, branches) = (read(guest::RESULTS)?, read(guest::RESULTS + 8)?);
    println!("PMU: {instructions} instructions, {branches} branches");
    let newest = u32::try_from(read(guest::RESULTS + 16)?)?;
    for index in newest.saturating_sub(3)..=newest {
        let from = platform.rdmsr(msr::MSR_LASTBRANCH_0_FROM_IP + index);
        let to = platform.rdmsr(msr::MSR_LASTBRANCH_0_TO_IP + index);
        print_branch("LBR", from.unwrap_or(0), to.unwrap_or(0));
    }
    let index = read(guest::DS_AREA + bts::INDEX)?;
    for at in (BTS_BUFFER..index).step_by(bts::RECORD) {
        print_branch("BTS", read(at)?, read(at + 8)?);
    }
    Ok(())
}

fn print_branch(source: &str, from: u64, to: u64) {
    // Bits 63:48 of an address in an LBR are flags.
    let [from, to] = [from, to].map(|address| (address & 0xffff_ffff_ffff).wrapping_sub(CODE));
    println!("{source}: guest+{from:#x} -> guest+{to:#x}");
}
