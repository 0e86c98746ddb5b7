//! MSR numbers, under the manual's names. SDM Vol. 4, "Model-Specific Registers (MSRs)".

/// Time-stamp counter.
pub const IA32_TIME_STAMP_COUNTER: u32 = 0x10;
/// Platform ID.
pub const IA32_PLATFORM_ID: u32 = 0x17;
/// Base address, mode and enable of the local APIC: [`crate::apic::ApicBase`].
pub const IA32_APIC_BASE: u32 = 0x1b;
/// Number of system-management interrupts since reset.
pub const MSR_SMI_COUNT: u32 = 0x34;
/// Lock and enables of VMX, SGX and others.
pub const IA32_FEATURE_CONTROL: u32 = 0x3a;
/// Sum of all software adjustments of the TSC.
pub const IA32_TSC_ADJUST: u32 = 0x3b;
/// Source of LBR entry 0 of Core 2; three more follow.
pub const CORE_LASTBRANCH_0_FROM_IP: u32 = 0x40;
/// Speculation control.
pub const IA32_SPEC_CTRL: u32 = 0x48;
/// Prediction command: IBPB.
pub const IA32_PRED_CMD: u32 = 0x49;
/// Lock and enable of the protected processor inventory number.
pub const MSR_PPIN_CTL: u32 = 0x4e;
/// Target of LBR entry 0 of Core 2; three more follow.
pub const CORE_LASTBRANCH_0_TO_IP: u32 = 0x60;
/// Microcode revision, in bits 63:32.
pub const IA32_BIOS_SIGN_ID: u32 = 0x8b;
/// General-purpose counter 0, written with 32 bits and sign extension; seven more follow.
pub const IA32_PMC0: u32 = 0xc1;
/// Platform information: the maximum non-turbo ratio in bits 15:8.
pub const MSR_PLATFORM_INFO: u32 = 0xce;
/// Limit and lock of the package C-states.
pub const MSR_PKG_CST_CONFIG_CONTROL: u32 = 0xe2;
/// MTRR capabilities.
pub const IA32_MTRRCAP: u32 = 0xfe;
/// Known flaws that the processor lacks: [`crate::capabilities::ArchCapabilities`].
pub const IA32_ARCH_CAPABILITIES: u32 = 0x10a;
/// Flush command: L1D_FLUSH.
pub const IA32_FLUSH_CMD: u32 = 0x10b;
/// CPUID faulting and other features.
pub const MSR_MISC_FEATURES_ENABLES: u32 = 0x140;
/// CS selector of SYSENTER.
pub const IA32_SYSENTER_CS: u32 = 0x174;
/// RSP of SYSENTER.
pub const IA32_SYSENTER_ESP: u32 = 0x175;
/// RIP of SYSENTER.
pub const IA32_SYSENTER_EIP: u32 = 0x176;
/// Machine-check capabilities.
pub const IA32_MCG_CAP: u32 = 0x179;
/// Machine-check status.
pub const IA32_MCG_STATUS: u32 = 0x17a;
/// Event selection of counter 0: [`crate::pmu::EventSelect`]; seven more follow.
pub const IA32_PERFEVTSEL0: u32 = 0x186;
/// The current ratio to 100 MHz, in bits 15:8.
pub const IA32_PERF_STATUS: u32 = 0x198;
/// The requested ratio to 100 MHz, in bits 15:8.
pub const IA32_PERF_CTL: u32 = 0x199;
/// Duty cycle of the clock.
pub const IA32_CLOCK_MODULATION: u32 = 0x19a;
/// Enables of thermal interrupts.
pub const IA32_THERM_INTERRUPT: u32 = 0x19b;
/// Thermal status and temperature.
pub const IA32_THERM_STATUS: u32 = 0x19c;
/// Miscellaneous processor features: [`crate::capabilities::MiscEnable`].
pub const IA32_MISC_ENABLE: u32 = 0x1a0;
/// The temperature in degrees Celsius at which the processor throttles, in bits 23:16.
pub const MSR_TEMPERATURE_TARGET: u32 = 0x1a2;
/// Off-core response event 0.
pub const MSR_OFFCORE_RSP_0: u32 = 0x1a6;
/// Off-core response event 1.
pub const MSR_OFFCORE_RSP_1: u32 = 0x1a7;
/// Power management across the cores.
pub const MSR_MISC_PWR_MGMT: u32 = 0x1aa;
/// The highest turbo ratio for each number of active cores, in one byte each.
pub const MSR_TURBO_RATIO_LIMIT: u32 = 0x1ad;
/// The numbers of active cores of [`MSR_TURBO_RATIO_LIMIT`], in one byte each.
pub const MSR_TURBO_RATIO_LIMIT_CORES: u32 = 0x1ae;
/// Filter of the LBR stack: [`crate::branch::LbrSelect`].
pub const MSR_LBR_SELECT: u32 = 0x1c8;
/// Index of the newest LBR entry: [`crate::branch::LBR_TOS_MASK`].
pub const MSR_LASTBRANCH_TOS: u32 = 0x1c9;
/// Branch recording, tracing and freezing: [`crate::branch::DebugCtl`].
pub const IA32_DEBUGCTL: u32 = 0x1d9;
/// Source of the last branch before the last exception or interrupt.
pub const MSR_LER_FROM_LIP: u32 = 0x1dd;
/// Target of the last branch before the last exception or interrupt.
pub const MSR_LER_TO_LIP: u32 = 0x1de;
/// Flags and cycles of the last branch before the last exception or interrupt, with architectural LBR.
pub const IA32_LER_INFO: u32 = 0x1e0;
/// C1E and other power management.
pub const MSR_POWER_CTL: u32 = 0x1fc;
/// Base of variable range 0; masks and bases of eight ranges alternate.
pub const IA32_MTRR_PHYSBASE0: u32 = 0x200;
/// Memory types of 00000H to 7FFFFH.
pub const IA32_MTRR_FIX64K_00000: u32 = 0x250;
/// Memory types of 80000H to 9FFFFH.
pub const IA32_MTRR_FIX16K_80000: u32 = 0x258;
/// Memory types of A0000H to BFFFFH.
pub const IA32_MTRR_FIX16K_A0000: u32 = 0x259;
/// Memory types of C0000H to C7FFFH; seven more follow.
pub const IA32_MTRR_FIX4K_C0000: u32 = 0x268;
/// Page attribute table.
pub const IA32_PAT: u32 = 0x277;
/// MTRR enables and default memory type.
pub const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
/// Fixed counter 0; three more follow.
pub const IA32_FIXED_CTR0: u32 = 0x309;
/// Fractions of the slots that fixed counter 3 counts: [`crate::pmu::Metrics`].
pub const MSR_PERF_METRICS: u32 = 0x329;
/// Capabilities of the PMU: [`crate::capabilities::perf`].
pub const IA32_PERF_CAPABILITIES: u32 = 0x345;
/// Control of the fixed counters: [`crate::pmu::FixedControl`].
pub const IA32_FIXED_CTR_CTRL: u32 = 0x38d;
/// Overflow and freeze status: [`crate::pmu::global`].
pub const IA32_PERF_GLOBAL_STATUS: u32 = 0x38e;
/// Enables of all counters: [`crate::pmu::global`].
pub const IA32_PERF_GLOBAL_CTRL: u32 = 0x38f;
/// Clears bits of IA32_PERF_GLOBAL_STATUS.
pub const IA32_PERF_GLOBAL_STATUS_RESET: u32 = 0x390;
/// Sets bits of IA32_PERF_GLOBAL_STATUS.
pub const IA32_PERF_GLOBAL_STATUS_SET: u32 = 0x391;
/// Counters and interrupts in use.
pub const IA32_PERF_GLOBAL_INUSE: u32 = 0x392;
/// Counters that take PEBS records.
pub const IA32_PEBS_ENABLE: u32 = 0x3f1;
/// Groups of an adaptive PEBS record: [`crate::pmu::pebs::DataConfig`].
pub const MSR_PEBS_DATA_CFG: u32 = 0x3f2;
/// Latency in core cycles above which a load counts as late.
pub const MSR_PEBS_LD_LAT_THRESHOLD: u32 = 0x3f6;
/// Front-end event selection.
pub const MSR_PEBS_FRONTEND: u32 = 0x3f7;
/// Time in package C-state C3; those of C6 and C7 follow.
pub const MSR_PKG_C3_RESIDENCY: u32 = 0x3f8;
/// Time in core C-state C3; those of C6 and C7 follow.
pub const MSR_CORE_C3_RESIDENCY: u32 = 0x3fc;
/// General-purpose counter 0, written in full width; seven more follow.
pub const IA32_A_PMC0: u32 = 0x4c1;
/// Linear address of the DS management area.
pub const IA32_DS_AREA: u32 = 0x600;
/// Time in package C-state C2.
pub const MSR_PKG_C2_RESIDENCY: u32 = 0x60d;
/// Time in core C-state C1.
pub const MSR_CORE_C1_RESIDENCY: u32 = 0x660;
/// Source of LBR entry 0, from Nehalem on; 31 more follow.
pub const MSR_LASTBRANCH_0_FROM_IP: u32 = 0x680;
/// Target of LBR entry 0, from Nehalem on; 31 more follow.
pub const MSR_LASTBRANCH_0_TO_IP: u32 = 0x6c0;
/// TSC value at which the local APIC timer fires.
pub const IA32_TSC_DEADLINE: u32 = 0x6e0;
/// First of the x2APIC registers: [`crate::apic::ApicRegister::x2apic_msr`].
pub const IA32_X2APIC_BASE: u32 = 0x800;
/// L3 code and data prioritization.
pub const IA32_L3_QOS_CFG: u32 = 0xc81;
/// L2 code and data prioritization.
pub const IA32_L2_QOS_CFG: u32 = 0xc82;
/// Event and RMID to monitor: [`crate::rdt::QmEventSelect`].
pub const IA32_QM_EVTSEL: u32 = 0xc8d;
/// Value of the monitored event: [`crate::rdt::counter`].
pub const IA32_QM_CTR: u32 = 0xc8e;
/// RMID and class of service: [`crate::rdt::Association`].
pub const IA32_PQR_ASSOC: u32 = 0xc8f;
/// L3 capacity mask of class 0; 15 more follow.
pub const IA32_L3_QOS_MASK_0: u32 = 0xc90;
/// L2 capacity mask of class 0; seven more follow.
pub const IA32_L2_QOS_MASK_0: u32 = 0xd10;
/// Memory bandwidth delay of class 0, in percent; seven more follow.
pub const IA32_L2_QOS_EXT_BW_THRTL_0: u32 = 0xd50;
/// Supervisor components of XSAVES.
pub const IA32_XSS: u32 = 0xda0;
/// Flags and cycles of LBR entry 0: [`crate::branch::LbrInfo`]; 31 more follow.
pub const MSR_LBR_INFO_0: u32 = 0xdc0;
/// Flags, type and cycles of the newest architectural LBR entry: [`crate::branch::LbrInfo`]; 31 more follow.
pub const IA32_LBR_0_INFO: u32 = 0x1200;
/// Enable and filter of architectural LBR: [`crate::branch::LbrCtl`].
pub const IA32_LBR_CTL: u32 = 0x14ce;
/// Number of architectural LBR entries.
pub const IA32_LBR_DEPTH: u32 = 0x14cf;
/// Source of the newest architectural LBR entry; 31 more follow.
pub const IA32_LBR_0_FROM_IP: u32 = 0x1500;
/// Target of the newest architectural LBR entry; 31 more follow.
pub const IA32_LBR_0_TO_IP: u32 = 0x1600;
/// Extended features: [`crate::cr::Efer`].
pub const IA32_EFER: u32 = 0xc000_0080;
/// Selectors of SYSCALL and SYSRET.
pub const IA32_STAR: u32 = 0xc000_0081;
/// RIP of SYSCALL in 64-bit mode.
pub const IA32_LSTAR: u32 = 0xc000_0082;
/// RIP of SYSCALL in compatibility mode; unused by Intel processors.
pub const IA32_CSTAR: u32 = 0xc000_0083;
/// RFLAGS bits that SYSCALL clears.
pub const IA32_FMASK: u32 = 0xc000_0084;
/// Base of FS.
pub const IA32_FS_BASE: u32 = 0xc000_0100;
/// Base of GS.
pub const IA32_GS_BASE: u32 = 0xc000_0101;
/// Base that SWAPGS exchanges with that of GS.
pub const IA32_KERNEL_GS_BASE: u32 = 0xc000_0102;
/// Value that RDTSCP and RDPID give.
pub const IA32_TSC_AUX: u32 = 0xc000_0103;
