//! The registers of resource monitoring and allocation: what is enumerated, reset values, what is
//! refused, and what is whose.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::insn::{self, cpuid};
use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::rdt::{self, Association, QmEventSelect, counter, event};
use hindsight_guest::{report, smp};

payload!("rdt");

const DONE: Result<(), MsrFault> = Ok(());

fn leaf(leaf: u32, subleaf: u32) -> [u32; 4] {
    let found = cpuid(leaf, subleaf);
    [found.eax, found.ebx, found.ecx, found.edx]
}

macro_rules! need_rdt {
    ($ctx:ident) => {
        if !insn::has(Feature::RDT_M) || !insn::has(Feature::RDT_A) {
            skip!($ctx, "no resource monitoring and allocation");
        }
    };
}

/// Checks that the register refuses each value, and keeps what it holds.
fn refuses(index: u32, values: &[u64]) {
    let before = msr::read_safe(index);
    for &value in values {
        if !check_eq!(msr::write_safe(index, value), Err(GP), "the write") {
            report::measurement("value", value);
        }
        check_eq!(msr::read_safe(index), before, "what the register holds");
    }
}

/// Checks that the register takes each value and gives it back.
fn takes(index: u32, values: impl IntoIterator<Item = u64>) {
    for value in values {
        check_eq!(msr::write_safe(index, value), DONE, "the write");
        check_eq!(
            msr::read_safe(index),
            Ok::<u64, MsrFault>(value),
            "what was written"
        );
    }
}

fn absent(index: u32) {
    check_eq!(msr::read_safe(index), Err(GP), "RDMSR");
    check_eq!(msr::write_safe(index, 1), Err(GP), "WRMSR");
}

case! {
    name: "enumeration", cpl: [0],
    rules: ["RDT-01", "CPU-11", "CPU-12", "CPU-13", "CPU-14", "CPU-16", "CPU-22", "CAT-01", "CAT-09", "CDP-01",
        "CPU-24", "CMT-04", "CMT-07", "OP-28"],
    needs: [],
    about: "leaves 0FH and 10H, and an L3 of as many ways as a mask has bits",
    fn body(ctx) {
        need_rdt!(ctx);
        check_eq!(leaf(0xf, 0), [0, rdt::MAX_RMID, 0, 2], "leaf 0FH");
        check_eq!(leaf(0xf, 1), [0, rdt::UPSCALE, rdt::MAX_RMID, 7], "leaf 0FH.1");
        check_eq!(leaf(0xf, 2), [0; 4], "leaf 0FH.2");
        check_eq!(leaf(0x10, 1), [0xa, 0x600, 4, 0xf], "leaf 10H.1");
        check_eq!(leaf(0x10, 3), [0x59, 0, 4, 7], "leaf 10H.3");
        for subleaf in [4, 5, 64] {
            check_eq!(leaf(0x10, subleaf), [0; 4], "a sub-leaf that is not valid");
        }
        let [_, ebx, ecx, _] = leaf(4, 3);
        let ways = (ebx >> 22) + 1;
        check_eq!(ways, rdt::L3_MASK_BITS, "ways of the L3");
        let bytes = ways * ((ebx & 0xfff) + 1) * (ecx + 1);
        check_eq!(bytes, rdt::UPSCALE * 352, "size of the L3");
    }
}

case! {
    name: "no_l2cat", cpl: [0], rules: ["L2C-01", "OP-27", "CPU-13", "CPU-15", "MSR-29", "MSR-34", "RDT-11"], needs: ["msr-exit"],
    about: "the real processor has no masks for its L2",
    fn body(ctx) {
        need_rdt!(ctx);
        check_eq!(leaf(0x10, 0), [0, 0xa, 0, 0], "what can be allocated");
        check_eq!(leaf(0x10, 2), [0; 4], "leaf 10H.2");
        for index in [reg::IA32_L2_QOS_CFG, 0xd10, 0xd17, 0xd4f] {
            absent(index);
        }
    }
}

case! {
    name: "l2cat", cpl: [0],
    rules: ["L2C-02", "L2C-03", "L2C-04", "L2C-05", "CPU-13", "CPU-15", "MSR-29", "MSR-34"], needs: ["msr-exit", "guestbp-io"],
    cpu: "+l2cat",
    about: "masks for the L2, and its code and data prioritization",
    fn body(ctx) {
        need_rdt!(ctx);
        if leaf(0x10, 0)[1] & 1 << 2 == 0 {
            skip!(ctx, "no masks for the L2");
        }
        check_eq!(leaf(0x10, 2), [7, 0, 4, 7], "leaf 10H.2");
        for n in 0..rdt::L2_COS {
            let index = reg::IA32_L2_QOS_MASK_0 + n;
            check_eq!(msr::read(index), 0xff, "RESET value");
            takes(index, [1, 0x80, 0x3c, 0xff]);
            refuses(index, &[0, 0x5, 0x100, 0x1ff, 1 << 63]);
        }
        absent(reg::IA32_L2_QOS_MASK_0 + rdt::L2_COS);
        check_eq!(msr::read(reg::IA32_L2_QOS_CFG), 0, "RESET value of the configuration");
        refuses(reg::IA32_L2_QOS_CFG, &[2, 3, 1 << 63]);
        takes(reg::IA32_L2_QOS_CFG, [1]);
        check_eq!(msr::read(reg::IA32_L3_QOS_CFG), 0, "that of the L3 is another switch");
        takes(reg::IA32_L2_QOS_CFG, [0]);
    }
}

case! {
    name: "reset_values", cpl: [0],
    rules: ["RDT-07", "CMT-01", "CMT-09", "CAT-03", "CDP-01", "MBA-01", "MSR-28", "MSR-30", "MSR-31", "MSR-32",
        "MSR-33", "MSR-35"],
    needs: ["msr-exit"],
    about: "the values after RESET; without an event the counter says Error",
    fn body(ctx) {
        need_rdt!(ctx);
        for index in [reg::IA32_PQR_ASSOC, reg::IA32_QM_EVTSEL, reg::IA32_L3_QOS_CFG] {
            check_eq!(msr::read(index), 0, "the register");
        }
        check_eq!(msr::read(reg::IA32_QM_CTR), counter::ERROR, "the counter");
        for n in 0..rdt::L3_COS {
            check_eq!(msr::read(reg::IA32_L3_QOS_MASK_0 + n), 0x7ff, "a mask");
        }
        for n in 0..rdt::MBA_COS {
            check_eq!(msr::read(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + n), 0, "a delay value");
        }
    }
}

case! {
    name: "association", cpl: [0], rules: ["RDT-02", "RDT-05", "RDT-06", "RDT-07", "CDP-07", "MSR-32"], needs: ["msr-exit"],
    about: "IA32_PQR_ASSOC takes the RMIDs and classes that are enumerated, and no other",
    fn body(ctx) {
        need_rdt!(ctx);
        let at = |rmid, cos| Association::new(rmid, cos).0;
        takes(reg::IA32_PQR_ASSOC, [at(1, 0), at(rdt::MAX_RMID, 15), at(0, 7)]);
        refuses(reg::IA32_PQR_ASSOC, &[at(rdt::MAX_RMID + 1, 0), at(1023, 0), at(0, 16), 1 << 63, 1 << 10, 1 << 31]);
        takes(reg::IA32_L3_QOS_CFG, [1]);
        takes(reg::IA32_PQR_ASSOC, [at(2, 8), at(2, 15)]);
        takes(reg::IA32_L3_QOS_CFG, [0]);
        takes(reg::IA32_PQR_ASSOC, [0]);
    }
}

case! {
    name: "event_selection", cpl: [0],
    rules: ["RDT-02", "CMT-01", "CMT-02", "CMT-03", "CMT-06", "CMT-09", "MBM-04", "MSR-30", "MSR-31"], needs: ["msr-exit"],
    about: "IA32_QM_EVTSEL takes any event; the counter says Error for those that do not exist",
    fn body(ctx) {
        need_rdt!(ctx);
        let select = |event, rmid| QmEventSelect::new(event, rmid).0;
        refuses(reg::IA32_QM_EVTSEL, &[select(1, rdt::MAX_RMID + 1), 1 << 8, 1 << 31, 1 << 42, 1 << 63]);
        for event in [0, 4, 0x80, 0xff] {
            takes(reg::IA32_QM_EVTSEL, [select(event, 0)]);
            check!(msr::read(reg::IA32_QM_CTR) & counter::ERROR != 0, "Error for an event that does not exist");
        }
        for event in [event::OCCUPANCY, event::TOTAL, event::LOCAL] {
            takes(reg::IA32_QM_EVTSEL, [select(event, 0), select(event, rdt::MAX_RMID)]);
            check!(msr::read(reg::IA32_QM_CTR) & counter::ERROR == 0, "no Error");
        }
        refuses(reg::IA32_QM_CTR, &[0, 1]);
        takes(reg::IA32_QM_EVTSEL, [0]);
    }
}

case! {
    name: "masks", cpl: [0],
    rules: ["RDT-02", "CAT-02", "CAT-04", "CAT-05", "CAT-06", "CAT-07", "CAT-08", "CAT-09", "CAT-13", "MSR-33", "RDT-11"],
    needs: ["msr-exit"],
    about: "capacity masks are single runs of ones within the length; there are 16",
    fn body(ctx) {
        need_rdt!(ctx);
        for n in 0..rdt::L3_COS {
            let index = reg::IA32_L3_QOS_MASK_0 + n;
            takes(index, [1, 0x400, 0x600, 0x3c, 0x7ff]);
            refuses(index, &[0, 0x505, 0b1011, 0x800, 0xfff, 1 << 63, u64::MAX]);
        }
        absent(reg::IA32_L3_QOS_MASK_0 + rdt::L3_COS);
    }
}

case! {
    name: "every_mask", cpl: [0], rules: ["CAT-04", "CAT-05"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "all values of twelve bits, against the decision function",
    fn body(ctx) {
        need_rdt!(ctx);
        for value in 0_u64..0x1000 {
            let run = value >> value.trailing_zeros().min(63);
            let good = value != 0 && value < 0x800 && run & (run + 1) == 0;
            let answer = msr::write_safe(reg::IA32_L3_QOS_MASK_0, value);
            if !check_eq!(answer.is_ok(), good, "whether the mask is taken") {
                report::measurement("mask", value);
            }
        }
        takes(reg::IA32_L3_QOS_MASK_0, [0x7ff]);
    }
}

case! {
    name: "code_and_data", cpl: [0], rules: ["CDP-02", "CDP-04", "CDP-05", "CDP-06", "CDP-09", "OP-22", "MSR-28"], needs: ["msr-exit"],
    about: "CDP is switched on and off; the masks keep their values, and CPUID does not change",
    fn body(ctx) {
        need_rdt!(ctx);
        refuses(reg::IA32_L3_QOS_CFG, &[2, 3, 1 << 32, 1 << 63]);
        let before = leaf(0x10, 1);
        takes(reg::IA32_L3_QOS_MASK_0 + 3, [0x70]);
        takes(reg::IA32_L3_QOS_CFG, [1]);
        check_eq!(msr::read(reg::IA32_L3_QOS_MASK_0 + 3), 0x70, "the mask with CDP");
        check_eq!(leaf(0x10, 1), before, "leaf 10H.1");
        refuses(reg::IA32_L3_QOS_MASK_0 + 3, &[0, 0x505, 0x800]);
        takes(reg::IA32_L3_QOS_CFG, [0]);
        check_eq!(msr::read(reg::IA32_L3_QOS_MASK_0 + 3), 0x70, "the mask without CDP");
        takes(reg::IA32_L3_QOS_MASK_0 + 3, [0x7ff]);
    }
}

case! {
    name: "delay_values", cpl: [0],
    rules: ["RDT-02", "MBA-01", "MBA-02", "MBA-03", "MBA-04", "MBA-06", "OP-21", "MSR-35", "RDT-11"], needs: ["msr-exit"],
    about: "delay values up to 90 are kept as written; there are 8",
    fn body(ctx) {
        need_rdt!(ctx);
        for n in 0..rdt::MBA_COS {
            let index = reg::IA32_L2_QOS_EXT_BW_THRTL_0 + n;
            takes(index, [10, 90, 12, 0]);
            refuses(index, &[91, 100, 0xffff, 0x1_0000, 1 << 63]);
        }
        absent(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + rdt::MBA_COS);
    }
}

case! {
    name: "users", cpl: [3], rules: ["RDT-02"], needs: ["exceptions", "iretq-cpl3"],
    about: "RDMSR and WRMSR at CPL 3 raise #GP(0)",
    fn body(ctx) {
        need_rdt!(ctx);
        for index in [reg::IA32_PQR_ASSOC, reg::IA32_QM_CTR, reg::IA32_L3_QOS_MASK_0] {
            let fault = ctx.run(|| { msr::read(index); });
            check_eq!(fault.map(|e| e.code()), Some(GP), "RDMSR");
            let fault = ctx.run(|| msr::write(index, 0x7ff));
            check_eq!(fault.map(|e| e.code()), Some(GP), "WRMSR");
        }
    }
}

static FOUND: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// Two MSRs that all processors of the package share, and two that each processor has.
const WATCHED: [u32; 4] = [
    reg::IA32_L3_QOS_MASK_0 + 5,
    reg::IA32_L2_QOS_EXT_BW_THRTL_0 + 2,
    reg::IA32_PQR_ASSOC,
    reg::IA32_QM_EVTSEL,
];

fn report(_index: usize) {
    for (index, found) in WATCHED.iter().zip(&FOUND) {
        found.store(msr::read(*index), Ordering::Release);
    }
}

/// Returns the values of [`WATCHED`] as the second processor reads them.
fn other() -> [u64; 4] {
    smp::run(1, report);
    smp::wait(1);
    [0, 1, 2, 3].map(|n: usize| FOUND[n].load(Ordering::Acquire))
}

case! {
    name: "scope", cpl: [0], rules: ["RDT-03", "RDT-04", "CDP-08", "CMT-10", "OP-23"], needs: ["msr-exit"], vcpus: 2, timeout_ms: 5000,
    about: "masks, delays and CDP are the package's; association and event selection the processor's",
    fn body(ctx) {
        need_rdt!(ctx);
        require!(smp::start(2), "the second CPU started");
        for (index, value) in WATCHED.into_iter().zip([0x70, 30, 5, 1]) {
            takes(index, [value]);
        }
        check_eq!(other(), [0x70, 30, 0, 0], "what the other processor has");
        smp::run(1, |_| msr::write(reg::IA32_L3_QOS_CFG, 1));
        smp::wait(1);
        check_eq!(msr::read(reg::IA32_L3_QOS_CFG), 1, "CDP that the other switched on");
        takes(reg::IA32_L3_QOS_CFG, [0]);
        for (index, value) in WATCHED.into_iter().zip([0x7ff, 0, 0, 0]) {
            takes(index, [value]);
        }
    }
}

case! {
    name: "init_keeps", cpl: [0], rules: ["RDT-08", "RST-12", "CAT-03", "MBA-01"], needs: ["msr-exit"], vcpus: 2, timeout_ms: 5000,
    about: "INIT leaves all registers as they are",
    fn body(ctx) {
        need_rdt!(ctx);
        require!(smp::start(2), "the second CPU started");
        smp::run(1, |_| {
            for (index, value) in WATCHED.into_iter().zip([0x3e0, 40, 0x2_0000_0007, 0x7_0000_0002]) {
                msr::write(index, value);
            }
        });
        smp::wait(1);
        require!(smp::restart(1), "the second CPU started again");
        check_eq!(other(), [0x3e0, 40, 0x2_0000_0007, 0x7_0000_0002], "after INIT");
        smp::run(1, |_| {
            for (index, value) in WATCHED.into_iter().zip([0x7ff, 0, 0, 0]) {
                msr::write(index, value);
            }
        });
        smp::wait(1);
    }
}

case! {
    name: "l2_scope", cpl: [0], rules: ["L2C-06", "OP-27"], needs: ["msr-exit", "guestbp-io"], vcpus: 2,
    cpu: "+l2cat", timeout_ms: 5000,
    about: "L2 masks and the switch of their CDP are each processor's own",
    fn body(ctx) {
        need_rdt!(ctx);
        if leaf(0x10, 0)[1] & 1 << 2 == 0 {
            skip!(ctx, "no masks for the L2");
        }
        require!(smp::start(2), "the second CPU started");
        takes(reg::IA32_L2_QOS_MASK_0 + 3, [0x0f]);
        takes(reg::IA32_L2_QOS_CFG, [1]);
        smp::run(1, |_| {
            FOUND[0].store(msr::read(reg::IA32_L2_QOS_MASK_0 + 3), Ordering::Release);
            FOUND[1].store(msr::read(reg::IA32_L2_QOS_CFG), Ordering::Release);
            msr::write(reg::IA32_L2_QOS_MASK_0 + 3, 0xf0);
        });
        smp::wait(1);
        check_eq!(FOUND[0].load(Ordering::Acquire), 0xff, "the other processor's mask");
        check_eq!(FOUND[1].load(Ordering::Acquire), 0, "the other processor's switch");
        check_eq!(msr::read(reg::IA32_L2_QOS_MASK_0 + 3), 0x0f, "the first one's mask");
    }
}
