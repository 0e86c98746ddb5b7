//! Converts between KVM's structures and [`CpuState`].

use hindsight_cpu::state::{CpuState, DescriptorTable, Segment, XSAVE_LEN, XsaveArea, seg};
use kvm_bindings::{
    KVM_SREGS2_FLAGS_PDPTRS_VALID, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs, kvm_sregs2,
    kvm_vcpu_events,
};

use crate::kvm::KvmDevice;

/// KVM_VCPUEVENT_VALID_NMI_PENDING, _SHADOW, and _PAYLOAD.
const VALID_NMI_PENDING: u32 = 1;
const VALID_SHADOW: u32 = 1 << 2;
const VALID_PAYLOAD: u32 = 1 << 4;
/// KVM_X86_SHADOW_INT_MOV_SS and _STI.
const SHADOW_MOV_SS: u8 = 1;
const SHADOW_STI: u8 = 2;

/// XSAVE components whose offset in the standard format differs between hosts, with their offset on
/// Intel: opmask, upper halves of ZMM0-15, ZMM16-31, PKRU.
const MOVING: [(u32, usize); 4] = [(5, 0x440), (6, 0x480), (7, 0x680), (9, 0xa80)];

/// Bytes of the legacy region that XSAVE never writes and that software may use. SDM Vol. 1,
/// "Legacy Region of an XSAVE Area".
const SOFTWARE: std::ops::Range<usize> = 464..512;

/// This host's XSAVE layout: of each component of [`MOVING`], Intel offset, host offset and bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct XsaveLayout([(usize, usize, usize); 4]);

impl XsaveLayout {
    /// The layout that CPUID leaf 0xd reports.
    pub(super) fn of_host(device: &KvmDevice) -> Self {
        Self(MOVING.map(|(component, intel)| {
            let [len, offset, ..] = device.supported_cpuid(0xd, component);
            let (len, offset) = (len as usize, offset as usize);
            // A component that the host lacks, or whose offset is out of range, is not copied.
            let fits = intel + len <= XSAVE_LEN && offset >= 576 && offset + len <= 4096;
            if fits {
                (intel, offset, len)
            } else {
                (intel, offset, 0)
            }
        }))
    }

    /// Converts KVM's 4-KiB image to Intel's layout.
    pub(super) fn import(&self, from: &[u8; 4096], area: &mut XsaveArea) {
        area.0.fill(0);
        let common = 0x240 + 0x100;
        area.0[..common].copy_from_slice(&from[..common]);
        // The kernel stores data of its own in the bytes that the format leaves to software.
        area.0[SOFTWARE].fill(0);
        for (intel, host, len) in self.0 {
            area.0[intel..intel + len].copy_from_slice(&from[host..host + len]);
        }
    }

    /// Converts an image of Intel's layout to KVM's.
    pub(super) fn export(&self, area: &XsaveArea) -> [u8; 4096] {
        let mut to = [0; 4096];
        let common = 0x240 + 0x100;
        to[..common].copy_from_slice(&area.0[..common]);
        for (intel, host, len) in self.0 {
            to[host..host + len].copy_from_slice(&area.0[intel..intel + len]);
        }
        to
    }
}

pub(super) fn import_regs(regs: &kvm_regs, state: &mut CpuState) {
    let r = regs;
    state.gpr = [
        r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12,
        r.r13, r.r14, r.r15,
    ];
    state.rip = r.rip;
    state.rflags = r.rflags;
}

pub(super) const fn export_regs(state: &CpuState) -> kvm_regs {
    let g = &state.gpr;
    kvm_regs {
        rax: g[0],
        rcx: g[1],
        rdx: g[2],
        rbx: g[3],
        rsp: g[4],
        rbp: g[5],
        rsi: g[6],
        rdi: g[7],
        r8: g[8],
        r9: g[9],
        r10: g[10],
        r11: g[11],
        r12: g[12],
        r13: g[13],
        r14: g[14],
        r15: g[15],
        rip: state.rip,
        rflags: state.rflags,
    }
}

fn import_segment(s: &kvm_segment) -> Segment {
    let bit = |value: u8, at: u32| u16::from(value & 1) << at;
    let access = u16::from(s.type_ & 0xf)
        | bit(s.s, 4)
        | u16::from(s.dpl & 3) << 5
        | bit(s.present, 7)
        | bit(s.avl, 12)
        | bit(s.l, 13)
        | bit(s.db, 14)
        | bit(s.g, 15);
    let unusable = s.unusable != 0;
    Segment {
        selector: s.selector,
        base: s.base,
        limit: s.limit,
        access,
        unusable,
    }
}

const fn export_segment(s: &Segment) -> kvm_segment {
    const fn field(access: u16, at: u32, mask: u16) -> u8 {
        ((access >> at) & mask).to_le_bytes()[0]
    }
    kvm_segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: field(s.access, 0, 0xf),
        s: field(s.access, 4, 1),
        dpl: field(s.access, 5, 3),
        present: field(s.access, 7, 1),
        avl: field(s.access, 12, 1),
        l: field(s.access, 13, 1),
        db: field(s.access, 14, 1),
        g: field(s.access, 15, 1),
        unusable: s.unusable as u8,
        padding: 0,
    }
}

pub(super) fn import_sregs(s: &kvm_sregs, state: &mut CpuState) {
    state.seg = [&s.es, &s.cs, &s.ss, &s.ds, &s.fs, &s.gs].map(import_segment);
    state.tr = import_segment(&s.tr);
    state.ldtr = import_segment(&s.ldt);
    state.gdtr = DescriptorTable {
        base: s.gdt.base,
        limit: s.gdt.limit,
    };
    state.idtr = DescriptorTable {
        base: s.idt.base,
        limit: s.idt.limit,
    };
    state.cr0 = s.cr0;
    state.cr2 = s.cr2;
    state.cr3 = s.cr3;
    state.cr4 = s.cr4;
    state.cr8 = s.cr8;
    state.efer = s.efer;
}

/// Converts the system registers. `apic_base` is the local APIC's, which `CpuState` does not hold.
pub(super) fn export_sregs(state: &CpuState, apic_base: u64) -> kvm_sregs {
    let table = |t: DescriptorTable| kvm_dtable {
        base: t.base,
        limit: t.limit,
        padding: [0; 3],
    };
    let segment = |i: usize| export_segment(&state.seg[i]);
    kvm_sregs {
        es: segment(seg::ES),
        cs: segment(seg::CS),
        ss: segment(seg::SS),
        ds: segment(seg::DS),
        fs: segment(seg::FS),
        gs: segment(seg::GS),
        tr: export_segment(&state.tr),
        ldt: export_segment(&state.ldtr),
        gdt: table(state.gdtr),
        idt: table(state.idtr),
        cr0: state.cr0,
        cr2: state.cr2,
        cr3: state.cr3,
        cr4: state.cr4,
        cr8: state.cr8,
        efer: state.efer,
        apic_base,
        interrupt_bitmap: [0; 4],
    }
}

/// Adds the page-directory pointers of `state` to the system registers.
pub(super) fn export_sregs2(s: &kvm_sregs, state: &CpuState) -> kvm_sregs2 {
    kvm_sregs2 {
        cs: s.cs,
        ds: s.ds,
        es: s.es,
        fs: s.fs,
        gs: s.gs,
        ss: s.ss,
        tr: s.tr,
        ldt: s.ldt,
        gdt: s.gdt,
        idt: s.idt,
        cr0: s.cr0,
        cr2: s.cr2,
        cr3: s.cr3,
        cr4: s.cr4,
        cr8: s.cr8,
        efer: s.efer,
        apic_base: s.apic_base,
        flags: u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID),
        pdptrs: state.pdptr,
    }
}

/// Whether [`CpuState`] can represent these events: see
/// [`crate::kvm::vcpu::KvmVcpuFd::is_movable`].
pub(super) const fn is_movable(e: &kvm_vcpu_events) -> bool {
    // Hosts differ on whether an injected NMI already blocks further NMIs. `CpuState` has only one
    // pending NMI, and lacks the instruction length of a software interrupt.
    let soft = e.interrupt.injected != 0 && e.interrupt.soft != 0;
    e.interrupt.shadow == 0 && e.nmi.injected == 0 && e.nmi.pending < 2 && !soft
}

pub(super) fn import_events(e: &kvm_vcpu_events, state: &mut CpuState) {
    let events = &mut state.events;
    *events = hindsight_cpu::state::PendingEvents::default();
    if e.exception.injected != 0 || e.exception.pending != 0 {
        events.exception = Some(hindsight_cpu::state::PendingException {
            vector: e.exception.nr,
            error_code: (e.exception.has_error_code != 0).then_some(e.exception.error_code),
            payload: (e.exception_has_payload != 0).then_some(e.exception_payload),
        });
    }
    events.interrupt = (e.interrupt.injected != 0).then_some(e.interrupt.nr);
    events.mov_ss_shadow = e.interrupt.shadow & SHADOW_MOV_SS != 0;
    events.sti_shadow = e.interrupt.shadow & SHADOW_STI != 0;
    events.nmi_pending = e.nmi.pending != 0 || e.nmi.injected != 0;
    events.nmi_blocked = e.nmi.masked != 0;
}

/// Converts the events. `has_payload`: KVM_CAP_EXCEPTION_PAYLOAD is enabled, so that an exception
/// with a payload is pending instead of injected, and KVM delivers the payload with it.
pub(super) fn export_events(state: &CpuState, has_payload: bool) -> kvm_vcpu_events {
    let mut e = kvm_vcpu_events {
        flags: VALID_NMI_PENDING | VALID_SHADOW,
        ..Default::default()
    };
    let events = &state.events;
    if let Some(exception) = events.exception {
        e.exception.nr = exception.vector;
        e.exception.has_error_code = u8::from(exception.error_code.is_some());
        e.exception.error_code = exception.error_code.unwrap_or(0);
        if has_payload && let Some(payload) = exception.payload {
            e.flags |= VALID_PAYLOAD;
            e.exception.pending = 1;
            e.exception_has_payload = 1;
            e.exception_payload = payload;
        } else {
            e.exception.injected = 1;
        }
    }
    if let Some(vector) = events.interrupt {
        e.interrupt.injected = 1;
        e.interrupt.nr = vector;
    }
    if events.mov_ss_shadow {
        e.interrupt.shadow |= SHADOW_MOV_SS;
    }
    if events.sti_shadow {
        e.interrupt.shadow |= SHADOW_STI;
    }
    e.nmi.pending = u8::from(events.nmi_pending);
    e.nmi.masked = u8::from(events.nmi_blocked);
    e
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_segments_and_events_survive_export_and_import() {
        let mut state = CpuState::reset();
        for (i, gpr) in (0..).zip(&mut state.gpr) {
            *gpr = 0x1000 + i;
        }
        state.seg[seg::CS].access = 0xaf9b & 0xf0ff;
        state.events.sti_shadow = true;
        state.events.nmi_blocked = true;
        state.events.interrupt = Some(0x31);
        let mut back = CpuState::reset();
        import_regs(&export_regs(&state), &mut back);
        import_sregs(&export_sregs(&state, 0), &mut back);
        import_events(&export_events(&state, false), &mut back);
        assert_eq!(back, state);
    }

    #[test]
    fn shadows_and_half_delivered_events_are_not_movable() {
        let none = kvm_vcpu_events::default();
        assert!(is_movable(&none));
        let change = |f: fn(&mut kvm_vcpu_events)| {
            let mut events = none;
            f(&mut events);
            is_movable(&events)
        };
        assert!(!change(|e| e.interrupt.shadow = SHADOW_STI));
        assert!(!change(|e| e.interrupt.shadow = SHADOW_MOV_SS));
        assert!(!change(|e| e.nmi.injected = 1));
        assert!(!change(|e| e.nmi.pending = 2));
        assert!(!change(
            |e| (e.interrupt.injected, e.interrupt.soft) = (1, 1)
        ));
        // The other engine can deliver these.
        assert!(change(|e| e.interrupt.injected = 1));
        assert!(change(|e| e.exception.injected = 1));
        assert!(change(|e| (e.nmi.pending, e.nmi.masked) = (1, 1)));
    }

    #[test]
    fn xsave_layout_converts_between_host_and_intel_offsets() {
        let amd = XsaveLayout([
            (0x440, 0x340, 0x40),
            (0x480, 0x380, 0x200),
            (0x680, 0x580, 0x400),
            (0xa80, 0x980, 8),
        ]);
        let mut area = XsaveArea::default();
        area.0[0x440] = 1;
        area.0[0x480] = 2;
        area.0[0x680] = 3;
        area.0[0xa80] = 4;
        let image = amd.export(&area);
        assert_eq!(
            [image[0x340], image[0x380], image[0x580], image[0x980]],
            [1, 2, 3, 4]
        );
        let mut back = XsaveArea::default();
        amd.import(&image, &mut back);
        assert_eq!(back, area);
        // The bytes left to software are not part of the processor's state.
        let mut with_software_bytes = image;
        with_software_bytes[464] = 7;
        amd.import(&with_software_bytes, &mut back);
        assert_eq!(back, area);
    }
}
