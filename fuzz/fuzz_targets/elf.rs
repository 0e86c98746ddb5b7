//! Plain ELF and PVH images; both go through the same parser.
#![no_main]

use hindsight_fuzz::check;
use hindsight_vmm::boot::{LoadRequest, Protocol};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|image: &[u8]| {
    for protocol in [Protocol::Elf, Protocol::Pvh] {
        check(&LoadRequest {
            image,
            protocol: Some(protocol),
            initrd: Some(&[0xab; 0x1800]),
            cmdline: b"quiet".to_vec(),
            ..LoadRequest::default()
        });
    }
});
