//! What resource monitoring and allocation mean: occupancy and traffic of a program that streams through
//! memory, and the masks that keep it in its ways.

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::rdt::{self, Association, EventSelect, counter, event};

payload!("rdt_cache");

/// Memory that nothing else uses: 6 MiB from 32 MiB on.
const PLACE: usize = 32 << 20;
const BYTES: usize = 6 << 20;
/// Units of one way of the L3, and one that is begun.
const WAY: u64 = 352 / 11 + 1;

/// Reads one byte of each line.
fn stream() {
    for at in (PLACE..PLACE + BYTES).step_by(64) {
        // SAFETY: RAM that is mapped one to one and that nothing else uses.
        unsafe { (at as *const u8).read_volatile() };
    }
}

fn monitor(event: u8, rmid: u32) -> u64 {
    msr::write(reg::IA32_QM_EVTSEL, EventSelect::new(event, rmid).0);
    msr::read(reg::IA32_QM_CTR)
}

fn associate(rmid: u32, cos: u32) {
    msr::write(reg::IA32_PQR_ASSOC, Association::new(rmid, cos).0);
}

macro_rules! need_rdt {
    ($ctx:ident) => {
        if !insn::has(Feature::RDT_M) || !insn::has(Feature::RDT_A) {
            skip!($ctx, "no resource monitoring and allocation");
        }
    };
}

case! {
    name: "cold", cpl: [0], rules: ["CMT-05", "CMT-12", "CAT-12"], needs: ["msr-exit"],
    about: "before any association the counters say Unavailable",
    fn body(ctx) {
        need_rdt!(ctx);
        for event in [event::OCCUPANCY, event::TOTAL, event::LOCAL] {
            check_eq!(monitor(event, 1), counter::UNAVAILABLE, "the counter");
        }
    }
}

case! {
    name: "streaming", cpl: [0],
    rules: ["CMT-07", "CMT-08", "CMT-11", "CMT-14", "MBM-02", "MBM-04", "MBM-05", "MBM-06", "RDT-03"],
    needs: ["msr-exit"], timeout_ms: 60000,
    about: "lines and traffic are charged to the RMID of the time, and stay its own",
    fn body(ctx) {
        need_rdt!(ctx);
        associate(5, 0);
        stream();
        associate(6, 0);
        let units = BYTES as u64 / u64::from(rdt::UPSCALE);
        let held = monitor(event::OCCUPANCY, 5);
        check!(held >= units && held <= units + 8, "what was read is held");
        let (total, local) = (monitor(event::TOTAL, 5), monitor(event::LOCAL, 5));
        check!(total >= units && total <= units + 8, "what was read came from memory");
        check!(local <= total, "local traffic is part of it");
        check_eq!(monitor(event::OCCUPANCY, 7), 0, "an RMID that was never associated");
        stream();
        check!(monitor(event::OCCUPANCY, 5) + 4 >= units, "hits leave lines with who filled them");
        check!(monitor(event::OCCUPANCY, 6) <= 4, "and give nothing to who hits");
        check_eq!(monitor(event::TOTAL, 5), total, "nothing more is charged to the first");
        associate(0, 0);
    }
}

case! {
    name: "masked", cpl: [0], rules: ["CAT-10", "CMT-08", "CMT-13"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "a class with one way fills no more than that",
    fn body(ctx) {
        need_rdt!(ctx);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 3, 1 << 4);
        associate(9, 3);
        stream();
        let held = monitor(event::OCCUPANCY, 9);
        check!(held <= WAY, "no more than one way");
        check!(held >= WAY / 2, "and most of that");
        associate(0, 0);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 3, 0x7ff);
        check_eq!(monitor(event::OCCUPANCY, 9), counter::UNAVAILABLE, "all set back: nobody keeps it");
    }
}

case! {
    name: "code_and_data_masks", cpl: [0], rules: ["CDP-03"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "with CDP the even mask of the pair keeps data, and the odd one does not",
    fn body(ctx) {
        need_rdt!(ctx);
        msr::write(reg::IA32_L3_QOS_CFG, rdt::CDP_ENABLE);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 4, 1);
        associate(10, 2);
        stream();
        check!(monitor(event::OCCUPANCY, 10) <= WAY + 4, "data in its one way");
        msr::write(reg::IA32_L3_QOS_MASK_0 + 4, 0x7ff);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 5, 1);
        associate(11, 2);
        for at in (PLACE + BYTES..PLACE + 2 * BYTES).step_by(64) {
            // SAFETY: as in `stream`.
            unsafe { (at as *const u8).read_volatile() };
        }
        check!(monitor(event::OCCUPANCY, 11) > 2 * WAY, "the mask for code does not keep data");
        associate(0, 0);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 5, 0x7ff);
        msr::write(reg::IA32_L3_QOS_CFG, 0);
    }
}
