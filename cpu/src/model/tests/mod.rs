mod generations;

use hindsight_regs::msr as regs;

use super::*;
use crate::facility::Facilities;

const DEFAULT: &str = include_str!("../../../models/skylake-server.toml");

#[test]
fn every_model_has_a_file_and_a_name_of_its_own() {
    for model in CpuModel::all() {
        assert!(!model.definition().events.is_empty(), "{model}");
        assert_eq!(CpuModel::from_name(model.name()), Some(model));
    }
    assert_eq!(CpuModel::all().next(), Some(CpuModel::default()));
    assert_eq!(CpuModel::from_name("skylake-servers"), None);
}

#[test]
fn model_file_with_a_mistake_is_refused_in_one_line() {
    let rows = [
        ("family = 6", "", "missing field `family`"),
        ("family = 6", "family = 15", "family = 15 is not 6"),
        ("family = 6", "famly = 6", "line 3: unknown field `famly`"),
        ("depth = 32", "width = 32", "unknown field `width`"),
        (
            "depth = 32",
            "depth = 8",
            "lbr.depth = 8 is not 4, 16 or 32",
        ),
        (
            "depth = 32",
            "depth = 16",
            "LBR formats 5 and 63 and 32 entries go together",
        ),
        (
            "format = 5",
            "format = 4",
            "LBR formats 5 and 63 and 32 entries go together",
        ),
        (
            "tsx-flags = true",
            "tsx-flags = false",
            "tsx-flags go with LBR formats 4, 5 and 63",
        ),
        (
            "version = 4",
            "version = 6",
            "perfmon.version = 6 is not 2 to 5",
        ),
        (
            "depth = 32",
            "depth = 32\nselect = false",
            "call-stack mode needs MSR_LBR_SELECT",
        ),
        (
            "[pebs]\nformat = 3",
            "[pebs]\nformat = 0",
            "PEBS format 0 and records of one counter go together",
        ),
        (
            "counter-bits = 48",
            "counter-bits = 44",
            "perfmon.counter-bits = 44 is not 40 or 48",
        ),
        (
            "counter-bits = 48",
            "counters = 3\ncounter-bits = 48",
            "perfmon.counters = 3 is not 2 or 4",
        ),
        (
            "counter-bits = 48",
            "counters = 2\ncounter-bits = 48",
            "precise stores and pmu=8 need four counters",
        ),
        ("max-leaf = 0x16", "max-leaf = 0xb", "xsave needs leaf 0xd"),
        (
            "max-leaf = 0x16",
            "max-leaf = 0xd",
            "resource control needs leaf 0x10",
        ),
        ("\"avx2\", ", "", "feature `avx512f` needs `avx2`"),
        ("\"aes\",", "\"vaes\",", "feature `vaes` needs `aes`"),
        (
            "\"avx512bw\",",
            "\"avx512vbmi\",",
            "feature `avx512vbmi` needs `avx512bw`",
        ),
        ("\"avx2\"", "\"avx3\"", "no feature `avx3`"),
        ("\"avx2\"", "\"avx\"", "feature `avx` is named twice"),
        ("\"bts\"", "\"bst\"", "no facility `bst`"),
        (
            "\"bts\"",
            "\"rtm\"",
            "a facility is both present and an option",
        ),
        (
            "[0xc4, 0x01]",
            "[0xc4, 0x00]",
            "event `BR_INST_RETIRED.CONDITIONAL` is named twice",
        ),
        ("[\"far\"]", "[\"near\"]", "unknown variant `near`"),
    ];
    for (part, replacement, expected) in rows {
        assert!(DEFAULT.contains(part), "{part}");
        let text = DEFAULT.replacen(part, replacement, 1);
        let line = ModelDefinition::from_toml(&text).unwrap_err().to_string();
        assert!(line.contains(expected) && !line.contains('\n'), "{line}");
    }
}

#[test]
fn model_file_can_name_the_vector_extensions_after_avx512vl() {
    // CPUID.7.0, EBX and ECX.
    let rows = [
        ("avx512ifma", 1 << 21, 0),
        ("sha", 1 << 29, 0),
        ("avx512vbmi", 0, 1 << 1),
        ("avx512vbmi2", 0, 1 << 6),
        ("gfni", 0, 1 << 8),
        ("vaes", 0, 1 << 9),
        ("vpclmulqdq", 0, 1 << 10),
        ("avx512bitalg", 0, 1 << 12),
        ("avx512vpopcntdq", 0, 1 << 14),
        ("rdpid", 0, 1 << 22),
    ];
    let words = [FeatureWord::Leaf7Ebx, FeatureWord::Leaf7Ecx];
    let old = ModelDefinition::from_toml(DEFAULT).unwrap().features;
    for (name, ebx, ecx) in rows {
        let text = DEFAULT.replacen("\"avx512vl\",", &format!("\"avx512vl\", \"{name}\","), 1);
        let new = ModelDefinition::from_toml(&text).unwrap().features;
        assert!(new.has(name) && !old.has(name), "{name}");
        let added = words.map(|word| old.word(word) ^ new.word(word));
        assert_eq!(added, [ebx, ecx], "{name}");
    }
}

#[test]
fn msr_row_removes_registers_or_limits_their_bits() {
    let with = |rows: &str| ModelDefinition::from_toml(&format!("{DEFAULT}\n{rows}"));
    let row = |rest: &str| with(&format!("[[msr]]\nname = \"MSR_LBR_INFO_x\"\n{rest}"));
    let some = row("from = 16\n").unwrap();
    assert!(!some.lacks_msr(regs::MSR_LBR_INFO_0 + 15));
    assert!(some.lacks_msr(regs::MSR_LBR_INFO_0 + 16));
    let limited = row("writable = 0xff\n").unwrap();
    assert_eq!(limited.writable_bits(regs::MSR_LBR_INFO_0 + 31), Some(0xff));
    assert_eq!(limited.writable_bits(regs::MSR_LBR_INFO_0 + 32), None);
    let missing = with("[[msr]]\nname = \"MSR_LBR_INFO\"\n").unwrap_err();
    assert_eq!(missing.to_string(), "no MSR `MSR_LBR_INFO`");
    let beyond = row("from = 32\n").unwrap_err().to_string();
    assert_eq!(
        beyond,
        "msr.from = 32 is not below the number of MSRs of the name"
    );
    let twice = row("\n[[msr]]\nname = \"MSR_LBR_INFO_x\"\nfrom = 1\n").unwrap_err();
    assert_eq!(twice.to_string(), "an MSR has two rows");
}

#[test]
fn default_model_has_the_register_values_of_the_processor() {
    let model = CpuModel::SkylakeServer.definition();
    assert_eq!(model.identity(), (6, 0x55, 4));
    let all = Facilities::all();
    assert_eq!(model.perf_capabilities(all), Some(0x33c5));
    let without_pebs = all.difference(Facilities::PEBS);
    assert_eq!(model.perf_capabilities(without_pebs), Some(0x3005));
    assert_eq!(model.perf_capabilities(Facilities::KVM), None);
    assert_eq!(model.facilities, Facilities::INTERP_DEFAULT);
    assert_eq!(model.facilities | model.options, Facilities::INTERP);
}
