use std::sync::Arc;

use hindsight_cpu::armed::Armed;
use hindsight_cpu::cpuid::CpuModel;
use hindsight_cpu::facility::Facilities;
use hindsight_cpu::msr::MsrConfig;
use hindsight_cpu::state::CpuState;
use hindsight_regs::branch::DebugCtl;
use hindsight_regs::{msr, pmu};

use super::{InterruptController, ModelPlatform, NoDevices, NoInterrupts};
use crate::platform::{GpFault, InterruptSource, MsrHandler, Pending};
use crate::{Exit, Memory, Vcpu};

const CODE: u64 = 0x1000;

fn platform<I: InterruptController>(interrupts: I) -> ModelPlatform<NoDevices, I> {
    let config = MsrConfig::new(Facilities::INTERP_DEFAULT, 1_000_000_000).with_uarch(true);
    ModelPlatform::new(CpuModel::default(), config, NoDevices, interrupts)
}

/// A processor in real mode at [`CODE`], which holds these bytes.
fn vcpu(code: &[u8]) -> Vcpu {
    let memory = Memory::allocate(&[(0, 0x4000)]).unwrap();
    assert!(memory.write(CODE, code));
    let mut vcpu = Vcpu::new(Arc::new(memory));
    let mut state = CpuState::reset();
    state.start_up(u8::try_from(CODE >> 12).unwrap());
    vcpu.load(&state);
    vcpu
}

/// MOV CX, 10; LOOP to itself; HLT.
const LOOP: [u8; 6] = [0xb9, 10, 0, 0xe2, 0xfe, 0xf4];

#[test]
fn fixed_counters_count_instructions_and_cycles() {
    let mut platform = platform(NoInterrupts::default());
    let on = |platform: &mut ModelPlatform<_, _>| {
        platform.wrmsr(msr::IA32_FIXED_CTR_CTRL, 0x33)?;
        platform.wrmsr(msr::IA32_PERF_GLOBAL_CTRL, 0b11 << 32)
    };
    on(&mut platform).unwrap();
    assert_eq!(platform.armed(), Armed::PMU);
    assert_eq!(vcpu(&LOOP).run(&mut platform, 1000), Exit::Halted);
    assert_eq!(platform.rdmsr(msr::IA32_FIXED_CTR0), Ok(12));
    assert_eq!(platform.rdmsr(msr::IA32_FIXED_CTR0 + 1), Ok(12));
    assert_eq!((platform.ticks(), platform.tsc()), (12, 12));
    platform.advance_halted(100);
    assert_eq!(platform.tsc(), 112);
    assert_eq!(platform.rdmsr(msr::IA32_FIXED_CTR0 + 1), Ok(12));
}

#[test]
fn lbr_stack_holds_taken_branches() {
    let mut platform = platform(NoInterrupts::default());
    let lbr = DebugCtl::LBR.bits();
    assert_eq!(platform.wrmsr(msr::IA32_DEBUGCTL, lbr), Ok(()));
    assert_eq!(vcpu(&LOOP).run(&mut platform, 1000), Exit::Halted);
    // The tenth LOOP falls through.
    assert_eq!(platform.rdmsr(msr::MSR_LASTBRANCH_TOS), Ok(9));
    let from = platform.rdmsr(msr::MSR_LASTBRANCH_0_FROM_IP + 9);
    assert_eq!(from.map(|from| from & 0xffff), Ok(3));
}

/// Counts the requests of performance-monitoring interrupts.
#[derive(Debug, Default)]
struct CountPmis(u32);

impl InterruptController for CountPmis {
    fn pending(&mut self) -> Pending {
        Pending {
            smi: true,
            ..Pending::default()
        }
    }
    fn acknowledge(&mut self) -> Option<u8> {
        None
    }
    fn acknowledge_nmi(&mut self) {}
    fn nmis_unblocked(&mut self) {}
    fn acknowledge_smi(&mut self) {}
    fn request_pmi(&mut self) {
        self.0 += 1;
    }
    fn cr8(&mut self) -> u8 {
        0
    }
    fn set_cr8(&mut self, _: u8) {}
    fn rdmsr(&mut self, index: u32) -> Result<u64, GpFault> {
        Ok(index.into())
    }
    fn wrmsr(&mut self, _: u32, _: u64) -> Result<(), GpFault> {
        Err(GpFault)
    }
    fn advance(&mut self, _: u64, _: u64) {}
}

#[test]
fn overflow_requests_one_pmi() {
    let mut platform = platform(CountPmis::default());
    let overflow_after_5 = pmu::COUNTER_MASK - 4;
    for (index, value) in [
        (msr::IA32_FIXED_CTR0, overflow_after_5),
        (msr::IA32_FIXED_CTR_CTRL, 0xb),
        (msr::IA32_PERF_GLOBAL_CTRL, 1 << 32),
    ] {
        assert_eq!(platform.wrmsr(index, value), Ok(()), "{index:#x}");
    }
    assert_eq!(vcpu(&LOOP).run(&mut platform, 1000), Exit::Halted);
    assert_eq!(platform.interrupts.0, 1);
    assert_eq!(platform.rdmsr(msr::IA32_PERF_GLOBAL_STATUS), Ok(1 << 32));
}

#[test]
fn apic_msrs_reach_the_interrupt_controller() {
    let mut platform = platform(CountPmis::default());
    let apic_base = msr::IA32_APIC_BASE;
    assert_eq!(platform.rdmsr(apic_base), Ok(apic_base.into()));
    assert_eq!(platform.wrmsr(apic_base, 0), Err(GpFault));
    assert_eq!(platform.rdmsr(0x1b0), Err(GpFault));
}

#[test]
fn msrs_of_speculation_exist_as_cpuid_shows_them() {
    let mut platform = platform(NoInterrupts::default());
    let [.., edx] = platform.cpuid(7, 0);
    let expected = if edx & 1 << 26 != 0 {
        Ok(0)
    } else {
        Err(GpFault)
    };
    assert_eq!(platform.rdmsr(msr::IA32_SPEC_CTRL), expected);
}

#[test]
fn smi_stays_hidden_without_the_facility() {
    assert!(!platform(CountPmis::default()).pending().smi);
}
