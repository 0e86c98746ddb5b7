//! RDPMC.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::msr as reg;
use hindsight_payloads::need_pmu;
use hindsight_payloads::pmu::{self, ON};

payload!("rdpmc");

/// RDPMC: EDX:EAX, and bits 63:32 of RAX and RDX.
fn rdpmc(index: u32) -> (u64, u64) {
    let (low, high): (u64, u64);
    // SAFETY: registers only.
    unsafe {
        asm!("rdpmc", in("ecx") index, inout("rax") u64::MAX => low, inout("rdx") u64::MAX => high,
            options(nomem, nostack));
    }
    (high << 32 | low & 0xffff_ffff, (high | low) >> 32)
}

fn set_pce(on: bool) {
    let cr4 = insn::read_cr4() & !Cr4::PCE.bits();
    insn::write_cr4(if on { cr4 | Cr4::PCE.bits() } else { cr4 });
}

case! {
    name: "counters", cpl: [0, 3], rules: ["RDP-01", "RDP-02", "RDP-08"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "RDPMC gives what RDMSR gives of a stopped counter, zero-extended",
    fn body(ctx) {
        need_pmu!(ctx);
        set_pce(true);
        for (index, counter) in [0, 1, 2, 3, 0x4000_0000, 0x4000_0001, 0x4000_0002].into_iter().zip([
            0x4c1, 0x4c2, 0x4c3, 0x4c4, 0x309, 0x30a, 0x30b]) {
            for value in [0xffff_ffff_ffff, 0x8765_4321_0fed, 0, u64::from(index) + 1] {
                msr::write(counter, value & pmu::MAX);
                let mut found = (0, 0);
                let fault = ctx.run(|| found = rdpmc(index));
                check!(fault.is_none(), "no exception");
                check_eq!(found, (value & pmu::MAX, 0), "the counter");
                check_eq!(found.0, msr::read(counter), "as RDMSR");
            }
        }
        set_pce(false);
        pmu::reset();
    }
}

case! {
    name: "bad_index", cpl: [0, 3], rules: ["RDP-03", "RDP-07"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "any other index raises #GP(0) at every level",
    fn body(ctx) {
        need_pmu!(ctx);
        set_pce(true);
        for index in [4, 8, 0xff, 0x4000_0003, 0x4000_0004, 0x8000_0000, 0x2000_0000, 0xc000_0000, u32::MAX] {
            let fault = ctx.run(|| { rdpmc(index); });
            check_eq!(fault.map(|e| e.code()), Some(GP), "RDPMC");
        }
        set_pce(false);
    }
}

case! {
    name: "privilege", cpl: [0, 3], rules: ["RDP-04"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "without CR4.PCE only CPL 0 may read",
    fn body(ctx) {
        need_pmu!(ctx);
        for pce in [false, true, false] {
            set_pce(pce);
            let fault = ctx.run(|| { rdpmc(0); });
            let expected = if pce || ctx.cpl == 0 { None } else { Some(GP) };
            check_eq!(fault.map(|e| e.code()), expected, "RDPMC");
        }
    }
}

case! {
    name: "running", cpl: [0, 3], rules: ["RDP-06", "EVT-01"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "between two readings a counter of instructions moves by the instructions between them",
    fn body(ctx) {
        need_pmu!(ctx);
        set_pce(true);
        pmu::select(0, 0xc0, 0, ON);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b11);
        for index in [0, 0x4000_0000_u32] {
            pmu::start(1 | 1 << 32);
            let (mut first, mut second) = (0_u64, 0_u64);
            let fault = ctx.run(|| {
                let (low, later): (u64, u64);
                // SAFETY: registers only.
                unsafe {
                    asm!("rdpmc", "mov r8, rax", ".rept 40", "nop", ".endr", "rdpmc",
                        in("ecx") index, out("rax") later, out("rdx") _, out("r8") low,
                        options(nomem, nostack));
                }
                (first, second) = (low, later);
            });
            pmu::stop();
            check!(fault.is_none(), "no exception");
            // The first RDPMC, the MOV and the NOPs.
            check_eq!(second - first, 42, "instructions");
        }
        set_pce(false);
        pmu::reset();
    }
}
