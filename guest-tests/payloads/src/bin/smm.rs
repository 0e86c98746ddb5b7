//! System-management mode: SMIs from the APM port, an interprocessor interrupt and an LVT entry; what
//! they save, what RSM restores, and what freezes.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

use hindsight_guest::msr;
use hindsight_guest::port;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, ICR_ASSERT, ICR_SMI};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::pebs::record;
use hindsight_guest::{apic, insn, report};
use hindsight_payloads::branch::{BTS, TR};
use hindsight_payloads::ds::DsPages;
use hindsight_payloads::pmu::{self, PebsArea};
use hindsight_payloads::{need_bts, need_pebs};

payload!("smm");

/// SMBASE after RESET.
const BASE: u64 = 0x3_0000;
/// The APM control port.
const APM: u16 = 0xb2;
/// DEBUGCTL.FREEZE_WHILE_SMM, and LBR.
const FREEZE: u64 = 1 << 14;
const LBR: u64 = 1;

// The handler in 16-bit code, as an SMI enters it: counts itself, keeps what it finds, and runs a loop
// of a hundred branches.
global_asm!(
    ".code16",
    ".global smm_handler",
    "smm_handler:",
    "mov ax, cs",
    "mov ds, ax",
    "inc dword ptr [0x7000]",
    "mov eax, dr7",
    "mov [0x7004], eax",
    "mov ecx, 0x1d9",
    "rdmsr",
    "mov [0x7008], eax",
    "mov ecx, 0x38f",
    "rdmsr",
    "mov [0x700c], eax",
    "mov ecx, 0xc8f",
    "rdmsr",
    "mov [0x7010], eax",
    "mov [0x7014], edx",
    "mov cx, 100",
    "2:",
    "dec cx",
    "jnz 2b",
    "rsm",
    ".global smm_handler_end",
    "smm_handler_end:",
    ".code64",
);

unsafe extern "C" {
    fn smm_handler();
    fn smm_handler_end();
}

/// A doubleword that the handler keeps, at an offset from SMBASE.
fn handler_value(offset: u64) -> u32 {
    // SAFETY: low memory is mapped one to one, and nothing but the handler uses this page.
    unsafe { ((BASE + offset) as *const u32).read_volatile() }
}

fn put(offset: u64, value: u32) {
    // SAFETY: as in `handler_value`.
    unsafe { ((BASE + offset) as *mut u32).write_volatile(value) }
}

fn count() -> u32 {
    handler_value(0x7000)
}

fn install() {
    let from = smm_handler as *const () as usize as *const u8;
    let len = smm_handler_end as *const () as usize - smm_handler as *const () as usize;
    // SAFETY: the handler's bytes, and the place where an SMI enters it.
    unsafe { core::ptr::copy_nonoverlapping(from, (BASE + 0x8000) as *mut u8, len) };
    for offset in [0x7000, 0x7004, 0x7008, 0x700c, 0x7010, 0x7014] {
        put(offset, 0);
    }
}

macro_rules! need_smm {
    ($ctx:ident) => {
        if insn::is_qemu_tcg() || insn::cpuid(0x4000_0000, 0).ebx != u32::from_le_bytes(*b"Hind") {
            skip!($ctx, "firmware owns system-management mode");
        }
    };
}

fn smi() {
    port::outb(APM, 1);
}

case! {
    name: "apm_port", cpl: [0], rules: ["SMF-09", "MSR-44", "RST-03", "RST-04", "RST-05"], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "a write to port B2H runs the handler; RSM takes everything back",
    fn body(ctx) {
        need_smm!(ctx);
        install();
        let before = (msr::read(reg::MSR_SMI_COUNT), insn::rflags(), insn::read_cr4(), insn::read_cr3());
        insn::write_dr(0, 0x1234_5678);
        insn::write_dr7(0x402);
        let mut marker = 0x1122_3344_5566_7788_u64;
        // SAFETY: only the port is written.
        unsafe { asm!("out 0xb2, al", inout("rcx") marker, in("al") 1_u8, options(nostack)) };
        check_eq!(marker, 0x1122_3344_5566_7788, "a register that the handler changed");
        check_eq!(count(), 1, "how often the handler ran");
        check_eq!(u64::from(handler_value(0x7004)), 0x400, "DR7 in the handler");
        check_eq!(insn::read_dr7(), 0x402, "DR7 afterwards");
        insn::write_dr7(0x400);
        let after = (msr::read(reg::MSR_SMI_COUNT), insn::rflags(), insn::read_cr4(), insn::read_cr3());
        check_eq!(after.0, before.0 + 1, "MSR_SMI_COUNT");
        let restored = [after.1 & 0x200, after.2, after.3];
        check_eq!(restored, [before.1 & 0x200, before.2, before.3], "what RSM restored");
    }
}

case! {
    name: "freeze", cpl: [0], rules: ["SMF-01", "SMF-02", "SMF-03", "SMF-04", "SMF-05", "SMF-06", "OP-18", "LBR-37"], needs: ["smi", "guestbp-io"],
    cpu: "+smm",
    about: "with FREEZE_WHILE_SMM neither counters nor the LBR stack see the handler",
    fn body(ctx) {
        need_smm!(ctx);
        install();
        check!(msr::read(reg::IA32_PERF_CAPABILITIES) & 1 << 12 != 0, "the capability");
        msr::write(reg::IA32_FIXED_CTR0, 0);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 3);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0x1_0000_000f);
        msr::write(reg::IA32_DEBUGCTL, FREEZE | LBR);
        smi();
        let counted = msr::read(reg::IA32_FIXED_CTR0);
        let debugctl = msr::read(reg::IA32_DEBUGCTL);
        let global = msr::read(reg::IA32_PERF_GLOBAL_CTRL);
        msr::write(reg::IA32_DEBUGCTL, 0);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0xf);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0);
        check_eq!(count(), 1, "how often the handler ran");
        check!(counted < 100, "the handler's instructions do not count");
        check_eq!(u64::from(handler_value(0x7008)), FREEZE, "IA32_DEBUGCTL in the handler");
        check_eq!(handler_value(0x700c), 0, "IA32_PERF_GLOBAL_CTRL in the handler");
        check_eq!([debugctl, global], [FREEZE | LBR, 0x1_0000_000f], "what RSM restored");
        for n in 0..32 {
            let from = msr::read(reg::MSR_LASTBRANCH_0_FROM_IP + n);
            check!(!(0x8000..0x9000).contains(&from), "no branch of the handler");
        }
    }
}

case! {
    name: "no_freeze", cpl: [0], rules: ["SMF-07"], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "without the bit the handler's instructions count, and its branches are recorded",
    fn body(ctx) {
        need_smm!(ctx);
        install();
        msr::write(reg::IA32_FIXED_CTR0, 0);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 3);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0x1_0000_000f);
        msr::write(reg::IA32_DEBUGCTL, LBR);
        smi();
        msr::write(reg::IA32_DEBUGCTL, 0);
        let counted = msr::read(reg::IA32_FIXED_CTR0);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0xf);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0);
        check_eq!(count(), 1, "how often the handler ran");
        check!(counted >= 200, "the handler's instructions count");
        let seen = (0..32).any(|n| (0x8000..0x9000).contains(&msr::read(reg::MSR_LASTBRANCH_0_FROM_IP + n)));
        check!(seen, "branches of the handler");
    }
}

case! {
    name: "save_area", cpl: [0], rules: ["SMF-09"], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "the save area holds SMBASE and the revision",
    fn body(ctx) {
        need_smm!(ctx);
        install();
        smi();
        check_eq!(count(), 1, "the first SMI");
        check_eq!(handler_value(0xfef8), 0x3_0000, "SMBASE in the save area");
        check_eq!(handler_value(0xfefc) & 1 << 17, 1 << 17, "the revision: the base can be moved");
    }
}

case! {
    name: "by_lvt", cpl: [0], rules: ["OVF-09"], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "an overflow with delivery mode SMI in the LVT entry runs the handler",
    fn body(ctx) {
        need_smm!(ctx);
        install();
        apic::enable();
        apic::write(ApicRegister::LVT_PMC, 0x200);
        msr::write(reg::IA32_FIXED_CTR0, (1 << 48) - 50);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0xb);
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0x1_0000_000f);
        for _ in 0..100 {
            core::hint::spin_loop();
        }
        msr::write(reg::IA32_PERF_GLOBAL_CTRL, 0xf);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0);
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 32);
        apic::write(ApicRegister::LVT_PMC, 0x1_0000);
        apic::disable();
        check_eq!(count(), 1, "how often the handler ran");
    }
}

case! {
    name: "by_ipi", cpl: [0], rules: [], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "an interprocessor interrupt with delivery mode SMI runs the handler",
    fn body(ctx) {
        need_smm!(ctx);
        install();
        apic::enable();
        apic::send(0, ICR_SMI | ICR_ASSERT);
        for _ in 0..100 {
            core::hint::spin_loop();
        }
        apic::disable();
        check_eq!(count(), 1, "how often the handler ran");
    }
}

static STORE: DsPages = DsPages::new();

/// Whether a linear address, or an offset in the handler's code segment, is the handler's.
fn is_handlers(address: u64) -> bool {
    (0x8000..0x9000).contains(&(address & !BASE))
}

case! {
    name: "bts_is_off", cpl: [0], rules: ["SMF-08", "DS-12"], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "the branch trace store takes no branch of the handler, with or without FREEZE_WHILE_SMM",
    fn body(ctx) {
        need_smm!(ctx);
        need_bts!(ctx);
        for freeze in [0, FREEZE] {
            install();
            STORE.arm(150);
            msr::write(reg::IA32_DEBUGCTL, TR | BTS | freeze);
            smi();
            core::hint::black_box(insn::rflags as fn() -> u64)();
            let debugctl = msr::read(reg::IA32_DEBUGCTL);
            msr::write(reg::IA32_DEBUGCTL, 0);
            check_eq!(count(), 1, "how often the handler ran");
            check_eq!(debugctl, TR | BTS | freeze, "what RSM restored");
            let records = STORE.records();
            check!(!records.items().is_empty(), "branches round the handler are stored");
            let area = STORE.area();
            for at in (area.base..area.index).step_by(24) {
                let record = STORE.record(at);
                check!(!is_handlers(record.from) && !is_handlers(record.to), "no branch of the handler");
            }
        }
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "pebs_is_off", cpl: [0], rules: ["PEBS-25", "SMF-08"], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "a counter that overflows in the handler takes no sample there",
    fn body(ctx) {
        need_smm!(ctx);
        need_pebs!(ctx);
        // Well into the handler's loop, and once more as often as the loop has instructions.
        let ds = PebsArea::new(16, 16, [20_u64.wrapping_neg(); 4]);
        install();
        pmu::preset(0, 60);
        pmu::select(0, 0xc0, 0, pmu::ON);
        msr::write(reg::IA32_PEBS_ENABLE, 1);
        pmu::start(1);
        smi();
        for _ in 0..20 {
            core::hint::spin_loop();
        }
        pmu::stop();
        msr::write(reg::IA32_PEBS_ENABLE, 0);
        check_eq!(count(), 1, "how often the handler ran");
        let records = usize::try_from(ds.count()).unwrap_or(0);
        check!(records != 0, "samples after the handler");
        for n in 0..records.min(pmu::RECORDS) {
            let eventing = ds.record(n, record::EVENTING_RIP);
            if !check!(!is_handlers(eventing), "no sample of the handler") {
                report::measurement("eventing", eventing);
            }
        }
        pmu::reset();
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "resource_control", cpl: [0], rules: ["RDT-08"], needs: ["smi", "guestbp-io"], cpu: "+smm",
    about: "the handler has the association of the time, and RSM changes no register of these",
    fn body(ctx) {
        need_smm!(ctx);
        install();
        let values = [
            (reg::IA32_PQR_ASSOC, 0x2_0000_0007),
            (reg::IA32_QM_EVTSEL, 0x7_0000_0002),
            (reg::IA32_L3_QOS_MASK_0 + 2, 0x3c),
            (reg::IA32_L2_QOS_EXT_BW_THRTL_0 + 2, 40),
        ];
        for (index, value) in values {
            msr::write(index, value);
        }
        smi();
        check_eq!(count(), 1, "how often the handler ran");
        check_eq!([handler_value(0x7010), handler_value(0x7014)], [7, 2], "the association in the handler");
        for (index, value) in values {
            check_eq!(msr::read(index), value, "a register after RSM");
        }
        for (index, value) in [(0, 0), (1, 0), (2, 0x7ff), (3, 0)].map(|(n, value)| (values[n].0, value)) {
            msr::write(index, value);
        }
    }
}

case! {
    name: "rsm_outside", cpl: [0, 3], rules: [], needs: ["exceptions", "guestbp-io"], cpu: "+smm",
    about: "RSM outside of system-management mode raises #UD",
    fn body(ctx) {
        need_smm!(ctx);
        // SAFETY: the instruction faults.
        let fault = ctx.run(|| unsafe { asm!("rsm") });
        check_eq!(fault.map(|e| e.vector), Some(6), "the exception");
    }
}

case! {
    name: "absent", cpl: [0], rules: ["SMF-10", "MSR-44"], needs: ["msr-exit"],
    about: "without system-management mode the port does nothing, and the bit is stored",
    fn body(ctx) {
        need_smm!(ctx);
        let before = msr::read(reg::MSR_SMI_COUNT);
        smi();
        check_eq!(msr::read(reg::MSR_SMI_COUNT), before, "MSR_SMI_COUNT");
        if msr::write_safe(reg::IA32_DEBUGCTL, FREEZE).is_ok() {
            check_eq!(msr::read(reg::IA32_DEBUGCTL), FREEZE, "the bit");
            msr::write(reg::IA32_DEBUGCTL, 0);
        }
    }
}
