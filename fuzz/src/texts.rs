//! The parsers of texts that a user may have from others.

use hindsight_cpu::facility::Facilities;
use hindsight_cpu::profile::CpuProfile;
use hindsight_vmm::cli::config;
use hindsight_vmm::deterministic::input::InputLog;

/// Parses `text` as an input log, a profile, or a configuration, as `kind` says.
pub fn check(kind: u8, text: &str) {
    match kind % 4 {
        0 => check_log(text),
        1 => check_profile(CpuProfile::from_toml(text).ok()),
        2 => check_profile(text.parse().ok()),
        _ => {
            // What a file says can be written as a file with the same meaning.
            if let Ok(read) = config::parse_text(text)
                && let Ok(written) = config::dump(&read)
            {
                let again = config::parse_text(&written).expect("a written file is valid");
                let again = config::dump(&again).expect("it was written before");
                assert_eq!(again, written);
            }
        }
    }
}

fn check_log(text: &str) {
    let Ok(log) = text.parse::<InputLog>() else {
        return;
    };
    let mut written = format!("hindsight-input 1 {}\n", log.machine);
    for input in &log.inputs {
        written += &format!("{input}\n");
    }
    assert_eq!(written.parse(), Ok(log));
}

fn check_profile(profile: Option<CpuProfile>) {
    let Some(profile) = profile else { return };
    let _ = profile.facilities(Facilities::all());
    let _ = profile.facilities(Facilities::empty());
    let written = profile.to_string();
    let again: CpuProfile = written.parse().expect("a written profile is valid");
    assert_eq!(again.to_string(), written);
}
